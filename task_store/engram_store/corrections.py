"""Corrections of a trained task's predictions, kept for its next training.

    corrections/<task>/<20-digit number>.json    {"format": 1, "task": "pets", "version": 3, …}

Each object is one request's corrections, created only if absent and never changed. The newest
correction of an image counts. Images are not stored: the SHA-256 of its file identifies an image.
"""

import re
from collections.abc import Sequence
from typing import Literal

from engram_bundle import Digest, check_task_name

from engram_store.events import Count, Record
from engram_store.layout import CORRECTIONS
from engram_store.objects import Objects


class Correction(Record):
    digest: Digest
    labels: tuple[str, ...]


class CorrectionRecord(Record):
    format: Literal[1] = 1
    time: str
    actor: str
    task: str
    version: Count  # the default version at that time
    corrections: tuple[Correction, ...]


class Corrections:
    """The corrections in a store. Records that cannot be read are skipped."""

    def __init__(self, objects: Objects) -> None:
        self._objects = objects

    def append(self, record: CorrectionRecord) -> None:
        data = record.model_dump_json().encode() + b"\n"
        number = 1 + max((int(name[-20:]) for name in self._names(record.task)), default=0)
        # Another writer may take the same number first.
        while not self._objects.create(CORRECTIONS.path(f"{record.task}/{number:020d}"), data):
            number += 1

    def read(self, task: str) -> list[CorrectionRecord]:
        """Return all records about a task, oldest first."""
        contents = self._objects.get_many([CORRECTIONS.path(name) for name in self._names(task)])
        return [record for record in map(CorrectionRecord.read, contents) if record]

    def _names(self, task: str) -> list[str]:
        own = re.compile(rf"{re.escape(check_task_name(task))}/\d{{20}}")
        # Only the task's folder: other tasks may have thousands.
        paths = (info.path for info in self._objects.listing(f"{CORRECTIONS.folder}/{task}"))
        names = (CORRECTIONS.name_at(path) for path in paths)
        return [name for name in names if name is not None and own.fullmatch(name)]


def newest_of(
    records: Sequence[CorrectionRecord],
) -> dict[str, tuple[CorrectionRecord, Correction]]:
    """Return the newest correction of each image, by digest, oldest first."""
    newest: dict[str, tuple[CorrectionRecord, Correction]] = {}
    for record in records:
        for correction in record.corrections:
            newest.pop(correction.digest, None)
            newest[correction.digest] = record, correction
    return newest
