"""Backbones of the hub, and the private transformers argument that reads their files."""

import os
import re
import subprocess
import sys
from pathlib import Path

import engram_server
import engram_training
import pytest
from engram_server.model import load_backbone
from engram_server.model.families.hub import find_file, split_revision

from tests.hub_server import Repository, serving_hub

# Loads a backbone and prints its fingerprint and name, or why it cannot.
LOAD = """
import sys
from engram_server.errors import BackboneError
from engram_server.model import load_backbone
from engram_server.model.families.text_tower import open_text_tower
for name in sys.argv[1:]:
    try:
        backbone = load_backbone(name)
        print(backbone.name, backbone.fingerprint, open_text_tower(name))
    except BackboneError as error:
        print("error:", str(error).replace(chr(10), " "))
"""

IMPORTS_TRANSFORMERS = re.compile(r"^\s*(?:import|from) transformers\b", re.MULTILINE)


def sources(package) -> dict[str, str]:
    root = Path(package.__file__).parent
    return {
        path.relative_to(root).as_posix(): path.read_text(encoding="utf-8")
        for path in root.rglob("*.py")
    }


def test_a_missing_file_is_none_and_not_an_error(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    assert find_file(str(tmp_path), "config.json") == str(tmp_path / "config.json")
    assert find_file(str(tmp_path), "model.safetensors") is None


def test_a_folder_with_an_at_sign_is_a_folder(tmp_path):
    folder = tmp_path / "model@v1"
    folder.mkdir()
    assert split_revision(str(folder)) == (str(folder), "main")
    assert split_revision("lab/vit") == ("lab/vit", "main")
    assert split_revision("lab/vit@v1") == ("lab/vit", "v1")


def load(*names: str, **environment: str) -> list[str]:
    """The line of LOAD for each name. The hub's address is read at import: a new process."""
    done = subprocess.run(
        [sys.executable, "-c", LOAD, *names],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.mark.long
def test_a_backbone_of_the_hub_can_be_pinned_and_used_offline(folder_of, tmp_path):
    with serving_hub() as hub:
        repository = hub.repositories["lab/vit"] = Repository(private=True)
        for seed in (0, 1):
            files = {file.name: file.read_bytes() for file in folder_of("vit", seed).iterdir()}
            commit = repository.commit(files)
            repository.tags[f"v{seed}"] = commit
        first, second = (load_backbone(folder_of("vit", seed)).fingerprint for seed in (0, 1))
        assert first != second
        environment = hub.environment(tmp_path)
        pinned = f"lab/vit@{repository.tags['v0']}"
        names = ("lab/vit", "lab/vit@v0", pinned, "lab/vit@v9")
        latest, tag, commit, unknown = load(*names, **environment)
        assert latest == f"vit {second} None"
        assert tag == commit == f"vit {first} None"
        assert unknown.startswith("error: Cannot read the model configuration of 'lab/vit@v9'")
        asked = len(hub.requests)
        (offline,) = load(pinned, **{**environment, "HF_HUB_OFFLINE": "1"})
        assert offline == commit
        assert len(hub.requests) == asked


def test_no_other_module_uses_private_transformers_arguments():
    users = [name for name, text in sources(engram_server).items() if "_raise_exceptions_" in text]
    assert users == ["model/families/hub.py"]


def test_only_the_families_import_transformers():
    users = [
        name
        for package in (engram_server, engram_training)
        for name, text in sources(package).items()
        if IMPORTS_TRANSFORMERS.search(text)
    ]
    assert users
    assert all(name.startswith("model/families/") for name in users)
