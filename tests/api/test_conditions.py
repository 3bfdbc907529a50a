"""Every change honours a condition or rejects it; none ignores one."""

import base64

import pytest
from engram_server.api.auth import required_by
from starlette.testclient import TestClient

from tests.api.conftest import assert_problem, running_world
from tests.serving import make_bundle, photo

LABELLED = {"examples": [{"b64": base64.b64encode(photo(1)).decode(), "label": "cat"}]}
UPLOAD = "5f0c11d2" * 4
CRITERIA = {"min_agreement": 0.5, "from": "canary"}
FEEDBACK = {"feedback": [{"digest": f"sha256:{'34' * 32}", "label": "cat"}]}
DIGEST = f"digest=sha256:{'34' * 32}"
# Requests that would do something without a condition.
CONDITIONAL = {
    ("PUT", "/tasks/{task}"): ("/tasks/pets", {"content": b"a bundle"}),
    ("DELETE", "/tasks/{task}"): ("/tasks/pets", {}),
    ("PUT", "/tasks/{task}/aliases/{alias}"): (
        "/tasks/pets/aliases/default",
        {"json": {"version": 1}},
    ),
    ("DELETE", "/tasks/{task}/aliases/{alias}"): ("/tasks/pets/aliases/canary", {}),
    ("POST", "/tasks/{task}/rollback"): ("/tasks/pets/rollback", {}),
    ("POST", "/tasks/{task}/restore"): ("/tasks/pets/restore?version=3", {}),
    ("POST", "/tasks/{task}/promote"): ("/tasks/pets/promote", {"json": CRITERIA}),
    ("DELETE", "/tasks/{task}/versions/{version}"): ("/tasks/pets/versions/2", {}),
    ("POST", "/tasks/{task}/examples"): ("/tasks/pets/examples", {"json": LABELLED}),
    ("DELETE", "/tasks/{task}/examples"): (f"/tasks/pets/examples?{DIGEST}", {}),
    ("POST", "/tasks/{task}/corrections"): ("/tasks/pets/corrections", {"json": LABELLED}),
    ("DELETE", "/tasks/{task}/corrections"): ("/tasks/pets/corrections", {}),
}
UNCONDITIONAL = {
    ("POST", "/tasks/{task}/feedback"): ("/tasks/pets/feedback", {"json": FEEDBACK}),
    ("POST", "/v2/repository/models/{name}/load"): ("/v2/repository/models/pets/load", {}),
    ("POST", "/v2/repository/models/{name}/unload"): ("/v2/repository/models/pets/unload", {}),
}
ONLY_NEW = {("PUT", "/tasks/{task}"), ("POST", "/tasks/{task}/examples")}
# Requires `publish`, and changes nothing.
VALIDATE = ("POST", "/tasks/validate")


@pytest.fixture(scope="module")
def world(settings):
    """Its task `pets` has two versions, a retired one, and an alias."""
    with running_world(settings) as world:
        yield world


@pytest.fixture(scope="module")
def client(world):
    with TestClient(world.app()) as client:
        for seed in (7, 8):
            other = make_bundle(world.backbone, seed, classes=3)
            query = f"alias={'canary' if seed == 7 else 'old'}"
            assert client.put(f"/tasks/pets?{query}", content=other.to_bytes()).status_code == 201
        assert client.put("/tasks/pets/aliases/default", json={"version": 2}).status_code == 200
        assert client.delete("/tasks/pets/aliases/old").status_code == 200
        assert client.delete("/tasks/pets/versions/3").status_code == 200
        yield client


@pytest.fixture
def unchanged(world):
    """Nothing changes."""
    before = world.engine.tasks.sync().generation
    records = world.engine.teaching.corrections("pets", 0, 10).total
    yield
    assert world.engine.tasks.sync().generation == before
    assert world.engine.teaching.corrections("pets", 0, 10).total == records


def test_every_change_is_listed_here(client):
    changes = {
        (method, route.path_format)
        for route in client.app.state.routes
        for method in route.methods
        if required_by(route)[0].text in ("publish", "admin")
    }
    assert changes == CONDITIONAL.keys() | UNCONDITIONAL.keys() | {VALIDATE}


def send(client, method, request, **headers):
    path, body = request
    return client.request(method, path, headers=headers, **body)


@pytest.mark.usefixtures("unchanged")
@pytest.mark.parametrize("change", CONDITIONAL, ids=" ".join)
def test_a_condition_that_fails_is_412_and_changes_nothing(client, change):
    response = send(client, change[0], CONDITIONAL[change], **{"If-Match": '"stale"'})
    if change == ("PUT", "/tasks/{task}"):  # the bundle is checked before it
        assert response.status_code == 422
        bundle = client.get("/tasks/pets/versions/1/bundle").content
        response = client.put("/tasks/pets", content=bundle, headers={"If-Match": '"stale"'})
    assert_problem(response, 412, "precondition-failed")


@pytest.mark.usefixtures("unchanged")
@pytest.mark.parametrize("change", sorted(CONDITIONAL.keys() - ONLY_NEW), ids=" ".join)
def test_only_what_creates_a_task_takes_if_none_match(client, change):
    response = send(client, change[0], CONDITIONAL[change], **{"If-None-Match": "*"})
    assert "If-None-Match" in assert_problem(response, 422, "invalid-request")["detail"]


@pytest.mark.usefixtures("unchanged")
@pytest.mark.parametrize("header", ["If-Match", "If-None-Match"])
@pytest.mark.parametrize("change", UNCONDITIONAL, ids=" ".join)
def test_other_changes_reject_conditions(client, change, header):
    response = send(client, change[0], UNCONDITIONAL[change], **{header: "*"})
    assert response.status_code == 422, response.text
    assert header in response.text


@pytest.mark.usefixtures("unchanged")
def test_aborting_an_upload_takes_no_condition(client):
    url = f"/tasks/pets/examples?upload={UPLOAD}"
    response = client.delete(url, headers={"If-Match": "*"})
    assert "If-Match" in assert_problem(response, 422, "invalid-request")["detail"]


def test_the_document_declares_the_conditions(client):
    paths = client.get("/openapi.json").json()["paths"]
    declared = {
        (method.upper(), path, parameter["name"].lower())
        for path, operations in paths.items()
        for method, operation in operations.items()
        for parameter in operation.get("parameters", ())
        if parameter["in"] == "header" and method != "get"
    }
    expected = {(*change, "if-match") for change in CONDITIONAL}
    expected |= {(*change, "if-none-match") for change in ONLY_NEW}
    assert {each for each in declared if each[2].startswith("if-")} == expected


def test_a_restore_with_the_present_etag_is_made(client):
    etag = client.get("/tasks/pets").headers["etag"]
    restored = client.post("/tasks/pets/restore?version=3", headers={"If-Match": etag})
    assert restored.json()["versions"] == [1, 2, 3]
    assert client.delete("/tasks/pets/versions/3").status_code == 200


def test_a_retired_task_matches_nothing(client):
    assert client.delete("/tasks/face").status_code == 200
    refused = client.post("/tasks/face/restore", headers={"If-Match": "*"})
    assert_problem(refused, 412, "precondition-failed")
    assert client.post("/tasks/face/restore").status_code == 200
