"""What a run works with until it ends: threads, a scratch file, and somebody to report to."""

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import TracebackType

from training.data.scratch import Scratch
from training.progress import OnProgress, Watcher

MAX_WORKERS = 4


class Workspace:
    """Use as a context: threads and scratch file are gone when it ends."""

    def __init__(
        self, keep_bytes: int, *, folder: Path | None = None, watcher: Watcher | None = None
    ) -> None:
        self.pool = ThreadPoolExecutor(max_workers=min(MAX_WORKERS, os.cpu_count() or 1))
        self.scratch = Scratch(keep_bytes, folder)
        self.watcher = watcher or Watcher()
        self.notes: list[str] = []

    def __enter__(self) -> "Workspace":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.pool.shutdown(cancel_futures=True)
        self.scratch.close()

    def stage(self, name: str) -> OnProgress | None:
        return self.watcher.stage(name)

    def note(self, text: str) -> None:
        """Tell the watcher, and remember it for the report."""
        self.notes.append(text)
        self.watcher.note(text)
