"""A lab for each test, on a store that can be made to fail."""

from collections.abc import Callable, Iterator

import pytest
from engram_server.model import Backbone
from engram_store import StoreUnavailable, TaskStore, open_store

from tests.engine.tasks.lab import Lab


@pytest.fixture(scope="module")
def backbone(backbone_of) -> Backbone:
    return backbone_of("vit")


@pytest.fixture
def store() -> TaskStore:
    return open_store("memory://")


@pytest.fixture
def lab(backbone, store) -> Iterator[Callable[..., Lab]]:
    built: list[Lab] = []

    def build(**options) -> Lab:
        built.append(Lab(backbone, options.pop("store", store), **options))
        return built[-1]

    yield build
    for one in built:
        one.follower.stop()


@pytest.fixture
def outage(store, monkeypatch):
    """`with outage: …`: the store can neither be read nor written."""

    class Outage:
        def __enter__(self):
            def unreachable(path: str) -> bytes:
                raise StoreUnavailable("The store is away.")

            monkeypatch.setattr(store.objects, "get", unreachable)

        def __exit__(self, *_):
            monkeypatch.undo()

    return Outage()
