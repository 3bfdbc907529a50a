"""`/tasks`: uploading, moving, retiring; what was changed is served when the call returns."""

import errno
import io
import os
import tempfile

import pytest
from engram_server.api.routes.tasks import (
    ChangeResult,
    History,
    PublishResult,
    TaskDetail,
    TaskList,
    Verdict,
    VersionList,
    VersionResult,
)
from engram_server.model.lora import target_sizes
from engram_store import Retire, StoreUnavailable
from starlette.testclient import TestClient

from tests.api.conftest import assert_problem
from tests.bundles import bundle as foreign_bundle
from tests.bundles import with_tensors
from tests.serving import reference_logits
from tests.task_store.conftest import before_entry


def upload(client, name, bundle, query="", **headers):
    return client.put(f"/tasks/{name}{query}", content=bundle.to_bytes(), headers=headers)


def published(response, created=True):
    assert response.status_code == (201 if created else 200), response.text
    result = PublishResult.model_validate(response.json())
    assert result.created is created
    return result


def changed(response):
    assert response.status_code == 200, response.text
    return ChangeResult.model_validate(response.json())


def served(client, ref, image):
    """(version, logits) of an answer."""
    response = client.post(f"/predict?tasks={ref}&return=logits", content=image)
    assert response.status_code == 200, response.text
    task = response.json()["images"][0]["tasks"][ref]
    return task["version"], task["logits"]


# --- uploading ------------------------------------------------------------------------------------


def test_upload_is_served_when_the_call_returns(client, world, cat, fresh):
    bundle = world.bundle(100)
    response = upload(client, fresh, bundle)
    result = published(response)
    assert (result.task, result.version, result.digest) == (fresh, 1, bundle.digest)
    assert result.aliases == ["default"]
    assert response.headers["location"] == f"/tasks/{fresh}/versions/1"
    version, logits = served(client, fresh, cat)
    assert version == 1
    assert logits == pytest.approx(reference_logits(world.backbone, bundle, cat).tolist(), abs=5e-3)
    assert client.get(response.headers["location"]).json()["digest"] == bundle.digest


def test_a_task_with_lora_is_served_as_any_other(client, world, cat, fresh):
    bundle = world.bundle(107, targets=target_sizes(world.backbone), rank=4)
    published(upload(client, fresh, bundle))
    _, logits = served(client, fresh, cat)
    plain = without_lora(bundle)
    expected = reference_logits(world.backbone, bundle, cat).tolist()
    assert logits == pytest.approx(expected, abs=5e-3)
    assert logits != pytest.approx(
        reference_logits(world.backbone, plain, cat).tolist(), abs=0.1
    ), "the LoRA update shows"
    about = client.get(f"/tasks/{fresh}/versions/1/manifest").json()
    assert about["lora"] == {"rank": 4, "targets": ["query", "output", "up", "down"]}


def without_lora(bundle):
    """The same task without its LoRA."""
    nothing = {name: None for name in bundle.tensors if name.startswith("lora.")}
    manifest = bundle.manifest.model_copy(update={"lora": None})
    return with_tensors(bundle, nothing, manifest)


def test_lora_for_another_mlp_is_rejected(client, world, fresh):
    bundle = world.bundle(108, targets={"up": (world.backbone.width, 7)}, golden=False)
    document = assert_problem(upload(client, fresh, bundle), 422, "task-mismatch")
    assert "up.b is" in document["detail"]


def test_second_upload_is_version_two_and_the_default(client, world, cat, fresh):
    published(upload(client, fresh, world.bundle(101)))
    assert published(upload(client, fresh, world.bundle(102))).version == 2
    assert served(client, fresh, cat)[0] == 2
    assert served(client, f"{fresh}@1", cat)[0] == 1


def test_same_bytes_again_make_no_version(client, world, fresh):
    bundle = world.bundle(103)
    first = upload(client, fresh, bundle)
    again = upload(client, fresh, bundle)
    assert published(again, created=False).version == 1
    assert again.headers["etag"] == first.headers["etag"]


def test_upload_under_another_label_leaves_the_default_alone(client, world, cat, fresh):
    published(upload(client, fresh, world.bundle(104)))
    result = published(upload(client, fresh, world.bundle(105), "?alias=canary&alias=eve"))
    assert result.aliases == ["canary", "eve"]
    assert served(client, fresh, cat)[0] == 1
    assert served(client, f"{fresh}:canary", cat)[0] == 2


def test_names_may_have_a_team_in_front(client, world, cat):
    name = "vision/pets"
    response = upload(client, name, world.bundle(106))
    published(response)
    assert response.headers["location"] == "/tasks/vision/pets/versions/1"
    assert client.get("/tasks/vision/pets").json()["task"] == name
    assert client.get("/tasks/vision%2Fpets").json()["task"] == name
    assert client.get("/tasks/vision/pets/versions/1/bundle").status_code == 200
    assert client.get("/tasks/vision/pets/history").json()["entries"][0]["kind"] == "publish"
    changed(client.put("/tasks/vision/pets/aliases/best", json={"version": 1}))
    assert served(client, "vision/pets:best", cat)[0] == 1
    assert changed(client.delete("/tasks/vision/pets")).versions == []


@pytest.mark.parametrize(
    "name", ["Pets", "a/b/c", "-pets", "base", "x" * 64, "pets@1", "team/history", "team/versions"]
)
def test_name_that_cannot_be_published(client, world, name):
    response = upload(client, name, world.bundle(107))
    assert assert_problem(response, 422, "invalid-name")["names"] == [name]


def test_an_invalid_bundle_is_rejected_and_nothing_is_stored(client, world, fresh, cat):
    before = world.store.catalog().generation
    for content in (b"", b"x", cat):
        response = client.put(f"/tasks/{fresh}", content=content)
        assert_problem(response, 422, "malformed-bundle")
    assert world.store.catalog().generation == before


def test_bundle_of_another_backbone_is_rejected(client, fresh):
    response = upload(client, fresh, foreign_bundle())
    assert "fingerprint" in assert_problem(response, 422, "incompatible-bundle")["detail"]


def test_bundle_whose_golden_answers_do_not_come_out_is_rejected(client, world, fresh):
    bundle = world.bundle(108)
    lying = with_tensors(bundle, {"golden.logits": bundle.tensors["golden.logits"] + 1})
    assert_problem(upload(client, fresh, lying), 422, "task-mismatch")
    assert fresh not in world.store.catalog().all_tasks


def test_child_before_its_parent_is_rejected(client, world, fresh):
    parent = world.bundle(109)
    child = world.bundle(110, extends=(parent,))
    document = assert_problem(upload(client, fresh, child), 409, "missing-parent")
    assert document["names"] == [parent.digest]


def test_upload_over_the_limit_is_rejected_while_it_streams(client, fresh):
    chunks = (b"x" * 100_000 for _ in range(100))
    assert_problem(client.put(f"/tasks/{fresh}", content=chunks), 413, "body-too-large")
    response = client.put(f"/tasks/{fresh}", content=b"x" * 1_000_001)
    assert_problem(response, 413, "body-too-large")


def test_an_upload_as_a_form_gets_instructions(client, world, fresh):
    response = client.put(f"/tasks/{fresh}", files={"file": world.bundle(111).to_bytes()})
    assert "curl -T" in assert_problem(response, 415, "unsupported-media")["detail"]


def test_uploads_leave_no_temporary_files(client, world, fresh, tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    published(upload(client, fresh, world.bundle(112)))
    client.put(f"/tasks/{fresh}", content=b"x")
    client.put(f"/tasks/{fresh}", content=(b"x" * 100_000 for _ in range(100)))
    client.post("/tasks/validate", content=b"x")
    assert list(tmp_path.iterdir()) == []


# --- conditions -----------------------------------------------------------------------------------


def test_if_none_match_rejects_to_replace(client, world, fresh):
    only_new = {"If-None-Match": "*"}
    published(upload(client, fresh, world.bundle(120), **only_new))
    response = upload(client, fresh, world.bundle(121), **only_new)
    assert assert_problem(response, 412, "already-exists")["names"] == [fresh]
    response = upload(client, fresh, world.bundle(121), **{"If-None-Match": '"x"'})
    assert_problem(response, 422, "invalid-request")


def test_if_match_rejects_changes_based_on_an_old_state(client, world, fresh):
    published(upload(client, fresh, world.bundle(122)))
    seen = client.get(f"/tasks/{fresh}").headers["etag"]
    response = upload(client, fresh, world.bundle(123), **{"If-Match": seen})
    published(response)
    assert response.headers["etag"] != seen
    stale, current = {"If-Match": seen}, {"If-Match": response.headers["etag"]}
    for request in (
        lambda headers: upload(client, fresh, world.bundle(124), **headers),
        lambda headers: client.put(
            f"/tasks/{fresh}/aliases/canary", json={"version": 1}, headers=headers
        ),
        lambda headers: client.post(f"/tasks/{fresh}/rollback", headers=headers),
        lambda headers: client.delete(f"/tasks/{fresh}", headers=headers),
        lambda headers: client.delete(f"/tasks/{fresh}/versions/1", headers=headers),
    ):
        assert_problem(request(stale), 412, "precondition-failed")
    moved = client.put(f"/tasks/{fresh}/aliases/canary", json={"version": 1}, headers=current)
    changed(moved)
    back = client.post(f"/tasks/{fresh}/rollback", headers={"If-Match": moved.headers["etag"]})
    assert changed(back).aliases["default"] == 1
    assert changed(client.delete(f"/tasks/{fresh}", headers={"If-Match": "*"})).versions == []
    assert_problem(
        upload(client, fresh, world.bundle(122), **{"If-Match": "*"}), 412, "precondition-failed"
    )


def test_etag_tells_apart_two_states_from_which_rollback_goes_elsewhere(client, world, fresh):
    for seed in (130, 131, 132):
        published(upload(client, fresh, world.bundle(seed)))
    label = f"/tasks/{fresh}/aliases/default"
    tags = [client.put(label, json={"version": version}).headers["etag"] for version in (2, 3, 2)]
    assert len(set(tags)) == 3, "from the first 2 a rollback goes to 3, and from the second too"
    refused = client.post(f"/tasks/{fresh}/rollback", headers={"If-Match": tags[0]})
    assert_problem(refused, 412, "precondition-failed")
    assert client.get(f"/tasks/{fresh}").headers["etag"] == tags[2]


def test_if_match_does_not_mind_changes_to_other_tasks(client, world, fresh, monkeypatch):
    published(upload(client, fresh, world.bundle(125)))
    seen = client.get(f"/tasks/{fresh}").headers["etag"]
    before_entry(
        world.store,
        world.store.catalog().generation + 1,
        lambda: world.store.publish("unrelated", world.bundle(126)),
        monkeypatch,
    )
    published(upload(client, fresh, world.bundle(127), **{"If-Match": f'"other", {seen}'}))
    assert "unrelated" in world.store.catalog().tasks
    world.store.commit(Retire("unrelated"))


def test_failed_condition_shows_what_has_changed_meanwhile(client, world, fresh):
    published(upload(client, fresh, world.bundle(128)))
    seen = client.get(f"/tasks/{fresh}").headers["etag"]
    world.store.publish(fresh, world.bundle(129))  # another server
    response = client.delete(f"/tasks/{fresh}", headers={"If-Match": seen})
    assert_problem(response, 412, "precondition-failed")
    assert client.get(f"/tasks/{fresh}").json()["version"] == 2


# --- labels, rollback, retirement -----------------------------------------------------------------


def test_aliases_move_back_and_forth(client, world, cat, fresh):
    for seed in (130, 131):
        published(upload(client, fresh, world.bundle(seed)))
    assert changed(client.put(f"/tasks/{fresh}/aliases/default", json={"version": 1})).aliases == {
        "default": 1
    }
    assert served(client, fresh, cat)[0] == 1
    assert changed(client.post(f"/tasks/{fresh}/rollback")).aliases == {"default": 2}
    assert served(client, fresh, cat)[0] == 2
    changed(client.put(f"/tasks/{fresh}/aliases/canary", json={"version": 1}))
    assert changed(client.delete(f"/tasks/{fresh}/aliases/canary")).aliases == {"default": 2}
    response = client.post(f"/predict?tasks={fresh}:canary", content=cat)
    assert_problem(response, 404, "unknown-task")
    assert_problem(client.delete(f"/tasks/{fresh}/aliases/default"), 409, "still-aliased")
    assert_problem(client.delete(f"/tasks/{fresh}/aliases/canary"), 404, "unknown-alias")
    response = client.post(f"/tasks/{fresh}/rollback?alias=canary")
    assert_problem(response, 404, "unknown-alias")
    changed(client.post(f"/tasks/{fresh}/rollback"))
    assert_problem(client.post(f"/tasks/{fresh}/rollback"), 409, "nothing-to-roll-back")


@pytest.mark.parametrize(
    ("alias", "body", "status", "name"),
    [
        ("canary", {"version": 9}, 404, "unknown-version"),
        ("canary", {"version": 0}, 422, "invalid-request"),
        ("canary", {"version": 10**30}, 422, "invalid-request"),
        ("canary", {}, 422, "invalid-request"),
        ("canary", {"version": 1, "task": "x"}, 422, "invalid-request"),
        ("9", {"version": 1}, 422, "invalid-name"),
    ],
)
def test_alias_that_cannot_be_moved(client, alias, body, status, name):
    assert_problem(client.put(f"/tasks/pets/aliases/{alias}", json=body), status, name)


def test_label_body_is_bounded_and_must_be_json(client):
    url = "/tasks/pets/aliases/canary"
    assert_problem(client.put(url, content=b"x" * 70_000), 413, "body-too-large")
    assert_problem(client.put(url, content=b"version=1"), 400, "malformed-request")


def test_retired_task_is_gone_at_once_and_restore_brings_it_back(client, world, cat, fresh):
    for seed in (132, 133):
        published(upload(client, fresh, world.bundle(seed)))
    result = changed(client.delete(f"/tasks/{fresh}"))
    assert (result.aliases, result.versions) == ({}, [])
    assert_problem(client.post(f"/predict?tasks={fresh}", content=cat), 404, "unknown-task")
    assert_problem(client.get(f"/tasks/{fresh}"), 404, "retired-task")
    kinds = [entry["kind"] for entry in client.get(f"/tasks/{fresh}/history").json()["entries"]]
    assert kinds == ["retire", "publish", "publish"]
    assert changed(client.post(f"/tasks/{fresh}/restore")).versions == [1, 2]
    assert served(client, fresh, cat)[0] == 2
    assert_problem(client.post(f"/tasks/{fresh}/restore"), 409, "nothing-to-restore")


def test_one_version_can_be_retired_and_restored(client, world, fresh):
    for seed in (134, 135):
        published(upload(client, fresh, world.bundle(seed)))
    assert_problem(client.delete(f"/tasks/{fresh}/versions/2"), 409, "still-aliased")
    assert changed(client.delete(f"/tasks/{fresh}/versions/1")).versions == [2]
    assert_problem(client.get(f"/tasks/{fresh}/versions/1"), 404, "unknown-version")
    assert changed(client.post(f"/tasks/{fresh}/restore?version=1")).versions == [1, 2]


def test_parent_is_not_retired_while_a_child_extends_it(client, world, fresh):
    parent = world.bundle(136)
    published(upload(client, fresh, parent))
    child = f"{fresh[:50]}-child"
    published(upload(client, child, world.bundle(137, extends=(parent,))))
    document = assert_problem(client.delete(f"/tasks/{fresh}"), 409, "still-extended")
    assert document["names"] == [f"{child}@1"]
    changed(client.delete(f"/tasks/{child}"))
    changed(client.delete(f"/tasks/{fresh}"))


# --- reading --------------------------------------------------------------------------------------


def test_list_has_every_task_and_base(client, world):
    listed = TaskList.model_validate(client.get("/tasks").json())
    assert {task.task for task in listed.tasks} >= {"base", *world.bundles}
    assert listed.generation == world.engine.tasks.snapshot.generation
    pets = next(task for task in listed.tasks if task.task == "pets")
    assert (pets.version, pets.status, pets.description) == (1, "ready", "Which pet?")


def test_description_has_versions_and_class_labels(client, world):
    task = TaskDetail.model_validate(client.get("/tasks/pets").json())
    assert task.class_labels == ["cat", "dog", "rabbit"]
    (version,) = task.version_details
    assert version.digest == world.bundles["pets"].digest
    assert version.actor == "ada@lab"
    VersionList.model_validate(client.get("/tasks/pets/versions").json())
    VersionResult.model_validate(client.get("/tasks/pets/versions/1").json())
    base = TaskDetail.model_validate(client.get("/tasks/base").json())
    assert (base.version, base.classes) == (None, 7)


def test_failed_task_is_listed_with_its_reason(client, world, fresh):
    world.store.publish(fresh, foreign_bundle())
    world.engine.tasks.sync()
    task = client.get(f"/tasks/{fresh}").json()
    assert task["status"] == "failed"
    assert "fingerprint" in task["reason"]
    assert client.get("/readyz").json()["tasks"]["failed"] == 1
    response = client.post(f"/predict?tasks={fresh}", content=b"x")
    assert_problem(response, 503, "task-unavailable")


def test_download_is_the_file_that_was_uploaded(client, world):
    response = client.get("/tasks/pets/versions/1/bundle")
    bundle = world.bundles["pets"]
    assert response.content == bundle.to_bytes()
    assert response.headers["etag"] == f'"{bundle.digest}"'
    assert "immutable" in response.headers["cache-control"]
    assert 'filename="pets-1.safetensors"' in response.headers["content-disposition"]
    cached = {"If-None-Match": response.headers["etag"]}
    again = client.get("/tasks/pets/versions/1/bundle", headers=cached)
    assert (again.status_code, again.content) == (304, b"")


def test_manifest_says_what_the_bundle_says_of_itself(client, world, fresh):
    bundle = world.bundle(160, metrics={"accuracy": 0.875}, description="Birds")
    published(upload(client, fresh, bundle))
    url = f"/tasks/{fresh}/versions/1/manifest"
    response = client.get(url)
    assert response.status_code == 200
    assert response.json() == bundle.manifest.model_dump(mode="json")
    assert response.json()["metrics"] == {"accuracy": 0.875}
    again = client.get(url, headers={"If-None-Match": response.headers["etag"]})
    assert (again.status_code, again.content) == (304, b"")
    assert_problem(client.get(f"/tasks/{fresh}/versions/2/manifest"), 404, "unknown-version")


def test_history_has_the_author_of_each_change(client, world, fresh):
    published(upload(client, fresh, world.bundle(140)))
    changed(client.put(f"/tasks/{fresh}/aliases/canary", json={"version": 1}))
    history = History.model_validate(client.get(f"/tasks/{fresh}/history").json())
    assert [entry.kind for entry in history.entries] == ["alias", "publish"]
    assert {entry.actor for entry in history.entries} == {"local"}
    assert len(client.get(f"/tasks/{fresh}/history?limit=1").json()["entries"]) == 1


def test_unknown_names_are_404_with_a_suggestion(client):
    document = assert_problem(client.get("/tasks/pest"), 404, "unknown-task")
    assert (document["names"], document["suggestions"]) == (["pest"], {"pest": "pets"})
    assert_problem(client.get("/tasks/pest/history"), 404, "unknown-task")
    assert_problem(client.get("/tasks/pest/versions"), 404, "unknown-task")
    assert_problem(client.get("/tasks/pets/versions/7"), 404, "unknown-version")
    assert_problem(client.get("/tasks/pets/versions/7/bundle"), 404, "unknown-version")
    assert_problem(client.get("/tasks/pets/versions/x"), 422, "invalid-request")
    assert_problem(client.get("/tasks/pets/versions/" + "9" * 5000), 422, "invalid-request")
    assert_problem(client.delete("/tasks/pest"), 404, "unknown-task")


# --- validating -----------------------------------------------------------------------------------


def test_verdict_on_a_bundle_stores_nothing(client, world):
    before = world.store.catalog().generation
    bundle = world.bundle(150)
    verdict = Verdict.model_validate(
        client.post("/tasks/validate", content=bundle.to_bytes()).json()
    )
    assert verdict.valid
    assert verdict.problems == []
    assert (verdict.digest, verdict.classes) == (bundle.digest, 5)
    assert verdict.manifest["task_type"] == "single_label"
    assert world.store.catalog().generation == before


@pytest.mark.parametrize("content", [b"", b"x", foreign_bundle().to_bytes()])
def test_verdict_against_a_bundle_says_why(client, content):
    verdict = Verdict.model_validate(client.post("/tasks/validate", content=content).json())
    assert not verdict.valid
    assert len(verdict.problems) == 1


@pytest.mark.parametrize("name", ["base", "multitask"])
def test_names_of_built_in_models_are_reserved(client, world, name):
    problem = assert_problem(upload(client, name, world.bundle(150)), 422, "invalid-name")
    assert "is reserved" in problem["detail"]
    taught = client.post(f"/tasks/{name}/examples", json={"images": []})
    assert_problem(taught, 422, "invalid-name")


# --- a store that is away -------------------------------------------------------------------------


def test_store_that_is_away_is_a_503_and_predictions_go_on(world, cat, monkeypatch):
    def away(*args, **options):
        raise StoreUnavailable("The task store cannot be reached: try again.")

    monkeypatch.setattr(world.store, "_commit", away)
    monkeypatch.setattr(world.store, "history", away)
    with TestClient(world.app()) as client:
        for response in (
            client.post("/tasks/pets/rollback"),
            upload(client, "away", world.bundle(160)),
            client.get("/tasks/pets/history"),
        ):
            assert_problem(response, 503, "store-unavailable")
            assert response.headers["retry-after"] == "5"
        assert client.post("/predict", content=cat).status_code == 200


@pytest.mark.parametrize("fails_at", ["opening", "writing"])
def test_a_full_disk_rejects_an_upload_and_nothing_else(
    client, world, fresh, monkeypatch, fails_at
):
    class FullFile(io.BytesIO):
        def write(self, data):
            raise OSError(errno.ENOSPC, "No space left on device")

    def full(*arguments, **options):
        raise OSError(errno.ENOSPC, "No space left on device")

    if fails_at == "opening":
        monkeypatch.setattr(tempfile, "mkstemp", full)
    else:
        monkeypatch.setattr(os, "fdopen", lambda *arguments: FullFile())
    refused = client.put(f"/tasks/{fresh}", content=world.bundle(77).to_bytes())
    problem = assert_problem(refused, 503, "upload-not-kept")
    assert "No space left" in problem["detail"]
    assert int(refused.headers["Retry-After"]) > 0
    monkeypatch.undo()
    assert fresh not in world.store.catalog().names
