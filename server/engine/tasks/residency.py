"""The bytes of tasks on the devices, kept within a budget.

Past the budget, the least recently used bundles go back to host memory.
"""

import threading
from collections.abc import Iterable

from server.engine.observer import EngineObserver
from server.engine.tasks.slots import Loaded, Slot


class Residency:
    """Keeps tasks on the devices within a budget of bytes for each device; None: without limit."""

    def __init__(self, budget: int | None, observer: EngineObserver) -> None:
        self._budget = budget
        self._observer = observer
        self._lock = threading.Lock()
        self._resident: dict[Slot, int] = {}  # bytes
        self._bytes = 0

    @property
    def may_evict(self) -> bool:
        return self._budget is not None

    @property
    def nbytes(self) -> int:
        """Bytes of tasks on each device, without `base`, which is part of the backbone."""
        return self._bytes

    def keep(self, slot: Slot, loaded: Loaded) -> Loaded:
        """Make tasks resident together with those they extend, and others leave if need be."""
        with self._lock:
            kept = self._admit(slot, loaded)
            self._make_room({slot, *slot.ancestors})
            self._observer.tasks_resident(len(self._resident), self._bytes)
        return kept

    def forget(self, slots: Iterable[Slot]) -> None:
        """Stop counting retired bundles; they live on only in the hands of requests."""
        with self._lock:
            for slot in slots:
                slot.tracked = False
                self._bytes -= self._resident.pop(slot, 0)
            self._observer.tasks_resident(len(self._resident), self._bytes)

    def release(self, slots: Iterable[Slot]) -> None:
        """Let go of bundles that stay in the catalog, in host memory too; requests finish first."""
        with self._lock:
            for slot in slots:
                slot.host = None
                if slot.loaded is not None:
                    self._evict(slot)
            self._observer.tasks_resident(len(self._resident), self._bytes)

    def _admit(self, slot: Slot, loaded: Loaded) -> Loaded:
        # A parent may have been evicted while its child was prepared: the child brings it back.
        for parent, its in zip(slot.parents, loaded.parents, strict=True):
            self._admit(parent, its)
        if slot.loaded is None:
            slot.loaded = loaded
            if slot.tracked:
                self._resident[slot] = loaded.nbytes
                self._bytes += loaded.nbytes
        return slot.loaded

    def _make_room(self, needed: set[Slot]) -> None:
        """Evict the least recently used, but none pinned, needed now or extended by a resident."""
        while self._budget is not None and self._bytes > self._budget:
            held = needed.union(*(slot.ancestors for slot in self._resident))
            free = [slot for slot in self._resident if slot not in held and not slot.pinned]
            if not free:
                return
            self._evict(min(free, key=lambda slot: slot.used))

    def _evict(self, slot: Slot) -> None:
        slot.evict()
        self._bytes -= self._resident.pop(slot, 0)
        self._observer.task_evicted(slot.name, slot.version)
