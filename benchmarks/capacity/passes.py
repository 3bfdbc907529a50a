"""Measure batches of many shapes, which the server's worker runs one after the other."""

import itertools
import queue
import time
from collections.abc import Callable, Sequence
from concurrent.futures import wait
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from engram_server.engine.context_cache import ContextCache, ContextKey
from engram_server.engine.observer import EngineObserver
from engram_server.engine.queue import Job, JobQueue, Selection, select_batch
from engram_server.engine.types import ServedTask
from engram_server.engine.worker import Worker
from engram_server.model import Backbone, TaskWeights
from engram_server.model.tasks import prepare

from benchmarks.capacity.costs import Load, PassCost, fit
from benchmarks.measure import medians

MEMORY, CLASSES = 5, 100  # of an ordinary task

_POOL = 256  # tasks that the batches draw from: hardly ever the same set twice
_CONTEXTS = 60
_CACHE_BYTES = 256 * 2**20
_LARGEST_SECONDS = 1.5  # of one batch, about: larger ones would use up the time


@dataclass(frozen=True, slots=True)
class Batch:
    """A batch to be measured: images, tasks for each, and whether all ask for the same ones."""

    cold: int
    warm: int
    tasks: int
    same: bool = False

    def load(self, base_rows: int) -> Load:
        images = self.cold + self.warm
        distinct = self.tasks if self.same else images * self.tasks
        return Load(self.cold * base_rows, images * self.tasks, self.warm, distinct)


BATCHES = (
    *(Batch(1, 0, tasks) for tasks in (2, 4, 16)),
    *(Batch(4, 0, 4, same) for same in (True, False)),
    *(Batch(8, 0, tasks, True) for tasks in (2, 16)),
    *(Batch(16, 0, 4, same) for same in (True, False)),
    Batch(32, 0, 4),
    Batch(60, 0, 4),
    *(Batch(0, 1, tasks) for tasks in (2, 4, 16)),
    *(Batch(0, 4, 4, same) for same in (True, False)),
    Batch(0, 16, 16, True),
    *(Batch(0, 32, 4, same) for same in (True, False)),
    Batch(0, 60, 4),
    *(Batch(1, 4, 4, same) for same in (True, False)),
    Batch(8, 8, 4),
    Batch(16, 32, 4),
)


class _BatchQueue(JobQueue):
    """A queue that returns exactly the batches put into it, without forming its own."""

    def __init__(self) -> None:
        super().__init__(lambda depth: None)
        self._batches: queue.SimpleQueue[list[Job] | None] = queue.SimpleQueue()

    def put_batch(self, jobs: list[Job] | None) -> None:
        self._batches.put(jobs)

    def take(
        self,
        *,
        budget_rows: int,
        base_rows: int,
        clock: Callable[[], float],
        patience: float = 0.0,
    ) -> Selection | None:
        jobs = self._batches.get()
        if jobs is None:
            return None
        return select_batch(jobs, budget_rows=budget_rows, base_rows=base_rows, now=clock())


class Bench:
    """A worker of its own, with tasks and contexts to ask it for; `close` it."""

    def __init__(
        self, backbone: Backbone, cache_dtype: torch.dtype | None, cache_device: str | None
    ) -> None:
        self._base_rows = backbone.geometry.tokens
        self._random = np.random.default_rng(0)
        self._keys = itertools.count()
        self._pixels = self._random.integers(
            0, 256, (_CONTEXTS, *backbone.image_size, 3), dtype=np.uint8
        )
        self._tasks = [resident(backbone, seed) for seed in range(_POOL)]
        self._queue = _BatchQueue()
        self._worker = Worker(
            "capacity", backbone, self._queue, EngineObserver(), budget_rows=2**62
        )
        self._worker.start()
        self._worker.warm.wait()
        if self._worker.failure is not None:
            raise self._worker.failure
        device = None if cache_device is None else torch.device(cache_device)
        self._cache = ContextCache(
            2**62, dtype=cache_dtype, device=device, observer=EngineObserver()
        )
        jobs = [
            Job(ContextKey(None, str(number)), (self._tasks[0],), pixels, None, cache=self._cache)
            for number, pixels in enumerate(self._pixels)
        ]
        started = time.perf_counter()
        for job in jobs:
            self._wait_for([job])
        alone = (time.perf_counter() - started) / len(jobs)
        self._contexts = [self._cache.get(job.key) for job in jobs]
        # What is measured is kept in a cache that is full.
        self._cache = ContextCache(
            _CACHE_BYTES, dtype=cache_dtype, device=device, observer=EngineObserver()
        )
        self._batches = [one for one in BATCHES if one.cold * alone <= _LARGEST_SECONDS]

    def measure(self, seconds: float) -> list[float]:
        """The median time of each batch, taking turns.

        From handing it over to its last answer, with all that the worker does: pixels and contexts
        to the device, the pass, logits to the host, contexts kept.
        """
        runs = {str(place): partial(self._run, one) for place, one in enumerate(self._batches)}
        return list(medians(runs, seconds=seconds, least=2).values())

    def fit(self, measured: Sequence[list[float]]) -> PassCost:
        """Fit one set of costs to all measurements."""
        loads = [one.load(self._base_rows) for one in self._batches]
        return fit(loads, np.mean(measured, axis=0).tolist())

    def close(self) -> None:
        self._queue.put_batch(None)
        self._worker.join()

    def _run(self, batch: Batch) -> None:
        order = self._random.permutation(_POOL)
        jobs = []
        for number in range(batch.cold + batch.warm):
            start = 0 if batch.same else number * batch.tasks
            tasks = tuple(self._tasks[one] for one in order[start : start + batch.tasks])
            warm = number >= batch.cold
            jobs.append(
                Job(
                    ContextKey(None, f"image {next(self._keys)}"),
                    tasks,
                    None if warm else self._pixels[number % _CONTEXTS],
                    self._contexts[number % _CONTEXTS] if warm else None,
                    cache=self._cache,
                )
            )
        self._wait_for(jobs)

    def _wait_for(self, jobs: list[Job]) -> None:
        self._queue.put_batch(jobs)
        for done in wait([job.future for job in jobs]).done:
            done.result()


def random_weights(
    backbone: Backbone, seed: int, *, memory: int = MEMORY, classes: int = CLASSES
) -> TaskWeights:
    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator) * 0.02

    return TaskWeights(
        head_weight=random(classes, backbone.width),
        class_token=random(backbone.width),
        memory=random(backbone.layers, memory, backbone.width),
    )


def resident(backbone: Backbone, seed: int) -> ServedTask:
    """A random task on the backbone's device."""
    with torch.no_grad():
        task = prepare(backbone, random_weights(backbone, seed))
    return ServedTask(f"task{seed}", 1, None, "single_label", (), {backbone.device: task})
