"""Bundles kept on disk: read again without the store, never wrong, never in the way."""

import logging
import multiprocessing
import os
from pathlib import Path

import pytest
from engram_bundle import digest_of
from engram_store import BundleCache, open_store
from engram_store.layout import blob_path

from tests.bundles import bundle

CONTENT = b"0123456789" * 10
DIGEST = digest_of(CONTENT)


def file_of(content: bytes) -> tuple[str, bytes]:
    return digest_of(content), content


@pytest.fixture
def cache(tmp_path) -> BundleCache:
    return BundleCache(tmp_path / "cache", 1000)


def names(tmp_path) -> list[str]:
    return sorted(path.name for path in (tmp_path / "cache").iterdir())


def test_what_is_kept_is_found_by_another_process(cache, tmp_path):
    assert cache.get(DIGEST) is None
    cache.put(DIGEST, CONTENT)
    assert BundleCache(tmp_path / "cache", 1000).get(DIGEST) == CONTENT


@pytest.mark.parametrize("damage", [b"", CONTENT[:-1], CONTENT[:-1] + b"x", CONTENT + b"x"])
def test_a_damaged_file_is_removed_and_not_read(cache, tmp_path, damage):
    cache.put(DIGEST, CONTENT)
    (name,) = names(tmp_path)
    (tmp_path / "cache" / name).write_bytes(damage)
    assert cache.get(DIGEST) is None
    assert names(tmp_path) == []
    cache.put(DIGEST, CONTENT)
    assert cache.get(DIGEST) == CONTENT


def test_past_the_limit_the_one_read_longest_ago_goes(cache, tmp_path):
    files = [file_of(bytes([65 + number]) * 300) for number in range(4)]
    for age, (digest, content) in enumerate(files[:3]):
        cache.put(digest, content)
        os.utime(tmp_path / "cache" / digest.replace(":", "-"), (1000 + age, 1000 + age))
    assert cache.get(files[0][0]) is not None  # now the youngest
    cache.put(*files[3])
    kept = [cache.get(digest) is not None for digest, _ in files]
    assert kept == [True, False, True, True]


def test_the_folder_is_read_seldom_and_yet_never_too_full(tmp_path, monkeypatch):
    folder, looks = tmp_path / "cache", []
    plain = Path.iterdir
    monkeypatch.setattr(Path, "iterdir", lambda self: looks.append(1) or plain(self))
    cache = BundleCache(folder, 100_000)
    for number in range(990):  # 99 of 100 kB
        cache.put(*file_of(f"{number:0100}".encode()))
    assert len(looks) < 20
    for number in range(990, 1100):
        cache.put(*file_of(f"{number:0100}".encode()))
        assert sum(path.stat().st_size for path in folder.iterdir()) <= 100_000


def test_what_is_larger_than_the_limit_is_not_kept(cache, tmp_path):
    cache.put(*file_of(b"x" * 1001))
    assert not (tmp_path / "cache").exists()


def test_what_a_killed_process_left_goes_with_time(cache, tmp_path):
    cache.put(DIGEST, CONTENT)
    for name, age in (("old", 7200), ("young", 60)):
        part = tmp_path / "cache" / f".{name}.part"
        part.write_bytes(b"half")
        os.utime(part, (part.stat().st_mtime - age,) * 2)
    BundleCache(tmp_path / "cache", 1000).put(*file_of(b"another"))  # the next start
    assert ".young.part" in names(tmp_path)
    assert ".old.part" not in names(tmp_path)


def test_unusable_folder_is_logged_once_and_reads_continue(tmp_path, caplog):
    (tmp_path / "cache").write_text("a file where the folder should be")
    cache = BundleCache(tmp_path / "cache", 1000)
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            cache.put(DIGEST, CONTENT)
            assert cache.get(DIGEST) is None
    assert len(caplog.records) == 1


def _churn(folder, seed: int) -> int:
    cache, wrong = BundleCache(folder, 2000), 0
    for turn in range(150):
        digest, content = file_of(str((seed + turn) % 20).encode() * 200)
        cache.put(digest, content)
        wrong += cache.get(digest) not in (None, content)
    return wrong


def test_processes_share_a_folder(tmp_path):
    with multiprocessing.get_context("spawn").Pool(2) as pool:
        assert pool.starmap(_churn, [(tmp_path, 0), (tmp_path, 7)]) == [0, 0]
    left = [path for path in tmp_path.iterdir() if path.suffix != ".part"]
    assert sum(path.stat().st_size for path in left) <= 2000
    assert not [path for path in tmp_path.iterdir() if path.suffix == ".part"]


# --- in front of a store --------------------------------------------------------------------------


def without_blob(store, digest):
    """The bundle can come from nowhere but the disk now."""
    store.objects.delete(blob_path(digest))


def test_a_restart_downloads_nothing_it_had(open_remote, tmp_path):
    first = open_remote(cache=BundleCache(tmp_path / "one", 10**6))
    first.publish("t", bundle(1))
    digest = bundle(1).digest
    reader = open_remote(cache=BundleCache(tmp_path / "two", 10**6))
    data = reader.read_bytes(digest)
    without_blob(first, digest)
    for folder in ("one", "two"):  # what was published here, and what was downloaded here
        again = open_remote(cache=BundleCache(tmp_path / folder, 10**6))
        assert again.read_bytes(digest) == data


def test_a_damaged_file_on_disk_is_downloaded_again(open_remote, tmp_path):
    store = open_remote(cache=BundleCache(tmp_path, 10**6))
    store.publish("t", bundle(1))
    digest = bundle(1).digest
    (kept,) = tmp_path.iterdir()
    data = kept.read_bytes()
    kept.write_bytes(b"nonsense")
    assert store.read_bytes(digest) == data
    assert kept.read_bytes() == data


def test_a_local_store_needs_no_second_copy(tmp_path):
    store = open_store(tmp_path / "store", cache=BundleCache(tmp_path / "cache", 10**6))
    store.publish("t", bundle(1))
    store.read_bytes(bundle(1).digest)
    assert not (tmp_path / "cache").exists()
