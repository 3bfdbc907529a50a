"""The public reproduction's files, and the real command."""

import json

import pytest
import torch
from engram_server.model import load_backbone
from engram_vit.commands.main import main


@pytest.fixture(scope="session")
def reproduction(data):
    return data / "reproduction-oracle"


@pytest.fixture(scope="session")
def task_names(reproduction):
    return [
        task["name"] for task in json.loads((reproduction / "fixture.json").read_text())["tasks"]
    ]


@pytest.fixture(scope="session")
def backbone(reproduction):
    return load_backbone(reproduction / "backbone")


@pytest.fixture
def state(reproduction):
    """`state(name)`: the tensors of a file, to be changed freely."""

    def read(name):
        return dict(torch.load(reproduction / f"{name}_model.pt", weights_only=True))

    return read


@pytest.fixture
def engram_import(reproduction, tmp_path, monkeypatch, capsys):
    """Run `engram import` in an empty folder; what it prints. Errors come through as raised."""
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setenv("ENGRAM_DEBUG", "1")
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")

    def run(file, *args, backbone=reproduction / "backbone", out="bundles", name="task"):
        if not isinstance(file, str):  # tensors
            torch.save(file, tmp_path / "made.pt")
            file = tmp_path / "made.pt"
        command = ["import", str(file), "--backbone", str(backbone), "--out", out, *args]
        with pytest.raises(SystemExit) as stop:
            main([*command, *([] if "--name" in args else ["--name", name])])
        assert stop.value.code == 0
        return capsys.readouterr().out

    return run
