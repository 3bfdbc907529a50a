"""Uploads in parts: kept in the store until they are published, aborted, purged or expired."""

import multiprocessing
from datetime import UTC, datetime, timedelta

import pytest
from engram_store import (
    CorruptStore,
    Draft,
    DraftLimits,
    Purge,
    TaskStore,
    TooManyUploads,
    UnknownUpload,
    open_store,
)
from engram_store.commands.tasks import back_up, collect_garbage, verify
from engram_store.layout import DRAFTS
from engram_store.objects import open_objects

from tests.bundles import bundle

ADA = Draft("key:ada", "a" * 32, "team/pets")


@pytest.fixture
def store(tmp_path):
    return open_store(tmp_path / "store")


def limited(tmp_path, **limits):
    return TaskStore(open_objects(tmp_path / "store"), draft_limits=DraftLimits(**limits))


def name(number):
    return f"{number:064x}"


def drafts_in(store):
    return list(store.objects.named(DRAFTS))


def test_parts_are_read_by_any_process_and_each_once(store, tmp_path):
    assert store.add_part(ADA, name(1), b"one") == 1
    other = open_store(tmp_path / "store")
    assert other.add_part(ADA, name(2), b"two") == 2
    assert other.add_part(ADA, name(1), b"one, with other rounding") == 2, "kept as it was"
    assert list(open_store(tmp_path / "store").read_parts(ADA)) == [b"one", b"two"]


def test_an_upload_belongs_to_its_caller_and_its_task(store):
    store.add_part(ADA, name(1), b"one")
    for other in (Draft("key:bob", ADA.upload, ADA.task), Draft(ADA.owner, ADA.upload, "pets")):
        with pytest.raises(UnknownUpload, match="of yours"):
            list(store.read_parts(other))
        assert store.drafts.abort(other) == 0
    assert store.drafts.count(ADA) == 1


def test_a_published_upload_leaves_its_version_and_no_part(store):
    store.add_part(ADA, name(1), b"one")
    assert store.drafts.published(ADA) is None
    store.finish_draft(ADA, 7)
    assert store.drafts.published(ADA) == 7
    assert store.drafts.count(ADA) == 0
    assert len(drafts_in(store)) == 1, "the mark"


def test_an_aborted_upload_leaves_nothing(store):
    store.add_part(ADA, name(1), b"one")
    assert store.drafts.abort(ADA) == 1
    assert drafts_in(store) == []
    with pytest.raises(UnknownUpload):
        list(store.read_parts(ADA))


def test_a_damaged_part_is_found(store):
    store.add_part(ADA, name(1), b"one")
    (info,) = store.objects.named(DRAFTS).values()
    store.objects.put(info.path, store.objects.get(info.path)[:-1])
    with pytest.raises(CorruptStore, match="damaged"):
        list(store.read_parts(ADA))


@pytest.mark.parametrize(
    ("limits", "says"),
    [
        ({"uploads": 1}, "2 uploads that are not published, and the limit is 1"),
        ({"parts": 1}, "2 parts of uploads"),
        ({"nbytes": 37}, "bytes of uploads"),
    ],
)
def test_one_caller_has_a_limited_share(tmp_path, limits, says):
    store = limited(tmp_path, **limits)
    store.add_part(ADA, name(1), b"one")
    second = Draft(ADA.owner, "b" * 32, ADA.task)
    with pytest.raises(TooManyUploads, match=says):
        store.add_part(second, name(2), b"two")
    assert store.add_part(ADA, name(1), b"one") == 1, "a repeated part needs no more"
    assert store.add_part(Draft("key:bob", "b" * 32, ADA.task), name(2), b"two") == 1
    store.finish_draft(ADA, 1)
    assert store.add_part(second, name(2), b"two") == 1, "published ones do not count"


def test_expired_uploads_make_room_and_are_collected(tmp_path, store):
    later = TaskStore(
        open_objects(tmp_path / "store"),
        draft_limits=DraftLimits(uploads=1),
        clock=lambda: datetime.now(UTC) + timedelta(days=1, minutes=1),
    )
    store.add_part(ADA, name(1), b"one")
    assert later.add_part(Draft(ADA.owner, "b" * 32, ADA.task), name(2), b"two") == 1
    assert store.drafts.count(ADA) == 0
    report = store.collect_garbage(timedelta(0), dry_run=True)
    assert len(report.drafts) == len(drafts_in(store)) == 1
    store.collect_garbage(timedelta(hours=1))
    assert len(drafts_in(store)) == 1, "younger"
    collect_garbage(str(tmp_path / "store"), grace="0s")
    assert drafts_in(store) == []


@pytest.mark.parametrize("whole", [True, False], ids=["task", "version"])
def test_a_purge_deletes_uploads_for_the_task_and_no_later_ones(store, whole):
    store.publish(ADA.task, bundle(1))
    store.publish(ADA.task, bundle(2))
    other = Draft(ADA.owner, ADA.upload, "other")
    store.add_part(ADA, name(1), b"one")
    store.add_part(other, name(1), b"one")
    store.commit(Purge(ADA.task, None if whole else (1,)))
    with pytest.raises(UnknownUpload):
        list(store.read_parts(ADA))
    assert len(drafts_in(store)) == 1
    store.add_part(ADA, name(3), b"three")
    store.commit(Purge(ADA.task, (1,)))
    assert list(store.read_parts(ADA)) == [b"three"], "nothing was purged since"
    assert list(store.read_parts(other)) == [b"one"]


def test_a_purge_while_a_part_is_written_takes_the_part_with_it(store, tmp_path, monkeypatch):
    store.publish(ADA.task, bundle(1))
    other = open_store(tmp_path / "store")
    add = store.drafts.add

    def purged_meanwhile(*args):
        monkeypatch.setattr(store.drafts, "add", add)
        other.commit(Purge(ADA.task))
        return add(*args)

    monkeypatch.setattr(store.drafts, "add", purged_meanwhile)
    with pytest.raises(UnknownUpload):
        store.add_part(ADA, name(1), b"one")
    assert drafts_in(store) == []


def test_an_interrupted_purge_is_found_and_completed(store, tmp_path, monkeypatch):
    store.publish(ADA.task, bundle(1))
    store.add_part(ADA, name(1), b"one")
    with monkeypatch.context() as patch:
        patch.setattr("engram_store.maintenance.delete_purged", lambda *_: None)
        store.commit(Purge(ADA.task))
    (left,) = (info.path for info in store.objects.named(DRAFTS).values())
    assert left in [damage.path for damage in store.verify().damages]
    store.collect_garbage()
    assert drafts_in(store) == []
    assert not store.verify().damages


def test_uploads_are_neither_damage_nor_part_of_a_backup(store, tmp_path):
    store.publish("pets", bundle(1))
    store.add_part(ADA, name(1), b"one")
    verify(str(tmp_path / "store"))  # exits with 1 if there is damage
    back_up(str(tmp_path / "backup"), str(tmp_path / "store"))
    assert drafts_in(open_store(tmp_path / "backup")) == []


def add_parts_until_killed(folder, ready):
    store = open_store(folder)
    for number in range(10**6):
        store.add_part(ADA, name(number), b"x" * 20_000)
        ready.set()


def test_a_killed_server_leaves_whole_parts_only(tmp_path, store):
    context = multiprocessing.get_context("spawn")
    for _ in range(2):
        ready = context.Event()
        process = context.Process(target=add_parts_until_killed, args=(tmp_path / "store", ready))
        process.start()
        assert ready.wait(60)
        process.kill()
        process.join()
    parts = list(store.read_parts(ADA))
    assert parts
    assert set(parts) == {b"x" * 20_000}
