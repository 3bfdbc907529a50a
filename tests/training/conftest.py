"""The seed reproduction's files, and the real command."""

import json

import pytest
import torch
from engram_client.cli import main

from server.model import load_backbone


@pytest.fixture(scope="session")
def seed(data):
    return data / "seed-oracle"


@pytest.fixture(scope="session")
def task_names(seed):
    return [task["name"] for task in json.loads((seed / "fixture.json").read_text())["tasks"]]


@pytest.fixture(scope="session")
def backbone(seed):
    return load_backbone(seed / "backbone")


@pytest.fixture
def state(seed):
    """`state(name)`: the tensors of a file, to be changed freely."""

    def read(name):
        return dict(torch.load(seed / f"{name}_model.pt", weights_only=True))

    return read


@pytest.fixture
def engram_import(seed, tmp_path, monkeypatch, capsys):
    """Run `engram import` in an empty folder; what it prints. Errors come through as raised."""
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setenv("ENGRAM_DEBUG", "1")
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")

    def run(file, *args, backbone=seed / "backbone", out="bundles", name="task"):
        if not isinstance(file, str):  # tensors
            torch.save(file, tmp_path / "made.pt")
            file = tmp_path / "made.pt"
        command = ["import", str(file), "--backbone", str(backbone), "--out", out, *args]
        with pytest.raises(SystemExit) as stop:
            main([*command, *([] if "--name" in args else ["--name", name])])
        assert stop.value.code == 0
        return capsys.readouterr().out

    return run
