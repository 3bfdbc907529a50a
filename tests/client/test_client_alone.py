"""The client installed without the server: only its own package and its declared dependencies."""

import json
import re
import subprocess
import sys
import tomllib
from importlib import metadata
from pathlib import Path

import engram_vit
import pytest
from packaging.requirements import Requirement

from tests.client.fake_server import listening
from tests.client.sites import Outcome, Site

PROJECT = Path(__file__).parents[2] / "clients" / "python" / "pyproject.toml"


def dependencies(requirements: list[str]) -> set[str]:
    """Names of everything that an installation of the requirements brings along."""
    found: set[str] = set()
    waiting = [Requirement(text) for text in requirements]
    while waiting:
        requirement = waiting.pop()
        applies = requirement.marker is None or requirement.marker.evaluate({"extra": ""})
        if applies and requirement.name not in found:
            found.add(requirement.name)
            waiting += [Requirement(text) for text in metadata.requires(requirement.name) or []]
    return found


@pytest.fixture(scope="module")
def alone(tmp_path_factory) -> Path:
    """A folder to put on an otherwise empty import path."""
    folder = tmp_path_factory.mktemp("alone")
    project = tomllib.loads(PROJECT.read_text())["project"]
    groups = project["entry-points"]
    Site(folder).install(
        "engram-vit",
        version=project["version"],
        commands=groups["engram.commands"],
        errors=groups["engram.errors"],
    )
    (folder / "engram_vit").symlink_to(Path(engram_vit.__file__).parent)
    for name in dependencies(project["dependencies"]):
        distribution = metadata.distribution(name)
        for top in {file.parts[0] for file in distribution.files or []} - {"..", "__pycache__"}:
            link = folder / top
            if not link.exists():
                link.symlink_to(Path(str(distribution.locate_file(top))))
    return folder


def run(
    folder: Path, *args: str, program: str = "from engram_vit.commands.main import main; main()"
) -> Outcome:
    program = f"import sys; sys.path.insert(0, {str(folder)!r})\n{program}"
    # -I: no environment, no current folder; -S: no site-packages.
    command = [sys.executable, "-I", "-S", "-c", program, *args]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    return Outcome(done.returncode, done.stdout, done.stderr)


def test_version_names_the_client_only(alone):
    outcome = run(alone, "--version")
    assert (outcome.code, outcome.err) == (0, "")
    assert outcome.out.startswith("engram-vit ")
    assert outcome.out.count("\n") == 1


def test_help_works_and_lists_nothing_that_cannot_run(alone):
    outcome = run(alone, "--help")
    assert outcome.code == 0
    assert "Usage: engram" in outcome.out
    assert "unavailable" not in outcome.out
    for command in ("predict", "push", "pull", "tasks"):
        assert re.search(rf"\b{command}\b", outcome.out), command
    assert not re.search(r"\b(serve|train|evaluate)\b", outcome.out)


def test_images_are_predicted_with_nothing_else_installed(alone, tmp_path):
    (tmp_path / "cat.jpg").write_bytes(b"a cat")
    with listening() as url:
        outcome = run(alone, "predict", str(tmp_path), "--server", url)
    assert (outcome.code, outcome.err) == (0, "")
    assert json.loads(outcome.out)["tasks"]["pets"]["predictions"][0]["label"] == "a cat"


def test_both_clients_are_there_without_torch_numpy_or_pillow(alone):
    program = (
        "from engram_vit import AsyncClient, Client\n"
        "from importlib.util import find_spec\n"
        "assert not any(map(find_spec, ('torch', 'numpy', 'PIL', 'pandas', 'server')))\n"
        "Client('http://127.0.0.1:8000').close()\n"
        "print('good')"
    )
    outcome = run(alone, program=program)
    assert (outcome.code, outcome.out, outcome.err) == (0, "good\n", "")


def test_an_error_of_the_client_is_one_line(alone, tmp_path):
    outcome = run(alone, "push", str(tmp_path / "none.safetensors"))
    assert outcome.code == 2
    none = tmp_path / "none.safetensors"
    assert outcome.err == f"error: Cannot read '{none}': No such file or directory.\n"


@pytest.mark.parametrize("args", [["serve", "--port", "1"], ["import", "--help"]])
def test_server_command_says_what_to_install(alone, args):
    outcome = run(alone, *args)
    assert outcome.code == 2
    needs = f"error: `engram {args[0]}` requires the server: pip install 'engram-vit[server]'\n"
    assert outcome.err == needs


def test_mistyped_server_command_is_still_suggested(alone):
    outcome = run(alone, "serv")
    assert outcome.code == 2
    assert "Did you mean 'serve'" in outcome.err
