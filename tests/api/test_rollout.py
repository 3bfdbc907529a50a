"""`/tasks/{task}/comparison`, `/feedback` and `/promote`."""

import time

import pytest
from engram_server.api.routes.rollout import ComparisonResult, DriftResult, FeedbackResult
from pydantic import SecretStr
from starlette.testclient import TestClient

from tests.api.conftest import assert_problem
from tests.engine.rollout.conftest import varied_bundle
from tests.serving import photo

READER, ADMIN = "reader-reader-reader", "admin-admin-admin-ad"
KEYS = {"api_key": SecretStr(READER), "admin_key": SecretStr(ADMIN)}


@pytest.fixture
def pets(client, world, fresh):
    """A task with a default version and a shadow that has answered twelve photos."""
    for seed, alias in ((1, "default"), (2, "shadow")):
        data = varied_bundle(world.backbone, seed).to_bytes()
        assert client.put(f"/tasks/{fresh}?alias={alias}", content=data).status_code == 201
    for seed in range(12):
        client.post(f"/predict?tasks={fresh}", content=photo(seed)).raise_for_status()
    return fresh


def comparison(client, task, images=12):
    """The comparison once this many images are counted."""
    deadline = time.monotonic() + 20
    while True:
        response = client.get(f"/tasks/{task}/comparison")
        assert response.status_code == 200, response.text
        found = ComparisonResult.model_validate(response.json())
        if sum(pair.images + pair.dropped for pair in found.pairs) >= images:
            return found
        assert time.monotonic() < deadline


def promote(client, task, **body):
    return client.post(f"/tasks/{task}/promote", json=body)


def test_comparison_has_agreement_classes_and_disagreements(client, pets):
    found = comparison(client, pets)
    (pair,) = found.pairs
    assert (pair.baseline, pair.candidate) == (1, 2)
    assert found.aliases == {"default": 1, "shadow": 2}
    assert pair.agreement == pytest.approx(1 - len(pair.disagreements) / pair.images)
    assert {each.thumbnail for each in pair.disagreements} == {None}
    assert sum(each.images for each in pair.classes) == pair.images
    agreements = [each.agreement for each in pair.classes]
    assert agreements == sorted(agreements)


def test_digests_of_images_are_shown_to_publishers_only(world, pets):
    with TestClient(world.app(**KEYS)) as client:
        read, admin = (
            client.get(
                f"/tasks/{pets}/comparison", headers={"Authorization": f"Bearer {key}"}
            ).json()["pairs"][0]
            for key in (READER, ADMIN)
        )
    assert "disagreements" not in read
    assert "disagreements" in admin


def test_feedback_and_promotion_need_the_scope_of_corrections(world, pets):
    with TestClient(world.app(**KEYS)) as client:
        client.headers["Authorization"] = f"Bearer {READER}"
        for path in ("feedback", "promote"):
            assert_problem(client.post(f"/tasks/{pets}/{path}", json={}), 403, "not-permitted")


def test_feedback_scores_both_versions(client, pets):
    (pair,) = comparison(client, pets).pairs
    body = {
        "feedback": [{"digest": one.digest, "label": one.candidate} for one in pair.disagreements]
    }
    response = client.post(f"/tasks/{pets}/feedback", json=body)
    assert response.status_code == 200, response.text
    result = FeedbackResult.model_validate(response.json())
    assert (result.scored, result.unknown) == (len(pair.disagreements), 0)
    (scored,) = comparison(client, pets).pairs
    assert scored.feedback.gain == 1
    assert scored.feedback.low < 1


def test_unknown_label_is_rejected(client, pets):
    digest = f"sha256:{'0' * 64}"
    response = client.post(
        f"/tasks/{pets}/feedback", json={"feedback": [{"digest": digest, "label": "dgo"}]}
    )
    assert "has no class 'dgo'" in assert_problem(response, 422, "unteachable-examples")["detail"]


def test_feedback_about_other_task_types_is_rejected(client):
    body = {"feedback": [{"digest": f"sha256:{'0' * 64}", "label": "sunny"}]}
    response = client.post("/tasks/scene/feedback", json=body)
    assert "multi_label task" in assert_problem(response, 422, "unteachable-examples")["detail"]


def test_promotion_without_evidence_names_the_missing_figure(client, pets):
    (pair,) = comparison(client, pets).pairs
    problem = assert_problem(
        promote(client, pets, min_agreement=0.5, min_images=2000), 409, "not-enough-evidence"
    )
    assert f"compared on {pair.images} images, and 2,000 are required" in problem["detail"]
    problem = assert_problem(promote(client, pets, min_gain=0.01), 409, "not-enough-evidence")
    assert "no feedback" in problem["detail"]
    assert_problem(promote(client, pets), 422, "invalid-request")


def test_promotion_moves_default_and_writes_its_evidence_into_the_log(client, pets):
    (pair,) = comparison(client, pets).pairs
    response = promote(client, pets, min_agreement=pair.agreement, min_images=pair.images)
    assert response.status_code == 200, response.text
    assert response.json()["aliases"] == {"default": 2, "shadow": 2}
    entry = client.get(f"/tasks/{pets}/history").json()["entries"][0]
    assert entry["evidence"]["images"] == pair.images
    assert entry["evidence"]["baseline"] == 1
    answer = client.post(f"/predict?tasks={pets}", content=photo(1)).json()
    assert answer["images"][0]["tasks"][pets]["version"] == 2
    again = promote(client, pets, min_agreement=0)
    assert "is the default already" in assert_problem(again, 409, "not-enough-evidence")["detail"]
    back = client.post(f"/tasks/{pets}/rollback").json()
    assert back["aliases"] == {"default": 1, "shadow": 2}


def test_erased_photo_is_in_no_comparison(client, pets):
    (pair,) = comparison(client, pets).pairs
    digest = pair.disagreements[0].digest
    assert client.delete(f"/tasks/{pets}/corrections?digest={digest}").status_code == 200
    assert digest not in client.get(f"/tasks/{pets}/comparison").text
    body = {"feedback": [{"digest": digest, "label": "label0"}]}
    assert client.post(f"/tasks/{pets}/feedback", json=body).json()["unknown"] == 1


def test_drift_of_a_taught_task_is_reported(client, fresh):
    for first in range(0, 24, 4):  # a request has at most four photos
        photos = [(f"label{seed % 2}", photo(seed)) for seed in range(first, first + 4)]
        files = [(label, (f"{label}.png", data, "image/png")) for label, data in photos]
        assert client.post(f"/tasks/{fresh}/examples", files=files).status_code == 201
    manifest = client.get(f"/tasks/{fresh}/versions/6/manifest").json()
    assert manifest["drift"]["images"] == 24
    assert manifest["drift"]["score_deviation"] > 0
    before = client.get(f"/tasks/{fresh}/drift").json()
    assert (before["version"], before["images"], before["distance"]) == (6, 0, None)
    for seed in range(100, 160):
        client.post(f"/predict?tasks={fresh}", content=photo(seed)).raise_for_status()
    deadline = time.monotonic() + 20
    while (found := client.get(f"/tasks/{fresh}/drift").json())["images"] < 60:
        assert time.monotonic() < deadline
    DriftResult.model_validate(found)
    assert found["drifting"] is (found["distance"] > found["limit"])
    assert 0 <= found["class_divergence"] <= 1
    metrics = client.get("/metrics").text
    assert f'engram_drift_distance{{task="{fresh}",version="6"}}' in metrics


def test_drift_of_an_unknown_version_is_not_found(client):
    assert_problem(client.get("/tasks/pets/drift?version=99"), 404, "unknown-version")
    assert_problem(client.get("/tasks/nothing/drift"), 404, "unknown-task")


def test_canary_answers_its_share_and_is_described(client, pets):
    response = client.put(f"/tasks/{pets}/aliases/default", json={"version": 2, "share": 0.5})
    assert response.status_code == 200, response.text
    assert response.json()["aliases"]["default"] == 1
    assert client.get(f"/tasks/{pets}").json()["canaries"] == {
        "default": {"version": 2, "share": 0.5}
    }
    versions = [
        client.post(f"/predict?tasks={pets}", content=photo(seed)).json()["images"][0]["tasks"][
            pets
        ]["version"]
        for seed in range(20)
    ]
    assert set(versions) == {1, 2}
    assert client.get(f"/tasks/{pets}/history").json()["entries"][0]["kind"] == "canary"
