"""One tiny engine for all tests of the API, and any number of applications around it."""

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import pytest
from engram_bundle import TaskBundle
from engram_server.app import build_metrics, create_app, engine_config
from engram_server.engine.engine import Engine
from engram_server.model import Backbone, load_backbone
from engram_server.observability.metrics import Metrics
from engram_server.settings import Settings
from engram_store import Retire, TaskStore, open_store
from fastapi import FastAPI
from starlette.testclient import TestClient

from tests.conftest import PHOTOS
from tests.serving import ReplaceablePass, make_bundle


def relabelled(bundle: TaskBundle, *labels: str) -> TaskBundle:
    manifest = bundle.manifest.model_copy(update={"labels": labels})
    return dataclasses.replace(bundle, manifest=manifest)


@dataclass
class World:
    """A running engine and what is in it."""

    backbone: Backbone
    store: TaskStore
    engine: Engine
    passes: ReplaceablePass
    metrics: Metrics
    settings: Settings
    bundles: dict[str, TaskBundle]

    def app(self, **changes) -> FastAPI:
        """Another application on the same engine."""
        return create_app(
            self.settings.model_copy(update=changes), self.engine, metrics=self.metrics
        )

    def bundle(self, seed: int, **options) -> TaskBundle:
        return make_bundle(self.backbone, seed, **options)


@pytest.fixture(scope="session")
def settings(folder_of) -> Settings:
    return Settings(
        backbone=str(folder_of("vit")),
        store="memory://",
        allowed_hosts="testserver",
        devices="cpu",
        poll_seconds=3600,
        max_images=4,
        max_tasks=8,
        body_bytes=200_000,
        bundle_bytes=1_000_000,
        max_pixels=1_000_000,
        decode_threads=2,
    )


@contextmanager
def running_world(settings: Settings) -> Iterator[World]:
    """A tiny engine with four tasks, one of each type."""
    backbone = dataclasses.replace(load_backbone(settings.backbone), name="tiny/vit-tiny-random")
    store = open_store("memory://", actor="ada@lab")
    bundles = {
        "pets": relabelled(
            make_bundle(backbone, 1, classes=3, description="Which pet?"), "cat", "dog", "rabbit"
        ),
        "scene": relabelled(
            make_bundle(backbone, 2, classes=3, task_type="multi_label"), "indoor", "sunny", "urban"
        ),
        "age": make_bundle(backbone, 3, classes=1, task_type="regression"),
        "face": make_bundle(backbone, 4, classes=6, task_type="embedding"),
    }
    for name, bundle in bundles.items():
        store.publish(name, bundle)
    metrics = build_metrics(settings)
    passes = ReplaceablePass()
    engine = Engine(backbone, store, engine_config(settings), metrics, run_pass=passes)
    engine.start()
    yield World(backbone, store, engine, passes, metrics, settings, bundles)
    engine.stop()


@pytest.fixture(scope="session")
def world(settings):
    with running_world(settings) as world:
        yield world


@pytest.fixture(scope="session")
def client(world):
    """An application without keys."""
    with TestClient(world.app()) as client:
        yield client


@pytest.fixture(scope="session")
def cat() -> bytes:
    return (PHOTOS / "cat.jpg").read_bytes()


@pytest.fixture
def fresh(world, request):
    """A task name that no other test uses; the task is gone afterwards."""
    name = request.node.name.partition("[")[0].replace("test_", "").replace("_", "-")[:63]
    yield name
    if name in world.store.catalog().names:
        world.store.commit(Retire(name))
        world.engine.tasks.sync()


def assert_problem(response, status: int, name: str) -> dict:
    """A problem document of this kind, whole and with the id of its request."""
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/problem+json"
    document = response.json()
    assert document["type"] == f"urn:engram:problem:{name}"
    assert document["status"] == status
    assert document["title"]
    assert document["detail"]
    assert document["request_id"] == response.headers["x-request-id"]
    return document
