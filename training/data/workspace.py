"""What a run works with until it ends: a scratch file, threads, and somebody to report to.

The scratch file holds arrays, read through memory. It has no name, so nothing is left behind
however the run ends. It is written front to back and mapped only where it has been written: a full
disk is an error at the write, never a signal in the middle of a pass.
"""

import mmap
import os
import shutil
import tempfile
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from training.progress import Watcher

Array = npt.NDArray[Any]
ALIGNMENT = 64
MAX_WORKERS = 4


@dataclass(frozen=True, slots=True)
class Slot:
    """Where an array lies in the file."""

    offset: int
    shape: tuple[int, ...]
    dtype: np.dtype[Any]


class Scratch:
    """Arrays on disk within a budget of bytes, and never more than half of what is free."""

    def __init__(self, budget: int, folder: Path | None = None) -> None:
        self._file = tempfile.TemporaryFile(dir=folder, buffering=0)  # noqa: SIM115 - closed below
        self._budget = min(budget, shutil.disk_usage(folder or tempfile.gettempdir()).free // 2)
        self._used = 0
        self._lock = threading.Lock()
        self._map: mmap.mmap | None = None

    @property
    def left(self) -> int:
        return max(0, self._budget - self._used)

    def put(self, array: Array) -> Slot | None:
        """Keeps the array, or answers None when the budget or the disk is used up."""
        data = np.ascontiguousarray(array)
        with self._lock:
            if data.nbytes + ALIGNMENT > self.left:
                return None
            try:
                self._write(data)
            except OSError:
                self._budget = 0  # the disk is full: what is kept stays, nothing more is tried
                return None
            slot = Slot(self._used, data.shape, data.dtype)
            self._used += -(-data.nbytes // ALIGNMENT) * ALIGNMENT
            return slot

    def get(self, slot: Slot) -> Array:
        """The array itself, not a copy: not to be written to."""
        count = int(np.prod(slot.shape))
        end = slot.offset + count * slot.dtype.itemsize
        mapped = self._mapped(end)
        return np.frombuffer(mapped, slot.dtype, count, slot.offset).reshape(slot.shape)

    def close(self) -> None:
        # A map that arrays still look into cannot be closed; it goes with them.
        self._map = None
        self._file.close()

    def _write(self, data: Array) -> None:
        self._file.seek(self._used)
        view = data.reshape(-1).view(np.uint8).data
        padding = -data.nbytes % ALIGNMENT
        for part in (view, memoryview(bytes(padding))):
            while len(part):
                part = part[self._file.write(part) or 0 :]

    def _mapped(self, end: int) -> mmap.mmap:
        with self._lock:
            if self._map is None or len(self._map) < end:
                # Writable only because torch takes no other memory without a warning.
                self._map = mmap.mmap(self._file.fileno(), self._used)
            return self._map


class Workspace(ExitStack):
    """A context: threads and scratch file are gone when it ends."""

    def __init__(
        self, keep_bytes: int, *, folder: Path | None = None, watcher: Watcher | None = None
    ) -> None:
        super().__init__()
        self.scratch = Scratch(keep_bytes, folder)
        self.callback(self.scratch.close)
        self.pool = ThreadPoolExecutor(max_workers=min(MAX_WORKERS, os.cpu_count() or 1))
        self.callback(self.pool.shutdown, cancel_futures=True)
        self.watcher = watcher or Watcher()
        self.notes: list[str] = []

    def note(self, text: str) -> None:
        """Tell the watcher, and remember it for the report."""
        self.notes.append(text)
        self.watcher.note(text)
