"""The answers to recent images, by digest, so that feedback can score them later.

Kept as arrays of one batch each: an image costs one entry here, however many tasks answered it, and
however often it was requested in one batch.
"""

from collections import OrderedDict
from collections.abc import Collection, Iterable, Sequence
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from engram_server.engine.rollout.comparison import Answers, label_of
from engram_server.engine.types import TaskVersion

MAX_IMAGES: Final = 20_000
MAX_ANSWERS: Final = 2_000_000  # of all tasks


class _Tops(NamedTuple):
    by: TaskVersion
    rows: dict[str, int]  # by digest
    tops: npt.NDArray[np.int32]  # the index of the top label


class _Batch:
    """The top labels of one batch, by task."""

    def __init__(self, digests: Sequence[str], answers: Iterable[Answers]) -> None:
        self.digests = dict.fromkeys(digests)
        self.tasks: dict[str, list[_Tops]] = {}
        for each in answers:
            if each.by.task_type == "single_label":
                each = each.usable
                rows = {digests[image]: row for row, image in enumerate(each.images.tolist())}
                tops = (
                    each.logits.argmax(axis=1).astype(np.int32) if rows else np.zeros(0, np.int32)
                )
                self.tasks.setdefault(each.by.name, []).append(_Tops(each.by, rows, tops))

    @property
    def size(self) -> int:
        return sum(len(each.rows) for tops in self.tasks.values() for each in tops)

    def answers(self, digest: str) -> bool:
        return any(digest in each.rows for tops in self.tasks.values() for each in tops)


class RecentAnswers:
    """Answers by digest, the oldest dropped first. Not thread-safe."""

    def __init__(self, max_images: int = MAX_IMAGES, max_answers: int = MAX_ANSWERS) -> None:
        self._max_images = max_images
        self._max_answers = max_answers
        self._batches: OrderedDict[_Batch, None] = OrderedDict()
        self._found: dict[str, dict[_Batch, None]] = {}
        self._scored: dict[str, set[str]] = {}  # by digest, the tasks with feedback
        self._images = 0  # of all batches
        self._answers = 0

    def add(self, digests: Sequence[str], answers: Iterable[Answers]) -> None:
        batch = _Batch(digests, answers)
        if not batch.size:
            return
        self._batches[batch] = None
        self._images += len(batch.digests)
        self._answers += batch.size
        for digest in batch.digests:
            self._found.setdefault(digest, {})[batch] = None
        while self._images > self._max_images or self._answers > self._max_answers:
            oldest, _ = self._batches.popitem(last=False)
            self._answers -= oldest.size
            for digest in list(oldest.digests):
                self._drop(oldest, digest)

    def _drop(self, batch: _Batch, digest: str) -> None:
        del batch.digests[digest]
        if not batch.digests:
            self._batches.pop(batch, None)
        self._images -= 1
        found = self._found[digest]
        del found[batch]
        if not found:
            del self._found[digest]
            self._scored.pop(digest, None)

    def answers(self, task: str, digest: str) -> dict[TaskVersion, str]:
        """Return the top label of every version of a task that saw an image."""
        found: dict[int | None, tuple[TaskVersion, str]] = {}
        for batch in self._found.get(digest, ()):
            for by, rows, tops in batch.tasks.get(task, ()):
                if digest in rows:
                    found[by.version] = by, label_of(by, int(tops[rows[digest]]))
        return dict(found.values())

    def mark_scored(self, task: str, digest: str) -> bool:
        """Note feedback about an image; False if there was some before."""
        tasks = self._scored.setdefault(digest, set())
        if task in tasks:
            return False
        tasks.add(task)
        return True

    def forget(self, task: str, digests: Collection[str] | None = None) -> None:
        """Drop the answers of a task for these images, or for all."""
        for digest in list(self._found) if digests is None else digests:
            self._scored.get(digest, set()).discard(task)
            for batch in list(self._found.get(digest, ())):
                for each in batch.tasks.get(task, ()):
                    self._answers -= each.rows.pop(digest, None) is not None
                if not batch.answers(digest):
                    self._drop(batch, digest)
