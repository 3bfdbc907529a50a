"""Evidence of several replicas is summed, and survives the restart of a server."""

import asyncio
from datetime import UTC, datetime, timedelta

import numpy as np
from engram_server.engine.observer import EngineObserver
from engram_server.engine.rollout import service
from engram_server.engine.rollout.comparison import Answers, ObservedImage
from engram_server.engine.rollout.service import Observation, Rollouts
from engram_server.engine.types import TaskVersion
from engram_store import Purge, TaskStore, open_store

from tests.engine.rollout.conftest import pets_store
from tests.serving import photo, predict


def serve(engine, seeds, until):
    asyncio.run(predict(engine, [photo(seed) for seed in seeds], ["pets"]))
    return lambda images: until(lambda: seen(engine) >= images)


def seen(engine):
    return sum(pair.images + pair.dropped for pair in engine.rollouts.evidence("pets"))


def test_two_replicas_sum_their_evidence_also_after_a_restart(tmp_path, backbone, running, until):
    location = str(tmp_path)
    pets_store(backbone, location)
    with running(backbone, open_store(location)) as first:
        with running(backbone, open_store(location)) as second:
            serve(first, range(3), until)(3)
            serve(second, range(3, 8), until)(5)
            first.rollouts.write()
            second.rollouts.write()
            assert seen(first) == seen(second) == 8
            serve(second, range(8, 10), until)(10)
        # `second` has stopped, which wrote the rest.
        assert seen(first) == 10
        with running(backbone, open_store(location)) as third:
            assert seen(third) == 10
            serve(third, range(10, 12), until)(12)
            third.rollouts.write()
            assert seen(first) == 12
            (pair,) = first.rollouts.evidence("pets")
    assert sum(images for images, _ in pair.classes.values()) == pair.images
    with running(backbone, open_store(location)) as last:
        assert last.rollouts.evidence("pets") == [pair]


def test_purge_on_one_replica_is_forgotten_by_the_others(tmp_path, backbone, running, until):
    location = str(tmp_path)
    store = pets_store(backbone, location)
    with (
        running(backbone, open_store(location)) as first,
        running(backbone, open_store(location)) as second,
    ):
        serve(first, range(3), until)(3)
        serve(second, range(3), until)(3)
        first.rollouts.write()
        second.rollouts.write()
        first.tasks.commit(Purge("pets"))
        second.tasks.sync()
        second.rollouts.write()
        assert first.rollouts.evidence("pets") == second.rollouts.evidence("pets") == []
    assert list(store.objects.listing("evidence")) == []


def test_old_evidence_of_stopped_servers_is_deleted(tmp_path, backbone, running, until):
    location = str(tmp_path)
    store = pets_store(backbone, location)
    with running(backbone, open_store(location)) as engine:
        serve(engine, range(3), until)(3)
    store.delete_expired()
    assert len(list(store.objects.listing("evidence"))) == 1
    later = TaskStore(store.objects, clock=lambda: datetime.now(UTC) + timedelta(days=31))
    later.delete_expired()
    assert list(store.objects.listing("evidence")) == []


def test_memory_is_bounded_with_ten_thousand_tasks(monkeypatch):
    monkeypatch.setattr(service, "MAX_TASKS", 100)
    rollouts = Rollouts(open_store("memory://").evidence, "here", EngineObserver())
    logits = np.eye(2, dtype=np.float32)[[0]]
    for number in range(300):
        name = f"task{number}"
        first, second = (
            Answers(TaskVersion(name, v, "single_label", ("a", "b")), np.arange(1), logits)
            for v in (1, 2)
        )
        rollouts.observe(Observation([ObservedImage("sha256:one")], [first], [second]))
    rollouts.count()
    assert rollouts.evidence("task0") == []
    assert rollouts.evidence("task299")[0].images == 1
    assert len(rollouts._pairs) == 100


def test_versions_of_one_task_are_bounded(monkeypatch):
    monkeypatch.setattr(service, "MAX_PAIRS", 3)
    rollouts = Rollouts(open_store("memory://").evidence, "here", EngineObserver())
    logits = np.eye(2, dtype=np.float32)[[0]]
    for version in range(2, 8):
        first, second = (
            Answers(TaskVersion("pets", v, "single_label", ("a", "b")), np.arange(1), logits)
            for v in (1, version)
        )
        rollouts.observe(Observation([ObservedImage("sha256:one")], [first], [second]))
    assert [pair.versions for pair in rollouts.evidence("pets")] == [(1, 5), (1, 6), (1, 7)]
