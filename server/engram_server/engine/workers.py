"""The workers of all devices. A worker that ends unexpectedly is replaced.

A worker ends after several batches in a row without an answer, or when its thread dies. Its jobs in
flight fail at once, and a new thread warms up in its place, after growing pauses. A worker that
ends repeatedly without an answer is lost: the process must be restarted.
"""

import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from engram_server.engine.observer import WORKER_RESTARTS, WORKERS, EngineObserver
from engram_server.engine.queue import JobQueue
from engram_server.engine.worker import Worker
from engram_server.errors import EngineError

# Seconds before each attempt to replace a worker that has not answered since the last one.
PAUSES: Final = (0.0, 1.0, 2.0, 4.0, 8.0)
_STOP_SECONDS: Final = 30.0

_log = logging.getLogger("engram.worker")


@dataclass(slots=True, eq=False)
class _WorkerSlot:
    """A worker slot: the running worker, or why there is none."""

    make: Callable[[], Worker]
    worker: Worker
    attempts: int = 0  # to replace the worker since its last answer
    failure: str | None = None  # why no worker runs now
    lost: bool = False  # no worker will run again


class Workers:
    """All workers of an engine. `start` before use, `stop` after."""

    def __init__(
        self, makers: Sequence[Callable[[], Worker]], queue: JobQueue, observer: EngineObserver
    ) -> None:
        self._slots = [_WorkerSlot(make, make()) for make in makers]
        self._queue = queue
        self._observer = observer
        self._stopping = threading.Event()
        self._reporting = threading.Lock()
        self.failures: tuple[str, ...] = ()  # why no worker runs; empty while one does

    def start(self) -> None:
        """Warm up all workers. Blocks; EngineError if one fails."""
        for slot in self._slots:
            slot.worker.start()
        for slot in self._slots:
            slot.worker.warm.wait()
            if slot.worker.failure is not None:
                raise EngineError(f"{slot.worker.name} could not warm up: {slot.worker.failure}")
        for slot in self._slots:
            name = f"{slot.worker.name}-watch"
            threading.Thread(target=self._watch, args=(slot,), name=name, daemon=True).start()
        self._observer.record(WORKERS, len(self._slots))

    def stop(self) -> None:
        """Wait for the workers to end after the queue was closed."""
        self._stopping.set()
        for slot in self._slots:
            if slot.worker.is_alive():
                slot.worker.join(_STOP_SECONDS)

    @property
    def rows_per_second(self) -> float:
        return sum(slot.worker.rows_per_second for slot in self._slots)

    @property
    def lost(self) -> tuple[str, ...]:
        return tuple(slot.failure for slot in self._slots if slot.lost and slot.failure)

    def _watch(self, slot: _WorkerSlot) -> None:
        """Wait in a separate thread for the end of a worker, and replace it."""
        while not slot.lost:
            worker = slot.worker
            worker.join()
            if worker.failure is None or self._stopping.is_set():
                worker.fail_in_flight("the server is shutting down")
                return
            failure = f"{worker.name} failed ({_brief(worker.failure)}) and is restarted"
            self._report(slot, failure)
            _log.error("%s", failure)
            worker.fail_in_flight(f"{failure}: try again")
            if worker.has_answered:
                slot.attempts = 0
            self._replace(slot)

    def _replace(self, slot: _WorkerSlot) -> None:
        name, failure = slot.worker.name, slot.worker.failure
        while slot.attempts < len(PAUSES):
            if self._stopping.wait(PAUSES[slot.attempts]):
                return
            slot.attempts += 1
            self._observer.record(WORKER_RESTARTS)
            successor = slot.make()
            try:
                successor.start()
            except RuntimeError as error:  # the system has no more threads
                failure = error
                continue
            successor.warm.wait()
            if successor.failure is None:
                slot.worker = successor
                self._report(slot, None)
                return
            failure = successor.failure
        reason = f"{name} cannot be restarted ({_brief(failure)}): restart the server; see its log"
        slot.lost = True
        self._report(slot, reason)
        _log.critical("%s", reason)
        if all(each.lost for each in self._slots):
            self._queue.fail(reason)

    def _report(self, slot: _WorkerSlot, failure: str | None) -> None:
        with self._reporting:
            slot.failure = failure
            failures = [each.failure for each in self._slots]
            self.failures = () if None in failures else tuple(filter(None, failures))
            self._observer.record(WORKERS, failures.count(None))


def _brief(failure: BaseException | None) -> str:
    return type(failure).__name__
