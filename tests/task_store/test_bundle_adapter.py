"""A bundle with a row adapter: what is written, read back, and refused."""

import dataclasses
import re

import numpy as np
import pytest

from task_store import IncompatibleBundle, Limits, MalformedBundle, TaskBundle, check_compatible
from task_store.codec import encode
from task_store.manifest import AdapterSpec
from tests.bundles import FINGERPRINT, PREPROCESSING, bundle, manifest

MAPS = {"query": (4, 4), "output": (4, 4), "up": (4, 8), "down": (8, 4)}
SOME = {"query": (4, 4), "down": (8, 4)}


def halved(made: TaskBundle) -> TaskBundle:
    """The same with an adapter that float16 can hold."""
    rounded = {
        f"adapter_{name}_{part}": array.astype(np.float16)
        for name, change in made.adapter.items()
        for part, array in zip("ab", change, strict=True)
    }
    return dataclasses.replace(made, **rounded)


@pytest.mark.parametrize("maps", [MAPS, SOME, {"up": (4, 16)}])
@pytest.mark.parametrize("memory", [0, 3])
def test_an_adapter_is_loaded_unchanged(tmp_path, maps, memory):
    made = bundle(1, maps=maps, rank=3, memory=memory, golden=1)
    loaded = TaskBundle.load(made.save(tmp_path / "b.safetensors"))
    assert loaded == made
    assert list(loaded.adapter) == list(maps)
    for name, (a, b) in loaded.adapter.items():
        assert np.array_equal(a, made.adapter[name][0])
        assert np.array_equal(b, made.adapter[name][1])
        assert (a.shape, b.shape) == ((2, maps[name][0], 3), (2, 3, maps[name][1]))
    assert loaded.manifest.adapter == AdapterSpec(rank=3, maps=tuple(maps))
    assert bundle(1).adapter == {}


def test_an_adapter_that_float16_can_hold_is_written_in_half_the_bytes():
    exact, rounded = bundle(1, maps=MAPS, rank=64), halved(bundle(1, maps=MAPS, rank=64))
    values = sum(array.size for change in exact.adapter.values() for array in change)
    # The header is padded to eight bytes, and its numbers have other digits.
    assert abs(exact.size_bytes - rounded.size_bytes - 2 * values) < 64
    loaded = TaskBundle.from_bytes(rounded.to_bytes())
    assert np.array_equal(loaded.adapter["up"][1], rounded.adapter["up"][1])
    assert loaded.adapter["up"][1].dtype == np.float32
    assert loaded.head_weight.tobytes() == exact.head_weight.tobytes(), "all else stays F32"


def test_a_rank_8_adapter_of_a_vit_b_takes_at_most_3_mb():
    width, layers, hidden = 768, 12, 3072
    maps = {"query": (width, width), "output": (width, width)}
    maps |= {"up": (width, hidden), "down": (hidden, width)}
    tensors = {}
    for name, (into, out) in maps.items():
        tensors[f"adapter_{name}_a"] = np.ones((layers, into, 8))
        tensors[f"adapter_{name}_b"] = np.ones((layers, 8, out))
    about = manifest(classes=100, adapter=AdapterSpec(rank=8, maps=tuple(maps)))
    golden = {"golden_pixels": np.zeros((2, 224, 224, 3), np.uint8)}
    golden["golden_logits"] = np.zeros((2, 100))
    made = TaskBundle(about, np.ones((100, width)), class_token=np.ones(width), **golden, **tensors)
    assert made.size_bytes <= 3_000_000


def test_a_bundle_without_an_adapter_does_not_mention_one():
    assert b"adapter" not in bundle(1, golden=2).to_bytes()


def tensors_of(made: TaskBundle) -> dict[str, np.ndarray]:
    return dict(made._arrays())


def changed(made: TaskBundle, about=None, **tensors) -> bytes:
    """The file with other tensors (None: left out), names with `_` for `.`."""
    arrays = tensors_of(made)
    for name, array in tensors.items():
        key = name.replace("_", ".") if name != "class_token" else name
        arrays.pop(key, None)
        if array is not None:
            arrays[key] = np.asarray(array, np.float32)
    text = (about or made.manifest).to_json()
    return encode(arrays, {"engram": text})


ONES = np.ones
FULL = bundle(1, maps=MAPS, rank=2)


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (changed(FULL, class_token=None, memory=None), "adapter and no class_token"),
        (changed(FULL, adapter_up_b=None), "needs the tensor 'adapter.up.b'"),
        (changed(FULL, about=manifest()), "does not name the map of tensor 'adapter.down.a'"),
        (changed(bundle(1), about=FULL.manifest), "needs the tensor 'adapter.down.a'"),
        (changed(FULL, adapter_key_a=ONES((2, 4, 2))), "'adapter.key.a' that no bundle has"),
        (changed(FULL, adapter_up_a=ONES((2, 4, 3))), "R = 3, and 'adapter.query.a' has R = 2"),
        (changed(FULL, adapter_up_a=ONES((2, 5, 2))), "D = 5"),
        (changed(FULL, adapter_query_b=ONES((2, 2, 5))), "'adapter.query.b' has I = 5"),
        (changed(FULL, adapter_down_a=ONES((3, 8, 2))), "L = 3"),
        (changed(FULL, adapter_down_a=ONES((2, 8))), "must be [L, F, R]"),
        (changed(FULL, adapter_up_a=np.full((2, 4, 2), np.nan)), "not finite"),
        (
            changed(FULL, about=manifest(adapter=AdapterSpec(rank=5, maps=tuple(MAPS)))),
            "rank 5, and its tensors have 2",
        ),
    ],
)
def test_what_is_wrong_with_an_adapter_is_said_in_one_sentence(data, reason):
    with pytest.raises(MalformedBundle, match=re.escape(reason)):
        TaskBundle.from_bytes(data)


@pytest.mark.parametrize(
    ("adapter", "reason"),
    [
        ('{"rank":0,"maps":["up"]}', "adapter.rank"),
        ('{"rank":2,"maps":[]}', "adapter.maps"),
        ('{"rank":2,"maps":["up","up"]}', "named twice"),
        ('{"rank":2,"maps":["value"]}', "adapter.maps.0"),
        ('{"rank":2,"maps":["up"],"alpha":1}', "adapter.alpha"),
    ],
)
def test_a_manifest_with_a_wrong_adapter_is_refused(adapter, reason):
    text = manifest().to_json()[:-1] + f',"adapter":{adapter}}}'
    with pytest.raises(MalformedBundle, match=re.escape(reason)):
        type(FULL.manifest).from_json(text)


def test_ranks_beyond_the_limit_are_refused_before_they_are_read():
    with pytest.raises(MalformedBundle, match="R = 2; allowed are 1 to 1"):
        TaskBundle.from_bytes(FULL.to_bytes(), Limits(max_adapter_rank=1))
    with pytest.raises(MalformedBundle, match="R = 257; allowed are 1 to 256"):
        bundle(1, maps={"query": (4, 4)}, rank=257)


def test_an_adapter_for_another_number_of_layers_is_incompatible():
    made = bundle(1, maps=SOME, memory=0)
    about = {"fingerprint": FINGERPRINT, "width": 4, "preprocessing": PREPROCESSING}
    check_compatible(made, layers=2, image_size=4, **about)
    with pytest.raises(IncompatibleBundle, match="an adapter for 2 layers"):
        check_compatible(made, layers=3, image_size=4, **about)
