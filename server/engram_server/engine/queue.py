"""The job queue, and the selection of the next batch.

`select_batch` is a pure function of the waiting jobs, a budget and the time, so its tests need
neither threads nor sleeping. The cost of a batch is its token rows: the base rows of every image
without a cached context, and the rows of its tasks. A free worker takes waiting jobs in order and
never idles to fill a batch. Only on a CPU does it wait briefly for images that are being decoded,
because decoding uses the same cores as the pass.

The order is first come, first served for one caller, and in turns between callers: the n-th waiting
image of each comes before the next of any. While there are several callers, batches are also
shorter, because an image that arrives during a batch waits for its end.
"""

import itertools
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from typing import Final

from engram_server.engine.context_cache import ContextCache, ContextKey
from engram_server.engine.staging import Staged
from engram_server.engine.types import CacheState, Canary, Pixels, ServedTask, TaskAnswer, Timeline
from engram_server.errors import DeviceFailed
from engram_server.model.context import Context

# How long a caller counts as present after its last image.
PRESENT_SECONDS: Final = 5.0


@dataclass(slots=True)
class JobResult:
    answers: dict[ServedTask, TaskAnswer]
    cache: CacheState


@dataclass(eq=False, slots=True)
class Job:
    """One image and its tasks. Jobs with the same `key` have the same image and owner."""

    key: ContextKey
    tasks: tuple[ServedTask, ...]
    pixels: Pixels | None = None  # None with a context
    context: Context | None = None
    caller: str = ""
    golden: bool = False  # of a bundle that is being checked
    canaries: Mapping[ServedTask, Canary] = field(default_factory=dict)  # of tasks
    shadows: tuple[ServedTask, ...] = ()  # versions that are compared with those in `tasks`
    deadline: float | None = None
    features: bool = False
    attention: bool = False
    cache: ContextCache | None = None  # for the image's context
    staged: Staged | None = None  # the pixels, once a worker has sent them to its device
    timeline: Timeline = field(default_factory=Timeline)
    future: Future[JobResult] = field(default_factory=Future)


@dataclass(frozen=True, slots=True)
class Selection:
    batch: list[Job]
    expired: list[Job]
    rows: int


def select_batch(
    waiting: Iterable[Job], *, budget_rows: int, base_rows: int, now: float
) -> Selection:
    """Select the oldest jobs that fit the budget, at least one; expired jobs are separated.

    Jobs with the same image share its base rows. Golden images have separate batches: their
    task is new, and in one batch with others it would make the worker stack all weights anew.
    """
    batch: list[Job] = []
    expired: list[Job] = []
    images: set[ContextKey] = set()
    rows = 0
    for job in waiting:
        if job.deadline is not None and now >= job.deadline:
            expired.append(job)
            continue
        cold = job.context is None and job.key not in images
        cost = sum(task.rows for task in job.tasks) + (base_rows if cold else 0)
        if batch and (rows + cost > budget_rows or job.golden != batch[0].golden):
            break
        batch.append(job)
        images.add(job.key)
        rows += cost
    return Selection(batch, expired, rows)


Ticket = tuple[int, int]  # the turn of a job, and its order of arrival


class JobQueue:
    """A thread-safe queue of jobs, in turns between callers. Cancelling a job removes it."""

    def __init__(self, on_depth: Callable[[int], None]) -> None:
        self._jobs: dict[Ticket, Job] = {}
        self._arrivals = itertools.count()
        self._turn = 0  # of the last job that was taken
        self._callers: dict[str, tuple[int, float]] = {}  # turn and time of their last job
        self._changed = threading.Condition()
        self._decoding = 0  # images being decoded
        self._closed = False
        self._failure: str | None = None  # why no worker will take jobs
        self._on_depth = on_depth

    def __len__(self) -> int:
        return len(self._jobs)

    def put(self, *jobs: Job, wake: bool = True) -> None:
        """Add jobs. Without `wake`, a waiting worker takes them when `wake` is called."""
        with self._changed:
            if self._failure is not None:
                raise DeviceFailed(self._failure)
            if self._closed:
                raise RuntimeError("the queue is closed")
            tickets = [self._ticket(job.caller) for job in jobs]
            self._jobs.update(zip(tickets, jobs, strict=True))
            self._on_depth(len(self._jobs))
            if wake:
                self._changed.notify_all()  # waiters have different conditions
        for ticket, job in zip(tickets, jobs, strict=True):
            # By ticket: a callback with the job would keep its pixels alive.
            job.future.add_done_callback(partial(self._remove_cancelled, ticket))

    def wake(self) -> None:
        with self._changed:
            self._changed.notify_all()

    def next_batch(
        self, *, budget_rows: int, base_rows: int, clock: Callable[[], float]
    ) -> list[Job]:
        """The batch that `take` would return now."""
        with self._changed:
            return select_batch(
                map(self._jobs.__getitem__, sorted(self._jobs)),
                budget_rows=budget_rows,
                base_rows=base_rows,
                now=clock(),
            ).batch

    def take(
        self, *, budget_rows: int, base_rows: int, clock: Callable[[], float], patience: float = 0.0
    ) -> Selection | None:
        """Wait for jobs and take a batch; None once closed and empty.

        If an image needs its base rows and all are of one caller, wait up to `patience` seconds for
        images being decoded.
        """
        with self._changed:
            self._wait_for_work(patience)
            if not self._jobs:
                return None
            tickets = sorted(self._jobs)
            selection = select_batch(
                map(self._jobs.__getitem__, tickets),
                budget_rows=budget_rows,
                base_rows=base_rows,
                now=clock(),
            )
            # The batch and the expired jobs together are the first ones.
            taken = tickets[: len(selection.batch) + len(selection.expired)]
            for ticket in taken:
                del self._jobs[ticket]
            self._turn = max(self._turn, taken[-1][0])
            self._on_depth(len(self._jobs))
            return selection

    @property
    def contended(self) -> bool:
        """Whether several callers have sent images recently."""
        if len(self._callers) < 2:
            return False
        since = time.monotonic() - PRESENT_SECONDS
        with self._changed:
            present = {caller: last for caller, last in self._callers.items() if last[1] >= since}
            self._callers = present
        return len(present) > 1

    def _ticket(self, caller: str) -> Ticket:
        """The next turn of the caller: one after its last, or the current one if that has passed.

        As in start-time fair queueing, a caller cannot save up turns.
        """
        last, _ = self._callers.get(caller, (0, 0.0))
        turn = max(last + 1, self._turn)
        self._callers[caller] = turn, time.monotonic()
        return turn, next(self._arrivals)

    def _wait_for_work(self, patience: float) -> None:
        while not self._closed:
            self._changed.wait_for(lambda: self._jobs or self._closed)
            # With several callers, one that always decodes would delay every batch of the others.
            if not self.contended and any(job.context is None for job in self._jobs.values()):
                self._changed.wait_for(lambda: not self._decoding or self._closed, patience)
            if self._jobs:  # they may have been cancelled, or taken by another worker
                return

    def expect(self) -> None:
        """Announce that an image is being decoded; a call of `decoded` must follow."""
        with self._changed:
            self._decoding += 1

    def decoded(self) -> None:
        with self._changed:
            self._decoding -= 1
            if not self._decoding:
                self._changed.notify_all()

    def close(self) -> None:
        """Accept no more jobs; waiting jobs are still served."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def fail(self, reason: str) -> None:
        """Fail all waiting and future jobs: no worker is left."""
        with self._changed:
            self._failure = reason
            jobs = list(self._jobs.values())
            self._jobs.clear()
            self._on_depth(0)
        for job in jobs:
            if job.future.set_running_or_notify_cancel():
                job.future.set_exception(DeviceFailed(reason))

    def _remove_cancelled(self, ticket: Ticket, future: Future[JobResult]) -> None:
        if not future.cancelled():
            return
        with self._changed:
            if self._jobs.pop(ticket, None) is not None:
                self._on_depth(len(self._jobs))
