"""Who may do what."""

import pytest
from pydantic import SecretStr
from starlette.testclient import TestClient

from tests.api.conftest import assert_problem

READ, ADMIN = "read-key-123", "admin-key-456"
BEARER = "Bearer "


def client_with(world, **changes):
    secret = {name: SecretStr(key) for name, key in changes.items() if name.endswith("_key")}
    return TestClient(world.app(**{**changes, **secret}))


def reads(client, **headers):
    paths = ("/tasks", "/tasks/pets", "/metrics", "/tasks/pets/history")
    return [client.get(path, headers=headers) for path in paths] + [
        client.post("/predict?tasks=pets", content=b"x", headers=headers)
    ]


def changes(client, **headers):
    """Requests that change something, or would if there were something."""
    return [
        client.put("/tasks/none-such", content=b"x", headers=headers),
        client.put("/tasks/none-such/aliases/canary", json={"version": 1}, headers=headers),
        client.delete("/tasks/none-such/aliases/canary", headers=headers),
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


def are_accepted(responses):
    assert all(response.status_code not in (401, 403) for response in responses)


@pytest.mark.parametrize("header", [("Authorization", BEARER), ("X-API-Key", "")])
def test_each_key_opens_its_own_and_the_admin_key_reads_too(world, header):
    name, prefix = header
    with client_with(world, api_key=READ, admin_key=ADMIN) as client:
        are_refused(reads(client) + changes(client))
        are_refused(reads(client, **{name: prefix + "wrong"}))
        are_refused(changes(client, **{name: prefix + "wrong"}))
        are_accepted(reads(client, **{name: prefix + READ}))
        are_refused(changes(client, **{name: prefix + READ}), 403, "not-permitted")
        are_accepted(reads(client, **{name: prefix + ADMIN}))
        are_accepted(changes(client, **{name: prefix + ADMIN}))


def test_the_api_key_alone_guards_changes_too(world):
    with client_with(world, api_key=READ) as client:
        are_refused(reads(client) + changes(client))
        headers = {"X-API-Key": READ}
        are_accepted(reads(client, **headers) + changes(client, **headers))


def test_the_admin_key_alone_guards_everything(world):
    with client_with(world, admin_key=ADMIN) as client:
        are_refused(reads(client) + changes(client))
        headers = {"X-API-Key": ADMIN}
        are_accepted(reads(client, **headers) + changes(client, **headers))


def test_what_holds_no_data_is_open_to_all(world):
    pages = ("/", "/console/app.js", "/docs", "/docs/swagger-ui.css")
    with client_with(world, api_key=READ, admin_key=ADMIN) as client:
        for path in ("/livez", "/readyz", *pages, "/openapi.json", "/openapi-3.0.json"):
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


@pytest.mark.parametrize("origin", ["http://[", "null", "", "http://[::1", "://", "http://"])
def test_an_odd_origin_is_rejected_and_not_a_crash(client, origin):
    response = client.delete("/tasks/none-such", headers={"Origin": origin})
    assert_problem(response, 403, "cross-origin")


def test_without_keys_a_name_that_is_pointed_here_reaches_nothing(world):
    """DNS rebinding: the page's own name leads to this machine, and its browser sends that."""
    evil = {"Host": "evil.example", "Origin": "http://evil.example"}
    with client_with(world, allowed_hosts=()) as client:
        for route in client.app.state.routes:
            path = route.path_format.replace("{task}", "pets").replace("{name}", "pets")
            path = (
                path.replace("{version}", "1").replace("{label}", "x").replace("{path}", "app.js")
            )
            for method in route.methods:
                response = client.request(method, path, headers=evil)
                assert response.status_code == 421, (method, path)
        assert_problem(client.get("/livez", headers=evil), 421, "host-not-allowed")
    assert "pets" in world.store.catalog().names


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("127.0.0.1:8000", 200),
        ("127.8.8.8", 200),
        ("localhost:1", 200),
        ("LOCALHOST", 200),
        ("[::1]:8000", 200),
        ("engram.internal:8000", 200),
        ("localhost.evil.example", 421),
        ("127.0.0.1.evil.example", 421),
        ("evil.example:8000", 421),
        ("10.0.0.1", 421),
        ("[::1", 200),
        ("[", 421),
        ("", 421),
    ],
)
def test_hosts_that_are_answered_without_keys(world, host, status):
    with client_with(world, allowed_hosts=("engram.internal",)) as client:
        assert client.get("/tasks", headers={"Host": host}).status_code == status


def test_with_keys_a_server_has_any_name(world):
    with client_with(world, api_key=READ, allowed_hosts=()) as client:
        headers = {"Host": "engram.example", "X-API-Key": READ}
        assert client.get("/tasks", headers=headers).status_code == 200
