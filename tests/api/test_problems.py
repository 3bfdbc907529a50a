"""Every refusal is a problem document, and every error has its kind."""

import re

import pytest
from starlette.testclient import TestClient

from server.api.problems import KINDS, kind_of, of_error
from server.errors import BatchFailed, EngramError, Overloaded
from task_store import TaskStoreError
from tests.api.conftest import assert_problem
from tests.conftest import REPOSITORY

BASES = (EngramError, TaskStoreError)


def leaves(error):
    """Classes nothing derives from; those that tests define aside."""
    found = [cls for cls in error.__subclasses__() if cls.__module__.split(".")[0] != "tests"]
    return [leaf for cls in found for leaf in leaves(cls)] if found else [error]


@pytest.mark.parametrize(
    "error", [leaf for base in BASES for leaf in leaves(base)], ids=lambda error: error.__name__
)
def test_every_error_has_a_kind_of_its_own(error):
    mapped = next(cls for cls in error.__mro__ if cls in KINDS)
    assert mapped not in BASES
    assert 400 <= KINDS[mapped].status < 600


def test_documentation_lists_every_kind_and_nothing_else():
    text = (REPOSITORY / "docs" / "reference" / "http-api.md").read_text()
    rows = re.findall(r"^\| (\d{3}) \| `([a-z-]+)` \|", text, re.M)
    written = {(int(status), name) for status, name in rows}
    assert written == {(kind.status, kind.name) for kind in KINDS.values()}


def test_subclass_unknown_to_the_table_is_of_its_base_kind():
    class Worse(BatchFailed):
        pass

    assert kind_of(Worse("x")) == KINDS[BatchFailed]


def test_overload_says_when_to_come_back():
    assert of_error(Overloaded("full", retry_after=2.2)).headers["retry-after"] == "3"
    assert of_error(Overloaded("full", retry_after=0.0)).headers["retry-after"] == "1"


def test_detail_is_a_sentence():
    assert b'"detail": "The queue is full."' in of_error(Overloaded("the queue is full", 1)).body


def test_unknown_path_and_method(client):
    assert_problem(client.get("/nowhere"), 404, "not-found")
    response = client.patch("/predict")
    assert_problem(response, 405, "method-not-allowed")
    assert response.headers["allow"] == "POST, PUT"
    assert client.post("/tasks/pets").headers["allow"] == "DELETE, GET, PUT"


def test_unexpected_error_is_a_500_that_tells_nothing_but_its_id(world, monkeypatch, caplog):
    async def broken(request):
        raise ZeroDivisionError("the secret of the universe")

    monkeypatch.setattr(world.engine, "predict", broken)
    with TestClient(world.app()) as client:
        response = client.post("/predict", content=b"x", headers={"X-Request-Id": "find-me"})
    document = assert_problem(response, 500, "internal")
    assert "secret" not in response.text
    assert document["request_id"] == "find-me"
    assert "the secret of the universe" in caplog.text


def test_failed_batch_is_a_500_problem_and_the_next_succeeds(world, monkeypatch, cat):
    async def failing(request):
        raise BatchFailed("the model failed on this batch (RuntimeError)")

    with TestClient(world.app()) as client:
        with monkeypatch.context() as patch:
            patch.setattr(world.engine, "predict", failing)
            assert_problem(client.post("/predict", content=cat), 500, "batch-failed")
        assert client.post("/predict", content=cat).status_code == 200


def test_full_queue_is_a_429_with_retry_after(world, monkeypatch, cat):
    monkeypatch.setattr(world.engine, "pending_images", 10_000)
    with TestClient(world.app()) as client:
        response = client.post("/predict", content=cat)
    assert_problem(response, 429, "overloaded")
    assert int(response.headers["retry-after"]) >= 1


def test_draining_engine_is_a_503_with_retry_after(world, monkeypatch, cat):
    monkeypatch.setattr(world.engine, "_draining", True)
    with TestClient(world.app()) as client:
        response = client.post("/predict", content=cat)
    assert_problem(response, 503, "draining")
    assert int(response.headers["retry-after"]) >= 1


def test_name_that_no_encoding_carries_still_makes_a_problem(client):
    response = client.get("/tasks/%ED%A0%80x")
    assert response.status_code in (404, 422)
    assert response.headers["content-type"] == "application/problem+json"
