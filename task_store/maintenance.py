"""Looking after a store: what is wrong in it, and what nobody needs any more."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime

from task_store.catalog import Catalog, Damage
from task_store.layout import (
    BLOBS,
    CHECKPOINTS,
    CORRECTIONS,
    LOG,
    REPLICAS,
    blob_path,
    digest_at,
    log_path,
)
from task_store.manifest import shown
from task_store.objects import ObjectInfo, Objects

KEPT_CHECKPOINTS = 3


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


def find_damage(objects: Objects, catalog: Catalog, skipped: Mapping[str, Damage]) -> list[Damage]:
    """Foreign names, damaged entries, gaps in the log, missing or resized bundles."""
    found = dict(skipped)
    generations: set[int] = set()
    sizes: dict[str, int] = {}
    for info in objects.listing(""):
        if generation := LOG.name_at(info.path):
            generations.add(int(generation))
        elif digest := digest_at(info.path):
            sizes[digest] = info.size
        elif not any(place.name_at(info.path) for place in (CHECKPOINTS, CORRECTIONS, REPLICAS)):
            path = shown(info.path, 200)
            found[path] = Damage(path, "a foreign object, ignored")
    missing = set(range(1, catalog.generation + 1)) - generations
    gaps = (Damage(log_path(g), "missing from the log") for g in missing)
    for damage in (*gaps, *_lost(catalog, sizes)):
        found.setdefault(damage.path, damage)
    return sorted(found.values(), key=lambda damage: damage.path)


def collect_garbage(
    objects: Objects, refresh: Callable[[], Catalog], *, before: datetime, dry_run: bool
) -> GarbageReport:
    """Delete what is unreferenced and was last written before `before`."""
    known = refresh().by_digest
    unreferenced = [i for i in objects.named(BLOBS).values() if digest_at(i.path) not in known]
    old = [info for info in unreferenced if info.modified < before]
    waiting = tuple(info.path for info in unreferenced if info.modified >= before)
    blobs = [info for info in old if dry_run or _delete_blob(objects, refresh, info, before)]
    staged = [info for info in objects.staged() if info.modified < before]
    # A damaged newest checkpoint still leaves others to fall back to.
    checkpoints = list(objects.named(CHECKPOINTS).values())[:-KEPT_CHECKPOINTS]
    heartbeats = [info for info in objects.named(REPLICAS).values() if info.modified < before]
    if not dry_run:
        for info in (*staged, *checkpoints, *heartbeats):
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


def _delete_blob(
    objects: Objects, refresh: Callable[[], Catalog], info: ObjectInfo, before: datetime
) -> bool:
    """Look once more right before deleting: a publisher may be about to refer to it.

    A publisher writes its blob anew before it appends, so a young blob tells us to leave it; and it
    looks for the blob after it appended, should our deletion have come in between.
    """
    now = objects.stat(info.path)
    if now is None or now.modified >= before or digest_at(info.path) in refresh().by_digest:
        return False
    objects.delete(info.path)
    return True


def _lost(catalog: Catalog, sizes: Mapping[str, int]) -> list[Damage]:
    result = []
    for digest, versions in catalog.by_digest.items():
        refs = ", ".join(version.ref for version in versions)
        size, published = sizes.get(digest), versions[0].facts.size
        if size != published:
            how = "is missing" if size is None else f"has {size} bytes instead of {published}"
            result.append(Damage(blob_path(digest), f"the bundle of {refs} {how}"))
    return result
