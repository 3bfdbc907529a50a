"""What every store does, on every backend."""

import threading
from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest

from task_store import (
    AlreadyExists,
    CorruptStore,
    IncompatibleBundle,
    InvalidName,
    MalformedBundle,
    MissingParent,
    NothingToRestore,
    NothingToRollBack,
    PreconditionFailed,
    StillExtended,
    StillLabelled,
    UnknownLabel,
    UnknownTask,
    UnknownVersion,
)
from tests.bundles import OTHER_FINGERPRINT, bundle, manifest
from tests.task_store.conftest import listing


def test_published_bundle_is_found_by_every_reader(store, reopen, tmp_path):
    one = bundle(1, golden=2, description="three animals")
    published = store.publish("team/animals", one)

    assert (published.version, published.generation, published.created) == (1, 1, True)
    for reader in (store, reopen()):
        info = reader.catalog().resolve("team/animals")
        facts = info.facts
        assert (facts.digest, facts.size, info.actor) == (one.digest, one.size_bytes, "ada@lab")
        assert (facts.problem, facts.classes, facts.memory_tokens) == ("single_label", 3, 2)
        assert facts.description == "three animals"
        assert reader.read_bundle(info.digest) == one
        assert reader.read_bytes(info.digest) == one.to_bytes()


def test_bundle_may_be_given_as_object_bytes_or_path(store, tmp_path):
    path = bundle(3).save(tmp_path / "b.safetensors")
    assert store.publish("t", bundle(1)).version == 1
    assert store.publish("t", bundle(2).to_bytes()).version == 2
    assert store.publish("t", path).version == 3
    assert store.publish("t", str(path)).created is False


def test_versions_count_up_and_default_follows(store):
    for expected in (1, 2, 3):
        assert store.publish("t", bundle(expected)).version == expected
    catalog = store.catalog()
    assert catalog.resolve("t").version == 3
    assert catalog.resolve("t@2").digest == bundle(2).digest
    assert [v.version for v in catalog.task("t").live] == [1, 2, 3]
    assert catalog.names == ("t",)


def test_other_labels_leave_default_alone_except_on_the_first_version(store):
    store.publish("t", bundle(1), labels=["canary"])
    assert dict(store.catalog().task("t").labels) == {"default": 1, "canary": 1}
    store.publish("t", bundle(2), labels=["canary"])
    assert dict(store.catalog().task("t").labels) == {"default": 1, "canary": 2}
    store.publish("t", bundle(3), labels=[])
    assert dict(store.catalog().task("t").labels) == {"default": 1, "canary": 2}


def test_same_bytes_again_make_no_version_and_no_entry(store):
    first = store.publish("t", bundle(1))
    before = listing(store)
    again = store.publish("t", bundle(1))
    assert (again.version, again.created, again.generation) == (1, False, first.generation)
    assert listing(store) == before


def test_same_bytes_again_move_the_labels_asked_for(store):
    store.publish("t", bundle(1))
    store.publish("t", bundle(2))
    again = store.publish("t", bundle(1), labels=["default", "stable"])
    assert (again.version, again.created, again.generation) == (1, False, 3)
    assert dict(store.catalog().task("t").labels) == {"default": 1, "stable": 1}


def test_two_tasks_may_share_one_blob(store):
    store.publish("a", bundle(1))
    assert store.publish("b", bundle(1)).created is True
    assert sum(path.startswith("blobs/") for path in listing(store)) == 1
    assert [v.ref for v in store.catalog().by_digest[bundle(1).digest]] == ["a@1", "b@1"]


def test_only_if_absent_refuses_a_second_publish(store):
    store.publish("t", bundle(1), only_if_absent=True)
    before = listing(store)
    with pytest.raises(AlreadyExists, match="Task 't' exists already"):
        store.publish("t", bundle(2), only_if_absent=True)
    assert listing(store) == before


def test_expected_generation_refuses_when_the_catalog_moved(store, reopen):
    store.publish("t", bundle(1), expected_generation=0)
    reopen().publish("t", bundle(2))
    before = listing(store)
    with pytest.raises(PreconditionFailed, match="at generation 2, not at the expected 1"):
        store.publish("t", bundle(3), expected_generation=1)
    assert listing(store) == before


@pytest.mark.parametrize(
    "name", ["base", "", "Upper", "a b", "-a", "a/b/c", "/a", "a/", "x" * 64, "a@1", "é", "a\n"]
)
def test_unusable_task_names_leave_no_trace(store, name):
    with pytest.raises(InvalidName):
        store.publish(name, bundle(1))
    assert listing(store) == {}


@pytest.mark.parametrize("label", ["", "3", "Canary", "a/b", "x" * 64])
def test_unusable_labels_leave_no_trace(store, label):
    with pytest.raises(InvalidName):
        store.publish("t", bundle(1), labels=[label])
    assert listing(store) == {}


def test_malformed_bundle_leaves_no_trace(store):
    with pytest.raises(MalformedBundle):
        store.publish("t", bundle(1).to_bytes()[:-1])
    assert listing(store) == {}


def test_labels_move_and_roll_back_step_by_step(store):
    for seed in (1, 2, 3):
        store.publish("t", bundle(seed))
    store.commit(MoveLabel("t", "default", 1))
    assert [store.commit(RollBack("t")).catalog.resolve("t").version for _ in range(3)] == [3, 2, 1]
    with pytest.raises(NothingToRollBack, match="stays at version 1"):
        store.commit(RollBack("t"))
    newest = store.history("t", limit=1)[0].event
    assert (newest.kind, newest.rollback, newest.version) == ("label", True, 1)


def test_rollback_after_a_new_move_undoes_that_move(store):
    for seed in (1, 2, 3):
        store.publish("t", bundle(seed))
    store.commit(RollBack("t"))
    store.commit(MoveLabel("t", "default", 3))
    assert store.commit(RollBack("t")).catalog.resolve("t").version == 2
    assert store.commit(RollBack("t")).catalog.resolve("t").version == 1


def test_rollback_passes_over_retired_versions(store):
    for seed in (1, 2, 3):
        store.publish("t", bundle(seed))
    store.commit(Retire("t", 2))
    assert store.commit(RollBack("t")).catalog.resolve("t").version == 1


def test_moving_a_label_where_it_is_adds_nothing(store):
    store.publish("t", bundle(1))
    assert store.commit(MoveLabel("t", "default", 1)).generation == 1


def test_label_can_be_removed_but_not_default(store):
    store.publish("t", bundle(1), labels=["canary"])
    assert "canary" not in store.commit(RemoveLabel("t", "canary")).catalog.task("t").labels
    with pytest.raises(UnknownLabel, match="no label 'canary'; it has default"):
        store.commit(RemoveLabel("t", "canary"))
    with pytest.raises(UnknownLabel):
        store.commit(RollBack("t", "canary"))
    with pytest.raises(StillLabelled, match="cannot be removed"):
        store.commit(RemoveLabel("t", "default"))


def test_unknown_names_are_named_and_near_ones_suggested(store):
    store.publish("animals", bundle(1))
    catalog = store.catalog()
    with pytest.raises(UnknownTask, match="did you mean 'animals'"):
        catalog.resolve("animal")
    with pytest.raises(UnknownVersion, match="no version 7; the newest is 1"):
        catalog.resolve("animals@7")
    with pytest.raises(UnknownLabel, match="no label 'canary'"):
        catalog.resolve("animals:canary")
    with pytest.raises(UnknownVersion):
        store.commit(MoveLabel("animals", "default", 2))
    with pytest.raises(UnknownTask):
        store.commit(Retire("nothing"))
    with pytest.raises(UnknownTask):
        store.commit(Restore("nothing"))
    with pytest.raises(UnknownVersion, match="no bundle sha256:00"):
        store.read_bytes("sha256:" + "0" * 64)
    with pytest.raises(InvalidName, match="no digest"):
        store.read_bytes("../../log/1")


def test_labelled_version_cannot_be_retired(store):
    store.publish("t", bundle(1))
    with pytest.raises(StillLabelled, match="still has the label default: move the label first"):
        store.commit(Retire("t", 1))


def test_retired_version_is_gone_kept_and_restored(store):
    store.publish("t", bundle(1))
    store.publish("t", bundle(2))
    store.commit(Retire("t", 1))
    with pytest.raises(UnknownVersion, match="is retired: restore it"):
        store.catalog().resolve("t@1")
    with pytest.raises(UnknownVersion):
        store.commit(Retire("t", 1))
    assert store.read_bundle(bundle(1).digest) == bundle(1)
    assert store.commit(Restore("t", 1)).catalog.resolve("t@1").digest == bundle(1).digest
    with pytest.raises(NothingToRestore):
        store.commit(Restore("t", 1))
    with pytest.raises(UnknownVersion, match="never had a version 9"):
        store.commit(Restore("t", 9))


def test_retired_task_comes_back_with_its_labels(store):
    for seed in (1, 2, 3):
        store.publish("t", bundle(seed), labels=["default"] if seed < 3 else ["canary"])
    store.commit(Retire("t", 1))
    store.commit(Retire("t"))
    assert store.catalog().names == ()
    with pytest.raises(UnknownTask, match="Task 't' is retired"):
        store.catalog().resolve("t")
    task = store.commit(Restore("t")).catalog.task("t")
    assert [v.version for v in task.live] == [2, 3], "1 was retired before, on its own"
    assert dict(task.labels) == {"default": 2, "canary": 3}
    with pytest.raises(NothingToRestore):
        store.commit(Restore("t"))


def test_version_numbers_are_never_reused(store):
    store.publish("t", bundle(1), labels=["canary"])
    store.publish("t", bundle(2))
    store.commit(Retire("t"))
    published = store.publish("t", bundle(2))
    assert (published.version, published.created) == (3, True)
    assert dict(store.catalog().task("t").labels) == {"default": 3}


def test_one_version_of_a_retired_task_comes_back_as_default(store):
    store.publish("t", bundle(1))
    store.publish("t", bundle(2))
    store.commit(Retire("t"))
    assert dict(store.commit(Restore("t", 1)).catalog.task("t").labels) == {"default": 1}


def test_child_needs_its_parents_published_and_live(store):
    parent = bundle(1)
    child = bundle(2, extends=(parent.digest,))
    with pytest.raises(MissingParent, match=f"extends {parent.digest}, which is not published"):
        store.publish("child", child)
    assert listing(store) == {}, "an unknown parent leaves no trace"
    store.publish("parent", parent)
    store.publish("parent", bundle(3))
    store.commit(Retire("parent", 1))
    before = listing(store)
    with pytest.raises(MissingParent, match="extends parent@1, which is retired"):
        store.publish("child", child)
    assert listing(store) == before
    store.commit(Restore("parent", 1))
    assert store.publish("child", child).created


def test_bundles_that_name_each_other_can_never_both_be_published(store):
    # A bundle's digest covers its parents' digests, so a true cycle needs a sha256 fixed point.
    # The nearest anyone can come is to name a digest that does not exist yet.
    first = bundle(1, extends=("sha256:" + "1" * 64,))
    second = bundle(2, extends=(first.digest,))
    for name, hostile in (("a", first), ("b", second), ("a", first)):
        with pytest.raises(MissingParent):
            store.publish(name, hostile)
    assert listing(store) == {}


def test_parent_of_another_backbone_is_refused(store):
    parent = bundle(1, backbone={"name": "other", "fingerprint": OTHER_FINGERPRINT})
    store.publish("parent", parent)
    with pytest.raises(IncompatibleBundle, match=OTHER_FINGERPRINT):
        store.publish("child", bundle(2, extends=(parent.digest,)))


def test_extended_version_cannot_be_retired_before_its_children(store):
    parent = bundle(1)
    store.publish("parent", parent)
    store.publish("child", bundle(2, extends=(parent.digest,)))
    with pytest.raises(StillExtended, match="parent@1 is still extended by child@1") as error:
        store.commit(Retire("parent"))
    assert error.value.names == ("child@1",)
    store.publish("copy", parent)
    store.commit(Retire("parent"))
    with pytest.raises(StillExtended):
        store.commit(Retire("copy"))
    store.commit(Retire("child"))
    store.commit(Retire("copy"))
    with pytest.raises(MissingParent, match="restore that first"):
        store.commit(Restore("child"))


def test_history_tells_who_did_what_newest_first(store, reopen):
    store.publish("a", bundle(1))
    store.publish("b", bundle(2), actor="eve@lab")
    store.commit(MoveLabel("a", "stable", 1))
    store.commit(Retire("b"))
    entries = reopen().history()
    assert [(e.generation, e.event.kind, e.event.task) for e in entries] == [
        (4, "retire", "b"),
        (3, "label", "a"),
        (2, "publish", "b"),
        (1, "publish", "a"),
    ]
    assert [e.stamp.actor for e in entries] == ["ada@lab", "ada@lab", "eve@lab", "ada@lab"]
    assert [e.generation for e in store.history("a", limit=1)] == [3]
    assert all(e.stamp.time.endswith("Z") for e in entries)


def test_snapshot_does_not_move_and_refresh_catches_up(store, reopen):
    other = reopen()
    held = other.catalog()
    store.publish("t", bundle(1))
    assert held.names == ()
    assert other.catalog(refresh=False).generation == 0
    assert other.refresh().generation == 1
    assert held.generation == 0


def test_opening_from_a_checkpoint_equals_opening_from_the_log(reopen):
    store = reopen(checkpoint_every=4)
    for seed in range(9):
        store.publish("t", bundle(seed))
    store.commit(RollBack("t"))
    assert sorted(p for p in listing(store) if p.startswith("checkpoints/")) == [
        "checkpoints/00000000000000000004.json",
        "checkpoints/00000000000000000008.json",
    ]
    from_checkpoint = reopen().catalog()
    for path in [p for p in listing(store) if p.startswith("checkpoints/")]:
        store._objects.delete(path)
    assert from_checkpoint == reopen().catalog() == store.catalog()


def test_listing_begins_after_the_name_given(store):
    for path in ("log/1", "log/2", "log/3", "other/4"):
        store._objects.put(path, b"x")
    names = {
        after: [info.path for info in store._objects.listing("log", after=after)]
        for after in (None, "log/0", "log/2", "log/25", "log/3")
    }
    assert names == {
        None: ["log/1", "log/2", "log/3"],
        "log/0": ["log/1", "log/2", "log/3"],
        "log/2": ["log/3"],
        "log/25": ["log/3"],
        "log/3": [],
    }


def test_deleting_what_is_not_there_is_fine(store):
    store._objects.put("a", b"x")
    store._objects.delete("a")
    store._objects.delete("a")
    assert listing(store) == {}


def test_racing_writers_lose_nothing(reopen):
    stores = [reopen(actor=f"writer-{n}") for n in range(8)]
    barrier = threading.Barrier(len(stores))
    published = []

    def write(number):
        barrier.wait()
        published.extend(stores[number].publish("t", bundle(1000 * number + i)) for i in range(5))

    threads = [threading.Thread(target=write, args=(n,)) for n in range(len(stores))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(p.version for p in published) == list(range(1, 41)), "a thread failed or lost"
    catalog = reopen().catalog()
    assert catalog.generation == 40
    for result in published:
        assert catalog.resolve(f"t@{result.version}").digest == result.digest


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
    assert all(task.labels["default"] == 4 for task in store.catalog().tasks.values())


def test_only_one_of_racing_first_publishes_succeeds(reopen):
    stores = [reopen() for _ in range(8)]
    barrier = threading.Barrier(len(stores))
    outcomes = []

    def write(number):
        barrier.wait()
        try:
            stores[number].publish("t", bundle(number), only_if_absent=True)
            outcomes.append("created")
        except AlreadyExists:
            outcomes.append("refused")

    threads = [threading.Thread(target=write, args=(n,)) for n in range(len(stores))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(outcomes) == ["created"] + ["refused"] * 7


def test_foreign_objects_are_reported_and_harmless(store, reopen):
    store.publish("t", bundle(1))
    for path in ("README", "log/notes.txt", "log/1.json", "blobs/sha256/short", "checkpoints/x"):
        store._objects.put(path, b"hello")
    store._objects.put("log/99999999999999999999.json", b"hello")
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


def test_damaged_log_entry_is_passed_over_and_uses_its_generation(store, reopen):
    for seed in (1, 2, 3):
        store.publish("t", bundle(seed), labels=["default"] if seed < 3 else [])
    store._objects.put("log/00000000000000000002.json", b'{"format": 1, "gen')
    reader = reopen()
    assert [v.version for v in reader.catalog().task("t").live] == [1, 3]
    assert reader.catalog().resolve("t").version == 1
    assert reader.publish("t", bundle(4)).generation == 4
    (problem,) = reader.find_damage()
    assert problem.path == "log/00000000000000000002.json"
    assert problem.reason.startswith("damaged log entry, passed over")


def test_missing_log_entry_is_reported_and_not_refilled(store, reopen):
    for seed in (1, 2, 3):
        store.publish("t", bundle(seed))
    store._objects.delete("log/00000000000000000002.json")
    reader = reopen()
    assert reader.publish("t", bundle(4)).generation == 4
    assert [p.path for p in reader.find_damage()] == ["log/00000000000000000002.json"]


def test_store_reports_nothing_when_all_is_well(store):
    store.publish("t", bundle(1))
    store.commit(Retire("t"))
    assert store.find_damage() == []


@pytest.mark.parametrize("damage", [b"", b"{}", b"not json\n{}", None])
def test_damaged_checkpoint_falls_back_to_an_older_one(reopen, damage):
    store = reopen(checkpoint_every=2)
    for seed in range(5):
        store.publish("t", bundle(seed))
    newest = "checkpoints/00000000000000000004.json"
    data = store._objects.get(newest)
    store._objects.put(newest, data.replace(b"ada", b"eve") if damage is None else damage)
    if damage is None and b"ada" not in data:
        store._objects.put(newest, data[:-30] + b"x" + data[-29:])
    reader = reopen()
    assert reader.catalog() == store.catalog()
    assert [p.path for p in reader.find_damage()] == [newest]


def test_lost_or_changed_bundle_is_reported_and_repaired_by_publishing_it_again(store):
    published = store.publish("t", bundle(1))
    path = "blobs/sha256/" + published.digest.removeprefix("sha256:")
    store._objects.put(path, b"other bytes")
    with pytest.raises(CorruptStore, match=f"{published.digest}.*damaged or replaced"):
        store.read_bundle(published.digest)
    assert "instead of" in store.find_damage()[0].reason
    store._objects.delete(path)
    with pytest.raises(CorruptStore, match="missing"):
        store.read_bytes(published.digest)
    assert "missing" in store.find_damage()[0].reason
    assert store.publish("t", bundle(1)).created is False
    assert store.read_bundle(published.digest) == bundle(1)
    assert store.find_damage() == []


def test_garbage_collection_takes_only_old_unpublished_bundles(store):
    store.publish("t", bundle(1))
    store.publish("t", bundle(2))
    store.commit(Retire("t", 1))
    orphan = "blobs/sha256/" + "0" * 64
    store._objects.put(orphan, b"never published")
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
    append = store._append

    def collected_first(entry):
        report = collector.collect_garbage(timedelta(seconds=-5))
        assert len(report.blobs) == 1, "the collector came between blob and log entry"
        return append(entry)

    monkeypatch.setattr(store, "_append", collected_first)
    published = store.publish("t", bundle(1))
    assert store.read_bundle(published.digest) == bundle(1)


def test_bundle_published_during_a_collection_is_kept(store, reopen, monkeypatch):
    orphan = bundle(1)
    store._objects.put("blobs/sha256/" + orphan.digest[7:], orphan.to_bytes())
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


def test_bundle_written_again_during_a_collection_is_kept(store, reopen, monkeypatch):
    """A publisher was there between the listing and the deletion, and has not appended yet."""
    path = "blobs/sha256/" + bundle(1).digest[7:]
    store._objects.put(path, bundle(1).to_bytes())
    collector = reopen()
    stat = collector._objects.stat

    def young(asked):
        return replace(stat(asked), modified=datetime.now(UTC) + timedelta(hours=1))

    monkeypatch.setattr(collector._objects, "stat", young)
    assert collector.collect_garbage(timedelta(seconds=-5)).blobs == ()
    assert path in listing(store)


def test_unlabelled_regression_task_is_ordinary(store):
    published = store.publish("t", bundle(1, problem="regression", labels=()))
    assert store.catalog().resolve("t").problem == "regression"
    assert store.read_bundle(published.digest).manifest == manifest(problem="regression", labels=())
