"""The client installed without the server: only its own package and its declared dependencies."""

import subprocess
import sys
import tomllib
from importlib import metadata
from pathlib import Path

import engram_client
import pytest
from packaging.requirements import Requirement

from tests.client.sites import Outcome, Site

PROJECT = Path(__file__).parents[2] / "clients" / "python" / "pyproject.toml"


def dependencies(requirements: list[str]) -> set[str]:
    """Names of everything that an installation of the requirements brings along."""
    found: set[str] = set()
    waiting = [Requirement(text) for text in requirements]
    while waiting:
        requirement = waiting.pop()
        wanted = requirement.marker is None or requirement.marker.evaluate({"extra": ""})
        if wanted and requirement.name not in found:
            found.add(requirement.name)
            waiting += [Requirement(text) for text in metadata.requires(requirement.name) or []]
    return found


@pytest.fixture(scope="module")
def alone(tmp_path_factory) -> Path:
    """A folder to put on an otherwise empty import path."""
    folder = tmp_path_factory.mktemp("alone")
    project = tomllib.loads(PROJECT.read_text())["project"]
    Site(folder).install("engram-client", version=project["version"])
    (folder / "engram_client").symlink_to(Path(engram_client.__file__).parent)
    for name in dependencies(project["dependencies"]):
        distribution = metadata.distribution(name)
        for top in {file.parts[0] for file in distribution.files or []} - {"..", "__pycache__"}:
            link = folder / top
            if not link.exists():
                link.symlink_to(Path(str(distribution.locate_file(top))))
    return folder


def run(folder: Path, *args: str) -> Outcome:
    program = f"import sys; sys.path.insert(0, {str(folder)!r})\n"
    program += "from engram_client.cli import main; main()"
    # -I: no environment, no current folder; -S: no site-packages.
    command = [sys.executable, "-I", "-S", "-c", program, *args]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    return Outcome(done.returncode, done.stdout, done.stderr)


def test_version_names_the_client_only(alone):
    outcome = run(alone, "--version")
    assert (outcome.code, outcome.err) == (0, "")
    assert outcome.out.startswith("engram-client ")
    assert outcome.out.count("\n") == 1


def test_help_works_and_lists_nothing_that_cannot_run(alone):
    outcome = run(alone, "--help")
    assert outcome.code == 0
    assert "Usage: engram" in outcome.out
    assert "unavailable" not in outcome.out
    assert "serve" not in outcome.out


@pytest.mark.parametrize("args", [["serve", "--port", "1"], ["import", "--help"]])
def test_server_command_says_what_to_install(alone, args):
    outcome = run(alone, *args)
    assert outcome.code == 2
    needs = f"error: `engram {args[0]}` needs the server package: pip install engram\n"
    assert outcome.err == needs


def test_mistyped_server_command_is_still_suggested(alone):
    outcome = run(alone, "serv")
    assert outcome.code == 2
    assert "Did you mean 'serve'" in outcome.err
