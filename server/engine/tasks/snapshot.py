"""One generation of the catalog as requests see it, and what their task references stand for."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final, Literal, NamedTuple

from server.engine.tasks.slots import Key, Slot
from server.errors import TaskUnavailable, UnknownTask
from server.model.multitask import BASE as BASE  # for the API, which knows no model
from task_store import Catalog, StoreError, TaskRef, VersionInfo, parse_ref
from task_store.names import MAX_SUGGESTIONS, closest_name

Status = Literal["ready", "failed", "on_demand", "unloaded"]

UNLOADED: Final = "it was unloaded on this server, and answers when it is loaded again"
_SETS_REMEMBERED: Final = 512


@dataclass(frozen=True, slots=True)
class TaskState:
    """One version of a task, and whether it answers."""

    name: str
    version: int | None
    # on_demand: loaded by the first request for it; unloaded: by an operator, on this server
    status: Status
    reason: str | None
    resident: bool


_BASE_STATE: Final = TaskState(BASE, None, "ready", None, resident=True)


class Match(NamedTuple):
    """The version that a reference stands for; `base` has none."""

    ref: str
    name: str
    version: int | None
    slot: Slot

    @property
    def key(self) -> Key:
        return (self.name, self.version)


@dataclass(frozen=True, eq=False)
class Snapshot:
    """An immutable view: it resolves references by its own catalog, whatever happens later.

    What may change behind it is only where tensors are: a slot's tasks come and go.
    """

    catalog: Catalog
    slots: Mapping[str, Slot] = field(repr=False)  # by digest
    base: Slot | None = field(repr=False)
    ready_names: tuple[str, ...]  # `base` and the tasks whose default version is loaded
    # By digest: the references for which a bundle is loaded before any request.
    eager: Mapping[str, frozenset[str]] = field(repr=False)
    unloaded: frozenset[str] = frozenset()  # tasks that this server does not answer for now
    _sets: dict[tuple[str, ...], tuple[Match, ...]] = field(default_factory=dict, repr=False)

    @property
    def generation(self) -> int:
        return self.catalog.generation

    def with_ready_names(self) -> "Snapshot":
        """This snapshot with the names of the tasks that are loaded now."""
        names = [name for name in self.catalog.names if name not in self.unloaded]
        ready = [name for name in names if self._is_ready(name)]
        if self.base is not None:
            ready = sorted((*ready, BASE))
        if tuple(ready) == self.ready_names:
            return self
        return replace(self, ready_names=tuple(ready), _sets={})

    def _is_ready(self, name: str) -> bool:
        try:
            return self.has_ready(self.catalog.resolve(TaskRef(name)).digest)
        except StoreError:
            return False

    def has_ready(self, digest: str) -> bool:
        """Whether a bundle is of this catalog and has been loaded."""
        slot = self.slots.get(digest)
        return slot is not None and slot.ready

    def lacks(self, refs: Sequence[str] | None, at_least: int | None) -> bool:
        """Whether a request needs a generation or a version that this catalog has not reached."""
        if at_least is not None and self.generation < at_least:
            return True
        return any("@" in ref and self._is_ahead(ref) for ref in refs or ())

    def _is_ahead(self, ref: str) -> bool:
        """Whether a reference names a version that was never published, as far as we know."""
        try:
            parsed = parse_ref(ref)
        except StoreError:
            return False
        task = self.catalog.all_tasks.get(parsed.task)
        return parsed.version is not None and (task is None or parsed.version >= task.next_version)

    def find(self, refs: Sequence[str] | None) -> tuple[Match, ...]:
        """What each reference stands for, without duplicates.

        UnknownTask names all that stand for nothing, TaskUnavailable those that were unloaded.
        """
        requested = self.ready_names if refs is None else tuple(refs)
        matches = self._sets.get(requested)
        if matches is None:
            matches = self._find(tuple(dict.fromkeys(requested)))
            if len(self._sets) >= _SETS_REMEMBERED:
                self._sets.clear()
            self._sets[requested] = matches
        return matches

    def _find(self, refs: tuple[str, ...]) -> tuple[Match, ...]:
        matches: list[Match] = []
        errors: dict[str, StoreError] = {}
        for ref in refs:
            if ref == BASE and self.base is not None:
                matches.append(Match(ref, BASE, None, self.base))
                continue
            try:
                info = self.catalog.resolve(ref, suggest=False)
                matches.append(Match(ref, info.task, info.version, self.slots[info.digest]))
            except StoreError as error:
                errors[ref] = error
        if errors:
            raise self._unknown(errors)
        unloaded = [match.ref for match in matches if match.name in self.unloaded]
        if unloaded:
            raise unavailable(dict.fromkeys(unloaded, UNLOADED))
        return tuple(matches)

    def _unknown(self, errors: Mapping[str, StoreError]) -> UnknownTask:
        sentences: list[str] = []
        suggestions: dict[str, str] = {}
        for ref, error in errors.items():
            sentence = str(error)
            if ref == BASE:
                sentence = "The backbone has no head of its own, so there is no task 'base'."
            near = self._nearest(ref) if len(sentences) < MAX_SUGGESTIONS else None
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
            return closest_name(ref.lower(), known) or name
        return closest_name(name, [*self.catalog.names, *([] if self.base is None else [BASE])])

    def state_of(self, name: str, version: int | None = None) -> TaskState:
        """A live version, by default the default one, or `base`. Raises the store's NotFound."""
        if name == BASE and version is None and self.base is not None:
            return _BASE_STATE
        return self._state(self.catalog.resolve(TaskRef(name, version=version)))

    def states(self) -> list[TaskState]:
        """Every live version, by name and number, and `base`."""
        states = [] if self.base is None else [_BASE_STATE]
        for task in self.catalog.tasks.values():
            states += [self._state(info) for info in task.live]
        return sorted(states, key=lambda state: (state.name, state.version or 0))

    def versions_of(self, slots: Iterable[Slot]) -> int:
        """How many live versions, that were not unloaded, have one of these bundles."""
        return sum(
            not info.retired and info.task not in self.unloaded
            for slot in slots
            if self.slots.get(slot.digest) is slot
            for info in self.catalog.by_digest[slot.digest]
        )

    def _state(self, info: VersionInfo) -> TaskState:
        slot = self.slots[info.digest]
        failure = None if slot.ready else slot.failure
        status: Status = "ready" if slot.ready else "on_demand" if failure is None else "failed"
        reason = None if failure is None else failure.reason
        if info.task in self.unloaded:
            status, reason = "unloaded", UNLOADED
        return TaskState(info.task, info.version, status, reason, slot.loaded is not None)


def unavailable(reasons: Mapping[str, str]) -> TaskUnavailable:
    """The error for references that cannot be served, each with its reason."""
    each = [f"Task '{ref}' cannot be served: {reason}" for ref, reason in reasons.items()]
    return TaskUnavailable(" ".join(text if text.endswith(".") else f"{text}." for text in each))
