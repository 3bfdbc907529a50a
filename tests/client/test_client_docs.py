"""docs/reference/{client,cli}.md: their examples run, and what they list is what there is."""

import inspect
import os
import re
import shutil
import subprocess
import sys
from importlib.metadata import entry_points
from pathlib import Path

import pytest
from engram_training.commands.options import option_rows
from engram_vit import Client, ClientError, errors
from engram_vit.predicting import PredictOptions

from tests.conftest import PHOTOS, REPOSITORY
from tests.e2e.server_process import serving

CLIENT = (REPOSITORY / "docs" / "reference" / "client.md").read_text(encoding="utf-8")
COMMANDS = (REPOSITORY / "docs" / "reference" / "cli.md").read_text(encoding="utf-8")


def blocks(page: str, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", page, flags=re.DOTALL)


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """The embedded backbone with its demo tasks, as `make serve` has them."""
    with serving(tmp_path_factory.mktemp("docs")) as running:
        yield running


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A folder with photos, to be in."""
    shutil.copytree(PHOTOS, tmp_path / "photos")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_the_pages_python_runs(server, here, capsys):
    code = "\n".join(blocks(CLIENT, "python")).replace("http://127.0.0.1:8000", server.url)
    names: dict = {}
    exec(compile(code, "docs/reference/client.md", "exec"), names)
    printed = capsys.readouterr().out
    assert "Prediction(label='" in printed
    assert "photos/missing.jpg: The file does not exist." in printed
    assert "wildlife 1 (" in printed
    assert [answer.image for answer in names["answers"]] == ["photos/cat.jpg"]


@pytest.mark.long
def test_the_pages_commands_run(server, here):
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, "ENGRAM_SERVER": server.url}
    for block in blocks(COMMANDS, "sh"):
        done = subprocess.run(
            ["sh", "-e", "-c", block],
            cwd=here,
            env=environment,
            capture_output=True,
            text=True,
            timeout=280,
        )
        assert (done.returncode, done.stderr) == (0, ""), block
    assert (here / "answers.csv").read_text().startswith("image,task,version,label")
    assert (here / "copy.safetensors").read_bytes() == (here / "animals.safetensors").read_bytes()


def own_commands():
    found = entry_points(group="engram.commands")
    return [one for one in found if one.value.startswith("engram_vit.")]


@pytest.mark.parametrize("command", own_commands(), ids=lambda one: one.name)
def test_every_command_and_option_is_documented(command):
    assert re.search(rf"`(engram )?{command.name.rpartition('.')[2]}\b", COMMANDS)
    for row in option_rows(command.load()):
        assert f"`{row.option}`" in COMMANDS, row.option


def every_error(cls=ClientError):
    yield cls
    for child in cls.__subclasses__():
        yield from every_error(child)


def test_every_error_is_documented_with_its_exit_code():
    listed = dict(re.findall(r"^\| `(\w+)` \| (.*) \|$", CLIENT, flags=re.MULTILINE))
    tree = {one.__name__: one for one in every_error()}
    assert tree.keys() <= listed.keys()
    assert all(f"─ {name} " in errors.__doc__ for name in tree.keys() - {"ClientError"})
    rows = re.findall(r"^\| (\d+) \| .* \| (.*) \|$", COMMANDS, flags=re.MULTILINE)
    codes = {name: int(code) for code, names in rows for name in re.findall(r"`(\w+)`", names)}
    assert codes == {name: one.exit_code for name, one in tree.items() if one is not ClientError}


def test_every_method_and_keyword_is_documented():
    methods = [name for name, _ in inspect.getmembers(Client, inspect.isfunction)]
    for name in methods:
        assert name.startswith("_") or re.search(rf"\b{name}\b", CLIENT), name
    for keyword in PredictOptions.__annotations__:
        assert f"`{keyword}`" in CLIENT, keyword
