"""The files one request visits are those that docs/explanation/architecture.md lists."""

import re
import sys
import threading
from contextlib import contextmanager

import pytest
from starlette.testclient import TestClient

from tests.api.conftest import running_world
from tests.conftest import REPOSITORY
from tests.serving import photo

PRODUCT = tuple(f"{REPOSITORY / package}/" for package in ("server", "task_store"))


PAGE = REPOSITORY / "docs" / "explanation" / "architecture.md"
MOST_STATIONS = {"One prediction": 18, "One publish": 16}


def listed(heading: str) -> tuple[list[str], set[str]]:
    """The stations of a way through the files, as the page lists them, and all its files."""
    section = PAGE.read_text(encoding="utf-8").split(f"\n## {heading}\n")[1].split("\n## ")[0]
    rows = [row for row in section.splitlines() if row.startswith("| `")]
    files = [re.findall(r"`([\w/]+\.py)`", row) for row in rows]
    return [row[0] for row in files], {file for row in files for file in row}


class Tracer:
    """Writes down the files whose functions run, in whichever thread, while it records."""

    def __init__(self):
        self.files: set[str] = set()
        self._recording = False

    def __call__(self, frame, event, arg):
        if self._recording and event == "call":
            self.files.add(frame.f_code.co_filename)

    @contextmanager
    def recording(self):
        self.files, self._recording = set(), True
        yield
        self._recording = False

    @property
    def visited(self) -> list[str]:
        ours = sorted(file for file in self.files if file.startswith(PRODUCT))
        return [file.removeprefix(f"{REPOSITORY}/") for file in ours]


@pytest.fixture(scope="module")
def traced(settings):
    """A server with all its threads traced, and without heartbeats, which have their own clock."""
    tracer = Tracer()
    threading.setprofile(tracer)
    sys.setprofile(tracer)
    try:
        alone = settings.model_copy(update={"heartbeat_seconds": 0})
        with running_world(alone) as world, TestClient(world.app()) as client:
            yield tracer, world, client
    finally:
        sys.setprofile(None)
        threading.setprofile(None)


@pytest.mark.parametrize("heading", MOST_STATIONS)
def test_few_stations_tell_the_way(heading):
    stations, _ = listed(heading)
    assert 0 < len(stations) <= MOST_STATIONS[heading]


def test_one_prediction(traced):
    tracer, world, client = traced
    # New ones: golden examples of tasks that are loaded together may have stacked them already.
    for seed, task in enumerate(("left", "right"), start=5):
        assert client.put(f"/tasks/{task}", content=world.bundle(seed).to_bytes()).is_success
    client.post("/predict?tasks=left", content=photo(1))
    with tracer.recording():
        assert client.post("/predict?tasks=left,right", content=photo(2)).status_code == 200
    assert tracer.visited == sorted(listed("One prediction")[1])


def test_one_publish(traced):
    tracer, world, client = traced
    client.put("/tasks/first", content=world.bundle(1).to_bytes())
    bundle = world.bundle(2).to_bytes()
    with tracer.recording():
        assert client.put("/tasks/second", content=bundle).status_code == 201
    stations, files = listed("One publish")
    assert set(stations) <= set(tracer.visited)
    # The golden examples go through the queue and the pass, as a prediction does.
    assert set(tracer.visited) <= files | listed("One prediction")[1]
