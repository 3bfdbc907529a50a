"""The task bank: follows the store, and has every task ready before anybody is sent to it.

A sync reads the catalog, loads what is new beside the running traffic, and then replaces one
attribute: the snapshot. A request takes the snapshot once and is answered by it alone, so it never
sees half a change, and what was retired meanwhile lives until that request lets go.

What goes wrong stays where it is: a bundle that cannot be served is failed, with its reason, and
tried again later; a store that cannot be read leaves the last snapshot in service.
"""

import itertools
import logging
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from typing import Final

import torch

from server.engine.observer import BankObserver
from server.engine.residency import Loaded, Residency, Slot
from server.engine.snapshot import (
    Match,
    Snapshot,
    TaskState,
    build_slots,
    check_pinned,
    eager_references,
    is_ready,
    only_for,
    unavailable,
)
from server.engine.task_loader import HALF_PRECISION_TOLERANCE, Replay, TaskLoader
from server.engine.types import ResidentTask
from server.errors import ExtensionError, TaskUnavailable
from server.model.backbone import Backbone
from server.model.multitask import BASE
from task_store import (
    Catalog,
    MissingParent,
    StoreUnavailable,
    TaskBundle,
    TaskRef,
    TaskStore,
    TaskStoreError,
)

__all__ = [
    "HALF_PRECISION_TOLERANCE",
    "Replay",
    "Snapshot",
    "TaskBank",
    "TaskState",
]

# How long `sync(at_least=…)` waits for a store that lags behind what the caller knows.
PATIENCE_SECONDS: Final = 10.0
_LONGEST_PAUSE_SECONDS: Final = 0.05
_LOADERS: Final = 4
_STOP_SECONDS: Final = 5.0

_log = logging.getLogger("engram.bank")


class TaskBank:
    """Every task of a store on every device. Safe to use from any thread; `resolve` never waits."""

    def __init__(
        self,
        store: TaskStore,
        backbones: Mapping[torch.device, Backbone],
        *,
        replay: Replay,
        observer: BankObserver,
        poll_seconds: float,
        resident_bytes: int | None,
        pinned: frozenset[str] = frozenset(),
        on_served: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.store = store
        self.store_error: str | None = None  # why the last poll failed
        self._loader = TaskLoader(backbones, replay)
        self._residency = Residency(resident_bytes, observer)
        self._observer = observer
        self._poll_seconds = poll_seconds
        self._pinned = check_pinned(pinned)
        self._on_served = on_served  # called with each new snapshot in place; must not block
        self._clock = clock
        self._ticks = itertools.count(1)
        base = self._loader.base()
        names = () if base is None else (BASE,)
        self._snapshot = Snapshot(Catalog(), {}, _base_slot(base), names, {})
        self._failing: set[Slot] = set()
        self._unloaded: frozenset[str] = frozenset()  # names; only changed while syncing
        self._slots: dict[str, Slot] = {}  # of the snapshot, and of a sync that was cut short
        self._syncing = threading.Lock()
        self._stopping = threading.Event()
        self._follower: threading.Thread | None = None
        self._generation_seen = 0
        self._looks = 0  # at the store, begun so far
        self._settled = False  # all that should be loaded is: a poll without news ends at once
        self._polled: float | None = None

    # What is served

    @property
    def snapshot(self) -> Snapshot:
        """What a request that starts now is answered by."""
        return self._snapshot

    @property
    def generation_seen(self) -> int:
        """The newest generation read from the store; past the snapshot's while loading."""
        return self._generation_seen

    @property
    def seconds_since_poll(self) -> float | None:
        """Since the store was last read; None before the first time."""
        return None if self._polled is None else self._clock() - self._polled

    @property
    def resident_bytes(self) -> int:
        """Bytes of tasks on each device, without `base`, which is part of the backbone."""
        return self._residency.nbytes

    def versions_failed(self) -> int:
        """Live versions that cannot be served. Looks at nothing but those that have failed."""
        return self._snapshot.versions_of(slot for slot in tuple(self._failing) if not slot.ready)

    def resolve(
        self, snapshot: Snapshot, refs: Sequence[str] | None
    ) -> list[tuple[str, ResidentTask]] | None:
        """The tasks references stand for; None if one must be loaded first. Never waits.

        Without references: every ready task. Raises UnknownTask or TaskUnavailable.
        """
        matches = snapshot.find(refs)
        tick = next(self._ticks)
        resident: list[tuple[str, ResidentTask]] = []
        for match in matches:
            loaded = match.slot.loaded
            if loaded is None:
                self._refuse_failed(matches)
                return None
            match.slot.used = tick
            resident.append((match.ref, loaded.served_as(match.key)))
        return resident

    def load(
        self, snapshot: Snapshot, refs: Sequence[str] | None
    ) -> list[tuple[str, ResidentTask]]:
        """Like `resolve`, and loads what is missing. Blocks: not for the event loop."""
        tick = next(self._ticks)
        resident: list[tuple[str, ResidentTask]] = []
        reasons: dict[str, str] = {}
        for match in snapshot.find(refs):
            match.slot.used = tick
            try:
                resident.append((match.ref, self._obtain(match.slot).served_as(match.key)))
            except TaskUnavailable as error:
                reasons[match.ref] = str(error)
        if reasons:
            raise unavailable(reasons)
        return resident

    def _refuse_failed(self, matches: Iterable[Match]) -> None:
        now = self._clock()
        failed = {
            ref: slot.failure.reason
            for ref, _, _, slot in matches
            if not slot.ready and slot.failure is not None and not slot.due(now)
        }
        if failed:
            raise unavailable(failed)

    # Following the store

    def start(self) -> None:
        """Read the store, load its tasks, then follow it in a thread. Blocks; may raise."""
        with self._syncing:
            self._update(())
        self._follower = threading.Thread(target=self._follow, name="engram-bank", daemon=True)
        self._follower.start()

    def stop(self) -> None:
        """Stop following. What is loaded stays."""
        self._stopping.set()
        if self._follower is not None:
            self._follower.join(_STOP_SECONDS)

    def sync(self, at_least: int | None = None, *, retry: Collection[str] = ()) -> Snapshot:
        """Catch up with the store, load what is new, and swap the snapshot.

        With `at_least`, return only when that generation is served, or raise StoreUnavailable.
        Bundles in `retry` (digests) are tried again now, if they have failed. Without `at_least`, a
        store that cannot be read leaves the last snapshot, and `store_error` says why.
        """
        deadline = time.monotonic() + PATIENCE_SECONDS
        while True:
            with self._syncing:
                snapshot = self._snapshot
                behind = at_least is None or snapshot.generation < at_least
                if behind or not all(_is_served(snapshot, digest) for digest in retry):
                    snapshot = self._try_update(retry)
            if at_least is None or snapshot.generation >= at_least:
                return snapshot
            pause = min(self._poll_seconds, _LONGEST_PAUSE_SECONDS)
            if self._stopping.wait(pause) or time.monotonic() > deadline:
                raise StoreUnavailable(
                    self.store_error
                    or f"The task store {self.store.url} is at generation {snapshot.generation} "
                    f"and has not reached {at_least}."
                )
            retry = ()

    @property
    def looks(self) -> int:
        """How often this bank has begun to look at the store; see `catch_up`."""
        return self._looks

    def catch_up(self, looks: int) -> Snapshot:
        """What the store has now, unless it was looked at since `looks` was read. Blocks.

        So any number of callers that miss something share one look. StoreUnavailable if the store
        could not be read.
        """
        with self._syncing:
            snapshot = self._try_update(()) if self._looks == looks else self._snapshot
            if self.store_error is not None:
                raise StoreUnavailable(self.store_error)
        return snapshot

    def check_writable(self) -> None:
        """StoreUnavailable if the store is away: then nothing is changed. Blocks."""
        if self.store_error is not None:
            self.catch_up(self._looks)

    def _follow(self) -> None:
        while not self._stopping.wait(self._poll_seconds):
            try:
                self.sync()
            except Exception:  # noqa: BLE001 - the boundary: following must go on
                _log.exception("following the task store failed")
                self._observer.store_failed()

    def _try_update(self, retry: Collection[str]) -> Snapshot:
        try:
            return self._update(retry)
        except TaskStoreError as error:
            if self.store_error is None:
                _log.warning("the task store cannot be read, serving what is loaded: %s", error)
            self.store_error = str(error)
            self._observer.store_failed()
            return self._snapshot

    def _update(self, retry: Collection[str]) -> Snapshot:
        """One look at the store. Only called while `_syncing` is held."""
        self._looks += 1
        catalog = self.store.refresh()
        self._generation_seen = catalog.generation
        self._observer.catalog_seen(catalog.generation)
        before = self._snapshot
        nothing_unloaded = not (self._unloaded or before.unloaded)
        if catalog is before.catalog and nothing_unloaded and self._settled and not retry:
            self._note_read()
            return before
        slots, eager = before.slots, before.eager
        self._unloaded &= frozenset(catalog.names)
        unloaded = self._unloaded
        if catalog is not before.catalog or unloaded != before.unloaded:
            slots = build_slots(catalog, self._slots)
            eager = eager_references(catalog, self._pinned, unloaded)
            self._slots.update(slots)
            self._pin(slots, eager)
        moved = {digest for digest, refs in eager.items() if before.eager.get(digest) != refs}
        _forgive(slots[digest] for digest in moved.union(retry) if digest in slots)
        self._load_all([slots[digest] for digest in eager])
        self._settled = all(slots[digest].ready for digest in eager)
        self._note_read()
        served = (name for name in catalog.names if name not in unloaded)
        ready = tuple(name for name in served if is_ready(catalog, slots, name))
        if before.base is not None:
            ready = tuple(sorted((*ready, BASE)))
        if unloaded:
            # Every time: a request that started before may have brought something back.
            self._residency.release(only_for(catalog, slots, unloaded))
        same = catalog is before.catalog and unloaded == before.unloaded
        if same and ready == before.ready_names:
            return before
        return self._swap(Snapshot(catalog, slots, before.base, ready, eager, unloaded))

    def _note_read(self) -> None:
        self._polled = self._clock()
        self.store_error = None
        self._observer.store_read()

    def _swap(self, snapshot: Snapshot) -> Snapshot:
        self._snapshot = snapshot
        self._residency.forget(
            slot for digest, slot in self._slots.items() if digest not in snapshot.slots
        )
        self._slots = dict(snapshot.slots)
        self._failing.intersection_update(self._slots.values())
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

    def _pin(self, slots: Mapping[str, Slot], eager: Mapping[str, frozenset[str]]) -> None:
        for digest, slot in slots.items():
            slot.pinned = not self._pinned.isdisjoint(eager.get(digest, ()))

    # Unloading, on this server alone

    def unload(self, name: str) -> Snapshot:
        """Answer no more for a task, and let its tensors go. Blocks; UnknownTask if there is none.

        That lasts until `reload`, a publish through this server, or a restart. What the tasks that
        extend it need of it stays.
        """
        with self._syncing:
            before = self._snapshot
            catalog, slots = before.catalog, before.slots
            catalog.task(name)
            self._unloaded = unloaded = self._unloaded | {name}
            ready = tuple(each for each in before.ready_names if each not in unloaded)
            eager = eager_references(catalog, self._pinned, unloaded)
            self._pin(slots, eager)
            after = self._swap(Snapshot(catalog, slots, before.base, ready, eager, unloaded))
            self._residency.release(only_for(catalog, slots, unloaded))
        return after

    def readmit(self, name: str) -> None:
        """Let the next sync serve a task that was unloaded."""
        with self._syncing:
            self._unloaded -= {name}

    def reload(self, name: str) -> Snapshot:
        """Read the store, and have the task's default version on the device. Blocks.

        A task that was unloaded is served again, one that has failed is tried again now. Raises
        UnknownTask, TaskUnavailable, or StoreUnavailable.
        """
        digest = self.store.refresh().resolve(TaskRef(name)).digest
        self.readmit(name)
        snapshot = self.sync(retry=(digest,))
        self.load(snapshot, [name])
        return snapshot

    # Loading

    def _load_all(self, slots: Collection[Slot]) -> None:
        """Load what is not loaded and not failed for now. Raises only if the store is away."""
        while due := [slot for slot in slots if not slot.ready and slot.due(self._clock())]:
            if len(due) == 1:
                self._try_to_load(due[0])
            else:
                with ThreadPoolExecutor(min(_LOADERS, len(due)), "engram-load") as pool:
                    list(pool.map(self._try_to_load, due))
            self._tell_outage_from_fault(due)

    def _try_to_load(self, slot: Slot) -> None:
        with suppress(TaskUnavailable):
            self._obtain(slot)

    def _tell_outage_from_fault(self, slots: Iterable[Slot]) -> None:
        """A bundle that cannot be read is failed; when nothing can be read, none is to blame."""
        unread = [slot for slot in slots if slot.failure is not None and slot.failure.unreachable]
        if not unread:
            return
        try:
            self.store.refresh()
        except TaskStoreError:
            for slot in unread:
                slot.failure = None
            self._failing.difference_update(unread)
            raise

    def _obtain(self, slot: Slot, *, keep: bool = True) -> Loaded:
        """A slot's tasks, loaded if need be; TaskUnavailable, with the bare reason, if it failed.

        With `keep=False` what had to be loaded is left to the caller alone.
        """
        if (loaded := slot.loaded) is not None:
            return loaded
        with slot.lock:
            if (loaded := slot.loaded) is not None:
                return loaded
            if slot.failure is not None and not slot.due(self._clock()):
                raise TaskUnavailable(slot.failure.reason)
            started = time.perf_counter()
            try:
                loaded = self._load(slot, keep=keep)
            except Exception as error:
                # Whatever is wrong with one bundle must not reach the others.
                raise self._failed(slot, error) from error
            slot.failure = None
            self._failing.discard(slot)
            if not keep:
                return loaded
            loaded = self._residency.keep(slot, loaded)
        self._observer.task_loaded(slot.name, slot.version, time.perf_counter() - started)
        return loaded

    def _load(self, slot: Slot, *, keep: bool) -> Loaded:
        parents = tuple(self._obtain(parent, keep=keep) for parent in slot.parents)
        host = slot.host
        if host is not None:
            in_use = slot.still_in_use()
            if in_use is not None:
                return self._loader.bind(slot.digest, host, in_use, parents)
            return self._loader.prepare(slot.digest, host, parents)
        bundle = self.store.read_bundle(slot.digest)
        if bundle.extends != tuple(parent.digest for parent in slot.parents):
            raise ExtensionError("it extends bundles that the store does not have")
        host = self._loader.check(bundle)
        loaded = self._loader.prepare(slot.digest, host, parents)
        self._loader.replay_golden(bundle, loaded, (slot.name, slot.version))
        if keep and self._residency.may_evict:
            slot.host = host
        return loaded

    def _failed(self, slot: Slot, error: Exception) -> TaskUnavailable:
        reason = str(error) or type(error).__name__
        cause = next((parent for parent in slot.parents if parent.failure is not None), None)
        if isinstance(error, TaskUnavailable) and cause is not None:
            reason = f"it extends {cause.ref}, which cannot be served: {reason}"
        else:
            cause = None
        if isinstance(error, TaskStoreError | TaskUnavailable | ExtensionError):
            _log.warning("task %s cannot be served: %s", slot.ref, reason)
        else:
            _log.warning("task %s cannot be served", slot.ref, exc_info=error)
        slot.fail(
            reason,
            self._clock(),
            cause=None if cause is None else cause.failure,
            unreachable=isinstance(error, StoreUnavailable),
        )
        self._failing.add(slot)
        self._observer.task_failed(slot.name, slot.version)
        return TaskUnavailable(reason)

    # Before a bundle is published

    def verify(self, bundle: TaskBundle) -> None:
        """Whether a bundle could be served here: its fit, its parents, its golden examples.

        Raises IncompatibleBundle, MissingParent, TaskUnavailable (a parent has failed) or
        TaskMismatch. Nothing stays loaded that was not.
        """
        host = self._loader.check(bundle)
        parents = tuple(self._obtain(slot, keep=False) for slot in self._parents_of(bundle))
        loaded = self._loader.prepare(bundle.digest, host, parents)
        self._loader.replay_golden(bundle, loaded, ("unpublished", None))

    def _parents_of(self, bundle: TaskBundle) -> list[Slot]:
        snapshot = self._snapshot
        if not all(digest in snapshot.slots for digest in bundle.extends):
            snapshot = self.sync()
        missing = [digest for digest in bundle.extends if digest not in snapshot.slots]
        if missing:
            raise MissingParent(
                f"The bundle extends {', '.join(missing)}, which is not published: publish the "
                f"parent first.",
                names=missing,
            )
        return [snapshot.slots[digest] for digest in bundle.extends]


def _base_slot(loaded: Loaded | None) -> Slot | None:
    """The backbone's own head is part of the backbone: always there, never counted."""
    if loaded is None:
        return None
    slot = Slot("")
    slot.loaded = loaded
    return slot


def _is_served(snapshot: Snapshot, digest: str) -> bool:
    slot = snapshot.slots.get(digest)
    return slot is not None and slot.ready


def _forgive(slots: Iterable[Slot]) -> None:
    """Something about them changed: try again at once."""
    for slot in slots:
        if slot.failure is not None:
            slot.failure = replace(slot.failure, retry_at=0.0)
