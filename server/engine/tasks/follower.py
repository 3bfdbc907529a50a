"""Follows the store: reads its catalog, has what is new loaded, and then swaps the snapshot.

A request takes the snapshot once and is answered by it alone, so it never sees half a change, and
what was retired meanwhile lives until that request lets go. A store that cannot be read leaves the
last snapshot in service.
"""

import logging
import threading
import time
from collections.abc import Callable, Collection, Mapping
from typing import Final

from server.engine.observer import EngineObserver
from server.engine.tasks.loader import TaskLoader
from server.engine.tasks.slots import Slot
from server.engine.tasks.snapshot import Snapshot
from server.model.multitask import BASE
from task_store import (
    Catalog,
    StoreError,
    StoreUnavailable,
    TaskStore,
    TaskStoreError,
    parse_ref,
)

# How long `sync(at_least=…)` waits for a store that lags behind what the caller knows.
PATIENCE_SECONDS: Final = 10.0
_LONGEST_PAUSE_SECONDS: Final = 0.05
_STOP_SECONDS: Final = 5.0

_log = logging.getLogger("engram.tasks")


class StoreFollower:
    """Keeps `snapshot` up to date with a store. Safe to use from any thread."""

    def __init__(
        self,
        store: TaskStore,
        loader: TaskLoader,
        observer: EngineObserver,
        *,
        poll_seconds: float,
        pinned: frozenset[str] = frozenset(),
        on_served: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._store = store
        self._loader = loader
        self._observer = observer
        self._poll_seconds = poll_seconds
        # `base` always stays. InvalidName here if a reference could never be one.
        self._pinned = frozenset(ref for ref in pinned if parse_ref(ref).task != BASE)
        self._on_served = on_served  # called with each new snapshot in place; must not block
        self._clock = clock
        names = () if loader.base is None else (BASE,)
        self.snapshot = Snapshot(Catalog(), {}, loader.base, names, {})
        self.generation_seen = 0  # the newest in the store; past the snapshot's while loading
        self.store_error: str | None = None  # why the last poll failed
        self.polls = 0  # begun so far
        self._polled: float | None = None
        self._settled = False  # all that should be loaded is: a poll without news ends at once
        self._unloaded: frozenset[str] = frozenset()  # names; only changed while syncing
        self._slots: dict[str, Slot] = {}  # of the snapshot, and of a sync that was cut short
        self._syncing = threading.Lock()
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None

    @property
    def seconds_since_poll(self) -> float | None:
        """Since the store was last read; None before the first time."""
        return None if self._polled is None else self._clock() - self._polled

    @property
    def alive(self) -> bool:
        """Whether the store is followed, if that was begun."""
        return self._thread is None or self._stopping.is_set() or self._thread.is_alive()

    def start(self) -> None:
        """Read the store, load its tasks, then follow it in a thread. Blocks; may raise."""
        with self._syncing:
            self._poll(())
        self._thread = threading.Thread(target=self._follow, name="engram-follow", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Stop following. What is loaded stays."""
        self._stopping.set()
        if self._thread is not None:
            self._thread.join(_STOP_SECONDS)

    def _follow(self) -> None:
        while not self._stopping.wait(self._poll_seconds):
            try:
                self.sync()
            except Exception:  # noqa: BLE001 - the boundary: following must go on
                _log.exception("following the task store failed")
                self._observer.store_failed()

    # Catching up

    def sync(self, at_least: int | None = None, *, retry: Collection[str] = ()) -> Snapshot:
        """Catch up with the store, load what is new, and swap the snapshot. Blocks.

        With `at_least`, return only when that generation is served, or raise StoreUnavailable.
        Bundles in `retry` (digests) are tried again now, if they have failed. Without `at_least`, a
        store that cannot be read leaves the last snapshot, and `store_error` says why.
        """
        deadline = time.monotonic() + PATIENCE_SECONDS
        while True:
            with self._syncing:
                snapshot = self.snapshot
                behind = at_least is None or snapshot.generation < at_least
                if behind or not all(snapshot.has_ready(digest) for digest in retry):
                    snapshot = self._try_poll(retry)
            if at_least is None or snapshot.generation >= at_least:
                return snapshot
            pause = min(self._poll_seconds, _LONGEST_PAUSE_SECONDS)
            if self._stopping.wait(pause) or time.monotonic() > deadline:
                raise StoreUnavailable(
                    self.store_error
                    or f"The task store {self._store.url} is at generation {snapshot.generation} "
                    f"and has not reached {at_least}."
                )
            retry = ()

    def catch_up(self, polls: int) -> Snapshot:
        """What the store has now, unless it was polled since `polls` was read. Blocks.

        So any number of callers that miss something share one poll. StoreUnavailable if the store
        could not be read.
        """
        with self._syncing:
            snapshot = self._try_poll(()) if self.polls == polls else self.snapshot
            if self.store_error is not None:
                raise StoreUnavailable(self.store_error)
        return snapshot

    def check_writable(self) -> None:
        """StoreUnavailable if the store is away: then nothing is changed. Blocks."""
        if self.store_error is not None:
            self.catch_up(self.polls)

    def _try_poll(self, retry: Collection[str]) -> Snapshot:
        try:
            return self._poll(retry)
        except TaskStoreError as error:
            if self.store_error is None:
                _log.warning("the task store cannot be read, serving what is loaded: %s", error)
            self.store_error = str(error)
            self._observer.store_failed()
            return self.snapshot

    def _poll(self, retry: Collection[str]) -> Snapshot:
        """Read the store once and serve what it has. Only called while `_syncing` is held."""
        self.polls += 1
        catalog = self._store.refresh()
        self.generation_seen = catalog.generation
        self._observer.catalog_seen(catalog.generation)
        before = self.snapshot
        unloading = self._unloaded or before.unloaded
        if catalog is before.catalog and self._settled and not unloading and not retry:
            self._note_read()
            return before
        self._unloaded &= frozenset(catalog.names)
        after = self._plan(catalog)
        moved = {digest for digest, refs in after.eager.items() if before.eager.get(digest) != refs}
        for digest in moved.union(retry).intersection(after.slots):
            after.slots[digest].retry_now()
        eager = [after.slots[digest] for digest in after.eager]
        self._loader.load_all(eager)
        self._settled = all(slot.ready for slot in eager)
        self._note_read()
        if after.unloaded:
            # Every time: a request that started before may have brought something back.
            self._loader.release(_needed_only_by_unloaded(after))
        after = after.with_ready_names()
        return before if after is before else self._swap(after)

    def _plan(self, catalog: Catalog) -> Snapshot:
        """What to serve next: the slots of a catalog, and which of them to load at once."""
        before, unloaded = self.snapshot, self._unloaded
        if catalog is before.catalog and unloaded == before.unloaded:
            return before
        slots = _build_slots(catalog, self._slots)
        self._slots.update(slots)
        eager = _eager_references(catalog, self._pinned, unloaded)
        for digest, slot in slots.items():
            slot.pinned = not self._pinned.isdisjoint(eager.get(digest, ()))
        return Snapshot(catalog, slots, before.base, (), eager, unloaded)

    def _note_read(self) -> None:
        self._polled = self._clock()
        self.store_error = None
        self._observer.store_read()

    def _swap(self, snapshot: Snapshot) -> Snapshot:
        self.snapshot = snapshot
        self._loader.forget(
            [slot for digest, slot in self._slots.items() if digest not in snapshot.slots]
        )
        self._slots = dict(snapshot.slots)
        live = {
            (info.task, info.version)
            for task in snapshot.catalog.tasks.values()
            for info in task.live
        }
        for slot in snapshot.slots.values():
            if (loaded := slot.loaded) is not None:
                loaded.keep_names(live)
        self._observer.catalog_served(snapshot.generation)
        self._on_served()
        return snapshot

    # Unloading, on this server alone

    def unload(self, name: str) -> Snapshot:
        """Answer no more for a task, and let its tensors go. Blocks; UnknownTask if there is none.

        That lasts until `readmit`, or a restart. What the tasks that extend it need of it stays.
        """
        with self._syncing:
            catalog = self.snapshot.catalog
            catalog.task(name)
            self._unloaded |= {name}
            after = self._swap(self._plan(catalog).with_ready_names())
            self._loader.release(_needed_only_by_unloaded(after))
        return after

    def readmit(self, name: str) -> None:
        """Let the next sync serve a task that was unloaded."""
        with self._syncing:
            self._unloaded -= {name}


def _build_slots(catalog: Catalog, known: Mapping[str, Slot]) -> dict[str, Slot]:
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


def _eager_references(
    catalog: Catalog, pinned: frozenset[str], unloaded: frozenset[str]
) -> dict[str, frozenset[str]]:
    """By digest, the labels and pinned references that point to it; not of unloaded tasks."""
    eager: dict[str, set[str]] = {}
    refs = [f"{task.name}:{label}" for task in catalog.tasks.values() for label in task.labels]
    for ref in (*refs, *pinned):
        try:
            info = catalog.resolve(ref)
        except StoreError:
            continue  # pinned before it is published, or retired since
        if info.task not in unloaded:
            eager.setdefault(info.digest, set()).add(ref)
    return {digest: frozenset(refs) for digest, refs in eager.items()}


def _needed_only_by_unloaded(snapshot: Snapshot) -> tuple[Slot, ...]:
    """The bundles that nothing but unloaded tasks needs."""
    theirs: dict[Slot, None] = {}
    needed: set[Slot] = set()
    for task in snapshot.catalog.tasks.values():
        for info in task.live:
            slot = snapshot.slots[info.digest]
            if task.name in snapshot.unloaded:
                theirs.update(dict.fromkeys((slot, *slot.ancestors)))
            else:
                needed.update((slot, *slot.ancestors))
    return tuple(slot for slot in theirs if slot not in needed)
