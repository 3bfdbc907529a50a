"""Reading the catalog: by replaying the log, or from a checkpoint.

A checkpoint is the catalog at a generation in one file, so that opening a store replays little.
"""

import hashlib
import json
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from engram_store.catalog import Canary, Catalog, Damage, TaskInfo, VersionInfo
from engram_store.errors import UnsupportedFormat
from engram_store.events import VersionFacts
from engram_store.layout import LOG, log_path
from engram_store.objects import Objects

# More entries than this are not missing by accident: the next number is a foreign file.
_WIDEST_GAP = 1000
_CHUNK = 1000  # entries that are in memory at the same time

# Format 2 has purged versions: a reader of format 1 would use their numbers again. Format 3 has
# canaries: a reader of format 2 would not send them any images.
CHECKPOINT_FORMAT = 3
# A version is a row, not an object: a checkpoint of ten thousand versions stays small and fast.
_STAMP = ("version", "generation", "time", "actor", "retired")
_FACTS = tuple(VersionFacts.model_fields)


def fill_gaps(newest: int, listed: Iterable[int]) -> tuple[list[int], list[Damage]]:
    """Return the generations to read after `newest`, including those that a listing missed.

    A folder that changes while it is listed may show an entry and not the one before it, so
    missing entries are read by name. A foreign file with an enormous number must not cost a
    million reads, nor use up the 20 digits of generations.
    """
    generations: list[int] = []
    damages: list[Damage] = []
    for generation in listed:
        if generation - newest > _WIDEST_GAP:
            reason = "far beyond the end of the log, ignored"
            damages.append(Damage(log_path(generation), reason))
            continue
        generations.extend(range(newest + 1, generation + 1))
        newest = max(newest, generation)
    return generations, damages


def replay(
    objects: Objects, newest: int, *, stops: Collection[int] = ()
) -> tuple[Catalog, list[Damage], Mapping[int, Catalog]]:
    """Read every entry, at least up to generation `newest`, without a checkpoint.

    Returns the catalog, the damage in the log, and the catalogs at the generations `stops`.
    """
    listed = {newest, *map(int, objects.named(LOG))}
    generations, damages = fill_gaps(0, sorted(listed))
    catalog, at = Catalog(), {}
    start = 0
    for end, generation in enumerate(generations, start=1):
        if end - start == _CHUNK or end == len(generations) or generation in stops:
            catalog, found = catalog.read(read_entries(objects, generations[start:end]))
            damages += found
            at[generation] = catalog
            start = end
    return catalog, damages, at


def read_entries(
    objects: Objects, generations: Sequence[int]
) -> Iterator[tuple[int, bytes | None]]:
    """Yield entries as stored, in order; None for one that is missing."""
    for start in range(0, len(generations), _CHUNK):
        chunk = generations[start : start + _CHUNK]
        yield from zip(chunk, objects.get_many([log_path(g) for g in chunk]), strict=True)


def dump_checkpoint(catalog: Catalog) -> bytes:
    """Write the catalog as two lines: a header with the hash of the second line, and the state."""
    tasks = {
        name: {
            "changes": list(task.changes),
            "aliases": dict(task.aliases),
            "undo": {alias: list(v) for alias, v in task.undo.items()},
            "retired_together": list(task.retired_together),
            "purged": sorted(task.purged.items()),
            "purged_whole": task.purged_whole,
            "canaries": {alias: list(canary) for alias, canary in task.canaries.items()},
            "versions": [_row(task.versions[v]) for v in sorted(task.versions)],
        }
        for name, task in catalog.all_tasks.items()
    }
    state = {"collected": dict(catalog.collected), "head": catalog.head, "tasks": tasks}
    body = json.dumps(state, separators=(",", ":"), sort_keys=True).encode()
    header = {
        "format": CHECKPOINT_FORMAT,
        "generation": catalog.generation,
        "sha256": hashlib.sha256(body).hexdigest(),
    }
    return json.dumps(header, separators=(",", ":")).encode() + b"\n" + body + b"\n"


def load_checkpoint(data: bytes, generation: int) -> Catalog:
    """Read a checkpoint; raise ValueError if damaged, UnsupportedFormat if of another format."""
    first, _, body = data.partition(b"\n")
    body = body.removesuffix(b"\n")
    header = json.loads(first)
    if not isinstance(header, dict):
        raise ValueError("the first line is not a JSON object")
    written = header.get("format")
    if isinstance(written, int) and written != CHECKPOINT_FORMAT:
        raise UnsupportedFormat(
            f"Checkpoint {generation} has format {written}; this Engram reads format "
            f"{CHECKPOINT_FORMAT}."
        )
    if header.get("generation") != generation:
        raise ValueError(f"its generation is {header.get('generation')}, not {generation}")
    if header.get("sha256") != hashlib.sha256(body).hexdigest():
        raise ValueError("its hash does not match its content")
    try:
        state = json.loads(body)
        tasks = {name: _task(name, task) for name, task in state["tasks"].items()}
        collected = MappingProxyType(dict(state["collected"]))
        return Catalog(generation, MappingProxyType(tasks), collected, state["head"])
    except (AttributeError, KeyError, TypeError, IndexError) as error:
        raise ValueError(f"its content is not a catalog: {error!r}") from None


def _row(info: VersionInfo) -> list[Any]:
    stamp = [getattr(info, name) for name in _STAMP]
    return stamp + [getattr(info.facts, name) for name in _FACTS]


def _task(name: str, task: dict[str, Any]) -> TaskInfo:
    versions: dict[int, VersionInfo] = {}
    for row in task["versions"]:
        values = dict(zip((*_STAMP, *_FACTS), row, strict=True))
        stamp = {key: values.pop(key) for key in _STAMP}
        versions[stamp["version"]] = VersionInfo(name, facts=VersionFacts(**values), **stamp)
    return TaskInfo(
        name=name,
        versions=MappingProxyType(versions),
        aliases=MappingProxyType(dict(task["aliases"])),
        undo=MappingProxyType({alias: tuple(v) for alias, v in task["undo"].items()}),
        retired_together=tuple(task["retired_together"]),
        changes=tuple(task["changes"]),
        purged=MappingProxyType(dict(task["purged"])),
        purged_whole=task["purged_whole"],
        canaries=MappingProxyType({k: Canary(*v) for k, v in task["canaries"].items()}),
    )
