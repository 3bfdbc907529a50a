"""Alive and ready."""

from engram_server.api.routes.health import Liveness, Readiness
from engram_store import StoreUnavailable
from starlette.testclient import TestClient


def test_alive(client):
    response = client.get("/livez")
    assert response.status_code == 200
    Liveness.model_validate(response.json())


def test_ready_with_its_details(client, world):
    response = client.get("/readyz")
    assert response.status_code == 200
    body = Readiness.model_validate(response.json())
    assert body.ready
    assert body.reasons == []
    assert body.generation == world.engine.tasks.snapshot.generation
    assert body.store.generation_seen == body.generation
    assert body.tasks.ready == len(world.engine.tasks.snapshot.ready_names)


def test_not_ready_while_draining_and_still_answering(world, cat):
    app = world.app()
    app.state.runtime.draining = True
    with TestClient(app) as client:
        response = client.get("/readyz")
        assert response.status_code == 503
        assert Readiness.model_validate(response.json()).reasons == ["the server is shutting down"]
        assert client.get("/livez").status_code == 200
        assert client.post("/predict?tasks=pets", content=cat).status_code == 200


def test_readiness_survives_a_store_that_is_away_and_does_not_say_where_it_is(
    client, world, monkeypatch
):
    def away():
        raise StoreUnavailable("The task store at s3://secret-bucket is away.")

    with monkeypatch.context() as patch:
        patch.setattr(world.store, "refresh", away)
        world.engine.tasks.sync()
        response = client.get("/readyz")
    world.engine.tasks.sync()
    assert response.status_code == 200
    assert response.json()["store"]["error"]
    assert "secret-bucket" not in response.text
