"""Tasks and their versions as JSON, from one snapshot."""

from collections.abc import Mapping

from server.api.answers import Json, short_name
from server.engine.engine import Engine
from server.engine.tasks.snapshot import Snapshot, TaskState
from task_store import Catalog, Entry, TaskInfo, VersionInfo

BASE = "base"

_States = Mapping[tuple[str, int | None], TaskState]


def list_json(engine: Engine) -> Json:
    """All tasks, `base` among them."""
    snapshot = engine.snapshot
    states = _states(engine, snapshot)
    tasks = [_summary(task, states) for task in snapshot.catalog.tasks.values()]
    base = _base(engine, snapshot)
    return {
        "generation": snapshot.generation,
        "backbone": short_name(engine.backbone.name),
        "tasks": tasks if base is None else [base, *tasks],
    }


def task_json(engine: Engine, snapshot: Snapshot, name: str) -> Json:
    """One task with all its versions, or UnknownTask."""
    base = _base(engine, snapshot) if name == BASE else None
    if base is not None:
        versions: list[Json] = []
        summary = base
    else:
        task = snapshot.catalog.task(name)
        states = _states(engine, snapshot)
        versions = [_version(task, info, states) for info in task.live]
        summary = _summary(task, states)
    labels = engine.class_labels(snapshot, name)
    return {
        **summary,
        "generation": snapshot.generation,
        "class_labels": None if labels is None else list(labels),
        "version_details": versions,
    }


def versions_json(engine: Engine, name: str) -> Json:
    snapshot = engine.snapshot
    task = snapshot.catalog.task(name)
    states = _states(engine, snapshot)
    return {
        "task": name,
        "generation": snapshot.generation,
        "versions": [_version(task, info, states) for info in task.live],
    }


def version_json(engine: Engine, name: str, version: int) -> Json:
    snapshot = engine.snapshot
    info = snapshot.catalog.version(name, version)
    return _version(snapshot.catalog.task(name), info, _states(engine, snapshot))


def change_json(name: str, catalog: Catalog) -> Json:
    """What a task is after a change; nothing is left of a retired one."""
    task = catalog.tasks.get(name)
    return {
        "task": name,
        "generation": catalog.generation,
        "labels": {} if task is None else dict(sorted(task.labels.items())),
        "versions": [] if task is None else [info.version for info in task.live],
    }


def entry_json(entry: Entry) -> Json:
    """A log entry without what only the store's protocol needs."""
    stamp = entry.stamp.model_dump(mode="json", include={"generation", "time", "actor"})
    return {**stamp, **entry.event.model_dump(mode="json")}


def _states(engine: Engine, snapshot: Snapshot) -> _States:
    return {(state.name, state.version): state for state in snapshot.states()}


def _summary(task: TaskInfo, states: _States) -> Json:
    version = task.labels["default"]
    info, state = task.versions[version], states[task.name, version]
    return {
        "task": task.name,
        "version": version,
        "status": state.status,
        "reason": state.reason,
        "problem": info.facts.problem,
        "classes": info.facts.classes,
        "description": info.facts.description,
        "labels": dict(sorted(task.labels.items())),
        "versions": [each.version for each in task.live],
    }


def _base(engine: Engine, snapshot: Snapshot) -> Json | None:
    """The backbone's own head, where it has one."""
    head = engine.backbone.base
    if head is None:
        return None
    return {
        "task": BASE,
        "version": None,
        "status": "ready",
        "reason": None,
        "problem": head.problem,
        "classes": int(head.weight.shape[0]),
        "description": "The backbone's own head.",
        "labels": {},
        "versions": [],
    }


def _version(task: TaskInfo, info: VersionInfo, states: _States) -> Json:
    state = states[info.task, info.version]
    return {
        "version": info.version,
        "digest": info.digest,
        "size_bytes": info.facts.size,
        "labels": list(task.labels_of(info.version)),
        "status": state.status,
        "reason": state.reason,
        "resident": state.resident,
        "problem": info.facts.problem,
        "classes": info.facts.classes,
        "memory_tokens": info.facts.memory_tokens,
        "description": info.facts.description,
        "extends": list(info.extends),
        "backbone": info.facts.backbone,
        "generation": info.generation,
        "published": info.time,
        "actor": info.actor,
    }
