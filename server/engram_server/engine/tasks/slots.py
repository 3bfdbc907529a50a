"""A `Slot` holds the state of one bundle of the catalog, identified by its digest.

Versions that share a bundle share its slot, and so the same tensors. Reading a slot needs no lock:
a caller that has read `slot.loaded` holds the tensors, even if the bundle is evicted meanwhile.

`Residency` keeps the bytes on the devices within a budget: beyond it, the least recently used
bundles are evicted to host memory.
"""

import threading
import weakref
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Final

import torch

from engram_server.engine import observer as metrics
from engram_server.engine.types import HostCopy, LoadedBundle
from engram_server.model.tasks import Task

# A failed bundle is retried after one second, then after two, four, … up to this.
FIRST_RETRY_SECONDS: Final = 1.0
LONGEST_RETRY_SECONDS: Final = 60.0


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a bundle cannot be served. `inherited`: because a parent cannot."""

    reason: str
    retry_at: float
    attempts: int = 1
    inherited: bool = False
    unreachable: bool = False  # the store could not be read: the bundle may be fine


class Slot:
    """One bundle: where it is loaded, or why it cannot be."""

    def __init__(self, digest: str, parents: tuple["Slot", ...] = ()) -> None:
        self.digest = digest
        self.name = ""  # of one live version with this bundle, for messages
        self.version = 0
        self.parents = parents
        further = (ancestor for parent in parents for ancestor in parent.ancestors)
        self.ancestors: tuple[Slot, ...] = tuple(dict.fromkeys((*parents, *further)))
        self.lock = threading.Lock()  # held while loading; a child's lock before its parents'
        self.host: HostCopy | None = None
        self.loaded: LoadedBundle | None = None
        self.failure: Failure | None = None
        # The tick of the last request. An unused bundle is evicted first: a hundred uploads must
        # not push out bundles that are in use.
        self.used = 0
        self.pinned = False
        self.tracked = True  # False once retired: its tensors are freed with their last user
        self._evicted: Mapping[torch.device, weakref.ref[Task]] = {}

    @property
    def ref(self) -> str:
        return f"{self.name}@{self.version}"

    @property
    def ready(self) -> bool:
        """Whether the bundle was loaded and checked; if evicted, it is in host memory."""
        return self.loaded is not None or self.host is not None

    @property
    def labels(self) -> tuple[str, ...] | None:
        """The class labels; None while the bundle is not in memory."""
        known = self.loaded or self.host
        return None if known is None else known.labels

    def due(self, now: float) -> bool:
        failure = self.failure
        if failure is None or now >= failure.retry_at:
            return True
        return failure.inherited and all(parent.ready for parent in self.parents)

    def fail(
        self, reason: str, now: float, *, cause: Failure | None = None, unreachable: bool = False
    ) -> None:
        """Record why it cannot be served; `cause` is the failure of a parent."""
        attempts = 1 if self.failure is None else self.failure.attempts + 1
        pause = min(FIRST_RETRY_SECONDS * 2.0 ** min(attempts - 1, 30), LONGEST_RETRY_SECONDS)
        retry_at = now + pause if cause is None else cause.retry_at
        self.failure = Failure(reason, retry_at, attempts, cause is not None, unreachable)

    def retry_now(self) -> None:
        if self.failure is not None:
            self.failure = replace(self.failure, retry_at=0.0)

    def evict(self) -> None:
        """Release the tensors; if a request still holds them, they can be reused."""
        assert self.loaded is not None
        self._evicted = {device: weakref.ref(task) for device, task in self.loaded.on.items()}
        self.loaded = None

    def still_in_use(self) -> dict[torch.device, Task] | None:
        """The tensors evicted last, if requests still hold all of them."""
        tasks = {device: evicted() for device, evicted in self._evicted.items()}
        alive = {device: task for device, task in tasks.items() if task is not None}
        return alive if alive and len(alive) == len(tasks) else None


class Residency:
    """Keeps bundles on the devices within a budget of bytes per device; None: no limit."""

    def __init__(self, budget: int | None, observer: metrics.EngineObserver) -> None:
        self._budget = budget
        self._observer = observer
        self._lock = threading.Lock()
        self._resident: dict[Slot, int] = {}  # bytes
        self.may_evict = budget is not None
        self.nbytes = 0  # on each device, without `base`, which is part of the backbone

    def keep(self, slot: Slot, loaded: LoadedBundle) -> LoadedBundle:
        """Make a bundle and its parents resident, and evict others to stay within the budget."""
        with self._lock:
            kept = self._admit(slot, loaded)
            self._evict_over_budget({slot, *slot.ancestors})
            self._report()
        return kept

    def forget(self, slots: Iterable[Slot]) -> None:
        """Stop counting retired bundles; requests that hold them keep them alive."""
        with self._lock:
            for slot in slots:
                slot.tracked = False
                self.nbytes -= self._resident.pop(slot, 0)
            self._report()

    def release(self, slots: Iterable[Slot]) -> None:
        """Free bundles that stay in the catalog, also in host memory; requests finish first."""
        with self._lock:
            for slot in slots:
                slot.host = None
                if slot.loaded is not None:
                    self._evict(slot)
            self._report()

    def _admit(self, slot: Slot, loaded: LoadedBundle) -> LoadedBundle:
        # A parent may have been evicted while its child was prepared: the child brings it back.
        for parent, parent_loaded in zip(slot.parents, loaded.parents, strict=True):
            self._admit(parent, parent_loaded)
        if slot.loaded is None:
            slot.loaded = loaded
            if slot.tracked:
                self._resident[slot] = loaded.nbytes
                self.nbytes += loaded.nbytes
        return slot.loaded

    def _evict_over_budget(self, needed: set[Slot]) -> None:
        """Evict the least recently used, except pinned, needed or extended ones."""
        while self._budget is not None and self.nbytes > self._budget:
            held = needed.union(*(slot.ancestors for slot in self._resident))
            free = [slot for slot in self._resident if slot not in held and not slot.pinned]
            if not free:
                return
            self._evict(min(free, key=lambda slot: slot.used))

    def _evict(self, slot: Slot) -> None:
        slot.evict()
        self.nbytes -= self._resident.pop(slot, 0)
        self._observer.record(metrics.TASK_EVICTIONS)

    def _report(self) -> None:
        self._observer.record(metrics.TASKS_RESIDENT, len(self._resident))
        self._observer.record(metrics.TASKS_RESIDENT_BYTES, self.nbytes)
