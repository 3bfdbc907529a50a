"""What is purged is gone: from the catalog, the store, caches and copies, also after a crash."""

import itertools
import random

import pytest
from engram_store import (
    BundleCache,
    Correction,
    CorruptStore,
    MoveAlias,
    NothingToRestore,
    Purge,
    Restore,
    Retire,
    RollBack,
    StillAliased,
    StillExtended,
    StoreError,
    UnknownTask,
    UnknownVersion,
    open_store,
)
from engram_store.catalog import Catalog
from engram_store.events import Purged
from engram_store.layout import BLOBS, CORRECTIONS, blob_path, log_path
from engram_store.replay import dump_checkpoint, load_checkpoint, replay

from tests.bundles import bundle
from tests.task_store.conftest import before_entry, listing
from tests.task_store.entries import chain, digest, published


def blobs(store):
    return set(store.objects.named(BLOBS))


def hex_of(made):
    return made.digest.removeprefix("sha256:")


def without_deletion(store, monkeypatch):
    """As a process that is killed right after the log entry."""

    def killed(path):
        raise KeyboardInterrupt

    monkeypatch.setattr(store.objects, "delete", killed)


# --- rules ----------------------------------------------------------------------------------------


def test_task_is_gone_and_its_numbers_are_not_used_again(store, reopen):
    for seed in (1, 2):
        store.publish("t", bundle(seed))
    store.publish("other", bundle(3))
    store.commit(Retire("t", 1))
    event = store.commit(Purge("t"), actor="eve").event
    assert event == Purged(
        task="t", versions=(1, 2), digests=(bundle(1).digest, bundle(2).digest), whole=True
    )
    assert blobs(store) == {hex_of(bundle(3))}
    for reader in (store, reopen()):
        assert reader.catalog().names == ("other",)
        with pytest.raises(UnknownTask, match="'t' was purged"):
            reader.catalog().resolve("t")
        with pytest.raises(UnknownVersion, match="no bundle"):
            reader.read_bytes(bundle(1).digest)
        with pytest.raises(NothingToRestore, match="'t' was purged and cannot be restored"):
            reader.commit(Restore("t"))
        with pytest.raises(NothingToRestore, match="Version 1 of task 't' was purged"):
            reader.commit(Restore("t", 1))
        assert reader.verify().damages == ()
    newest = store.history("t")[0]
    assert (newest.event.kind, newest.stamp.actor) == ("purge", "eve")
    assert store.publish("t", bundle(4)).version == 3
    assert reopen().catalog().resolve("t").version == 3


def test_live_version_is_retired_and_purged_by_one_entry(store):
    for seed in (1, 2, 3):
        store.publish("t", bundle(seed))
    before = store.catalog().generation
    store.commit(Purge("t", (2,)))
    assert store.catalog().generation == before + 1
    assert [v.version for v in store.catalog().task("t").live] == [1, 3]
    with pytest.raises(UnknownVersion, match="Version 2 of task 't' was purged"):
        store.catalog().version("t", 2)
    assert store.commit(RollBack("t")).catalog.resolve("t").version == 1, "it skips version 2"
    assert hex_of(bundle(2)) not in blobs(store)


def test_restored_task_has_no_purged_version(store):
    for seed in (1, 2):
        store.publish("t", bundle(seed))
    store.commit(Retire("t"))
    store.commit(Purge("t", (2,)))
    assert store.commit(Restore("t")).catalog.resolve("t").version == 1


def test_version_with_an_alias_is_kept(store):
    for seed in (1, 2):
        store.publish("t", bundle(seed))
    store.commit(MoveAlias("t", "canary", 1))
    before = listing(store)
    with pytest.raises(StillAliased, match=r"canary.*or purge the whole task"):
        store.commit(Purge("t", (1,)))
    with pytest.raises(StillAliased, match="default"):
        store.commit(Purge("t", (2,)))
    assert listing(store) == before
    assert store.commit(Purge("t")).event.whole


def test_bundle_that_another_version_has_is_kept_until_that_is_purged_too(store):
    store.publish("one", bundle(1))
    store.publish("two", bundle(1))
    assert store.commit(Purge("one")).event.digests == ()
    assert store.read_bundle(bundle(1).digest) == bundle(1)
    assert store.verify().damages == ()
    store.commit(Retire("two"))
    assert blobs(store), "a retired version can be restored"
    store.commit(Purge("two"))
    assert not blobs(store)
    assert store.verify().damages == ()


@pytest.mark.parametrize("retired", [False, True])
def test_parent_is_kept_while_a_child_could_be_served(store, retired):
    store.publish("parent", bundle(1))
    store.publish("child", bundle(2, parents=[bundle(1)]))
    if retired:
        store.commit(Retire("child"))
    with pytest.raises(StillExtended, match="parent@1 is still extended by child@1") as refusal:
        store.commit(Purge("parent"))
    assert refusal.value.names == ("child@1",)
    store.commit(Purge("child"))
    store.commit(Purge("parent"))
    assert not blobs(store)


def test_unknown_names_are_refused_and_a_purge_can_be_repeated(store):
    store.publish("t", bundle(1))
    with pytest.raises(UnknownTask):
        store.commit(Purge("none"))
    with pytest.raises(UnknownVersion, match="never had a version 2"):
        store.commit(Purge("t", (2,)))
    store.commit(Purge("t"))
    assert store.commit(Purge("t")).event is None
    assert store.commit(Purge("t", (1,))).event is None


def test_nothing_is_purged_while_the_log_is_damaged(store, reopen):
    """The damaged entry may have published the same bundle for another task."""
    store.publish("t", bundle(1))
    store.publish("u", bundle(2))
    store.objects.put(log_path(2), b"{")
    before = listing(store)
    with pytest.raises(CorruptStore, match=log_path(2)):
        reopen().commit(Purge("t"))
    assert listing(store) == before


# --- races and crashes ----------------------------------------------------------------------------


def test_same_bytes_can_be_published_again(store, reopen):
    store.publish("t", bundle(1))
    generation = store.commit(Purge("t")).generation
    store.publish("t", bundle(1))
    assert blobs(store) == {f"{hex_of(bundle(1))}-{generation:020d}"}
    assert reopen().read_bundle(bundle(1).digest) == bundle(1)
    assert reopen().verify().damages == ()


def test_purge_between_blob_and_entry_of_a_publish_takes_nothing_from_it(
    store, reopen, monkeypatch
):
    store.publish("one", bundle(1))
    purger = reopen()
    before_entry(store, 2, lambda: purger.commit(Purge("one")), monkeypatch)
    store.publish("two", bundle(1))
    assert reopen().read_bundle(bundle(1).digest) == bundle(1)
    assert reopen().verify().damages == ()


def test_publish_before_the_entry_of_a_purge_keeps_its_bundle(store, reopen, monkeypatch):
    store.publish("one", bundle(1))
    publisher = reopen()
    before_entry(store, 2, lambda: publisher.publish("two", bundle(1)), monkeypatch)
    assert store.commit(Purge("one")).event.digests == ()
    assert reopen().read_bundle(bundle(1).digest) == bundle(1)


@pytest.mark.parametrize("how", ["purge", "gc", "server", "copy"])
def test_interrupted_purge_is_found_and_completed(store, reopen, monkeypatch, how, tmp_path):
    store.publish("t", bundle(1))
    store.correct("t", [Correction(digest=digest(7), labels=("alice smith",))])
    backup = open_store(tmp_path / "backup")
    store.copy_to(backup)
    with monkeypatch.context() as patch:
        without_deletion(store, patch)
        with pytest.raises(KeyboardInterrupt):
            store.commit(Purge("t"))
    assert blobs(store)
    reasons = {damage.path: damage.reason for damage in reopen().verify().damages}
    assert "purged bundle, still present" in reasons.pop(blob_path(bundle(1).digest))
    assert all("corrections of a purged task" in each for each in reasons.values())
    later = reopen()
    match how:
        case "purge":
            assert later.commit(Purge("t")).event is None
        case "gc":
            report = later.collect_garbage()
            assert (len(report.blobs), len(report.corrections)) == (1, 1)
        case "server":
            later.finish_purges()
        case "copy":
            later.copy_to(backup)
            later = backup
    assert not blobs(later)
    assert not later.objects.named(CORRECTIONS)
    assert later.verify().damages == ()


def test_deletion_that_arrives_late_hits_nothing_that_is_published(store, reopen, monkeypatch):
    store.publish("t", bundle(1))
    late = reopen()
    with monkeypatch.context() as patch:
        without_deletion(late, patch)
        with pytest.raises(KeyboardInterrupt):
            late.commit(Purge("t"))
    store.publish("t", bundle(1))
    late.finish_purges()
    assert reopen().read_bundle(bundle(1).digest) == bundle(1)
    assert reopen().verify().damages == ()


# --- copies and caches ----------------------------------------------------------------------------


def test_copy_brings_the_purge_and_deletes_what_the_target_had(store, tmp_path):
    backup = open_store(tmp_path / "backup")
    store.publish("t", bundle(1))
    store.publish("t", bundle(2))
    store.correct("t", [Correction(digest=digest(7), labels=("alice smith",))])
    store.copy_to(backup)
    assert len(blobs(backup)) == 2
    store.commit(Purge("t"))
    store.publish("t", bundle(3))
    store.correct("t", [Correction(digest=digest(8), labels=("bob",))])
    assert store.copy_to(backup).damages == ()
    assert blobs(backup) == {hex_of(bundle(3))}
    (record,) = backup.corrections.read("t").records
    assert record.corrections[0].labels == ("bob",)
    assert backup.verify().damages == ()
    restored = open_store(tmp_path / "restored")
    backup.copy_to(restored)
    assert restored.catalog() == backup.catalog() == store.catalog()


def test_cached_bundles_are_dropped_when_the_purge_is_seen(open_s3, tmp_path):
    folder = tmp_path / "cache"
    store = open_s3(cache=BundleCache(folder, 10**9))
    store.publish("t", bundle(1))
    store.publish("other", bundle(2))
    assert len(list(folder.iterdir())) == 2
    open_s3().commit(Purge("t"))
    store.refresh()
    (kept,) = folder.iterdir()
    assert hex_of(bundle(2)) in kept.name


def test_cached_bundles_are_dropped_at_the_start_of_a_server_that_was_down(open_s3, tmp_path):
    folder = tmp_path / "cache"
    open_s3(cache=BundleCache(folder, 10**9)).publish("t", bundle(1))
    half = folder / f".sha256-{hex_of(bundle(1))}.0123456789ab.part"
    half.write_bytes(b"half of it")
    open_s3(checkpoint_every=1).commit(Purge("t"))
    open_s3(cache=BundleCache(folder, 10**9))
    assert not list(folder.iterdir())


def test_bundle_purged_while_it_is_read_is_not_cached(open_s3, tmp_path, monkeypatch):
    folder = tmp_path / "cache"
    open_s3().publish("t", bundle(1))
    cache = BundleCache(folder, 10**9)
    store, purger, put = open_s3(cache=cache), open_s3(), cache.put

    def purged_meanwhile(digest, data):
        purger.commit(Purge("t"))
        store.refresh()
        put(digest, data)

    monkeypatch.setattr(cache, "put", purged_meanwhile)
    store.read_bytes(bundle(1).digest)
    assert not list(folder.iterdir())


# --- replay ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(20))
def test_any_log_with_purges_replays_alike_and_uses_no_number_twice(open_memory, seed):
    """Random changes: every checkpoint equals the log, and what was purged never returns."""
    dice = random.Random(seed)
    store = open_memory(checkpoint_every=5)
    bundles = [bundle(number) for number in range(4)]
    used: dict[str, set[int]] = {"a": set(), "b": set()}
    for _ in range(60):
        task, version = dice.choice("ab"), dice.randint(1, 8)
        try:
            match dice.randrange(6):
                case 0 | 1:
                    result = store.publish(task, dice.choice(bundles))
                    if result.created:
                        assert result.version not in used[task]
                        used[task].add(result.version)
                case 2:
                    store.commit(Purge(task, dice.choice([None, (version,)])))
                case 3:
                    store.commit(Retire(task, dice.choice([None, version])))
                case 4:
                    store.commit(Restore(task, dice.choice([None, version])))
                case 5:
                    store.commit(dice.choice([RollBack(task), MoveAlias(task, "x", version)]))
        except StoreError:
            continue
        catalog = store.catalog()
        assert load_checkpoint(dump_checkpoint(catalog), catalog.generation) == catalog
        for info in catalog.tasks.values():
            assert info.aliases["default"] in {live.version for live in info.live}
            assert not info.purged.keys() & info.versions.keys()
    catalog = store.catalog()
    assert replay(store.objects, catalog.generation)[0] == catalog == open_memory().catalog()
    assert store.verify().damages == ()
    expected = {catalog.blob_path(d).removeprefix("blobs/sha256/") for d in catalog.by_digest}
    assert blobs(store) >= expected
    assert {name.partition("-")[0] for name in blobs(store)} == {
        d.removeprefix("sha256:") for d in catalog.by_digest
    }


def test_purge_of_a_bundle_that_another_version_has_is_an_invalid_entry():
    events = [
        published("t", 1),
        published("u", 1),
        Purged(task="t", versions=(1,), digests=(digest(1),), whole=True),
        Purged(task="t", versions=(2,), digests=()),
    ]
    log = chain(events)
    catalog, damages = Catalog().read((each.generation, each.to_json()) for each in log)
    assert [damage.path for damage in damages] == [log_path(3), log_path(4)]
    assert catalog.names == ("t", "u")
    assert not catalog.collected


def test_every_part_of_a_log_replays_like_the_whole(open_memory):
    store = open_memory()
    for seed in (1, 2, 3):
        store.publish("t", bundle(seed))
    store.commit(Purge("t", (1, 2)))
    store.commit(Purge("t"))
    store.publish("t", bundle(1))
    data = [(g, store.objects.get(log_path(g))) for g in range(1, 7)]
    whole, _ = Catalog().read(data)
    for first, second in itertools.combinations(range(7), 2):
        parts = data[:first], data[first:second], data[second:]
        catalog = Catalog()
        for part in parts:
            catalog, damages = catalog.read(part)
            assert damages == []
        assert catalog == whole == store.catalog()
