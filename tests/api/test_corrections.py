"""`/tasks/{task}/corrections`: what people say about the answers of a trained task."""

import base64
import hashlib

import pytest
from engram_server.api.routes.examples import (
    CorrectionList,
    CorrectionsKept,
    CorrectionsRemoved,
)
from starlette.testclient import TestClient

from tests.api.conftest import assert_problem, running_world
from tests.serving import make_bundle, photo


def example(data, *labels):
    return {"b64": base64.b64encode(data).decode(), "labels": list(labels)}


def digest_of(data):
    return f"sha256:{hashlib.sha256(data).hexdigest()}"


def correct(client, name, *examples):
    return client.post(f"/tasks/{name}/corrections", json={"examples": list(examples)})


def listed(client, name, query=""):
    response = client.get(f"/tasks/{name}/corrections{query}")
    assert response.status_code == 200, response.text
    return CorrectionList.model_validate(response.json())


@pytest.fixture
def trained(client, world, fresh):
    """A task that was trained, with the labels label0 to label4."""
    bundle = make_bundle(world.backbone, 7)
    assert client.put(f"/tasks/{fresh}", content=bundle.to_bytes()).status_code == 201
    return fresh


def test_corrections_are_kept_beside_the_task_and_change_nothing(client, trained, world):
    before = client.get(f"/tasks/{trained}").headers["etag"]
    response = correct(client, trained, example(photo(1), "label1"), example(photo(2), "label2"))
    assert response.status_code == 201, response.text
    kept = CorrectionsKept.model_validate(response.json())
    assert (kept.task, kept.corrections) == (trained, 2)
    assert client.get(f"/tasks/{trained}").headers["etag"] == before
    found = listed(client, trained)
    assert (found.records, found.unreadable) == (1, 0)
    assert {one.digest: one.labels for one in found.corrections} == {
        digest_of(photo(1)): ["label1"],
        digest_of(photo(2)): ["label2"],
    }
    first = found.corrections[0]
    assert (first.version, first.actor) == (1, "local")
    assert first.time
    assert not world.store.find_damage()


def test_a_correction_runs_no_pass_and_caches_no_image(client, trained, world, monkeypatch):
    monkeypatch.setattr(world.passes, "run", None)
    cached = len(world.engine.cache)
    assert correct(client, trained, example(photo(31), "label1")).status_code == 201
    assert len(world.engine.cache) == cached


def test_the_last_correction_of_a_photo_holds(client, trained):
    correct(client, trained, example(photo(1), "label1"), example(photo(2), "label2"))
    correct(client, trained, example(photo(1), "label3"))
    found = listed(client, trained)
    assert [one.labels for one in found.corrections] == [["label3"], ["label2"]]


def test_a_digest_is_enough(client, trained):
    unknown = {"digest": f"sha256:{'34' * 32}", "label": "label1"}
    assert correct(client, trained, unknown).status_code == 201
    (only,) = listed(client, trained).corrections
    assert only.digest == unknown["digest"]


def test_corrections_of_other_tasks_are_not_seen(client, trained):
    correct(client, "pets", example(photo(1), "cat"))
    assert listed(client, trained).records == 0
    assert listed(client, "pets").records == 1


def test_labels_must_fit_the_task_type(client, trained):
    two = correct(client, trained, example(photo(1), "label1", "label2"))
    assert_problem(two, 422, "unteachable-examples")
    twice = correct(client, trained, example(photo(1), "label1"), example(photo(1), "label2"))
    assert "'label2'" in assert_problem(twice, 422, "unteachable-examples")["detail"]
    assert correct(client, "scene", example(photo(1), "indoor", "sunny")).status_code == 201
    number = correct(client, "age", example(photo(1), "old"))
    assert "regression" in assert_problem(number, 422, "unteachable-examples")["detail"]
    unknown = correct(client, trained, example(photo(1), "camel"))
    problem = assert_problem(unknown, 422, "unteachable-examples")
    assert "has no class 'camel'" in problem["detail"]
    assert "label0, label1" in problem["detail"]
    nine = correct(client, "scene", example(photo(1), *"abcdefghi"))
    assert_problem(nine, 422, "invalid-request")
    assert listed(client, trained).records == 0


def test_a_page_has_the_newest_requests_and_says_how_many_there_are(client, trained):
    for number in range(1, 4):
        correct(client, trained, example(photo(number), "label1"))
    first, rest = listed(client, trained, "?limit=1"), listed(client, trained, "?offset=1")
    assert (first.records, rest.records) == (3, 3)
    assert [one.digest for one in first.corrections] == [digest_of(photo(3))]
    assert [one.digest for one in rest.corrections] == [digest_of(photo(2)), digest_of(photo(1))]
    assert_problem(client.get(f"/tasks/{trained}/corrections?limit=101"), 422, "invalid-request")


def test_damaged_corrections_are_counted(client, trained, world):
    correct(client, trained, example(photo(1), "label1"))
    correct(client, trained, example(photo(2), "label1"))
    path = f"corrections/{trained}/{1:020d}.json"
    world.store.objects.put(path, world.store.objects.get(path).replace(b"label1", b"label2"))
    found = listed(client, trained)
    assert (len(found.corrections), found.unreadable) == (1, 1)
    assert path in {damage.path for damage in world.store.verify().damages}
    remove(client, trained)
    assert world.store.verify().damages == ()


def remove(client, name, *photos):
    digests = [digest_of(data) for data in photos]
    response = client.delete(f"/tasks/{name}/corrections", params={"digest": digests})
    assert response.status_code == 200, response.text
    return CorrectionsRemoved.model_validate(response.json()).removed


def test_corrections_are_removed_for_good(client, trained, world):
    correct(client, trained, example(photo(1), "label1"), example(photo(2), "label2"))
    correct(client, trained, example(photo(1), "label3"), example(photo(3), "label2"))
    assert remove(client, trained, photo(1)) == 2
    assert {one.digest for one in listed(client, trained).corrections} == {
        digest_of(photo(2)),
        digest_of(photo(3)),
    }
    objects = world.store.objects
    stored = b"".join(objects.get(i.path) for i in objects.listing(f"corrections/{trained}"))
    assert digest_of(photo(1)).encode() not in stored
    assert b"label3" not in stored
    assert remove(client, trained, photo(1)) == 0
    client.delete(f"/tasks/{trained}")
    assert remove(client, trained) == 2, "those of a retired task too"
    missing = client.delete("/tasks/missing/corrections")
    assert_problem(missing, 404, "unknown-task")


def test_corrections_of_a_task_are_limited(settings):
    limited = settings.model_copy(update={"max_corrections": 2})
    with running_world(limited) as world, TestClient(world.app()) as client:
        both = [example(photo(number), "cat") for number in (1, 2)]
        assert correct(client, "pets", *both).status_code == 201
        full = correct(client, "pets", example(photo(3), "cat"))
        assert "limit is 2" in assert_problem(full, 409, "corrections-full")["detail"]
        remove(client, "pets", photo(1))
        assert correct(client, "pets", example(photo(3), "cat")).status_code == 201


def test_bytes_of_corrections_are_limited(settings):
    limited = settings.model_copy(update={"correction_bytes": 1024})
    with running_world(limited) as world, TestClient(world.app()) as client:
        statuses = {
            correct(client, "pets", example(photo(number), "cat")).status_code
            for number in range(6)
        }
        assert statuses == {201, 409}


def test_corrections_of_a_taught_task_are_sent_as_examples(client, fresh):
    body = {"examples": [example(photo(1), "a"), example(photo(2), "b")]}
    assert client.post(f"/tasks/{fresh}/examples", json=body).status_code == 201
    refused = correct(client, fresh, example(photo(1), "b"))
    assert f"/tasks/{fresh}/examples" in assert_problem(refused, 409, "is-taught")["detail"]


def test_invalid_corrections_are_rejected(client, trained):
    assert_problem(correct(client, "missing", example(photo(1), "a")), 404, "unknown-task")
    assert_problem(client.get("/tasks/missing/corrections"), 404, "unknown-task")
    assert_problem(correct(client, trained), 422, "invalid-request")
    form = client.post(f"/tasks/{trained}/corrections", files={"a": ("a.png", photo(1))})
    assert_problem(form, 415, "unsupported-media")
    assert_problem(correct(client, trained, example(b"no image", "a")), 422, "unreadable-image")
