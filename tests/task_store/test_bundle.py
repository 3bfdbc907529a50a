"""Bundles: what is written, what is read back, and what is refused."""

import dataclasses
import errno
import hashlib
import json
import os
import re
import tracemalloc

import numpy as np
import pytest
import safetensors
import safetensors.numpy
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

import task_store
from task_store import (
    BundleError,
    IncompatibleBundle,
    Limits,
    MalformedBundle,
    Manifest,
    TaskBundle,
    UnreadableBundle,
    check_compatible,
    errors,
)
from task_store.codec import encode
from tests.bundles import FINGERPRINT, OTHER_FINGERPRINT, PREPROCESSING, bundle, manifest
from tests.task_store import hostile
from tests.task_store.conftest import listing

ARRAYS = tuple(field.name for field in dataclasses.fields(TaskBundle) if field.name[0] != "_")[1:]
KNOWN = {"known": {"threshold": 2.5}}


def examples(count: int, *, classes: int = 3, width: int = 4) -> dict[str, np.ndarray]:
    random = np.random.default_rng(0)
    digests = sorted(random.bytes(32) for _ in range(count))
    return {
        "examples_features": random.standard_normal((count, width)).astype(np.float16),
        "examples_labels": np.eye(classes, dtype=np.uint8)[np.arange(count) % classes],
        "examples_digests": np.frombuffer(b"".join(digests), np.uint8).reshape(count, 32),
    }


def same(a: TaskBundle, b: TaskBundle) -> bool:
    return a.manifest == b.manifest and all(
        np.array_equal(getattr(a, name), getattr(b, name))
        if getattr(a, name) is not None
        else getattr(b, name) is None
        for name in ARRAYS
    )


def test_saved_bundle_is_loaded_unchanged(tmp_path):
    made = bundle(1, golden=2, description="naïve 猫", metrics={"top1": 0.5}, license="MIT")
    loaded = TaskBundle.load(made.save(tmp_path / "b.safetensors"))
    assert same(made, loaded)
    assert made == loaded
    assert hash(made) == hash(loaded)
    assert os.listdir(tmp_path) == ["b.safetensors"], "no staging file is left"


def test_writing_twice_gives_the_same_bytes_and_digest_is_their_hash():
    one, two = bundle(1, golden=2), bundle(1, golden=2)
    assert one.to_bytes() == two.to_bytes()
    assert one.digest == "sha256:" + hashlib.sha256(one.to_bytes()).hexdigest()
    assert one.size_bytes == len(one.to_bytes())
    assert one != bundle(2, golden=2)
    assert one != "something else"


def test_safetensors_library_reads_what_we_write(tmp_path):
    made = bundle(1, golden=2)
    path = made.save(tmp_path / "b.safetensors")
    with safetensors.safe_open(path, framework="numpy") as file:
        assert set(file.keys()) == {
            "head.weight", "head.bias", "class_token", "memory", "golden.pixels", "golden.logits"
        }  # fmt: skip
        assert list(file.metadata()) == ["engram"]
        assert np.array_equal(file.get_tensor("memory"), made.memory)


def test_we_read_what_the_safetensors_library_writes():
    made = bundle(1)
    tensors = {"head.weight": made.head_weight, "class_token": made.class_token}
    data = safetensors.numpy.save(tensors, {"engram": made.manifest.to_json()})
    loaded = TaskBundle.from_bytes(data)
    assert np.array_equal(loaded.class_token, made.class_token)
    assert loaded.digest == "sha256:" + hashlib.sha256(data).hexdigest(), "of that file, not ours"
    assert loaded.to_bytes() == data


def test_changed_copy_of_a_loaded_bundle_is_another_bundle():
    loaded = TaskBundle.from_bytes(bundle(1).to_bytes())
    changed = dataclasses.replace(loaded, manifest=manifest(description="changed"))
    assert changed.digest != loaded.digest
    assert TaskBundle.from_bytes(changed.to_bytes()).manifest.description == "changed"


def test_properties_are_what_the_model_asks_for():
    names = ("cat", "dog", "eel")
    made = bundle(1, placement="post_norm", extends=("sha256:" + "0" * 64,), labels=names)
    assert (made.placement, made.extends) == ("post_norm", ("sha256:" + "0" * 64,))
    assert (made.backbone_fingerprint, made.problem) == (FINGERPRINT, "single_label")
    assert made.labels == names
    assert (made.classes, made.width, made.memory_tokens) == (3, 4, 2)


def test_arrays_are_float32_read_only_and_not_the_callers():
    mine = np.ones((3, 4), dtype=np.float64)
    made = TaskBundle(manifest(), mine)
    mine[0, 0] = 7
    assert made.head_weight[0, 0] == 1
    for each in (made, TaskBundle.from_bytes(made.to_bytes())):
        assert each.head_weight.dtype == np.float32
        with pytest.raises(ValueError, match="read-only"):
            each.head_weight[0, 0] = 2


def test_no_memory_tokens_is_no_memory():
    empty = TaskBundle(
        manifest(), np.ones((3, 4)), class_token=np.ones(4), memory=np.ones((2, 0, 4))
    )
    assert empty.memory is None
    assert b'"memory"' not in empty.to_bytes()
    assert TaskBundle.from_bytes(hostile.FINE).memory_tokens == 0


def test_half_precision_is_read_and_written_exactly():
    made = bundle(1)
    half = TaskBundle.from_bytes(made.to_bytes(dtype="F16"))
    assert half.memory.dtype == np.float32
    assert np.array_equal(half.memory, made.memory.astype(np.float16).astype(np.float32))
    assert half.size_bytes < made.size_bytes
    assert half.to_bytes(dtype="F16") == half.to_bytes()


def test_half_precision_that_would_spoil_golden_logits_is_refused():
    with pytest.raises(MalformedBundle, match="round first"):
        bundle(1, golden=2).to_bytes(dtype="F16")
    exact = TaskBundle(
        manifest(),
        np.ones((3, 4)),
        golden_pixels=np.zeros((1, 4, 4, 3), np.uint8),
        golden_logits=np.full((1, 3), 1 / 3),
    )
    loaded = TaskBundle.from_bytes(exact.to_bytes(dtype="F16"))
    assert np.array_equal(loaded.golden_logits, exact.golden_logits)


def test_half_precision_overflow_is_refused():
    with pytest.raises(MalformedBundle, match="too large for F16"):
        TaskBundle(manifest(), np.full((3, 4), 1e5)).to_bytes(dtype="F16")


def test_bfloat16_is_widened_exactly():
    values = np.array([[1.0, -2.5, 0.0, 3.140625]] * 3, dtype=np.float32)
    stored = (values.view(np.uint32) >> 16).astype("<u2")
    data = encode({"head.weight": stored.view(np.float16)}, {"engram": manifest().to_json()})
    loaded = TaskBundle.from_bytes(data.replace(b'"F16"', b'"BF16"').replace(b"}   ", b"}  ", 1))
    assert np.array_equal(loaded.head_weight, values)


@pytest.mark.parametrize("name", hostile.FILES)
def test_hostile_file_gives_one_clear_sentence_and_leaves_no_trace(name, open_memory):
    data, says = hostile.FILES[name]
    store = open_memory()
    with pytest.raises(MalformedBundle, match=says) as error:
        store.publish("victim", data)
    message = str(error.value)
    assert message.endswith((".", "?"))
    assert "\n" not in message
    assert len(message) < 400
    assert listing(store) == {}


def test_file_cut_anywhere_is_refused():
    whole = hostile.WHOLE
    for end in range(len(whole)):
        with pytest.raises(MalformedBundle):
            TaskBundle.from_bytes(whole[:end])


@settings(max_examples=400)
@given(st.data())
def test_mutated_file_loads_or_is_malformed_and_never_anything_else(data):
    changed = bytearray(hostile.WHOLE)
    for _ in range(data.draw(st.integers(1, 6))):
        position = data.draw(st.integers(0, len(changed) - 1))
        action = data.draw(st.sampled_from(["set", "insert", "delete"]))
        if action == "set":
            changed[position] = data.draw(st.integers(0, 255))
        elif action == "insert":
            changed[position:position] = data.draw(st.binary(min_size=1, max_size=9))
        else:
            del changed[position : position + data.draw(st.integers(1, 9))]
    try:
        loaded = TaskBundle.from_bytes(bytes(changed))
    except MalformedBundle:
        return
    assert loaded.to_bytes() == bytes(changed)


@settings(max_examples=200)
@given(st.binary(max_size=400))
def test_arbitrary_bytes_are_malformed(data):
    with pytest.raises(MalformedBundle):
        TaskBundle.from_bytes(data)


TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.floats(allow_nan=False,
        allow_infinity=False) | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=8,
)  # fmt: skip


@st.composite
def any_bundle(draw):
    classes, width = draw(st.integers(1, 4)), draw(st.integers(1, 5))
    layers, tokens, golden = (
        draw(st.integers(1, 3)),
        draw(st.integers(0, 3)),
        draw(st.integers(0, 2)),
    )
    problem = draw(st.sampled_from(["single_label", "multi_label", "regression", "embedding"]))
    named = problem.endswith("label") or draw(st.booleans())
    token = draw(st.booleans())
    floats = st.floats(width=32, allow_nan=False, allow_infinity=False)

    def array(*shape):
        return draw(arrays.arrays(np.float32, shape, elements=floats))

    return TaskBundle(
        manifest=manifest(
            problem=problem,
            labels=[draw(TEXT.filter(bool)) for _ in range(classes)] if named else [],
            description=draw(TEXT),
            placement=draw(st.sampled_from(["pre_norm", "post_norm"])),
            metrics=draw(st.dictionaries(TEXT, floats, max_size=3)),
            training=draw(st.dictionaries(TEXT, JSON, max_size=3)),
            license=draw(st.none() | TEXT),
            created=draw(st.none() | st.just("2025-01-31T12:00:00.5+01:00")),
            extends=["sha256:" + "e" * 64] if token and draw(st.booleans()) else [],
        ),
        head_weight=array(classes, width),
        head_bias=array(classes) if draw(st.booleans()) else None,
        class_token=array(width) if token else None,
        memory=array(layers, tokens, width) if token else None,
        golden_pixels=np.zeros((golden, 2, 3, 3), np.uint8) if golden else None,
        golden_logits=array(golden, classes) if golden else None,
    )  # fmt: skip


@settings(max_examples=100)
@given(any_bundle())
def test_any_bundle_survives_the_round_trip(made):
    loaded = TaskBundle.from_bytes(made.to_bytes())
    assert same(made, loaded)
    assert loaded.digest == made.digest
    assert loaded.to_bytes(dtype="F32") == made.to_bytes(), "our own layout is reproduced"


def test_examples_and_what_a_task_knows_are_kept_in_half_precision(tmp_path):
    made = TaskBundle(
        manifest=manifest(temperature=1.5, **KNOWN),
        head_weight=np.full((3, 4), 1 / 3),
        known_means=np.ones((3, 4)),
        known_axes=np.full((2, 4), 0.5),
        golden_pixels=np.zeros((1, 3, 3, 3), np.uint8),
        golden_logits=np.zeros((1, 3)),
        **examples(5),
    )
    loaded = TaskBundle.load(made.save(tmp_path / "b.safetensors"))
    assert same(made, loaded)
    assert loaded.manifest.temperature == 1.5
    for name in ("known_means", "known_axes", "examples_features"):
        assert getattr(loaded, name).dtype == np.float16
    stored = safetensors.numpy.load_file(tmp_path / "b.safetensors")
    assert np.array_equal(stored["examples.features"], made.examples_features)
    assert np.array_equal(stored["examples.digests"], made.examples_digests)
    assert stored["head.weight"].dtype == np.float32


def test_bundles_without_examples_are_written_as_before():
    made = bundle(1, golden=2, description="long", metrics={"top1": 1.0})
    assert made.digest == "sha256:fe35694b96e85908423f855c4243e5a3602c4c8d064b1d73d1610e93d6d32fcf"


def one_hot_twice() -> dict[str, np.ndarray]:
    made = examples(2)
    return made | {"examples_labels": np.ones((2, 3), np.uint8)}


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        (examples(2) | {"examples_features": None}, "come together"),
        (examples(2) | {"examples_labels": np.full((2, 3), 2, np.uint8)}, "other than 0 and 1"),
        (one_hot_twice(), "one label for each photo"),
        (examples(2) | {"examples_digests": np.zeros((2, 32), np.uint8)}, "ascending"),
        (examples(2) | {"examples_features": np.full((2, 4), 1e9)}, "not finite"),
        (examples(2) | {"examples_labels": np.ones((2, 3))}, "must be uint8"),
        (examples(2) | {"manifest": manifest(problem="regression")}, "has no examples"),
        ({"known_means": np.ones((1, 4)), "known_axes": np.ones((1, 4))}, "come together"),
        ({"manifest": manifest(**KNOWN)}, "come together"),
        ({"known_means": np.ones((1, 4)), "manifest": manifest(**KNOWN)}, "come together"),
    ],
)  # fmt: skip
def test_examples_that_contradict_the_task_cannot_be_made(changes, says):
    with pytest.raises(MalformedBundle, match=says):
        TaskBundle(**({"manifest": manifest(), "head_weight": np.ones((3, 4))} | changes))


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"head_weight": np.ones(4)}, r"must be \[K, D\]"),
        ({"head_weight": [["a"]]}, "not an array of numbers"),
        ({"head_weight": np.full((3, 4), np.nan)}, "not finite"),
        ({"head_weight": np.full((3, 4), 1e300)}, "not finite"),
        ({"head_bias": np.ones(2)}, "K = 2.*K = 3"),
        ({"memory": np.ones((2, 2, 4))}, "no class_token"),
        ({"golden_pixels": np.zeros((1, 4, 4, 3))}, "must be uint8"),
        ({"golden_pixels": np.zeros((1, 4, 4, 3), np.uint8)}, "come together"),
        ({"manifest": manifest(labels=["a"])}, "1 labels, and the head has 3"),
    ],
)  # fmt: skip
def test_bundle_that_is_not_valid_cannot_be_made(changes, says):
    with pytest.raises(MalformedBundle, match=says):
        TaskBundle(**({"manifest": manifest(), "head_weight": np.ones((3, 4))} | changes))


@pytest.mark.parametrize(
    ("limits", "says"),
    [
        (Limits(max_classes=2), "K = 3; allowed are 1 to 2|labels has 3"),
        (Limits(max_width=3), "D = 4; allowed are 1 to 3"),
        (Limits(max_layers=1), "L = 2; allowed are 1 to 1"),
        (Limits(max_memory_tokens=1), "m = 2; allowed are 1 to 1"),
        (Limits(max_adapter_rank=2), "R = 3; allowed are 1 to 2"),
        (Limits(max_golden=1), "G = 2; allowed are 1 to 1"),
        (Limits(max_golden_side=3), "H = 4; allowed are 1 to 3"),
        (Limits(max_file_bytes=100), "more than the 100 allowed"),
        (Limits(max_header_bytes=100), "more than the 100 allowed"),
        (Limits(max_examples=1), "n = 2; allowed are 1 to 1"),
        (Limits(max_label_chars=2), "labels.0 has 3 characters"),
        (Limits(max_text_chars=3), "backbone.name has 8 characters"),
        (Limits(max_description_chars=1), "description has 4 characters"),
        (Limits(max_metrics=0), "metrics has 1 entries"),
        (Limits(max_parents=0), "extends has 1 entries"),
        (Limits(max_training_bytes=3), "bytes of JSON"),
        (Limits(max_training_depth=1), "nested deeper than 1"),
    ],
    ids=lambda value: "" if isinstance(value, str) else None,
)
def test_every_limit_is_enforced(limits, says, tmp_path):
    data = dataclasses.replace(
        bundle(
            1,
            golden=2,
            maps={"query": (4, 4)},
            rank=3,
            labels=("cat", "dog", "eel"),
            description="long",
            metrics={"top1": 1.0},
            training={"epochs": 3},
            extends=("sha256:" + "0" * 64,),
        ),
        **examples(2),
    ).to_bytes()
    path = tmp_path / "b.safetensors"
    path.write_bytes(data)
    for read in (
        lambda: TaskBundle.from_bytes(data, limits),
        lambda: TaskBundle.load(path, limits),
        lambda: TaskBundle.load(path).check(limits),
    ):
        with pytest.raises(MalformedBundle, match=says):
            read()


def test_every_limit_has_a_test():
    tested = test_every_limit_is_enforced.pytestmark[0].args[1]
    changed = {
        field.name
        for limits, _ in tested
        for field in dataclasses.fields(Limits)
        if getattr(limits, field.name) != field.default
    }
    assert changed == {field.name for field in dataclasses.fields(Limits)}


def test_absurd_promise_in_the_header_takes_no_memory():
    data, _ = hostile.FILES["shape absurd"]
    tracemalloc.start()
    with pytest.raises(MalformedBundle):
        TaskBundle.from_bytes(data)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1_000_000


def test_unreadable_paths_are_named(tmp_path):
    with pytest.raises(UnreadableBundle, match="No such file"):
        TaskBundle.load(tmp_path / "missing")
    with pytest.raises(UnreadableBundle):
        TaskBundle.load(tmp_path)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(UnreadableBundle, match="not a regular file"):
        TaskBundle.load(tmp_path / "pipe")
    with pytest.raises(UnreadableBundle, match="cannot be written"):
        bundle(1).save(tmp_path / "missing" / "b")


def test_failed_save_leaves_the_old_file_whole(tmp_path, monkeypatch):
    path = bundle(1).save(tmp_path / "b")

    def full(handle):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(UnreadableBundle, match="No space left"):
        bundle(2).save(path)
    assert TaskBundle.load(path) == bundle(1)
    assert os.listdir(tmp_path) == ["b"]


def test_manifest_text_is_canonical_and_created_is_never_filled_in():
    text = manifest(training={"z": None, "a": [1]}).to_json()
    values = json.loads(text)
    assert list(values) == sorted(values)
    assert "created" not in values
    assert values["training"] == {"a": [1], "z": None}
    assert Manifest.from_json(text).to_json() == text


@dataclasses.dataclass
class ForeignPreprocessing:
    resize: tuple[int, int] | int | None = (4, 4)
    resample: str = "bilinear"
    crop: tuple[int, int] | None = None
    rescale: float = 0.003921569
    mean: tuple[float, float, float] = (0.5, 0.5, 0.5)
    std: tuple[float, float, float] = (0.5, 0.5, 0.5)


FITS = {
    "fingerprint": FINGERPRINT,
    "layers": 2,
    "width": 4,
    "preprocessing": PREPROCESSING,
    "image_size": 4,
}


@pytest.mark.parametrize(
    "preprocessing",
    [
        PREPROCESSING,
        ForeignPreprocessing(),
        json.loads(PREPROCESSING.model_dump_json()),
    ],
    ids=["spec", "dataclass", "json"],
)
def test_fitting_bundle_is_compatible(preprocessing):
    check_compatible(bundle(1, golden=2), **(FITS | {"preprocessing": preprocessing}))
    check_compatible(bundle(1), **(FITS | {"image_size": (4, 4)}))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"fingerprint": OTHER_FINGERPRINT}, f"tiny-vit.*{FINGERPRINT}.*{OTHER_FINGERPRINT}"),
        ({"width": 8}, "4 wide.*8 wide"),
        ({"layers": 12}, "2 layers.*12 layers"),
        ({"image_size": (4, 8)}, "4×4 pixels.*4×8"),
        (
            {"preprocessing": PREPROCESSING.model_copy(update={"resize": 4})},
            r"resize = \(4, 4\), and .* uses 4",
        ),
        (
            {"preprocessing": ForeignPreprocessing(mean=(0.4, 0.5, 0.5))},
            r"mean = \(0.5, 0.5, 0.5\).*\(0.4",
        ),
        ({"preprocessing": {"resize": "big"}}, "cannot be compared"),
    ],
)
def test_bundle_for_another_backbone_is_refused_naming_both_values(change, says):
    with pytest.raises(IncompatibleBundle, match=says):
        check_compatible(bundle(1, golden=2), **(FITS | change))


def test_every_error_is_in_the_drawn_tree():
    drawn = re.findall(r"[├└]── (\w+)|^(TaskStoreError)$", errors.__doc__, flags=re.MULTILINE)
    classes = {
        name
        for name, value in vars(errors).items()
        if isinstance(value, type) and issubclass(value, errors.TaskStoreError)
    }
    assert {a or b for a, b in drawn} == classes
    assert all(getattr(task_store, name) is getattr(errors, name) for name in classes)
    assert issubclass(MalformedBundle, BundleError)
