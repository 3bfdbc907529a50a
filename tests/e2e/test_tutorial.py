"""The tutorial, followed from top to bottom: `make serve`, drawn photos, one terminal."""

import json
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from engram_bundle import TaskBundle
from engram_vit import Client

from tests.conftest import REPOSITORY
from tests.documents import ADDRESS, following
from tests.e2e.browser import chromium, drop, open_page
from tests.e2e.server_process import free_port

pytestmark = [pytest.mark.long, pytest.mark.timeout(1800)]


@dataclass(frozen=True)
class Followed:
    url: str
    folder: Path  # the reader's own
    printed: str


def as_a_reader(home: Path, port: int) -> tuple[dict[str, str], dict[str, object]]:
    """What is typed here instead of what a page says, and the environment."""
    # The tests' own environment is the one that `make setup` made: it is not made again.
    here = Path(sys.executable).parent.parent
    url = f"http://127.0.0.1:{port}"
    replaced = {
        ADDRESS: url,
        ".venv/": f"{here}/",
        "make ": f"make VENV={here} -o {here}/.runtime ",
        "git clone https://github.com/engram-vit/engram && cd engram": "true",
    }
    settings = {"port": port, "server": url, "store": home / "store", "torch_threads": 1}
    return replaced, {f"engram_{name}": value for name, value in settings.items()}


@pytest.fixture(scope="module")
def followed(tmp_path_factory) -> Iterator[Followed]:
    """The state after all steps of the page, with the server still running."""
    home, port = tmp_path_factory.mktemp("home"), free_port()
    folder, url = home / "first-task", f"http://127.0.0.1:{port}"
    replaced, variables = as_a_reader(home, port)
    with following(
        "tutorial/first-task.md", REPOSITORY, replaced, home=home, **variables
    ) as printed:
        yield Followed(url, folder, printed)


def test_each_step_does_what_the_page_says(followed):
    answers = [json.loads(line) for line in re.findall(r"^\{.*\}$", followed.printed, flags=re.M)]
    first, explained = (answer["images"][0]["tasks"] for answer in answers)
    assert first.keys() == {"cifar10", "base"}
    assert explained["lights"]["version"] == 1
    assert explained["lights"]["attention"]["grid"]
    bundle = TaskBundle.load(followed.folder / "lights.safetensors")
    variant = bundle.manifest.training["variant"]
    assert variant["regime"] == "layers", "75 photos are too few to validate trained rows"
    assert bundle.labels == ("go", "stop", "wait")
    assert "<svg" in (followed.folder / "lights.html").read_text(encoding="utf-8")


def test_the_first_version_answers_in_the_end(followed):
    photo = followed.folder / "photos" / "stop" / "00.jpg"
    with Client(followed.url) as client:
        (answer,) = client.predict(photo)
    demo = {"base", "cifar10", "cifar100", "flowers", "leaves", "quality"}
    assert set(answer.tasks) == {*demo, "lights"}
    assert (answer["lights"].version, answer["lights"].top.label) == (1, "stop")


def test_the_console_shows_the_attention_of_the_new_task(followed):
    photo = (followed.folder / "photos" / "stop" / "00.jpg").read_bytes()
    with chromium() as browser, open_page(browser, followed.url) as page:
        drop(page, "#drop", ("photo.jpg", "image/jpeg", photo))
        page.wait_for_selector(".card[data-task='lights']")
        before = page.evaluate("document.getElementById('canvas').toDataURL()")
        page.click(".look[data-task='lights']")
        page.wait_for_function(
            "before => document.getElementById('canvas').toDataURL() !== before", arg=before
        )


def test_the_quickstart(tmp_path):
    port = free_port()
    replaced, variables = as_a_reader(tmp_path, port)
    with (
        following(
            "tutorial/quickstart.md", REPOSITORY, replaced, home=tmp_path, **variables
        ) as printed,
        Client(f"http://127.0.0.1:{port}") as client,
    ):
        assert '"label":"bee"' in printed
        assert client.task("lights").class_labels == ("go", "stop", "wait")
