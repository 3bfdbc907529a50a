"""One generation of the catalog as requests see it, and the resolution of task references."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final, Literal

from engram_bundle import TaskRef, TaskStoreError, parse_ref
from engram_bundle.names import BASE_TASK, DEFAULT_ALIAS, MAX_SUGGESTIONS, closest_name
from engram_store import Catalog, VersionInfo

from engram_server.engine.tasks.slots import Slot
from engram_server.engine.types import VersionKey
from engram_server.errors import TaskUnavailable, UnknownTask

Status = Literal["ready", "failed", "on_demand", "unloaded"]

UNLOADED: Final = "it is unloaded on this server; load it to use it again"
_CACHED_RESOLUTIONS: Final = 512


@dataclass(frozen=True, slots=True)
class TaskState:
    """One version of a task, and whether it can be used."""

    name: str
    version: int | None
    # on_demand: loaded by its first request; unloaded: by an operator, on this server
    status: Status
    reason: str | None
    resident: bool


_BASE_STATE: Final = TaskState(BASE_TASK, None, "ready", None, resident=True)


@dataclass(frozen=True, slots=True, eq=False)
class ResolvedTask:
    """The version behind a task reference. `base` has no version."""

    reference: str
    name: str
    version: int | None
    task_type: str
    classes: int
    slot: Slot = field(repr=False)  # for the engine
    shadows: tuple["ResolvedTask", ...] = ()  # other versions that answer without being returned
    canary: "ResolvedTask | None" = None  # answers a share of the images instead
    canary_share: float = 0.0

    @property
    def key(self) -> VersionKey:
        return (self.name, self.version)

    @property
    def labels(self) -> tuple[str, ...] | None:
        """The class labels; None while the task is not loaded."""
        return self.slot.labels


@dataclass(frozen=True, slots=True, eq=False)
class Plan:
    """A request's tasks, resolved in one snapshot. It stays valid whatever is published later."""

    snapshot: "Snapshot" = field(repr=False)
    tasks: tuple[ResolvedTask, ...]
    omitted: int = 0  # ready tasks beyond the limit of a request that names none

    @property
    def generation(self) -> int:
        return self.snapshot.generation


@dataclass(frozen=True, eq=False)
class Snapshot:
    """An immutable view of the catalog. Only the residency of tensors may change behind it."""

    catalog: Catalog
    slots: Mapping[str, Slot] = field(repr=False)  # by digest
    base: ResolvedTask | None = field(repr=False)
    ready_names: tuple[str, ...]  # `base` and the tasks whose default version is loaded
    # By digest: the references for which a bundle is loaded before the first request.
    eager: Mapping[str, frozenset[str]] = field(repr=False)
    unloaded: frozenset[str] = frozenset()  # tasks unloaded on this server
    shadow_aliases: tuple[str, ...] = ()
    _resolved: dict[tuple[str, ...], tuple[ResolvedTask, ...]] = field(
        default_factory=dict, repr=False
    )

    @property
    def generation(self) -> int:
        return self.catalog.generation

    def with_ready_names(self) -> "Snapshot":
        """This snapshot with the names of the tasks that are loaded now."""
        names = [name for name in self.catalog.names if name not in self.unloaded]
        ready = [name for name in names if self._is_ready(name)]
        if self.base is not None:
            ready = sorted((*ready, BASE_TASK))
        if tuple(ready) == self.ready_names:
            return self
        return replace(self, ready_names=tuple(ready), _resolved={})

    def _is_ready(self, name: str) -> bool:
        try:
            return self.has_ready(self.catalog.resolve(TaskRef(name)).digest)
        except TaskStoreError:
            return False

    def oldest(self, names: tuple[str, ...], count: int) -> tuple[str, ...]:
        """The `count` tasks that were created first, in the order of `names`; `base` is one."""
        if len(names) <= count:
            return names

        def created(name: str) -> int:
            return 0 if name == BASE_TASK else self.catalog.tasks[name].first.generation

        kept = frozenset(sorted(names, key=created)[:count])
        return tuple(name for name in names if name in kept)

    def has_ready(self, digest: str) -> bool:
        """Whether a bundle belongs to this catalog and is loaded."""
        slot = self.slots.get(digest)
        return slot is not None and slot.ready

    def lacks(self, refs: Sequence[str] | None, at_least: int | None) -> bool:
        """Whether a request needs a generation or version that is newer than this catalog."""
        if at_least is not None and self.generation < at_least:
            return True
        return any("@" in ref and self._is_newer(ref) for ref in refs or ())

    def _is_newer(self, ref: str) -> bool:
        """Whether a reference names a version that this catalog has not seen."""
        try:
            parsed = parse_ref(ref)
        except TaskStoreError:
            return False
        task = self.catalog.all_tasks.get(parsed.task)
        return parsed.version is not None and (task is None or parsed.version >= task.next_version)

    def resolve(self, refs: Sequence[str] | None) -> tuple[ResolvedTask, ...]:
        """Resolve references, without duplicates; None: every ready task.

        UnknownTask names all references that do not exist, TaskUnavailable the unloaded ones.
        """
        requested = self.ready_names if refs is None else tuple(refs)
        resolved = self._resolved.get(requested)
        if resolved is None:
            resolved = self._resolve(tuple(dict.fromkeys(requested)))
            if len(self._resolved) >= _CACHED_RESOLUTIONS:
                self._resolved.clear()
            self._resolved[requested] = resolved
        return resolved

    def _resolve(self, refs: tuple[str, ...]) -> tuple[ResolvedTask, ...]:
        resolved: list[ResolvedTask] = []
        errors: dict[str, TaskStoreError] = {}
        for ref in refs:
            if ref == BASE_TASK and self.base is not None:
                resolved.append(self.base)
                continue
            try:
                info = self.catalog.resolve(ref, suggest=False)
            except TaskStoreError as error:
                errors[ref] = error
                continue
            task = self._resolved_task(ref, info, self._shadows_of(info))
            resolved.append(self._with_canary(task))
        if errors:
            raise self._unknown(errors)
        unloaded = [task.reference for task in resolved if task.name in self.unloaded]
        if unloaded:
            raise unavailable(dict.fromkeys(unloaded, UNLOADED))
        return tuple(resolved)

    def _resolved_task(
        self, ref: str, info: VersionInfo, shadows: tuple[ResolvedTask, ...] = ()
    ) -> ResolvedTask:
        facts, slot = info.facts, self.slots[info.digest]
        return ResolvedTask(
            ref, info.task, info.version, facts.task_type, facts.classes, slot, shadows
        )

    def _with_canary(self, task: ResolvedTask) -> ResolvedTask:
        """The task with the canary of the alias in its reference, if there is one."""
        ref = parse_ref(task.reference)
        canaries = self.catalog.task(task.name).canaries
        canary = None if ref.version else canaries.get(ref.alias or DEFAULT_ALIAS)
        if canary is None:
            return task
        info = self.catalog.version(task.name, canary.version)
        other = self._resolved_task(info.ref, info)
        return replace(task, canary=other, canary_share=canary.share)

    def _shadows_of(self, info: VersionInfo) -> tuple[ResolvedTask, ...]:
        """The versions under a shadow alias, other than this one."""
        aliases = self.catalog.task(info.task).aliases
        versions = {aliases[alias] for alias in self.shadow_aliases if alias in aliases}
        others = (self.catalog.version(info.task, v) for v in sorted(versions - {info.version}))
        return tuple(self._resolved_task(other.ref, other) for other in others)

    def _unknown(self, errors: Mapping[str, TaskStoreError]) -> UnknownTask:
        sentences: list[str] = []
        suggestions: dict[str, str] = {}
        for ref, error in errors.items():
            sentence = str(error)
            if ref == BASE_TASK:
                sentence = "There is no task 'base': the backbone has no classifier."
            near = self._nearest(ref) if len(sentences) < MAX_SUGGESTIONS else None
            if near is not None:
                suggestions[ref] = near
                if f"'{near}'" not in sentence:
                    sentence += f" Did you mean '{near}'?"
            sentences.append(sentence)
        return UnknownTask(" ".join(sentences), tuple(errors), suggestions)

    def _nearest(self, ref: str) -> str | None:
        name = next(iter(ref.lower().replace("@", ":").split(":")))
        task = self.catalog.tasks.get(name)
        if task is not None:
            known = [name, *(f"{name}:{alias}" for alias in sorted(task.aliases))]
            known += [info.ref for info in task.live]
            return closest_name(ref.lower(), known) or name
        return closest_name(
            name, [*self.catalog.names, *([] if self.base is None else [BASE_TASK])]
        )

    def state_of(self, name: str, version: int | None = None) -> TaskState:
        """The state of a version (default: the default version) or of `base`; or NotFound."""
        if name == BASE_TASK and version is None and self.base is not None:
            return _BASE_STATE
        return self._state(self.catalog.resolve(TaskRef(name, version=version)))

    def states(self) -> list[TaskState]:
        """The states of `base` and every live version, by name and version."""
        states = [] if self.base is None else [_BASE_STATE]
        for task in self.catalog.tasks.values():
            states += [self._state(info) for info in task.live]
        return sorted(states, key=lambda state: (state.name, state.version or 0))

    def count_versions(self, slots: Iterable[Slot]) -> int:
        """How many live versions of loaded tasks use one of these bundles."""
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
