"""Changes to tasks, as values that `TaskStore.commit` decides and appends to the log.

`plan` looks at a catalog and returns the event to append (None when there is nothing to do), or
raises. A writer that lost a race plans again on the newer catalog, so every rule here holds under
concurrency too.

Why no cycle of extensions can arise: a bundle names its parents by the sha256 of their files, so
it can only be written after them, and `Publish` accepts it only when they are published.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from task_store.bundle import TaskBundle
from task_store.catalog import Catalog, TaskInfo, VersionInfo
from task_store.errors import (
    AlreadyExists,
    IncompatibleBundle,
    MissingParent,
    NothingToRestore,
    NothingToRollBack,
    StillExtended,
    StillLabelled,
    UnknownVersion,
)
from task_store.events import (
    Accepted,
    Collected,
    Labelled,
    Published,
    Restored,
    Retired,
    VersionFacts,
)
from task_store.names import DEFAULT_LABEL, TaskRef, check_label, check_task_name

# What must be true of the catalog that a change is decided on: raises, or returns.
Condition = Callable[[Catalog], None]


@dataclass(frozen=True)
class Publish:
    """A bundle becomes the next version of a task, and `labels` move to it.

    The first live version of a task gets `default` as well. When the task has a live version with
    the very same bytes, no version is made; labels that point elsewhere still move to it.
    """

    task: str
    bundle: TaskBundle
    labels: tuple[str, ...] = (DEFAULT_LABEL,)
    note: str = ""  # what is new, for the history

    def __post_init__(self) -> None:
        check_task_name(self.task)
        labels = tuple(dict.fromkeys(check_label(label) for label in self.labels))
        object.__setattr__(self, "labels", labels)

    @cached_property
    def facts(self) -> VersionFacts:
        return VersionFacts.of(self.bundle)

    def plan(self, catalog: Catalog) -> Published | Labelled | None:
        task = catalog.all_tasks.get(self.task)
        same = None if task is None else task.live_with(self.facts.digest)
        if task is not None and same is not None:
            moving = tuple(x for x in self.labels if task.labels.get(x) != same.version)
            if not moving:
                return None
            return Labelled(task=self.task, labels=moving, version=same.version, note=self.note)
        self._check_parents(catalog)
        labels = self.labels
        if task is None or not task.is_live:
            labels = (DEFAULT_LABEL, *(label for label in labels if label != DEFAULT_LABEL))
        version = 1 if task is None else task.next_version
        return Published(
            task=self.task, version=version, labels=labels, facts=self.facts, note=self.note
        )

    def _check_parents(self, catalog: Catalog) -> None:
        for digest in self.facts.extends:
            versions = catalog.by_digest.get(digest, ())
            if not versions:
                raise MissingParent(
                    f"The bundle for '{self.task}' extends {digest}, which is not published: "
                    f"publish the parent first.",
                    names=[digest],
                )
            live = [v for v in versions if not v.retired]
            if not live:
                raise MissingParent(
                    f"The bundle for '{self.task}' extends {versions[0].ref}, which is retired: "
                    f"restore it first.",
                    names=[versions[0].ref],
                )
            if live[0].facts.fingerprint != self.facts.fingerprint:
                raise IncompatibleBundle(
                    f"The bundle for '{self.task}' is for the backbone {self.facts.fingerprint}, "
                    f"and its parent {live[0].ref} is for {live[0].facts.fingerprint}.",
                    names=[live[0].ref],
                )


@dataclass(frozen=True, slots=True)
class MoveLabel:
    """A label points to a live version from now on."""

    task: str
    label: str
    version: int

    def __post_init__(self) -> None:
        check_label(self.label)

    def plan(self, catalog: Catalog) -> Labelled | None:
        catalog.version(self.task, self.version)
        if catalog.task(self.task).labels.get(self.label) == self.version:
            return None
        return Labelled(task=self.task, labels=(self.label,), version=self.version)


@dataclass(frozen=True, slots=True)
class RemoveLabel:
    """A label other than `default` goes."""

    task: str
    label: str

    def plan(self, catalog: Catalog) -> Labelled:
        catalog.resolve(TaskRef(self.task, label=self.label))
        if self.label == DEFAULT_LABEL:
            raise StillLabelled(
                f"Label 'default' of task '{self.task}' cannot be removed: move it, or retire the "
                f"task.",
                names=[f"{self.task}:{self.label}"],
            )
        return Labelled(task=self.task, labels=(self.label,), version=None)


@dataclass(frozen=True, slots=True)
class RollBack:
    """Undo the last move of a label, passing over versions retired since; twice goes two back."""

    task: str
    label: str = DEFAULT_LABEL

    def plan(self, catalog: Catalog) -> Labelled:
        now = catalog.resolve(TaskRef(self.task, label=self.label)).version
        task = catalog.task(self.task)
        for version in reversed(task.undo.get(self.label, ())):
            if version != now and not task.versions[version].retired:
                return Labelled(
                    task=self.task, labels=(self.label,), version=version, rollback=True
                )
        raise NothingToRollBack(
            f"Label '{self.label}' of task '{self.task}' has no earlier version to go back to; it "
            f"stays at version {now}.",
            names=[f"{self.task}:{self.label}"],
        )


@dataclass(frozen=True, slots=True)
class Retire:
    """A version, or the whole task, leaves the catalog; its bundles are kept."""

    task: str
    version: int | None = None

    def plan(self, catalog: Catalog) -> Retired:
        task = catalog.task(self.task)
        if self.version is None:
            leaving = task.live
        else:
            leaving = (catalog.version(self.task, self.version),)
            labels = task.labels_of(self.version)
            if labels:
                raise StillLabelled(
                    f"Version {self.version} of task '{self.task}' still has the label "
                    f"{', '.join(labels)}: move the label first, or retire the whole task.",
                    names=[f"{self.task}:{label}" for label in labels],
                )
        _check_children(catalog, leaving)
        versions = tuple(v.version for v in leaving)
        return Retired(task=self.task, versions=versions, whole=self.version is None)


@dataclass(frozen=True, slots=True)
class Restore:
    """A version comes back, or what the last retirement of the whole task took."""

    task: str
    version: int | None = None

    def plan(self, catalog: Catalog) -> Restored:
        # `catalog.task` raises UnknownTask for a name that was never published.
        task = catalog.all_tasks.get(self.task) or catalog.task(self.task)
        if self.version is None:
            coming = tuple(v for v in task.retired_together if task.versions[v].retired)
            if task.is_live or not coming:
                raise NothingToRestore(
                    f"Task '{self.task}' is not retired: name the version to restore.",
                    names=[self.task],
                )
        elif self.version not in task.versions:
            raise UnknownVersion(
                f"Task '{self.task}' never had a version {self.version}.",
                names=[f"{self.task}@{self.version}"],
            )
        elif not task.versions[self.version].retired:
            raise NothingToRestore(
                f"Version {self.version} of task '{self.task}' is not retired.",
                names=[f"{self.task}@{self.version}"],
            )
        else:
            coming = (self.version,)
        _check_restored_parents(catalog, task, coming)
        return Restored(task=self.task, versions=coming)


@dataclass(frozen=True, slots=True)
class Collect:
    """Bundles that no version has are given up; those that have one by now are left out.

    Decided on the newest catalog like every change, so that a publish of the same bytes is either
    before it, and keeps them, or after it, and writes them to another path. Whatever is still at
    the old path may then be deleted, however late.
    """

    blobs: Mapping[str, int]  # digests, each with the generation at which it was given up before

    def plan(self, catalog: Catalog) -> Collected | None:
        unused = tuple(
            digest
            for digest, before in self.blobs.items()
            if digest not in catalog.by_digest and catalog.collected.get(digest, 0) == before
        )
        return Collected(digests=unused) if unused else None


@dataclass(frozen=True, slots=True)
class Accept:
    """Entries of an older writer, by the digests of their bytes, are part of the chain after all.

    Somebody looked at them and says so, by name, in the log; an entry that is altered later has
    another digest, and is damage again.
    """

    digests: Sequence[str]

    def plan(self, catalog: Catalog) -> Accepted | None:
        new = tuple(digest for digest in self.digests if digest not in catalog.accepted)
        return Accepted(digests=new) if new else None


Change = Publish | MoveLabel | RemoveLabel | RollBack | Retire | Restore
Upkeep = Collect | Accept


def only_if_absent(task: str) -> Condition:
    """The condition that there is no such live task yet."""

    def check(catalog: Catalog) -> None:
        if task in catalog.tasks:
            raise AlreadyExists(
                f"Task '{task}' exists already: publish without the condition to add a version.",
                names=[task],
            )

    return check


def _check_children(catalog: Catalog, leaving: tuple[VersionInfo, ...]) -> None:
    """Nothing that stays may extend what leaves, unless another version has the same bytes."""
    refs = {v.ref for v in leaving}
    for info in leaving:
        elsewhere = [
            v for v in catalog.by_digest[info.digest] if not v.retired and v.ref not in refs
        ]
        children = [v.ref for v in catalog.children.get(info.digest, ()) if v.ref not in refs]
        if children and not elsewhere:
            raise StillExtended(
                f"{info.ref} is still extended by {', '.join(children)}: retire those first.",
                names=children,
            )


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
