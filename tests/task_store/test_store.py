"""What every store does, on every backend."""

import threading

import pytest
from engram_bundle import InvalidName, MalformedBundle
from engram_store import (
    AlreadyExists,
    MoveAlias,
    PreconditionFailed,
    Publish,
    Retire,
    only_if_absent,
)
from engram_store.layout import log_path

from tests.bundles import bundle, manifest
from tests.task_store.conftest import before_entry, listing


def test_published_bundle_is_found_by_every_reader(store, reopen, tmp_path):
    one = bundle(1, golden=2, description="three animals")
    published = store.publish("team/animals", one)

    assert (published.version, published.generation, published.created) == (1, 1, True)
    for reader in (store, reopen()):
        info = reader.catalog().resolve("team/animals")
        facts = info.facts
        assert (facts.digest, facts.size, info.actor) == (one.digest, one.size_bytes, "ada@lab")
        assert (facts.task_type, facts.classes, facts.memory_tokens) == ("single_label", 3, 2)
        assert facts.description == "three animals"
        assert reader.read_bundle(info.digest) == one
        assert reader.read_bytes(info.digest) == one.to_bytes()


def test_bundle_can_be_an_object_bytes_or_a_path(store, tmp_path):
    path = bundle(3).save(tmp_path / "b.safetensors")
    assert store.publish("t", bundle(1)).version == 1
    assert store.publish("t", bundle(2).to_bytes()).version == 2
    assert store.publish("t", path).version == 3
    assert store.publish("t", str(path)).created is False


def test_two_tasks_may_share_one_blob(store):
    store.publish("a", bundle(1))
    assert store.publish("b", bundle(1)).created is True
    assert sum(path.startswith("blobs/") for path in listing(store)) == 1
    assert [v.ref for v in store.catalog().by_digest[bundle(1).digest]] == ["a@1", "b@1"]


def test_condition_that_does_not_hold_refuses_and_leaves_no_trace(store, reopen):
    def nothing_happened(catalog):
        if catalog.generation != 1:
            raise PreconditionFailed(f"at generation {catalog.generation}, not at the expected 1")

    store.publish("t", bundle(1))
    assert store.commit(Publish("t", bundle(1)), condition=nothing_happened).created is False
    reopen().publish("t", bundle(2))
    before = listing(store)
    for change in (Publish("t", bundle(3)), Retire("t")):
        with pytest.raises(PreconditionFailed, match="at generation 2, not at the expected 1"):
            store.commit(change, condition=nothing_happened)
    assert listing(store) == before


def test_condition_is_checked_again_when_another_writer_was_first(store, reopen, monkeypatch):
    store.publish("t", bundle(1))
    other, seen = reopen(), []

    def still_the_first(catalog):
        seen.append(catalog.generation)
        if catalog.resolve("t").version != 1:
            raise PreconditionFailed("moved on")

    before_entry(store, 2, lambda: other.publish("t", bundle(2)), monkeypatch)
    with pytest.raises(PreconditionFailed):
        store.commit(MoveAlias("t", "canary", 1), condition=still_the_first)
    assert seen == [1, 2]
    assert "canary" not in store.catalog().task("t").aliases


@pytest.mark.parametrize(
    "name", ["base", "", "Upper", "a b", "-a", "a/b/c", "/a", "a/", "x" * 64, "a@1", "é", "a\n"]
)
def test_unusable_task_names_leave_no_trace(store, name):
    with pytest.raises(InvalidName):
        store.publish(name, bundle(1))
    assert listing(store) == {}


@pytest.mark.parametrize("alias", ["", "3", "Canary", "a/b", "x" * 64])
def test_unusable_aliases_leave_no_trace(store, alias):
    with pytest.raises(InvalidName):
        store.publish("t", bundle(1), aliases=[alias])
    assert listing(store) == {}


def test_malformed_bundle_leaves_no_trace(store):
    with pytest.raises(MalformedBundle):
        store.publish("t", bundle(1).to_bytes()[:-1])
    assert listing(store) == {}


def test_history_lists_events_and_actors_newest_first(store, reopen):
    store.publish("a", bundle(1))
    store.publish("b", bundle(2), actor="eve@lab")
    store.commit(MoveAlias("a", "stable", 1))
    store.commit(Retire("b"))
    entries = reopen().history()
    assert [(e.generation, e.event.kind, e.event.task) for e in entries] == [
        (4, "retire", "b"),
        (3, "alias", "a"),
        (2, "publish", "b"),
        (1, "publish", "a"),
    ]
    assert [e.stamp.actor for e in entries] == ["ada@lab", "ada@lab", "eve@lab", "ada@lab"]
    assert [e.generation for e in store.history("a", limit=1)] == [3]
    assert all(e.stamp.time.endswith("Z") for e in entries)


def test_history_of_a_task_reads_only_the_entries_that_changed_it(reopen, monkeypatch):
    store = reopen()
    store.publish("seldom", bundle(0))
    for seed in range(1, 12):
        store.publish("often", bundle(seed))
    store.commit(Retire("seldom"))
    reader = reopen()
    get, paths = reader.objects.get, []
    monkeypatch.setattr(reader.objects, "get", lambda path: (paths.append(path), get(path))[1])
    assert [e.generation for e in reader.history("seldom")] == [13, 1]
    # And one that is not there: nothing is new.
    assert sorted(paths) == [log_path(1), log_path(13), log_path(14)]
    assert [e.generation for e in reader.history("often", limit=3)] == [12, 11, 10]
    assert reader.history("unknown") == []


def test_snapshot_does_not_move_and_refresh_catches_up(store, reopen):
    other = reopen()
    held = other.catalog()
    store.publish("t", bundle(1))
    assert held.names == ()
    assert other.catalog(refresh=False).generation == 0
    assert other.refresh().generation == 1
    assert held.generation == 0


def test_racing_writers_lose_nothing(reopen):
    stores = [reopen(actor=f"writer-{n}") for n in range(8)]
    barrier = threading.Barrier(len(stores))
    published = []

    def write(number):
        barrier.wait()
        bundles = [bundle(1000 * number + i) for i in range(5)]
        published.extend((stores[number].publish("t", b).version, b.digest) for b in bundles)

    threads = [threading.Thread(target=write, args=(n,)) for n in range(len(stores))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(version for version, _ in published) == list(range(1, 41)), (
        "a thread failed or lost"
    )
    catalog = reopen().catalog()
    assert catalog.generation == 40
    for version, digest in published:
        assert catalog.resolve(f"t@{version}").digest == digest


def test_threads_may_share_one_store(store):
    def write(number):
        for i in range(4):
            store.publish(f"t{number}", bundle(100 * number + i))

    threads = [threading.Thread(target=write, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert store.catalog().generation == 16
    assert all(task.aliases["default"] == 4 for task in store.catalog().tasks.values())


def test_only_one_of_racing_first_publishes_succeeds(reopen):
    stores = [reopen() for _ in range(8)]
    barrier = threading.Barrier(len(stores))
    outcomes = []

    def write(number):
        barrier.wait()
        try:
            change = Publish("t", bundle(number))
            stores[number].commit(change, condition=only_if_absent("t"))
            outcomes.append("created")
        except AlreadyExists:
            outcomes.append("refused")

    threads = [threading.Thread(target=write, args=(n,)) for n in range(len(stores))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(outcomes) == ["created"] + ["refused"] * 7


def test_unlabelled_regression_task_is_ordinary(store):
    made = bundle(1, task_type="regression", labels=())
    store.publish("t", made)
    assert store.catalog().resolve("t").facts.task_type == "regression"
    assert store.read_bundle(made.digest).manifest == manifest(task_type="regression", labels=())
