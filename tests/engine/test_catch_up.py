"""Requests for what this server has not reached make it look at the store, once for all of them."""

import asyncio
import threading

import pytest
from engram_server.errors import GenerationNotReached, UnknownTask
from engram_store import Retire, StoreUnavailable, TaskStore, open_store

from tests.engine.test_engine import running
from tests.serving import make_bundle, photo, predict


@pytest.fixture(scope="module")
def backbone(backbone_of):
    return backbone_of("vit")


class Watched:
    """Counts the polls of a store; each waits for the gate, and may fail."""

    def __init__(self, store: TaskStore, monkeypatch) -> None:
        self.count = 0
        self.begun = threading.Event()
        self.gate = threading.Event()
        self.gate.set()
        self.away = False
        refresh = store.refresh

        def look():
            self.count += 1
            self.begun.set()
            assert self.gate.wait(60)
            if self.away:
                raise StoreUnavailable("The store is away.")
            return refresh()

        monkeypatch.setattr(store, "refresh", look)


@pytest.fixture
def replica(backbone, monkeypatch):
    """An engine that never looks by itself, and another writer of its store."""
    here = open_store("memory://")
    other = TaskStore(here.objects)
    other.publish("pets", make_bundle(backbone, 1))
    with running(backbone, here, poll_seconds=3600) as (engine, _):
        yield engine, other, Watched(here, monkeypatch)


def test_a_version_published_elsewhere_is_answered_at_once(replica, backbone):
    engine, other, looks = replica
    other.publish("pets", make_bundle(backbone, 2), aliases=["canary"])
    answer = asyncio.run(predict(engine, [photo(1)], ["pets@2"]))
    assert answer.images[0].tasks["pets@2"].served.version == 2
    assert answer.generation == 2
    assert looks.count == 1
    asyncio.run(predict(engine, [photo(1)], ["pets@2", "pets@1"]))
    assert looks.count == 1, "it is known now"


def test_a_task_published_elsewhere_is_answered_by_its_version(replica, backbone):
    engine, other, _ = replica
    other.publish("birds", make_bundle(backbone, 3))
    answer = asyncio.run(predict(engine, [photo(1)], ["birds@1"]))
    assert answer.images[0].tasks["birds@1"].served.name == "birds"


def test_a_generation_known_to_the_caller_is_reached_first(replica, backbone):
    engine, other, _ = replica
    published = other.publish("pets", make_bundle(backbone, 2))
    assert asyncio.run(predict(engine, [photo(1)], ["pets"])).generation == 1
    answer = asyncio.run(predict(engine, [photo(1)], ["pets"], at_least=published.generation))
    assert answer.generation == published.generation
    assert answer.images[0].tasks["pets"].served.version == 2


def test_an_unpublished_version_is_unknown(replica):
    engine, _, looks = replica
    with pytest.raises(UnknownTask):
        asyncio.run(predict(engine, [photo(1)], ["pets@9"]))
    with pytest.raises(GenerationNotReached, match=r"9.*is at generation 1"):
        asyncio.run(predict(engine, [photo(1)], ["pets"], at_least=9))
    assert looks.count == 2


@pytest.mark.parametrize("ref", ["pest", "pets:canary", "pets@zero", "base@1", "pets@1"])
def test_names_aliases_and_known_versions_do_not_poll_the_store(replica, ref):
    engine, other, looks = replica
    if ref == "pets@1":
        other.commit(Retire("pets"))
        engine.tasks.sync()
        looks.count = 0
    with pytest.raises(UnknownTask):
        asyncio.run(predict(engine, [photo(1)], [ref]))
    assert looks.count == 0


def test_concurrent_requests_share_a_poll(replica, backbone):
    engine, other, looks = replica

    async def scenario():
        looks.gate.clear()
        first = asyncio.create_task(predict(engine, [photo(1)], ["pets@2"]))
        await asyncio.to_thread(looks.begun.wait, 60)
        # The look under way may have begun too early for these: they share the next.
        later = [asyncio.create_task(predict(engine, [photo(1)], ["pets@2"])) for _ in range(20)]
        await asyncio.sleep(0)
        other.publish("pets", make_bundle(backbone, 2))
        looks.gate.set()
        return await asyncio.gather(first, *later)

    answers = asyncio.run(scenario())
    assert {answer.generation for answer in answers} == {2}
    assert looks.count <= 2


def test_an_unavailable_store_fails_only_requests_that_need_it(replica):
    engine, _, looks = replica
    looks.away = True
    with pytest.raises(StoreUnavailable):
        asyncio.run(predict(engine, [photo(1)], ["pets@2"]))
    assert asyncio.run(predict(engine, [photo(1)], ["pets", "pets@1"])).generation == 1
    with pytest.raises(StoreUnavailable):
        engine.tasks.commit(Retire("pets"))
    looks.away = False
    engine.tasks.commit(Retire("pets"))
    assert engine.status.store_error is None
