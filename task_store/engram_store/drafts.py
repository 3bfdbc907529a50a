"""Drafts: parts of an upload, kept until all of them are published as one version of a task.

    drafts/<owner>/<upload>-<task>-<purged>-<part>       SHA-256 of the rest, then the part
    drafts/<owner>/<upload>-<task>-<purged>-published    {"format": 1, "version": 7}

`owner` and `task` are 32 hex digits of the SHA-256 of the caller and of the task's name, `upload`
is an id that the caller chose, and `part` identifies the content of a part: one that is sent twice
is kept once. `purged` is the number of purged versions of the task when the part was written; a
later purge of the task deletes the part. The mark `published` makes it safe to publish again if the
response was lost.
"""

import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Final, Literal, NamedTuple

from engram_store.catalog import Catalog
from engram_store.errors import CorruptStore, TooManyUploads, UnknownUpload
from engram_store.events import Count, Record
from engram_store.layout import DRAFTS
from engram_store.objects import ObjectInfo, Objects

PUBLISHED: Final = "published"
_SEAL_BYTES: Final = 32


@dataclass(frozen=True, slots=True)
class DraftLimits:
    """Limits of all drafts of one caller. A draft expires this long after its newest part."""

    uploads: int = 32
    parts: int = 4096
    nbytes: int = 256 * 1024 * 1024
    age: timedelta = timedelta(days=1)


LIMITS: Final = DraftLimits()


@dataclass(frozen=True, slots=True)
class Draft:
    """The examples that a caller uploads for a task under one id."""

    owner: str  # the caller
    upload: str  # 32 hex digits
    task: str

    @property
    def prefix(self) -> str:
        return f"{_hashed(self.owner)}/{self.upload}-{_hashed(self.task)}-"


class PublishedDraft(Record):
    format: Literal[1] = 1
    version: Count


class _Stored(NamedTuple):
    draft: str  # its prefix
    task: str  # hashed
    purged: int
    part: str
    info: ObjectInfo


class Drafts:
    """The drafts in a store; safe to share between threads and processes."""

    def __init__(self, objects: Objects, limits: DraftLimits = LIMITS) -> None:
        self._objects = objects
        self._limits = limits

    def add(self, draft: Draft, purged: int, part: str, data: bytes, now: datetime) -> int:
        """Keep a part and return how many the draft has, or raise TooManyUploads."""
        stored = self._of_owner(draft.owner)
        expired = self._expired(stored, now - self._limits.age)
        self.delete(each.info.path for each in expired)
        stored = [each for each in stored if each not in expired]
        own = {each.part for each in stored if each.draft == draft.prefix}
        if part not in own:
            self._check_limits(draft, len(data), stored)
            path = DRAFTS.path(f"{draft.prefix}{purged:06d}-{part}")
            self._objects.create(path, hashlib.sha256(data).digest() + data)
        return len({*own, part} - {PUBLISHED})

    def _check_limits(self, draft: Draft, size: int, stored: list[_Stored]) -> None:
        parts = [each for each in stored if each.part != PUBLISHED]
        limits = self._limits
        for count, most, what in (
            (len({*(each.draft for each in parts), draft.prefix}), limits.uploads, "uploads"),
            (len(parts) + 1, limits.parts, "parts of uploads"),
            (sum(each.info.size for each in parts) + size, limits.nbytes, "bytes of uploads"),
        ):
            if count > most:
                hours = limits.age.total_seconds() / 3600
                raise TooManyUploads(
                    f"You would have {count:,} {what} that are not published, and the limit is "
                    f"{most:,}: publish or abort one. They expire after {hours:g} hours."
                )

    def count(self, draft: Draft) -> int:
        """Return the number of parts of a draft."""
        return sum(each.part != PUBLISHED for each in self._of(draft))

    def read(self, draft: Draft, purged: int) -> Iterator[bytes]:
        """Yield the parts of a draft, or raise UnknownUpload if there are none, or not all."""
        stored = [each for each in self._of(draft) if each.part != PUBLISHED]
        if not stored or any(each.purged != purged for each in stored):
            raise unknown_upload(draft)
        for each in stored:
            sealed = self._objects.get(each.info.path)
            if sealed is None:
                raise unknown_upload(draft)
            data = sealed[_SEAL_BYTES:]
            if hashlib.sha256(data).digest() != sealed[:_SEAL_BYTES]:
                raise CorruptStore(
                    f"A part of upload {draft.upload} is damaged ({each.info.path}): abort it, and "
                    f"send the photos again.",
                    names=[each.info.path],
                )
            yield data

    def finish(self, draft: Draft, purged: int, version: int) -> None:
        """Record that a draft was published as a version, and delete its parts."""
        parts = [each.info.path for each in self._of(draft) if each.part != PUBLISHED]
        mark = PublishedDraft(version=version).model_dump_json().encode() + b"\n"
        self._objects.put(DRAFTS.path(f"{draft.prefix}{purged:06d}-{PUBLISHED}"), mark)
        self.delete(parts)

    def published(self, draft: Draft) -> int | None:
        """Return the version that a draft was published as; None if it was not."""
        for each in self._of(draft):
            if each.part == PUBLISHED:
                mark = PublishedDraft.read(self._objects.get(each.info.path))
                return None if mark is None else mark.version
        return None

    def abort(self, draft: Draft) -> int:
        """Delete the parts of a draft and return how many there were."""
        parts = [each.info.path for each in self._of(draft) if each.part != PUBLISHED]
        self.delete(parts)
        return len(parts)

    def expired(self, before: datetime) -> list[ObjectInfo]:
        """List the objects of drafts whose newest object is from before a time."""
        return [each.info for each in self._expired(self._stored(DRAFTS.folder), before)]

    def of_purged(self, catalog: Catalog) -> list[ObjectInfo]:
        """List the objects of drafts from before the last purge of their task."""
        tasks = catalog.all_tasks.values()
        purged = {_hashed(task.name): len(task.purged) for task in tasks if task.purged}
        if not purged:
            return []
        stored = self._stored(DRAFTS.folder)
        return [each.info for each in stored if each.purged < purged.get(each.task, 0)]

    def delete(self, paths: Iterable[str]) -> None:
        for path in paths:
            self._objects.delete(path)

    def _expired(self, stored: list[_Stored], before: datetime) -> list[_Stored]:
        young = {each.draft for each in stored if each.info.modified >= before}
        return [each for each in stored if each.draft not in young]

    def _of(self, draft: Draft) -> list[_Stored]:
        return [each for each in self._of_owner(draft.owner) if each.draft == draft.prefix]

    def _of_owner(self, owner: str) -> list[_Stored]:
        return self._stored(f"{DRAFTS.folder}/{_hashed(owner)}")

    def _stored(self, folder: str) -> list[_Stored]:
        found = []
        for info in self._objects.listing(folder):
            if (name := DRAFTS.name_at(info.path)) is not None:
                draft, purged, part = name.rsplit("-", 2)
                task = draft.rpartition("-")[2]
                found.append(_Stored(f"{draft}-", task, int(purged), part, info))
        return found


def unknown_upload(draft: Draft) -> UnknownUpload:
    return UnknownUpload(
        f"There is no upload {draft.upload} of yours for task '{draft.task}'. It may be aborted or "
        f"expired, or deleted by a purge of the task: send the photos again.",
        names=[draft.upload],
    )


def _hashed(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:32]
