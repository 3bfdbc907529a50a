"""Bundles: what is written, what is read back, and what is refused."""

import dataclasses
import errno
import hashlib
import json
import os
import re
import tracemalloc
from pathlib import Path

import engram_bundle
import engram_store
import numpy as np
import pytest
import safetensors
import safetensors.numpy
from engram_bundle import (
    BundleLimits,
    IncompatibleBundle,
    MalformedBundle,
    Manifest,
    TaskBundle,
    UnreadableBundle,
    check_compatible,
)
from engram_bundle import errors as bundle_errors
from engram_bundle.codec import encode
from engram_bundle.media import Media, pack_media, unpack_media
from engram_bundle.schema import DIMENSIONS, TENSORS
from engram_server import embedded
from engram_store import errors as store_errors
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from tests.bundles import (
    FINGERPRINT,
    OTHER_FINGERPRINT,
    PREPROCESSING,
    bundle,
    manifest,
    with_tensors,
)
from tests.task_store import hostile
from tests.task_store.conftest import listing

KNOWN = {"ood": {"threshold": 2.5}}


def examples(count: int, *, classes: int = 3, width: int = 4) -> dict[str, np.ndarray]:
    random = np.random.default_rng(0)
    digests = sorted(random.bytes(32) for _ in range(count))
    return {
        "examples.features": random.standard_normal((count, width)).astype(np.float16),
        "examples.labels": np.eye(classes, dtype=np.uint8)[np.arange(count) % classes],
        "examples.digests": np.frombuffer(b"".join(digests), np.uint8).reshape(count, 32),
    }


def same(a: TaskBundle, b: TaskBundle) -> bool:
    return (
        a.manifest == b.manifest
        and list(a.tensors) == list(b.tensors)
        and all(np.array_equal(array, b.tensors[name]) for name, array in a.tensors.items())
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
        assert np.array_equal(file.get_tensor("memory"), made.tensors["memory"])


def test_we_read_what_the_safetensors_library_writes():
    made = bundle(1)
    tensors = {
        "head.weight": made.tensors["head.weight"],
        "class_token": made.tensors["class_token"],
    }
    data = safetensors.numpy.save(tensors, {"engram": made.manifest.to_json()})
    loaded = TaskBundle.from_bytes(data)
    assert np.array_equal(loaded.tensors["class_token"], made.tensors["class_token"])
    assert loaded.digest == "sha256:" + hashlib.sha256(data).hexdigest(), "of that file, not ours"
    assert loaded.to_bytes() == data


def test_changed_copy_of_a_loaded_bundle_is_another_bundle():
    loaded = TaskBundle.from_bytes(bundle(1).to_bytes())
    changed = dataclasses.replace(loaded, manifest=manifest(description="changed"))
    assert changed.digest != loaded.digest
    assert TaskBundle.from_bytes(changed.to_bytes()).manifest.description == "changed"


def test_properties_describe_the_bundle():
    names = ("cat", "dog", "eel")
    made = bundle(1, extends=("sha256:" + "0" * 64,), labels=names)
    assert (made.extends, made.task_type) == (("sha256:" + "0" * 64,), "single_label")
    assert made.labels == names
    assert (made.classes, made.width, made.memory_tokens) == (3, 4, 2)
    assert (made.get("memory").shape, made.get("golden.pixels")) == ((2, 2, 4), None)
    assert list(made.tensors) == ["head.weight", "head.bias", "class_token", "memory"]


def test_arrays_are_float32_read_only_and_not_the_callers():
    mine = np.ones((3, 4), dtype=np.float64)
    made = TaskBundle(manifest(), {"head.weight": mine})
    mine[0, 0] = 7
    assert made.tensors["head.weight"][0, 0] == 1
    for each in (made, TaskBundle.from_bytes(made.to_bytes())):
        assert each.tensors["head.weight"].dtype == np.float32
        with pytest.raises(ValueError, match="read-only"):
            each.tensors["head.weight"][0, 0] = 2


def test_no_memory_tokens_is_no_memory():
    tensors = {"head.weight": np.ones((3, 4)), "class_token": np.ones(4)}
    empty = TaskBundle(manifest(), {**tensors, "memory": np.ones((2, 0, 4))})
    assert empty.get("memory") is None
    assert b'"memory"' not in empty.to_bytes()
    assert TaskBundle.from_bytes(hostile.FINE).memory_tokens == 0


def test_half_precision_is_read_and_written_exactly():
    made = bundle(1)
    half = TaskBundle.from_bytes(made.to_bytes(dtype="F16"))
    assert half.tensors["memory"].dtype == np.float32
    assert np.array_equal(
        half.tensors["memory"], made.tensors["memory"].astype(np.float16).astype(np.float32)
    )
    assert half.size_bytes < made.size_bytes
    assert half.to_bytes(dtype="F16") == half.to_bytes()


def test_half_precision_that_would_spoil_golden_logits_is_refused():
    with pytest.raises(MalformedBundle, match="round first"):
        bundle(1, golden=2).to_bytes(dtype="F16")
    exact = TaskBundle(
        manifest(),
        {
            "head.weight": np.ones((3, 4)),
            "golden.pixels": np.zeros((1, 4, 4, 3), np.uint8),
            "golden.logits": np.full((1, 3), 1 / 3),
        },
    )
    loaded = TaskBundle.from_bytes(exact.to_bytes(dtype="F16"))
    assert np.array_equal(loaded.tensors["golden.logits"], exact.tensors["golden.logits"])


def test_half_precision_overflow_is_refused():
    with pytest.raises(MalformedBundle, match="too large for F16"):
        TaskBundle(manifest(), {"head.weight": np.full((3, 4), 1e5)}).to_bytes(dtype="F16")


def test_bfloat16_is_widened_exactly():
    values = np.array([[1.0, -2.5, 0.0, 3.140625]] * 3, dtype=np.float32)
    stored = (values.view(np.uint32) >> 16).astype("<u2")
    data = encode({"head.weight": stored.view(np.float16)}, {"engram": manifest().to_json()})
    header, body = hostile.split(data)
    header["head.weight"]["dtype"] = "BF16"
    loaded = TaskBundle.from_bytes(hostile.join(header, body))
    assert np.array_equal(loaded.tensors["head.weight"], values)


@pytest.mark.parametrize("name", hostile.FILES)
def test_hostile_file_gives_one_clear_sentence_and_leaves_no_trace(name, open_memory):
    data, says = hostile.FILES[name]
    store = open_memory()
    with pytest.raises(MalformedBundle, match=says) as error:
        store.publish("victim", data)
    message = str(error.value)
    assert message.endswith((".", "?"))
    assert "\n" not in message
    assert len(message) < 500
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
    task_type = draw(st.sampled_from(["single_label", "multi_label", "regression", "embedding"]))
    named = task_type.endswith("label") or draw(st.booleans())
    token = draw(st.booleans())
    floats = st.floats(width=32, allow_nan=False, allow_infinity=False)

    def array(*shape):
        return draw(arrays.arrays(np.float32, shape, elements=floats))

    return TaskBundle(
        manifest=manifest(
            task_type=task_type,
            labels=[draw(TEXT.filter(bool)) for _ in range(classes)] if named else [],
            description=draw(TEXT),
            placement=draw(st.sampled_from(["pre_norm", "post_norm"])),
            metrics=draw(st.dictionaries(TEXT, floats, max_size=3)),
            training=draw(st.dictionaries(TEXT, JSON, max_size=3)),
            license=draw(st.none() | TEXT),
            created=draw(st.none() | st.just("2025-01-31T12:00:00.5+01:00")),
            extends=["sha256:" + "e" * 64] if token and draw(st.booleans()) else [],
        ),
        tensors={
            "head.weight": array(classes, width),
            "head.bias": array(classes) if draw(st.booleans()) else None,
            "class_token": array(width) if token else None,
            "memory": array(layers, tokens, width) if token else None,
            "golden.pixels": np.zeros((golden, 2, 3, 3), np.uint8) if golden else None,
            "golden.logits": array(golden, classes) if golden else None,
        },
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
        tensors={
            "head.weight": np.full((3, 4), 1 / 3),
            "ood.means": np.ones((3, 4)),
            "ood.axes": np.full((2, 4), 0.5),
            "golden.pixels": np.zeros((1, 3, 3, 3), np.uint8),
            "golden.logits": np.zeros((1, 3)),
            **examples(5),
        },
    )
    loaded = TaskBundle.load(made.save(tmp_path / "b.safetensors"))
    assert same(made, loaded)
    assert loaded.manifest.temperature == 1.5
    for name in ("ood.means", "ood.axes", "examples.features"):
        assert loaded.tensors[name].dtype == np.float16
    stored = safetensors.numpy.load_file(tmp_path / "b.safetensors")
    assert np.array_equal(stored["examples.features"], made.tensors["examples.features"])
    assert np.array_equal(stored["examples.digests"], made.tensors["examples.digests"])
    assert stored["head.weight"].dtype == np.float32


def test_bytes_of_a_bundle_stay_the_same():
    made = bundle(1, golden=2, description="long", metrics={"top1": 1.0})
    assert made.digest == "sha256:aef69f512c4ac91e7588af0056de0cc0cdd713b0af3279733c59ab401086b97f"


def make(changes: dict[str, object]) -> TaskBundle:
    """A bundle with other tensors, and perhaps another manifest."""
    tensors = {"head.weight": np.ones((3, 4))} | changes
    return TaskBundle(tensors.pop("manifest", manifest()), tensors)


WEBP = b"RIFF\x24\0\0\0WEBP" + bytes(32)


def media(*parts: Media, **changes: np.ndarray) -> dict[str, np.ndarray]:
    """Two examples with names and thumbnails; `sizes` or `data` replace the right ones."""
    replaced = {f"media.{name}": array for name, array in changes.items()}
    return (
        examples(2) | pack_media(parts or (Media("a.jpg", WEBP), Media("naïve 猫.png"))) | replaced
    )


def test_names_and_thumbnails_of_examples_are_read_back():
    kept = (Media("naïve 猫.png", WEBP), Media())
    read = TaskBundle.from_bytes(make(media(*kept)).to_bytes())
    assert unpack_media(read.tensors) == kept
    assert unpack_media(make(media(Media(), Media())).tensors) == (), "nothing to keep"


def sizes(*values: int) -> np.ndarray:
    return np.array(values, "<u4").view(np.uint8).reshape(-1, 8)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        (media(sizes=sizes(5, 44, 14, 2)), "adds up to 65 bytes, but 'media.data' has 63"),
        (media(sizes=sizes(5, 44, 2**32 - 1, 2**32 - 1)), "adds up to 8589934639 bytes"),
        (media(sizes=sizes(5, 44)), "n = 1"),
        (media(sizes=np.zeros((2, 4), np.uint8)), r"must be \[n, 8\]"),
        (media(data=np.full(63, 0xFF, np.uint8)), "not valid UTF-8"),
        (media(Media("a.jpg", b"<svg onload=alert(1)>"), Media()), "not a WebP file"),
        (media(Media("a.jpg", WEBP[:11]), Media()), "not a WebP file"),
        (media(Media("a.jpg", WEBP + b"more"), Media()), "not a WebP file"),
        (media(Media("a" * 1025), Media()), "a file name of 1025 bytes; at most 1024 are allowed"),
        (media(Media("", WEBP[:4] + bytes(16_381)), Media()), "a thumbnail of 16385 bytes"),
        (media() | {"media.data": None}, "must be present together"),
        (pack_media([Media("a.jpg")]), "needs 'examples.digests'"),
    ],
)  # fmt: skip
def test_names_and_thumbnails_that_are_not_valid_are_rejected(changes, says):
    with pytest.raises(MalformedBundle, match=says):
        make(changes)
    tensors = {"head.weight": np.ones((3, 4), np.float32)} | changes
    stored = {name: tensors[name] for name in TENSORS if tensors.get(name) is not None}
    with pytest.raises(MalformedBundle, match=says):
        TaskBundle.from_bytes(encode(stored, {"engram": manifest().to_json()}))


def one_hot_twice() -> dict[str, np.ndarray]:
    made = examples(2)
    return made | {"examples.labels": np.ones((2, 3), np.uint8)}


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        (examples(2) | {"examples.features": None}, "must be present together"),
        (examples(2) | {"examples.labels": np.full((2, 3), 2, np.uint8)}, "other than 0 and 1"),
        (one_hot_twice(), "exactly one label per image"),
        (examples(2) | {"examples.digests": np.zeros((2, 32), np.uint8)}, "ascending and unique"),
        (examples(2) | {"examples.features": np.full((2, 4), 1e9)}, "not finite"),
        (examples(2) | {"examples.labels": np.ones((2, 3))}, "must be uint8"),
        (examples(2) | {"manifest": manifest(task_type="regression")}, "need task type"),
        ({"ood.means": np.ones((1, 4)), "ood.axes": np.ones((1, 4))}, "must be present together"),
        ({"manifest": manifest(**KNOWN)}, "must be present together"),
        ({"ood.means": np.ones((1, 4)), "manifest": manifest(**KNOWN)}, "must be present together"),
    ],
)  # fmt: skip
def test_examples_that_contradict_the_task_cannot_be_made(changes, says):
    with pytest.raises(MalformedBundle, match=says):
        make(changes)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"head.weight": np.ones(4)}, r"must be \[K, D\]"),
        ({"head.weight": [["a"]]}, "not an array of numbers"),
        ({"head.weight": np.full((3, 4), np.nan)}, "not finite"),
        ({"head.weight": np.full((3, 4), 1e300)}, "not finite"),
        ({"head.bias": np.ones(2)}, "K = 2.*K = 3"),
        ({"memory": np.ones((2, 2, 4))}, "'memory' needs a class token"),
        ({"golden.pixels": np.zeros((1, 4, 4, 3))}, "must be uint8"),
        ({"golden.pixels": np.zeros((1, 4, 4, 3), np.uint8)}, "must be present together"),
        ({"manifest": manifest(labels=["a"])}, "1 labels, and the head has 3"),
        ({"manifest": manifest(layers=(1,))}, "lists 1 layers.*has weights for 0"),
        ({"layers.weight": np.ones((3, 2, 3, 4))}, "lists 0 layers.*has weights for 2"),
        ({"layers.weight": np.ones((3, 2, 3, 4)), "manifest": manifest(layers=(1,))}, "lists 1"),
        ({"summaries": np.ones((2, 1, 3, 4), np.float16)}, "needs 'examples.features'"),
    ],
)  # fmt: skip
def test_bundle_that_is_not_valid_cannot_be_made(changes, says):
    with pytest.raises(MalformedBundle, match=says):
        make(changes)


@pytest.mark.parametrize(
    ("limits", "says"),
    [
        (BundleLimits(max_classes=2), "K = 3; it must be between 1 and 2|labels has 3"),
        (BundleLimits(max_width=3), "D = 4; it must be between 1 and 3"),
        (BundleLimits(max_layers=1), "L = 2; it must be between 1 and 1"),
        (BundleLimits(max_parts=2), "P = 3; it must be between 1 and 2"),
        (BundleLimits(max_memory_tokens=1), "m = 2; it must be between 1 and 1"),
        (BundleLimits(max_lora_rank=2), "R = 3; it must be between 1 and 2"),
        (BundleLimits(max_golden=1), "G = 2; it must be between 1 and 1"),
        (BundleLimits(max_golden_side=3), "H = 4; it must be between 1 and 3"),
        (BundleLimits(max_file_bytes=100), "at most 100 bytes are allowed"),
        (BundleLimits(max_header_bytes=100), "at most 100 are allowed"),
        (BundleLimits(max_examples=1), "n = 2; it must be between 1 and 1"),
        (BundleLimits(max_example_values=31), "have 32 values; at most 31 are allowed"),
        (BundleLimits(max_example_labels=5), "have 6 values; at most 5 are allowed"),
        (BundleLimits(max_media_bytes=50), "B = 51; it must be between 1 and 50"),
        (BundleLimits(max_name_bytes=4), "a file name of 5 bytes; at most 4 are allowed"),
        (BundleLimits(max_thumbnail_bytes=43), "a thumbnail of 44 bytes; at most 43 are allowed"),
        (BundleLimits(max_label_chars=2), "labels.0 has 3 characters"),
        (BundleLimits(max_text_chars=3), "backbone.name has 8 characters"),
        (BundleLimits(max_description_chars=1), "description has 4 characters"),
        (BundleLimits(max_metrics=0), "metrics has 1 entries"),
        (BundleLimits(max_parents=0), "extends has 1 entries"),
        (BundleLimits(max_training_bytes=3), "bytes of JSON"),
        (BundleLimits(max_training_depth=1), "nested deeper than 1"),
    ],
    ids=lambda value: "" if isinstance(value, str) else None,
)
def test_every_limit_is_enforced(limits, says, tmp_path):
    data = with_tensors(
        bundle(
            1,
            golden=2,
            targets={"query": (4, 4)},
            rank=3,
            labels=("cat", "dog", "eel"),
            description="long",
            metrics={"top1": 1.0},
            training={"epochs": 3},
            extends=("sha256:" + "0" * 64,),
        ),
        examples(2)
        | {"summaries": np.ones((2, 1, 3, 4), np.float16)}
        | pack_media([Media("a.jpg", WEBP), Media("b.")]),
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
        for field in dataclasses.fields(BundleLimits)
        if getattr(limits, field.name) != field.default
    }
    assert changed == {field.name for field in dataclasses.fields(BundleLimits)}


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


def test_failed_save_keeps_the_old_file(tmp_path, monkeypatch):
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


FITS = {
    "fingerprint": FINGERPRINT,
    "layers": 2,
    "width": 4,
    "preprocessing": PREPROCESSING,
    "image_size": (4, 4),
}


@pytest.mark.parametrize("rescale", [1 / 255, 0.003921569])
def test_fitting_bundle_is_compatible(rescale):
    preprocessing = dataclasses.replace(PREPROCESSING, rescale=rescale)
    check_compatible(bundle(1, golden=2), **(FITS | {"preprocessing": preprocessing}))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"fingerprint": OTHER_FINGERPRINT}, f"tiny-vit.*{FINGERPRINT}.*{OTHER_FINGERPRINT}"),
        ({"width": 8}, "width 4.*width 8"),
        ({"layers": 12}, "2 layers.*12 layers"),
        ({"image_size": (4, 8)}, "4×4 pixels.*4×8"),
        (
            {"preprocessing": dataclasses.replace(PREPROCESSING, resize=4)},
            r"resize = \(4, 4\), but .* uses 4",
        ),
        (
            {"preprocessing": dataclasses.replace(PREPROCESSING, mean=(0.4, 0.5, 0.5))},
            r"mean = \(0.5, 0.5, 0.5\).*\(0.4",
        ),
    ],
)
def test_bundle_for_another_backbone_is_refused_naming_both_values(change, says):
    with pytest.raises(IncompatibleBundle, match=says):
        check_compatible(bundle(1, golden=2), **(FITS | change))


@pytest.mark.parametrize(
    ("package", "errors"), [(engram_bundle, bundle_errors), (engram_store, store_errors)]
)
def test_every_error_is_in_the_drawn_tree(package, errors):
    drawn = re.findall(r"^(?:TaskStoreError|[ │]*[├└]── (\w+))", errors.__doc__, flags=re.MULTILINE)
    classes = {
        name
        for name, value in vars(errors).items()
        if isinstance(value, type) and issubclass(value, bundle_errors.TaskStoreError)
    }
    assert {name or "TaskStoreError" for name in drawn} == classes
    assert all(getattr(package, name) is getattr(errors, name) for name in classes)


def test_demo_bundles_are_written_byte_for_byte():
    paths = sorted(Path(embedded.__file__).parent.glob("tasks/*.safetensors"))
    assert len(paths) == 5
    for path in paths:
        loaded = TaskBundle.load(path)
        assert TaskBundle(loaded.manifest, loaded.tensors).to_bytes() == path.read_bytes()


def test_every_row_of_the_schema_can_be_documented():
    for name, tensor in TENSORS.items():
        assert tensor.name == name
        assert tensor.doc
        assert {symbol for symbol in tensor.shape if not symbol.isdigit()} <= set(DIMENSIONS)
    limits = {field.name for field in dataclasses.fields(BundleLimits)}
    assert {dimension.limit for dimension in DIMENSIONS.values()} <= limits
    assert all(field.metadata["doc"] for field in dataclasses.fields(BundleLimits))


def test_name_in_the_manifest_is_a_task_name_and_optional():
    assert bundle(1).manifest.name is None
    assert '"name"' not in bundle(1).manifest.to_json().partition('"backbone"')[0]
    named = bundle(1, name="team/pets")
    assert TaskBundle.from_bytes(named.to_bytes()).manifest.name == "team/pets"
    text = named.manifest.to_json().replace("team/pets", "Team Pets")
    with pytest.raises(MalformedBundle, match=r"name is invalid: .*not a valid task name"):
        Manifest.from_json(text)
