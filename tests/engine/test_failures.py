"""Failing devices and dying threads: only the culprit fails, and the engine reports it."""

import asyncio
import math
import threading
import time
from types import SimpleNamespace

import engram_server.engine.worker
import engram_server.engine.workers
import numpy as np
import pytest
import torch
from engram_server.engine.tasks.follower import StoreFollower
from engram_server.errors import BatchFailed, DeadlineExceeded, DeviceFailed
from engram_server.model.masked_pass import masked_pass
from engram_store import open_store

from tests.engine.test_engine import TOLERANCE, running, until
from tests.serving import make_bundle, photo, predict, reference_logits

MARK = 0.123  # every pixel of an image that breaks the device


class Device:
    """Runs passes, fails on request, and can be held until a batch is complete."""

    def __init__(self, passes, monkeypatch):
        self.fails = lambda pixels: None  # gives what to raise, if anything
        self.open = threading.Event()
        self.open.set()
        self.reached = threading.Event()
        self.sizes = []
        passes.run = self
        monkeypatch.setattr(engram_server.engine.workers, "PAUSES", (0.0, 0.01, 0.01))

    def __call__(self, backbone, pixels, *args, **kwargs):
        self.sizes.append(0 if pixels is None else len(pixels))
        self.reached.set()
        assert self.open.wait(timeout=60)
        failure = self.fails(pixels)
        if failure is not None:
            raise failure
        return masked_pass(backbone, pixels, *args, **kwargs)

    async def gather(self, engine, images, **options):
        """All images in one batch; an answer or an exception for each."""
        self.open.clear()
        self.reached.clear()
        first = asyncio.create_task(predict(engine, [photo(999)], ["task0"]))
        await until(self.reached.is_set)
        rest = [asyncio.create_task(predict(engine, [image], **options)) for image in images]
        await until(lambda: engine.queued_images == len(images))
        self.sizes.clear()
        self.open.set()
        outcomes = await asyncio.gather(*rest, return_exceptions=True)
        await asyncio.gather(first, return_exceptions=True)
        return outcomes


def breaks_on_mark(pixels):
    if pixels is not None and (pixels == MARK).flatten(1).all(dim=1).any():
        return RuntimeError("an image broke the device")
    return None


@pytest.fixture
def backbone(backbone_of):
    return backbone_of("vit")


@pytest.fixture
def bundles(backbone):
    return {f"task{number}": make_bundle(backbone, number) for number in range(2)}


@pytest.fixture
def store(bundles):
    opened = open_store("memory://")
    for name, bundle in bundles.items():
        opened.publish(name, bundle)
    return opened


@pytest.fixture
def culprit(backbone):
    return np.full((3, *backbone.image_size), MARK, np.float32)


# A batch that fails


@pytest.mark.parametrize("places", [[0], [8], [15], [3, 4], [0, 7, 15], range(0, 16, 2)])
def test_only_the_culprit_of_a_batch_fails(backbone, store, bundles, culprit, monkeypatch, places):
    images = [culprit if number in places else photo(number) for number in range(16)]
    with running(backbone, store, cache_bytes=0) as (engine, observer):
        device = Device(observer.passes, monkeypatch)
        device.fails = breaks_on_mark
        outcomes = asyncio.run(device.gather(engine, images, tasks=["task1"]))
        assert engine.status.ready
    for number, (image, outcome) in enumerate(zip(images, outcomes, strict=True)):
        if number in places:
            assert isinstance(outcome, BatchFailed)
            assert "RuntimeError" in str(outcome)
        else:
            expected = reference_logits(backbone, bundles["task1"], image)
            found = outcome.images[0].tasks["task1"].logits
            assert np.abs(found - expected).max() < TOLERANCE


def test_a_culprit_costs_the_others_a_bounded_number_of_passes(
    backbone, store, culprit, monkeypatch
):
    images = [*map(photo, range(15)), culprit]
    with running(backbone, store, cache_bytes=0) as (engine, observer):
        device = Device(observer.passes, monkeypatch)
        device.fails = breaks_on_mark
        asyncio.run(device.gather(engine, images, tasks=["task1"]))
    halvings = math.ceil(math.log2(len(images)))
    assert len(device.sizes) == 1 + 2 * halvings
    assert sum(device.sizes) <= 3 * len(images)


def test_one_image_in_many_requests_fails_for_those_it_breaks(
    backbone, store, culprit, monkeypatch
):
    with running(backbone, store, cache_bytes=0) as (engine, observer):
        device = Device(observer.passes, monkeypatch)
        device.fails = breaks_on_mark
        outcomes = asyncio.run(device.gather(engine, [culprit] * 4 + [photo(1)], tasks=["task1"]))
    assert [type(each) for each in outcomes[:4]] == [BatchFailed] * 4
    assert outcomes[4].images


def test_a_job_that_expires_while_others_are_tried_again_is_not_run(
    backbone, store, culprit, monkeypatch
):
    with running(backbone, store, cache_bytes=0) as (engine, observer):
        device = Device(observer.passes, monkeypatch)
        clock = SimpleNamespace(ahead=0.0)

        def fails(pixels):
            if len(pixels) == 2:
                clock.ahead = 60.0  # the batch takes that long
            return breaks_on_mark(pixels)

        device.fails = fails
        clock.monotonic = lambda: time.monotonic() + clock.ahead
        monkeypatch.setattr(engram_server.engine.worker, "time", clock)
        deadline = time.monotonic() + 50
        outcomes = asyncio.run(
            device.gather(engine, [culprit, photo(1)], tasks=["task1"], deadline=deadline)
        )
    assert all(isinstance(each, DeadlineExceeded) for each in outcomes)
    assert device.sizes == [2]


# Too little memory


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory"),
        MemoryError(),
        RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 1 byte"),
    ],
)
def test_a_batch_too_large_for_the_memory_is_halved_and_the_next_are_smaller(
    backbone, store, bundles, monkeypatch, error
):
    images = [photo(number) for number in range(16)]
    with running(backbone, store, cache_bytes=0) as (engine, observer):
        device = Device(observer.passes, monkeypatch)
        device.fails = lambda pixels: error if len(pixels) > 4 else None
        outcomes = asyncio.run(device.gather(engine, images, tasks=["task1"]))
        for image, outcome in zip(images, outcomes, strict=True):
            expected = reference_logits(backbone, bundles["task1"], image)
            found = outcome.images[0].tasks["task1"].logits
            assert np.abs(found - expected).max() < TOLERANCE
        assert device.sizes == [16, 8, 4, 4, 8, 4, 4]
        asyncio.run(device.gather(engine, images, tasks=["task1"]))
        assert max(device.sizes) <= 4, "the next batches fit"
        assert engine.status.ready


def test_a_budget_is_as_large_as_before_after_enough_batches():
    budget = engram_server.engine.worker._Budget(4096)
    budget.note_lack_of_memory(1000)
    budget.note_lack_of_memory(2000)
    assert budget.rows == 250
    for _ in range(1000):
        budget.note_answered()
    assert budget.rows == 4096


def test_an_image_that_fits_no_memory_alone_fails_alone(backbone, store, culprit, monkeypatch):
    def fails(pixels):
        return None if breaks_on_mark(pixels) is None else torch.OutOfMemoryError("out of memory")

    with running(backbone, store, cache_bytes=0) as (engine, observer):
        device = Device(observer.passes, monkeypatch)
        device.fails = fails
        outcomes = asyncio.run(device.gather(engine, [photo(1), culprit], tasks=["task1"]))
    assert outcomes[0].images
    assert "OutOfMemoryError" in str(outcomes[1])


# A device that fails always


def fail_until_unready(engine, until):
    for number in range(engram_server.engine.worker.FAILED_BATCHES):
        with pytest.raises(BatchFailed):
            asyncio.run(predict(engine, [photo(number)], ["task0"]))
    until(lambda: not engine.status.ready)


def test_a_device_that_always_fails_is_reported_and_finally_given_up(
    backbone, store, monkeypatch, until
):
    with running(backbone, store) as (engine, observer):
        device = Device(observer.passes, monkeypatch)
        device.fails = lambda pixels: RuntimeError("the device caught fire")
        fail_until_unready(engine, until)
        (reason,) = engine.status.reasons
        assert "engram-worker-0" in reason
        assert "RuntimeError" in reason
        until(lambda: engine.broken)
        assert "cannot be restarted" in engine.broken[0]
        with pytest.raises(DeviceFailed, match="cannot be restarted"):
            asyncio.run(predict(engine, [photo(1)]))
        assert "device" in observer.rejections


def test_requests_are_rejected_while_a_worker_is_restarted_and_answered_when_it_is_back(
    backbone, store, bundles, monkeypatch, until
):
    with running(backbone, store) as (engine, observer):
        device = Device(observer.passes, monkeypatch)
        monkeypatch.setattr(engram_server.engine.workers, "PAUSES", (0.01,) * 1000)
        device.fails = lambda pixels: RuntimeError("a hiccup")
        fail_until_unready(engine, until)
        with pytest.raises(DeviceFailed, match="is restarted"):
            asyncio.run(predict(engine, [photo(1)], ["task1"]))
        device.fails = lambda pixels: None
        until(lambda: engine.status.ready)
        answer = asyncio.run(predict(engine, [photo(1)], ["task1"]))
        expected = reference_logits(backbone, bundles["task1"], photo(1))
        assert np.abs(answer.images[0].tasks["task1"].logits - expected).max() < TOLERANCE


def test_attempts_are_counted_anew_after_an_answer(backbone, store, monkeypatch, until):
    with running(backbone, store) as (engine, observer):
        device = Device(observer.passes, monkeypatch)
        monkeypatch.setattr(engram_server.engine.workers, "PAUSES", (0.0,))
        for number in range(3):
            deaths = [SystemExit()]
            device.fails = lambda pixels, deaths=deaths: deaths.pop() if deaths else None
            with pytest.raises(DeviceFailed):
                asyncio.run(predict(engine, [photo(number)], ["task0"]))
            until(lambda: engine.status.ready)
            assert asyncio.run(predict(engine, [photo(number)], ["task0"])).images
        assert not engine.broken


def test_a_single_answer_in_between_keeps_the_worker(backbone, store, culprit, monkeypatch):
    with running(backbone, store, cache_bytes=0) as (engine, observer):
        device = Device(observer.passes, monkeypatch)
        device.fails = breaks_on_mark
        for number in range(6):
            with pytest.raises(BatchFailed):
                asyncio.run(predict(engine, [culprit], ["task0"]))
            asyncio.run(predict(engine, [photo(number)], ["task0"]))
        assert engine.status.ready


def test_a_device_that_fails_leaves_the_work_to_the_other(backbone, store, monkeypatch, until):
    with running(backbone, store, devices=("cpu", "cpu"), cache_bytes=0) as (engine, observer):
        device = Device(observer.passes, monkeypatch)

        def fails(pixels):
            mine = threading.current_thread().name == "engram-worker-0"
            return RuntimeError("this one is broken") if mine else None

        device.fails = fails
        asyncio.run(_ask_until_broken(engine))
        assert "engram-worker-0" in engine.broken[0]
        assert asyncio.run(predict(engine, [photo(1)], ["task0"])).images


async def _ask_until_broken(engine):
    async with asyncio.timeout(60):
        number = 0
        while not engine.broken:
            number += 1
            images = [predict(engine, [photo(number + each)], ["task0"]) for each in range(4)]
            await asyncio.gather(*images, return_exceptions=True)


# A thread that dies


def test_a_dead_thread_fails_its_jobs_and_is_replaced(backbone, store, monkeypatch, until):
    with running(backbone, store, cache_bytes=0) as (engine, observer):
        device = Device(observer.passes, monkeypatch)
        deaths = [SystemExit("the thread is gone")]
        device.fails = lambda pixels: deaths.pop() if deaths else None
        device.open.clear()

        async def scenario():
            first = asyncio.create_task(predict(engine, [photo(0)], ["task0"]))
            async with asyncio.timeout(60):
                while not device.reached.is_set():
                    await asyncio.sleep(0.001)
                waiting = asyncio.create_task(predict(engine, [photo(1)], ["task0"]))
                while engine.queued_images < 1:
                    await asyncio.sleep(0.001)
                device.open.set()
                with pytest.raises(DeviceFailed, match="SystemExit"):
                    await first
                return await waiting

        assert asyncio.run(scenario()).images, "the new thread serves the waiting request"
        until(lambda: engine.status.ready)
        assert not engine.broken


def test_requests_fail_if_a_worker_cannot_be_restarted(backbone, store, monkeypatch, until):
    with running(backbone, store, cache_bytes=0) as (engine, observer):
        device = Device(observer.passes, monkeypatch)
        device.open.clear()
        device.fails = lambda pixels: SystemExit("gone, and gone again")

        async def scenario():
            async with asyncio.timeout(60):
                first = asyncio.create_task(predict(engine, [photo(0)], ["task0"]))
                while not device.reached.is_set():
                    await asyncio.sleep(0.001)
                waiting = asyncio.create_task(predict(engine, [photo(1)], ["task0"]))
                while engine.queued_images < 1:
                    await asyncio.sleep(0.001)
                device.open.set()
                return await asyncio.gather(first, waiting, return_exceptions=True)

        outcomes = asyncio.run(scenario())
        assert [type(each) for each in outcomes] == [DeviceFailed] * 2
        assert engine.broken
        until(lambda: engine.queued_images == 0)
        assert engine.predictions.pending_images == 0


def test_a_thread_that_cannot_be_started_counts_as_a_failure(backbone, store, monkeypatch, until):
    with running(backbone, store) as (engine, observer):
        device = Device(observer.passes, monkeypatch)
        deaths = [SystemExit()]
        device.fails = lambda pixels: deaths.pop() if deaths else None

        def refuse(self):
            raise RuntimeError("can't start new thread")

        monkeypatch.setattr(engram_server.engine.worker.Worker, "start", refuse)
        with pytest.raises(DeviceFailed):
            asyncio.run(predict(engine, [photo(0)], ["task0"]))
        until(lambda: engine.broken)


def test_a_dead_follower_is_reported(backbone, store, monkeypatch, until):
    monkeypatch.setattr(StoreFollower, "_follow", lambda self: None)
    with running(backbone, store) as (engine, _):
        until(lambda: engine.broken)
        assert "follows the task store has died" in engine.broken[0]
        assert not engine.status.ready


def test_stopping_is_not_a_failure(backbone, store):
    with running(backbone, store) as (engine, _):
        pass
    assert not engine.broken
