"""The engine as the server uses it: real worker threads on a tiny backbone."""

import asyncio
import contextlib
import threading
import time
from dataclasses import replace

import numpy as np
import pytest

import server.engine.worker
from server.engine.engine import Engine, EngineConfig
from server.engine.observer import EngineObserver
from server.engine.tasks.snapshot import Snapshot
from server.engine.types import PredictRequest
from server.errors import (
    BatchFailed,
    ContextNotCached,
    DeadlineExceeded,
    Draining,
    EngineError,
    ImageTooLarge,
    Overloaded,
    UnknownTask,
    UnreadableImage,
)
from server.model.linear import has_int8
from server.model.masked_pass import masked_pass
from task_store import open_store
from tests.serving import make_bundle, photo, reference_logits

TOLERANCE = 1e-4


class Recorder(EngineObserver):
    """Remembers batches and refusals."""

    def __init__(self):
        self.batches = []
        self.rejections = []
        self.depth = 0

    def batch(self, images, rows, seconds):
        self.batches.append((images, rows))

    def rejected(self, reason):
        self.rejections.append(reason)

    def queue_depth(self, images):
        self.depth = images


class Gate:
    """Stands in the worker's way: holds passes until opened, counts them, fails on demand."""

    def __init__(self, monkeypatch):
        self.open = threading.Event()
        self.reached = threading.Event()
        self.passes = 0
        self.failure = None
        monkeypatch.setattr(server.engine.worker, "masked_pass", self)

    def __call__(self, *args, **kwargs):
        self.passes += 1
        self.reached.set()
        assert self.open.wait(timeout=60)
        failure, self.failure = self.failure, None
        if failure is not None:
            raise failure
        return masked_pass(*args, **kwargs)


@pytest.fixture
def backbone(backbone_of):
    return backbone_of("vit")


@pytest.fixture
def bundles(backbone):
    return {f"task{number}": make_bundle(backbone, number) for number in range(4)}


@pytest.fixture
def store(bundles):
    opened = open_store("memory://")
    for name, bundle in bundles.items():
        opened.publish(name, bundle)
    return opened


@contextlib.contextmanager
def running(backbone, store, **config):
    observer = Recorder()
    engine = Engine(backbone, store, replace(EngineConfig(poll_seconds=60), **config), observer)
    engine.start()
    observer.batches.clear()
    try:
        yield engine, observer
    finally:
        engine.stop()


def ask(engine, images, tasks=None, **options):
    return engine.predict(PredictRequest(images=images, tasks=tasks, **options))


async def until(condition, seconds=20.0):
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.001)


def test_every_task_answers_for_every_image_as_it_would_alone(backbone, store, bundles):
    images = [photo(1), photo(2)]
    with running(backbone, store) as (engine, _):
        answer = asyncio.run(ask(engine, images))
    assert answer.generation == 4
    for image, found in zip(images, answer.images, strict=True):
        assert set(found.tasks) == {"base", *bundles}
        for name, bundle in bundles.items():
            expected = reference_logits(backbone, bundle, image)
            assert np.abs(found.tasks[name].logits - expected).max() < TOLERANCE
            assert found.tasks[name].served.version == 1


def test_requests_with_different_task_sets_share_one_pass(backbone, store, bundles, monkeypatch):
    with running(backbone, store) as (engine, observer):
        gate = Gate(monkeypatch)

        async def scenario():
            first = asyncio.create_task(ask(engine, [photo(0)], ["base"]))
            await until(gate.reached.is_set)
            others = [
                asyncio.create_task(ask(engine, [photo(number)], [f"task{number}"]))
                for number in range(1, 4)
            ]
            await until(lambda: len(engine._queue) == 3)
            gate.open.set()
            return await asyncio.gather(first, *others)

        answers = asyncio.run(scenario())
    assert [images for images, _ in observer.batches] == [1, 3]
    for number, answer in enumerate(answers[1:], 1):
        expected = reference_logits(backbone, bundles[f"task{number}"], photo(number))
        found = answer.images[0].tasks
        assert list(found) == [f"task{number}"]
        assert np.abs(found[f"task{number}"].logits - expected).max() < TOLERANCE


def test_one_image_asked_by_several_requests_runs_through_the_backbone_once(
    backbone, store, monkeypatch
):
    with running(backbone, store) as (engine, observer):
        gate = Gate(monkeypatch)

        async def scenario():
            first = asyncio.create_task(ask(engine, [photo(0)], ["base"]))
            await until(gate.reached.is_set)
            same = [
                asyncio.create_task(ask(engine, [photo(7)], [f"task{number}"]))
                for number in range(4)
            ]
            await until(lambda: len(engine._queue) == 4)
            gate.open.set()
            await asyncio.gather(first, *same)

        asyncio.run(scenario())
    assert observer.batches[1] == (4, backbone.geometry.tokens + 4)


def test_a_batch_explains_to_those_who_ask_and_to_nobody_else(backbone, store, monkeypatch):
    """Two ask about one image, one of them for where tasks looked; a third asks about another."""
    with running(backbone, store) as (engine, observer):
        gate = Gate(monkeypatch)

        async def scenario():
            first = asyncio.create_task(ask(engine, [photo(0)], ["base"]))
            await until(gate.reached.is_set)
            others = [
                asyncio.create_task(ask(engine, [photo(7)], ["task0", "base"])),
                asyncio.create_task(ask(engine, [photo(7)], ["task0", "base"], attention=True)),
                asyncio.create_task(ask(engine, [photo(8)], ["task1"])),
            ]
            await until(lambda: len(engine._queue) == 3)
            gate.open.set()
            return await asyncio.gather(first, *others)

        _, quiet, asked, other = asyncio.run(scenario())
        assert [images for images, _ in observer.batches] == [1, 3]
        warm = asyncio.run(ask(engine, [photo(7)], ["task0", "base"], attention=True))
    for answer in (quiet, other):
        assert all(task.attention is None for task in answer.images[0].tasks.values())
    for name, task in asked.images[0].tasks.items():
        assert task.attention.shape == backbone.geometry.grid
        assert 0 < task.attention.sum() < 1
        assert np.array_equal(task.logits, quiet.images[0].tasks[name].logits)
        # The cached context is in half precision.
        assert np.abs(task.attention - warm.images[0].tasks[name].attention).max() < 2e-3
    assert warm.images[0].cache == "hit"


def test_a_failing_batch_fails_its_own_waiters_and_the_next_succeeds(backbone, store, monkeypatch):
    with running(backbone, store) as (engine, _):
        gate = Gate(monkeypatch)
        gate.open.set()
        gate.failure = RuntimeError("the device caught fire")
        with pytest.raises(BatchFailed, match="RuntimeError"):
            asyncio.run(ask(engine, [photo(0)]))
        assert asyncio.run(ask(engine, [photo(0)])).images
        assert engine.pending_images == 0


def test_a_thousand_cancelled_requests_leave_no_work_behind(backbone, store, monkeypatch):
    with running(backbone, store, queue_images=2000) as (engine, observer):
        gate = Gate(monkeypatch)

        async def scenario():
            busy = asyncio.create_task(ask(engine, [photo(0)], ["base"]))
            await until(gate.reached.is_set)
            image = photo(1)
            requests = [asyncio.create_task(ask(engine, [image], ["task1"])) for _ in range(1000)]
            await until(lambda: len(engine._queue) == 1000)
            for request in requests:
                request.cancel()
            await asyncio.gather(*requests, return_exceptions=True)
            assert len(engine._queue) == 0
            assert observer.depth == 0
            assert engine.pending_images == 1
            gate.open.set()
            await busy

        asyncio.run(scenario())
        assert gate.passes == 1


def test_a_full_queue_refuses_at_once_while_accepted_requests_finish(backbone, store, monkeypatch):
    with running(backbone, store, queue_images=3) as (engine, observer):
        gate = Gate(monkeypatch)

        async def scenario():
            accepted = [asyncio.create_task(ask(engine, [photo(number)])) for number in range(3)]
            await until(gate.reached.is_set)
            with pytest.raises(Overloaded, match="limit is 3") as refusal:
                await ask(engine, [photo(9)])
            assert refusal.value.retry_after >= 1
            gate.open.set()
            assert len(await asyncio.gather(*accepted)) == 3

        asyncio.run(scenario())
    assert observer.rejections == ["queue_full"]


def test_an_expired_request_never_reaches_the_model(backbone, store, monkeypatch):
    with running(backbone, store) as (engine, _):
        gate = Gate(monkeypatch)

        async def scenario():
            busy = asyncio.create_task(ask(engine, [photo(0)], ["base"]))
            await until(gate.reached.is_set)
            with pytest.raises(DeadlineExceeded, match="deadline passed"):
                await ask(engine, [photo(1)], deadline=time.monotonic() + 0.05)
            assert len(engine._queue) == 0
            gate.open.set()
            await busy

        asyncio.run(scenario())
        assert gate.passes == 1


def test_an_image_already_sent_is_asked_more_tasks_by_its_digest(backbone, store, bundles):
    image = photo(3)
    with running(backbone, store, cache_dtype=None) as (engine, observer):
        first = asyncio.run(ask(engine, [image], ["task0"])).images[0]
        second = asyncio.run(ask(engine, [first.digest], ["task1", "base"])).images[0]
        assert (first.cache, second.cache) == ("miss", "hit")
        expected = reference_logits(backbone, bundles["task1"], image)
        assert np.abs(second.tasks["task1"].logits - expected).max() < TOLERANCE
        assert observer.batches[-1] == (1, 1)  # no base rows


def test_half_precision_contexts_change_answers_little(backbone, store, bundles):
    """Measured here: 0.03 % of the largest logit; reference/configuration.md has real backbones."""
    image = photo(3)
    with running(backbone, store) as (engine, _):
        digest = asyncio.run(ask(engine, [image], ["base"])).images[0].digest
        warm = asyncio.run(ask(engine, [digest], list(bundles))).images[0]
    for name, bundle in bundles.items():
        expected = reference_logits(backbone, bundle, image)
        error = np.abs(warm.tasks[name].logits - expected).max() / np.abs(expected).max()
        assert error < 0.001


@pytest.mark.skipif(not has_int8(), reason="int8 needs a processor with AVX2")
def test_a_backbone_in_int8_answers_near_the_plain_one_and_accepts_its_golden_answers(
    backbone, store, bundles
):
    image = photo(3)
    with running(backbone, store, int8=True) as (engine, _):
        assert engine.backbone.precision == "int8"
        cold = asyncio.run(ask(engine, [image], list(bundles))).images[0]
        warm = asyncio.run(ask(engine, [cold.digest], list(bundles))).images[0]
    for name, bundle in bundles.items():
        expected = reference_logits(backbone, bundle, image)
        for answer in (cold, warm):
            error = np.abs(answer.tasks[name].logits - expected).max() / np.abs(expected).max()
            assert error < 0.1


def test_an_unknown_digest_is_told_apart(backbone, store):
    with running(backbone, store) as (engine, _), pytest.raises(ContextNotCached, match="sha256:0"):
        asyncio.run(ask(engine, [f"sha256:{'0' * 64}"]))


def test_the_cache_keeps_to_its_bytes_and_drops_the_oldest(backbone, store):
    with running(backbone, store) as (engine, _):
        asyncio.run(ask(engine, [photo(0)]))
        size = engine.cache.nbytes
    with running(backbone, store, cache_bytes=3 * size) as (engine, _):
        digests = [
            asyncio.run(ask(engine, [photo(number)])).images[0].digest for number in range(5)
        ]
        assert (len(engine.cache), engine.cache.nbytes) == (3, 3 * size)
        with pytest.raises(ContextNotCached):
            asyncio.run(ask(engine, [digests[0]]))
        assert asyncio.run(ask(engine, [digests[4]])).images[0].cache == "hit"


def test_a_cache_of_no_bytes_is_off(backbone, store):
    with running(backbone, store, cache_bytes=0) as (engine, _):
        assert asyncio.run(ask(engine, [photo(0)])).images[0].cache == "off"
        assert len(engine.cache) == 0


def test_a_bad_image_among_good_ones_fails_the_request_and_withdraws_the_others(backbone, store):
    with running(backbone, store, max_pixels=10_000) as (engine, _):
        with pytest.raises(UnreadableImage):
            asyncio.run(ask(engine, [photo(0), b"no image", photo(1)]))
        with pytest.raises(ImageTooLarge):
            asyncio.run(ask(engine, [photo(0, size=(200, 200))]))
        assert engine.pending_images == 0


def test_images_that_cannot_be_read_keep_nobody_waiting(backbone, store, monkeypatch):
    monkeypatch.setattr(server.engine.worker, "_CPU_PATIENCE_SECONDS", 60.0)
    with running(backbone, store) as (engine, _):
        for _ in range(3):
            with pytest.raises(UnreadableImage):
                asyncio.run(ask(engine, [photo(0), b"no image", photo(1)]))
        # Whoever still waited for one of those would be far too late.
        assert asyncio.run(asyncio.wait_for(ask(engine, [photo(2)]), 20)).images


def test_features_are_what_the_head_read(backbone, store, bundles):
    with running(backbone, store) as (engine, _):
        answer = asyncio.run(ask(engine, [photo(0)], ["task2"], features=True)).images[0]
    found, bundle = answer.tasks["task2"], bundles["task2"]
    expected = bundle.head_weight @ found.features + bundle.head_bias
    assert np.abs(found.logits - expected).max() < TOLERANCE


def test_draining_refuses_new_requests_and_finishes_accepted_ones(backbone, store, monkeypatch):
    with running(backbone, store) as (engine, _):
        gate = Gate(monkeypatch)

        async def scenario():
            accepted = asyncio.create_task(ask(engine, [photo(0)]))
            await until(gate.reached.is_set)
            draining = asyncio.create_task(engine.drain(30))
            await until(lambda: not engine.status.ready)
            with pytest.raises(Draining):
                await ask(engine, [photo(1)])
            assert not draining.done()
            gate.open.set()
            assert (await accepted).images
            assert await draining

        asyncio.run(scenario())


def test_a_drain_that_takes_too_long_says_so(backbone, store, monkeypatch):
    with running(backbone, store) as (engine, _):
        gate = Gate(monkeypatch)

        async def scenario():
            accepted = asyncio.create_task(ask(engine, [photo(0)]))
            await until(gate.reached.is_set)
            assert not await engine.drain(0.01)
            gate.open.set()
            await accepted

        asyncio.run(scenario())


def test_two_workers_serve_one_queue(backbone, store, bundles, monkeypatch):
    with running(backbone, store, devices=("cpu", "cpu"), budget_rows=1) as (engine, observer):
        together = threading.Barrier(2)  # passes only if two passes are under way at once

        def meet(*args, **kwargs):
            together.wait(timeout=30)
            return masked_pass(*args, **kwargs)

        monkeypatch.setattr(server.engine.worker, "masked_pass", meet)

        async def scenario():
            return await asyncio.gather(
                *(ask(engine, [photo(number)], ["task0"]) for number in range(8))
            )

        answers = asyncio.run(scenario())
    assert len(observer.batches) == 8
    for number, answer in enumerate(answers):
        expected = reference_logits(backbone, bundles["task0"], photo(number))
        found = answer.images[0].tasks["task0"].logits
        assert np.abs(found - expected).max() < TOLERANCE


def test_a_request_keeps_the_generation_it_started_with(backbone, store, bundles, monkeypatch):
    with running(backbone, store) as (engine, _):
        gate = Gate(monkeypatch)

        async def scenario():
            early = asyncio.create_task(ask(engine, [photo(0)], ["task0", "task1"]))
            await until(gate.reached.is_set)
            store.publish("task0", make_bundle(backbone, 99))
            synced = asyncio.create_task(asyncio.to_thread(engine.sync))
            gate.open.set()  # the new version's answers are checked on the device too
            await synced
            return await early, await ask(engine, [photo(0)], ["task0", "task1"])

        early, late = asyncio.run(scenario())
    assert (early.generation, late.generation) == (4, 5)
    assert early.images[0].tasks["task0"].served.version == 1
    assert late.images[0].tasks["task0"].served.version == 2


def test_an_unknown_task_is_named(backbone, store):
    with running(backbone, store) as (engine, _), pytest.raises(UnknownTask, match="tusk1"):
        asyncio.run(ask(engine, [photo(0)], ["tusk1"]))


def test_a_worker_that_cannot_warm_up_stops_the_start(backbone, store, monkeypatch):
    gate = Gate(monkeypatch)
    gate.open.set()
    gate.failure = RuntimeError("no such device")
    engine = Engine(backbone, store, EngineConfig(), EngineObserver())
    with pytest.raises(EngineError, match="no such device"):
        engine.start()
    engine.stop()


def test_an_engine_that_has_not_started_is_not_ready(backbone, store):
    engine = Engine(backbone, store, EngineConfig(), EngineObserver())
    assert "warming up" in engine.status.reasons[0]
    engine.stop()


def test_status_goes_through_no_list_of_tasks(backbone, store, monkeypatch):
    with running(backbone, store) as (engine, _):
        monkeypatch.setattr(Snapshot, "states", None)
        status = engine.status
    assert status.ready
    assert (status.generation, status.generation_seen) == (4, 4)
    assert (status.tasks_ready, status.versions_failed) == (5, 0)
    assert status.store_error is None
    assert status.pending_images == 0


def test_bundles_checked_by_the_same_pictures_run_the_backbone_once(backbone):
    store = open_store("memory://")
    with running(backbone, store) as (engine, observer):
        for number in range(3):
            store.publish(f"task{number}", make_bundle(backbone, number))
            engine.sync()
        rows = [rows for _, rows in observer.batches]
        assert sum(rows) >= 2 * backbone.geometry.tokens  # the two pictures, once
        assert max(rows[-2:]) <= 2  # later bundles cost their own rows
        assert len(engine.cache) == 0  # and take no room from people's images
