"""Follows the store: reads its catalog, loads new bundles, then swaps the snapshot.

A request takes the snapshot once, so it never sees half a change; a task that is retired meanwhile
stays in memory until the request ends. While the store cannot be read, the last snapshot stays in
service.
"""

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Final

from engram_bundle import TaskStoreError, parse_ref
from engram_bundle.names import BASE_TASK
from engram_store import Catalog, StoreUnavailable, TaskStore

from engram_server.engine import observer as metrics
from engram_server.engine.tasks.loader import TaskLoader
from engram_server.engine.tasks.slots import Slot
from engram_server.engine.tasks.snapshot import Snapshot
from engram_server.errors import GenerationNotReached

# How long `sync(at_least=…)` waits for a store that lags behind.
PATIENCE_SECONDS: Final = 10.0
_LONGEST_PAUSE_SECONDS: Final = 0.05
_STOP_SECONDS: Final = 5.0
_DAY_SECONDS: Final = 86400.0

_log = logging.getLogger("engram.tasks")


class StoreFollower:
    """Keeps `snapshot` up to date with a store. Thread-safe."""

    def __init__(
        self,
        store: TaskStore,
        loader: TaskLoader,
        observer: metrics.EngineObserver,
        *,
        poll_seconds: float,
        pinned: frozenset[str] = frozenset(),
        shadow_aliases: tuple[str, ...] = (),
        on_served: Callable[[], None] = lambda: None,
        on_purged: Callable[[Collection[str], Collection[str]], None] = lambda *_: None,
        daily: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._store = store
        self._loader = loader
        self._observer = observer
        self._poll_seconds = poll_seconds
        # `base` always stays. Raises InvalidName for an invalid reference.
        self._pinned = frozenset(ref for ref in pinned if parse_ref(ref).task != BASE_TASK)
        self._on_served = on_served  # called after each swap; must not block
        # Called with the digests of purged bundles and their tasks; must not block.
        self._on_purged = on_purged
        self._daily = daily  # called after the start and once a day; may block
        self._clock = clock
        self._shadow_aliases = shadow_aliases
        names = () if loader.base is None else (BASE_TASK,)
        self.snapshot = Snapshot(Catalog(), {}, loader.base, names, {})
        self.generation_seen = 0  # newest in the store; ahead of the snapshot while loading
        self.store_error: str | None = None  # why the last poll failed
        self.polls = 0  # started so far
        self._polled: float | None = None
        self._settled = False  # every eager bundle is loaded: a poll without news returns early
        self._unloaded: frozenset[str] = frozenset()  # names; only changed while syncing
        self._slots: dict[str, Slot] = {}  # of the snapshot, and of an interrupted sync
        self._syncing = threading.Lock()
        self._catching_up = ThreadPoolExecutor(1, "engram-catch-up")
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None

    @property
    def seconds_since_poll(self) -> float | None:
        return None if self._polled is None else self._clock() - self._polled

    @property
    def alive(self) -> bool:
        return self._thread is None or self._stopping.is_set() or self._thread.is_alive()

    def start(self) -> None:
        """Read the store and load its tasks, then follow it in a thread. Blocks; may raise."""
        with self._syncing:
            self._poll(())
        self._thread = threading.Thread(target=self._follow, name="engram-follow", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Stop following. Loaded bundles stay loaded."""
        self._stopping.set()
        self._catching_up.shutdown(wait=False, cancel_futures=True)
        if self._thread is not None:
            self._thread.join(_STOP_SECONDS)

    def _follow(self) -> None:
        due = self._clock()
        while not self._stopping.wait(self._poll_seconds):
            try:
                self.sync()
                if self._clock() >= due:
                    due = self._clock() + _DAY_SECONDS
                    self._daily()
            except Exception:  # noqa: BLE001 - thread boundary: keep following
                _log.exception("following the task store failed")
                self._observer.record(metrics.STORE_FAILURES)

    def sync(self, at_least: int | None = None, *, retry: Collection[str] = ()) -> Snapshot:
        """Catch up with the store, load new bundles, and swap the snapshot. Blocks.

        With `at_least`, wait until that generation is served, or raise StoreUnavailable. Failed
        bundles in `retry` (digests) are retried at once. Without `at_least`, a store that cannot be
        read leaves the last snapshot in place and sets `store_error`.
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

    async def snapshot_for(
        self, refs: Sequence[str] | None, at_least: int | None = None
    ) -> Snapshot:
        """A snapshot that has reached a generation and the versions in `refs`.

        Polls the store once if it must; concurrent callers share one poll. GenerationNotReached if
        the store has no such generation, StoreUnavailable if it cannot be read.
        """
        if not self.snapshot.lacks(refs, at_least):
            return self.snapshot
        loop = asyncio.get_running_loop()
        snapshot = await loop.run_in_executor(self._catching_up, self.catch_up, self.polls)
        if at_least is not None and snapshot.generation < at_least:
            raise GenerationNotReached(
                f"generation {at_least} does not exist yet: the task store is at generation "
                f"{snapshot.generation}"
            )
        return snapshot

    def catch_up(self, polls: int) -> Snapshot:
        """Poll the store, or StoreUnavailable, unless a poll has started since `polls`. Blocks."""
        with self._syncing:
            snapshot = self._try_poll(()) if self.polls == polls else self.snapshot
            if self.store_error is not None:
                raise StoreUnavailable(self.store_error)
        return snapshot

    def check_writable(self) -> None:
        """StoreUnavailable if the store cannot be reached. Blocks."""
        if self.store_error is not None:
            self.catch_up(self.polls)

    def _try_poll(self, retry: Collection[str]) -> Snapshot:
        try:
            return self._poll(retry)
        except TaskStoreError as error:
            if self.store_error is None:
                _log.warning("cannot read the task store, serving the last snapshot: %s", error)
            self.store_error = str(error)
            self._observer.record(metrics.STORE_FAILURES)
            return self.snapshot

    def _poll(self, retry: Collection[str]) -> Snapshot:
        """Read the store once and serve its catalog. The caller holds `_syncing`."""
        self.polls += 1
        catalog = self._store.refresh()
        self.generation_seen = catalog.generation
        self._observer.record(metrics.GENERATION_SEEN, catalog.generation)
        before = self.snapshot
        unloading = self._unloaded or before.unloaded
        if catalog is before.catalog and self._settled and not unloading and not retry:
            self._note_read()
            return before
        if catalog is not before.catalog:
            self._finish_purges()
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
            # Every time: a request that started earlier may have reloaded something.
            self._loader.release(_needed_only_by_unloaded(after))
        after = after.with_ready_names()
        return before if after is before else self._swap(after)

    def _finish_purges(self) -> None:
        """Delete what an interrupted purge left in the store; a failure changes nothing here."""
        try:
            self._store.finish_purges()
        except TaskStoreError as error:
            _log.warning("cannot delete what was purged; run `engram tasks gc`: %s", error)

    def _plan(self, catalog: Catalog) -> Snapshot:
        """The next snapshot: the slots of a catalog, and which of them to load eagerly."""
        before, unloaded = self.snapshot, self._unloaded
        if catalog is before.catalog and unloaded == before.unloaded:
            return before
        slots = _build_slots(catalog, self._slots)
        self._slots.update(slots)
        eager = _eager_references(catalog, self._pinned, unloaded)
        for digest, slot in slots.items():
            slot.pinned = not self._pinned.isdisjoint(eager.get(digest, ()))
        aliases = self._shadow_aliases
        return Snapshot(catalog, slots, before.base, (), eager, unloaded, aliases)

    def _note_read(self) -> None:
        self._polled = self._clock()
        self.store_error = None
        self._observer.record(metrics.STORE_STALENESS)

    def _swap(self, snapshot: Snapshot) -> Snapshot:
        before = self.snapshot.catalog.by_digest
        purged = before.keys() - snapshot.catalog.by_digest.keys()
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
                loaded.drop_versions(live)
        if purged:
            self._on_purged(purged, {info.task for digest in purged for info in before[digest]})
        self._observer.record(metrics.GENERATION_SERVED, snapshot.generation)
        self._on_served()
        return snapshot

    # Unloading, on this server alone

    def unload(self, name: str) -> Snapshot:
        """Stop serving a task and free its tensors, until `readmit` or a restart. Blocks.

        Bundles that other tasks extend stay loaded. UnknownTask if there is no such task.
        """
        with self._syncing:
            catalog = self.snapshot.catalog
            catalog.task(name)
            self._unloaded |= {name}
            after = self._swap(self._plan(catalog).with_ready_names())
            self._loader.release(_needed_only_by_unloaded(after))
        return after

    def readmit(self, name: str) -> None:
        """Let the next sync serve an unloaded task again."""
        with self._syncing:
            self._unloaded -= {name}


def _build_slots(catalog: Catalog, known: Mapping[str, Slot]) -> dict[str, Slot]:
    """Slots for every live version and everything it extends; existing ones are reused."""
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
        # Unpublished parents and cycles exist only in damaged logs: the loader rejects them.
        return slots.get(digest)
    info = next((info for info in versions if not info.retired), versions[0])
    parents = [_add_slot(slots, catalog, known, parent, (*path, digest)) for parent in info.extends]
    present = tuple(parent for parent in parents if parent is not None)
    slot = known.get(digest)
    if slot is None or slot.parents != present:
        slot = Slot(digest, present)
    slot.name, slot.version = info.task, info.version  # its earlier name may be retired
    slots[digest] = slot
    return slot


def _eager_references(
    catalog: Catalog, pinned: frozenset[str], unloaded: frozenset[str]
) -> dict[str, frozenset[str]]:
    """By digest, the aliases, canaries and pinned references to it, but not of unloaded tasks."""
    eager: dict[str, set[str]] = {}
    refs = [f"{task.name}:{alias}" for task in catalog.tasks.values() for alias in task.aliases]
    refs += [
        f"{task.name}@{canary.version}"
        for task in catalog.tasks.values()
        for canary in task.canaries.values()
    ]
    for ref in (*refs, *pinned):
        try:
            info = catalog.resolve(ref)
        except TaskStoreError:
            continue  # pinned before it is published, or retired since
        if info.task not in unloaded:
            eager.setdefault(info.digest, set()).add(ref)
    return {digest: frozenset(refs) for digest, refs in eager.items()}


def _needed_only_by_unloaded(snapshot: Snapshot) -> tuple[Slot, ...]:
    candidates: dict[Slot, None] = {}
    needed: set[Slot] = set()
    for task in snapshot.catalog.tasks.values():
        for info in task.live:
            slot = snapshot.slots[info.digest]
            if task.name in snapshot.unloaded:
                candidates.update(dict.fromkeys((slot, *slot.ancestors)))
            else:
                needed.update((slot, *slot.ancestors))
    return tuple(slot for slot in candidates if slot not in needed)
