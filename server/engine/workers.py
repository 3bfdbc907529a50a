"""The workers of all devices, kept at work: one that ends before its time is replaced.

A worker ends when several batches in a row went without a single answer, or when its thread dies.
What it had at hand fails at once, and a new thread warms up in its place, after pauses that grow.
One that ends again and again without an answer is lost: only a new process can help then.
"""

import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from server.engine.observer import EngineObserver
from server.engine.queue import JobQueue
from server.engine.worker import Worker
from server.errors import EngineError

# Seconds before each attempt to replace a worker that has given no answer since the last one.
PAUSES: Final = (0.0, 1.0, 2.0, 4.0, 8.0)
_STOP_SECONDS: Final = 30.0

_log = logging.getLogger("engram.worker")


@dataclass(slots=True, eq=False)
class _Post:
    """A place for a worker: who works there, and why nobody does."""

    make: Callable[[], Worker]
    worker: Worker
    attempts: int = 0  # to replace the worker since it last answered
    problem: str | None = None  # why nobody works there now
    lost: bool = False  # and nobody will


class Workers:
    """All workers of an engine. `start` before use, `stop` after."""

    def __init__(
        self,
        makers: Sequence[Callable[[], Worker]],
        queue: JobQueue,
        observer: EngineObserver,
    ) -> None:
        self._posts = [_Post(make, make()) for make in makers]
        self._queue = queue
        self._observer = observer
        self._stopping = threading.Event()

    def start(self) -> None:
        """Warms all workers up. Blocks; EngineError if one cannot."""
        for post in self._posts:
            post.worker.start()
        for post in self._posts:
            post.worker.warm.wait()
            if post.worker.failure is not None:
                raise EngineError(f"{post.worker.name} could not warm up: {post.worker.failure}")
        for post in self._posts:
            name = f"{post.worker.name}-watch"
            threading.Thread(target=self._watch, args=(post,), name=name, daemon=True).start()
        self._count()

    def stop(self) -> None:
        """Waits for workers that end because the queue was closed."""
        self._stopping.set()
        for post in self._posts:
            if post.worker.is_alive():
                post.worker.join(_STOP_SECONDS)

    @property
    def rows_per_second(self) -> float:
        return sum(post.worker.rows_per_second for post in self._posts)

    @property
    def problems(self) -> tuple[str, ...]:
        """Why there is nobody to answer; empty while one worker is there."""
        problems = [post.problem for post in self._posts]
        return () if None in problems else tuple(filter(None, problems))

    @property
    def lost(self) -> tuple[str, ...]:
        """Of the workers that cannot be brought back: why."""
        return tuple(post.problem for post in self._posts if post.lost and post.problem)

    def _watch(self, post: _Post) -> None:
        """In a thread of its own: joining tells of a worker's end, however it came."""
        while not post.lost:
            worker = post.worker
            worker.join()
            if worker.failure is None or self._stopping.is_set():
                worker.fail_jobs_at_hand("the server is shutting down")
                return
            post.problem = f"{worker.name} failed ({_brief(worker.failure)}) and is restarted"
            self._count()
            _log.error("%s", post.problem)
            worker.fail_jobs_at_hand(f"{post.problem}: try again")
            if worker.has_answered:
                post.attempts = 0
            self._replace(post)

    def _replace(self, post: _Post) -> None:
        name, failure = post.worker.name, post.worker.failure
        while post.attempts < len(PAUSES):
            if self._stopping.wait(PAUSES[post.attempts]):
                return
            post.attempts += 1
            self._observer.worker_restarted()
            successor = post.make()
            try:
                successor.start()
            except RuntimeError as error:  # no more threads to be had
                failure = error
                continue
            successor.warm.wait()
            if successor.failure is None:
                post.worker, post.problem = successor, None
                self._count()
                return
            failure = successor.failure
        post.problem = (
            f"{name} cannot be brought back ({_brief(failure)}): restart the server; its log says "
            "more"
        )
        post.lost = True
        _log.critical("%s", post.problem)
        if all(each.lost for each in self._posts):
            self._queue.fail(post.problem)

    def _count(self) -> None:
        self._observer.workers(sum(post.problem is None for post in self._posts))


def _brief(failure: BaseException | None) -> str:
    return type(failure).__name__
