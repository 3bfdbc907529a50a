"""Who may do what."""

import pytest
from pydantic import SecretStr
from starlette.testclient import TestClient

from tests.api.conftest import assert_problem

READ, ADMIN = "read-key-123", "admin-key-456"
BEARER = "Bearer "


def client_with(world, **keys):
    return TestClient(world.app(**{name: SecretStr(key) for name, key in keys.items()}))


def reads(client, **headers):
    return [
        client.get(path, headers=headers)
        for path in ("/tasks", "/tasks/pets", "/metrics", "/docs", "/openapi.json")
    ] + [client.post("/predict?tasks=pets", content=b"x", headers=headers)]


def changes(client, **headers):
    """Requests that change something, or would if there were something."""
    return [
        client.put("/tasks/none-such", content=b"x", headers=headers),
        client.put("/tasks/none-such/labels/canary", json={"version": 1}, headers=headers),
        client.delete("/tasks/none-such/labels/canary", headers=headers),
        client.post("/tasks/none-such/rollback", headers=headers),
        client.post("/tasks/none-such/restore", headers=headers),
        client.delete("/tasks/none-such", headers=headers),
        client.delete("/tasks/none-such/versions/1", headers=headers),
    ]


def are_refused(responses, status=401, name="key-required"):
    for response in responses:
        assert_problem(response, status, name)
        if status == 401:
            assert response.headers["www-authenticate"].startswith("Bearer")


def are_let_in(responses):
    assert all(response.status_code not in (401, 403) for response in responses)


@pytest.mark.parametrize("header", [("Authorization", BEARER), ("X-API-Key", "")])
def test_each_key_opens_its_own_and_the_admin_key_reads_too(world, header):
    name, prefix = header
    with client_with(world, api_key=READ, admin_key=ADMIN) as client:
        are_refused(reads(client) + changes(client))
        are_refused(reads(client, **{name: prefix + "wrong"}))
        are_refused(changes(client, **{name: prefix + "wrong"}))
        are_let_in(reads(client, **{name: prefix + READ}))
        are_refused(changes(client, **{name: prefix + READ}), 403, "not-permitted")
        are_let_in(reads(client, **{name: prefix + ADMIN}))
        are_let_in(changes(client, **{name: prefix + ADMIN}))


def test_the_api_key_alone_guards_changes_too(world):
    with client_with(world, api_key=READ) as client:
        are_refused(reads(client) + changes(client))
        headers = {"X-API-Key": READ}
        are_let_in(reads(client, **headers) + changes(client, **headers))


def test_the_admin_key_alone_guards_everything(world):
    with client_with(world, admin_key=ADMIN) as client:
        are_refused(reads(client) + changes(client))
        headers = {"X-API-Key": ADMIN}
        are_let_in(reads(client, **headers) + changes(client, **headers))


def test_health_and_the_empty_console_are_open_to_all(world):
    with client_with(world, api_key=READ, admin_key=ADMIN) as client:
        for path in ("/livez", "/readyz", "/", "/console/app.js"):
            assert client.get(path).status_code == 200


def test_keys_beyond_ascii_are_wrong_and_not_a_crash(world):
    with client_with(world, api_key=READ) as client:
        are_refused([client.get("/tasks", headers={"X-API-Key": "schlüssel".encode()})])


def test_pages_of_other_sites_change_nothing(world, fresh):
    world.store.publish(fresh, world.bundle(70))
    with client_with(world) as client:
        response = client.delete(f"/tasks/{fresh}", headers={"Origin": "http://evil.example"})
        assert_problem(response, 403, "cross-origin")
        assert fresh in world.store.catalog().names
        same = {"Origin": "http://testserver"}
        assert client.delete(f"/tasks/{fresh}", headers=same).status_code == 200
