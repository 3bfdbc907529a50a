"""Shares of callers: no caller excludes the others from pools, threads or batches."""

import asyncio
import contextlib
import functools
import gc
import os
import sys
import threading
import weakref
from collections import Counter

import pytest
from engram_server.engine.context_cache import ContextKey
from engram_server.engine.queue import Job, JobQueue
from engram_server.engine.shares import FairExecutor, Pool
from hypothesis import given
from hypothesis import strategies as st

HOSTILE, OTHER = "hostile", "other"


def fill(pool: Pool, caller: str, amount: int = 1) -> int:
    """Take as much as the caller gets."""
    count = 0
    while pool.take(caller, amount):
        count += amount
    return count


def test_one_caller_gets_half_of_a_pool_and_two_get_a_third():
    pool = Pool(90, shared=True)
    assert fill(pool, HOSTILE) == 45
    pool.give_back(HOSTILE, 45)
    for _ in range(30):
        assert pool.take(HOSTILE, 1)
        assert pool.take(OTHER, 1)
    assert not pool.take(HOSTILE, 1)
    assert not pool.take(OTHER, 1)
    assert pool.take("third", 1)


def test_a_single_caller_gets_the_whole_pool():
    assert fill(Pool(90, shared=False), HOSTILE) == 90


def test_a_caller_that_waits_gets_what_is_given_back():
    async def run():
        pool = Pool(4, shared=True)
        assert fill(pool, HOSTILE) == 2
        waiting = [asyncio.ensure_future(pool.wait(HOSTILE, 2, 60)) for _ in range(2)]
        assert await pool.wait(OTHER, 1, 60)  # does not queue behind another caller
        pool.give_back(HOSTILE, 2)
        assert await waiting[0]
        assert not waiting[1].done()
        pool.give_back(HOSTILE, 2)
        assert await waiting[1]
        pool.give_back(HOSTILE, 2)
        pool.give_back(OTHER, 1)
        assert pool.used == 0

    asyncio.run(run())


def test_a_caller_that_gave_up_waiting_holds_nothing():
    async def run():
        pool = Pool(2, shared=False)
        assert pool.take(HOSTILE, 2)
        assert not await pool.wait(OTHER, 1, 0.01)
        cancelled = asyncio.ensure_future(pool.wait(OTHER, 1, 60))
        await asyncio.sleep(0)
        cancelled.cancel()
        pool.give_back(HOSTILE, 2)  # in the same moment
        await asyncio.wait([cancelled])
        assert cancelled.cancelled()
        assert pool.used == 0

    asyncio.run(run())


@given(st.integers(2, 100), st.lists(st.sampled_from("abcdefgh"), max_size=300))
def test_a_new_caller_always_finds_capacity(limit, takes):
    pool = Pool(limit, shared=True)
    held = Counter()
    for caller in takes:
        if pool.take(caller, 1):
            held[caller] += 1
    assert pool.used == held.total() <= limit
    if len(held) < min(limit, 8) and held.total() < limit:
        assert pool.has("new", 1)
    # A caller with less than half of an equal share gets more.
    share = limit // (len(held) + 1) if held else limit
    assert all(pool.has(caller, 1) for caller in held if held[caller] < share // 2)
    for caller, amount in held.items():
        pool.give_back(caller, amount)
    assert pool.used == 0
    assert fill(pool, "a") == max(1, limit // 2)


def test_what_fits_is_free_for_a_caller_that_holds_nothing():
    pool = Pool(100, shared=True)
    assert pool.take(OTHER, 100)
    assert not pool.take(HOSTILE, 1)
    assert "100 bytes are in flight, 0 of them yours, and the limit is 100" in pool.describe(
        "bytes", HOSTILE
    )


@pytest.fixture
def executor():
    made = FairExecutor(1, "test")
    yield made
    made.shutdown()


def test_callers_take_turns_however_much_work_each_has(executor):
    begun, go_on, done = threading.Event(), threading.Event(), []

    def block() -> None:
        begun.set()
        go_on.wait(30)

    executor.submit(HOSTILE, block)
    begun.wait(30)
    futures = [executor.submit(HOSTILE, lambda n=n: done.append(f"h{n}")) for n in range(50)]
    futures += [executor.submit(OTHER, lambda n=n: done.append(f"o{n}")) for n in range(3)]
    go_on.set()
    for future in futures:
        future.result(30)
    assert done[:6] == ["h0", "o0", "h1", "o1", "h2", "o2"]
    assert done[6:] == [f"h{n}" for n in range(3, 50)]


def test_one_caller_runs_in_a_limited_number_of_threads():
    executor = FairExecutor(2, "test", per_caller=1)
    go_on = threading.Event()
    blocked = [executor.submit(HOSTILE, lambda: go_on.wait(30)) for _ in range(5)]
    assert executor.submit(OTHER, lambda: "served").result(30) == "served"
    assert sum(future.running() for future in blocked) == 1
    go_on.set()
    assert all(future.result(30) for future in blocked)
    executor.shutdown()


def test_a_caller_leaves_a_thread_to_others_that_are_active():
    executor = FairExecutor(2, "test")
    go_on, begun = threading.Event(), threading.Barrier(3)

    def block() -> bool:
        begun.wait(30)
        return go_on.wait(30)

    blocked = [executor.submit(HOSTILE, block) for _ in range(2)]
    begun.wait(30)  # alone, it has both threads
    go_on.set()
    assert all(future.result(30) for future in blocked)
    go_on.clear()
    assert executor.submit(OTHER, lambda: "served").result(30) == "served"
    blocked = [executor.submit(HOSTILE, lambda: go_on.wait(30)) for _ in range(5)]
    assert executor.submit(OTHER, lambda: "served").result(30) == "served"
    assert sum(future.running() for future in blocked) == 1
    go_on.set()
    assert all(future.result(30) for future in blocked)
    executor.shutdown()


def test_failed_work_is_freed_without_a_garbage_collection(executor):
    """Work may hold a body of many megabytes, and full collections are rare."""

    class Body:
        pass

    def fail(body):
        raise ValueError(type(body).__name__)

    async def run():
        body = Body()
        freed = weakref.ref(body)
        with contextlib.suppress(ValueError):
            await executor.run(OTHER, functools.partial(fail, body))
        del body
        # The thread drops it a moment after it has set the result.
        for _ in range(1000):
            if freed() is None:
                return True
            await asyncio.sleep(0.01)
        return False

    gc.collect()
    gc.disable()
    try:
        assert asyncio.run(run())
    finally:
        gc.enable()


def test_work_that_waits_is_withdrawn_with_its_caller(executor):
    begun, ran = threading.Event(), []

    async def main() -> None:
        stop = threading.Event()

        def work() -> None:
            begun.set()
            stop.wait(30)

        running = asyncio.ensure_future(executor.run(HOSTILE, work, stop))
        waiting = asyncio.ensure_future(executor.run(OTHER, lambda: ran.append("waiting")))
        await asyncio.to_thread(begun.wait, 30)
        for task in (waiting, running):
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        assert stop.is_set()  # what runs is told, and its end was awaited

    asyncio.run(main())
    assert executor.submit(OTHER, lambda: "free").result(30) == "free"
    assert not ran


def test_errors_of_work_reach_the_caller(executor):
    with pytest.raises(ZeroDivisionError):
        asyncio.run(executor.run(HOSTILE, lambda: 1 // 0))


def test_shutdown_ends_the_waiting(executor):
    begun, go_on = threading.Event(), threading.Event()

    def block() -> None:
        begun.set()
        go_on.wait(30)

    executor.submit(HOSTILE, block)
    begun.wait(30)
    waiting = executor.submit(HOSTILE, block)
    executor.shutdown()
    assert waiting.cancelled()
    go_on.set()


def job(caller: str, number: int) -> Job:
    return Job(ContextKey(caller, str(number)), (), caller=caller)


def take(queue: JobQueue, budget_rows: int) -> list[Job]:
    selection = queue.take(budget_rows=budget_rows, base_rows=1, clock=lambda: 0.0)
    assert selection is not None
    return selection.batch


def test_the_images_of_another_caller_are_in_the_next_batch():
    queue = JobQueue(lambda depth: None)
    for number in range(100):
        queue.put(job(HOSTILE, number))
    assert [each.caller for each in take(queue, 10)] == [HOSTILE] * 10
    assert not queue.contended
    for number in range(3):
        queue.put(job(OTHER, number))
    assert queue.contended
    batch = take(queue, 8)
    assert Counter(each.caller for each in batch) == {HOSTILE: 5, OTHER: 3}
    assert [int(each.key.image) for each in batch if each.caller == OTHER] == [0, 1, 2]


def test_a_caller_that_paused_has_no_turns_saved_up():
    queue = JobQueue(lambda depth: None)
    for number in range(20):
        queue.put(job(HOSTILE, number))
        queue.put(job(OTHER, number))
    take(queue, 40)
    for number in range(20):
        queue.put(job(HOSTILE, number))
    take(queue, 20)
    # OTHER was away for 20 turns: now both alternate again.
    for number in range(10):
        queue.put(job(HOSTILE, number))
        queue.put(job(OTHER, number))
    assert abs(Counter(each.caller for each in take(queue, 10))[OTHER] - 5) <= 1


def test_work_gives_way_for_a_while_only():
    """It waits while the server is busy, but not forever."""
    asked = []
    executor = FairExecutor(1, "test", busy=lambda: not asked.append(None))
    assert executor.submit(OTHER, lambda: "done").result(30) == "done"
    assert len(asked) > 1
    executor.shutdown()


@pytest.mark.skipif(sys.platform != "linux", reason="threads have no priority of their own")
def test_threads_may_have_a_lower_priority_than_the_process():
    executor = FairExecutor(1, "test", niceness=5)
    try:
        before = os.nice(0)
        assert executor.submit("a", lambda: os.nice(0)).result(10) == min(19, before + 5)
        assert os.nice(0) == before
    finally:
        executor.shutdown()
