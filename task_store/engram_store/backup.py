"""Copying a store to another of any kind: a backup, or the restore of one.

The generation to copy is fixed at the start. Bundles are copied first, then log entries in order,
then corrections. An interrupted copy is therefore the store at an earlier generation, and the next
copy continues. Nothing in the target is replaced, except a bundle of the wrong size. What was
purged or removed in the source is deleted in the target.
"""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from engram_bundle import digest_of

from engram_store.catalog import Catalog, Damage
from engram_store.corrections import Corrections
from engram_store.errors import Conflict
from engram_store.events import Entry
from engram_store.layout import BLOBS, LOG, checkpoint_path, log_path
from engram_store.maintenance import delete_purged
from engram_store.objects import Objects
from engram_store.replay import dump_checkpoint, read_entries

_PARALLEL_BUNDLES = 8  # few, because all of them are in memory


@dataclass(frozen=True, slots=True)
class CopyReport:
    generation: int  # of the target after the copy
    entries: int
    bundles: int
    bundle_bytes: int
    damages: tuple[Damage, ...]  # in the source


def copy(source: Objects, catalog: Catalog, target: Objects, present: Catalog) -> CopyReport:
    """Bring the target, whose catalog is `present`, to the source's `catalog`.

    Raises Conflict, and writes nothing, unless the target's log is a prefix of the source's.
    """
    _check_prefix(source, catalog, target, present)
    sizes = {info.path: info.size for info in target.named(BLOBS).values()}
    missing = {
        catalog.blob_path(digest): digest
        for digest, versions in catalog.by_digest.items()
        if sizes.get(catalog.blob_path(digest)) != versions[0].facts.size
    }

    def copy_bundle(path: str) -> int | None:
        data = source.get(path)
        if data is None or digest_of(data) != missing[path]:
            return None
        target.put(path, data)
        return len(data)

    with ThreadPoolExecutor(max_workers=_PARALLEL_BUNDLES) as pool:
        copied = dict(zip(missing, pool.map(copy_bundle, missing), strict=True))
    reason = "a published bundle, missing or damaged: not copied"
    damages = [Damage(path, reason) for path, size in copied.items() if size is None]
    entries = _copy_log(source, catalog, target, damages)
    if entries:
        target.put(checkpoint_path(catalog.generation), dump_checkpoint(catalog))
    # Before corrections are copied: a purged task may have been published and corrected again.
    delete_purged(target, catalog)
    Corrections(source).copy_to(Corrections(target), catalog)
    lengths = [size for size in copied.values() if size is not None]
    return CopyReport(catalog.generation, entries, len(lengths), sum(lengths), tuple(damages))


def _check_prefix(source: Objects, catalog: Catalog, target: Objects, present: Catalog) -> None:
    if present.generation > catalog.generation:
        raise Conflict(
            f"{target.url} is at generation {present.generation}, but the source {source.url} is "
            f"only at {catalog.generation}: nothing was copied. Are source and target swapped, or "
            f"did the log of {source.url} lose its end?"
        )
    if present.generation == 0:
        return
    # Entries are chained by hashes, so the newest one stands for all before it.
    entry = source.get(log_path(present.generation))
    if digest_of(entry or b"") != present.head:
        raise Conflict(
            f"The log of {target.url} is not a prefix of the log of {source.url}: they differ at "
            f"generation {present.generation}. One is of another store, has other changes, or is "
            f"damaged. Nothing was copied.",
            names=[log_path(present.generation)],
        )


def _copy_log(source: Objects, catalog: Catalog, target: Objects, damages: list[Damage]) -> int:
    """Create missing entries in order, damaged ones unchanged, and return their number."""
    present = set(map(int, target.named(LOG)))
    missing = [g for g in range(1, catalog.generation + 1) if g not in present]
    for generation, data in read_entries(source, missing):
        path = log_path(generation)
        try:
            Entry.from_json(data, generation)
        except ValueError as error:
            damages.append(Damage(path, f"damaged log entry, copied unchanged: {error}"))
        if data is not None and not target.create(path, data) and target.get(path) != data:
            raise Conflict(
                f"Another writer changed {target.url}: its log entry {generation} differs from "
                f"that of {source.url}.",
                names=[path],
            )
    return len(missing)
