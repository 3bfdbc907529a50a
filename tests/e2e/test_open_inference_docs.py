"""What docs/reference/open-inference.md shows happens: its code and its commands are run."""

import json
import re
import subprocess

import pytest
from engram_server.api.routes.v2 import infer, models

from tests.conftest import REPOSITORY
from tests.e2e.test_kserve import PYTHON

PAGE = (REPOSITORY / "docs" / "reference" / "open-inference.md").read_text(encoding="utf-8")
ADDRESS = "127.0.0.1:8000"


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", PAGE, re.DOTALL)


@pytest.fixture
def address(embedded_server):
    return embedded_server.url.removeprefix("http://")


def run(command: list, **options) -> str:
    done = subprocess.run(
        command, cwd=REPOSITORY, capture_output=True, text=True, timeout=120, **options
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_python_for_tritons_client_runs(address, monkeypatch):
    monkeypatch.chdir(REPOSITORY)
    code = [block for block in blocks("python") if not block.startswith("# kserve")]
    assert len(code) == 2
    # One after the other: the second goes on where the first ends.
    program = "\n".join(code).replace(ADDRESS, address).replace("…", "a key")
    space: dict = {}
    try:
        exec(compile(program, "docs/reference/open-inference.md", "exec"), space)
    finally:
        space["client"].close()


@pytest.mark.long
def test_python_for_kserves_client_runs(address):
    (code,) = [block for block in blocks("python") if block.startswith("# kserve")]
    printed = run([PYTHON, "-c", code.replace(ADDRESS, address)])
    assert printed.splitlines()[-1] == "{'cifar10': (1, 10), 'flowers': (1, 102)}"


def test_commands_answer_as_they_say(address):
    infer, error = (block.replace(ADDRESS, address) for block in blocks("sh"))
    (output,) = json.loads(run(["bash", "-c", infer]))["outputs"]
    assert (output["datatype"], output["shape"]) == ("BYTES", [1, 3])
    assert re.fullmatch(r"0\.\d+:\d:\w+", output["data"][0])
    (answer,) = blocks("json")
    assert json.loads(run(["bash", "-c", error])) == json.loads(answer)


def test_every_route_is_on_the_page():
    for route in [*infer.router.routes, *models.router.routes]:
        path = route.path_format.replace("{name}", "{model}").replace("/versions/{version}", "")
        if path.startswith("/v2/repository/models"):
            path = path.rpartition("/")[2]
        assert path in PAGE.replace("[/versions/{v}]", ""), path
