"""The catalog: the state of all tasks at a generation, as the replay of the log. No I/O here.

`Catalog.apply` folds entries into a new catalog and never refuses a whole log because of one bad
entry. What may be appended is decided in `changes`. A checkpoint is the catalog at a generation in
one file, so that opening replays little.
"""

import hashlib
import itertools
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from types import MappingProxyType
from typing import Any

from task_store.bundle import digest_of
from task_store.errors import UnknownLabel, UnknownTask, UnknownVersion, UnsupportedFormat
from task_store.events import (
    Accepted,
    Collected,
    Entry,
    Labelled,
    Published,
    Restored,
    Retired,
    TaskEvent,
    VersionFacts,
)
from task_store.layout import blob_path, log_path
from task_store.names import DEFAULT_LABEL, TaskRef, closest_name, parse_ref

# Moves of one label that rollback can undo; older ones stay in the log, for reading only.
MAX_UNDO = 100

# Changes of one task that its history can tell; older ones stay in the log.
MAX_CHANGES = 1000

CHECKPOINT_FORMAT = 2
# What the first entry of a log names as the one before it.
NOTHING = digest_of(b"")

# A version is a row, not an object, so that a checkpoint of ten thousand stays small and quick to
# read: these, then the facts that follow `size`, then whether it is retired.
_FIRST = ("version", "digest", "size", "generation", "time", "actor")
_FACTS = tuple(name for name in VersionFacts.model_fields if name not in _FIRST)


@dataclass(frozen=True, slots=True)
class VersionInfo:
    """One published version."""

    task: str
    version: int
    facts: VersionFacts
    # When and by whom it was published.
    generation: int
    time: str
    actor: str
    retired: bool = False

    @property
    def ref(self) -> str:
        return f"{self.task}@{self.version}"

    @property
    def digest(self) -> str:
        return self.facts.digest

    @property
    def extends(self) -> tuple[str, ...]:
        """Digests of the bundles it extends."""
        return self.facts.extends


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
    # The generations that changed it, oldest first.
    changes: tuple[int, ...] = ()

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

    def live_with(self, digest: str) -> VersionInfo | None:
        """The newest live version with these bytes."""
        return next((v for v in reversed(self.live) if v.digest == digest), None)

    def labels_of(self, version: int) -> tuple[str, ...]:
        """The labels that point to a version."""
        return tuple(sorted(label for label, v in self.labels.items() if v == version))


@dataclass(frozen=True, slots=True)
class Damage:
    """Something in the store that should not be there, or is missing."""

    path: str
    reason: str
    # The digest of a log entry with which nothing is wrong but that it names none before it.
    unlinked: str = ""


@dataclass(frozen=True)
class Catalog:
    """All tasks at one generation; a value, safe to hold on to and share."""

    generation: int = 0
    all_tasks: Mapping[str, TaskInfo] = field(default_factory=dict)
    # Bundles that were given up, and the generation at which they last were.
    collected: Mapping[str, int] = field(default_factory=dict)
    head: str = NOTHING  # the hash of the newest entry
    chained: bool = False  # whether an entry so far named the one before it
    # Entries outside of the chain that somebody vouched for, by digest. They are older than the
    # entry that says so: who begins at a checkpoint after it meets none of them.
    accepted: frozenset[str] = field(default=frozenset(), compare=False)

    @cached_property
    def tasks(self) -> Mapping[str, TaskInfo]:
        """Tasks with at least one live version, by name in order."""
        live = ((name, task) for name, task in sorted(self.all_tasks.items()) if task.is_live)
        return MappingProxyType(dict(live))

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self.tasks)

    @cached_property
    def by_digest(self) -> Mapping[str, tuple[VersionInfo, ...]]:
        """Every version ever published, retired or not, by the digest of its bundle."""
        return _grouped((version.digest, version) for version in self._versions())

    @cached_property
    def children(self) -> Mapping[str, tuple[VersionInfo, ...]]:
        """Live versions by the digest of each bundle they extend."""
        live = (version for version in self._versions() if not version.retired)
        return _grouped((parent, version) for version in live for parent in version.extends)

    def blob_path(self, digest: str) -> str:
        """Where the bundle with this digest is, or belongs."""
        return blob_path(digest, self.collected.get(digest, 0))

    def _versions(self) -> Iterator[VersionInfo]:
        return (v for task in self.all_tasks.values() for v in task.versions.values())

    def task(self, name: str, *, suggest: bool = True) -> TaskInfo:
        """The live task of this name, or UnknownTask, which suggests one of another name."""
        task = self.all_tasks.get(name)
        if task is not None and task.is_live:
            return task
        if task is not None:
            raise UnknownTask(f"Task '{name}' is retired: restore it to use it.", names=[name])
        near = closest_name(name, self.names) if suggest else None
        hint = f": did you mean '{near}'?" if near else "."
        raise UnknownTask(f"There is no task '{name}' in the store{hint}", names=[name])

    def version(self, name: str, version: int, *, suggest: bool = True) -> VersionInfo:
        """A live version, or UnknownTask or UnknownVersion."""
        task = self.task(name, suggest=suggest)
        info = task.versions.get(version)
        if info is not None and not info.retired:
            return info
        reason = f"Version {version} of task '{name}' is retired: restore it to use it."
        if info is None:
            newest = task.next_version - 1
            reason = f"Task '{name}' has no version {version}; the newest is {newest}."
        raise UnknownVersion(reason, names=[f"{name}@{version}"])

    def resolve(self, ref: TaskRef | str, *, suggest: bool = True) -> VersionInfo:
        """The live version a reference stands for, or InvalidName or NotFound."""
        ref = parse_ref(ref) if isinstance(ref, str) else ref
        if ref.version is not None:
            return self.version(ref.task, ref.version, suggest=suggest)
        task = self.task(ref.task, suggest=suggest)
        label = ref.label or DEFAULT_LABEL
        if label not in task.labels:
            known = ", ".join(sorted(task.labels))
            raise UnknownLabel(
                f"Task '{ref.task}' has no label '{label}'; it has {known}.", names=[str(ref)]
            )
        return self.version(ref.task, task.labels[label])

    def apply(self, entries: Iterable[Entry]) -> tuple["Catalog", list[Damage]]:
        """The catalog after these entries, and those that made no sense and were passed over.

        A passed-over entry still uses up its generation: all readers count alike.
        """
        catalog = self
        damages: list[Damage] = []
        for fold, group in itertools.groupby(entries, lambda entry: _FOLDS.get(entry.event.kind)):
            catalog, passed_over = (fold or Catalog._change)(catalog, list(group))
            damages += passed_over
        return catalog, damages

    def _change(self, entries: list[Entry]) -> tuple["Catalog", list[Damage]]:
        tasks = dict(self.all_tasks)
        drafts: dict[str, _Draft] = {}
        damages: list[Damage] = []
        for entry in entries:
            event = entry.event
            assert not isinstance(event, Collected | Accepted)
            draft = drafts.get(event.task)
            if draft is None:
                draft = drafts[event.task] = _Draft(tasks.get(event.task))
            try:
                draft.apply(entry, event)
            except ValueError as error:
                damages.append(Damage(log_path(entry.generation), f"passed over: {error}"))
        for name, draft in drafts.items():
            if draft.versions:
                tasks[name] = draft.freeze(name)
        generation = max(self.generation, entries[-1].generation)
        return replace(self, generation=generation, all_tasks=MappingProxyType(tasks)), damages

    def _collect(self, entries: list[Entry]) -> tuple["Catalog", list[Damage]]:
        collected = dict(self.collected)
        damages: list[Damage] = []
        for entry in entries:
            assert isinstance(entry.event, Collected)
            published = [digest for digest in entry.event.digests if digest in self.by_digest]
            if published:
                reason = f"passed over: it gives up {published[0]}, which is published"
                damages.append(Damage(log_path(entry.generation), reason))
            else:
                collected.update(dict.fromkeys(entry.event.digests, entry.generation))
        generation = max(self.generation, entries[-1].generation)
        return replace(self, generation=generation, collected=MappingProxyType(collected)), damages

    def _accept(self, entries: list[Entry]) -> tuple["Catalog", list[Damage]]:
        accepted = set(self.accepted)
        for entry in entries:
            assert isinstance(entry.event, Accepted)
            accepted.update(entry.event.digests)
        generation = max(self.generation, entries[-1].generation)
        return replace(self, generation=generation, accepted=frozenset(accepted)), []

    def not_accepted(self, damages: Iterable[Damage]) -> list[Damage]:
        """What is left of these: all but the entries that somebody vouched for."""
        return [damage for damage in damages if damage.unlinked not in self.accepted]

    def read(self, raw: Iterable[tuple[int, bytes | None]]) -> tuple["Catalog", list[Damage]]:
        """The catalog after the next entries as they are stored (None: one that cannot be read).

        Also whatever is wrong with them: those that cannot be read or make no sense are passed
        over, and whatever breaks the chain of hashes is told, but applied.
        """
        entries: list[Entry] = []
        damages: list[Damage] = []
        newest, head, chained = self.generation, self.head, self.chained
        for generation, data in raw:
            newest = max(newest, generation)
            try:
                if data is None:
                    raise ValueError("it is missing or cannot be read")
                entry = Entry.from_json(data, generation)
            except ValueError as error:
                reason = f"damaged log entry, passed over: {error}"
                damages.append(Damage(log_path(generation), reason))
            else:
                entries.append(entry)
                damages += _broken_link(entry, data, head, chained)
                chained = chained or entry.stamp.previous is not None
            head = digest_of(data or b"")
        catalog, passed_over = self.apply(entries)
        catalog = replace(catalog, generation=newest, head=head, chained=chained)
        return catalog, damages + passed_over


# What kinds of entries that are about no task do to a catalog.
_FOLDS = {"collect": Catalog._collect, "accept": Catalog._accept}


def _broken_link(entry: Entry, data: bytes, head: str, chained: bool) -> list[Damage]:
    """What is wrong with the entry before, whose hash is `head`, or with this one's lack of it."""
    previous, generation = entry.stamp.previous, entry.generation
    if previous is None and chained:
        reason = "names no entry before it, unlike earlier ones: of an older Engram, or not genuine"
        return [Damage(log_path(generation), reason, unlinked=digest_of(data))]
    if previous not in (None, head):
        reason = f"not the entry that log entry {generation} was written after"
        return [Damage(log_path(max(generation - 1, 1)), reason)]
    return []


def _grouped(pairs: Iterable[tuple[str, VersionInfo]]) -> Mapping[str, tuple[VersionInfo, ...]]:
    groups: dict[str, list[VersionInfo]] = {}
    for digest, version in pairs:
        groups.setdefault(digest, []).append(version)
    return MappingProxyType({digest: tuple(versions) for digest, versions in groups.items()})


class _Draft:
    """A task being changed: copied once, however many entries follow."""

    def __init__(self, task: TaskInfo | None) -> None:
        self.versions = {} if task is None else dict(task.versions)
        self.labels = {} if task is None else dict(task.labels)
        self.undo = {} if task is None else dict(task.undo)
        self.retired_together = () if task is None else task.retired_together
        self.newest = max(self.versions, default=0)
        self.live = sum(not v.retired for v in self.versions.values())
        self.changes = [] if task is None else list(task.changes)

    def freeze(self, name: str) -> TaskInfo:
        return TaskInfo(
            name=name,
            versions=MappingProxyType(self.versions),
            labels=MappingProxyType(self.labels),
            undo=MappingProxyType(self.undo),
            retired_together=self.retired_together,
            changes=tuple(self.changes[-MAX_CHANGES:]),
        )

    def apply(self, entry: Entry, event: TaskEvent) -> None:
        """Change the draft, or raise ValueError and leave it as it was."""
        if isinstance(event, Published):
            self._publish(entry, event)
        elif isinstance(event, Labelled):
            self._label(event)
        elif isinstance(event, Retired):
            self._retire(event)
        else:
            self._restore(event)
        if self.versions:
            self.changes.append(entry.generation)

    def _publish(self, entry: Entry, event: Published) -> None:
        if event.version <= self.newest:
            raise ValueError(f"version {event.version} of '{event.task}' was published before")
        if not self.live:
            # A new life of a retired name: labels of the old one would point into the void.
            self.labels.clear()
            self.undo.clear()
        self.versions[event.version] = VersionInfo(
            task=event.task,
            version=event.version,
            facts=event.facts,
            generation=entry.generation,
            time=entry.stamp.time,
            actor=entry.stamp.actor,
        )
        self.newest = event.version
        self.live += 1
        for label in event.labels:
            self._move(label, event.version)
        # `default` always exists, even if a writer forgot to say so.
        self.labels.setdefault(DEFAULT_LABEL, event.version)

    def _label(self, event: Labelled) -> None:
        if event.version is None:
            if DEFAULT_LABEL in event.labels:
                raise ValueError("'default' cannot be removed")
            for label in event.labels:
                self.labels.pop(label, None)
                self.undo.pop(label, None)
            return
        self._must_be(event.version, retired=False)
        for label in event.labels:
            if event.rollback:
                self._move_back(label, event.version)
            else:
                self._move(label, event.version)

    def _retire(self, event: Retired) -> None:
        self.live -= self._turn(event.versions, retired=True)
        if event.whole:
            self.retired_together = event.versions

    def _restore(self, event: Restored) -> None:
        self.live += self._turn(event.versions, retired=False)
        # One version of a retired task was restored: no label may be left on a retired one.
        stale = [label for label, v in self.labels.items() if self.versions[v].retired]
        for label in stale:
            del self.labels[label]
            self.undo.pop(label, None)
        self.labels.setdefault(DEFAULT_LABEL, max(event.versions))

    def _turn(self, versions: tuple[int, ...], *, retired: bool) -> int:
        """Retire or restore them, all or none; how many they are."""
        for version in versions:
            self._must_be(version, retired=not retired)
        for version in versions:
            self.versions[version] = replace(self.versions[version], retired=retired)
        return len(set(versions))

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


def dump_checkpoint(catalog: Catalog) -> bytes:
    """The catalog as two lines: a head with the hash of the second, and the state."""
    tasks = {
        name: {
            "changes": list(task.changes),
            "labels": dict(task.labels),
            "undo": {label: list(v) for label, v in task.undo.items()},
            "retired_together": list(task.retired_together),
            "versions": [_row(task.versions[v]) for v in sorted(task.versions)],
        }
        for name, task in catalog.all_tasks.items()
    }
    state = {
        "chained": catalog.chained,
        "collected": dict(catalog.collected),
        "head": catalog.head,
        "tasks": tasks,
    }
    body = json.dumps(state, separators=(",", ":"), sort_keys=True).encode()
    head = {
        "format": CHECKPOINT_FORMAT,
        "generation": catalog.generation,
        "sha256": hashlib.sha256(body).hexdigest(),
    }
    return json.dumps(head, separators=(",", ":")).encode() + b"\n" + body + b"\n"


def load_checkpoint(data: bytes, generation: int) -> Catalog:
    """Read a checkpoint: ValueError if damaged, UnsupportedFormat if of another release.

    Those of the first releases say neither which entries changed a task nor the newest one's hash,
    which only the log can tell.
    """
    first, _, body = data.partition(b"\n")
    body = body.removesuffix(b"\n")
    head = json.loads(first)
    if not isinstance(head, dict):
        raise ValueError("the first line is not a JSON object")
    written = head.get("format")
    if isinstance(written, int) and written != CHECKPOINT_FORMAT:
        raise UnsupportedFormat(
            f"Checkpoint {generation} has format {written}, and this Engram reads those of format "
            f"{CHECKPOINT_FORMAT}."
        )
    if head.get("generation") != generation:
        raise ValueError(f"it says it is generation {head.get('generation')}")
    if head.get("sha256") != hashlib.sha256(body).hexdigest():
        raise ValueError("its hash does not match its content")
    try:
        state = json.loads(body)
        tasks = {name: _task(name, task) for name, task in state["tasks"].items()}
        return Catalog(
            generation,
            MappingProxyType(tasks),
            MappingProxyType(dict(state["collected"])),
            state["head"],
            state["chained"],
        )
    except (AttributeError, KeyError, TypeError, IndexError) as error:
        raise ValueError(f"its content is not a catalog: {error!r}") from None


def _row(info: VersionInfo) -> list[Any]:
    values = {**vars(info.facts), "version": info.version, "generation": info.generation}
    values |= {"time": info.time, "actor": info.actor}
    return [*(values[name] for name in (*_FIRST, *_FACTS)), info.retired]


def _version(task: str, row: list[Any]) -> VersionInfo:
    version, digest, size, generation, time, actor, *facts, retired = row
    # A row of an earlier release may lack the newest facts, which then have their defaults.
    if len(facts) > len(_FACTS):
        raise ValueError(f"version {version} of '{task}' has more facts than are known")
    known = VersionFacts(digest=digest, size=size, **dict(zip(_FACTS, facts, strict=False)))
    return VersionInfo(task, version, known, generation, time, actor, retired)


def _task(name: str, task: dict[str, Any]) -> TaskInfo:
    versions = [_version(name, row) for row in task["versions"]]
    return TaskInfo(
        name=name,
        versions=MappingProxyType({info.version: info for info in versions}),
        labels=MappingProxyType(dict(task["labels"])),
        undo=MappingProxyType({label: tuple(v) for label, v in task["undo"].items()}),
        retired_together=tuple(task["retired_together"]),
        changes=tuple(task["changes"]),
    )
