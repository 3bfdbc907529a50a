"""`scripts/convert_bundle.py` turns bundles from before version 0.1.0 into current ones."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from engram_bundle import OodSpec, TaskBundle, TaughtSpec, codec
from engram_bundle.limits import DEFAULT_LIMITS

from scripts.convert_bundle import convert
from tests.bundles import bundle, manifest, with_tensors

ROOT = Path(__file__).resolve().parents[2]
OLD_KEYS = {"task_type": "problem", "lora": "adapter", "ood": "known"}
OLD_PREFIXES = {"lora.": "adapter.", "ood.": "known."}


@pytest.fixture
def current() -> TaskBundle:
    random = np.random.default_rng(0)
    made = bundle(1, golden=2, targets={"query": (4, 4), "up": (4, 8)})
    labels = np.eye(3, dtype=np.uint8)
    tensors = {
        "head.projection": random.standard_normal((5, 4)),
        "ood.means": random.standard_normal((3, 4)),
        "ood.axes": random.standard_normal((2, 4)),
        "examples.features": random.standard_normal((3, 4)),
        "examples.labels": labels,
        "examples.digests": np.arange(96, dtype=np.uint8).reshape(3, 32),
        "text.weight": random.standard_normal((3, 4)),
    }
    about = manifest(
        lora=made.manifest.lora,
        ood=OodSpec(threshold=2.5),
        normalised=True,
        taught=TaughtSpec(templates=("a photo of a {}",)),
        training={"tool": "engram teach"},
    )
    return with_tensors(made, tensors, about)


def in_old_format(made: TaskBundle) -> bytes:
    """The bytes of a bundle as they were before version 0.1.0."""
    data = made.to_bytes()
    metadata, stored = codec.read_header(data, DEFAULT_LIMITS)
    values = json.loads(metadata["engram"])
    taught = values.pop("taught")
    values["training"]["templates"] = taught["templates"]
    values["lora"]["maps"] = values["lora"].pop("targets")
    values = {OLD_KEYS.get(key, key): value for key, value in values.items()}
    arrays = {}
    for name, entry in stored.items():
        for new, old in OLD_PREFIXES.items():
            name = old + name.removeprefix(new) if name.startswith(new) else name
        array = codec.decode(data, entry)
        arrays[name] = array.astype(np.float16) if entry.dtype == "F16" else array
    return codec.encode(arrays, {"engram": json.dumps(values, sort_keys=True)})


def test_converted_bundle_is_the_current_one(current):
    old = in_old_format(current)
    for word in (b"problem", b"adapter.query.a", b"known.means", b"templates"):
        assert word in old
    converted = TaskBundle.from_bytes(convert(old))
    assert converted.manifest == current.manifest
    assert list(converted.tensors) == list(current.tensors)
    for name, array in current.tensors.items():
        assert np.array_equal(converted.tensors[name], array), name
    assert converted.to_bytes() == current.to_bytes()


def test_script_converts_files_in_place(current, tmp_path):
    path = tmp_path / "old.safetensors"
    path.write_bytes(in_old_format(current))
    command = [sys.executable, "-m", "scripts.convert_bundle", str(path)]
    subprocess.run(command, cwd=ROOT, check=True)
    assert TaskBundle.load(path) == current
