"""The live replicas and their generations, on a clock that a test sets."""

from datetime import UTC, datetime, timedelta

import pytest
from engram_server.engine.replicas import MISSED, Replicas
from engram_store import Heartbeat, HeartbeatInfo, StoreUnavailable

from tests.serving import MetricListener

INTERVAL = 5.0


class Store:
    """The heartbeats of a store with a clock of its own, which is years off."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self.away = False
        self.kept: dict[str, tuple[Heartbeat, float]] = {}
        self.reads: list[list[str]] = []

    def _check(self) -> None:
        if self.away:
            raise StoreUnavailable("The store is away.")

    def write(self, beat: Heartbeat) -> None:
        self._check()
        self.kept[beat.id] = beat, self.seconds

    def listing(self) -> list[HeartbeatInfo]:
        self._check()
        epoch = datetime(1999, 1, 1, tzinfo=UTC)
        return [
            HeartbeatInfo(id, epoch + timedelta(seconds=int(at)))
            for id, (_, at) in self.kept.items()
        ]

    def read(self, ids):
        self._check()
        self.reads.append(list(ids))
        return [self.kept[id][0] for id in ids if id in self.kept]

    def remove(self, id: str) -> None:
        self._check()
        self.kept.pop(id, None)


class Machine(MetricListener):
    """A server of the store, whose generation a test sets."""

    def __init__(self, store: Store, name: str, interval: float = INTERVAL) -> None:
        self.store = store
        self.name = name
        self.interval = interval
        self.generation = 1
        self.sent = 0
        offset = hash(name) % 1000  # no two machines agree on the time
        self.replicas = Replicas(store, self.describe, self, lambda: offset + store.seconds)

    def heartbeat_age_seconds(self, _: float) -> None:
        self.sent += 1

    def describe(self) -> Heartbeat:
        return Heartbeat(
            id=self.name,
            generation=self.generation,
            interval=self.interval,
            hostname=self.name,
            address=None,
            started="2026-01-31T12:00:00.000Z",
            version="1",
            backbone="vit",
            fingerprint="f",
        )

    def seen(self) -> dict[str, int]:
        return {each.beat.id: each.beat.generation for each in self.replicas.live()}


@pytest.fixture
def store() -> Store:
    return Store()


@pytest.fixture
def ours(store) -> Machine:
    machine = Machine(store, "a")
    assert machine.replicas.beat()
    return machine


@pytest.fixture
def theirs(store) -> Machine:
    machine = Machine(store, "b")
    assert machine.replicas.beat()
    return machine


def test_each_sees_what_the_other_serves(ours, theirs):
    theirs.generation = 7
    assert ours.seen() == {"a": 1, "b": 1}
    theirs.replicas.beat()
    assert ours.seen() == {"a": 1, "b": 7}
    assert theirs.seen() == {"a": 1, "b": 7}
    assert [each.me for each in ours.replicas.live()] == [True, False]


def test_our_own_generation_is_what_we_serve_now(ours):
    ours.generation = 9
    assert ours.seen() == {"a": 9}


def test_one_that_missed_several_heartbeats_is_gone(ours, theirs, store):
    store.seconds = MISSED * INTERVAL - 1
    assert set(ours.seen()) == {"a", "b"}
    (_, other) = ours.replicas.live()
    assert other.age_seconds == pytest.approx(store.seconds, abs=1.0)
    store.seconds = MISSED * INTERVAL + 2
    assert set(ours.seen()) == {"a"}
    theirs.replicas.beat()
    assert set(ours.seen()) == {"a", "b"}


def test_a_replica_with_a_longer_interval_is_judged_by_it(ours, store):
    slow = Machine(store, "slow", interval=30.0)
    slow.replicas.beat()
    store.seconds = 60.0
    assert set(ours.seen()) == {"a", "slow"}
    store.seconds = 95.0
    assert set(ours.seen()) == {"a"}


def test_those_long_gone_are_not_even_read(ours, store):
    for number in range(20):
        Machine(store, f"gone-{number}").replicas.beat()
    for seconds in (INTERVAL, 3590.0, 3600.0):
        store.seconds = seconds
        ours.replicas.beat()
    assert set(ours.seen()) == {"a"}
    assert store.reads[-1] == []


def test_after_an_outage_the_others_get_time_to_say_that_they_are_there(ours, theirs, store):
    store.away = True
    for second in range(1, 61):
        store.seconds = float(second)
        assert not ours.replicas.beat()
    with pytest.raises(StoreUnavailable):
        ours.replicas.live()
    store.away = False
    assert ours.replicas.beat()
    store.seconds += 1
    ours.replicas.beat()  # because a change came in the meantime
    assert set(ours.seen()) == {"a", "b"}
    store.seconds += INTERVAL + 1
    assert set(ours.seen()) == {"a"}, "it had its time"


def test_an_outage_is_no_heartbeat(ours, store):
    store.away = True
    store.seconds = 1.0
    assert not ours.replicas.beat()
    assert ours.sent == 1


def test_a_replica_whose_heartbeat_was_removed_writes_it_again(ours, theirs, store):
    store.remove("a")
    assert set(ours.seen()) == {"a"}, "there is nothing to tell the age of others by"
    store.seconds = INTERVAL + 1
    assert set(ours.seen()) == {"a", "b"}


class Real(Machine):
    """With the time that really passes."""

    def __init__(self, store: Store, name: str) -> None:
        super().__init__(store, name, interval=60.0)
        self.replicas = Replicas(store, self.describe, self)


def test_a_new_generation_and_leaving_are_announced_at_once(store, until):
    machine = Real(store, "a")
    machine.replicas.beat()
    machine.replicas.start()
    machine.generation = 5
    machine.replicas.wake()
    until(lambda: store.kept["a"][0].generation == 5)
    machine.replicas.stop()
    assert store.kept == {}


def test_leaving_while_the_store_is_away_is_no_error(store):
    machine = Real(store, "a")
    machine.replicas.beat()
    machine.replicas.start()
    store.away = True
    machine.replicas.stop()
    assert set(store.kept) == {"a"}


class SlowWriter(Store):
    """Takes long to write, and writes at the end of it."""

    def write(self, beat: Heartbeat) -> None:
        self.seconds += 14.0
        super().write(beat)


def test_a_slow_write_does_not_hide_other_replicas():
    store = SlowWriter()
    ours, theirs = Machine(store, "a"), Machine(store, "b")
    theirs.replicas.beat()
    ours.replicas.beat()
    assert {each.beat.id: each.age_seconds for each in ours.replicas.live()} == {
        "a": 0.0,
        "b": 14.0,
    }


def test_a_write_of_unknown_outcome_ages_no_replica(ours, theirs, store):
    store.seconds = 14.0
    store.write(ours.describe())  # it arrived, and the answer did not
    store.away = True
    assert not ours.replicas.beat()
    store.away = False
    assert set(ours.seen()) == {"a", "b"}


def test_an_unexpected_error_does_not_stop_the_heart(monkeypatch, until):
    """A replica without heartbeats is not waited for."""
    machine = Machine(Store(), "a", interval=0.01)
    write, raised = machine.store.write, []

    def wrong_once(beat):
        if not raised:
            raised.append(True)
            raise ValueError("an unexpected error")
        write(beat)

    monkeypatch.setattr(machine.store, "write", wrong_once)
    machine.replicas.start()
    until(lambda: machine.sent > 0)
    assert raised
    assert machine.replicas.alive
    machine.replicas.stop()
