"""The path of a GPU on a CPU: base passes apart and padded, pixels sent ahead, answers the same."""

import asyncio
import threading

import engram_server.engine.worker
import numpy as np
import pytest
import torch
from engram_server.engine.context_cache import ContextKey
from engram_server.engine.engine import Engine
from engram_server.engine.observer import EngineObserver
from engram_server.engine.queue import Job, JobQueue
from engram_server.engine.staging import Staging, staging_for
from engram_server.engine.types import EngineConfig
from engram_server.engine.worker import Worker, in_one_copy
from engram_server.model.masked_pass import masked_pass
from engram_store import open_store

from tests.serving import ReplaceablePass, make_bundle, photo, predict, reference_logits

CPU = torch.device("cpu")
TASKS = ("task0", "task1")


class Sent(Staging):
    """Remembers which pixels were sent, and in which batches they were."""

    def __init__(self):
        super().__init__(CPU)
        self.sent = []
        self.batches = []

    def send(self, pixels):
        self.sent.append(pixels)
        return super().send(pixels)

    def stack(self, images):
        self.batches.append(len(images))
        return super().stack(images)


@pytest.fixture
def backbone(backbone_of):
    return backbone_of("vit")


@pytest.fixture
def bundles(backbone):
    return {name: make_bundle(backbone, number) for number, name in enumerate(TASKS)}


@pytest.fixture
def staging(monkeypatch):
    sent = Sent()
    monkeypatch.setattr(engram_server.engine.worker, "staging_for", lambda device: sent)
    return sent


@pytest.fixture
def sizes(monkeypatch):
    """Sizes of base passes that were replayed."""
    replayed = []

    def capture(run, example):
        def replay(pixels):
            replayed.append(len(pixels))
            return run(pixels)

        return replay

    monkeypatch.setattr(engram_server.engine.worker, "capture_on", lambda device: capture)
    return replayed


@pytest.fixture
def passes():
    return ReplaceablePass()


@pytest.fixture
def engine(backbone, bundles, staging, sizes, passes):
    store = open_store("memory://")
    for name, bundle in bundles.items():
        store.publish(name, bundle)
    # In float32, so that a warm image has the answer of a cold one.
    config = EngineConfig(poll_seconds=60, cache_dtype=None)
    engine = Engine(backbone, store, config, EngineObserver(), run_pass=passes)
    engine.start()
    staging.sent.clear()
    staging.batches.clear()
    sizes.clear()
    yield engine
    engine.stop()


def ask(engine, *images, explain=False):
    return predict(engine, list(images), [*TASKS, "base"], attention=explain)


async def ask_behind(engine, computing, photos):
    """Both requests: for the first photo, whose batch is held, and for two that wait behind it."""
    first = asyncio.create_task(ask(engine, photos[0]))
    await asyncio.to_thread(computing.wait, 60)
    others = asyncio.create_task(ask(engine, *photos[1:]))
    async with asyncio.timeout(20):
        while engine.queued_images < 2:
            await asyncio.sleep(0.001)
    return first, others


def check(answer, backbone, bundles, *photos):
    for image, content in zip(answer.images, photos, strict=True):
        for name, bundle in bundles.items():
            expected = reference_logits(backbone, bundle, content)
            assert np.abs(image.tasks[name].logits - expected).max() < 1e-4


def test_cold_warm_and_mixed_batches_answer_as_the_plain_pass(
    engine, backbone, bundles, sizes, monkeypatch
):
    photos = [photo(number) for number in range(3)]
    cold = asyncio.run(ask(engine, photos[0], explain=True))
    assert sizes == [1]
    assert cold.images[0].cache == "miss"
    check(cold, backbone, bundles, photos[0])
    mixed = asyncio.run(ask(engine, *photos, explain=True))
    assert sum(sizes) >= 3  # the first image was warm
    assert [image.cache for image in mixed.images] == ["hit", "miss", "miss"]
    check(mixed, backbone, bundles, *photos)
    for name in (*TASKS, "base"):
        first, again = (answer.images[0].tasks[name].attention for answer in (cold, mixed))
        assert np.abs(first - again).max() < 1e-5


def test_pixels_that_wait_are_sent_while_a_batch_is_computed_and_not_again(
    engine, backbone, bundles, staging, passes
):
    computing, go_on = threading.Event(), threading.Event()

    def held(*args, **kwargs):
        computing.set()
        assert go_on.wait(timeout=60)
        return masked_pass(*args, **kwargs)

    passes.run = held
    photos = [photo(number) for number in range(3)]

    async def run():
        first, others = await ask_behind(engine, computing, photos)
        assert len(staging.sent) == 1  # nothing is sent before there is time for it
        go_on.set()
        return await first, await others

    first, others = asyncio.run(run())
    assert staging.batches == [1, 2]
    assert len(staging.sent) == 3
    check(first, backbone, bundles, photos[0])
    check(others, backbone, bundles, *photos[1:])


def test_too_little_memory_gives_up_the_graphs_and_answers_on(
    engine, backbone, bundles, sizes, passes
):
    computing, go_on = threading.Event(), threading.Event()
    failures = [torch.OutOfMemoryError("CUDA out of memory")]

    def short(backbone, pixels, warm, tasks, *args, **kwargs):
        computing.set()
        assert go_on.wait(timeout=60)
        if len(tasks) == 2 and failures:
            raise failures.pop()
        return masked_pass(backbone, pixels, warm, tasks, *args, **kwargs)

    passes.run = short
    photos = [photo(number) for number in range(3)]

    async def run():
        first, both = await ask_behind(engine, computing, photos)
        go_on.set()
        await first
        return await both

    check(asyncio.run(run()), backbone, bundles, *photos[1:])
    assert not failures
    assert len(sizes) == 2  # the first, and the batch that failed; its halves ran without


def test_a_pass_that_cannot_be_captured_is_served_plainly(
    backbone, bundles, sizes, monkeypatch, caplog
):
    def capture(run, example):
        raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(engram_server.engine.worker, "capture_on", lambda device: capture)
    store = open_store("memory://")
    store.publish("task0", bundles["task0"])
    engine = Engine(backbone, store, EngineConfig(poll_seconds=60), EngineObserver())
    engine.start()
    try:
        answer = asyncio.run(predict(engine, [photo(0)], ["task0"]))
    finally:
        engine.stop()
    check(answer, backbone, {"task0": bundles["task0"]}, photo(0))
    assert "runs without CUDA graphs: operation not permitted" in caplog.text


def test_pixels_sent_by_another_worker_are_sent_again(backbone, staging, sizes):
    """Only the sender knows when its copies arrive."""
    queue, other = JobQueue(lambda depth: None), Sent()
    worker = Worker("worker", backbone, queue, EngineObserver(), budget_rows=4096)
    pixels = np.ones((*backbone.image_size, 3), np.uint8)
    images = [
        engram_server.engine.worker._Image(
            ContextKey(None, "a"), pixels, None, staged=sender.send(pixels)
        )
        for sender in (staging, other)
    ]
    staging.sent.clear()
    assert worker._moved(images).shape == (2, *pixels.shape)
    assert len(staging.sent) == 1


@pytest.mark.parametrize("kind", [np.uint8, np.float32])
def test_sent_pixels_are_unchanged_also_if_they_are_read_only(kind):
    pixels = np.arange(24).reshape(2, 4, 3).astype(kind)
    pixels.flags.writeable = False
    staging = Staging(CPU)
    batch = staging.stack([staging.send(pixels), staging.send(pixels + 1)])
    assert np.array_equal(batch.numpy(), np.stack([pixels, pixels + 1]))
    assert batch.numpy().dtype == kind


def test_on_a_cpu_nothing_is_sent():
    assert staging_for(CPU) is None


def test_inspecting_the_next_batch_does_not_remove_it():
    queue = JobQueue(lambda depth: None)
    jobs = [Job(ContextKey(None, str(number)), (), None, None) for number in range(3)]
    for job in jobs:
        queue.put(job)
    clock = float
    assert queue.next_batch(budget_rows=20, base_rows=10, clock=clock) == jobs[:2]
    selection = queue.take(budget_rows=20, base_rows=10, clock=clock)
    assert selection is not None
    assert selection.batch == jobs[:2]


def test_answers_of_all_tasks_come_to_the_host_in_one_copy():
    tensors = [torch.randn(2, 3), torch.randn(0, 4), torch.randn(1, 2, 2)]
    for host, tensor in zip(in_one_copy(tensors), tensors, strict=True):
        assert np.array_equal(host, tensor.numpy())
