"""Bundles kept on a local disk, so that a restart downloads nothing it has had before.

A file is named by its digest and checked against it whenever it is read: a damaged one is removed
and read from the store again. Any number of processes may share a folder, because files appear
whole, by a rename, and never change. Past the limit the files read longest ago go.
"""

import contextlib
import logging
import os
import time
from collections.abc import Iterator
from pathlib import Path

from task_store.bundle import digest_of
from task_store.files import STAGING_SUFFIX, write_whole

# What a killed process left half written is removed after this.
_ABANDONED_SECONDS = 3600.0

_log = logging.getLogger("engram.bundle_cache")


class BundleCache:
    """A folder of bundles of at most `limit` bytes. Whatever is wrong with it, reading goes on."""

    def __init__(self, folder: str | Path, limit: int) -> None:
        self._folder = Path(folder).absolute()
        self._limit = limit
        self._room: float | None = None  # bytes to write until the folder is looked at; None: now
        self._warned = False

    def get(self, digest: str) -> bytes | None:
        """A bundle's file, its digest checked; None if it is not here."""
        path = self._path(digest)
        try:
            data = path.read_bytes()
        except FileNotFoundError:
            return None
        except OSError as error:
            self._warn_once("read", error)
            return None
        if digest_of(data) != digest:
            _log.warning("the cached bundle %s is damaged and removed", path)
            with contextlib.suppress(OSError):
                path.unlink()
            return None
        with contextlib.suppress(OSError):
            os.utime(path)  # read just now: the last to go
        return data

    def put(self, digest: str, data: bytes) -> None:
        """Keep a bundle, and let others go if there are too many. Never fails."""
        path = self._path(digest)
        if len(data) > self._limit or path.exists():
            return
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            write_whole(path, data, durable=False)
            if self._room is None or len(data) >= self._room:
                self._make_room()
            else:
                self._room -= len(data)
        except OSError as error:
            self._warn_once("written", error)

    def _make_room(self) -> None:
        """Let the oldest go past the limit. Reads the folder, so not for each of 10,000 bundles."""
        files = sorted(self._files(), key=lambda file: file[1].st_mtime_ns)
        total = sum(status.st_size for _, status in files)
        for path, status in files:
            if total <= self._limit:
                break
            # Another process may be removing the same one.
            with contextlib.suppress(OSError):
                path.unlink()
            total -= status.st_size
        # Others may write here too: we look again before we alone could have filled it.
        self._room = (self._limit - total) / 2

    def _files(self) -> Iterator[tuple[Path, os.stat_result]]:
        """The bundles here; what a killed process left is removed on the way."""
        for path in self._folder.iterdir():
            with contextlib.suppress(OSError):
                status = path.stat()
                if path.suffix != STAGING_SUFFIX:
                    yield path, status
                elif time.time() - status.st_mtime > _ABANDONED_SECONDS:
                    path.unlink()

    def _path(self, digest: str) -> Path:
        return self._folder / digest.replace(":", "-")

    def _warn_once(self, what: str, error: OSError) -> None:
        # A disk that is full or read-only stays so.
        if not self._warned:
            reason = error.strerror or error
            _log.warning("the bundle cache %s cannot be %s: %s", self._folder, what, reason)
            self._warned = True
