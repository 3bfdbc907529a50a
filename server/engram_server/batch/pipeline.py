"""Decode ahead, run batches on all devices, and write parts in order.

Batches are fixed ranges of the source, so a run that is continued computes the same numbers. Only a
few batches are in memory: the number of images decoded ahead is bounded.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextlib import ExitStack
from itertools import islice
from queue import SimpleQueue
from typing import TypeVar

from engram_server.batch.decoding import DecodedImage, Decoder
from engram_server.batch.output import Output
from engram_server.batch.passing import DevicePass
from engram_server.batch.rows import Row, TaskColumns, make_row
from engram_server.batch.sources import Source
from engram_server.batch.summary import Summary
from engram_server.engine.types import TaskAnswer

T = TypeVar("T")
U = TypeVar("U")
OnProgress = Callable[[int], None]  # with the number of images of each batch

_BATCHES_AHEAD = 3  # decoded or being decoded, for each device


class Progress:
    """Receives the progress of a run. Ignores everything; override what you need."""

    def begin(self, images: int, finished: int) -> OnProgress:
        """The run has this many images, and an earlier run finished some of them."""
        return lambda count: None


def ahead_map(
    pool: Executor, function: Callable[[T], U], items: Iterable[T], ahead: int
) -> Iterator[U]:
    """Yield the results in order, with at most `ahead` of them computed in advance."""
    waiting: deque[Future[U]] = deque()
    for item in items:
        waiting.append(pool.submit(function, item))
        if len(waiting) > ahead:
            yield waiting.popleft().result()
    while waiting:
        yield waiting.popleft().result()


class Predictor:
    """Decoded images to rows, on any free device. Call it from one thread per device."""

    def __init__(self, passes: Sequence[DevicePass], tasks: Sequence[TaskColumns]) -> None:
        self._tasks = tasks
        self._free: SimpleQueue[DevicePass] = SimpleQueue()
        for one in passes:
            self._free.put(one)

    def __call__(self, images: Sequence[DecodedImage]) -> list[Row]:
        pixels = [image.pixels for image in images if image.pixels is not None]
        answers: Iterator[list[TaskAnswer]] = iter(())
        if pixels:
            run = self._free.get()
            try:
                answers = iter(run([task.task for task in self._tasks], pixels))
            finally:
                self._free.put(run)
        return [
            make_row(image, self._tasks, None if image.pixels is None else next(answers))
            for image in images
        ]


def run_parts(
    source: Source,
    decoder: Decoder,
    predictor: Predictor,
    output: Output,
    summary: Summary,
    *,
    part_images: int,
    batch_images: int,
    devices: int,
    threads: int,
    progress: Progress,
) -> None:
    """Write every part that is missing; `summary` counts all rows."""
    finished = set(output.finished())
    parts = [
        (number, range(start, min(start + part_images, len(source))))
        for number, start in enumerate(range(0, len(source), part_images))
    ]
    missing = [(number, indices) for number, indices in parts if number not in finished]
    batches = [batch for _, indices in missing for batch in _split(indices, batch_images)]
    with ExitStack() as pools:
        decoding, passing = (ThreadPoolExecutor(count) for count in (threads, devices))
        for pool in (decoding, passing):
            pools.callback(pool.shutdown, cancel_futures=True)
        decoded = ahead_map(
            decoding,
            lambda index: decoder(source, index),
            (index for batch in batches for index in batch),
            (_BATCHES_AHEAD * devices + 1) * batch_images,
        )
        groups = (list(islice(decoded, len(batch))) for batch in batches)
        begun = len(source) - sum(map(len, batches))
        rows = _flat(
            ahead_map(passing, predictor, groups, devices), progress.begin(len(source), begun)
        )
        for number, indices in parts:
            if number in finished:
                summary.add(output.read(number, summary.columns))
                continue
            part = list(islice(rows, len(indices)))
            output.write(number, part)
            summary.add(part)


def _split(indices: range, size: int) -> list[range]:
    return [indices[start : start + size] for start in range(0, len(indices), size)]


def _flat(batches: Iterable[list[Row]], on_progress: OnProgress) -> Iterator[Row]:
    for batch in batches:
        on_progress(len(batch))
        yield from batch
