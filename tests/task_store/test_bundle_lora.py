"""Bundles with LoRA: what is written, read back, and rejected."""

import re

import numpy as np
import pytest
from engram_bundle import (
    BundleLimits,
    IncompatibleBundle,
    LoraSpec,
    MalformedBundle,
    TaskBundle,
    check_compatible,
)
from engram_bundle.codec import encode

from tests.bundles import FINGERPRINT, PREPROCESSING, bundle, manifest, with_tensors

TARGETS = {"query": (4, 4), "output": (4, 4), "up": (4, 8), "down": (8, 4)}
SOME = {"query": (4, 4), "down": (8, 4)}


def halved(made: TaskBundle) -> TaskBundle:
    """The same with LoRA values that float16 represents exactly."""
    rounded = {
        name: array.astype(np.float16)
        for name, array in made.tensors.items()
        if name.startswith("lora.")
    }
    return with_tensors(made, rounded)


@pytest.mark.parametrize("targets", [TARGETS, SOME, {"up": (4, 16)}])
@pytest.mark.parametrize("memory", [0, 3])
def test_lora_is_loaded_unchanged(tmp_path, targets, memory):
    made = bundle(1, targets=targets, rank=3, memory=memory, golden=1)
    loaded = TaskBundle.load(made.save(tmp_path / "b.safetensors"))
    assert loaded == made
    assert list(loaded.lora) == list(targets)
    for name, (a, b) in loaded.lora.items():
        assert np.array_equal(a, made.lora[name][0])
        assert np.array_equal(b, made.lora[name][1])
        assert (a.shape, b.shape) == ((2, targets[name][0], 3), (2, 3, targets[name][1]))
    assert loaded.manifest.lora == LoraSpec(rank=3, targets=tuple(targets))
    assert bundle(1).lora == {}


def test_lora_that_float16_can_hold_is_written_in_half_the_bytes():
    exact, rounded = (
        bundle(1, targets=TARGETS, rank=64),
        halved(bundle(1, targets=TARGETS, rank=64)),
    )
    values = sum(array.size for change in exact.lora.values() for array in change)
    # The header is padded to eight bytes, and its numbers have other digits.
    assert abs(exact.size_bytes - rounded.size_bytes - 2 * values) < 64
    loaded = TaskBundle.from_bytes(rounded.to_bytes())
    assert np.array_equal(loaded.lora["up"][1], rounded.lora["up"][1])
    assert loaded.lora["up"][1].dtype == np.float32
    assert loaded.tensors["head.weight"].tobytes() == exact.tensors["head.weight"].tobytes(), (
        "all else stays F32"
    )


def test_rank_8_lora_of_a_vit_b_takes_at_most_3_mb():
    width, layers, hidden = 768, 12, 3072
    targets = {"query": (width, width), "output": (width, width)}
    targets |= {"up": (width, hidden), "down": (hidden, width)}
    tensors = {}
    for name, (into, out) in targets.items():
        tensors[f"lora.{name}.a"] = np.ones((layers, into, 8))
        tensors[f"lora.{name}.b"] = np.ones((layers, 8, out))
    about = manifest(classes=100, lora=LoraSpec(rank=8, targets=tuple(targets)))
    golden = {"golden.pixels": np.zeros((2, 224, 224, 3), np.uint8)}
    golden["golden.logits"] = np.zeros((2, 100))
    head = {"head.weight": np.ones((100, width)), "class_token": np.ones(width)}
    made = TaskBundle(about, {**head, **golden, **tensors})
    assert made.size_bytes <= 3_000_000


def test_bundle_without_lora_does_not_mention_it():
    assert b"lora" not in bundle(1, golden=2).to_bytes()


def changed(made: TaskBundle, about=None, **tensors) -> bytes:
    """The file with other tensors (None: left out), names with `_` for `.`."""
    arrays = dict(made.tensors)
    for name, array in tensors.items():
        key = name.replace("_", ".") if name != "class_token" else name
        arrays.pop(key, None)
        if array is not None:
            arrays[key] = np.asarray(array, np.float32)
    text = (about or made.manifest).to_json()
    return encode(arrays, {"engram": text})


ONES = np.ones
FULL = bundle(1, targets=TARGETS, rank=2)


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (changed(FULL, class_token=None, memory=None), "needs a class token"),
        (changed(FULL, lora_up_b=None), "Tensor 'lora.up.b' is missing"),
        (changed(FULL, about=manifest()), "does not list the target of tensor 'lora.down.a'"),
        (changed(bundle(1), about=FULL.manifest), "Tensor 'lora.down.a' is missing"),
        (changed(FULL, lora_key_a=ONES((2, 4, 2))), "Unknown tensor 'lora.key.a'"),
        (changed(FULL, lora_up_a=ONES((2, 4, 3))), "R = 3, but 'lora.query.a' has R = 2"),
        (changed(FULL, lora_up_a=ONES((2, 5, 2))), "D = 5"),
        (changed(FULL, lora_query_b=ONES((2, 2, 5))), "'lora.query.b' has I = 5"),
        (changed(FULL, lora_down_a=ONES((3, 8, 2))), "L = 3"),
        (changed(FULL, lora_down_a=ONES((2, 8))), "must be [L, F, R]"),
        (changed(FULL, lora_up_a=np.full((2, 4, 2), np.nan)), "not finite"),
        (
            changed(FULL, about=manifest(lora=LoraSpec(rank=5, targets=tuple(TARGETS)))),
            "rank 5, but its tensors have rank 2",
        ),
    ],
)
def test_invalid_lora_gives_one_clear_sentence(data, reason):
    with pytest.raises(MalformedBundle, match=re.escape(reason)):
        TaskBundle.from_bytes(data)


@pytest.mark.parametrize(
    ("lora", "reason"),
    [
        ('{"rank":0,"targets":["up"]}', "lora.rank"),
        ('{"rank":2,"targets":[]}', "lora.targets"),
        ('{"rank":2,"targets":["up","up"]}', "listed twice"),
        ('{"rank":2,"targets":["value"]}', "lora.targets.0"),
        ('{"rank":2,"targets":["up"],"alpha":1}', "lora.alpha"),
    ],
)
def test_manifest_with_invalid_lora_is_rejected(lora, reason):
    text = manifest().to_json()[:-1] + f',"lora":{lora}}}'
    with pytest.raises(MalformedBundle, match=re.escape(reason)):
        type(FULL.manifest).from_json(text)


def test_ranks_beyond_the_limit_are_refused_before_they_are_read():
    with pytest.raises(MalformedBundle, match="R = 2; it must be between 1 and 1"):
        TaskBundle.from_bytes(FULL.to_bytes(), BundleLimits(max_lora_rank=1))
    with pytest.raises(MalformedBundle, match="R = 257; it must be between 1 and 256"):
        bundle(1, targets={"query": (4, 4)}, rank=257)


def test_lora_for_another_number_of_layers_is_incompatible():
    made = bundle(1, targets=SOME, memory=0)
    about = {"fingerprint": FINGERPRINT, "width": 4, "preprocessing": PREPROCESSING}
    check_compatible(made, layers=2, image_size=(4, 4), **about)
    with pytest.raises(IncompatibleBundle, match=r"'lora.query.a' of the bundle has 2 layers"):
        check_compatible(made, layers=3, image_size=(4, 4), **about)
