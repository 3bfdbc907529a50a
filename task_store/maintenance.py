"""Looking after a store: what is wrong in it, and what nobody needs any more."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime

from task_store.catalog import Catalog, Problem
from task_store.heartbeats import HEARTBEAT, heartbeat_objects
from task_store.manifest import shown
from task_store.objects import ObjectInfo, Objects

KEPT_CHECKPOINTS = 3

_BLOB = re.compile(r"blobs/sha256/([0-9a-f]{64})")
_LOG = re.compile(r"log/(\d{20})\.json")
_CHECKPOINT = re.compile(r"checkpoints/(\d{20})\.json")


@dataclass(frozen=True, slots=True)
class GarbageReport:
    """What a collection deleted, or would delete (`dry_run`)."""

    blobs: tuple[str, ...]
    staged: tuple[str, ...]
    checkpoints: tuple[str, ...]
    heartbeats: tuple[str, ...]  # of replicas that are gone
    freed_bytes: int
    # Unreferenced, and too young to be sure that nobody is about to publish them.
    waiting: tuple[str, ...]
    dry_run: bool


def find_problems(
    objects: Objects, catalog: Catalog, skipped: Mapping[str, Problem]
) -> list[Problem]:
    """Foreign names, damaged entries, gaps in the log, missing or resized bundles."""
    found = dict(skipped)
    generations: set[int] = set()
    blobs: dict[str, int] = {}
    for info in objects.listing(""):
        if match := _LOG.fullmatch(info.path):
            generations.add(int(match[1]))
        elif match := _BLOB.fullmatch(info.path):
            blobs["sha256:" + match[1]] = info.size
        elif not (_CHECKPOINT.fullmatch(info.path) or HEARTBEAT.fullmatch(info.path)):
            path = shown(info.path, 200)
            found[path] = Problem(path, "a foreign object, ignored")
    for problem in (*_gaps(generations, catalog.generation), *_lost(catalog, blobs)):
        found.setdefault(problem.path, problem)
    return sorted(found.values(), key=lambda problem: problem.path)


def collect_garbage(
    objects: Objects, refresh: Callable[[], Catalog], *, before: datetime, dry_run: bool
) -> GarbageReport:
    """Delete what is unreferenced and was last written before `before`."""
    unreferenced = _unreferenced(objects, refresh())
    old = [info for info in unreferenced if info.modified < before]
    waiting = tuple(info.path for info in unreferenced if info.modified >= before)
    blobs = [info for info in old if dry_run or _delete_blob(objects, refresh, info, before)]
    staged = [info for info in objects.staged() if info.modified < before]
    checkpoints = _old_checkpoints(objects)
    heartbeats = [info for info in heartbeat_objects(objects) if info.modified < before]
    if not dry_run:
        for info in staged:
            objects.delete_staged(info)
        for info in (*checkpoints, *heartbeats):
            objects.delete(info.path)
    return GarbageReport(
        blobs=tuple(info.path for info in blobs),
        staged=tuple(info.path for info in staged),
        checkpoints=tuple(info.path for info in checkpoints),
        heartbeats=tuple(info.path for info in heartbeats),
        freed_bytes=sum(info.size for info in (*blobs, *staged, *checkpoints, *heartbeats)),
        waiting=waiting,
        dry_run=dry_run,
    )


def _unreferenced(objects: Objects, catalog: Catalog) -> list[ObjectInfo]:
    result = []
    for info in objects.listing("blobs"):
        match = _BLOB.fullmatch(info.path)
        if match and "sha256:" + match[1] not in catalog.by_digest:
            result.append(info)
    return result


def _delete_blob(
    objects: Objects, refresh: Callable[[], Catalog], info: ObjectInfo, before: datetime
) -> bool:
    """Look once more right before deleting: a publisher may be about to refer to it.

    A publisher writes its blob anew before it appends, so a young blob tells us to leave it; and it
    looks for the blob after it appended, should our deletion have come in between.
    """
    digest = "sha256:" + info.path.rpartition("/")[2]
    now = objects.stat(info.path)
    if now is None or now.modified >= before or digest in refresh().by_digest:
        return False
    objects.delete(info.path)
    return True


def _old_checkpoints(objects: Objects) -> list[ObjectInfo]:
    """All but the newest few; a damaged newest one still leaves others to fall back to."""
    found = [info for info in objects.listing("checkpoints") if _CHECKPOINT.fullmatch(info.path)]
    return found[:-KEPT_CHECKPOINTS]


def _gaps(generations: set[int], newest: int) -> list[Problem]:
    missing = sorted(set(range(1, newest + 1)) - generations)
    return [Problem(f"log/{g:020d}.json", "missing from the log") for g in missing]


def _lost(catalog: Catalog, blobs: Mapping[str, int]) -> list[Problem]:
    result = []
    for digest, versions in catalog.by_digest.items():
        path = "blobs/sha256/" + digest.removeprefix("sha256:")
        refs = ", ".join(version.ref for version in versions)
        if digest not in blobs:
            result.append(Problem(path, f"the bundle of {refs} is missing"))
        elif blobs[digest] != versions[0].facts.size:
            sizes = f"{blobs[digest]} bytes instead of {versions[0].facts.size}"
            result.append(Problem(path, f"the bundle of {refs} has {sizes}"))
    return result
