"""Corrections of tasks in the store."""

import hashlib
import json
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta

import pytest
from engram_store import (
    Correction,
    CorrectionLimits,
    CorrectionsFull,
    Purge,
    TaskStore,
    UnknownTask,
    newest_of,
    open_store,
)
from engram_store.corrections import CorrectionRecord
from engram_store.layout import CORRECTIONS, correction_path

from tests.bundles import bundle


@pytest.fixture
def store(tmp_path):
    store = open_store(tmp_path, actor="ada@lab")
    store.publish("pets", bundle(1))
    store.publish("team/pets", bundle(2))
    return store


def digest(number):
    return f"sha256:{number:064x}"


def digests_of(store, task="pets"):
    """The last digit of each image that has a correction, newest first."""
    return [digest[-1] for digest in newest_of(store.corrections.read(task).records)]


def correction(number, *labels):
    return Correction(digest=f"sha256:{number:064x}", labels=labels)


def test_records_have_the_actor_the_version_and_the_order(store):
    store.correct("pets", [correction(1, "cat"), correction(2, "dog")], actor="bob")
    store.publish("pets", bundle(3))
    store.correct("pets", [correction(1, "dog")])
    second, first = store.corrections.read("pets").records
    assert (first.actor, first.version, second.actor, second.version) == ("bob", 1, "ada@lab", 2)
    newest = newest_of([second, first])
    assert [(digest[-1], one.labels) for digest, (_, one) in newest.items()] == [
        ("1", ("dog",)),
        ("2", ("dog",)),
    ]


def test_a_task_sees_its_own_alone(store):
    store.publish("team", bundle(4))
    store.correct("team/pets", [correction(1, "cat")])
    store.correct("pets", [correction(2, "cat")])
    assert not store.corrections.read("team").total
    assert [one.task for one in store.corrections.read("team/pets").records] == ["team/pets"]
    with pytest.raises(UnknownTask):
        store.correct("unknown", [correction(1, "cat")])


def test_none_is_lost_when_many_write_at_once(store):
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda n: store.correct("pets", [correction(n, "cat")]), range(40)))
    assert len(newest_of(store.corrections.read("pets").records)) == 40


def test_they_are_neither_damage_nor_garbage_and_a_damaged_one_is_skipped(store, tmp_path):
    store.correct("pets", [correction(1, "cat")])
    store.correct("pets", [correction(2, "cat")])
    (first, *_) = sorted((tmp_path / "corrections" / "pets").iterdir())
    assert not store.find_damage()
    store.collect_garbage()
    assert first.exists()
    first.write_text("{")
    page = store.corrections.read("pets")
    assert [one.corrections[0].digest[-1] for one in page.records] == ["2"]
    assert (page.total, page.unreadable) == (2, 1)


# --- integrity ------------------------------------------------------------------------------------


@pytest.mark.parametrize("where", [0, 3, 20, 78, 90, 150, -90, -3])
def test_any_flipped_bit_is_found(store, tmp_path, where):
    """A past bug: the record was skipped, and verification said nothing."""
    store.correct("pets", [correction(1, "cat"), correction(2, "dog")])
    assert (store.verify().corrections, store.verify().damages) == (1, ())
    (path,) = (tmp_path / "corrections" / "pets").iterdir()
    data = bytearray(path.read_bytes())
    data[where] ^= 1
    path.write_bytes(data)
    (damage,) = store.verify().damages
    assert damage.path == correction_path("pets", 1)
    assert store.corrections.read("pets").unreadable == 1


def test_records_from_before_checksums_stay_readable(store):
    old = {"format": 1, "time": "2025-01-31T12:00:00.000Z", "actor": "ada", "task": "pets"}
    old |= {"version": 1, "corrections": [{"digest": digest(1), "labels": ["cat"]}]}
    store.objects.put(correction_path("pets", 1), json.dumps(old).encode())
    assert digests_of(store) == ["1"]
    assert store.verify().damages == ()
    store.correct("pets", [correction(2, "cat")])
    store.corrections.remove("pets", [digest(1)])
    assert digests_of(store) == ["2"]


def test_checksum_is_that_of_the_other_bytes(store):
    store.correct("pets", [correction(1, "cat")])
    data = store.objects.get(correction_path("pets", 1))
    stated = json.loads(data)["sha256"]
    rest = data.replace(f'"sha256":"{stated}",'.encode(), b"", 1)
    assert hashlib.sha256(rest).hexdigest() == stated


# --- removal --------------------------------------------------------------------------------------


def test_removed_corrections_leave_no_digest_and_no_label(store, tmp_path):
    store.correct("pets", [correction(1, "alice smith"), correction(2, "dog")])
    store.correct("pets", [correction(1, "bob")])
    assert store.corrections.remove("pets", [digest(1)]) == 2
    assert digests_of(store) == ["2"]
    everything = b"".join(p.read_bytes() for p in tmp_path.rglob("*") if p.is_file())
    assert digest(1).encode() not in everything
    assert b"alice" not in everything
    assert store.corrections.remove("pets", [digest(1)]) == 0
    assert store.corrections.remove("pets") == 1
    assert digests_of(store) == []
    assert store.verify().damages == ()
    store.correct("pets", [correction(3, "cat")])
    assert correction_path("pets", 3) in {i.path for i in store.objects.listing("corrections")}


def test_damaged_record_that_contains_the_digest_is_removed(store):
    store.correct("pets", [correction(1, "cat")])
    path = correction_path("pets", 1)
    store.objects.put(path, store.objects.get(path)[:-5])
    assert store.corrections.remove("pets", [digest(2)]) == 0
    assert store.corrections.read("pets").unreadable == 1
    store.corrections.remove("pets", [digest(1)])
    assert store.corrections.read("pets").unreadable == 0
    assert store.verify().damages == ()


def test_removals_at_once_all_hold(store, tmp_path):
    store.correct("pets", [correction(number, "cat") for number in range(8)])
    stores = [open_store(tmp_path) for _ in range(4)]

    def remove(number):
        return stores[number % 4].corrections.remove("pets", [digest(number)])

    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(remove, range(7))) == [1] * 7
    assert digests_of(store) == ["7"]
    assert store.verify().damages == ()


def test_interrupted_removal_is_found_and_completed(store, monkeypatch):
    store.correct("pets", [correction(1, "cat"), correction(2, "cat")])
    with monkeypatch.context() as patch:

        def killed(path, data):
            raise KeyboardInterrupt

        patch.setattr(store.objects, "put", killed)
        with pytest.raises(KeyboardInterrupt):
            store.corrections.remove("pets", [digest(1)])
    assert digests_of(store) == ["2"]
    (damage,) = store.verify().damages
    assert "remove them again, or run gc" in damage.reason
    assert store.collect_garbage().corrections == (correction_path("pets", 1),)
    assert store.verify().damages == ()


def test_removal_reaches_copies_and_does_not_come_back_from_them(store, tmp_path):
    backup = open_store(tmp_path / "backup")
    store.correct("pets", [correction(1, "cat"), correction(2, "cat")])
    store.copy_to(backup)
    store.corrections.remove("pets", [digest(1)])
    backup.copy_to(store)
    assert digests_of(store) == ["2"]
    store.copy_to(backup)
    assert digests_of(backup) == ["2"]
    everything = b"".join(map(backup.objects.get, (i.path for i in backup.objects.listing(""))))
    assert digest(1).encode() not in everything
    assert backup.verify().damages == ()


def test_correction_that_a_purge_overtook_is_not_kept(store, tmp_path, monkeypatch):
    purger, create = open_store(tmp_path), store.objects.create

    def purged_meanwhile(path, data):
        if CORRECTIONS.name_at(path):
            purger.commit(Purge("pets"))
        return create(path, data)

    monkeypatch.setattr(store.objects, "create", purged_meanwhile)
    store.correct("pets", [correction(1, "cat")])
    assert not store.objects.named(CORRECTIONS)


# --- limits ---------------------------------------------------------------------------------------


def test_corrections_are_limited_by_photos_and_bytes(store, tmp_path):
    limits = CorrectionLimits(photos=3, nbytes=10_000)
    store.correct("pets", [correction(1, "cat"), correction(2, "cat")], limits=limits)
    other = open_store(tmp_path)
    other.correct("pets", [correction(3, "cat")], limits=limits)
    with pytest.raises(CorrectionsFull, match="4 photos, and the limit is 3"):
        store.correct("pets", [correction(4, "cat")], limits=limits)
    store.corrections.remove("pets", [digest(2)])
    other.correct("pets", [correction(4, "cat")], limits=limits)
    long = correction(5, "x" * 10_000)
    with pytest.raises(CorrectionsFull, match=r"bytes, and the limit is 10,000"):
        store.correct("team/pets", [long], limits=limits)


def test_counting_reads_only_what_is_new(store, monkeypatch):
    limits = CorrectionLimits(photos=100, nbytes=10**6)
    for number in range(10):
        store.correct("pets", [correction(number, "cat")], limits=limits)
    read, get_many = [], store.objects.get_many
    monkeypatch.setattr(
        store.objects, "get_many", lambda paths: read.extend(paths) or get_many(paths)
    )
    store.correct("pets", [correction(10, "cat")], limits=limits)
    assert read == [correction_path("pets", 10)]


def test_a_page_reads_only_its_records(store, monkeypatch):
    for number in range(9):
        store.correct("pets", [correction(number, "cat")])
    read, get_many = [], store.objects.get_many
    monkeypatch.setattr(
        store.objects, "get_many", lambda paths: read.extend(paths) or get_many(paths)
    )
    page = store.corrections.read("pets", offset=1, limit=2)
    assert [record.corrections[0].digest[-1] for record in page.records] == ["7", "6"]
    assert page.total == 9
    assert read == [correction_path("pets", 8), correction_path("pets", 7)]


def test_old_corrections_are_deleted_and_their_numbers_stay_used(tmp_path):
    now = datetime(2026, 1, 1, tzinfo=UTC)
    store = TaskStore(open_store(tmp_path).objects, clock=lambda: now)
    store.publish("pets", bundle(1))
    for number in range(1, 4):
        store.correct("pets", [correction(number, "cat")])
        now += timedelta(days=10)
    month = timedelta(days=25)
    assert len(store.collect_garbage(corrections_older_than=month, dry_run=True).corrections) == 1
    assert digests_of(store) == ["3", "2", "1"]
    assert len(store.collect_garbage(corrections_older_than=month).corrections) == 1
    assert digests_of(store) == ["3", "2"]
    assert len(store.delete_old_corrections(timedelta(0))) == 2
    assert digests_of(store) == []
    assert store.verify().damages == ()
    store.correct("pets", [correction(4, "cat")])
    assert CorrectionRecord.from_json(store.objects.get(correction_path("pets", 4))) is not None
