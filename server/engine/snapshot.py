"""One generation of the catalog as requests see it, and what their task references stand for."""

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Literal, NamedTuple

from server.engine.residency import Key, Slot
from server.errors import TaskUnavailable, UnknownTask
from server.model.multitask import BASE
from task_store import Catalog, StoreError, TaskInfo, VersionInfo, parse_ref

Status = Literal["ready", "failed", "on_demand", "unloaded"]

UNLOADED: Final = "it was unloaded on this server, and answers when it is loaded again"
_SETS_REMEMBERED: Final = 512


@dataclass(frozen=True, slots=True)
class TaskState:
    """One version of a task, and whether it can be asked."""

    name: str
    version: int | None
    digest: str | None
    labels_pointing: tuple[str, ...]
    # on_demand: not loaded yet, the first request for it will; unloaded: an operator asked for that
    status: Status
    reason: str | None
    size_bytes: int
    resident: bool


class Found(NamedTuple):
    """What a reference stands for."""

    ref: str
    key: Key
    slot: Slot


@dataclass(frozen=True, eq=False)
class Snapshot:
    """An immutable view: it resolves references by its own catalog, whatever happens later.

    What may change behind it is only where tensors are: a slot's tasks come and go.
    """

    catalog: Catalog
    slots: Mapping[str, Slot] = field(repr=False)  # by digest
    base: Slot | None = field(repr=False)
    ready_names: tuple[str, ...]  # `base` and the tasks whose default version can be asked
    # By digest: the references that make a bundle be loaded without being asked for.
    eager: Mapping[str, frozenset[str]] = field(repr=False)
    unloaded: frozenset[str] = frozenset()  # tasks that this server does not answer for now
    _sets: dict[tuple[str, ...], tuple[Found, ...]] = field(default_factory=dict, repr=False)

    @property
    def generation(self) -> int:
        return self.catalog.generation

    def lacks(self, refs: Sequence[str] | None, at_least: int | None) -> bool:
        """Whether a request asks for what this catalog has not reached: a generation, a version."""
        if at_least is not None and self.generation < at_least:
            return True
        return any("@" in ref and self._is_ahead(ref) for ref in refs or ())

    def _is_ahead(self, ref: str) -> bool:
        """Whether a reference names a version that was never published, as far as we know."""
        try:
            asked = parse_ref(ref)
        except StoreError:
            return False
        task = self.catalog.all_tasks.get(asked.task)
        return asked.version is not None and (task is None or asked.version >= task.next_version)

    def find(self, refs: Sequence[str] | None) -> tuple[Found, ...]:
        """What each reference stands for, without duplicates.

        UnknownTask names all that stand for nothing, TaskUnavailable those that were unloaded.
        """
        wanted = self.ready_names if refs is None else tuple(refs)
        found = self._sets.get(wanted)
        if found is None:
            found = self._find(tuple(dict.fromkeys(wanted)))
            if len(self._sets) >= _SETS_REMEMBERED:
                self._sets.clear()
            self._sets[wanted] = found
        return found

    def _find(self, refs: tuple[str, ...]) -> tuple[Found, ...]:
        found: list[Found] = []
        errors: dict[str, StoreError] = {}
        for ref in refs:
            if ref == BASE and self.base is not None:
                found.append(Found(ref, (BASE, None), self.base))
                continue
            try:
                info = self.catalog.resolve(ref)
                found.append(Found(ref, (info.task, info.version), self.slots[info.digest]))
            except StoreError as error:
                errors[ref] = error
        if errors:
            raise self._unknown(errors)
        unloaded = [each.ref for each in found if each.key[0] in self.unloaded]
        if unloaded:
            raise unavailable(dict.fromkeys(unloaded, UNLOADED))
        return tuple(found)

    def _unknown(self, errors: Mapping[str, StoreError]) -> UnknownTask:
        sentences: list[str] = []
        suggestions: dict[str, str] = {}
        for ref, error in errors.items():
            sentence = str(error)
            if ref == BASE:
                sentence = "The backbone has no head of its own, so there is no task 'base'."
            near = self._nearest(ref)
            if near is not None:
                suggestions[ref] = near
                if f"'{near}'" not in sentence:
                    sentence += f" Did you mean '{near}'?"
            sentences.append(sentence)
        return UnknownTask(" ".join(sentences), tuple(errors), suggestions)

    def _nearest(self, ref: str) -> str | None:
        """The closest reference that would have worked."""
        name = next(iter(ref.lower().replace("@", ":").split(":")))
        task = self.catalog.tasks.get(name)
        if task is not None:
            known = [name, *(f"{name}:{label}" for label in sorted(task.labels))]
            known += [info.ref for info in task.live]
            near = difflib.get_close_matches(ref.lower(), known, n=1)
            return near[0] if near else name
        names = [*self.catalog.names, *([] if self.base is None else [BASE])]
        near = difflib.get_close_matches(name, names, n=1)
        return near[0] if near else None

    def states(self) -> list[TaskState]:
        """Every live version, by name and number, and `base`."""
        found = [] if self.base is None else [_base_state(self.base)]
        for task in self.catalog.tasks.values():
            unloaded = task.name in self.unloaded
            found += [_state(task, info, self.slots[info.digest], unloaded) for info in task.live]
        return sorted(found, key=lambda state: (state.name, state.version or 0))


def unavailable(reasons: Mapping[str, str]) -> TaskUnavailable:
    """The error for references that cannot be served, each with its reason."""
    each = [f"Task '{ref}' cannot be served: {reason}" for ref, reason in reasons.items()]
    return TaskUnavailable(" ".join(text if text.endswith(".") else f"{text}." for text in each))


def is_ready(catalog: Catalog, slots: Mapping[str, Slot], ref: str) -> bool:
    """Whether the version a reference stands for has been loaded."""
    try:
        return slots[catalog.resolve(ref).digest].ready
    except StoreError:
        return False


def eager_references(
    catalog: Catalog, pinned: frozenset[str], unloaded: frozenset[str]
) -> dict[str, frozenset[str]]:
    """By digest, the labels and pinned references that point to it; not of unloaded tasks."""
    found: dict[str, set[str]] = {}
    refs = [f"{task.name}:{label}" for task in catalog.tasks.values() for label in task.labels]
    for ref in (*refs, *pinned):
        try:
            info = catalog.resolve(ref)
        except StoreError:
            continue  # pinned before it is published, or retired since
        if info.task not in unloaded:
            found.setdefault(info.digest, set()).add(ref)
    return {digest: frozenset(refs) for digest, refs in found.items()}


def build_slots(catalog: Catalog, known: Mapping[str, Slot]) -> dict[str, Slot]:
    """A slot for every live version and everything it extends; those known already stay."""
    slots: dict[str, Slot] = {}
    for task in catalog.tasks.values():
        for info in task.live:
            _add_slot(slots, catalog, known, info.digest, ())
    return slots


def _add_slot(
    slots: dict[str, Slot],
    catalog: Catalog,
    known: Mapping[str, Slot],
    digest: str,
    path: tuple[str, ...],
) -> Slot | None:
    versions = catalog.by_digest.get(digest, ())
    if digest in slots or not versions or digest in path:
        # Unpublished parents and circles exist only in damaged logs: the loader refuses them.
        return slots.get(digest)
    info = next((info for info in versions if not info.retired), versions[0])
    parents = [_add_slot(slots, catalog, known, parent, (*path, digest)) for parent in info.extends]
    present = tuple(parent for parent in parents if parent is not None)
    slot = known.get(digest)
    if slot is None or slot.parents != present:
        slot = Slot(digest, present)
    slot.name, slot.version = info.task, info.version  # it may have been retired under another
    slots[digest] = slot
    return slot


def check_pinned(pinned: frozenset[str]) -> frozenset[str]:
    """The references, if each could be one of a task, or InvalidName. `base` always stays."""
    return frozenset(ref for ref in pinned if parse_ref(ref).task != BASE)


def only_for(
    catalog: Catalog, slots: Mapping[str, Slot], unloaded: frozenset[str]
) -> tuple[Slot, ...]:
    """The bundles that nothing but unloaded tasks needs."""
    own: dict[Slot, None] = {}
    needed: set[Slot] = set()
    for task in catalog.tasks.values():
        for info in task.live:
            slot = slots[info.digest]
            if task.name in unloaded:
                own.update(dict.fromkeys((slot, *slot.ancestors)))
            else:
                needed.update((slot, *slot.ancestors))
    return tuple(slot for slot in own if slot not in needed)


def _state(task: TaskInfo, info: VersionInfo, slot: Slot, unloaded: bool) -> TaskState:
    failure = None if slot.ready else slot.failure
    status: Status = "ready" if slot.ready else "on_demand" if failure is None else "failed"
    reason = None if failure is None else failure.reason
    if unloaded:
        status, reason = "unloaded", UNLOADED
    return TaskState(
        name=info.task,
        version=info.version,
        digest=info.digest,
        labels_pointing=task.labels_of(info.version),
        status=status,
        reason=reason,
        size_bytes=info.facts.size,
        resident=slot.loaded is not None,
    )


def _base_state(slot: Slot) -> TaskState:
    size = 0 if slot.loaded is None else slot.loaded.nbytes
    return TaskState(BASE, None, None, (), "ready", None, size, resident=True)
