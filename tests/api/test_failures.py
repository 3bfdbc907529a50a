"""A device that fails is seen from outside: /readyz, then /livez, and /replicas all the while."""

import dataclasses

import engram_server.engine.worker
import engram_server.engine.workers
import pytest
from engram_server.api.routes.health import Liveness, Readiness
from engram_server.app import build_metrics, create_app, engine_config
from engram_server.engine.engine import Engine
from engram_server.model import load_backbone
from engram_store import open_store
from starlette.testclient import TestClient

from tests.api.conftest import assert_problem
from tests.api.test_v2_models import assert_error
from tests.engine.conftest import until  # noqa: F401 - a fixture
from tests.engine.test_failures import Device
from tests.serving import ReplaceablePass, make_bundle, photo


@pytest.fixture
def failing(settings, monkeypatch):
    """A server of its own whose device works until `device.fails` says otherwise."""
    backbone = load_backbone(settings.backbone)
    store = open_store("memory://")
    store.publish("pets", make_bundle(backbone, 1))
    config = dataclasses.replace(
        engine_config(settings), heartbeat_seconds=1.0, poll_seconds=3600, cache_bytes=0
    )
    metrics = build_metrics(settings)
    engine = Engine(backbone, store, config, metrics, run_pass=(passes := ReplaceablePass()))
    engine.start()
    device = Device(passes, monkeypatch)
    with TestClient(create_app(settings, engine, metrics=metrics)) as client:
        yield client, device
    engine.stop()


def predict(client, seed=0):
    return client.post("/predict?tasks=pets", content=photo(seed))


def test_a_device_that_fails_always_is_seen_from_outside(failing, until):  # noqa: F811
    client, device = failing
    assert client.get("/readyz").status_code == client.get("/livez").status_code == 200
    device.fails = lambda pixels: RuntimeError("the device caught fire")
    for seed in range(engram_server.engine.worker.FAILED_BATCHES):
        problem = assert_problem(predict(client, seed), 500, "batch-failed")
        assert "fire" not in problem["detail"], "only the log says more"
    until(lambda: client.get("/readyz").status_code == 503)
    body = Readiness.model_validate(client.get("/readyz").json())
    assert "engram-worker-0" in body.reasons[0]
    until(lambda: client.get("/livez").status_code == 503)
    alive = Liveness.model_validate(client.get("/livez").json())
    assert "cannot be restarted" in alive.reasons[0]
    refused = predict(client)
    assert_problem(refused, 503, "device-failed")
    assert int(refused.headers["Retry-After"]) > 0
    assert_error(client.get("/v2/health/live"), 503, "restarted")
    assert_error(client.get("/v2/health/ready"), 503, "engram-worker-0")
    # It is still one of the store's servers, and says what it serves.
    (replica,) = client.get("/replicas").json()["replicas"]
    assert replica["this"]
    assert client.get("/tasks/pets").status_code == 200
    text = client.get("/metrics").text
    assert "engram_workers 0.0" in text
    assert "engram_worker_restarts_total 3.0" in text
    assert 'engram_rejections_total{reason="device"}' in text


def test_a_worker_that_dies_is_back_before_anybody_must_act(failing, until):  # noqa: F811
    client, device = failing
    deaths = [SystemExit()]
    device.fails = lambda pixels: deaths.pop() if deaths else None
    refused = predict(client)
    problem = assert_problem(refused, 503, "device-failed")
    assert "try again" in problem["detail"]
    until(lambda: client.get("/readyz").status_code == 200)
    assert predict(client).status_code == 200
    assert client.get("/livez").status_code == 200
    assert "engram_workers 1.0" in client.get("/metrics").text


def test_a_publish_on_a_failing_device_is_rejected_and_changes_nothing(failing, until):  # noqa: F811
    client, device = failing
    backbone = client.app.state.runtime.engine.backbone
    device.fails = lambda pixels: RuntimeError("the device caught fire")
    response = client.put("/tasks/new", content=make_bundle(backbone, 2).to_bytes())
    assert response.status_code in (500, 503)
    assert client.get("/tasks/new").status_code == 404
