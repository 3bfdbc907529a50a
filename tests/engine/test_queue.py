"""Choosing a batch is a pure function: no threads, no clock, no model."""

import threading
from concurrent.futures import wait

import torch
from engram_server.engine.queue import Job, JobQueue, select_batch
from engram_server.engine.types import ServedTask
from engram_server.model.context import Context
from engram_server.model.tasks import Task
from hypothesis import given
from hypothesis import strategies as st

BASE_ROWS = 17
CONTEXT = Context(torch.zeros(1), torch.zeros(1))


def resident(rows):
    """A task that costs so many rows: itself and its ancestors, or none for a head alone."""

    def task(ancestors=()):
        token = torch.zeros(2) if rows else None
        return Task(torch.zeros(3, 2), None, token, ancestors=ancestors)

    ancestors = tuple(task() for _ in range(rows - 1))
    on = {torch.device("cpu"): task(ancestors)}
    return ServedTask("t", 1, None, "single_label", (), on)


def job(key="a", rows=(1,), warm=False, deadline=None):
    tasks = tuple(resident(count) for count in rows)
    return Job(key, tasks, None, CONTEXT if warm else None, deadline=deadline)


def select(jobs, budget=100, now=0.0):
    return select_batch(jobs, budget_rows=budget, base_rows=BASE_ROWS, now=now)


def test_an_image_costs_its_base_rows_and_one_row_per_task_and_ancestor():
    assert select([job(rows=(1, 3, 0))]).rows == BASE_ROWS + 4


def test_a_warm_image_costs_its_task_rows_only():
    assert select([job(rows=(1, 1), warm=True)]).rows == 2


def test_jobs_about_one_image_share_its_base_rows():
    assert select([job("a"), job("a"), job("b")]).rows == 2 * BASE_ROWS + 3


def test_the_batch_is_the_longest_run_of_oldest_jobs_that_fits():
    jobs = [job(str(number)) for number in range(5)]
    assert select(jobs, budget=3 * (BASE_ROWS + 1)).batch == jobs[:3]


def test_a_small_job_behind_one_that_does_not_fit_does_not_overtake_it():
    large, small = job("b", rows=(40,)), job("c", warm=True)
    assert select([job("a"), large, small], budget=BASE_ROWS + 2).batch[1:] == []


def test_a_job_larger_than_the_budget_runs_alone():
    jobs = [job("a", rows=(50,)), job("b")]
    assert select(jobs, budget=10).batch == jobs[:1]


def test_expired_jobs_are_set_aside_and_cost_nothing():
    late, early = job("a", deadline=1.0), job("b", deadline=3.0)
    chosen = select([late, early], now=2.0)
    assert (chosen.batch, chosen.expired, chosen.rows) == ([early], [late], BASE_ROWS + 1)


def test_nothing_waiting_selects_nothing():
    assert select([]).batch == []


@given(
    st.lists(
        st.builds(
            job,
            key=st.sampled_from("abc"),
            rows=st.lists(st.integers(0, 3), max_size=3),
            warm=st.booleans(),
            deadline=st.none() | st.floats(0, 2),
        ),
        max_size=12,
    ),
    st.integers(1, 120),
)
def test_every_selection_keeps_order_and_budget_and_loses_nothing(jobs, budget):
    chosen = select(jobs, budget, now=1.0)
    expected = [one for one in jobs if one.deadline is None or one.deadline > 1.0]
    assert chosen.batch == expected[: len(chosen.batch)]
    assert all(one.deadline <= 1.0 for one in chosen.expired)
    assert len(chosen.batch) <= 1 or chosen.rows <= budget
    assert not expected or chosen.batch  # work-conserving


def take(queue, budget=1000, patience=0.0):
    return queue.take(budget_rows=budget, base_rows=BASE_ROWS, clock=lambda: 0.0, patience=patience)


def test_a_cancelled_job_leaves_the_queue_at_once():
    depths = []
    queue = JobQueue(depths.append)
    jobs = [job(str(number)) for number in range(1000)]
    for one in jobs:
        queue.put(one)
    for one in jobs:
        assert one.future.cancel()
    assert len(queue) == 0
    assert depths[-1] == 0


LONG = 30.0  # seconds of patience that no test spends


def batch_after(queue, change):
    """What a patient worker takes that has begun to wait, or is about to, when `change` is made."""
    selections = []
    worker = threading.Thread(target=lambda: selections.append(take(queue, patience=LONG)))
    worker.start()
    change()
    worker.join(timeout=10)
    return selections[0].batch


def decoding(*jobs):
    """A queue with these jobs and one more image in the hands of a decoding thread."""
    queue = JobQueue(lambda depth: None)
    queue.expect()
    for one in jobs:
        queue.put(one)
    return queue


def test_a_waiting_worker_is_woken_by_the_next_job():
    queue, one = JobQueue(lambda depth: None), job()
    assert batch_after(queue, lambda: queue.put(one)) == [one]


def test_a_patient_worker_takes_the_images_being_decoded_along():
    first, second = job("a"), job("b")
    queue = decoding(first)

    def decode():
        queue.put(second)
        queue.decoded()

    assert batch_after(queue, decode) == [first, second]


def test_an_image_that_cannot_be_decoded_does_not_delay_the_batch():
    one = job()
    queue = decoding(one)
    assert batch_after(queue, queue.decoded) == [one]


def test_closing_ends_patience():
    one = job()
    queue = decoding(one)
    assert batch_after(queue, queue.close) == [one]


def test_a_worker_goes_on_when_the_job_it_gathered_for_is_withdrawn():
    withdrawn, other = job("a"), job("b")
    queue = decoding(withdrawn)

    def replace():
        withdrawn.future.cancel()
        queue.put(other)
        queue.decoded()

    assert batch_after(queue, replace) == [other]


def test_patience_ends():
    one = job()
    assert take(decoding(one), patience=0.001).batch == [one]


def test_warm_images_wait_for_no_decoding():
    one = job(warm=True)
    assert take(decoding(one), patience=LONG).batch == [one]


def test_beside_another_caller_nobody_waits_for_decoding():
    mine, theirs = job("a"), job("b")
    mine.caller, theirs.caller = "me", "them"
    assert take(decoding(mine, theirs), patience=LONG).batch == [mine, theirs]


def test_a_closed_queue_serves_what_waits_and_then_ends():
    queue = JobQueue(lambda depth: None)
    queue.put(job())
    queue.close()
    assert len(take(queue).batch) == 1
    assert take(queue) is None


def test_two_workers_share_the_queue_and_take_each_job_once():
    queue = JobQueue(lambda depth: None)
    jobs = [job(str(number)) for number in range(200)]

    def work():
        while (chosen := take(queue, budget=BASE_ROWS + 1)) is not None:
            for one in chosen.batch:
                one.future.set_result(threading.get_ident())

    workers = [threading.Thread(target=work) for _ in range(2)]
    for worker in workers:
        worker.start()
    for one in jobs:
        queue.put(one)
    assert not wait([one.future for one in jobs], timeout=30).not_done
    queue.close()
    for worker in workers:
        worker.join(timeout=10)
