"""Loads bundles onto the devices, and notes which could not be loaded.

A bundle comes from host memory, if it was evicted; from the publish that has just prepared it; or
from the store. One that cannot be served is failed alone, with its reason, and tried again later.
"""

import logging
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Final

from server.engine.observer import EngineObserver
from server.engine.tasks.preparer import TaskPreparer
from server.engine.tasks.residency import Residency
from server.engine.tasks.slots import HostCopy, Key, Loaded, Slot
from server.errors import ExtensionError, TaskUnavailable
from task_store import MissingParent, StoreUnavailable, TaskBundle, TaskStore, TaskStoreError

_THREADS: Final = 4

_log = logging.getLogger("engram.tasks")


@dataclass(frozen=True, slots=True)
class Prepared:
    """A bundle that has been checked and prepared, and answers its golden examples."""

    host: HostCopy
    loaded: Loaded


class TaskLoader:
    """Loads slots, and knows which have failed. Safe to use from any thread."""

    def __init__(
        self,
        store: TaskStore,
        preparer: TaskPreparer,
        residency: Residency,
        observer: EngineObserver,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._store = store
        self._preparer = preparer
        self._residency = residency
        self._observer = observer
        self._clock = clock
        self._prepared: dict[str, Prepared] = {}  # by digest, while a publish is under way
        self._failed: set[Slot] = set()
        self.base = _base_slot(preparer.base())

    @property
    def failed(self) -> tuple[Slot, ...]:
        """The bundles that could not be loaded when last tried."""
        return tuple(self._failed)

    def refusal(self, slot: Slot) -> str | None:
        """Why a slot cannot be loaded, if it failed and it is too early to try again."""
        failure = slot.failure
        if slot.ready or failure is None or slot.due(self._clock()):
            return None
        return failure.reason

    # Loading

    def load_all(self, slots: Collection[Slot]) -> None:
        """Load what is not loaded and not failed for now. Raises only if the store is away."""
        while due := [slot for slot in slots if not slot.ready and slot.due(self._clock())]:
            if len(due) == 1:
                self._try_to_load(due[0])
            else:
                with ThreadPoolExecutor(min(_THREADS, len(due)), "engram-load") as pool:
                    list(pool.map(self._try_to_load, due))
            self._tell_outage_from_fault(due)

    def _try_to_load(self, slot: Slot) -> None:
        with suppress(TaskUnavailable):
            self.load(slot)

    def _tell_outage_from_fault(self, slots: Iterable[Slot]) -> None:
        """A bundle that cannot be read is failed; when nothing can be read, none is to blame."""
        unread = [slot for slot in slots if slot.failure is not None and slot.failure.unreachable]
        if not unread:
            return
        try:
            self._store.refresh()
        except TaskStoreError:
            for slot in unread:
                self._forgive(slot)
            raise

    def load(self, slot: Slot, *, keep: bool = True) -> Loaded:
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
                raise self._fail(slot, error) from error
            self._forgive(slot)
            if not keep:
                return loaded
            loaded = self._residency.keep(slot, loaded)
        self._observer.task_loaded(slot.name, slot.version, time.perf_counter() - started)
        return loaded

    def _load(self, slot: Slot, *, keep: bool) -> Loaded:
        parents = tuple(self.load(parent, keep=keep) for parent in slot.parents)
        host = slot.host
        if host is not None:
            in_use = slot.still_in_use()
            if in_use is not None:
                return self._preparer.bind(slot.digest, host, in_use, parents)
            return self._preparer.prepare(slot.digest, host, parents)
        prepared = self._prepared.get(slot.digest)
        if prepared is None:
            bundle = self._store.read_bundle(slot.digest)
            if bundle.extends != tuple(parent.digest for parent in slot.parents):
                raise ExtensionError("it extends bundles that the store does not have")
            host = self._preparer.check(bundle)
            prepared = self._prepare(bundle, host, parents, (slot.name, slot.version))
        elif prepared.loaded.parents != parents:  # those were loaded for the check alone
            loaded = self._preparer.prepare(slot.digest, prepared.host, parents)
            prepared = Prepared(prepared.host, loaded)
        if keep and self._residency.may_evict:
            slot.host = prepared.host
        return prepared.loaded

    def _prepare(
        self, bundle: TaskBundle, host: HostCopy, parents: tuple[Loaded, ...], key: Key
    ) -> Prepared:
        loaded = self._preparer.prepare(bundle.digest, host, parents)
        self._preparer.replay_golden(bundle, loaded, key)
        return Prepared(host, loaded)

    def _fail(self, slot: Slot, error: Exception) -> TaskUnavailable:
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
        if slot.tracked:
            self._failed.add(slot)
        self._observer.task_failed(slot.name, slot.version)
        return TaskUnavailable(reason)

    def _forgive(self, slot: Slot) -> None:
        slot.failure = None
        self._failed.discard(slot)

    # Before a bundle is published

    def verify(self, bundle: TaskBundle, slots: Mapping[str, Slot]) -> Prepared:
        """Prepare a bundle, to see whether it could be served here beside `slots` (by digest).

        Raises IncompatibleBundle, MissingParent, TaskUnavailable (a parent has failed) or
        TaskMismatch. Nothing stays loaded that was not.
        """
        host = self._preparer.check(bundle)
        missing = [digest for digest in bundle.extends if digest not in slots]
        if missing:
            raise MissingParent(
                f"The bundle extends {', '.join(missing)}, which is not published: publish the "
                f"parent first.",
                names=missing,
            )
        parents = tuple(self.load(slots[digest], keep=False) for digest in bundle.extends)
        return self._prepare(bundle, host, parents, ("unpublished", None))

    @contextmanager
    def handing_over(self, prepared: Prepared) -> Iterator[None]:
        """While this lasts, the slot of that bundle is given what was prepared already."""
        digest = prepared.loaded.digest
        assert digest is not None
        self._prepared[digest] = prepared
        try:
            yield
        finally:
            self._prepared.pop(digest, None)

    # Letting go

    def forget(self, slots: Collection[Slot]) -> None:
        """Retired bundles: they live on only in the hands of requests."""
        self._residency.forget(slots)
        self._failed.difference_update(slots)

    def release(self, slots: Iterable[Slot]) -> None:
        """Bundles of unloaded tasks go from the devices and from host memory."""
        self._residency.release(slots)


def _base_slot(loaded: Loaded | None) -> Slot | None:
    """The backbone's own head is part of the backbone: always there, never counted."""
    if loaded is None:
        return None
    slot = Slot("")
    slot.loaded = loaded
    return slot
