"""The private transformers argument is used by one module only, and does what we rely on."""

import re
from pathlib import Path

import engram_server
import engram_training
from engram_server.model.families.hub import find_file

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
