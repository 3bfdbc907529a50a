"""Checkpoints: the catalog at a generation in one file, so that opening replays little."""

import hashlib
import json
from types import MappingProxyType
from typing import Any

from task_store.catalog import Catalog, TaskInfo, VersionInfo
from task_store.errors import UnsupportedFormat
from task_store.events import VersionFacts

CHECKPOINT_FORMAT = 1

# A version is a row, not an object, so that a checkpoint of ten thousand stays small and quick to
# read: these, then the facts that follow `size`, then whether it is retired.
_FIRST = ("version", "digest", "size", "generation", "time", "actor")
_FACTS = tuple(name for name in VersionFacts.model_fields if name not in _FIRST)


def dump_checkpoint(catalog: Catalog) -> bytes:
    """The catalog as two lines: a head with the hash of the second, and the state."""
    state = {
        name: {
            "labels": dict(task.labels),
            "undo": {label: list(v) for label, v in task.undo.items()},
            "retired_together": list(task.retired_together),
            "versions": [_row(task.versions[v]) for v in sorted(task.versions)],
        }
        for name, task in catalog.all_tasks.items()
    }
    body = json.dumps(state, separators=(",", ":"), sort_keys=True).encode()
    head = {
        "format": CHECKPOINT_FORMAT,
        "generation": catalog.generation,
        "sha256": hashlib.sha256(body).hexdigest(),
    }
    return json.dumps(head, separators=(",", ":")).encode() + b"\n" + body + b"\n"


def load_checkpoint(data: bytes, generation: int) -> Catalog:
    """Read a checkpoint: ValueError if damaged, UnsupportedFormat if newer."""
    first, _, body = data.partition(b"\n")
    body = body.removesuffix(b"\n")
    head = json.loads(first)
    if not isinstance(head, dict):
        raise ValueError("the first line is not a JSON object")
    if isinstance(head.get("format"), int) and head["format"] > CHECKPOINT_FORMAT:
        raise UnsupportedFormat(
            f"Checkpoint {generation} has format {head['format']}, written by a newer Engram."
        )
    if head.get("generation") != generation:
        raise ValueError(f"it says it is generation {head.get('generation')}")
    if head.get("sha256") != hashlib.sha256(body).hexdigest():
        raise ValueError("its hash does not match its content")
    try:
        tasks = {name: _task(name, task) for name, task in json.loads(body).items()}
    except (AttributeError, KeyError, TypeError, IndexError) as error:
        raise ValueError(f"its content is not a catalog: {error!r}") from None
    return Catalog(generation, MappingProxyType(tasks))


def _row(info: VersionInfo) -> list[Any]:
    values = {**vars(info.facts), "version": info.version, "generation": info.generation}
    values |= {"time": info.time, "actor": info.actor}
    return [*(values[name] for name in (*_FIRST, *_FACTS)), info.retired]


def _version(task: str, row: list[Any]) -> VersionInfo:
    version, digest, size, generation, time, actor, *facts, retired = row
    # A row of an earlier release may lack the newest facts, which then have their defaults.
    if len(facts) > len(_FACTS):
        raise ValueError(f"version {version} of '{task}' has more facts than are known")
    known = dict(zip(_FACTS, facts, strict=False))
    return VersionInfo(
        task=task,
        version=version,
        facts=VersionFacts(digest=digest, size=size, **known),
        generation=generation,
        time=time,
        actor=actor,
        retired=retired,
    )


def _task(name: str, task: dict[str, Any]) -> TaskInfo:
    versions = [_version(name, row) for row in task["versions"]]
    return TaskInfo(
        name=name,
        versions=MappingProxyType({info.version: info for info in versions}),
        labels=MappingProxyType(dict(task["labels"])),
        undo=MappingProxyType({label: tuple(v) for label, v in task["undo"].items()}),
        retired_together=tuple(task["retired_together"]),
    )
