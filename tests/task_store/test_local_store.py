"""A store in a folder: what is on the disk, and when."""

import errno
import os
import shutil
from datetime import timedelta
from pathlib import Path

import pytest
from engram_store import StoreUnavailable, open_store
from engram_store.layout import blob_path
from engram_store.objects import open_objects

from tests.bundles import bundle


class Disk:
    """Watches fsync and names, and tells what would survive if the power failed now."""

    def __init__(self, root: Path, monkeypatch):
        self.events: list[tuple[str, str]] = []
        self.root = root
        for name in ("link", "replace", "mkdir"):
            monkeypatch.setattr(os, name, self._watched(name, getattr(os, name)))
        fsync = os.fsync
        real = os.path.realpath

        def watched(handle):
            self.events.append(("fsync", self._name(real(f"/proc/self/fd/{handle}"))))
            fsync(handle)

        monkeypatch.setattr(os, "fsync", watched)

    def _watched(self, name, function):
        def watched(*arguments, **options):
            result = function(*arguments, **options)
            self.events.append((name, self._name(arguments[1 if name != "mkdir" else 0])))
            return result

        return watched

    def _name(self, path) -> str:
        return os.path.relpath(path, self.root).split("#")[0]

    def position(self, action: str, name: str) -> int:
        return self.events.index((action, name))


def test_blob_and_log_entry_are_on_the_disk_in_this_order_before_publish_returns(
    tmp_path, monkeypatch
):
    root = tmp_path / "deep" / "store"
    disk = Disk(root, monkeypatch)
    open_store(root).publish("t", bundle(1))
    blob = blob_path(bundle(1).digest)
    entry = "log/00000000000000000001.json"
    expected = [
        ("fsync", blob),  # its bytes, under the staging name
        ("replace", blob),
        ("fsync", "blobs/sha256"),  # its name
        ("fsync", entry),
        ("link", entry),  # from here on readers see the publish
        ("fsync", "log"),
    ]
    positions = [disk.position(*step) for step in expected]
    assert positions == sorted(positions)
    assert disk.events[-1] == ("fsync", "log"), "nothing after the last sync is needed"
    made = [name for action, name in disk.events if action == "mkdir"]
    for name in made:
        parent = os.path.relpath(os.path.dirname(os.path.join(root, name)), root)
        assert ("fsync", parent) in disk.events[disk.position("mkdir", name) :]


def test_failed_sync_is_not_acknowledged(local, monkeypatch):
    local.publish("t", bundle(1))
    fsync = os.fsync
    seen = []

    def broken(handle):
        if "/log/" in os.path.realpath(f"/proc/self/fd/{handle}"):
            seen.append(handle)
            raise OSError(errno.EIO, "Input/output error")
        fsync(handle)

    monkeypatch.setattr(os, "fsync", broken)
    with pytest.raises(StoreUnavailable, match=r"could not write 'log/.*Input/output error"):
        local.publish("t", bundle(2))
    assert seen
    monkeypatch.undo()
    assert local.catalog().resolve("t").version == 1
    assert local.publish("t", bundle(2)).version == 2


def test_full_disk_is_reported_and_leaves_no_staged_file(local, monkeypatch):
    def full(*arguments):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(StoreUnavailable, match="No space left on device"):
        local.publish("t", bundle(1))
    monkeypatch.undo()
    assert local.objects.staged() == []
    assert local.catalog().names == ()


def test_folder_without_permission_is_reported(local, monkeypatch):
    def denied(*arguments, **options):
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(os, "replace", denied)
    with pytest.raises(StoreUnavailable, match="Permission denied"):
        local.publish("t", bundle(1))


def test_staged_leftovers_are_invisible_and_collected_after_the_grace(local, tmp_path):
    local.publish("t", bundle(1))
    root = tmp_path / "store"
    left = [
        root / "log" / "00000000000000000002.json#123",
        root / "blobs" / "sha256" / f"{'0' * 64}#4",
        root / "checkpoints" / "00000000000000000200.json#5",
    ]
    left[2].parent.mkdir()
    for path in left:
        path.write_bytes(b"half a fi")
    reader = open_store(root)
    assert reader.publish("t", bundle(2)).generation == 2
    assert reader.find_damage() == []
    assert reader.collect_garbage(timedelta(hours=1)).staged == ()
    assert len(reader.collect_garbage(timedelta(seconds=-5), dry_run=True).staged) == 3
    assert all(path.exists() for path in left)
    assert len(reader.collect_garbage(timedelta(seconds=-5)).staged) == 3
    assert not any(path.exists() for path in left)
    assert reader.catalog().resolve("t").version == 2


def test_folder_where_a_log_entry_belongs_is_stepped_over(local, tmp_path):
    local.publish("t", bundle(1))
    (tmp_path / "store" / "log" / "00000000000000000002.json").mkdir()
    assert local.publish("t", bundle(2)).generation == 3
    reader = open_store(tmp_path / "store")
    assert reader.catalog() == local.catalog()
    assert [p.path for p in reader.find_damage()] == ["log/00000000000000000002.json"]


def test_entry_missed_by_a_listing_is_read_by_name(local, tmp_path, monkeypatch):
    for seed in (1, 2, 3):
        local.publish("t", bundle(seed))
    objects = local.objects
    whole = type(objects).listing

    def missing_two(self, prefix, *, after=None):
        # As a folder may look that is listed while it is written to.
        found = whole(self, prefix, after=after)
        return [info for info in found if not info.path.endswith("2.json")]

    monkeypatch.setattr(type(objects), "listing", missing_two)
    reader = open_store(tmp_path / "store")
    assert [v.version for v in reader.catalog().task("t").live] == [1, 2, 3]


@pytest.mark.parametrize("form", ["path", "text", "url", "spaced url"])
def test_folder_may_be_written_in_several_ways(tmp_path, form):
    root = tmp_path / "a store"
    location = {
        "path": root,
        "text": str(root),
        "url": f"file://{root}",
        "spaced url": f"file://{tmp_path}/a%20store",
    }[form]
    open_store(location).publish("t", bundle(1))
    assert open_store(root, create=False).catalog().names == ("t",)


def test_relative_folder_stays_where_it_was_when_the_process_moves(tmp_path, monkeypatch):
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    store = open_store("tasks")
    monkeypatch.chdir(tmp_path / "elsewhere")
    store.publish("t", bundle(1))
    assert open_store(tmp_path / "tasks").catalog().names == ("t",)


def test_missing_folder_is_refused_when_not_to_be_created(tmp_path):
    with pytest.raises(StoreUnavailable, match="There is no task store at"):
        open_store(tmp_path / "typo", create=False)
    assert os.listdir(tmp_path) == []


def test_file_in_place_of_the_folder_is_reported(tmp_path):
    (tmp_path / "file").write_text("hello")
    with pytest.raises(StoreUnavailable, match="not a folder"):
        open_store(tmp_path / "file")


@pytest.mark.parametrize("left", ["nothing", "a file", "an empty folder"])
def test_missing_folder_is_an_outage_and_not_created_again(local, tmp_path, left):
    local.publish("t", bundle(1))
    folder, moved = tmp_path / "store", tmp_path / "moved"
    os.rename(folder, moved)
    if left == "a file":
        folder.write_text("in the way")
    elif left == "an empty folder":  # as where a disk was mounted
        folder.mkdir()
    with pytest.raises(StoreUnavailable):
        local.publish("t", bundle(2))
    assert left != "nothing" or not folder.exists()
    # It is back: what was acknowledged is there, and what was refused is not.
    if left == "a file":
        folder.unlink()
    else:
        shutil.rmtree(folder, ignore_errors=True)
    os.rename(moved, folder)
    assert local.publish("t", bundle(3)).version == 2


def test_folder_that_vanishes_during_a_write_is_not_created_again(tmp_path, monkeypatch):
    folder, moved = tmp_path / "store", tmp_path / "moved"
    objects = open_objects(folder)
    is_dir = Path.is_dir

    def vanish_after_check(path):
        found = is_dir(path)
        if found and path == folder:
            os.rename(folder, moved)
        return found

    monkeypatch.setattr(Path, "is_dir", vanish_after_check)
    with pytest.raises(StoreUnavailable):
        objects.put("clock/now", b"{}")
    assert moved.exists()
    assert not folder.exists()
