"""What requests leave in the audit log."""

import json
import os

import pytest
from engram_server.access.keys import Key, edit_keys, hash_of, token_of, utc_now
from engram_server.access.quotas import KeyLimits
from engram_server.commands.serve import uvicorn_config
from engram_server.observability.audit import verify
from pydantic import SecretStr
from starlette.testclient import TestClient

from tests.api.conftest import assert_problem

READ, ADMIN = "read-key-123", "admin-key-456"
KEYS = {"api_key": SecretStr(READ), "admin_key": SecretStr(ADMIN)}
AS_READER, AS_ADMIN = {"X-API-Key": READ}, {"X-API-Key": ADMIN}


@pytest.fixture
def path(tmp_path):
    return tmp_path / "audit.jsonl"


@pytest.fixture
def audited(world, path):
    """`audited(**settings)`: a client of an application with keys and an audit log."""

    def make(**settings):
        app = world.app(audit_log=str(path), **(KEYS | settings))
        return TestClient(app, client=("203.0.113.9", 4711))

    return make


def records(path, *, requests=True):
    """In order; of requests, without those about the server itself."""
    verify([path])
    parsed = [json.loads(line) for line in path.read_bytes().splitlines()]
    return [each for each in parsed if not requests or "request_id" in each]


def fields(record, *names):
    return tuple(record.get(name) for name in names)


def test_a_change_is_recorded_before_it_is_made_and_when_it_is(world, audited, path, fresh):
    with audited() as client:
        answer = client.put(
            f"/tasks/{fresh}",
            content=world.bundle(80).to_bytes(),
            headers={**AS_ADMIN, "X-Request-Id": "order-1", "X-Forwarded-For": "8.8.8.8"},
        )
    assert answer.status_code == 201
    begun, ended = records(path)
    assert fields(begun, "action", "outcome", "status") == ("publish", "begun", None)
    assert fields(ended, "action", "outcome", "status") == ("publish", "ended", 201)
    for record in (begun, ended):
        assert fields(record, "who", "address", "proxy") == ("admin-key", "203.0.113.9", None)
        assert fields(record, "task", "request_id") == (fresh, "order-1")
        assert fields(record, "method", "path") == ("PUT", "/tasks/{task}")
    assert fields(ended, "version", "digest", "generation") == (
        1,
        answer.json()["digest"],
        answer.json()["generation"],
    )


def test_changes_that_fail_and_those_of_the_protocol_are_recorded_too(audited, path):
    with audited() as client:
        client.put("/tasks/pets/aliases/canary", json={"version": 9}, headers=AS_ADMIN)
        client.post("/tasks/none-such/rollback", headers=AS_ADMIN)
        client.delete("/tasks/none-such/versions/3", headers=AS_ADMIN)
        client.post("/v2/repository/models/none-such/unload", headers=AS_ADMIN)
    ended = [each for each in records(path) if each["outcome"] == "ended"]
    names = ("action", "status", "problem", "task", "version", "alias")
    assert [fields(each, *names) for each in ended] == [
        ("move_alias", 404, "unknown-version", "pets", None, "canary"),
        ("roll_back", 404, "unknown-task", "none-such", None, None),
        ("retire_version", 404, "unknown-task", "none-such", "3", None),
        ("repository_model_unload", 404, "unknown-task", "none-such", None, None),
    ]


def test_rejections_are_recorded_with_caller_and_reason(audited, path):
    with audited() as client:
        client.get("/tasks")
        client.delete("/tasks/pets", headers=AS_READER)
        client.delete("/tasks/pets", headers={**AS_ADMIN, "Origin": "http://evil.example"})
        client.get("/tasks/none-such", headers=AS_READER)  # is no refusal
    names = ("action", "outcome", "status", "problem", "who", "task")
    assert [fields(each, *names) for each in records(path)] == [
        ("list_tasks", "refused", 401, "key-required", None, None),
        ("retire_task", "refused", 403, "not-permitted", "api-key", "pets"),
        ("retire_task", "refused", 403, "cross-origin", None, "pets"),
    ]
    assert all(each["reason"] for each in records(path))


def test_a_thousand_rejections_are_ten_records_and_a_count(audited, path):
    with audited() as client:
        for _ in range(100):
            client.get("/tasks")
    written = records(path, requests=False)
    assert [each["action"] for each in written] == ["start", *["list_tasks"] * 10, "stop"]
    assert sum(each.get("left_out", 0) for each in written) == 90


def test_downloads_are_recorded_and_other_reading_is_not(audited, path):
    with audited() as client:
        assert client.get("/tasks", headers=AS_READER).status_code == 200
        got = client.get("/tasks/pets/versions/1/bundle", headers=AS_READER)
        assert got.status_code == 200
    names = ("action", "outcome", "status", "who", "task", "version")
    assert [fields(each, *names) for each in records(path)] == [
        ("download_bundle", "begun", None, "api-key", "pets", "1"),
        ("download_bundle", "ended", 200, "api-key", "pets", "1"),
    ]


def test_predictions_are_recorded_if_the_settings_say_so(audited, path, cat):
    with audited() as client:
        client.post("/predict?tasks=pets", content=cat, headers=AS_READER)
    assert records(path) == []
    with audited(audit_predictions=True) as client:
        client.post("/predict?tasks=pets", content=cat, headers=AS_READER)
    (record,) = records(path)
    assert fields(record, "action", "status", "images", "who") == ("predict", 200, 1, "api-key")


def test_start_and_stop_of_the_server_are_recorded(audited, path):
    with audited():
        pass
    assert [each["action"] for each in records(path, requests=False)] == ["start", "stop"]


def test_while_the_log_cannot_be_written_changes_and_downloads_are_rejected_and_predictions_are_not(
    world, audited, path, cat, fresh, monkeypatch
):
    real = os.write
    bundle = world.bundle(81).to_bytes()
    with audited() as client:
        with monkeypatch.context() as broken:
            broken.setattr("engram_server.observability.audit.os.write", full)
            answer = client.put(f"/tasks/{fresh}", content=bundle, headers=AS_ADMIN)
            assert_problem(answer, 503, "audit-unavailable")
            assert answer.headers["retry-after"]
            assert fresh not in world.store.catalog().names
            answer = client.get("/tasks/pets/versions/1/bundle", headers=AS_READER)
            assert_problem(answer, 503, "audit-unavailable")
            ready = client.get("/readyz")
            assert ready.status_code == 200
            assert "cannot be written" in ready.json()["audit"]["error"]
            assert client.post("/predict", content=cat, headers=AS_READER).status_code == 200
        assert os.write is real
        answer = client.put(f"/tasks/{fresh}", content=bundle, headers=AS_ADMIN)
        assert answer.status_code == 201
        assert client.get("/readyz").json()["audit"] == {"error": None}
        metrics = client.get("/metrics", headers=AS_READER).text
    assert "engram_audit_failures_total" in metrics
    assert [each["outcome"] for each in records(path)] == ["begun", "ended"]


def full(descriptor, data):
    raise OSError(28, "No space left on device")


def test_readiness_omits_the_audit_log_if_there_is_none(client):
    assert client.get("/readyz").json()["audit"] is None


def test_the_client_behind_a_trusted_proxy_is_the_one_that_is_recorded(audited, path):
    forwarded = {"X-Forwarded-For": "8.8.8.8, 198.51.100.7"}
    with audited(trusted_proxies=("203.0.113.9",)) as client:
        client.get("/tasks", headers=forwarded)
    with audited(trusted_proxies=("192.0.2.0/24",)) as client:
        client.get("/tasks", headers=forwarded)
    names = ("address", "proxy")
    assert [fields(each, *names) for each in records(path)] == [
        ("198.51.100.7", "203.0.113.9"),
        ("203.0.113.9", None),
    ]


def test_uvicorn_believes_no_proxy_by_itself(world):
    assert not uvicorn_config(world.app(), world.settings).proxy_headers


def add_key(file, key_id, **members):
    with edit_keys(file) as keys:
        keys[key_id] = Key(
            id=key_id,
            name=f"the key of {key_id}",
            secret=hash_of("secret"),
            scopes={"read": ("*",)},
            created=utc_now(),
            **members,
        )


def test_keys_that_change_while_the_server_runs_are_recorded(audited, path, tmp_path, monkeypatch):
    file = tmp_path / "keys.json"
    add_key(file, "ada")
    add_key(file, "bob")
    monkeypatch.setattr("engram_server.access.keys.CHECK_SECONDS", 0)
    with audited(keys_file=str(file)) as client:
        headers = {"X-API-Key": token_of("ada", "secret")}
        assert client.get("/tasks", headers=headers).status_code == 200
        with edit_keys(file) as keys:
            del keys["bob"]
        add_key(file, "eve")
        add_key(file, "ada", revoked=utc_now())
        assert_problem(client.get("/tasks", headers=headers), 401, "key-required")
    changed, refused = records(path, requests=False)[1:-1]
    assert fields(changed, "action", "keys") == ("change_keys", ["ada", "bob", "eve"])
    assert fields(refused, "outcome", "status") == ("refused", 401)
    assert "ada" in refused["reason"]


def test_exceeded_quotas_are_recorded_as_rejected(audited, path, tmp_path):
    file = tmp_path / "keys.json"
    add_key(file, "ada", limits=KeyLimits(requests_per_second=0.001))
    with audited(keys_file=str(file)) as client:
        headers = {"X-API-Key": token_of("ada", "secret")}
        while client.get("/tasks", headers=headers).status_code == 200:
            pass
    (record,) = records(path)
    assert fields(record, "who", "status", "problem") == ("key:ada", 429, "quota-exceeded")


def test_keys_in_paths_are_in_no_log(audited, path, caplog):
    caplog.set_level("INFO", "engram.access")
    token = token_of("1a2b3c4d", "s" * 43)
    with audited() as client:
        client.get(f"/tasks/{token}", headers=AS_READER)
        client.get(f"/tasks/x{token}/{token}")
        client.post(f"/tasks/{token}/rollback", headers=AS_ADMIN)
        client.post(f"/tasks/{token}/rollback", headers=AS_READER)
    messages = " ".join(each.getMessage() for each in caplog.records)
    paths = " ".join(getattr(each, "path", "") for each in caplog.records)
    assert "ssss" not in messages + paths
    assert "GET /tasks/engram_1a2b3c4d_… " in messages
    assert "ssss" not in path.read_text(encoding="utf-8")
    assert "engram_1a2b3c4d_…" in str(records(path))
