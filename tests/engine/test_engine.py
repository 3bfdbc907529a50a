"""The engine as the server uses it: real worker threads on a tiny backbone."""

import asyncio
import contextlib
import threading
import time
from dataclasses import replace

import engram_server.engine.worker
import numpy as np
import pytest
from engram_server.engine.engine import Engine
from engram_server.engine.observer import EngineObserver
from engram_server.engine.tasks.snapshot import Snapshot
from engram_server.engine.types import EngineConfig
from engram_server.errors import (
    BatchFailed,
    ContextNotCached,
    DeadlineExceeded,
    Draining,
    EngineError,
    ImageTooLarge,
    Overloaded,
    TooManyTasks,
    UnknownTask,
    UnreadableImage,
)
from engram_server.model.kernels.linear import has_int8_linear
from engram_server.model.masked_pass import masked_pass
from engram_store import Publish, open_store

from tests.serving import (
    MetricListener,
    ReplaceablePass,
    make_bundle,
    photo,
    predict,
    reference_logits,
)

TOLERANCE = 1e-4


class Recorder(MetricListener):
    """Remembers batches and rejections."""

    def __init__(self):
        self.batches = []
        self.rejections = []
        self.depth = self.images = 0
        self.passes = ReplaceablePass()

    def batch_images(self, images):
        self.images = images

    def batch_rows(self, rows):
        self.batches.append((self.images, rows))

    def rejected(self, reason):
        self.rejections.append(reason)

    def queue_images(self, images):
        self.depth = images


class Gate:
    """Stands in the worker's way: holds passes until opened, counts them, fails on demand."""

    def __init__(self, passes):
        self.open = threading.Event()
        self.reached = threading.Event()
        self.passes = 0
        self.failure = None
        passes.run = self

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
    config = replace(EngineConfig(poll_seconds=60), **config)
    engine = Engine(backbone, store, config, observer, run_pass=observer.passes)
    engine.start()
    observer.batches.clear()
    try:
        yield engine, observer
    finally:
        engine.stop()


async def until(condition, seconds=20.0):
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.001)


def test_every_task_answers_for_every_image_as_it_would_alone(backbone, store, bundles):
    images = [photo(1), photo(2)]
    with running(backbone, store) as (engine, _):
        answer = asyncio.run(predict(engine, images))
    assert answer.generation == 4
    for image, found in zip(images, answer.images, strict=True):
        assert set(found.tasks) == {"base", *bundles}
        for name, bundle in bundles.items():
            expected = reference_logits(backbone, bundle, image)
            assert np.abs(found.tasks[name].logits - expected).max() < TOLERANCE
            assert found.tasks[name].served.version == 1


def test_requests_with_different_task_sets_share_one_pass(backbone, store, bundles, monkeypatch):
    with running(backbone, store) as (engine, observer):
        gate = Gate(observer.passes)

        async def scenario():
            first = asyncio.create_task(predict(engine, [photo(0)], ["base"]))
            await until(gate.reached.is_set)
            others = [
                asyncio.create_task(predict(engine, [photo(number)], [f"task{number}"]))
                for number in range(1, 4)
            ]
            await until(lambda: engine.queued_images == 3)
            gate.open.set()
            return await asyncio.gather(first, *others)

        answers = asyncio.run(scenario())
    assert [images for images, _ in observer.batches] == [1, 3]
    for number, answer in enumerate(answers[1:], 1):
        expected = reference_logits(backbone, bundles[f"task{number}"], photo(number))
        found = answer.images[0].tasks
        assert list(found) == [f"task{number}"]
        assert np.abs(found[f"task{number}"].logits - expected).max() < TOLERANCE


def test_one_image_in_several_requests_runs_through_the_backbone_once(backbone, store, monkeypatch):
    with running(backbone, store) as (engine, observer):
        gate = Gate(observer.passes)

        async def scenario():
            first = asyncio.create_task(predict(engine, [photo(0)], ["base"]))
            await until(gate.reached.is_set)
            same = [
                asyncio.create_task(predict(engine, [photo(7)], [f"task{number}"]))
                for number in range(4)
            ]
            await until(lambda: engine.queued_images == 4)
            gate.open.set()
            await asyncio.gather(first, *same)

        asyncio.run(scenario())
    assert observer.batches[1] == (4, backbone.geometry.tokens + 4)


def test_only_requests_with_attention_get_attention(backbone, store, monkeypatch):
    """Two ask about one image, one of them for attention maps; a third asks about another."""
    with running(backbone, store) as (engine, observer):
        gate = Gate(observer.passes)

        async def scenario():
            first = asyncio.create_task(predict(engine, [photo(0)], ["base"]))
            await until(gate.reached.is_set)
            others = [
                asyncio.create_task(predict(engine, [photo(7)], ["task0", "base"])),
                asyncio.create_task(predict(engine, [photo(7)], ["task0", "base"], attention=True)),
                asyncio.create_task(predict(engine, [photo(8)], ["task1"])),
            ]
            await until(lambda: engine.queued_images == 3)
            gate.open.set()
            return await asyncio.gather(first, *others)

        _, quiet, explained, other = asyncio.run(scenario())
        assert [images for images, _ in observer.batches] == [1, 3]
        warm = asyncio.run(predict(engine, [photo(7)], ["task0", "base"], attention=True))
    for answer in (quiet, other):
        assert all(task.attention is None for task in answer.images[0].tasks.values())
    for name, task in explained.images[0].tasks.items():
        assert task.attention.shape == backbone.geometry.grid
        assert 0 < task.attention.sum() < 1
        assert np.array_equal(task.logits, quiet.images[0].tasks[name].logits)
        # The cached context is in half precision.
        assert np.abs(task.attention - warm.images[0].tasks[name].attention).max() < 2e-3
    assert warm.images[0].cache == "hit"


def test_a_failing_batch_fails_its_own_waiters_and_the_next_succeeds(backbone, store, monkeypatch):
    with running(backbone, store) as (engine, observer):
        gate = Gate(observer.passes)
        gate.open.set()
        gate.failure = RuntimeError("the device caught fire")
        with pytest.raises(BatchFailed, match="RuntimeError"):
            asyncio.run(predict(engine, [photo(0)]))
        assert asyncio.run(predict(engine, [photo(0)])).images
        assert engine.predictions.pending_images == 0


def test_a_thousand_cancelled_requests_leave_no_work_behind(backbone, store, monkeypatch):
    with running(backbone, store, queue_images=2000) as (engine, observer):
        gate = Gate(observer.passes)

        async def scenario():
            busy = asyncio.create_task(predict(engine, [photo(0)], ["base"]))
            await until(gate.reached.is_set)
            image = photo(1)
            requests = [
                asyncio.create_task(predict(engine, [image], ["task1"])) for _ in range(1000)
            ]
            await until(lambda: engine.queued_images == 1000)
            for request in requests:
                request.cancel()
            await asyncio.gather(*requests, return_exceptions=True)
            assert engine.queued_images == 0
            assert observer.depth == 0
            assert engine.predictions.pending_images == 1
            gate.open.set()
            await busy

        asyncio.run(scenario())
        assert gate.passes == 1


def test_a_full_queue_rejects_at_once_while_accepted_requests_finish(backbone, store, monkeypatch):
    with running(backbone, store, queue_images=3) as (engine, observer):
        gate = Gate(observer.passes)

        async def scenario():
            accepted = [
                asyncio.create_task(predict(engine, [photo(number)])) for number in range(3)
            ]
            await until(gate.reached.is_set)
            with pytest.raises(Overloaded, match="limit is 3") as refusal:
                await predict(engine, [photo(9)])
            assert refusal.value.retry_after >= 1
            gate.open.set()
            assert len(await asyncio.gather(*accepted)) == 3

        asyncio.run(scenario())
    assert observer.rejections == ["queue_full"]


def test_an_expired_request_never_reaches_the_model(backbone, store, monkeypatch):
    with running(backbone, store) as (engine, observer):
        gate = Gate(observer.passes)

        async def scenario():
            busy = asyncio.create_task(predict(engine, [photo(0)], ["base"]))
            await until(gate.reached.is_set)
            with pytest.raises(DeadlineExceeded, match="deadline passed"):
                await predict(engine, [photo(1)], deadline=time.monotonic() + 0.05)
            assert engine.queued_images == 0
            gate.open.set()
            await busy

        asyncio.run(scenario())
        assert gate.passes == 1


def test_a_cached_image_runs_more_tasks_by_its_digest(backbone, store, bundles):
    image = photo(3)
    with running(backbone, store, cache_dtype=None) as (engine, observer):
        first = asyncio.run(predict(engine, [image], ["task0"])).images[0]
        second = asyncio.run(predict(engine, [first.digest], ["task1", "base"])).images[0]
        assert (first.cache, second.cache) == ("miss", "hit")
        expected = reference_logits(backbone, bundles["task1"], image)
        assert np.abs(second.tasks["task1"].logits - expected).max() < TOLERANCE
        assert observer.batches[-1] == (1, 1)  # no base rows


def test_half_precision_contexts_change_answers_little(backbone, store, bundles):
    """Measured here: 0.03 % of the largest logit; reference/configuration.md has real backbones."""
    image = photo(3)
    with running(backbone, store) as (engine, _):
        digest = asyncio.run(predict(engine, [image], ["base"])).images[0].digest
        warm = asyncio.run(predict(engine, [digest], list(bundles))).images[0]
    for name, bundle in bundles.items():
        expected = reference_logits(backbone, bundle, image)
        error = np.abs(warm.tasks[name].logits - expected).max() / np.abs(expected).max()
        assert error < 0.001


@pytest.mark.skipif(not has_int8_linear(), reason="int8 needs a processor with AVX2")
def test_a_backbone_in_int8_answers_near_the_plain_one_and_accepts_its_golden_answers(
    backbone, store, bundles
):
    image = photo(3)
    with running(backbone, store, int8=True) as (engine, _):
        assert engine.backbone.precision == "int8"
        cold = asyncio.run(predict(engine, [image], list(bundles))).images[0]
        warm = asyncio.run(predict(engine, [cold.digest], list(bundles))).images[0]
    for name, bundle in bundles.items():
        expected = reference_logits(backbone, bundle, image)
        for answer in (cold, warm):
            error = np.abs(answer.tasks[name].logits - expected).max() / np.abs(expected).max()
            assert error < 0.1


def test_an_unknown_digest_is_an_error(backbone, store):
    with running(backbone, store) as (engine, _), pytest.raises(ContextNotCached, match="sha256:0"):
        asyncio.run(predict(engine, [f"sha256:{'0' * 64}"]))


def test_the_cache_keeps_to_its_bytes_and_drops_the_oldest(backbone, store):
    with running(backbone, store) as (engine, _):
        asyncio.run(predict(engine, [photo(0)]))
        size = engine.cache.nbytes
    with running(backbone, store, cache_bytes=3 * size) as (engine, _):
        digests = [
            asyncio.run(predict(engine, [photo(number)])).images[0].digest for number in range(5)
        ]
        assert (len(engine.cache), engine.cache.nbytes) == (3, 3 * size)
        with pytest.raises(ContextNotCached):
            asyncio.run(predict(engine, [digests[0]]))
        assert asyncio.run(predict(engine, [digests[4]])).images[0].cache == "hit"


def test_a_cache_of_no_bytes_is_off(backbone, store):
    with running(backbone, store, cache_bytes=0) as (engine, _):
        assert asyncio.run(predict(engine, [photo(0)])).images[0].cache == "off"
        assert len(engine.cache) == 0


def test_a_bad_image_among_good_ones_fails_the_request_and_withdraws_the_others(backbone, store):
    with running(backbone, store, max_pixels=10_000) as (engine, _):
        with pytest.raises(UnreadableImage):
            asyncio.run(predict(engine, [photo(0), b"no image", photo(1)]))
        with pytest.raises(ImageTooLarge):
            asyncio.run(predict(engine, [photo(0, size=(200, 200))]))
        assert engine.predictions.pending_images == 0


def test_unreadable_images_do_not_delay_others(backbone, store, monkeypatch):
    monkeypatch.setattr(engram_server.engine.worker, "CPU_PATIENCE_SECONDS", 60.0)
    with running(backbone, store) as (engine, _):
        for _ in range(3):
            with pytest.raises(UnreadableImage):
                asyncio.run(predict(engine, [photo(0), b"no image", photo(1)]))
        # Whoever still waited for one of those would be far too late.
        assert asyncio.run(asyncio.wait_for(predict(engine, [photo(2)]), 20)).images


def test_features_are_what_the_head_read(backbone, store, bundles):
    with running(backbone, store) as (engine, _):
        answer = asyncio.run(predict(engine, [photo(0)], ["task2"], features=True)).images[0]
    found, bundle = answer.tasks["task2"], bundles["task2"]
    expected = bundle.tensors["head.weight"] @ found.features + bundle.tensors["head.bias"]
    assert np.abs(found.logits - expected).max() < TOLERANCE


def test_draining_rejects_new_requests_and_finishes_accepted_ones(backbone, store, monkeypatch):
    with running(backbone, store) as (engine, observer):
        gate = Gate(observer.passes)

        async def scenario():
            accepted = asyncio.create_task(predict(engine, [photo(0)]))
            await until(gate.reached.is_set)
            draining = asyncio.create_task(engine.predictions.drain(30))
            await until(lambda: not engine.status.ready)
            with pytest.raises(Draining):
                await predict(engine, [photo(1)])
            assert not draining.done()
            gate.open.set()
            assert (await accepted).images
            assert await draining

        asyncio.run(scenario())


def test_a_drain_that_takes_too_long_says_so(backbone, store, monkeypatch):
    with running(backbone, store) as (engine, observer):
        gate = Gate(observer.passes)

        async def scenario():
            accepted = asyncio.create_task(predict(engine, [photo(0)]))
            await until(gate.reached.is_set)
            assert not await engine.predictions.drain(0.01)
            gate.open.set()
            await accepted

        asyncio.run(scenario())


def test_two_workers_serve_one_queue(backbone, store, bundles, monkeypatch):
    with running(backbone, store, devices=("cpu", "cpu"), budget_rows=1) as (engine, observer):
        together = threading.Barrier(2)  # passes only if two passes are under way at once

        def meet(*args, **kwargs):
            together.wait(timeout=30)
            return masked_pass(*args, **kwargs)

        observer.passes.run = meet

        async def scenario():
            return await asyncio.gather(
                *(predict(engine, [photo(number)], ["task0"]) for number in range(8))
            )

        answers = asyncio.run(scenario())
    assert len(observer.batches) == 8
    for number, answer in enumerate(answers):
        expected = reference_logits(backbone, bundles["task0"], photo(number))
        found = answer.images[0].tasks["task0"].logits
        assert np.abs(found - expected).max() < TOLERANCE


def test_a_plan_is_answered_from_its_generation_whatever_is_published_meanwhile(
    backbone, store, bundles
):
    image = photo(0)
    with running(backbone, store) as (engine, _):

        async def scenario():
            plan = await engine.predictions.resolve(["task0", "task1", "task0@1"])
            for name in ("task0", "task1"):
                store.publish(name, make_bundle(backbone, 99))
            await asyncio.to_thread(engine.tasks.sync)
            assert engine.tasks.snapshot.generation == 6
            old = await engine.predictions.predict(plan, [image])
            return plan, old, await predict(engine, [image], ["task0", "task1"])

        plan, old, new = asyncio.run(scenario())
    assert (plan.generation, old.generation, new.generation) == (4, 4, 6)
    assert [task.version for task in plan.tasks] == [1, 1, 1]
    for reference, answer in old.images[0].tasks.items():
        assert answer.served.version == 1
        expected = reference_logits(backbone, bundles[reference.partition("@")[0]], image)
        assert np.abs(answer.logits - expected).max() < TOLERANCE
    assert {answer.served.version for answer in new.images[0].tasks.values()} == {2}


def test_a_plan_without_references_has_the_allowed_ready_tasks(backbone, store):
    with running(backbone, store) as (engine, _):
        plan = asyncio.run(engine.predictions.resolve(allowed=lambda names: names[-2:]))
        assert [task.reference for task in plan.tasks] == ["task2", "task3"]
        with pytest.raises(TooManyTasks, match=r"2 tasks.*limit is 1"):
            asyncio.run(engine.predictions.resolve(["task1", "task2"], max_tasks=1))


def test_a_plan_without_references_keeps_its_tasks_when_others_are_published(backbone, store):
    with running(backbone, store) as (engine, _):
        before = asyncio.run(engine.predictions.resolve(max_tasks=5))
        assert before.omitted == 0
        # Its name is the first in the alphabet.
        engine.tasks.publish(Publish("a-new-task", make_bundle(backbone, 99)))
        after = asyncio.run(engine.predictions.resolve(max_tasks=5))
        assert after.omitted == 1
        assert [task.reference for task in after.tasks] == [task.reference for task in before.tasks]


def test_a_request_keeps_the_generation_it_started_with(backbone, store, bundles, monkeypatch):
    with running(backbone, store) as (engine, observer):
        gate = Gate(observer.passes)

        async def scenario():
            early = asyncio.create_task(predict(engine, [photo(0)], ["task0", "task1"]))
            await until(gate.reached.is_set)
            store.publish("task0", make_bundle(backbone, 99))
            synced = asyncio.create_task(asyncio.to_thread(engine.tasks.sync))
            gate.open.set()  # the new version's answers are checked on the device too
            await synced
            return await early, await predict(engine, [photo(0)], ["task0", "task1"])

        early, late = asyncio.run(scenario())
    assert (early.generation, late.generation) == (4, 5)
    assert early.images[0].tasks["task0"].served.version == 1
    assert late.images[0].tasks["task0"].served.version == 2


def test_an_unknown_task_is_named(backbone, store):
    with running(backbone, store) as (engine, _), pytest.raises(UnknownTask, match="tusk1"):
        asyncio.run(predict(engine, [photo(0)], ["tusk1"]))


def test_a_worker_that_cannot_warm_up_stops_the_start(backbone, store, monkeypatch):
    gate = Gate(passes := ReplaceablePass())
    gate.open.set()
    gate.failure = RuntimeError("no such device")
    engine = Engine(backbone, store, EngineConfig(), EngineObserver(), run_pass=passes)
    with pytest.raises(EngineError, match="no such device"):
        engine.start()
    engine.stop()


def test_cached_states_are_moved_only_for_tasks_with_rows(backbone):
    """They are 100 times the size of what a head reads."""
    store = open_store("memory://")
    store.publish("head", make_bundle(backbone, 0, memory=-1))
    store.publish("rows", make_bundle(backbone, 1))
    with running(backbone, store) as (engine, observer):
        asyncio.run(predict(engine, [photo(0)], ["head", "rows"]))
        layers = []

        def look(backbone, pixels, warm, *args, **kwargs):
            layers.append(len(warm.states))
            return masked_pass(backbone, pixels, warm, *args, **kwargs)

        observer.passes.run = look
        for tasks in (["head"], ["rows"], ["head", "rows"]):
            asyncio.run(predict(engine, [photo(0)], tasks))
    assert layers == [0, backbone.layers, backbone.layers]


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
            engine.tasks.sync()
        rows = [rows for _, rows in observer.batches]
        assert sum(rows) >= 2 * backbone.geometry.tokens  # the two pictures, once
        assert max(rows[-2:]) <= 2  # later bundles cost their own rows
        assert len(engine.cache) == 0  # and take no room from people's images
