"""Following the store under traffic, whatever fails."""

import random
import threading

import pytest
from engram_server.engine.tasks import follower
from engram_store import MoveAlias, Purge, Retire, RollBack, StoreUnavailable, TaskStore

from tests.engine.bundles import WAIT_SECONDS, make_bundle
from tests.engine.tasks.lab import Lab


def test_label_move_and_rollback_are_served_after_a_sync(lab):
    it = lab()
    it.publish("cifar", 1)
    it.publish("cifar", 2)
    it.sync()
    assert it.version("cifar") == 2
    it.store.commit(MoveAlias("cifar", "default", 1))
    it.sync()
    assert it.version("cifar") == 1
    it.store.commit(RollBack("cifar"))
    it.sync()
    assert it.version("cifar") == 2
    assert it.listener.served == 4


def test_moving_a_label_loads_nothing_again(lab):
    it = lab()
    it.publish("cifar", 1)
    it.sync()
    first = it.resident("cifar")["cifar"]
    it.publish("cifar", 2)
    it.sync()
    it.store.commit(MoveAlias("cifar", "default", 1))
    it.sync()
    assert it.resident("cifar")["cifar"] is first
    assert it.listener.counts["loaded"] == 2


def test_a_poll_without_news_costs_nothing_per_task(lab, monkeypatch):
    it = lab()
    it.publish("birds", 1)
    it.sync()
    served = it.follower.snapshot
    monkeypatch.setattr(it.loader, "load_all", None)  # a sync of all tasks fails
    assert it.follower.sync() is served


def test_store_outage_keeps_serving_and_recovers_by_itself(lab, outage):
    it = lab()
    it.publish("cifar", 1)
    served = it.sync()
    it.publish("cifar", 2)
    with outage:
        assert it.sync() is served
        assert it.follower.store_error == "The store is away."
        assert it.version("cifar") == 1
        assert it.listener.counts["store_failed"] == 1
    it.sync()
    assert it.follower.store_error is None
    assert it.version("cifar") == 2


def test_start_raises_when_the_store_cannot_be_read(lab, outage):
    it = lab()
    with outage, pytest.raises(StoreUnavailable):
        it.follower.start()


def test_started_follower_follows_the_store_by_itself(lab, store):
    it = lab(poll_seconds=0.002)
    it.publish("cifar", 1)
    it.follower.start()
    assert it.version("cifar") == 1
    elsewhere = TaskStore(store.objects)
    elsewhere.publish("cifar", make_bundle(it.backbone, 2))
    it.listener.wait_until(lambda: it.listener.served == 2)
    assert it.version("cifar") == 2
    assert it.follower.seconds_since_poll is not None


def test_follower_outlives_outages_and_unexpected_errors(lab, store, monkeypatch):
    it = lab(poll_seconds=0.002)
    it.follower.start()
    with monkeypatch.context() as patch:
        patch.setattr(store, "refresh", lambda: 1 / 0)
        it.listener.wait_until(lambda: it.listener.counts["store_failed"] >= 3)
    it.publish("cifar", 1)
    it.listener.wait_until(lambda: it.listener.served == 1)
    assert it.version("cifar") == 1


def test_stopped_follower_has_no_thread_left_and_keeps_its_tasks(lab):
    it = lab(poll_seconds=0.002)
    it.publish("cifar", 1)
    others = set(threading.enumerate())  # of tests that keep a server for a whole session
    it.follower.start()
    assert any(thread.name == "engram-follow" for thread in set(threading.enumerate()) - others)
    it.follower.stop()
    assert not any(thread.name == "engram-follow" for thread in set(threading.enumerate()) - others)
    assert it.version("cifar") == 1


def test_sync_at_least_returns_only_when_that_generation_is_served(lab, store):
    it = lab(poll_seconds=0.002)
    it.sync()
    got = []
    waiting = threading.Thread(target=lambda: got.append(it.follower.sync(at_least=2).generation))
    waiting.start()
    it.listener.wait_until(lambda: it.listener.counts["seen"] >= 3)
    it.publish("cifar", 1)
    it.listener.wait_until(lambda: it.listener.served == 1)
    assert not got
    it.publish("cifar", 2)
    waiting.join(WAIT_SECONDS)
    assert got == [2]
    seen = it.listener.counts["seen"]
    it.follower.sync(at_least=1)
    assert it.listener.counts["seen"] == seen, "served already: the store is not read"


def test_sync_at_least_gives_up_in_the_end(lab, monkeypatch, outage):
    it = lab(poll_seconds=0.002)
    monkeypatch.setattr(follower, "PATIENCE_SECONDS", 0.01)
    with pytest.raises(StoreUnavailable, match="has not reached 7"):
        it.follower.sync(at_least=7)
    with outage, pytest.raises(StoreUnavailable, match="The store is away"):
        it.follower.sync(at_least=7)


def change_something(it: Lab, rng: random.Random, step: int) -> int:
    """One random change of the store; the generation it made."""
    name = rng.choice(["a", "b"])
    live = it.store.catalog().task(name)
    match rng.choice(["publish", "label", "retire"]):
        case "label":
            version = rng.choice([info.version for info in live.live])
            return it.store.commit(MoveAlias(name, "default", version)).generation
        case "retire" if len(live.live) > 1:
            spare = [info for info in live.live if not live.aliases_of(info.version)]
            if spare:
                return it.store.commit(Retire(name, rng.choice(spare).version)).generation
    it.publish(name, 100 + step, golden=step % 2)
    return it.store.catalog().generation


@pytest.mark.parametrize("tight", [False, True], ids=["unlimited", "evicting"])
def test_readers_never_see_a_mixed_generation(lab, tight):
    it = lab(resident_bytes=lab().size_of_one() if tight else None)
    it.publish("a", 1)
    it.publish("b", 2)
    it.sync()
    done = threading.Event()
    problems: list[BaseException] = []
    answered = [0] * 4

    def read(number: int) -> None:
        newest = 0
        try:
            # Paced: readers that spin starve the writer.
            while not done.wait(0.001) or not answered[number]:
                snapshot = it.follower.snapshot
                assert snapshot.generation >= newest
                newest = snapshot.generation
                refs = ["a", "b:default", "base"]
                found = it.loader.load_served_tasks(snapshot.resolve(refs))
                for ref, task in list(found.items())[:2]:
                    info = snapshot.catalog.resolve(ref)
                    assert (task.name, task.version) == (info.task, info.version)
                    assert task.digest == info.digest
                answered[number] += 1
        except BaseException as error:  # noqa: BLE001 - raised in the test
            problems.append(error)

    readers = [threading.Thread(target=read, args=(number,)) for number in range(4)]
    for reader in readers:
        reader.start()
    rng = random.Random(7)
    for step in range(30):
        generation = change_something(it, rng, step)
        assert it.follower.sync(at_least=generation).generation >= generation
    done.set()
    for reader in readers:
        reader.join(WAIT_SECONDS)
    assert not problems, problems[0]
    assert all(answered)
    assert it.listener.counts["failed"] == 0


def test_concurrent_syncs_load_each_bundle_once(lab):
    it = lab()
    for seed in range(12):
        it.publish(f"task-{seed}", seed, golden=1)
    threads = [threading.Thread(target=it.follower.sync, args=(12,)) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_SECONDS)
    assert it.follower.snapshot.generation == 12
    assert it.listener.counts["loaded"] == 12
    assert sum(it.runner.replayed.values()) == 12


def test_a_slow_bundle_does_not_hold_up_requests(lab):
    entered, release = threading.Event(), threading.Event()

    def replay(task, pixels):
        if task.name == "slow":
            entered.set()
            assert release.wait(WAIT_SECONDS)
        return it.runner.replay(task, pixels)

    it = lab(replay=replay, resident_bytes=lab().size_of_one())
    it.publish("a", 1)
    it.publish("b", 2)
    served = it.sync()
    it.publish("slow", 3, golden=1)
    syncing = threading.Thread(target=it.follower.sync)
    syncing.start()
    assert entered.wait(WAIT_SECONDS)
    assert it.follower.snapshot is served
    assert list(it.load("a", "b")) == ["a", "b"], "an evicted task comes back meanwhile"
    release.set()
    syncing.join(WAIT_SECONDS)
    assert "slow" in it.follower.snapshot.ready_names


def test_the_store_is_checked_before_a_write_only_after_a_failure(lab, outage):
    it = lab()
    it.sync()
    polls = it.follower.polls
    it.follower.check_writable()
    assert it.follower.polls == polls
    with outage:
        it.sync()
        with pytest.raises(StoreUnavailable):
            it.follower.check_writable()
    it.follower.check_writable()
    assert it.follower.store_error is None


def test_purge_by_another_server_is_completed_and_its_digest_reported(lab, monkeypatch):
    it = lab()
    forgotten = []
    it.follower._on_purged = lambda digests, tasks: forgotten.extend((*digests, *tasks))
    purged = it.publish("cifar", 1)
    it.publish("other", 2)
    it.sync()
    other = TaskStore(it.store.objects)
    with monkeypatch.context() as patch:
        # As a process that is killed between the log entry and the deletion.
        patch.setattr(other, "finish_purges", lambda: None)
        other.commit(Purge("cifar"))
    assert other.verify().damages
    it.sync()
    assert forgotten == [purged.digest, "cifar"]
    assert other.verify().damages == ()
    assert it.follower.snapshot.ready_names == ("base", "other")


def test_purge_that_cannot_be_completed_here_is_served_all_the_same(lab, monkeypatch, caplog):
    it = lab()
    it.publish("cifar", 1)
    it.sync()
    TaskStore(it.store.objects).commit(Purge("cifar"))

    def refused():
        raise StoreUnavailable("403, AccessDenied")

    monkeypatch.setattr(it.store, "finish_purges", refused)
    it.sync()
    assert "cifar" not in it.follower.snapshot.catalog.names
    assert "engram tasks gc" in caplog.text


def test_daily_work_is_done_after_the_start_and_again_a_day_later(lab):
    it = lab(poll_seconds=0.001)
    done = threading.Semaphore(0)
    it.follower._daily = done.release
    it.follower.start()
    try:
        assert done.acquire(timeout=WAIT_SECONDS)
        polls = it.follower.polls
        while it.follower.polls < polls + 3:
            it.follower._stopping.wait(0.001)
        assert not done.acquire(blocking=False)
        it.clock.now += 86400
        assert done.acquire(timeout=WAIT_SECONDS)
    finally:
        it.follower.stop()
