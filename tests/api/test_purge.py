"""Purging tasks, versions and single examples: nothing of them is left, and the rest serves on."""

import base64
import hashlib
import json

import pytest
from engram_server.api.routes.examples import TeachResult
from engram_server.api.routes.tasks import ChangeResult
from engram_store import MoveAlias, Purge, UnknownVersion
from starlette.testclient import TestClient

from tests.api.conftest import assert_problem, running_world
from tests.api.keys import make_key, sends, write_keys
from tests.serving import make_bundle, photo

LABEL = "alice smith"
FOUR = {"clean": [photo(1), photo(2)], LABEL: [photo(3), photo(4)]}


@pytest.fixture(scope="module")
def world(settings):
    """One of its own: tasks of other tests may have the same bytes."""
    with running_world(settings) as world:
        yield world


@pytest.fixture(scope="module")
def client(world):
    with TestClient(world.app()) as client:
        yield client


@pytest.fixture
def fresh(world, fresh):
    yield fresh
    for task in world.store.catalog().all_tasks:
        if task.startswith(fresh):
            world.store.commit(Purge(task))
            world.engine.tasks.sync()


def digest_of(data):
    return f"sha256:{hashlib.sha256(data).hexdigest()}"


def file_of(data):
    """A name that nothing else in the store contains."""
    return f"photo-of-{hashlib.md5(data).hexdigest()}.png"


def teach(client, name, examples):
    body = [
        {"b64": base64.b64encode(data).decode(), "label": label, "name": file_of(data)}
        for label, photos in examples.items()
        for data in photos
    ]
    response = client.post(f"/tasks/{name}/examples", json={"examples": body})
    assert response.status_code in (200, 201), response.text
    return response.json()


def purge_photos(client, name, *photos, **headers):
    params = {"digest": [digest_of(data) for data in photos], "purge": "true"}
    return client.delete(f"/tasks/{name}/examples", params=params, headers=headers)


def purged(response):
    assert response.status_code in (200, 201), response.text
    return TeachResult.model_validate(response.json()).purged


def traces(world, data, label=None):
    """The objects of the store in which a photo's digest, file name or a label is found."""
    digest = hashlib.sha256(data).digest()
    wanted = [digest, digest.hex().encode(), file_of(data).encode()]
    wanted += [] if label is None else [label.encode()]
    objects = world.store.objects
    contents = {info.path: objects.get(info.path) for info in objects.listing("")}
    return [path for path, each in contents.items() if any(text in each for text in wanted)]


# --- tasks and versions ---------------------------------------------------------------------------


def test_a_purged_task_leaves_no_photo_and_no_label(client, fresh, world):
    teach(client, fresh, FOUR)
    teach(client, fresh, {"clean": [photo(5)]})
    client.get(f"/tasks/{fresh}/examples")
    assert len(traces(world, photo(3), LABEL)) == 2
    response = client.delete(f"/tasks/{fresh}?purge=true")
    result = ChangeResult.model_validate(response.json())
    assert (result.versions, result.aliases, result.purged) == ([], {}, [1, 2])
    assert traces(world, photo(3), LABEL) == []
    assert world.store.verify().damages == ()
    problem = assert_problem(client.get(f"/tasks/{fresh}"), 404, "unknown-task")
    assert "was purged" in problem["detail"]
    restore = client.post(f"/tasks/{fresh}/restore")
    assert "was purged" in assert_problem(restore, 409, "nothing-to-restore")["detail"]
    (newest, *_) = client.get(f"/tasks/{fresh}/history").json()["entries"]
    assert (newest["kind"], newest["actor"], newest["whole"]) == ("purge", "local", True)
    again = client.delete(f"/tasks/{fresh}?purge=true")
    assert again.status_code == 200, "repeating it is safe"
    assert teach(client, fresh, FOUR)["version"] == 3


def test_a_retired_task_can_be_purged(client, fresh, world):
    teach(client, fresh, FOUR)
    assert client.delete(f"/tasks/{fresh}").status_code == 200
    assert traces(world, photo(3), LABEL)
    assert client.delete(f"/tasks/{fresh}?purge=true").status_code == 200
    assert traces(world, photo(3), LABEL) == []


def test_corrections_of_a_purged_task_are_deleted(client, fresh, world):
    bundle = make_bundle(world.backbone, 61)
    client.put(f"/tasks/{fresh}", content=bundle.to_bytes())
    body = {"examples": [{"digest": digest_of(photo(3)), "label": "label1"}]}
    assert client.post(f"/tasks/{fresh}/corrections", json=body).status_code == 201
    assert traces(world, photo(3))
    client.delete(f"/tasks/{fresh}?purge=true")
    assert traces(world, photo(3)) == []


def test_a_version_is_purged_alone(client, fresh, world):
    teach(client, fresh, FOUR)
    teach(client, fresh, {"clean": [photo(5)]})
    aliased = client.delete(f"/tasks/{fresh}/versions/2?purge=true")
    assert "default" in assert_problem(aliased, 409, "still-aliased")["detail"]
    result = client.delete(f"/tasks/{fresh}/versions/1?purge=true").json()
    assert (result["versions"], result["purged"]) == ([2], [1])
    assert_problem(client.get(f"/tasks/{fresh}/versions/1"), 404, "unknown-version")
    assert_problem(client.post(f"/tasks/{fresh}/rollback"), 409, "nothing-to-roll-back")
    assert client.post(f"/predict?tasks={fresh}", content=photo(1)).status_code == 200


def test_a_parent_is_purged_after_its_children(client, fresh, world):
    parent = make_bundle(world.backbone, 62)
    child = make_bundle(world.backbone, 63, extends=(parent,), golden=False)
    client.put(f"/tasks/{fresh}", content=parent.to_bytes())
    client.put(f"/tasks/{fresh}-child", content=child.to_bytes())
    refused = client.delete(f"/tasks/{fresh}?purge=true")
    assert assert_problem(refused, 409, "still-extended")["names"] == [f"{fresh}-child@1"]
    assert client.delete(f"/tasks/{fresh}-child?purge=true").status_code == 200
    assert client.delete(f"/tasks/{fresh}?purge=true").status_code == 200


def test_a_purge_needs_the_publish_scope_and_is_audited(world, fresh, tmp_path):
    keys = make_key("reader", scopes={"read": ["*"]}), make_key("all", scopes={"publish": ["*"]})
    file, log = write_keys(tmp_path / "keys.json", *keys), tmp_path / "audit.jsonl"
    with TestClient(world.app(keys_file=str(file), audit_log=str(log))) as client:
        bundle = make_bundle(world.backbone, 64)
        client.put(f"/tasks/{fresh}", content=bundle.to_bytes(), headers=sends("all"))
        for path in ("", "/versions/1", "/corrections", "/examples"):
            url = f"/tasks/{fresh}{path}?purge=true&digest={digest_of(b'x')}"
            refused = client.delete(url, headers=sends("reader"))
            assert_problem(refused, 403, "not-permitted")
        client.delete(f"/tasks/{fresh}/corrections", headers=sends("all"))
        client.delete(f"/tasks/{fresh}?purge=true", headers=sends("all"))
    records = [json.loads(line) for line in log.read_text().splitlines()]
    ended = {record["action"]: record for record in records if record.get("outcome") == "ended"}
    assert ended["retire_task"]["purged"] == [1]
    assert ended["remove_corrections"]["removed"] == 0


def test_cached_examples_of_a_purged_version_are_forgotten(client, fresh, world):
    digest = teach(client, fresh, FOUR)["digest"]
    assert client.get(f"/tasks/{fresh}/examples").status_code == 200
    client.delete(f"/tasks/{fresh}?purge=true")
    with pytest.raises(UnknownVersion):
        world.engine.teaching.examples(digest)


# --- single examples ------------------------------------------------------------------------------


def test_a_purged_photo_is_in_no_version(client, fresh, world):
    teach(client, fresh, FOUR)
    teach(client, fresh, {"clean": [photo(5)]})
    assert purged(purge_photos(client, fresh, photo(3))) == [1, 2]
    assert traces(world, photo(3)) == []
    listed = client.get(f"/tasks/{fresh}/examples").json()
    assert (listed["version"], listed["total"]) == (3, 4)
    assert client.post(f"/predict?tasks={fresh}", content=photo(1)).status_code == 200
    assert_problem(purge_photos(client, fresh, photo(3)), 404, "unknown-example")
    assert world.store.verify().damages == ()


def test_versions_without_the_photo_are_kept(client, fresh, world):
    teach(client, fresh, FOUR)
    teach(client, fresh, {"clean": [photo(5)]})
    assert purged(purge_photos(client, fresh, photo(5))) == [2]
    assert client.get(f"/tasks/{fresh}").json()["aliases"] == {"default": 1}, "the same bytes"
    assert traces(world, photo(5)) == []


def test_a_photo_that_was_removed_before_is_purged_from_old_versions(client, fresh, world):
    """Also what completes a purge that was interrupted after its publish."""
    teach(client, fresh, FOUR)
    client.delete(f"/tasks/{fresh}/versions/1")  # rejected: the alias is there
    removed = client.delete(f"/tasks/{fresh}/examples", params={"digest": digest_of(photo(3))})
    assert removed.json()["version"] == 2
    client.delete(f"/tasks/{fresh}/versions/1")
    assert traces(world, photo(3))
    response = purge_photos(client, fresh, photo(3))
    assert (response.status_code, response.json()["version"]) == (200, 2)
    assert purged(response) == [1]
    assert traces(world, photo(3)) == []


def test_a_version_with_another_alias_refuses_the_purge_before_anything_is_written(
    client, fresh, world
):
    teach(client, fresh, FOUR)
    teach(client, fresh, {"clean": [photo(5)]})
    world.store.commit(MoveAlias(fresh, "canary", 1))
    world.engine.tasks.sync()
    generation = world.store.catalog().generation
    problem = assert_problem(purge_photos(client, fresh, photo(3)), 409, "still-aliased")
    assert "canary" in problem["detail"]
    assert problem["names"] == [f"{fresh}:canary"]
    assert world.store.catalog().generation == generation


def test_purging_examples_respects_conditions_and_trained_tasks(client, fresh):
    teach(client, fresh, FOUR)
    changed = purge_photos(client, fresh, photo(3), **{"If-Match": '"old"'})
    assert_problem(changed, 412, "precondition-failed")
    assert_problem(purge_photos(client, "pets", photo(3)), 409, "not-taught")
    all_of_a_class = purge_photos(client, fresh, photo(3), photo(4))
    assert_problem(all_of_a_class, 422, "unteachable-examples")
    assert client.get(f"/tasks/{fresh}").json()["versions"] == [1]


def test_the_log_has_no_label_and_no_digest_of_a_photo(client, fresh, world):
    teach(client, fresh, FOUR)
    teach(client, fresh, {LABEL: [photo(1)]})
    purged(purge_photos(client, fresh, photo(3)))
    found = traces(world, photo(3), LABEL)
    assert not [path for path in found if path.startswith(("log/", "checkpoints/"))]
