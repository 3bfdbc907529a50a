"""A `Slot` stands for one bundle of the catalog, known by its digest, and what has become of it.

Versions that share a bundle share its slot, and so the very same tasks. Reading a slot needs no
lock: whoever has read `slot.loaded` holds the tasks, whatever is evicted meanwhile.

`Residency` keeps their bytes on the devices within a budget: past it, the least recently used
bundles go back to host memory.
"""

import threading
import weakref
from collections.abc import Iterable, Mapping, Set
from dataclasses import dataclass, field, replace
from typing import Final

import torch

from server.engine.observer import EngineObserver
from server.engine.types import ResidentTask, ServedTask
from server.model.backbone import Problem
from server.model.tasks import Task, TaskWeights

Key = tuple[str, int | None]  # a task's name and version

# A failed bundle is tried again after one second, then after two, four, … up to this.
FIRST_RETRY_SECONDS: Final = 1.0
LONGEST_RETRY_SECONDS: Final = 60.0


@dataclass(frozen=True, slots=True)
class HostCopy:
    """What it takes to prepare a bundle again without reading the store."""

    weights: TaskWeights
    problem: Problem
    labels: tuple[str, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Loaded:
    """A bundle's tasks on every device, and the names they are served under."""

    digest: str | None
    problem: Problem
    labels: tuple[str, ...]
    on: Mapping[torch.device, Task]
    parents: tuple["Loaded", ...] = ()
    _served: dict[Key, ResidentTask] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        """Bytes on the device where it takes most."""
        return max(task.nbytes for task in self.on.values())

    def served_as(self, key: Key) -> ResidentTask:
        """Always the same object for the same name and version."""
        resident = self._served.get(key)
        if resident is None:
            served = ServedTask(*key, self.digest, self.problem, self.labels)
            resident = self._served.setdefault(key, ResidentTask(served, self.on))
        return resident

    def keep_names(self, live: Set[Key]) -> None:
        """Drop the names that were retired while the same bundle lives on under another."""
        for key in [key for key in list(self._served) if key not in live]:
            self._served.pop(key, None)


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a bundle cannot be served. `inherited`: because one it extends cannot."""

    reason: str
    retry_at: float
    attempts: int = 1
    inherited: bool = False
    unreachable: bool = False  # the store could not be read: perhaps no fault of the bundle


class Slot:
    """One bundle: where it is loaded, or why it cannot be."""

    def __init__(self, digest: str, parents: tuple["Slot", ...] = ()) -> None:
        self.digest = digest
        self.name = ""  # of one live version with this bundle, to speak of it
        self.version = 0
        self.parents = parents
        further = (ancestor for parent in parents for ancestor in parent.ancestors)
        self.ancestors: tuple[Slot, ...] = tuple(dict.fromkeys((*parents, *further)))
        self.lock = threading.Lock()  # held by whoever loads it: a child's before its parents'
        self.host: HostCopy | None = None
        self.loaded: Loaded | None = None
        self.failure: Failure | None = None
        # The tick of the last request for it. Before its first a bundle is the first to be evicted:
        # a hundred uploads must not push out what is in use.
        self.used = 0
        self.pinned = False
        self.tracked = True  # False once retired: what is loaded then dies with its last user
        self._evicted: Mapping[torch.device, weakref.ref[Task]] = {}

    @property
    def ref(self) -> str:
        return f"{self.name}@{self.version}"

    @property
    def ready(self) -> bool:
        """Loaded and checked once; if evicted, at hand in host memory."""
        return self.loaded is not None or self.host is not None

    @property
    def labels(self) -> tuple[str, ...] | None:
        """The names of its classes; None while it is not at hand."""
        known = self.loaded or self.host
        return None if known is None else known.labels

    def due(self, now: float) -> bool:
        """Whether loading it is worth a try."""
        failure = self.failure
        if failure is None or now >= failure.retry_at:
            return True
        return failure.inherited and all(parent.ready for parent in self.parents)

    def fail(
        self, reason: str, now: float, *, cause: Failure | None = None, unreachable: bool = False
    ) -> None:
        """Note why it cannot be served; `cause` is the failure of a parent."""
        attempts = 1 if self.failure is None else self.failure.attempts + 1
        pause = min(FIRST_RETRY_SECONDS * 2.0 ** min(attempts - 1, 30), LONGEST_RETRY_SECONDS)
        retry_at = now + pause if cause is None else cause.retry_at
        self.failure = Failure(reason, retry_at, attempts, cause is not None, unreachable)

    def retry_now(self) -> None:
        """Something about it changed: if it has failed, try again at once."""
        if self.failure is not None:
            self.failure = replace(self.failure, retry_at=0.0)

    def evict(self) -> None:
        """Let the tasks go; a request that still holds them can bring them back."""
        assert self.loaded is not None
        self._evicted = {device: weakref.ref(task) for device, task in self.loaded.on.items()}
        self.loaded = None

    def still_in_use(self) -> dict[torch.device, Task] | None:
        """The tasks evicted last, if somebody holds them all: preparing twice costs twice."""
        tasks = {device: evicted() for device, evicted in self._evicted.items()}
        alive = {device: task for device, task in tasks.items() if task is not None}
        return alive if alive and len(alive) == len(tasks) else None


class Residency:
    """Keeps tasks on the devices within a budget of bytes for each device; None: without limit."""

    def __init__(self, budget: int | None, observer: EngineObserver) -> None:
        self._budget = budget
        self._observer = observer
        self._lock = threading.Lock()
        self._resident: dict[Slot, int] = {}  # bytes
        self.may_evict = budget is not None
        self.nbytes = 0  # on each device, without `base`, which is part of the backbone

    def keep(self, slot: Slot, loaded: Loaded) -> Loaded:
        """Make tasks resident together with those they extend, and others leave if need be."""
        with self._lock:
            kept = self._admit(slot, loaded)
            self._make_room({slot, *slot.ancestors})
            self._observer.tasks_resident(len(self._resident), self.nbytes)
        return kept

    def forget(self, slots: Iterable[Slot]) -> None:
        """Stop counting retired bundles; they live on only in the hands of requests."""
        with self._lock:
            for slot in slots:
                slot.tracked = False
                self.nbytes -= self._resident.pop(slot, 0)
            self._observer.tasks_resident(len(self._resident), self.nbytes)

    def release(self, slots: Iterable[Slot]) -> None:
        """Let go of bundles that stay in the catalog, in host memory too; requests finish first."""
        with self._lock:
            for slot in slots:
                slot.host = None
                if slot.loaded is not None:
                    self._evict(slot)
            self._observer.tasks_resident(len(self._resident), self.nbytes)

    def _admit(self, slot: Slot, loaded: Loaded) -> Loaded:
        # A parent may have been evicted while its child was prepared: the child brings it back.
        for parent, its in zip(slot.parents, loaded.parents, strict=True):
            self._admit(parent, its)
        if slot.loaded is None:
            slot.loaded = loaded
            if slot.tracked:
                self._resident[slot] = loaded.nbytes
                self.nbytes += loaded.nbytes
        return slot.loaded

    def _make_room(self, needed: set[Slot]) -> None:
        """Evict the least recently used, but none pinned, needed now or extended by a resident."""
        while self._budget is not None and self.nbytes > self._budget:
            held = needed.union(*(slot.ancestors for slot in self._resident))
            free = [slot for slot in self._resident if slot not in held and not slot.pinned]
            if not free:
                return
            self._evict(min(free, key=lambda slot: slot.used))

    def _evict(self, slot: Slot) -> None:
        slot.evict()
        self.nbytes -= self._resident.pop(slot, 0)
        self._observer.task_evicted(slot.name, slot.version)
