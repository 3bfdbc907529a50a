"""Several servers of one store, over HTTP: listing, waiting, and reading one's writes."""

from contextlib import contextmanager

import pytest
from engram_server.api.routes.replicas import ReplicaList
from engram_server.api.routes.tasks import ChangeResult, PublishResult
from engram_server.app import create_app, engine_config
from engram_server.engine.engine import Engine
from engram_server.engine.observer import EngineObserver
from engram_store import Heartbeat, StoreUnavailable, TaskStore
from pydantic import SecretStr
from starlette.testclient import TestClient

from tests.api.conftest import assert_problem, running_world
from tests.serving import photo


@pytest.fixture(scope="module")
def pair(settings):
    """Two applications on one store; neither looks at it by itself."""
    with (
        running_world(settings) as world,
        second_engine(world) as engine,
        TestClient(world.app()) as here,
        TestClient(create_app(world.settings, engine)) as there,
    ):
        yield world, here, engine, there


@contextmanager
def second_engine(world):
    store = TaskStore(world.store.objects, actor="bob@lab")
    config = engine_config(world.settings)
    engine = Engine(world.backbone, store, config, EngineObserver())
    engine.start()
    yield engine
    engine.stop()


def heartbeat(id: str, generation: int) -> Heartbeat:
    about = {"hostname": "h", "address": None, "started": "", "version": "1"}
    return Heartbeat(
        id=id, generation=generation, interval=5, backbone="b", fingerprint="f", **about
    )


@pytest.fixture
def laggard(pair):
    """A replica that never gets on."""
    world = pair[0]
    world.store.heartbeats.write(heartbeat("laggard-1", 0))
    yield "laggard-1"
    world.store.heartbeats.remove("laggard-1")


def test_every_replica_is_listed_with_what_it_serves(pair):
    world, here, engine, _ = pair
    response = here.get("/replicas")
    assert response.status_code == 200
    body = ReplicaList.model_validate(response.json())
    assert {each.id for each in body.replicas} == {world.engine.replica_id, engine.replica_id}
    assert [each.id for each in body.replicas if each.this] == [world.engine.replica_id]
    assert {each.generation for each in body.replicas} == {body.generation}
    assert {each.backbone for each in body.replicas} == {"vit-tiny-random"}
    assert body.heartbeats
    assert body.error is None


def test_wait_returns_when_all_serve_the_change(pair):
    world, here, engine, there = pair
    bundle = world.bundle(50).to_bytes()

    # The other replica follows explicitly, because its poll interval is long.
    world.store.publish("waiting", bundle)
    engine.tasks.sync()
    assert engine.replicas.beat()
    response = here.put("/tasks/waiting?wait=all&timeout=20", content=bundle)
    assert response.status_code == 200, response.text
    replicas = PublishResult.model_validate(response.json()).replicas
    assert set(replicas.serving) == {world.engine.replica_id, engine.replica_id}
    assert replicas.behind == []
    assert there.get("/tasks/waiting").status_code == 200


@pytest.mark.parametrize(
    ("method", "path", "options"),
    [
        ("put", "/tasks/late?alias=canary", {}),
        ("put", "/tasks/late/aliases/beta", {"json": {"version": 1}}),
        ("delete", "/tasks/late/aliases/beta", {}),
        ("post", "/tasks/late/rollback", {}),
        ("delete", "/tasks/late/versions/2", {}),
        ("post", "/tasks/late/restore?version=2", {}),
        ("delete", "/tasks/late", {}),
    ],
)
def test_after_the_timeout_the_response_lists_the_replicas_behind(
    pair, laggard, method, path, options
):
    world, here, _, _ = pair
    if path.endswith("canary"):
        assert here.put("/tasks/late", content=world.bundle(60).to_bytes()).status_code == 201
        options = {"content": world.bundle(61).to_bytes()}
    if path.endswith("rollback"):
        here.put("/tasks/late/aliases/default", json={"version": 2})
    if path.endswith("versions/2"):
        here.delete("/tasks/late/aliases/canary")
    before = world.engine.tasks.snapshot.generation
    wait = {"wait": "all", "timeout": "0.01"}
    response = here.request(method.upper(), path, params=params(path, wait), **options)
    assert response.status_code == 202, response.text
    model = PublishResult if path.endswith("canary") else ChangeResult
    body = model.model_validate(response.json())
    assert laggard in body.replicas.behind
    assert world.engine.replica_id in body.replicas.serving
    assert body.generation == before + 1, "the change was made all the same"


def params(path: str, wait: dict) -> dict:
    """httpx drops the query of a path when `params` is set."""
    query = path.partition("?")[2]
    return dict(part.split("=") for part in query.split("&") if part) | wait


def test_without_wait_no_replica_is_waited_for_or_listed(pair, laggard):
    world, here, _, _ = pair
    response = here.put("/tasks/alone", content=world.bundle(70).to_bytes())
    assert response.status_code == 201
    assert "replicas" not in response.json()


def test_waiting_for_something_else_is_rejected(pair):
    _, here, _, _ = pair
    assert_problem(here.post("/tasks/pets/rollback?wait=some"), 422, "invalid-request")
    assert_problem(here.post("/tasks/pets/rollback?wait=all&timeout=-1"), 422, "invalid-request")
    assert_problem(here.post("/tasks/pets/rollback?wait=all&timeout=nan"), 422, "invalid-request")


def test_a_server_without_heartbeats_lists_itself_and_rejects_to_wait(settings):
    with running_world(settings.model_copy(update={"heartbeat_seconds": 0})) as world:
        with TestClient(world.app()) as client:
            body = ReplicaList.model_validate(client.get("/replicas").json())
            assert [each.this for each in body.replicas] == [True]
            assert not body.heartbeats
            generation = world.store.catalog().generation
            refused = client.delete("/tasks/pets?wait=all")
            assert (
                "ENGRAM_HEARTBEAT_SECONDS"
                in assert_problem(refused, 422, "invalid-request")["detail"]
            )
            assert world.store.catalog().generation == generation
        assert world.store.heartbeats.listing() == []


def test_one_reads_elsewhere_what_one_wrote_here(pair):
    world, here, _, there = pair
    published = here.put("/tasks/own", content=world.bundle(80).to_bytes()).json()
    known = {"X-Min-Generation": str(published["generation"])}
    answer = there.post("/predict?tasks=own", content=photo(1), headers=known)
    assert answer.status_code == 200, answer.text
    assert answer.json()["generation"] >= published["generation"]

    newer = here.put("/tasks/own", content=world.bundle(81).to_bytes()).json()
    known = {"X-Min-Generation": str(newer["generation"])}
    assert there.get("/tasks/own", headers=known).json()["version"] == newer["version"]


def test_a_version_that_another_replica_published_is_found_by_its_number(pair):
    world, here, _, there = pair
    for number, path in enumerate(
        ("/tasks/found/versions/1", "/tasks/found/versions/2/bundle", "/v2/models/found/versions/3")
    ):
        here.put("/tasks/found", content=world.bundle(90 + number).to_bytes())
        assert there.get(path).status_code == 200
    here.put("/tasks/found", content=world.bundle(99).to_bytes())
    assert there.post("/predict?tasks=found@4", content=photo(1)).status_code == 200


def test_a_generation_that_the_store_does_not_have_is_rejected(pair):
    _, here, _, _ = pair
    known = {"X-Min-Generation": str(10**9)}
    document = assert_problem(
        here.post("/predict?tasks=pets", content=photo(1), headers=known),
        412,
        "generation-not-reached",
    )
    assert "1000000000" in document["detail"]
    assert_problem(here.get("/tasks", headers=known), 412, "generation-not-reached")
    wrong = {"X-Min-Generation": "-1"}
    assert_problem(here.post("/predict", content=photo(1), headers=wrong), 422, "invalid-request")
    assert_problem(here.get("/tasks", headers=wrong), 422, "invalid-request")


def test_without_its_store_a_server_goes_on_and_rejects_changes(pair, monkeypatch):
    world, here, _, _ = pair

    def away(*_args, **_options):
        raise StoreUnavailable("The store is away.")

    with monkeypatch.context() as patch:
        patch.setattr(world.store, "refresh", away)
        patch.setattr(world.store.heartbeats, "listing", away)
        world.engine.tasks.sync()
        assert here.post("/predict?tasks=pets", content=photo(1)).status_code == 200
        for response in (
            here.put("/tasks/pets", content=world.bundle(100).to_bytes()),
            here.put("/tasks/pets/aliases/default", json={"version": 1}),
            here.delete("/tasks/pets"),
        ):
            assert_problem(response, 503, "store-unavailable")
            assert int(response.headers["retry-after"]) > 0
        body = ReplicaList.model_validate(here.get("/replicas").json())
        assert body.error
        assert [each.this for each in body.replicas] == [True]
        store = here.get("/readyz").json()["store"]
        assert store["error"]
        assert store["seconds_since_read"] >= 0
    # By itself: the next change finds the store back.
    assert here.put("/tasks/pets/aliases/default", json={"version": 1}).status_code == 200
    assert here.get("/readyz").json()["store"]["error"] is None


def test_a_change_that_loses_the_store_while_it_waits_says_so(pair, monkeypatch):
    world, here, _, _ = pair

    def away():
        raise StoreUnavailable("The store is away.")

    monkeypatch.setattr(world.store.heartbeats, "listing", away)
    response = here.put("/tasks/pets/aliases/beta?wait=all&timeout=0", json={"version": 1})
    assert response.status_code == 202
    assert response.json()["replicas"]["error"]


def test_replicas_need_the_readers_key(world):
    with TestClient(world.app(api_key=SecretStr("long enough"))) as client:
        assert_problem(client.get("/replicas"), 401, "key-required")
        keyed = client.get("/replicas", headers={"X-API-Key": "long enough"})
        assert keyed.status_code == 200


def test_an_engine_that_stops_leaves(settings):
    with running_world(settings) as world:
        with second_engine(world) as engine:
            assert {one.id for one in world.store.heartbeats.listing()} == {
                world.engine.replica_id,
                engine.replica_id,
            }
        assert [one.id for one in world.store.heartbeats.listing()] == [world.engine.replica_id]
