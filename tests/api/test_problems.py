"""Every error is returned as a problem document."""

import re
from unittest.mock import Mock

import engram_bundle.errors
import engram_server.errors
import engram_store.errors
import pytest
from engram_bundle import TaskStoreError
from engram_bundle.errors import UnreadableBundle
from engram_server.api.problems import STATUSES, error_rows, kind_of, problem_response
from engram_server.errors import BatchFailed, EngramError, KeyRequired, Overloaded, QuotaExceeded
from engram_store.errors import CorruptStore, StoreUnavailable, UnsupportedFormat
from starlette.testclient import TestClient

from tests.api.conftest import assert_problem
from tests.serving import photo

BASES = (EngramError, TaskStoreError)
MODULES = (engram_server.errors, engram_bundle.errors, engram_store.errors)


def declared(module):
    """The error classes of a module."""
    found = [each for each in vars(module).values() if isinstance(each, type)]
    return [each for each in found if each.__module__ == module.__name__]


ALL = [error for module in MODULES for error in declared(module)]


@pytest.mark.parametrize("error", ALL, ids=lambda error: error.__name__)
def test_every_error_has_a_kind_and_a_meaning(error):
    kind = kind_of(error)
    assert 400 <= kind.status < 600
    assert re.fullmatch(r"[a-z]+(-[a-z]+)*", kind.name)
    assert kind.title
    assert kind.meaning.endswith(".")


def test_no_status_is_for_a_class_that_is_gone():
    assert set(STATUSES) <= set(ALL)


def test_the_rows_for_the_documentation_have_each_kind_once():
    rows = error_rows()
    assert [row[1] for row in rows] == [*dict.fromkeys(row[1] for row in rows)]
    assert rows == sorted(rows)
    by_name = {name: status for status, name, _, _ in rows}
    assert by_name["unknown-task"] == 404
    assert by_name["internal"] == 500
    assert by_name["store-too-new"] == 503
    assert not {"request", "image", "task"} & set(by_name), "categories are not kinds"


def test_a_subclass_declared_elsewhere_has_the_kind_of_its_base():
    class Worse(BatchFailed):
        pass

    assert kind_of(Worse) == kind_of(BatchFailed)


def test_errors_about_permissions_and_quotas_are_rejections():
    assert kind_of(KeyRequired).refusal
    assert kind_of(QuotaExceeded).refusal
    assert not kind_of(Overloaded).refusal


def test_overload_has_retry_after():
    assert problem_response(Overloaded("full", retry_after=2.2)).headers["retry-after"] == "3"
    assert problem_response(Overloaded("full", retry_after=0.0)).headers["retry-after"] == "1"


def test_detail_is_a_sentence():
    assert (
        b'"detail": "The queue is full."'
        in problem_response(Overloaded("the queue is full", 1)).body
    )


def test_unknown_path_and_method(client):
    assert_problem(client.get("/nowhere"), 404, "not-found")
    response = client.patch("/predict")
    assert_problem(response, 405, "method-not-allowed")
    assert response.headers["allow"] == "POST, PUT"
    assert client.post("/tasks/pets").headers["allow"] == "DELETE, GET, PUT"


def test_an_unexpected_error_is_a_500_that_reveals_only_its_id(world, monkeypatch, caplog):
    async def broken(*args, **kwargs):
        raise ZeroDivisionError("the secret of the universe")

    monkeypatch.setattr(world.engine.predictions, "predict", broken)
    with TestClient(world.app()) as client:
        response = client.post("/predict", content=b"x", headers={"X-Request-Id": "find-me"})
    document = assert_problem(response, 500, "internal")
    assert "secret" not in response.text
    assert document["request_id"] == "find-me"
    assert "the secret of the universe" in caplog.text


def test_failed_batch_is_a_500_problem_and_the_next_succeeds(world, monkeypatch, cat):
    async def failing(*args, **kwargs):
        raise BatchFailed("the model failed on this batch (RuntimeError)")

    with TestClient(world.app()) as client:
        with monkeypatch.context() as patch:
            patch.setattr(world.engine.predictions, "predict", failing)
            assert_problem(client.post("/predict", content=cat), 500, "batch-failed")
        assert client.post("/predict", content=cat).status_code == 200


def test_full_queue_is_a_429_with_retry_after(world, monkeypatch, cat):
    monkeypatch.setattr(world.engine.predictions._pending, "used", 10_000)
    with TestClient(world.app()) as client:
        response = client.post("/predict", content=cat)
    assert_problem(response, 429, "overloaded")
    assert int(response.headers["retry-after"]) >= 1


def test_draining_engine_is_a_503_with_retry_after(world, monkeypatch, cat):
    monkeypatch.setattr(world.engine.predictions, "draining", True)
    with TestClient(world.app()) as client:
        response = client.post("/predict", content=cat)
    assert_problem(response, 503, "draining")
    assert int(response.headers["retry-after"]) >= 1


def test_name_that_no_encoding_carries_still_makes_a_problem(client):
    response = client.get("/tasks/%ED%A0%80x")
    assert response.status_code in (404, 422)
    assert response.headers["content-type"] == "application/problem+json"


def test_the_tree_in_the_docstring_has_every_error():
    for name, error in vars(engram_server.errors).items():
        if isinstance(error, type) and issubclass(error, EngramError):
            assert re.search(rf"\b{name}\b", engram_server.errors.__doc__), name


SECRET = "The task store s3://secret-bucket could not write '/srv/secret': Os { code: 13 }."


def test_errors_that_name_the_store_have_a_public_message():
    for error in (StoreUnavailable, CorruptStore, UnsupportedFormat, UnreadableBundle):
        for path in ("/tasks", "/v2/models/pets"):
            response = problem_response(error(SECRET, names=["/srv/secret"]), path=path)
            assert b"secret" not in response.body
            assert b"Os {" not in response.body
        assert str(error(SECRET)) == SECRET


def test_no_answer_reveals_where_the_store_is_and_the_log_does(world, monkeypatch, caplog):
    def away(*args, **options):
        raise StoreUnavailable(SECRET, names=["/srv/secret"])

    monkeypatch.setattr(world.store, "_commit", away)
    monkeypatch.setattr(world.store, "history", away)
    with TestClient(world.app()) as client:
        for response in (client.post("/tasks/pets/rollback"), client.get("/tasks/pets/history")):
            document = assert_problem(response, 503, "store-unavailable")
            assert "Try again later" in document["detail"]
            assert "secret" not in response.text
    assert caplog.text.count("secret-bucket") == 2


def test_the_reason_of_a_failed_task_reveals_no_path(world, fresh, monkeypatch):
    monkeypatch.setattr(world.store, "read_bundle", Mock(side_effect=CorruptStore(SECRET)))
    world.store.publish(fresh, world.bundle(987))
    world.engine.tasks.sync()
    with TestClient(world.app()) as client:
        text = client.get(f"/tasks/{fresh}").text
        response = client.post(f"/predict?tasks={fresh}", content=photo(1))
    assert_problem(response, 503, "task-unavailable")
    assert "damaged or replaced" in text
    assert "secret-bucket" not in text + response.text
