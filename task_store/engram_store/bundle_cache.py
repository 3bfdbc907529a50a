"""A cache of bundles on a local disk, so that a restart does not download them again.

Files are named by their digest and checked when read. Several processes may share a folder,
because files appear atomically and never change. The least recently read files are removed first.
"""

import contextlib
import logging
import os
import time
from collections.abc import Collection, Iterator
from pathlib import Path

from engram_bundle import digest_of
from engram_bundle.files import STAGING_SUFFIX, write_whole

_ABANDONED_SECONDS = 3600.0  # until staging files of killed processes are removed

_log = logging.getLogger("engram.bundle_cache")


class BundleCache:
    """A folder of at most `limit` bytes of bundles. Its failures never fail a read."""

    def __init__(self, folder: str | Path, limit: int) -> None:
        self._folder = Path(folder).absolute()
        self._limit = limit
        self._room: float | None = None  # bytes to write before the next clean-up; None: now
        self._warned = False

    def get(self, digest: str) -> bytes | None:
        """Return a bundle's file, with its digest checked, or None if it is not cached."""
        path = self._path(digest)
        try:
            data = path.read_bytes()
        except FileNotFoundError:
            return None
        except OSError as error:
            self._warn_once("read", error)
            return None
        if digest_of(data) != digest:
            _log.warning("removing the damaged cached bundle %s", path)
            with contextlib.suppress(OSError):
                path.unlink()
            return None
        with contextlib.suppress(OSError):
            os.utime(path)  # marks it as recently read
        return data

    def put(self, digest: str, data: bytes) -> None:
        """Add a bundle, and remove others beyond the limit. Never fails."""
        path = self._path(digest)
        if len(data) > self._limit or path.exists():
            return
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            write_whole(path, data, durable=False)
            if self._room is None or len(data) >= self._room:
                self._clean_up()
            else:
                self._room -= len(data)
        except OSError as error:
            self._warn_once("write", error)

    def remove(self, digests: Collection[str]) -> None:
        """Delete the files of these bundles, also half-written ones. Warns if it cannot."""
        names = {self._path(digest).name for digest in digests}
        length = max(map(len, names), default=0)
        try:
            # The name of a half-written file is that of its target after a dot.
            listed = [
                (path.name.removeprefix(".")[:length], path) for path in self._folder.iterdir()
            ]
            files = [path for name, path in listed if name in names]
            for path in files:
                path.unlink(missing_ok=True)
        except FileNotFoundError:
            return  # nothing was cached yet
        except OSError as error:
            reason = error.strerror or error
            _log.warning("cannot delete purged bundles from %s: %s", self._folder, reason)

    def _clean_up(self) -> None:
        """Remove the oldest files beyond the limit. Lists the folder, so not after every write."""
        files = sorted(self._files(), key=lambda file: file[1].st_mtime_ns)
        total = sum(status.st_size for _, status in files)
        for path, status in files:
            if total <= self._limit:
                break
            # Another process may be removing the same file.
            with contextlib.suppress(OSError):
                path.unlink()
            total -= status.st_size
        # Other processes may write here too, so only half of the free space is assumed.
        self._room = (self._limit - total) / 2

    def _files(self) -> Iterator[tuple[Path, os.stat_result]]:
        """List the bundles, and remove abandoned staging files."""
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
        # A disk that is full or read-only fails every time.
        if not self._warned:
            reason = error.strerror or error
            _log.warning("cannot %s the bundle cache %s: %s", what, self._folder, reason)
            self._warned = True
