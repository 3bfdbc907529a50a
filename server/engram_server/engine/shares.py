"""Shares of callers in what all callers use, so that none can exclude the others.

A `Pool` is a limited number of bytes or slots. It rejects: a caller may not hold more than what
remains free. One caller alone gets half of a pool, two get a third each, and a further caller
always finds capacity (the dynamic threshold of shared-memory switches).

A `FairExecutor` is a number of threads. It makes callers wait: those that have work waiting take
turns, however much work each of them has. While several callers are active, one of them cannot use
all threads.
"""

import asyncio
import contextvars
import math
import os
import sys
import threading
import time
from collections import Counter, deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any, Final, TypeVar

T = TypeVar("T")

ACTIVE_SECONDS: Final = 1.0  # that a caller counts as active after its last work
GIVE_WAY_SECONDS: Final = 0.1
_GIVE_WAY_STEP: Final = 0.005


class Pool:
    """A limited resource, counted by caller. Not thread-safe: use it on the event loop.

    `shared=False` is for servers with a single caller, which may take everything.
    """

    def __init__(self, limit: int, *, shared: bool) -> None:
        self.limit = limit
        self.used = 0
        self._shared = shared
        self._held: dict[str, int] = {}
        self._waiting: dict[asyncio.Future[None], tuple[str, int]] = {}

    def has(self, caller: str, amount: int) -> bool:
        """Whether the caller may take this amount now."""
        free = self.limit - self.used - amount
        if free < 0:
            return False
        held = self._held.get(caller, 0)
        # Whatever fits is free for a caller that holds nothing.
        return not self._shared or not held or held + amount <= free

    def describe(self, what: str, caller: str) -> str:
        """Say what is in use, for the error of a caller that gets no more."""
        if not self._shared:
            return f"{self.used} {what} are in flight, and the limit is {self.limit}"
        return (
            f"{self.used} {what} are in flight, {self._held.get(caller, 0)} of them yours, and the "
            f"limit is {self.limit}; one caller may hold as much as remains free"
        )

    def take(self, caller: str, amount: int) -> bool:
        if not self.has(caller, amount):
            return False
        self.used += amount
        self._held[caller] = self._held.get(caller, 0) + amount
        return True

    async def wait(self, caller: str, amount: int, seconds: float) -> bool:
        """Take an amount as soon as the caller may; False if that is not within this time."""
        if self.take(caller, amount):
            return True
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting[turn] = (caller, amount)
        try:
            await asyncio.wait([turn], timeout=seconds)
        except asyncio.CancelledError:
            if turn.done():
                self.give_back(caller, amount)
            raise
        finally:
            self._waiting.pop(turn, None)
        return turn.done()

    def give_back(self, caller: str, amount: int) -> None:
        self.used -= amount
        left = self._held.get(caller, 0) - amount
        if left:
            self._held[caller] = left
        else:
            self._held.pop(caller, None)
        if not self._waiting:
            return
        for turn, (waiting, needed) in list(self._waiting.items()):
            if self.take(waiting, needed):
                del self._waiting[turn]
                turn.set_result(None)


class FairExecutor:
    """Threads whose work is taken from all callers in turn; `per_caller` limits those of one.

    While `busy` returns True, work starts a little later: it would compete with more urgent work
    for the interpreter lock. Threads with a `niceness` leave the cores to the process's others.
    """

    def __init__(
        self,
        threads: int,
        name: str,
        *,
        per_caller: int | None = None,
        busy: Callable[[], bool] = lambda: False,
        niceness: int = 0,
    ) -> None:
        self._pool = ThreadPoolExecutor(threads, name, _set_niceness, (niceness,))
        self._threads = threads
        self._per_caller = threads if per_caller is None else per_caller
        self._busy = busy
        self._lock = threading.Lock()
        # By caller, the one whose turn is next first.
        self._waiting: dict[str, deque[tuple[Future[Any], Callable[[], Any]]]] = {}
        self._running: Counter[str] = Counter()
        # The caller of the newest work, and the newest work of any other caller: when it came.
        self._newest, self._newest_time = "", -math.inf
        self._other_time = -math.inf

    def submit(self, caller: str, work: Callable[[], T]) -> Future[T]:
        """Run work in turn. Cancelling the future withdraws work that still waits."""
        future: Future[T] = Future()
        with self._lock:
            self._note_active(caller)
            self._waiting.setdefault(caller, deque()).append((future, work))
        self._pool.submit(self._run_next)
        return future

    async def run(
        self, caller: str, work: Callable[[], T], stop: threading.Event | None = None
    ) -> T:
        """Run work in turn, with the context variables of the caller.

        If this is cancelled, work that waits is withdrawn. `stop` is set for work that runs, and
        its end is awaited, because it may use what the caller cleans up.
        """
        context = contextvars.copy_context()
        future = self.submit(caller, partial(context.run, work))
        waiting = asyncio.wrap_future(future)
        try:
            return await asyncio.shield(waiting)
        except asyncio.CancelledError:
            if stop is not None:
                stop.set()
            if not future.cancel():
                await asyncio.wait([waiting])
            raise
        finally:
            # An error refers to this frame: without the cycle its memory is freed at once.
            del future, waiting

    def shutdown(self) -> None:
        """Cancel what waits; work that runs continues."""
        with self._lock:
            waiting, self._waiting = self._waiting, {}
        for future in (future for jobs in waiting.values() for future, _ in jobs):
            future.cancel()
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _run_next(self) -> None:
        while (taken := self._take()) is not None:
            caller, future, work = taken
            try:
                self._give_way()
                if future.set_running_or_notify_cancel():
                    _complete(future, work)
            finally:
                del future, work, taken  # waiting must not keep their memory
                with self._lock:
                    self._running[caller] -= 1
                    if not self._running[caller]:
                        del self._running[caller]

    def _give_way(self) -> None:
        until = time.monotonic() + GIVE_WAY_SECONDS
        while self._busy() and time.monotonic() < until:
            time.sleep(_GIVE_WAY_STEP)

    def _note_active(self, caller: str) -> None:
        if caller != self._newest:
            self._newest, self._other_time = caller, self._newest_time
        self._newest_time = time.monotonic()

    def _threads_of(self, caller: str) -> int:
        """The limit of threads that work for a caller now."""
        others = self._other_time if caller == self._newest else self._newest_time
        if time.monotonic() - others > ACTIVE_SECONDS:
            return self._per_caller
        return max(1, min(self._per_caller, self._threads - 1))

    def _take(self) -> tuple[str, Future[Any], Callable[[], Any]] | None:
        with self._lock:
            may_run = (one for one in self._waiting if self._running[one] < self._threads_of(one))
            caller = next(may_run, None)
            if caller is None:
                return None  # the thread that works for a waiting caller will look again
            waiting = self._waiting.pop(caller)
            future, work = waiting.popleft()
            if waiting:
                self._waiting[caller] = waiting  # last in the order
            self._running[caller] += 1
            return caller, future, work


def _set_niceness(niceness: int) -> None:
    if niceness and sys.platform == "linux":  # where it is of one thread
        os.nice(niceness)


def _complete(future: Future[T], work: Callable[[], T]) -> None:
    try:
        result = work()
    except BaseException as error:  # noqa: BLE001 - thread boundary
        future.set_exception(error)
    else:
        future.set_result(result)
    finally:
        del future, work  # as in `FairExecutor.run`
