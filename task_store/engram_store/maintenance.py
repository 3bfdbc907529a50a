"""Finding damage in a store, and deleting garbage."""

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime

from engram_bundle import BundleError, BundleLimits, TaskBundle, digest_of
from engram_bundle.untrusted import printable

from engram_store import layout
from engram_store.catalog import Catalog, Damage
from engram_store.corrections import Corrections
from engram_store.drafts import Drafts
from engram_store.errors import UnsupportedFormat
from engram_store.layout import BLOBS, CHECKPOINTS, LOG, blob_at, checkpoint_path, log_path
from engram_store.objects import ObjectInfo, Objects
from engram_store.replay import load_checkpoint, replay
from engram_store.replicas.evidence import Evidence

KEPT_CHECKPOINTS = 3
# Objects that may be in a store besides bundles and the log.
_OTHERS = (
    CHECKPOINTS,
    layout.CLOCK,
    layout.CORRECTIONS,
    layout.DRAFTS,
    layout.EVIDENCE,
    layout.REPLICAS,
)
_DIGESTS_PER_ENTRY = 1000  # keeps log entries small, however much garbage there is


@dataclass(frozen=True, slots=True)
class GarbageReport:
    """The objects that a collection deleted, or would delete (`dry_run`)."""

    blobs: tuple[str, ...]
    staged: tuple[str, ...]
    checkpoints: tuple[str, ...]
    heartbeats: tuple[str, ...]  # of stopped replicas
    corrections: tuple[str, ...]  # left by interrupted purges and removals
    drafts: tuple[str, ...]  # of uploads that were not published
    freed_bytes: int
    waiting: tuple[str, ...]  # unpublished, but young enough to be part of a publish
    dry_run: bool


@dataclass(frozen=True, slots=True)
class Verification:
    generation: int
    bundles: int
    bundle_bytes: int
    checkpoints: int
    corrections: int  # records
    damages: tuple[Damage, ...]


def find_damage(objects: Objects, catalog: Catalog, known: Mapping[str, Damage]) -> list[Damage]:
    """Add foreign objects, gaps in the log and missing or resized bundles to known damage."""
    found = dict(known)
    generations: set[int] = set()
    sizes: dict[str, int] = {}
    for info in objects.listing(""):
        if generation := LOG.name_at(info.path):
            generations.add(int(generation))
        elif blob_at(info.path):
            sizes[info.path] = info.size
        elif not any(kind.name_at(info.path) for kind in _OTHERS):
            path = printable(info.path, 200)
            found[path] = Damage(path, "a foreign object, ignored")
    missing = set(range(1, catalog.generation + 1)) - generations
    gaps = (Damage(log_path(g), "missing from the log") for g in missing)
    for damage in (*gaps, *_lost_bundles(catalog, sizes)):
        found.setdefault(damage.path, damage)
    return sorted(found.values(), key=lambda damage: damage.path)


def _lost_bundles(catalog: Catalog, sizes: Mapping[str, int]) -> Iterator[Damage]:
    for digest, versions in catalog.by_digest.items():
        path = catalog.blob_path(digest)
        size, published = sizes.get(path), versions[0].facts.size
        if size != published:
            refs = ", ".join(version.ref for version in versions)
            how = "is missing" if size is None else f"has {size} bytes instead of {published}"
            yield Damage(path, f"the bundle of {refs} {how}")


def verify(
    objects: Objects, catalog: Catalog, limits: BundleLimits, found: Iterable[Damage]
) -> Verification:
    """Read the log from its first entry, all published bundles, checkpoints and corrections.

    `found` is the result of `find_damage`. An unpublished bundle is garbage, not damage. One that
    was purged and is still there is reported.
    """
    # The log is read again: a wrong checkpoint may have made a valid entry look damaged.
    damages = {damage.path: damage for damage in found if not LOG.name_at(damage.path)}
    checkpoints = list(map(int, objects.named(CHECKPOINTS)))
    log, new, at = replay(objects, catalog.generation, stops=frozenset(checkpoints))
    new += _damaged_checkpoints(objects, checkpoints, at)
    # A checkpoint may have bundles whose log entry is now damaged.
    digests = dict.fromkeys((*log.by_digest, *catalog.by_digest))
    total = 0
    for digest in digests:
        path = (log if digest in log.by_digest else catalog).blob_path(digest)
        data = objects.get(path)
        total += len(data or b"")
        if reason := _bundle_damage(data, digest, limits):
            new.append(Damage(path, reason))
    new += _undeleted(objects, log)
    records = Corrections(objects)
    new += [
        Damage(path, "damaged corrections: they cannot be read") for path in records.unreadable()
    ]
    for damage in new:
        damages.setdefault(damage.path, damage)
    return Verification(
        generation=log.generation,
        bundles=len(digests),
        bundle_bytes=total,
        checkpoints=len(checkpoints),
        corrections=len(objects.named(layout.CORRECTIONS)),
        damages=tuple(sorted(damages.values(), key=lambda damage: damage.path)),
    )


def _undeleted(objects: Objects, catalog: Catalog) -> Iterator[Damage]:
    """Report what an interrupted purge or removal did not delete."""
    for info in released_blobs(objects, catalog):
        digest, _ = blob_at(info.path) or ("", 0)
        if digest in catalog.purged:
            yield Damage(info.path, "a purged bundle, still present: run the purge again, or gc")
    records = Corrections(objects)
    for path in records.of_purged(catalog):
        yield Damage(path, "corrections of a purged task: run the purge again, or gc")
    for info in Drafts(objects).of_purged(catalog):
        yield Damage(info.path, "an upload for a purged task: run the purge again, or gc")
    for info in Evidence(objects).of_purged(catalog):
        yield Damage(info.path, "evidence about a purged version: run the purge again, or gc")
    for path in records.replaced():
        yield Damage(path, "removed corrections, still present: remove them again, or run gc")


def _bundle_damage(data: bytes | None, digest: str, limits: BundleLimits) -> str | None:
    if data is None:
        return "a published bundle, missing"
    if (actual := digest_of(data)) != digest:
        return f"damaged or replaced: its digest is {actual}"
    try:
        TaskBundle.from_bytes(data, limits)
    except BundleError as error:
        return f"published, but not a valid bundle: {error}"
    return None


def _damaged_checkpoints(
    objects: Objects, generations: Sequence[int], replayed: Mapping[int, Catalog]
) -> Iterator[Damage]:
    for generation in generations:
        path = checkpoint_path(generation)
        data = objects.get(path)
        try:
            # A checkpoint of another format is not read, and may be deleted meanwhile.
            with contextlib.suppress(UnsupportedFormat):
                loaded = None if data is None else load_checkpoint(data, generation)
                if loaded is not None and loaded != replayed.get(generation):
                    raise ValueError("it differs from the log")
        except ValueError as error:
            yield Damage(path, f"damaged checkpoint: {error}")


def released_blobs(objects: Objects, catalog: Catalog) -> list[ObjectInfo]:
    """List the bundles at paths that a collection or a purge released.

    An interrupted one did not delete them, or a late writer wrote them again.
    """
    return [info for info in objects.named(BLOBS).values() if _is_released(info, catalog)]


def _is_released(info: ObjectInfo, catalog: Catalog) -> bool:
    digest, collected = blob_at(info.path) or ("", 0)
    return collected < catalog.collected.get(digest, 0)


def delete_purged(objects: Objects, catalog: Catalog) -> None:
    """Delete released bundles, uploads, evidence, and corrections of tasks purged as a whole."""
    for info in released_blobs(objects, catalog):
        objects.delete(info.path)
    corrections = Corrections(objects)
    corrections.delete(corrections.of_purged(catalog))
    drafts = Drafts(objects)
    drafts.delete(info.path for info in drafts.of_purged(catalog))
    evidence = Evidence(objects)
    evidence.delete(evidence.of_purged(catalog))


def collect_garbage(
    objects: Objects,
    catalog: Catalog,
    release: Callable[[Mapping[str, int]], tuple[str, ...]],
    *,
    before: datetime,
    dry_run: bool,
) -> GarbageReport:
    """Delete unreferenced objects that were last written before `before`.

    `catalog` is a replay of the whole log. A bundle is deleted only after a log entry has released
    its path: no later publish uses that path again, so the deletion cannot race with one.
    docs/reference/task-store.md#garbage has the argument.
    """
    blobs: list[ObjectInfo] = []
    candidates: dict[str, ObjectInfo] = {}
    waiting: list[str] = []
    for info in objects.named(BLOBS).values():
        digest, _ = blob_at(info.path) or ("", 0)
        if _is_released(info, catalog):
            blobs.append(info)
        elif digest and digest not in catalog.by_digest:
            if info.modified < before:
                candidates[digest] = info
            else:
                waiting.append(info.path)
    generations = [(digest, catalog.collected.get(digest, 0)) for digest in candidates]
    for start in range(0, len(generations), _DIGESTS_PER_ENTRY):
        chunk = dict(generations[start : start + _DIGESTS_PER_ENTRY])
        blobs += [candidates[digest] for digest in (chunk if dry_run else release(chunk))]
    # If the newest checkpoint is damaged, readers fall back to another.
    checkpoints = list(objects.named(CHECKPOINTS).values())[:-KEPT_CHECKPOINTS]

    def old(infos: Iterable[ObjectInfo]) -> list[ObjectInfo]:
        return [info for info in infos if info.modified < before]

    staged = old(objects.staged())
    heartbeats = old(objects.named(layout.REPLICAS).values())
    probes = old(objects.named(layout.CLOCK).values())
    records = Corrections(objects)
    purged = records.of_purged(catalog)
    replaced = [path for path in records.replaced() if path not in purged]
    unfinished = Drafts(objects)
    drafts = {*unfinished.expired(before), *unfinished.of_purged(catalog)}
    evidence = Evidence(objects)
    if not dry_run:
        evidence.delete(evidence.of_purged(catalog))
        for info in (*blobs, *staged, *checkpoints, *heartbeats, *probes, *drafts):
            objects.delete(info.path)
        records.delete(purged)
        records.empty(replaced)
    return GarbageReport(
        blobs=tuple(info.path for info in blobs),
        staged=tuple(info.path for info in staged),
        checkpoints=tuple(info.path for info in checkpoints),
        heartbeats=tuple(info.path for info in heartbeats),
        corrections=(*purged, *replaced),
        drafts=tuple(sorted(info.path for info in drafts)),
        freed_bytes=sum(
            info.size for info in (*blobs, *staged, *checkpoints, *heartbeats, *drafts)
        ),
        waiting=tuple(waiting),
        dry_run=dry_run,
    )
