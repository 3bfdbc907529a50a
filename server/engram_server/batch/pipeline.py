"""Read ahead, run batches on all devices, and write parts in order.

Batches are fixed ranges of the source, so a run that is continued computes the same numbers. Only a
few batches are in memory: the number of images read ahead is bounded.
"""

from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from dataclasses import dataclass
from queue import SimpleQueue
from typing import NamedTuple

from engram_server.batch.images import ImageBatch, Images, ahead_map
from engram_server.batch.passing import DevicePass
from engram_server.batch.rows import TaskColumns, make_row
from engram_server.batch.summary import Summary
from engram_server.engine.types import TaskAnswer
from engram_server.parts.columns import Row
from engram_server.parts.keeping import KeptTensors, KeptWriter
from engram_server.parts.output import Output

OnProgress = Callable[[int], None]  # with the number of images of each batch

_BATCHES_AHEAD = 3  # read or being read, for each device


class Progress:
    """Receives the progress of a run. Ignores everything; override what you need."""

    def begin(self, images: int, finished: int) -> OnProgress:
        """The run has this many images, and an earlier run finished some of them."""
        return lambda count: None


class AnsweredBatch(NamedTuple):
    rows: list[Row]  # of all images
    places: list[int]  # of those without an error
    kept: KeptTensors | None  # of those without an error


# Yields the answers of batches, which are ranges of the source, in order.
Answerer = Callable[[Sequence[range]], Generator[AnsweredBatch]]


class Predictor:
    """Batches of images to rows, on any free device. Call it from one thread per device."""

    def __init__(self, passes: Sequence[DevicePass], tasks: Sequence[TaskColumns]) -> None:
        self._tasks = tasks
        self._free: SimpleQueue[DevicePass] = SimpleQueue()
        for one in passes:
            self._free.put(one)

    def __call__(self, batch: ImageBatch) -> AnsweredBatch:
        answers: Iterator[list[TaskAnswer]] = iter(())
        kept = None
        if len(batch.inputs):
            run = self._free.get()
            try:
                found, kept = run([task.task for task in self._tasks], batch.inputs)
            finally:
                self._free.put(run)
            answers = iter(found)
        rows = [
            make_row(image, self._tasks, next(answers) if image.error is None else None)
            for image in batch.images
        ]
        return AnsweredBatch(rows, batch.places, kept)


@dataclass(frozen=True, slots=True)
class LocalAnswerer:
    """Answers on the devices of this machine."""

    images: Images
    predictor: Predictor
    devices: int
    threads: int  # that read images

    def __call__(self, batches: Sequence[range]) -> Generator[AnsweredBatch]:
        with ExitStack() as pools:
            reading, passing = (ThreadPoolExecutor(count) for count in (self.threads, self.devices))
            for pool in (reading, passing):
                pools.callback(pool.shutdown, cancel_futures=True)
            ahead = _BATCHES_AHEAD * self.devices + 1
            loaded = self.images.load_ahead(batches, reading, ahead)
            yield from ahead_map(passing, self.predictor, loaded, self.devices)


@dataclass(frozen=True, slots=True)
class Destination:
    """Where a run writes: rows, kept tensors or both."""

    output: Output | None
    keeper: KeptWriter | None

    def finished(self) -> set[int]:
        """The parts that are complete everywhere."""
        parts = (one.finished() for one in (self.output, self.keeper) if one is not None)
        return set.intersection(*map(set, parts))

    def read(self, number: int, columns: Sequence[str]) -> list[Row]:
        source = self.output or self.keeper
        assert source is not None
        return source.read(number, columns)

    def write(self, number: int, images: int, batches: Iterator[AnsweredBatch]) -> list[Row]:
        """Write the next part, and return its rows."""
        rows: list[Row] = []
        if self.keeper is not None:
            self.keeper.begin(number, images)
        while len(rows) < images:
            batch = next(batches)
            if self.keeper is not None and batch.kept is not None:
                self.keeper.add([len(rows) + place for place in batch.places], batch.kept)
            rows += batch.rows
        if self.keeper is not None:
            self.keeper.finish(number, rows)
        if self.output is not None:
            self.output.write(number, rows)
        return rows


def run_parts(
    images: int,
    answerer: Answerer,
    destination: Destination,
    summary: Summary,
    *,
    part_images: int,
    batch_images: int,
    progress: Progress,
) -> None:
    """Write every part that is missing; `summary` counts all rows."""
    finished = destination.finished()
    parts = list(enumerate(_split(range(images), part_images)))
    missing = [indices for number, indices in parts if number not in finished]
    batches = [batch for indices in missing for batch in _split(indices, batch_images)]
    on_progress = progress.begin(images, images - sum(map(len, batches)))
    with closing(answerer(batches)) as answers:
        answered = _reported(answers, on_progress)
        for number, indices in parts:
            if number in finished:
                summary.add(destination.read(number, summary.columns))
            else:
                summary.add(destination.write(number, len(indices), answered))


def _split(indices: range, size: int) -> list[range]:
    return [indices[start : start + size] for start in range(0, len(indices), size)]


def _reported(batches: Iterator[AnsweredBatch], on_progress: OnProgress) -> Iterator[AnsweredBatch]:
    for batch in batches:
        on_progress(len(batch.rows))
        yield batch
