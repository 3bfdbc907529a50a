"""What the README shows is what happens: its request, its answer and its code are run."""

import json
import re
import subprocess
from pathlib import Path

import pytest

from tests.e2e.server_process import serving

REPOSITORY = Path(__file__).resolve().parent.parent
README = (REPOSITORY / "README.md").read_text()
TOLERANCE = 0.005  # of a score: processors differ in the last digits


def block_after(marker: str, language: str) -> str:
    found = re.search(rf"<!-- {marker} -->\n```{language}\n(.*?)```", README, re.DOTALL)
    assert found, f"the README has no {marker}"
    return found.group(1)


def comparable(answer):
    """Everything of an answer that does not depend on the moment or the machine's last digits."""
    answer = dict(answer)
    answer.pop("timings_ms")
    for image in answer["images"]:
        for task in image["tasks"].values():
            for prediction in task["predictions"]:
                prediction["score"] = pytest.approx(prediction["score"], abs=TOLERANCE)
    return answer


def test_the_readmes_request_gives_the_readmes_answer(tmp_path):
    command = block_after("request", "sh")
    expected = json.loads(block_after("answer", "json"))
    with serving(tmp_path) as server:
        command = command.replace("http://127.0.0.1:8000", server.url).replace("curl", "curl -s")
        done = subprocess.run(
            ["sh", "-c", command], cwd=REPOSITORY, capture_output=True, text=True, timeout=60
        )
        assert done.returncode == 0, done.stderr
        got = json.loads(done.stdout)
        assert set(got.pop("timings_ms")) == set(expected["timings_ms"])
        assert got == comparable(expected)
        assert server.stop() == 0


@pytest.mark.parametrize(
    "code", re.findall(r"```python\n(.*?)```", README, re.DOTALL), ids=lambda code: code[:30]
)
def test_the_readmes_python_runs(code, monkeypatch):
    monkeypatch.chdir(REPOSITORY)
    exec(compile(code, "README.md", "exec"), {})


def test_every_document_the_readme_links_to_exists():
    links = re.findall(r"\]\(([^)#:]+)\)", README)
    assert links
    for link in links:
        assert (REPOSITORY / link).exists(), link
