"""The catalog: the state of all tasks at a generation, as the replay of the log. No I/O here.

`Catalog.apply` folds entries into a new catalog and never refuses a whole log because of one bad
entry. The `plan_*` functions decide what may be asked for: each looks at a catalog and returns the
change to append (None when there is nothing to do) or raises. A writer that lost a race calls its
plan again on the newer catalog, so every rule here holds under concurrency too.

Why no cycle of extensions can arise: a bundle names its parents by the sha256 of their files, so
it can only be written after them, and `plan_publish` accepts it only when they are published.
"""

import difflib
import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from types import MappingProxyType
from typing import Any

from task_store.errors import (
    AlreadyExists,
    IncompatibleBundle,
    MissingParent,
    NothingToRestore,
    NothingToRollBack,
    StillExtended,
    StillLabelled,
    UnknownLabel,
    UnknownTask,
    UnknownVersion,
    UnsupportedFormat,
)
from task_store.events import Change, Entry, Label, Publish, Restore, Retire
from task_store.names import DEFAULT_LABEL, TaskRef, parse_ref

CHECKPOINT_FORMAT = 1
# Moves of one label that rollback can undo; older ones stay in the log, for reading only.
MAX_UNDO = 100


@dataclass(frozen=True, slots=True)
class VersionInfo:
    """One published version."""

    task: str
    version: int
    digest: str
    size: int
    generation: int
    time: str
    actor: str
    extends: tuple[str, ...]
    problem: str
    classes: int
    memory_tokens: int
    description: str
    backbone: str
    fingerprint: str
    retired: bool = False

    @property
    def ref(self) -> str:
        return f"{self.task}@{self.version}"


@dataclass(frozen=True, slots=True)
class TaskInfo:
    """One task: its versions ever published, and its labels now."""

    name: str
    versions: Mapping[int, VersionInfo]
    labels: Mapping[str, int]
    # Per label, the versions it pointed to before, oldest first.
    undo: Mapping[str, tuple[int, ...]]
    # What the last retirement of the whole task took away, so that restore knows what to bring.
    retired_together: tuple[int, ...] = ()

    @property
    def live(self) -> tuple[VersionInfo, ...]:
        """Versions that are not retired, in order."""
        return tuple(v for _, v in sorted(self.versions.items()) if not v.retired)

    @property
    def is_live(self) -> bool:
        return any(not v.retired for v in self.versions.values())

    @property
    def next_version(self) -> int:
        """Numbers are never used twice, whatever is retired."""
        return max(self.versions, default=0) + 1

    def labels_of(self, version: int) -> tuple[str, ...]:
        """The labels that point to a version."""
        return tuple(sorted(label for label, v in self.labels.items() if v == version))


@dataclass(frozen=True, slots=True)
class Problem:
    """Something in the store that should not be there, or is missing."""

    path: str
    reason: str


@dataclass(frozen=True)
class Catalog:
    """All tasks at one generation; a value, safe to hold on to and share."""

    generation: int = 0
    all_tasks: Mapping[str, TaskInfo] = field(default_factory=dict)

    @cached_property
    def tasks(self) -> Mapping[str, TaskInfo]:
        """Tasks with at least one live version, by name in order."""
        live = ((name, task) for name, task in sorted(self.all_tasks.items()) if task.is_live)
        return MappingProxyType(dict(live))

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the live tasks."""
        return tuple(self.tasks)

    @cached_property
    def by_digest(self) -> Mapping[str, tuple[VersionInfo, ...]]:
        """Every version ever published, retired or not, by the digest of its bundle."""
        found: dict[str, list[VersionInfo]] = {}
        for task in self.all_tasks.values():
            for version in task.versions.values():
                found.setdefault(version.digest, []).append(version)
        return MappingProxyType({digest: tuple(versions) for digest, versions in found.items()})

    @cached_property
    def children(self) -> Mapping[str, tuple[VersionInfo, ...]]:
        """Live versions by the digest of each bundle they extend."""
        found: dict[str, list[VersionInfo]] = {}
        for task in self.all_tasks.values():
            for version in task.versions.values():
                if not version.retired:
                    for parent in version.extends:
                        found.setdefault(parent, []).append(version)
        return MappingProxyType({digest: tuple(versions) for digest, versions in found.items()})

    def task(self, name: str) -> TaskInfo:
        """The live task of this name, or UnknownTask."""
        task = self.all_tasks.get(name)
        if task is not None and task.is_live:
            return task
        if task is not None:
            raise UnknownTask(f"Task '{name}' is retired: restore it to use it.", names=[name])
        near = difflib.get_close_matches(name, self.names, n=1)
        hint = f": did you mean '{near[0]}'?" if near else "."
        raise UnknownTask(f"There is no task '{name}' in the store{hint}", names=[name])

    def version(self, name: str, version: int) -> VersionInfo:
        """A live version, or UnknownTask or UnknownVersion."""
        task = self.task(name)
        info = task.versions.get(version)
        if info is None:
            newest = task.next_version - 1
            raise UnknownVersion(
                f"Task '{name}' has no version {version}; the newest is {newest}.",
                names=[f"{name}@{version}"],
            )
        if info.retired:
            raise UnknownVersion(
                f"Version {version} of task '{name}' is retired: restore it to use it.",
                names=[info.ref],
            )
        return info

    def resolve(self, ref: TaskRef | str) -> VersionInfo:
        """The live version a reference stands for, or InvalidName or NotFound."""
        ref = parse_ref(ref) if isinstance(ref, str) else ref
        if ref.version is not None:
            return self.version(ref.task, ref.version)
        task = self.task(ref.task)
        label = ref.label or DEFAULT_LABEL
        if label not in task.labels:
            known = ", ".join(sorted(task.labels))
            raise UnknownLabel(
                f"Task '{ref.task}' has no label '{label}'; it has {known}.", names=[str(ref)]
            )
        return self.version(ref.task, task.labels[label])

    def apply(self, entries: Iterable[Entry]) -> tuple["Catalog", list[Problem]]:
        """The catalog after these entries, and those that made no sense and were passed over.

        A passed-over entry still uses up its generation: all readers count alike.
        """
        tasks = dict(self.all_tasks)
        drafts: dict[str, _Draft] = {}
        problems: list[Problem] = []
        generation = self.generation
        for entry in entries:
            generation = max(generation, entry.generation)
            name = entry.change.task
            draft = drafts.get(name)
            if draft is None:
                draft = drafts[name] = _Draft(tasks.get(name))
            try:
                draft.apply(entry)
            except ValueError as error:
                problems.append(Problem(log_path(entry.generation), f"passed over: {error}"))
        for name, draft in drafts.items():
            if draft.versions:
                tasks[name] = draft.freeze(name)
        return Catalog(generation, MappingProxyType(tasks)), problems

    def skip_to(self, generation: int) -> "Catalog":
        """The same state at a later generation, past entries that could not be read."""
        return Catalog(max(self.generation, generation), self.all_tasks)


class _Draft:
    """A task being changed: copied once, however many entries follow."""

    def __init__(self, task: TaskInfo | None) -> None:
        self.versions = {} if task is None else dict(task.versions)
        self.labels = {} if task is None else dict(task.labels)
        self.undo = {} if task is None else dict(task.undo)
        self.retired_together = () if task is None else task.retired_together
        self.newest = max(self.versions, default=0)
        self.live = sum(not v.retired for v in self.versions.values())

    def freeze(self, name: str) -> TaskInfo:
        return TaskInfo(
            name=name,
            versions=MappingProxyType(self.versions),
            labels=MappingProxyType(self.labels),
            undo=MappingProxyType(self.undo),
            retired_together=self.retired_together,
        )

    def apply(self, entry: Entry) -> None:
        """Change the draft, or raise ValueError and leave it as it was."""
        change = entry.change
        if isinstance(change, Publish):
            self._publish(entry, change)
        elif isinstance(change, Label):
            self._label(change)
        elif isinstance(change, Retire):
            self._retire(change)
        else:
            self._restore(change)

    def _publish(self, entry: Entry, change: Publish) -> None:
        if change.version <= self.newest:
            raise ValueError(f"version {change.version} of '{change.task}' was published before")
        if not self.live:
            # A new life of a retired name: labels of the old one would point into the void.
            self.labels.clear()
            self.undo.clear()
        self.versions[change.version] = VersionInfo(
            task=change.task,
            version=change.version,
            digest=change.digest,
            size=change.size,
            generation=entry.generation,
            time=entry.stamp.time,
            actor=entry.stamp.actor,
            extends=change.extends,
            problem=change.problem,
            classes=change.classes,
            memory_tokens=change.memory_tokens,
            description=change.description,
            backbone=change.backbone,
            fingerprint=change.fingerprint,
        )
        self.newest = change.version
        self.live += 1
        for label in change.labels:
            self._move(label, change.version)
        # `default` always exists, even if a writer forgot to say so.
        self.labels.setdefault(DEFAULT_LABEL, change.version)

    def _label(self, change: Label) -> None:
        if change.version is None:
            if DEFAULT_LABEL in change.labels:
                raise ValueError("'default' cannot be removed")
            for label in change.labels:
                self.labels.pop(label, None)
                self.undo.pop(label, None)
            return
        self._must_be(change.version, retired=False)
        for label in change.labels:
            if change.rollback:
                self._move_back(label, change.version)
            else:
                self._move(label, change.version)

    def _retire(self, change: Retire) -> None:
        for version in change.versions:
            self._must_be(version, retired=False)
        for version in change.versions:
            self.versions[version] = replace(self.versions[version], retired=True)
        self.live -= len(set(change.versions))
        if change.whole:
            self.retired_together = change.versions

    def _restore(self, change: Restore) -> None:
        for version in change.versions:
            self._must_be(version, retired=True)
        for version in change.versions:
            self.versions[version] = replace(self.versions[version], retired=False)
        self.live += len(set(change.versions))
        # One version of a retired task was restored: no label may be left on a retired one.
        stale = [label for label, v in self.labels.items() if self.versions[v].retired]
        for label in stale:
            del self.labels[label]
            self.undo.pop(label, None)
        self.labels.setdefault(DEFAULT_LABEL, max(change.versions))

    def _move(self, label: str, version: int) -> None:
        before = self.labels.get(label)
        if before == version:
            return
        if before is not None:
            self.undo[label] = (*self.undo.get(label, ()), before)[-MAX_UNDO:]
        self.labels[label] = version

    def _move_back(self, label: str, version: int) -> None:
        earlier = self.undo.get(label, ())
        if version not in earlier:
            raise ValueError(f"label '{label}' was never at version {version}")
        place = len(earlier) - 1 - earlier[::-1].index(version)
        self.undo[label] = earlier[:place]
        if not place:
            del self.undo[label]
        self.labels[label] = version

    def _must_be(self, version: int, *, retired: bool) -> None:
        info = self.versions.get(version)
        if info is None:
            raise ValueError(f"there is no version {version}")
        if info.retired != retired:
            raise ValueError(f"version {version} is {'retired' if info.retired else 'not retired'}")


@dataclass(frozen=True, slots=True)
class NewVersion:
    """What a plan needs to know of a bundle."""

    digest: str
    size: int
    extends: tuple[str, ...]
    problem: str
    classes: int
    memory_tokens: int
    description: str
    backbone: str
    fingerprint: str


def plan_publish(
    catalog: Catalog, name: str, new: NewVersion, labels: tuple[str, ...], *, only_if_absent: bool
) -> Change | None:
    """A new version; or only labels, or nothing, when the task has these very bytes already."""
    task = catalog.all_tasks.get(name)
    live = task is not None and task.is_live
    if live and only_if_absent:
        raise AlreadyExists(
            f"Task '{name}' exists already: publish without the condition to add a version.",
            names=[name],
        )
    same = find_live(task, new.digest) if task is not None else None
    if task is not None and same is not None:
        moving = tuple(label for label in labels if task.labels.get(label) != same.version)
        return Label(task=name, labels=moving, version=same.version) if moving else None
    _check_parents(catalog, name, new)
    if not live:
        labels = (DEFAULT_LABEL, *(label for label in labels if label != DEFAULT_LABEL))
    return Publish(
        task=name,
        version=1 if task is None else task.next_version,
        digest=new.digest,
        size=new.size,
        labels=labels,
        extends=new.extends,
        problem=new.problem,
        classes=new.classes,
        memory_tokens=new.memory_tokens,
        description=new.description,
        backbone=new.backbone,
        fingerprint=new.fingerprint,
    )


def find_live(task: TaskInfo, digest: str) -> VersionInfo | None:
    """The newest live version of a task with these bytes."""
    found = [v for v in task.versions.values() if v.digest == digest and not v.retired]
    return max(found, key=lambda v: v.version, default=None)


def _check_parents(catalog: Catalog, name: str, new: NewVersion) -> None:
    for digest in new.extends:
        versions = catalog.by_digest.get(digest, ())
        if not versions:
            raise MissingParent(
                f"The bundle for '{name}' extends {digest}, which is not published: "
                f"publish the parent first.",
                names=[digest],
            )
        live = [v for v in versions if not v.retired]
        if not live:
            raise MissingParent(
                f"The bundle for '{name}' extends {versions[0].ref}, which is retired: restore it "
                f"first.",
                names=[versions[0].ref],
            )
        if live[0].fingerprint != new.fingerprint:
            raise IncompatibleBundle(
                f"The bundle for '{name}' is for the backbone {new.fingerprint}, and its parent "
                f"{live[0].ref} is for {live[0].fingerprint}.",
                names=[live[0].ref],
            )


def plan_label(catalog: Catalog, name: str, label: str, version: int) -> Change | None:
    """Point a label to a live version."""
    catalog.version(name, version)
    if catalog.task(name).labels.get(label) == version:
        return None
    return Label(task=name, labels=(label,), version=version)


def plan_remove_label(catalog: Catalog, name: str, label: str) -> Change:
    """Take a label away; `default` stays."""
    catalog.resolve(TaskRef(name, label=label))
    if label == DEFAULT_LABEL:
        raise StillLabelled(
            f"Label 'default' of task '{name}' cannot be removed: move it, or retire the task.",
            names=[f"{name}:{label}"],
        )
    return Label(task=name, labels=(label,), version=None)


def plan_rollback(catalog: Catalog, name: str, label: str) -> Change:
    """Undo the last move of a label, passing over versions retired since."""
    now = catalog.resolve(TaskRef(name, label=label)).version
    task = catalog.task(name)
    for version in reversed(task.undo.get(label, ())):
        if version != now and not task.versions[version].retired:
            return Label(task=name, labels=(label,), version=version, rollback=True)
    raise NothingToRollBack(
        f"Label '{label}' of task '{name}' has no earlier version to go back to; it stays at "
        f"version {now}.",
        names=[f"{name}:{label}"],
    )


def plan_retire(catalog: Catalog, name: str, version: int | None) -> Change:
    """Take one version, or all live ones, out of the catalog."""
    task = catalog.task(name)
    if version is None:
        going = task.live
    else:
        going = (catalog.version(name, version),)
        labels = task.labels_of(version)
        if labels:
            raise StillLabelled(
                f"Version {version} of task '{name}' still has the label "
                f"{', '.join(labels)}: move the label first, or retire the whole task.",
                names=[f"{name}:{label}" for label in labels],
            )
    _check_children(catalog, going)
    versions = tuple(v.version for v in going)
    return Retire(task=name, versions=versions, whole=version is None)


def _check_children(catalog: Catalog, going: tuple[VersionInfo, ...]) -> None:
    leaving = {v.ref for v in going}
    for info in going:
        elsewhere = [
            v for v in catalog.by_digest[info.digest] if not v.retired and v.ref not in leaving
        ]
        children = [v.ref for v in catalog.children.get(info.digest, ()) if v.ref not in leaving]
        if children and not elsewhere:
            raise StillExtended(
                f"{info.ref} is still extended by {', '.join(children)}: retire those first.",
                names=children,
            )


def plan_restore(catalog: Catalog, name: str, version: int | None) -> Change:
    """Bring back one version, or what the last retirement of the whole task took."""
    task = catalog.all_tasks.get(name)
    if task is None:
        catalog.task(name)
        raise AssertionError("an unknown task was found")
    if version is None:
        coming = tuple(v for v in task.retired_together if task.versions[v].retired)
        if task.is_live or not coming:
            raise NothingToRestore(
                f"Task '{name}' is not retired: name the version to restore.", names=[name]
            )
    elif version not in task.versions:
        raise UnknownVersion(
            f"Task '{name}' never had a version {version}.", names=[f"{name}@{version}"]
        )
    elif not task.versions[version].retired:
        raise NothingToRestore(
            f"Version {version} of task '{name}' is not retired.", names=[f"{name}@{version}"]
        )
    else:
        coming = (version,)
    _check_restored_parents(catalog, task, coming)
    return Restore(task=name, versions=coming)


def _check_restored_parents(catalog: Catalog, task: TaskInfo, coming: tuple[int, ...]) -> None:
    """A child may not come back before its parents; those coming along count as back."""
    back = {task.versions[v].digest for v in coming}
    for version in coming:
        for parent in task.versions[version].extends:
            known = catalog.by_digest.get(parent, ())
            if parent not in back and all(v.retired for v in known):
                name = known[0].ref if known else parent
                raise MissingParent(
                    f"{task.name}@{version} extends {name}, which is retired: restore that first.",
                    names=[name],
                )


def log_path(generation: int) -> str:
    """Where the entry of a generation is kept."""
    return f"log/{generation:020d}.json"


def dump_checkpoint(catalog: Catalog) -> bytes:
    """The catalog as two lines: a head with the hash of the second, and the state."""
    state = {
        name: {
            "labels": dict(task.labels),
            "undo": {label: list(v) for label, v in task.undo.items()},
            "retired_together": list(task.retired_together),
            "versions": [_version_row(task.versions[v]) for v in sorted(task.versions)],
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
        tasks = {name: _task_from(name, task) for name, task in json.loads(body).items()}
    except (AttributeError, KeyError, TypeError, IndexError) as error:
        raise ValueError(f"its content is not a catalog: {error!r}") from None
    return Catalog(generation, MappingProxyType(tasks))


_ROW = tuple(name for name in VersionInfo.__dataclass_fields__ if name != "task")


def _version_row(info: VersionInfo) -> list[Any]:
    # Rows instead of objects: a checkpoint of ten thousand versions stays small and quick to read.
    return [getattr(info, name) for name in _ROW]


def _task_from(name: str, task: dict[str, Any]) -> TaskInfo:
    versions: dict[int, VersionInfo] = {}
    for row in task["versions"]:
        values = dict(zip(_ROW, row, strict=True))
        values["extends"] = tuple(values["extends"])
        versions[values["version"]] = VersionInfo(task=name, **values)
    return TaskInfo(
        name=name,
        versions=MappingProxyType(versions),
        labels=MappingProxyType(dict(task["labels"])),
        undo=MappingProxyType({label: tuple(v) for label, v in task["undo"].items()}),
        retired_together=tuple(task["retired_together"]),
    )
