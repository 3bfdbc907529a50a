"""Damage in a store is found, and garbage is collected."""

import re
from datetime import UTC, datetime, timedelta

import pytest
from engram_store import CorruptStore, Restore, Retire
from engram_store.layout import blob_path, log_path

from tests.bundles import bundle
from tests.task_store.conftest import before_entry, listing


def test_foreign_objects_are_reported_and_harmless(store, reopen):
    store.publish("t", bundle(1))
    for path in ("README", "log/notes.txt", "log/1.json", "blobs/sha256/short", "checkpoints/x"):
        store.objects.put(path, b"hello")
    store.objects.put("log/99999999999999999999.json", b"hello")
    reader = reopen()
    reader.publish("t", bundle(2))
    assert reader.catalog().resolve("t").version == 2
    assert {p.path for p in reader.find_damage()} == {
        "README",
        "blobs/sha256/short",
        "checkpoints/x",
        "log/1.json",
        "log/99999999999999999999.json",
        "log/notes.txt",
    }


def test_damaged_log_entry_is_skipped_and_uses_its_generation(store, reopen):
    for seed in (1, 2, 3):
        store.publish("t", bundle(seed), aliases=["default"] if seed < 3 else [])
    store.objects.put("log/00000000000000000002.json", b'{"format": 1, "gen')
    reader = reopen()
    assert [v.version for v in reader.catalog().task("t").live] == [1, 3]
    assert reader.catalog().resolve("t").version == 1
    assert reader.publish("t", bundle(4)).generation == 4
    (damage,) = reader.find_damage()
    assert damage.path == "log/00000000000000000002.json"
    assert damage.reason.startswith("damaged log entry, skipped")


def test_missing_log_entry_is_reported_and_not_refilled(store, reopen):
    for seed in (1, 2, 3):
        store.publish("t", bundle(seed))
    store.objects.delete("log/00000000000000000002.json")
    reader = reopen()
    assert reader.publish("t", bundle(4)).generation == 4
    assert [p.path for p in reader.find_damage()] == ["log/00000000000000000002.json"]


def test_store_reports_nothing_when_all_is_well(store):
    store.publish("t", bundle(1))
    store.commit(Retire("t"))
    assert store.find_damage() == []


def test_lost_or_changed_bundle_is_reported_and_repaired_by_publishing_it_again(store):
    store.publish("t", bundle(1))
    digest = bundle(1).digest
    path = blob_path(digest)
    store.objects.put(path, b"other bytes")
    with pytest.raises(CorruptStore, match=f"{digest}.*damaged or replaced"):
        store.read_bundle(digest)
    assert "instead of" in store.find_damage()[0].reason
    store.objects.delete(path)
    with pytest.raises(CorruptStore, match="missing"):
        store.read_bytes(digest)
    assert "missing" in store.find_damage()[0].reason
    assert store.publish("t", bundle(1)).created is False
    assert store.read_bundle(digest) == bundle(1)
    assert store.find_damage() == []


def test_garbage_collection_takes_only_old_unpublished_bundles(store):
    store.publish("t", bundle(1))
    store.publish("t", bundle(2))
    store.commit(Retire("t", 1))
    orphan = "blobs/sha256/" + "0" * 64
    store.objects.put(orphan, b"never published")
    before = listing(store)

    young = store.collect_garbage(timedelta(hours=1))
    assert (young.blobs, young.waiting) == ((), (orphan,))
    rehearsal = store.collect_garbage(timedelta(seconds=-5), dry_run=True)
    assert (rehearsal.blobs, rehearsal.freed_bytes) == ((orphan,), 15)
    assert listing(store) == before
    report = store.collect_garbage(timedelta(seconds=-5))
    assert report.blobs == (orphan,)
    assert before.keys() - listing(store).keys() == {orphan}
    assert store.commit(Restore("t", 1)).catalog.resolve("t@1").digest == bundle(1).digest


def test_garbage_collection_keeps_the_newest_checkpoints(reopen):
    store = reopen(checkpoint_every=1)
    for seed in range(5):
        store.publish("t", bundle(seed))
    report = store.collect_garbage()
    assert [p[-6:-5] for p in report.checkpoints] == ["1", "2"]
    assert reopen().catalog() == store.catalog()


def test_bundle_collected_during_its_publish_is_written_again(store, reopen, monkeypatch):
    collector = reopen()
    collected = []

    def collect():
        collected.extend(collector.collect_garbage(timedelta(seconds=-5)).blobs)

    before_entry(store, 1, collect, monkeypatch)
    digest = bundle(1).digest
    assert store.publish("t", bundle(1)).generation == 2, "the collection is a log entry too"
    assert collected == [blob_path(digest)], "it came between blob and log entry"
    assert store.catalog().blob_path(digest) == blob_path(digest, collected=1)
    for reader in (store, collector, reopen()):
        assert reader.read_bundle(digest) == bundle(1)
    assert reopen().verify().damages == ()


def test_bundle_published_during_a_collection_is_kept(store, reopen, monkeypatch):
    orphan = bundle(1)
    store.objects.put(blob_path(orphan.digest), orphan.to_bytes())
    collector = reopen()
    refresh, calls = collector.refresh, []

    def published_meanwhile():
        catalog = refresh()
        calls.append(1)
        if len(calls) == 1:
            store.publish("t", orphan)
        return catalog

    monkeypatch.setattr(collector, "refresh", published_meanwhile)
    assert collector.collect_garbage(timedelta(seconds=-5)).blobs == ()
    assert store.read_bundle(orphan.digest) == orphan


def test_age_is_counted_on_the_stores_clock(open_memory):
    """A collector whose own clock is a year ahead or behind takes the same."""
    for days in (-365, 365):
        collector = open_memory(clock=lambda: datetime.now(UTC) + timedelta(days=days))  # noqa: B023
        collector.objects.put("blobs/sha256/" + "0" * 64, b"being published right now")
        report = collector.collect_garbage(timedelta(hours=1))
        assert (report.blobs, len(report.waiting)) == ((), 1)


@pytest.mark.parametrize("damage", ["missing", "cut off", "another digest", "not chained"])
def test_nothing_is_collected_while_the_log_is_damaged(store, reopen, damage):
    """A past bug: the entry was skipped, and its bundle was deleted as garbage."""
    for seed in (1, 2, 3):
        store.publish("t", bundle(seed))
    path = log_path(2)
    data = store.objects.get(path)
    match damage:
        case "missing":
            store.objects.delete(path)
        case "cut off":
            store.objects.put(path, data[:50])
        case "another digest":
            digest = bundle(2).digest.encode()
            store.objects.put(path, data.replace(digest, b"sha256:" + b"0" * 64))
        case "not chained":
            store.objects.put(path, re.sub(rb'"previous":"[^"]*",', b"", data))
    reader = reopen()
    before = listing(reader)
    with pytest.raises(CorruptStore, match=f"repair the log before.*{path}") as refusal:
        reader.collect_garbage(timedelta(seconds=-5))
    assert path in refusal.value.names
    assert listing(reader) == before
    assert reader.catalog().resolve("t").version == 3, "reading goes on"
    assert reader.publish("t", bundle(4)).generation == 4, "and so does publishing"
    store.objects.put(path, data)
    assert reopen().collect_garbage(timedelta(seconds=-5)).blobs == ()


def test_damage_that_a_checkpoint_hides_stops_a_collection_too(reopen):
    store = reopen(checkpoint_every=3)
    for seed in (1, 2, 3):
        store.publish("t", bundle(seed))
    store.objects.delete(log_path(2))
    reader = reopen()
    assert reader.catalog().version("t", 2).digest == bundle(2).digest, "from the checkpoint"
    with pytest.raises(CorruptStore, match=log_path(2)):
        reader.collect_garbage(timedelta(seconds=-5))
