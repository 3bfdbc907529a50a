"""Stores copied to other stores, of the same kind or another, and brought back."""

import threading

import pytest
from engram_store import Conflict, MoveAlias, Retire, StoreUnavailable, open_store
from engram_store.layout import BLOBS, LOG, blob_path, log_path

from tests.bundles import bundle
from tests.task_store.conftest import listing


def contents(store, *places):
    """Every object of some kinds, and its bytes."""
    infos = [info for place in places for info in store.objects.named(place).values()]
    return {info.path: store.objects.get(info.path) for info in infos}


@pytest.fixture
def backup(tmp_path):
    return open_store(tmp_path / "backup")


def test_copy_is_the_store_byte_for_byte(store, backup):
    for seed in range(3):
        store.publish("t", bundle(seed))
    store.commit(Retire("t", 1))
    report = store.copy_to(backup)
    assert (report.generation, report.entries, report.bundles) == (4, 4, 3)
    assert report.bundle_bytes == sum(bundle(seed).size_bytes for seed in range(3))
    assert contents(backup, LOG, BLOBS) == contents(store, LOG, BLOBS)
    assert open_store(backup.url).catalog() == store.catalog()
    assert backup.verify().damages == ()


def test_next_copy_brings_only_what_is_new(store, backup):
    store.publish("t", bundle(1))
    store.copy_to(backup)
    store.publish("t", bundle(2))
    store.commit(MoveAlias("t", "canary", 1))
    report = store.copy_to(backup)
    assert (report.entries, report.bundles) == (2, 1)
    report = store.copy_to(backup)
    assert (report.entries, report.bundles, report.damages) == (0, 0, ())


def test_bundle_that_a_collection_moved_is_copied_to_its_new_place(store, backup):
    store.objects.put(blob_path(bundle(1).digest), bundle(1).to_bytes())
    assert len(store.release_blobs({bundle(1).digest: 0})) == 1
    store.publish("t", bundle(1))
    store.copy_to(backup)
    assert backup.read_bundle(bundle(1).digest) == bundle(1)
    assert backup.verify().damages == ()


@pytest.mark.parametrize("steps", range(1, 8))
def test_interrupted_copy_is_the_store_of_an_earlier_moment(open_memory, steps, monkeypatch):
    store, backup = open_memory(), open_store("memory://")
    for seed in range(3):
        store.publish("t", bundle(seed))
    left = [steps]

    def until_it_breaks(write):
        def step(path, data):
            left[0] -= 1
            if left[0] < 0:
                raise StoreUnavailable("The line is down.")
            return write(path, data)

        return step

    with monkeypatch.context() as patch:
        for name in ("put", "create"):
            patch.setattr(backup.objects, name, until_it_breaks(getattr(backup.objects, name)))
        if steps < 7:  # three bundles, three entries, a checkpoint
            with pytest.raises(StoreUnavailable):
                store.copy_to(backup)
        else:
            store.copy_to(backup)
    assert backup.catalog().generation == min(max(steps - 3, 0), 3)
    assert backup.verify().damages == ()
    store.copy_to(backup)
    assert backup.catalog() == store.catalog()


@pytest.mark.parametrize("case", ["another store", "written to", "ahead"])
def test_store_whose_log_is_not_a_prefix_is_not_changed(store, backup, case):
    store.publish("t", bundle(1))
    if case == "another store":
        backup.publish("t", bundle(1))
    else:
        store.copy_to(backup)
        backup.publish("t", bundle(2))
        if case == "written to":
            store.publish("t", bundle(3))
    before = listing(backup)
    says = "only at 1" if case == "ahead" else "not a prefix"
    with pytest.raises(Conflict, match=says):
        store.copy_to(backup)
    assert listing(backup) == before


def test_lost_entries_come_back_from_a_backup(store, reopen, backup):
    for seed in range(3):
        store.publish("t", bundle(seed))
    store.copy_to(backup)
    store.objects.delete(log_path(2))
    damaged = reopen()
    assert backup.copy_to(damaged).entries == 1
    assert reopen().verify().damages == ()


def test_damage_of_the_source_is_reported_and_never_copied_over_valid_objects(
    store, reopen, backup
):
    store.publish("t", bundle(1))
    store.copy_to(backup)
    store.publish("t", bundle(2))
    store.publish("t", bundle(3))
    store.objects.put(blob_path(bundle(1).digest), bundle(1).to_bytes()[:-1] + b"x")
    store.objects.put(blob_path(bundle(2).digest), b"other")
    store.objects.put(log_path(2), b"{")
    report = reopen().copy_to(backup)
    assert {damage.path for damage in report.damages} == {log_path(2)}
    assert backup.read_bundle(bundle(1).digest) == bundle(1)
    assert backup.read_bundle(bundle(3).digest) == bundle(3)


def test_drill(reopen, tmp_path, backup):
    """Publish, back up while publishes go on, lose everything, restore: all that was backed up."""
    store = reopen()
    store.publish("first", bundle(0))
    done = threading.Event()

    def publish():
        writer = reopen()
        for seed in range(1, 13):
            writer.publish(f"t{seed % 3}", bundle(seed))
        done.set()

    writer = threading.Thread(target=publish)
    writer.start()
    generations = []
    while not done.is_set():
        generations.append(reopen().copy_to(backup).generation)
        assert backup.verify().damages == (), "good at any moment"
    writer.join()
    generations.append(reopen().copy_to(backup).generation)
    assert generations[-1] == 13
    assert generations == sorted(generations)

    expected = reopen().catalog()
    for path in listing(store):
        store.objects.delete(path)
    restored = reopen()
    assert restored.catalog().generation == 0
    backup.copy_to(restored)
    again = reopen()
    assert again.catalog() == expected
    assert again.verify().damages == ()
    for digest in expected.by_digest:
        assert again.read_bytes(digest) == backup.read_bytes(digest)
    assert again.publish("after", bundle(99)).generation == 14
