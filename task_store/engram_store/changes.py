"""Changes to tasks: values that `TaskStore.commit` decides and appends to the log.

`plan` returns the event to append to a catalog (None if there is nothing to do), or raises. A
writer that lost a race plans again on the newer catalog, so all rules hold under concurrency.

Extensions cannot form a cycle: a bundle names its parents by the SHA-256 of their files, so it can
only be written after them, and `Publish` accepts it only when they are published.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from engram_bundle import IncompatibleBundle, TaskBundle, TaskRef, check_alias, check_task_name
from engram_bundle.names import DEFAULT_ALIAS
from pydantic import JsonValue

from engram_store import errors
from engram_store.catalog import Catalog, TaskInfo, VersionInfo
from engram_store.events import (
    AliasMoved,
    CanarySet,
    Collected,
    Published,
    Purged,
    Restored,
    Retired,
    VersionFacts,
)

# A check of the catalog that a change is decided on: it raises to reject the change.
Condition = Callable[[Catalog], None]


@dataclass(frozen=True)
class Publish:
    """Add a bundle as the next version of a task, and move `aliases` to it.

    The first live version of a task also gets `default`. If the task has a live version with the
    same bytes, no version is created; aliases that point elsewhere still move to it.
    """

    task: str
    bundle: TaskBundle
    aliases: tuple[str, ...] = (DEFAULT_ALIAS,)
    note: str = ""  # what is new, for the history

    def __post_init__(self) -> None:
        check_task_name(self.task)
        aliases = tuple(dict.fromkeys(check_alias(alias) for alias in self.aliases))
        object.__setattr__(self, "aliases", aliases)

    @cached_property
    def facts(self) -> VersionFacts:
        return VersionFacts.of(self.bundle)

    def plan(self, catalog: Catalog) -> Published | AliasMoved | None:
        task = catalog.all_tasks.get(self.task)
        same = None if task is None else task.live_with(self.facts.digest)
        if task is not None and same is not None:
            moving = tuple(x for x in self.aliases if task.aliases.get(x) != same.version)
            if not moving:
                return None
            return AliasMoved(task=self.task, aliases=moving, version=same.version, note=self.note)
        for parent in catalog.parents(self.facts.extends):
            if parent.facts.fingerprint != self.facts.fingerprint:
                raise IncompatibleBundle(
                    f"The bundle for '{self.task}' needs the backbone {self.facts.fingerprint}, "
                    f"but its parent {parent.ref} needs {parent.facts.fingerprint}.",
                    names=[parent.ref],
                )
        aliases = self.aliases
        if task is None or not task.is_live:
            aliases = (DEFAULT_ALIAS, *(alias for alias in aliases if alias != DEFAULT_ALIAS))
        version = 1 if task is None else task.next_version
        return Published(
            task=self.task, version=version, aliases=aliases, facts=self.facts, note=self.note
        )


@dataclass(frozen=True, slots=True)
class MoveAlias:
    """Point an alias to a live version."""

    task: str
    alias: str
    version: int
    # What the move was decided on, for the log.
    evidence: dict[str, JsonValue] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_alias(self.alias)

    def plan(self, catalog: Catalog) -> AliasMoved | None:
        catalog.version(self.task, self.version)
        if catalog.task(self.task).aliases.get(self.alias) == self.version:
            return None
        return AliasMoved(
            task=self.task, aliases=(self.alias,), version=self.version, evidence=self.evidence
        )


@dataclass(frozen=True, slots=True)
class RemoveAlias:
    """Remove an alias other than `default`."""

    task: str
    alias: str

    def plan(self, catalog: Catalog) -> AliasMoved:
        catalog.resolve(TaskRef(self.task, alias=self.alias))
        if self.alias == DEFAULT_ALIAS:
            raise errors.StillAliased(
                f"Alias 'default' of task '{self.task}' cannot be removed: move it, or retire the "
                f"task.",
                names=[f"{self.task}:{self.alias}"],
            )
        return AliasMoved(task=self.task, aliases=(self.alias,), version=None)


@dataclass(frozen=True, slots=True)
class SetCanary:
    """Send a share of the images of an alias to another live version; share 0 ends it."""

    task: str
    alias: str
    version: int
    share: float

    def plan(self, catalog: Catalog) -> CanarySet | None:
        now = catalog.resolve(TaskRef(self.task, alias=self.alias))
        other = catalog.version(self.task, self.version)
        present = catalog.task(self.task).canaries.get(self.alias)
        if self.share == 0:
            ended = present is not None and present.version == self.version
            return CanarySet(task=self.task, alias=self.alias, version=None) if ended else None
        if other.version == now.version:
            raise errors.Conflict(
                f"Alias '{self.alias}' of task '{self.task}' points to version {now.version} "
                f"already: name another version.",
                names=[other.ref],
            )
        if other.facts.task_type != now.facts.task_type:
            raise errors.Conflict(
                f"{other.ref} is a {other.facts.task_type} task and {now.ref} a "
                f"{now.facts.task_type} task: callers could not tell their answers apart.",
                names=[other.ref],
            )
        if present == (self.version, self.share):
            return None
        return CanarySet(task=self.task, alias=self.alias, version=self.version, share=self.share)


@dataclass(frozen=True, slots=True)
class RollBack:
    """Undo the last move of an alias, skipping retired versions; repeat to go further back."""

    task: str
    alias: str = DEFAULT_ALIAS
    note: str = ""  # why, for the history

    def plan(self, catalog: Catalog) -> AliasMoved:
        now = catalog.resolve(TaskRef(self.task, alias=self.alias)).version
        version = catalog.task(self.task).rollback_target(self.alias)
        if version is None:
            raise errors.NothingToRollBack(
                f"Alias '{self.alias}' of task '{self.task}' has no earlier version to roll back "
                f"to; it stays at version {now}.",
                names=[f"{self.task}:{self.alias}"],
            )
        return AliasMoved(
            task=self.task, aliases=(self.alias,), version=version, rollback=True, note=self.note
        )


@dataclass(frozen=True, slots=True)
class Retire:
    """Remove a version or a whole task from the catalog; its bundles are kept."""

    task: str
    version: int | None = None

    def plan(self, catalog: Catalog) -> Retired:
        task = catalog.task(self.task)
        if self.version is None:
            leaving = task.live
        else:
            leaving = (catalog.version(self.task, self.version),)
            _check_aliases(task, leaving, "retire")
        _check_children(catalog, leaving)
        versions = tuple(v.version for v in leaving)
        return Retired(task=self.task, versions=versions, whole=self.version is None)


@dataclass(frozen=True, slots=True)
class Restore:
    """Restore a version, or the versions that the last retirement of the whole task retired."""

    task: str
    version: int | None = None

    def plan(self, catalog: Catalog) -> Restored:
        # `catalog.task` raises UnknownTask for a name that was never published.
        task = catalog.all_tasks.get(self.task) or catalog.task(self.task)
        if self.version is None:
            versions = task.restorable
            if not versions:
                reason = "is not retired: name the version to restore"
                if not task.versions:
                    reason = "was purged and cannot be restored"
                raise errors.NothingToRestore(f"Task '{self.task}' {reason}.", names=[self.task])
        elif self.version in task.purged:
            raise errors.NothingToRestore(
                f"Version {self.version} of task '{self.task}' was purged and cannot be restored.",
                names=[f"{self.task}@{self.version}"],
            )
        elif self.version not in task.versions:
            raise errors.UnknownVersion(
                f"Task '{self.task}' never had a version {self.version}.",
                names=[f"{self.task}@{self.version}"],
            )
        elif not task.versions[self.version].retired:
            raise errors.NothingToRestore(
                f"Version {self.version} of task '{self.task}' is not retired.",
                names=[f"{self.task}@{self.version}"],
            )
        else:
            versions = (self.version,)
        # Parents come first; those that are restored by the same change count as live.
        restored = {task.versions[v].digest for v in versions}
        extends = (parent for v in versions for parent in task.versions[v].extends)
        catalog.parents(parent for parent in extends if parent not in restored)
        return Restored(task=self.task, versions=versions)


@dataclass(frozen=True, slots=True)
class Purge:
    """Remove versions, or a whole task, for good; live ones are retired by the same event.

    Nothing to do if they were purged before. The store deletes their bundles after the commit,
    except those that another version still has. Like a `Collect`, the event releases their paths,
    so a deletion cannot race with a publish of the same bytes.
    """

    task: str
    versions: tuple[int, ...] | None = None  # None: the whole task

    def plan(self, catalog: Catalog) -> Purged | None:
        # `catalog.task` raises UnknownTask for a name that was never published.
        task = catalog.all_tasks.get(self.task) or catalog.task(self.task)
        known = {**task.versions, **task.purged}
        for version in self.versions or ():
            if version not in known:
                raise errors.UnknownVersion(
                    f"Task '{self.task}' never had a version {version}.",
                    names=[f"{self.task}@{version}"],
                )
        named = task.versions if self.versions is None else self.versions
        leaving = tuple(task.versions[v] for v in sorted(set(named)) if v in task.versions)
        if not leaving:
            return None
        if self.versions is not None:
            _check_aliases(task, leaving, "purge")
        _check_children(catalog, leaving)
        refs = {info.ref for info in leaving}
        unused = {
            info.digest: None
            for info in leaving
            if all(same.ref in refs for same in catalog.by_digest[info.digest])
        }
        for info in leaving:
            children = [v.ref for v in catalog.children.get(info.digest, ()) if v.ref not in refs]
            if children and info.digest in unused:
                raise errors.StillExtended(
                    f"{info.ref} is still extended by {', '.join(children)}: purge those first.",
                    names=children,
                )
        return Purged(
            task=self.task,
            versions=tuple(info.version for info in leaving),
            digests=tuple(unused),
            whole=len(leaving) == len(task.versions),
        )


@dataclass(frozen=True, slots=True)
class Collect:
    """Release bundles that are not published; those that are published by now are left out.

    Decided on the newest catalog like every change. A publish of the same bytes is therefore
    either before it, and keeps them, or after it, and writes them to another path. The object at
    the old path can be deleted at any later time.
    """

    blobs: Mapping[str, int]  # digests with the generation of their last collection (0: never)

    def plan(self, catalog: Catalog) -> Collected | None:
        unused = tuple(
            digest
            for digest, before in self.blobs.items()
            if digest not in catalog.by_digest and catalog.collected.get(digest, 0) == before
        )
        return Collected(digests=unused) if unused else None


Change = Publish | MoveAlias | RemoveAlias | SetCanary | RollBack | Retire | Restore | Purge


def only_if_absent(task: str) -> Condition:
    """Return the condition that the task has no live version."""

    def check(catalog: Catalog) -> None:
        if task in catalog.tasks:
            raise errors.AlreadyExists(
                f"Task '{task}' already exists: publish without the condition to add a version.",
                names=[task],
            )

    return check


def _check_aliases(task: TaskInfo, leaving: Sequence[VersionInfo], verb: str) -> None:
    """Reject the change of single versions while an alias points to a live one."""
    for info in leaving:
        aliases = () if info.retired else task.aliases_of(info.version)
        if aliases:
            raise errors.StillAliased(
                f"Version {info.version} of task '{task.name}' still has the alias "
                f"{', '.join(aliases)}: move the alias first, or {verb} the whole task.",
                names=[f"{task.name}:{alias}" for alias in aliases],
            )


def _check_children(catalog: Catalog, leaving: tuple[VersionInfo, ...]) -> None:
    """Reject a change after which a live child extends a bundle without a live version."""
    refs = {v.ref for v in leaving}
    for info in leaving:
        same = catalog.by_digest[info.digest]
        elsewhere = any(not v.retired and v.ref not in refs for v in same)
        extending = catalog.children.get(info.digest, ())
        children = [v.ref for v in extending if v.ref not in refs and not v.retired]
        if children and not elsewhere:
            raise errors.StillExtended(
                f"{info.ref} is still extended by {', '.join(children)}: retire those first.",
                names=children,
            )
