"""One prediction visits few files."""

import sys
import threading
from contextlib import contextmanager

import pytest
from starlette.testclient import TestClient

from tests.api.conftest import running_world
from tests.conftest import REPOSITORY
from tests.serving import photo

PRODUCT = tuple(f"{REPOSITORY / package}/" for package in ("server", "task_store"))


# What one prediction may visit: more files are more to read for a newcomer.
MOST_FILES = 36


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


def test_one_prediction(traced):
    tracer, world, client = traced
    # New ones: golden examples of tasks that are loaded together may have stacked them already.
    for seed, task in enumerate(("left", "right"), start=5):
        assert client.put(f"/tasks/{task}", content=world.bundle(seed).to_bytes()).is_success
    client.post("/predict?tasks=left", content=photo(1))
    with tracer.recording():
        assert client.post("/predict?tasks=left,right", content=photo(2)).status_code == 200
    assert len(tracer.visited) <= MOST_FILES, "\n".join(tracer.visited)
    assert "server/engram_server/api/inference.py" in tracer.visited
    assert "server/engram_server/engine/predictions.py" in tracer.visited
