"""Corrections of a trained task's predictions, kept for its next training.

    corrections/<task>/<20-digit number>.json              {"sha256": "…", "format": 2, …}
    corrections/<task>/<20-digit number>-<6 digits>.json   the same, after a removal

Each record is one request's corrections, created only if absent. A removal creates the next
revision of a record, without the removed corrections, only if absent, and then empties the earlier
revisions. The last revision counts. No name is used twice, so concurrent removals, and copies of
the store, agree. The newest correction of an image counts. Images are not stored: the SHA-256 of
its file identifies an image.
"""

import hashlib
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Final, Literal, NamedTuple

from engram_bundle import Digest, check_task_name

from engram_store.catalog import Catalog, TaskInfo
from engram_store.errors import CorrectionsFull
from engram_store.events import Count, Record, format_time
from engram_store.layout import CORRECTIONS, correction_at, correction_path
from engram_store.objects import ObjectInfo, Objects

_SEAL = re.compile(rb'\{"sha256":"([0-9a-f]{64})",')
REPLACED: Final = b""  # the content of a revision that a later one replaces
_RECORDS_AT_ONCE: Final = 64  # in memory
_COUNTED_TASKS: Final = 1024


class Correction(Record):
    digest: Digest
    labels: tuple[str, ...]


class CorrectionRecord(Record):
    """The corrections of one request. Format 1 has no checksum."""

    format: Literal[1, 2] = 2
    time: str
    actor: str
    task: str
    version: Count  # the default version at that time
    corrections: tuple[Correction, ...]

    def to_json(self) -> bytes:
        """Return the stored form: its first key is the SHA-256 of the same bytes without it."""
        body = self.model_copy(update={"format": 2}).model_dump_json().encode() + b"\n"
        return b'{"sha256":"%s",' % hashlib.sha256(body).hexdigest().encode() + body[1:]

    @classmethod
    def from_json(cls, data: bytes | None) -> "CorrectionRecord | None":
        """Read a stored record; None if it is missing, damaged or invalid."""
        seal = _SEAL.match(data or b"")
        if seal is not None and data is not None:
            data = b"{" + data[seal.end() :]
            if hashlib.sha256(data).hexdigest().encode() != seal[1]:
                return None
        record = cls.read(data)
        return None if record is not None and record.format > 1 and seal is None else record


@dataclass(frozen=True, slots=True)
class CorrectionLimits:
    """Limits of one task; a photo that was corrected twice counts twice."""

    photos: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class CorrectionPage:
    """Some records of a task, newest first."""

    records: tuple[CorrectionRecord, ...]
    total: int  # number of records of the task, also of those that are empty or unreadable
    unreadable: int  # number of records among those requested


class _Stored(NamedTuple):
    """The last revision of a record."""

    task: str
    number: int
    revision: int
    size: int
    modified: datetime
    earlier: tuple[str, ...]  # paths of earlier revisions that a removal did not empty
    paths: tuple[str, ...]  # of all revisions, also empty ones

    @property
    def path(self) -> str:
        return correction_path(self.task, self.number, self.revision)

    @property
    def next(self) -> "_Stored":
        return self._replace(revision=self.revision + 1)


@dataclass(frozen=True, slots=True)
class _Counted:
    newest: int  # the number of the last record that was counted
    nbytes: int  # of the records up to it
    photos: int


class Corrections:
    """The corrections in a store; safe to share between threads and processes."""

    def __init__(self, objects: Objects) -> None:
        self._objects = objects
        self._counted: dict[str, _Counted] = {}  # by task, to read only what is new

    def append(self, record: CorrectionRecord, limits: CorrectionLimits | None = None) -> None:
        """Store a record, or raise CorrectionsFull."""
        data = record.to_json()
        stored = self._stored(record.task)
        if limits is not None:
            self._check_limits(record, len(data), stored, limits)
        number = 1 + max((each.number for each in stored), default=0)
        # Another writer may take the same number first.
        while not self._objects.create(correction_path(record.task, number), data):
            number += 1

    def _check_limits(
        self,
        record: CorrectionRecord,
        size: int,
        stored: Sequence[_Stored],
        limits: CorrectionLimits,
    ) -> None:
        task = record.task
        for most, unit, count in (
            (limits.nbytes, "bytes", size + sum(each.size for each in stored)),
            (limits.photos, "photos", len(record.corrections) + self._count(task, stored)),
        ):
            if count > most:
                raise CorrectionsFull(
                    f"Task '{task}' would have corrections of {count:,} {unit}, and the limit is "
                    f"{most:,}: train the task with them, then delete them.",
                    names=[task],
                )

    def _count(self, task: str, stored: Sequence[_Stored]) -> int:
        """Count the photos in records; reads only those that are new since the last call."""
        before = self._counted.get(task, _Counted(0, 0, 0))
        known = [each for each in stored if each.number <= before.newest]
        if sum(each.size for each in known) != before.nbytes:  # some were removed
            before, known = _Counted(0, 0, 0), []
        new = stored[len(known) :]
        photos = before.photos + sum(len(r.corrections) for r in self._read(new) if r is not None)
        if len(self._counted) >= _COUNTED_TASKS:
            self._counted.clear()
        if stored:
            nbytes = sum(each.size for each in stored)
            self._counted[task] = _Counted(stored[-1].number, nbytes, photos)
        return photos

    def read(self, task: str, *, offset: int = 0, limit: int | None = None) -> CorrectionPage:
        """Return up to `limit` records, newest first, after the newest `offset`."""
        newest_first = self._stored(task)[::-1]
        page = newest_first[offset : None if limit is None else offset + limit]
        records = list(self._read(page))
        readable = tuple(record for record in records if record is not None)
        return CorrectionPage(readable, len(newest_first), len(records) - len(readable))

    def remove(self, task: str, digests: Collection[str] | None = None) -> int:
        """Remove the corrections of these images, or all, and return their number.

        Also removes damaged records that contain one of the digests.
        """
        return sum(self._remove(stored, digests) for stored in self._stored(task))

    def _remove(self, stored: _Stored, digests: Collection[str] | None) -> int:
        while True:
            stored, data = self._load(stored)
            if data is None:
                return 0
            record = CorrectionRecord.from_json(data)
            found = () if record is None else record.corrections
            gone = {each.digest for each in found if digests is None or each.digest in digests}
            # A record that cannot be read may still contain a digest as text.
            damaged = record is None and (digests is None or _contains_any(data, digests))
            if not gone and not damaged:
                self.empty(stored.earlier)
                return 0
            kept = tuple(each for each in found if each.digest not in gone)
            record = record or _blank_record(stored)
            revision = record.model_copy(update={"corrections": kept}).to_json()
            if self._objects.create(stored.next.path, revision):
                self.empty([stored.path, *stored.earlier])
                return len(found) - len(kept)
            stored = stored.next  # another removal was first

    def _load(self, stored: _Stored) -> tuple[_Stored, bytes | None]:
        """Read the last revision of a record, also if it was replaced since it was listed."""
        while (data := self._objects.get(stored.path)) == REPLACED:
            stored = stored.next
        return stored, data

    def of_purged(self, catalog: Catalog) -> list[str]:
        """Return the paths of the corrections of tasks that were purged as a whole."""
        return [
            path
            for task in catalog.all_tasks.values()
            if task.purged_whole
            for stored in self._stored(task.name)
            if self._is_purged(stored, task)
            for path in stored.paths
        ]

    def _is_purged(self, stored: _Stored, task: TaskInfo) -> bool:
        # The task may have been published again since, and corrected.
        if not task.versions:
            return True
        record = CorrectionRecord.from_json(self._objects.get(stored.path))
        return record is not None and record.version <= task.purged_whole

    def delete_older(self, before: datetime, *, dry_run: bool = False) -> tuple[str, ...]:
        """Delete the records of all tasks from before a time, and return their paths."""
        deleted: list[str] = []
        limit = format_time(before)  # of the same length as all times, so texts compare
        for task in self.tasks():
            stored = self._stored(task)
            for each in stored:
                record = CorrectionRecord.from_json(self._objects.get(each.path))
                if record is None:
                    continue
                if record.time > limit:
                    break
                if record.corrections:
                    deleted.append(each.path)
                if dry_run:
                    continue
                if each is stored[-1]:
                    self._remove(each, None)  # keeps its number in use
                else:
                    self.delete(each.paths)
        return tuple(deleted)

    def delete(self, paths: Iterable[str]) -> None:
        for path in paths:
            self._objects.delete(path)

    def tasks(self) -> list[str]:
        """Return the names of the tasks that have records."""
        found = (correction_at(info.path) for info in self._objects.listing(CORRECTIONS.folder))
        return sorted({each[0] for each in found if each is not None})

    def replaced(self) -> list[str]:
        """Return the paths of revisions that an interrupted removal did not empty."""
        return [path for task in self.tasks() for s in self._stored(task) for path in s.earlier]

    def empty(self, paths: Iterable[str]) -> None:
        """Empty earlier revisions; they stay, so that their names are not used again."""
        for path in paths:
            self._objects.put(path, REPLACED)

    def unreadable(self) -> Iterator[str]:
        """Read every record, and yield the paths of those that cannot be read."""
        for task in self.tasks():
            stored = self._stored(task)
            for each, record in zip(stored, self._read(stored), strict=True):
                if record is None or record.task != task:
                    yield each.path

    def copy_to(self, target: "Corrections", catalog: Catalog) -> None:
        """Copy the last revision of every record that the target does not have.

        `catalog` is that of this store: corrections of purged tasks are not copied.
        """
        purged = set(self.of_purged(catalog))
        for task in self.tasks():
            present = {each.number: each for each in target._stored(task)}
            for stored in self._stored(task):
                if stored.path in purged:
                    continue
                there = present.get(stored.number)
                if there is None or there.revision < stored.revision:
                    data = self._objects.get(stored.path)
                    if data is not None and target._objects.create(stored.path, data):
                        target.empty([] if there is None else [there.path])
                target.empty([] if there is None else there.earlier)

    def _stored(self, task: str) -> list[_Stored]:
        """List the last revision of each record of a task, oldest first."""
        check_task_name(task)
        records: dict[int, dict[int, ObjectInfo]] = {}
        # Only the task's folder: other tasks may have thousands.
        for info in self._objects.listing(f"{CORRECTIONS.folder}/{task}"):
            found = correction_at(info.path)
            if found is not None and found[0] == task:
                records.setdefault(found[1], {})[found[2]] = info
        return [_last_of(task, number, records[number]) for number in sorted(records)]

    def _read(self, stored: Sequence[_Stored]) -> Iterator[CorrectionRecord | None]:
        for start in range(0, len(stored), _RECORDS_AT_ONCE):
            chunk = stored[start : start + _RECORDS_AT_ONCE]
            contents = self._objects.get_many([each.path for each in chunk])
            for each, data in zip(chunk, contents, strict=True):
                current = self._load(each)[1] if data == REPLACED else data
                yield CorrectionRecord.from_json(current)


def _last_of(task: str, number: int, revisions: Mapping[int, ObjectInfo]) -> _Stored:
    infos = [revisions[revision] for revision in sorted(revisions)]
    return _Stored(
        task,
        number,
        max(revisions),
        infos[-1].size,
        infos[-1].modified,
        earlier=tuple(info.path for info in infos[:-1] if info.size),
        paths=tuple(info.path for info in infos),
    )


def _blank_record(stored: _Stored) -> CorrectionRecord:
    """Return an empty record in place of one that cannot be read."""
    time = format_time(stored.modified)
    return CorrectionRecord(time=time, actor="", task=stored.task, version=1, corrections=())


def _contains_any(data: bytes, digests: Iterable[str]) -> bool:
    return any(digest.removeprefix("sha256:").encode() in data for digest in digests)


def newest_of(
    records: Iterable[CorrectionRecord],
) -> dict[str, tuple[CorrectionRecord, Correction]]:
    """Return the newest correction of each image, by digest, of records with the newest first."""
    newest: dict[str, tuple[CorrectionRecord, Correction]] = {}
    for record in records:
        for correction in record.corrections:
            newest.setdefault(correction.digest, (record, correction))
    return newest
