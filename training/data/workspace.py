"""What a run works with until it ends: threads, a scratch file, and somebody to report to."""

import os
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

from training.data.scratch import Scratch
from training.progress import OnProgress, Watcher

MAX_WORKERS = 4


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

    def stage(self, name: str) -> OnProgress | None:
        return self.watcher.stage(name)

    def note(self, text: str) -> None:
        """Tell the watcher, and remember it for the report."""
        self.notes.append(text)
        self.watcher.note(text)
