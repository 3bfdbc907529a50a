"""Looking after a store: what is wrong in it, and what nobody needs any more."""

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime

from task_store.bundle import TaskBundle, digest_of
from task_store.catalog import Catalog, Damage, load_checkpoint
from task_store.errors import BundleError, UnsupportedFormat
from task_store.layout import (
    BLOBS,
    CHECKPOINTS,
    CLOCK,
    CORRECTIONS,
    LOG,
    REPLICAS,
    blob_at,
    checkpoint_path,
    log_path,
)
from task_store.limits import Limits
from task_store.log import replay
from task_store.manifest import shown
from task_store.objects import ObjectInfo, Objects

KEPT_CHECKPOINTS = 3
# What may be in a store besides bundles and the log.
_OTHERS = (CHECKPOINTS, CLOCK, CORRECTIONS, REPLICAS)
# An entry of the log stays small, however much garbage there is.
_DIGESTS_PER_ENTRY = 1000


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


@dataclass(frozen=True, slots=True)
class Verification:
    """What was read, every byte of it, and what was wrong."""

    generation: int
    bundles: int
    bundle_bytes: int
    checkpoints: int
    damages: tuple[Damage, ...]


def find_damage(objects: Objects, catalog: Catalog, skipped: Mapping[str, Damage]) -> list[Damage]:
    """Foreign names, damaged entries, gaps in the log, missing or resized bundles."""
    found = dict(skipped)
    generations: set[int] = set()
    sizes: dict[str, int] = {}
    for info in objects.listing(""):
        if generation := LOG.name_at(info.path):
            generations.add(int(generation))
        elif blob_at(info.path):
            sizes[info.path] = info.size
        elif not any(place.name_at(info.path) for place in _OTHERS):
            path = shown(info.path, 200)
            found[path] = Damage(path, "a foreign object, ignored")
    missing = set(range(1, catalog.generation + 1)) - generations
    gaps = (Damage(log_path(g), "missing from the log") for g in missing)
    for damage in (*gaps, *_lost(catalog, sizes)):
        found.setdefault(damage.path, damage)
    return sorted(found.values(), key=lambda damage: damage.path)


def verify(
    objects: Objects, catalog: Catalog, limits: Limits, found: Iterable[Damage]
) -> Verification:
    """Read the log from its first entry, every bundle that it published and every checkpoint.

    `found` is what `find_damage` told. A bundle that nothing published is no damage, but garbage.
    """
    # The log is read anew: a wrong checkpoint may have made a whole entry look damaged.
    damages = {damage.path: damage for damage in found if not LOG.name_at(damage.path)}
    checkpoints = list(map(int, objects.named(CHECKPOINTS)))
    log = replay(objects, catalog.generation, stops=frozenset(checkpoints))
    problems = [*log.damages, *_wrong_checkpoints(objects, checkpoints, log.at)]
    # A checkpoint may know of bundles whose log entry is damaged by now.
    digests = dict.fromkeys((*log.catalog.by_digest, *catalog.by_digest))
    total = 0
    for digest in digests:
        teller = log.catalog if digest in log.catalog.by_digest else catalog
        path = teller.blob_path(digest)
        data = objects.get(path)
        total += len(data or b"")
        if reason := _wrong_bundle(data, digest, limits):
            problems.append(Damage(path, reason))
    # What nobody can vouch for is told before what somebody can.
    for damage in sorted(problems, key=lambda damage: bool(damage.unlinked)):
        damages.setdefault(damage.path, damage)
    return Verification(
        generation=log.catalog.generation,
        bundles=len(digests),
        bundle_bytes=total,
        checkpoints=len(checkpoints),
        damages=tuple(sorted(damages.values(), key=lambda damage: damage.path)),
    )


def _wrong_bundle(data: bytes | None, digest: str, limits: Limits) -> str | None:
    if data is None:
        return "a published bundle, missing"
    actual = digest_of(data)
    if actual != digest:
        return f"damaged or replaced: its digest is {actual}"
    try:
        TaskBundle.from_bytes(data, limits)
    except BundleError as error:
        return f"published, and no usable bundle: {error}"
    return None


def _wrong_checkpoints(
    objects: Objects, generations: Sequence[int], replayed: Mapping[int, Catalog]
) -> Iterator[Damage]:
    for generation in generations:
        path = checkpoint_path(generation)
        data = objects.get(path)
        try:
            # Gone meanwhile, or of another release, which we would pass over.
            with contextlib.suppress(UnsupportedFormat):
                if data is not None and load_checkpoint(data, generation) != replayed.get(
                    generation
                ):
                    raise ValueError("it is not what the log tells")
        except ValueError as error:
            yield Damage(path, f"damaged checkpoint: {error}")


def collect_garbage(
    objects: Objects,
    catalog: Catalog,
    give_up: Callable[[Mapping[str, int]], tuple[str, ...]],
    *,
    before: datetime,
    dry_run: bool,
) -> GarbageReport:
    """Delete what is unreferenced and was last written before `before`.

    `catalog` is a replay of the whole log. A bundle is deleted only once the log says that it was
    given up: nobody will ever look for it at this path again, so there is no wrong moment for it.
    docs/reference/task-store.md#garbage has the argument.
    """
    blobs: list[ObjectInfo] = []
    candidates: dict[str, ObjectInfo] = {}
    waiting: list[ObjectInfo] = []
    for info in objects.named(BLOBS).values():
        digest, collected = blob_at(info.path) or ("", 0)
        if collected < catalog.collected.get(digest, 0):
            # An earlier collection gave it up and was interrupted, or a late writer put it back.
            blobs.append(info)
        elif digest and digest not in catalog.by_digest:
            if info.modified < before:
                candidates[digest] = info
            else:
                waiting.append(info)
    digests = list(candidates)
    for start in range(0, len(digests), _DIGESTS_PER_ENTRY):
        some = tuple(digests[start : start + _DIGESTS_PER_ENTRY])
        generations = {digest: catalog.collected.get(digest, 0) for digest in some}
        blobs += [candidates[digest] for digest in (some if dry_run else give_up(generations))]
    staged = [info for info in objects.staged() if info.modified < before]
    # A damaged newest checkpoint still leaves others to fall back to.
    checkpoints = list(objects.named(CHECKPOINTS).values())[:-KEPT_CHECKPOINTS]
    heartbeats = [info for info in objects.named(REPLICAS).values() if info.modified < before]
    probes = [info for info in objects.named(CLOCK).values() if info.modified < before]
    if not dry_run:
        for info in (*blobs, *staged, *checkpoints, *heartbeats, *probes):
            objects.delete(info.path)
    return GarbageReport(
        blobs=tuple(info.path for info in blobs),
        staged=tuple(info.path for info in staged),
        checkpoints=tuple(info.path for info in checkpoints),
        heartbeats=tuple(info.path for info in heartbeats),
        freed_bytes=sum(info.size for info in (*blobs, *staged, *checkpoints, *heartbeats)),
        waiting=tuple(info.path for info in waiting),
        dry_run=dry_run,
    )


def _lost(catalog: Catalog, sizes: Mapping[str, int]) -> list[Damage]:
    result = []
    for digest, versions in catalog.by_digest.items():
        refs = ", ".join(version.ref for version in versions)
        path = catalog.blob_path(digest)
        size, published = sizes.get(path), versions[0].facts.size
        if size != published:
            how = "is missing" if size is None else f"has {size} bytes instead of {published}"
            result.append(Damage(path, f"the bundle of {refs} {how}"))
    return result
