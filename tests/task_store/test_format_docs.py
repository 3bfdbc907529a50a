"""The examples in the reference pages of the bundle format and the task store run."""

import json
import re
from pathlib import Path

import numpy as np
import pytest
from engram_bundle import Manifest, TaskBundle
from engram_store import open_store

DOCS = Path(__file__).resolve().parents[2] / "docs"
FORMAT = (DOCS / "reference" / "bundle-format.md").read_text()
STORE = (DOCS / "reference" / "task-store.md").read_text()
(HEADER,) = re.findall(r"```json\n(.*?)\n```", FORMAT, re.S)


def test_worked_example_is_the_file_it_describes():
    length, tensors = (
        bytes.fromhex(block) for block in re.findall(r"```hex\n(.*?)```", FORMAT, re.S)
    )
    padding = b" " * (-len(HEADER) % 8)
    data = length + HEADER.encode() + padding + tensors
    loaded = TaskBundle.from_bytes(data)
    assert loaded.digest in FORMAT
    assert f"The file has {len(data)} bytes" in FORMAT
    assert f"{len(HEADER)} bytes of JSON" in FORMAT
    assert np.array_equal(loaded.tensors["head.weight"], [[1, -2], [0.5, 0]])
    assert np.array_equal(loaded.tensors["head.bias"], [0, 1])
    assert loaded.to_bytes(dtype="F32") == data, "Engram writes these very bytes"


@pytest.mark.parametrize("page", [FORMAT, STORE], ids=["bundle-format", "task-store"])
def test_python_examples_run(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    manifest = Manifest.from_json(json.loads(HEADER)["__metadata__"]["engram"])
    TaskBundle(manifest, {"head.weight": np.ones((2, 2))}).save("cifar.safetensors")
    other = TaskBundle(manifest, {"head.weight": np.zeros((2, 2))})
    open_store("./tasks").publish("cifar", other)
    for block in re.findall(r"```python\n(.*?)```", page, re.S):
        exec(block, {})
