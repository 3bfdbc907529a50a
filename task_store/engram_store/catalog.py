"""The catalog: the state of all tasks at a generation, as the replay of the log. No I/O here.

`Catalog.apply` folds entries into a new catalog. It skips an invalid entry instead of rejecting the
whole log. `changes` decides what may be appended.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from types import MappingProxyType
from typing import NamedTuple

from engram_bundle import TaskRef, digest_of, parse_ref
from engram_bundle.names import DEFAULT_ALIAS, closest_name

from engram_store import events
from engram_store.errors import (
    MissingParent,
    RetiredTask,
    UnknownAlias,
    UnknownTask,
    UnknownVersion,
)
from engram_store.events import Entry, TaskEvent, VersionFacts
from engram_store.layout import blob_path, log_path

# Older moves and changes are only in the log.
MAX_UNDO = 100  # moves of one alias that rollback can undo
MAX_CHANGES = 1000  # changes of one task in its history
NOTHING = digest_of(b"")  # the `previous` of the first entry of a log


@dataclass(frozen=True, slots=True)
class VersionInfo:
    task: str
    version: int
    facts: VersionFacts
    generation: int  # of its publish, as time and actor
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
        return self.facts.extends


class Canary(NamedTuple):
    """The version that an alias sends a share of its images to."""

    version: int
    share: float


@dataclass(frozen=True, slots=True)
class TaskInfo:
    """One task: all versions ever published, except purged ones, and the current aliases."""

    name: str
    versions: Mapping[int, VersionInfo]
    aliases: Mapping[str, int]
    undo: Mapping[str, tuple[int, ...]]  # earlier versions of each alias, oldest first
    retired_together: tuple[int, ...] = ()  # by the last retirement of the whole task
    changes: tuple[int, ...] = ()  # generations that changed it, oldest first
    purged: Mapping[int, str] = field(default_factory=dict)  # versions, and their digests
    purged_whole: int = 0  # the newest version when the whole task was purged last
    canaries: Mapping[str, Canary] = field(default_factory=dict)  # by alias

    @property
    def first(self) -> VersionInfo:
        """The version that created the task."""
        return self.versions[min(self.versions)]

    @property
    def live(self) -> tuple[VersionInfo, ...]:
        """Versions that are not retired, in order."""
        return tuple(v for _, v in sorted(self.versions.items()) if not v.retired)

    @property
    def is_live(self) -> bool:
        return any(not v.retired for v in self.versions.values())

    @property
    def next_version(self) -> int:
        """The number of the next version. Numbers of retired and purged ones are not reused."""
        return max((*self.versions, *self.purged), default=0) + 1

    @property
    def restorable(self) -> tuple[int, ...]:
        """The versions that restoring the whole task brings back; empty if it is live."""
        if self.is_live:
            return ()
        return tuple(v for v in self.retired_together if self.versions[v].retired)

    @property
    def restored_default(self) -> int | None:
        """The default version after the whole task is restored; None if it cannot be."""
        default = self.aliases.get(DEFAULT_ALIAS)
        return default if default in self.restorable else max(self.restorable, default=None)

    @property
    def current(self) -> VersionInfo:
        """The default version; of a retired task, the one after a restore, or the newest."""
        if self.is_live:
            return self.versions[self.aliases[DEFAULT_ALIAS]]
        return self.versions[self.restored_default or max(self.versions)]

    def rollback_target(self, alias: str = DEFAULT_ALIAS) -> int | None:
        """The version that undoing the last move of an alias goes to; None if there is none."""
        now = self.aliases.get(alias)
        earlier = reversed(self.undo.get(alias, ()))
        return next((v for v in earlier if v != now and not self.versions[v].retired), None)

    def live_with(self, digest: str) -> VersionInfo | None:
        """Return the newest live version with this digest."""
        return next((v for v in reversed(self.live) if v.digest == digest), None)

    def aliases_of(self, version: int) -> tuple[str, ...]:
        return tuple(sorted(alias for alias, v in self.aliases.items() if v == version))


@dataclass(frozen=True, slots=True)
class Damage:
    """An object that is damaged, missing or does not belong in the store."""

    path: str
    reason: str


@dataclass(frozen=True)
class Catalog:
    """All tasks at one generation: an immutable value that can be shared."""

    generation: int = 0
    all_tasks: Mapping[str, TaskInfo] = field(default_factory=dict)
    # Bundles that were collected or purged, and the generation at which that last happened.
    collected: Mapping[str, int] = field(default_factory=dict)
    head: str = NOTHING  # the digest of the newest entry

    @cached_property
    def tasks(self) -> Mapping[str, TaskInfo]:
        """Tasks with at least one live version, by name in order."""
        live = ((name, task) for name, task in sorted(self.all_tasks.items()) if task.is_live)
        return MappingProxyType(dict(live))

    @cached_property
    def retired_tasks(self) -> Mapping[str, TaskInfo]:
        """Tasks whose versions are all retired, without purged ones, by name in order."""
        tasks = sorted(self.all_tasks.items())
        retired = ((name, task) for name, task in tasks if task.versions and not task.is_live)
        return MappingProxyType(dict(retired))

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self.tasks)

    @cached_property
    def by_digest(self) -> Mapping[str, tuple[VersionInfo, ...]]:
        """Every version that is not purged, retired or not, by the digest of its bundle."""
        tasks = self.all_tasks.values()
        return _grouped((v.digest, v) for task in tasks for v in task.versions.values())

    @cached_property
    def children(self) -> Mapping[str, tuple[VersionInfo, ...]]:
        """Every version, retired or not, by the digest of each bundle it extends."""
        tasks = self.all_tasks.values()
        versions = (v for task in tasks for v in task.versions.values())
        return _grouped((parent, version) for version in versions for parent in version.extends)

    @cached_property
    def purged(self) -> frozenset[str]:
        """The digests of purged bundles, without those that another version still has."""
        digests = {digest for task in self.all_tasks.values() for digest in task.purged.values()}
        return frozenset(digests.difference(self.by_digest))

    def blob_path(self, digest: str) -> str:
        """Return the path where the bundle with this digest is, or belongs."""
        return blob_path(digest, self.collected.get(digest, 0))

    def task(self, name: str, *, suggest: bool = True) -> TaskInfo:
        """Return a live task, or raise UnknownTask, which may suggest a similar name."""
        task = self.all_tasks.get(name)
        if task is not None and task.is_live:
            return task
        if task is not None and task.versions:
            raise RetiredTask(f"Task '{name}' is retired: restore it to use it.", names=[name])
        if task is not None:
            raise UnknownTask(f"Task '{name}' was purged.", names=[name])
        near = closest_name(name, self.names) if suggest else None
        hint = f": did you mean '{near}'?" if near else "."
        raise UnknownTask(f"There is no task '{name}' in the store{hint}", names=[name])

    def version(self, name: str, version: int, *, suggest: bool = True) -> VersionInfo:
        """Return a live version, or raise UnknownTask or UnknownVersion."""
        task = self.task(name, suggest=suggest)
        info = task.versions.get(version)
        if info is not None and not info.retired:
            return info
        reason = f"Version {version} of task '{name}' is retired: restore it to use it."
        if version in task.purged:
            reason = f"Version {version} of task '{name}' was purged."
        elif info is None:
            reason = f"Task '{name}' has no version {version}; the newest is {max(task.versions)}."
        raise UnknownVersion(reason, names=[f"{name}@{version}"])

    def resolve(self, ref: TaskRef | str, *, suggest: bool = True) -> VersionInfo:
        """Return the live version that a reference points to, or raise InvalidName or NotFound."""
        ref = parse_ref(ref) if isinstance(ref, str) else ref
        if ref.version is not None:
            return self.version(ref.task, ref.version, suggest=suggest)
        task = self.task(ref.task, suggest=suggest)
        alias = ref.alias or DEFAULT_ALIAS
        if alias not in task.aliases:
            known = ", ".join(sorted(task.aliases))
            raise UnknownAlias(
                f"Task '{ref.task}' has no alias '{alias}'; it has {known}.", names=[str(ref)]
            )
        return self.version(ref.task, task.aliases[alias])

    def parents(self, extends: Iterable[str]) -> list[VersionInfo]:
        """Return a live version of each bundle that another extends, or raise MissingParent."""
        parents: list[VersionInfo] = []
        for digest in extends:
            versions = self.by_digest.get(digest, ())
            live = [version for version in versions if not version.retired]
            if not live:
                name = versions[0].ref if versions else digest
                state = "retired: restore" if versions else "not published: publish"
                raise MissingParent(
                    f"The bundle extends {name}, which is {state} it first.", names=[name]
                )
            parents.append(live[0])
        return parents

    def apply(self, entries: Sequence[Entry]) -> tuple["Catalog", list[Damage]]:
        """Return the catalog after these entries, and the invalid entries that were skipped."""
        tasks, collected = dict(self.all_tasks), dict(self.collected)
        drafts: dict[str, _Draft] = {}
        damages: list[Damage] = []
        for entry in entries:
            event = entry.event
            try:
                if isinstance(event, events.Collected | events.Purged):
                    _check_released(event, {**tasks, **drafts})
                if not isinstance(event, events.Collected):
                    if event.task not in drafts:
                        drafts[event.task] = _Draft(event.task, tasks.get(event.task))
                    drafts[event.task].apply(entry, event)
                if isinstance(event, events.Collected | events.Purged):
                    collected.update(dict.fromkeys(event.digests, entry.generation))
            except ValueError as error:
                damages.append(Damage(log_path(entry.generation), f"skipped: {error}"))
        tasks |= {name: draft.freeze() for name, draft in drafts.items() if draft.newest}
        catalog = replace(
            self,
            # A skipped entry also uses up its generation, so that all readers count alike.
            generation=max([self.generation, *(entry.generation for entry in entries)]),
            all_tasks=MappingProxyType(tasks),
            collected=MappingProxyType(collected),
        )
        return catalog, damages

    def read(self, raw: Iterable[tuple[int, bytes | None]]) -> tuple["Catalog", list[Damage]]:
        """Return the catalog after the next entries as stored (None: missing), and their damage.

        Entries that cannot be read or are invalid are skipped. Entries that break the hash chain
        are reported and applied.
        """
        entries: list[Entry] = []
        damages: list[Damage] = []
        newest, head = self.generation, self.head
        for generation, data in raw:
            newest = max(newest, generation)
            try:
                entry = Entry.from_json(data, generation)
            except ValueError as error:
                damages.append(Damage(log_path(generation), f"damaged log entry, skipped: {error}"))
            else:
                entries.append(entry)
                if entry.stamp.previous != head:
                    reason = f"not the entry that log entry {generation} was written after"
                    damages.append(Damage(log_path(max(generation - 1, 1)), reason))
            head = digest_of(data or b"")
        catalog, skipped = self.apply(entries)
        return replace(catalog, generation=newest, head=head), damages + skipped


def _grouped(pairs: Iterable[tuple[str, VersionInfo]]) -> Mapping[str, tuple[VersionInfo, ...]]:
    groups: dict[str, list[VersionInfo]] = {}
    for digest, version in pairs:
        groups.setdefault(digest, []).append(version)
    return MappingProxyType({digest: tuple(versions) for digest, versions in groups.items()})


def _check_released(
    event: events.Collected | events.Purged, tasks: Mapping[str, "TaskInfo | _Draft"]
) -> None:
    """Raise ValueError if an event releases a bundle that a version still has."""
    purged = event.versions if isinstance(event, events.Purged) else ()
    published = {
        info.digest
        for name, task in tasks.items()
        for version, info in task.versions.items()
        if version not in purged or name != getattr(event, "task", None)
    }
    if both := [digest for digest in event.digests if digest in published]:
        raise ValueError(f"it releases {both[0]}, which is published")


class _Draft:
    """A task that entries are being applied to: copied once, however many they are."""

    def __init__(self, name: str, task: TaskInfo | None) -> None:
        task = task or TaskInfo(name, versions={}, aliases={}, undo={})
        self.name = name
        self.versions = dict(task.versions)
        self.aliases = dict(task.aliases)
        self.undo = dict(task.undo)
        self.retired_together = task.retired_together
        self.newest = task.next_version - 1
        self.live = len(task.live)
        self.changes = list(task.changes)
        self.purged = dict(task.purged)
        self.purged_whole = task.purged_whole
        self.canaries = dict(task.canaries)

    def freeze(self) -> TaskInfo:
        return TaskInfo(
            name=self.name,
            versions=MappingProxyType(self.versions),
            aliases=MappingProxyType(self.aliases),
            undo=MappingProxyType(self.undo),
            retired_together=self.retired_together,
            changes=tuple(self.changes[-MAX_CHANGES:]),
            purged=MappingProxyType(self.purged),
            purged_whole=self.purged_whole,
            canaries=MappingProxyType(self.canaries),
        )

    def apply(self, entry: Entry, event: TaskEvent) -> None:
        """Apply an event, or raise ValueError and change nothing."""
        if isinstance(event, events.Published):
            self._publish(entry, event)
        elif isinstance(event, events.AliasMoved):
            self._move_aliases(event)
        elif isinstance(event, events.CanarySet):
            self._set_canary(event)
        elif isinstance(event, events.Retired):
            self.live -= self._set_retired(event.versions, True)
            if event.whole:
                self.retired_together = event.versions
        elif isinstance(event, events.Restored):
            self._restore(event)
        else:
            self._purge(event)
        if self.canaries:
            self._drop_canaries()
        if self.newest:
            self.changes.append(entry.generation)

    def _publish(self, entry: Entry, event: events.Published) -> None:
        if event.version <= self.newest:
            raise ValueError(f"version {event.version} of '{event.task}' was published before")
        if not self.live:
            # The task was retired: its old aliases point to retired versions.
            self.aliases.clear()
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
        for alias in event.aliases:
            self._move(alias, event.version)
        # `default` always exists, even if the entry does not list it.
        self.aliases.setdefault(DEFAULT_ALIAS, event.version)

    def _move_aliases(self, event: events.AliasMoved) -> None:
        if event.version is None:
            if DEFAULT_ALIAS in event.aliases:
                raise ValueError("'default' cannot be removed")
            for alias in event.aliases:
                self.aliases.pop(alias, None)
                self.undo.pop(alias, None)
            return
        self._check_retired(event.version, False)
        for alias in event.aliases:
            if event.rollback:
                self._move_back(alias, event.version)
            else:
                self._move(alias, event.version)

    def _set_canary(self, event: events.CanarySet) -> None:
        if event.alias not in self.aliases:
            raise ValueError(f"there is no alias '{event.alias}'")
        self.canaries.pop(event.alias, None)
        if event.version is not None:
            self._check_retired(event.version, False)
            self.canaries[event.alias] = Canary(event.version, event.share)

    def _drop_canaries(self) -> None:
        """Drop canaries whose alias is gone, or whose version is retired or the alias's own."""
        self.canaries = {
            alias: canary
            for alias, canary in self.canaries.items()
            if self.aliases.get(alias, canary.version) != canary.version
            and (info := self.versions.get(canary.version)) is not None
            and not info.retired
        }

    def _restore(self, event: events.Restored) -> None:
        self.live += self._set_retired(event.versions, False)
        # If only one version of a retired task was restored, others may still be retired.
        stale = [alias for alias, v in self.aliases.items() if self.versions[v].retired]
        for alias in stale:
            del self.aliases[alias]
            self.undo.pop(alias, None)
        self.aliases.setdefault(DEFAULT_ALIAS, max(event.versions))

    def _purge(self, event: events.Purged) -> None:
        """Remove versions, with everything that points to them."""
        if unknown := [version for version in event.versions if version not in self.versions]:
            raise ValueError(f"there is no version {unknown[0]}")
        for version in event.versions:
            info = self.versions.pop(version)
            self.purged[version] = info.digest
            self.live -= not info.retired
        kept = self.versions.keys()
        self.aliases = {alias: v for alias, v in self.aliases.items() if v in kept}
        undo = {alias: tuple(v for v in moves if v in kept) for alias, moves in self.undo.items()}
        self.undo = {alias: moves for alias, moves in undo.items() if moves}
        self.retired_together = tuple(v for v in self.retired_together if v in kept)
        if self.live:
            # `default` always exists, even if the entry purges its version.
            live = (version for version, info in self.versions.items() if not info.retired)
            self.aliases.setdefault(DEFAULT_ALIAS, max(live))
        if event.whole:
            self.purged_whole = self.newest

    def _set_retired(self, versions: tuple[int, ...], retired: bool) -> int:
        """Retire or restore all versions or none, and return their number."""
        for version in versions:
            self._check_retired(version, not retired)
        for version in versions:
            self.versions[version] = replace(self.versions[version], retired=retired)
        return len(set(versions))

    def _move(self, alias: str, version: int) -> None:
        before = self.aliases.get(alias)
        if before is not None and before != version:
            self.undo[alias] = (*self.undo.get(alias, ()), before)[-MAX_UNDO:]
        self.aliases[alias] = version

    def _move_back(self, alias: str, version: int) -> None:
        earlier = self.undo.get(alias, ())
        if version not in earlier:
            raise ValueError(f"alias '{alias}' was never at version {version}")
        index = len(earlier) - 1 - earlier[::-1].index(version)
        self.undo[alias] = earlier[:index]
        if not index:
            del self.undo[alias]
        self.aliases[alias] = version

    def _check_retired(self, version: int, expected: bool) -> None:
        info = self.versions.get(version)
        if info is None:
            raise ValueError(f"there is no version {version}")
        if info.retired != expected:
            raise ValueError(f"version {version} is {'retired' if info.retired else 'not retired'}")
