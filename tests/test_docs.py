"""What the README shows is what happens: its request, its answer and its links are checked."""

import json
import re
import subprocess
from pathlib import Path

import pytest

from tests.documents import blocks_of, read_page
from tests.e2e.server_process import serving

REPOSITORY = Path(__file__).resolve().parent.parent
README = (REPOSITORY / "README.md").read_text(encoding="utf-8")
IN_PROCESS = "how-to/in-process.md"
TOLERANCE = 0.005  # of a score: processors differ in the last digits


def block_after(marker: str, language: str) -> str:
    match = re.search(rf"<!-- {marker}[^>]* -->\n```{language}\n(.*?)```", README, re.DOTALL)
    assert match, f"the README has no {marker}"
    return match.group(1)


def assert_shows(answer, shown, where="answer"):
    """Every member that is shown is in the answer, with that value; members may be left out."""
    if isinstance(shown, dict):
        assert shown.keys() <= answer.keys(), where
        for key, value in shown.items():
            assert_shows(answer[key], value, f"{where}.{key}")
    elif isinstance(shown, list):
        assert len(answer) == len(shown), where
        for index, (one, other) in enumerate(zip(answer, shown, strict=True)):
            assert_shows(one, other, f"{where}[{index}]")
    elif isinstance(shown, float):
        assert answer == pytest.approx(shown, abs=TOLERANCE), where
    else:
        assert answer == shown, where


@pytest.mark.long
def test_the_readmes_request_gives_the_readmes_answer(tmp_path):
    command = block_after("request", "sh")
    shown = json.loads(block_after("answer", "json"))
    with serving(tmp_path) as server:
        command = command.replace("http://127.0.0.1:8000", server.url).replace("curl", "curl -s")
        done = subprocess.run(
            ["sh", "-c", command], cwd=REPOSITORY, capture_output=True, text=True, timeout=60
        )
        assert done.returncode == 0, done.stderr
        answer = json.loads(done.stdout)
        assert_shows(answer, shown)
        # What the sentence below it says of the rest.
        assert set(answer["timings_ms"]) == {"queue", "decode", "forward", "total"}
        (image,) = answer["images"]
        assert image["digest"].startswith("sha256:")
        assert server.stop() == 0


def test_every_requested_task_is_shown_with_a_label():
    (tasks,) = re.findall(r"tasks=([\w,]+)", block_after("request", "sh"))
    (image,) = json.loads(block_after("answer", "json"))["images"]
    assert list(image["tasks"]) == tasks.split(",")
    assert all(task["predictions"][0]["label"] for task in image["tasks"].values())


@pytest.mark.parametrize(
    ("answer", "shown"),
    [
        ({"label": "ship"}, {"label": "plane"}),
        ({"score": 0.5}, {"score": 0.51}),
        ({"tasks": {}}, {"tasks": {"base": {}}}),
        ({"images": [1, 2]}, {"images": [1]}),
    ],
)
def test_a_wrong_answer_is_noticed(answer, shown):
    with pytest.raises(AssertionError):
        assert_shows(answer, shown)


def python_blocks(page: str) -> list[str]:
    return [block.content for block in blocks_of(page) if block.language == "python"]


@pytest.mark.parametrize(
    "code", [*python_blocks(README), *python_blocks(read_page(IN_PROCESS))], ids=lambda code: "code"
)
def test_the_pages_python_runs(code, monkeypatch):
    monkeypatch.chdir(REPOSITORY)
    names: dict = {}
    exec(compile(code, IN_PROCESS, "exec"), names)
    assert {task: tuple(one.shape) for task, one in names["logits"].items()} == {
        "base": (1, 1000),
        "flowers": (1, 102),
    }
