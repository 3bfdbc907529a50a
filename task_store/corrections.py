"""Corrections to trained tasks, kept beside them in the store for the next training.

    corrections/<task>/<20-digit number>.json    {"format": 1, "task": "pets", "version": 3, …}

Each object is what somebody said at one moment, created only if absent and never changed. Of a
photo that was corrected twice the later correction holds. Never photos: a photo is known by the
SHA-256 of its file, and by the feature that heads on its backbone read.
"""

import contextlib
import re
from collections.abc import Sequence
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from task_store.layout import CORRECTIONS
from task_store.manifest import Digest
from task_store.names import check_task_name
from task_store.objects import Objects


class _Record(BaseModel):
    model_config = ConfigDict(extra="ignore", frozen=True)


class Correction(_Record):
    """What a photo shows."""

    digest: Digest
    labels: tuple[str, ...]
    feature: str | None = None  # float16 in base64, little endian; None where it was not at hand


class CorrectionRecord(_Record):
    """What somebody corrected at one moment."""

    format: Literal[1] = 1
    time: str
    actor: str
    task: str
    version: Annotated[int, Field(ge=1)]  # that was served
    fingerprint: Digest  # of the backbone that made the features
    corrections: tuple[Correction, ...]


class Corrections:
    """The corrections in a store. A record that cannot be read is passed over."""

    def __init__(self, objects: Objects) -> None:
        self._objects = objects

    def append(self, record: CorrectionRecord) -> None:
        """Keep a record; StoreUnavailable if that cannot be."""
        check_task_name(record.task)
        data = record.model_dump_json(exclude_none=True).encode() + b"\n"
        number = 1 + max((int(name[-20:]) for name in self._names(record.task)), default=0)
        # Every loss is another's record.
        while not self._objects.create(CORRECTIONS.path(f"{record.task}/{number:020d}"), data):
            number += 1

    def read(self, task: str) -> list[CorrectionRecord]:
        """All records about a task, oldest first."""
        names = self._names(task)
        records: list[CorrectionRecord] = []
        for data in self._objects.get_many([CORRECTIONS.path(name) for name in names]):
            with contextlib.suppress(ValidationError):
                if data is not None:
                    records.append(CorrectionRecord.model_validate_json(data))
        return records

    def _names(self, task: str) -> list[str]:
        own = re.compile(rf"{re.escape(check_task_name(task))}/\d{{20}}")
        # Not by the whole folder: other tasks may have thousands.
        paths = (info.path for info in self._objects.listing(f"{CORRECTIONS.folder}/{task}"))
        names = (CORRECTIONS.name_at(path) for path in paths)
        return [name for name in names if name is not None and own.fullmatch(name)]


def newest_of(
    records: Sequence[CorrectionRecord],
) -> dict[str, tuple[CorrectionRecord, Correction]]:
    """What holds of each photo, by its digest, in the order of the corrections."""
    newest: dict[str, tuple[CorrectionRecord, Correction]] = {}
    for record in records:
        for correction in record.corrections:
            newest.pop(correction.digest, None)
            newest[correction.digest] = record, correction
    return newest
