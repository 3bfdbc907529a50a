"""Copying a store into another, of whatever kind: a backup, and the way back from one.

The generation to copy is fixed at the start. Bundles go first, then the entries of the log in
order: wherever the copy is interrupted, the target is the store as it was at an earlier
generation, and the next copy goes on from there. Nothing in the target is ever replaced, except
a bundle of the wrong size.
"""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from task_store.bundle import digest_of
from task_store.catalog import Catalog, Damage, dump_checkpoint
from task_store.errors import Conflict
from task_store.events import Entry
from task_store.layout import BLOBS, CORRECTIONS, LOG, checkpoint_path, log_path
from task_store.objects import Objects

# At a time: bundles may be large, and all of these are in memory.
_BUNDLES = 8
_ENTRIES = 1000


@dataclass(frozen=True, slots=True)
class CopyReport:
    """What a copy brought to the target, and what the source lacks or has damaged."""

    generation: int  # of the target now
    entries: int
    bundles: int
    bundle_bytes: int
    damages: tuple[Damage, ...]


def copy(source: Objects, catalog: Catalog, target: Objects, present: Catalog) -> CopyReport:
    """Bring the target, whose catalog is `present`, to the source's `catalog`.

    Conflict, and nothing written, unless the target's log is the beginning of the source's.
    """
    _check_common_beginning(source, catalog, target, present)
    damages: list[Damage] = []
    sizes = {info.path: info.size for info in target.named(BLOBS).values()}
    wanted = {
        catalog.blob_path(digest): digest
        for digest, versions in catalog.by_digest.items()
        if sizes.get(catalog.blob_path(digest)) != versions[0].facts.size
    }

    def bring(path: str) -> int | None:
        data = source.get(path)
        if data is None or digest_of(data) != wanted[path]:
            return None
        target.put(path, data)
        return len(data)

    with ThreadPoolExecutor(max_workers=_BUNDLES) as pool:
        copied = dict(zip(wanted, pool.map(bring, wanted), strict=True))
    damages += [
        Damage(path, "a published bundle, missing or damaged: not copied")
        for path, size in copied.items()
        if size is None
    ]
    _copy_corrections(source, target)
    entries = _copy_log(source, catalog, target, damages)
    if entries:
        target.put(checkpoint_path(catalog.generation), dump_checkpoint(catalog))
    brought = [size for size in copied.values() if size is not None]
    return CopyReport(catalog.generation, entries, len(brought), sum(brought), tuple(damages))


def _copy_corrections(source: Objects, target: Objects) -> None:
    """Create those that the target lacks; one that is there stays as it is."""
    there = target.named(CORRECTIONS)
    for name, info in source.named(CORRECTIONS).items():
        data = None if name in there else source.get(info.path)
        if data is not None:
            target.create(info.path, data)


def _check_common_beginning(
    source: Objects, catalog: Catalog, target: Objects, present: Catalog
) -> None:
    if present.generation > catalog.generation:
        raise Conflict(
            f"{target.url} is at generation {present.generation}, and {source.url}, from which to "
            f"copy, only at {catalog.generation}: nothing was copied. Is it the other way round, "
            f"or has the log of {source.url} lost its end?"
        )
    if present.generation == 0:
        return
    # Each entry names the hash of the one before, so that one comparison stands for all.
    entry = source.get(log_path(present.generation))
    if digest_of(entry or b"") != present.head:
        raise Conflict(
            f"The log of {target.url} is not the beginning of that of {source.url}: they differ at "
            f"generation {present.generation}, so one is of another store, was written to, or is "
            f"damaged. Nothing was copied.",
            names=[log_path(present.generation)],
        )


def _copy_log(source: Objects, catalog: Catalog, target: Objects, damages: list[Damage]) -> int:
    """Create what the target lacks, in order; how many entries. Damaged ones are copied as is."""
    there = set(map(int, target.named(LOG)))
    missing = [g for g in range(1, catalog.generation + 1) if g not in there]
    for generation, data in _read(source, missing):
        path = log_path(generation)
        try:
            if data is None:
                raise ValueError("it is missing")
            Entry.from_json(data, generation)
        except ValueError as error:
            damages.append(Damage(path, f"damaged log entry, copied as it is: {error}"))
        if data is not None and not target.create(path, data) and target.get(path) != data:
            raise Conflict(
                f"{target.url} was written to by somebody else: its log entry {generation} is "
                f"another than that of {source.url}.",
                names=[path],
            )
    return len(missing)


def _read(objects: Objects, generations: list[int]) -> Iterator[tuple[int, bytes | None]]:
    for start in range(0, len(generations), _ENTRIES):
        chunk = generations[start : start + _ENTRIES]
        datas = objects.get_many([log_path(generation) for generation in chunk])
        yield from zip(chunk, datas, strict=True)
