"""What waits for the device, and what of it makes the next batch.

Choosing is a pure function of what waits, a budget and the time, so its tests need no threads and
no sleeping. A batch costs token rows: every image's base rows, unless it is warm, and one row for
each of its tasks. A free worker takes what waits, in order. It never idles to collect more: only on
a CPU it lets images that are being decoded come along, because decoding them takes the very cores
that the pass would run on.
"""

import itertools
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from dataclasses import dataclass, field

from server.engine.context_cache import ContextCache, ContextKey
from server.engine.staging import Staged
from server.engine.types import CacheState, Pixels, ResidentTask, TaskAnswer, Timeline
from server.errors import DeviceFailed
from server.model.context import Context


@dataclass(frozen=True, slots=True)
class JobResult:
    """The model's output for one image."""

    answers: dict[ResidentTask, TaskAnswer]
    cache: CacheState


@dataclass(eq=False, slots=True)
class Job:
    """One image and its tasks. Jobs of the same `key` are about the same image of one owner."""

    key: ContextKey
    tasks: tuple[ResidentTask, ...]
    pixels: Pixels | None  # None when the context is there
    context: Context | None
    deadline: float | None = None
    features: bool = False
    attention: bool = False
    cache: ContextCache | None = None  # where the image's context is read from and kept
    staged: Staged | None = None  # the pixels, where a worker has sent them to its device
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
    """The longest run of waiting jobs, oldest first, that fits the budget; at least one.

    Expired jobs are set aside. Jobs about one image share its base rows.
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
        if batch and rows + cost > budget_rows:
            break
        batch.append(job)
        images.add(job.key)
        rows += cost
    return Selection(batch, expired, rows)


class JobQueue:
    """A thread-safe line of jobs. A cancelled job leaves it at once."""

    def __init__(self, on_depth: Callable[[int], None]) -> None:
        self._jobs: dict[int, Job] = {}  # by ticket: in order, and quick to leave
        self._tickets = itertools.count()
        self._changed = threading.Condition()
        self._coming = 0  # images in the hands of decoding threads
        self._closed = False
        self._problem: str | None = None  # why nobody will ever serve
        self._on_depth = on_depth

    def __len__(self) -> int:
        return len(self._jobs)

    def put(self, job: Job) -> None:
        with self._changed:
            if self._problem is not None:
                raise DeviceFailed(self._problem)
            if self._closed:
                raise RuntimeError("the queue is closed")
            ticket = next(self._tickets)
            self._jobs[ticket] = job
            self._on_depth(len(self._jobs))
            self._changed.notify_all()  # one may be waiting for more than this job
        # By ticket: a callback that knew its job would keep it, and its pixels, alive for longer.
        job.future.add_done_callback(lambda _: self._leave(ticket))

    def next_batch(
        self, *, budget_rows: int, base_rows: int, clock: Callable[[], float]
    ) -> list[Job]:
        """What `take` would take now, and leaves."""
        with self._changed:
            return select_batch(
                self._jobs.values(), budget_rows=budget_rows, base_rows=base_rows, now=clock()
            ).batch

    def take(
        self,
        *,
        budget_rows: int,
        base_rows: int,
        clock: Callable[[], float],
        patience: float = 0.0,
    ) -> Selection | None:
        """Waits for work and takes a batch of it; None once closed and empty.

        Where an image needs its base rows, those being decoded are waited for, so many seconds.
        """
        with self._changed:
            self._wait_for_work(patience)
            if not self._jobs:
                return None
            selection = select_batch(
                self._jobs.values(), budget_rows=budget_rows, base_rows=base_rows, now=clock()
            )
            # The batch and the expired jobs together are the oldest ones.
            taken = len(selection.batch) + len(selection.expired)
            for ticket in list(itertools.islice(self._jobs, taken)):
                del self._jobs[ticket]
            self._on_depth(len(self._jobs))
            return selection

    def _wait_for_work(self, patience: float) -> None:
        """Until there is a job, or none will ever come."""
        while not self._closed:
            self._changed.wait_for(lambda: self._jobs or self._closed)
            if any(job.context is None for job in self._jobs.values()):
                self._changed.wait_for(lambda: not self._coming or self._closed, patience)
            if self._jobs:  # they may have left meanwhile, or gone to another worker
                return

    def expect(self) -> None:
        """An image is about to be decoded; `decoded` follows, with or without a job."""
        with self._changed:
            self._coming += 1

    def decoded(self) -> None:
        with self._changed:
            self._coming -= 1
            if not self._coming:
                self._changed.notify_all()

    def close(self) -> None:
        """No more jobs; those that wait are still served."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def fail(self, problem: str) -> None:
        """Nobody is left to serve: jobs that wait fail, and so do those that come."""
        with self._changed:
            self._problem = problem
            jobs = list(self._jobs.values())
        for job in jobs:
            if job.future.set_running_or_notify_cancel():
                job.future.set_exception(DeviceFailed(problem))

    def _leave(self, ticket: int) -> None:
        with self._changed:
            if self._jobs.pop(ticket, None) is not None:
                self._on_depth(len(self._jobs))
