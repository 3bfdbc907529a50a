"""The resources of a run: a scratch file, threads, and a watcher that reports progress.

The scratch file stores arrays, which are read through a memory map. It is unnamed, so it disappears
however the run ends. It is written sequentially and mapped only where it was written, so a full
disk is an error while writing and never a signal in the middle of a pass.
"""

import mmap
import os
import shutil
import tempfile
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
OnProgress = Callable[[int, int], None]  # done, total
ALIGNMENT = 64
MAX_WORKERS = 4


@dataclass(frozen=True, slots=True)
class Tick:
    step: int
    steps: int
    loss: float  # the lowest of all variants on this batch
    score: float  # the highest of this epoch so far
    images_per_second: float


class Watcher:
    """Receives the progress of a run. Ignores everything; override what you need."""

    def stage(self, name: str) -> OnProgress | None:
        """A stage begins; the result is called as it proceeds."""
        return None

    def training(self, steps: int, score: str) -> Callable[[Tick], None] | None:
        """Training begins; the result is called after every step. `score` names the score."""
        return None

    def note(self, text: str) -> None:
        """Something the user should know."""


@dataclass(frozen=True, slots=True)
class Slot:
    offset: int
    shape: tuple[int, ...]
    dtype: np.dtype[Any]


class Scratch:
    """Arrays on disk, within a limit of bytes and at most half of the free space."""

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
        """Store an array; None if the limit is reached or the disk is full."""
        data = np.ascontiguousarray(array)
        with self._lock:
            if data.nbytes + ALIGNMENT > self.left:
                return None
            try:
                self._write(data)
            except OSError:
                self._budget = 0  # the disk is full: keep what is stored and stop writing
                return None
            slot = Slot(self._used, data.shape, data.dtype)
            self._used += -(-data.nbytes // ALIGNMENT) * ALIGNMENT
            return slot

    def get(self, slot: Slot) -> Array:
        """Return a view of an array, which must not be modified."""
        count = int(np.prod(slot.shape))
        end = slot.offset + count * slot.dtype.itemsize
        with self._lock:
            if self._map is None or len(self._map) < end:
                # Writable, because torch warns about read-only memory.
                self._map = mmap.mmap(self._file.fileno(), self._used)
            mapped = self._map
        return np.frombuffer(mapped, slot.dtype, count, slot.offset).reshape(slot.shape)

    def close(self) -> None:
        # A map with live views cannot be closed; it is released with them.
        self._map = None
        self._file.close()

    def _write(self, data: Array) -> None:
        self._file.seek(self._used)
        view = data.reshape(-1).view(np.uint8).data
        padding = -data.nbytes % ALIGNMENT
        for part in (view, memoryview(bytes(padding))):
            while len(part):
                part = part[self._file.write(part) or 0 :]


class Workspace(ExitStack):
    """A context manager that owns the threads and the scratch file of a run."""

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
        """Pass a note to the watcher and keep it for the report."""
        self.notes.append(text)
        self.watcher.note(text)
