"""Loads bundles onto the devices and gives requests their tasks.

A bundle comes from host memory if it was evicted, from the publish that has just prepared it, or
from the store. A bundle that cannot be served fails alone, with a reason, and is retried later.

Golden examples are images with expected answers inside a bundle. Replaying them through the
running server detects what shapes cannot show: different preprocessing, the wrong memory placement,
a backbone with a false fingerprint. Every bundle is also tested with two standard images, so one
whose answers are not finite is rejected before it serves requests.
"""

import itertools
import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

import numpy as np
import torch
from engram_bundle import GOLDEN_TOLERANCE, TaskBundle, TaskStoreError, check_compatible
from engram_bundle.names import BASE_TASK
from engram_store import Publish, StoreUnavailable, TaskStore

from engram_server.engine import types
from engram_server.engine.observer import TASK_LOAD_FAILURES, TASK_LOAD_SECONDS, EngineObserver
from engram_server.engine.tasks.slots import Residency, Slot
from engram_server.engine.tasks.snapshot import ResolvedTask, Snapshot, unavailable
from engram_server.errors import ExtensionError, TaskMismatch, TaskUnavailable
from engram_server.model.backbone import Backbone
from engram_server.model.preprocessing.pipeline import golden_pixels
from engram_server.model.tasks import Task, TaskWeights, base_task, prepare

Replay = Callable[[types.ServedTask, Sequence[types.Pixels]], types.Floats]
ServedTasks = dict[str, types.ServedTask]  # by reference

# Relative to the largest golden logit, like GOLDEN_TOLERANCE: bfloat16 has 8 bits of precision, and
# the rounding errors of a dozen layers add up.
HALF_PRECISION_TOLERANCE: Final = 5e-2
# The golden images are patches and noise, for which int8 deviates more than for photos: 0.02 to
# 0.07 on the demo tasks. With another backbone, answers differ by about their own magnitude.
INT8_TOLERANCE: Final = 0.2
GOLDEN_TOLERANCES: Final = {
    "float32": GOLDEN_TOLERANCE,
    "bfloat16": HALF_PRECISION_TOLERANCE,
    "float16": HALF_PRECISION_TOLERANCE,
    "int8": INT8_TOLERANCE,
}
# No unit of measure needs a larger number. float32 overflows eight powers of ten higher, which
# another image could reach.
LARGEST_ANSWER: Final = 1e30
_REMEMBERED_DIGESTS: Final = 4096
_THREADS: Final = 4
# Stands for a bundle that has no name yet.
_CANDIDATE: Final = "candidate"

_log = logging.getLogger("engram.tasks")


@dataclass(frozen=True, slots=True)
class Prepared:
    """A bundle that passed all checks: its weights in host memory and on the devices."""

    host: types.HostCopy
    loaded: types.LoadedBundle


class TaskPreparer:
    """Binds bundles to the backbone on every device and tests their answers."""

    def __init__(self, backbones: Mapping[torch.device, Backbone], replay: Replay) -> None:
        self._backbones = dict(backbones)
        # Any of them: they differ only in precision.
        self._backbone = next(iter(self._backbones.values()))
        self._replay = replay
        self._images = golden_pixels(self._backbone.image_size)
        precisions = {one.precision for one in self._backbones.values()}
        self._tolerance = max(GOLDEN_TOLERANCES[precision] for precision in precisions)
        # Digests that passed: a bundle that is loaded again is not replayed again.
        self._passed: OrderedDict[str | None, None] = OrderedDict()

    def base(self) -> ResolvedTask | None:
        """The backbone's classifier as a task, if it has one. It is never evicted."""
        head = self._backbone.base
        if head is None:
            return None
        tasks = {device: base_task(backbone) for device, backbone in self._backbones.items()}
        on = {device: task for device, task in tasks.items() if task is not None}
        slot = Slot("")
        slot.loaded = types.LoadedBundle(None, head.task_type, head.labels, MappingProxyType(on))
        return ResolvedTask(BASE_TASK, BASE_TASK, None, head.task_type, head.classes, slot)

    def check(self, bundle: TaskBundle) -> types.HostCopy:
        """Check a bundle against the backbone (IncompatibleBundle) and copy its weights."""
        backbone = self._backbone
        check_compatible(
            bundle,
            fingerprint=backbone.fingerprint,
            layers=backbone.layers,
            width=backbone.width,
            preprocessing=backbone.preprocessing,
            image_size=backbone.image_size,
        )
        return types.HostCopy(TaskWeights.from_bundle(bundle), bundle.task_type, bundle.labels)

    def prepare(
        self, digest: str, host: types.HostCopy, parents: tuple[types.LoadedBundle, ...]
    ) -> types.LoadedBundle:
        """Put the tensors on every device. Those of the parents are shared."""
        on: dict[torch.device, Task] = {}
        for device, backbone in self._backbones.items():
            with torch.no_grad():
                on[device] = prepare(backbone, host.weights, [one.on[device] for one in parents])
            if device.type == "cuda":
                # The worker may use another stream: wait until the tensors are complete.
                torch.cuda.current_stream(device).synchronize()
        return _loaded(digest, host, MappingProxyType(on), parents)

    def test_answers(
        self, bundle: TaskBundle, loaded: types.LoadedBundle, key: types.VersionKey
    ) -> None:
        """TaskMismatch unless all answers are finite and the golden ones match."""
        if loaded.digest in self._passed:
            return
        pixels, expected = bundle.get("golden.pixels"), bundle.get("golden.logits")
        images = list(self._images)
        if pixels is not None and not np.array_equal(pixels, self._images):
            # Copies: a bundle's arrays are read-only, which torch cannot express.
            images += [image.copy() for image in pixels]
        logits = self._replay(loaded.served_as(key), images)
        check_finite(logits)
        if expected is not None:
            check_golden(logits[-len(expected) :], expected, self._tolerance)
        self._passed[loaded.digest] = None
        while len(self._passed) > _REMEMBERED_DIGESTS:
            self._passed.popitem(last=False)


class TaskLoader:
    """Loads slots and records which failed. Thread-safe."""

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
        self._prepared: dict[str, Prepared] = {}  # by digest, during a publish
        self._failed: set[Slot] = set()
        self._ticks = itertools.count(1)  # a logical clock of requests, for LRU eviction
        self.base = preparer.base()

    @property
    def failed(self) -> tuple[Slot, ...]:
        return tuple(self._failed)

    def served_tasks(self, tasks: Sequence[ResolvedTask]) -> ServedTasks | None:
        """The tasks on the devices; None if one must be loaded, TaskUnavailable if it failed."""
        tick = next(self._ticks)
        served: ServedTasks = {}
        for task in tasks:
            loaded = task.slot.loaded
            if loaded is None:
                self._raise_if_failed(tasks)
                return None
            task.slot.used = tick
            served[task.reference] = loaded.served_as(task.key)
        return served

    def canaries_of(self, tasks: Iterable[ResolvedTask]) -> dict[types.ServedTask, types.Canary]:
        """The canaries of tasks that are on the devices, by the task that they stand in for."""
        found: dict[types.ServedTask, types.Canary] = {}
        for task in tasks:
            loaded, own = None if task.canary is None else task.canary.slot.loaded, task.slot.loaded
            if task.canary is not None and loaded is not None and own is not None:
                task.canary.slot.used = task.slot.used
                canary = types.Canary(loaded.served_as(task.canary.key), task.canary_share)
                found[own.served_as(task.key)] = canary
        return found

    def shadows_of(self, tasks: Iterable[ResolvedTask]) -> tuple[types.ServedTask, ...]:
        """The shadows of tasks that are on the devices; a request waits for none."""
        requested = {task.key for task in tasks}
        found: dict[types.ServedTask, None] = {}
        for task in tasks:
            for shadow in task.shadows:
                loaded = shadow.slot.loaded
                if loaded is not None and shadow.key not in requested:
                    shadow.slot.used = task.slot.used
                    found[loaded.served_as(shadow.key)] = None
        return tuple(found)

    def _raise_if_failed(self, tasks: Iterable[ResolvedTask]) -> None:
        now = self._clock()
        reasons = {
            task.reference: failure.reason
            for task in tasks
            if (failure := task.slot.failure) is not None
            and not task.slot.ready
            and not task.slot.due(now)
        }
        if reasons:
            raise unavailable(reasons)

    def load_served_tasks(self, tasks: Sequence[ResolvedTask]) -> ServedTasks:
        """Like `served_tasks`, but loads what is missing. Blocks."""
        tick = next(self._ticks)
        served: ServedTasks = {}
        reasons: dict[str, str] = {}
        for task in tasks:
            task.slot.used = tick
            try:
                loaded = self.load(task.slot)
            except TaskUnavailable as error:
                reasons[task.reference] = str(error)
            else:
                served[task.reference] = loaded.served_as(task.key)
        if reasons:
            raise unavailable(reasons)
        return served

    def load_all(self, slots: Collection[Slot]) -> None:
        """Load the slots that are due. Raises only if the store cannot be read."""
        while due := [slot for slot in slots if not slot.ready and slot.due(self._clock())]:
            if len(due) == 1:
                self._try_to_load(due[0])
            else:
                with ThreadPoolExecutor(min(_THREADS, len(due)), "engram-load") as pool:
                    list(pool.map(self._try_to_load, due))
            self._raise_if_store_is_down(due)

    def _try_to_load(self, slot: Slot) -> None:
        with suppress(TaskUnavailable):
            self.load(slot)

    def _raise_if_store_is_down(self, slots: Iterable[Slot]) -> None:
        """Blame the store, not the bundles, if nothing can be read."""
        unread = [slot for slot in slots if slot.failure is not None and slot.failure.unreachable]
        if not unread:
            return
        try:
            self._store.refresh()
        except TaskStoreError:
            for slot in unread:
                self._clear_failure(slot)
            raise

    def load(self, slot: Slot, *, keep: bool = True) -> types.LoadedBundle:
        """Load a slot if necessary; TaskUnavailable, with the bare reason, if that fails.

        With `keep=False`, a bundle that had to be loaded does not become resident.
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
                # One broken bundle must not affect the others.
                raise self._fail(slot, error) from error
            self._clear_failure(slot)
            if not keep:
                return loaded
            loaded = self._residency.keep(slot, loaded)
        self._observer.record(TASK_LOAD_SECONDS, time.perf_counter() - started)
        return loaded

    def _load(self, slot: Slot, *, keep: bool) -> types.LoadedBundle:
        parents = tuple(self.load(parent, keep=keep) for parent in slot.parents)
        host = slot.host
        if host is not None:
            in_use = slot.still_in_use()
            if in_use is not None:
                return _loaded(slot.digest, host, in_use, parents)
            return self._preparer.prepare(slot.digest, host, parents)
        prepared = self._prepared.get(slot.digest)
        if prepared is None:
            bundle = self._store.read_bundle(slot.digest)
            if bundle.extends != tuple(parent.digest for parent in slot.parents):
                raise ExtensionError("it extends bundles that the store does not have")
            host = self._preparer.check(bundle)
            prepared = self._prepare(bundle, host, parents, (slot.name, slot.version))
        elif prepared.loaded.parents != parents:  # those were loaded for the check only
            loaded = self._preparer.prepare(slot.digest, prepared.host, parents)
            prepared = Prepared(prepared.host, loaded)
        if keep and self._residency.may_evict:
            slot.host = prepared.host
        return prepared.loaded

    def _prepare(
        self,
        bundle: TaskBundle,
        host: types.HostCopy,
        parents: tuple[types.LoadedBundle, ...],
        key: types.VersionKey,
    ) -> Prepared:
        loaded = self._preparer.prepare(bundle.digest, host, parents)
        self._preparer.test_answers(bundle, loaded, key)
        return Prepared(host, loaded)

    def _fail(self, slot: Slot, error: Exception) -> TaskUnavailable:
        message = str(error) or type(error).__name__
        reason = error.public_message if isinstance(error, TaskStoreError) else message
        cause = next((parent for parent in slot.parents if parent.failure is not None), None)
        if isinstance(error, TaskUnavailable) and cause is not None:
            reason = f"it extends {cause.ref}, which cannot be served: {reason}"
        else:
            cause = None
        if isinstance(error, TaskStoreError | TaskUnavailable | ExtensionError):
            _log.warning("task %s cannot be served: %s", slot.ref, message)
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
        self._observer.record_task(TASK_LOAD_FAILURES, slot.name, slot.version)
        return TaskUnavailable(reason)

    def _clear_failure(self, slot: Slot) -> None:
        slot.failure = None
        self._failed.discard(slot)

    def verify(self, bundle: TaskBundle, snapshot: Snapshot) -> Prepared:
        """Prepare a bundle to see whether this server could serve it. Nothing stays loaded."""
        host = self._preparer.check(bundle)
        Publish(_CANDIDATE, bundle).plan(snapshot.catalog)  # the store's rules about parents
        parents = tuple(self.load(snapshot.slots[digest], keep=False) for digest in bundle.extends)
        return self._prepare(bundle, host, parents, (_CANDIDATE, None))

    @contextmanager
    def reuse(self, prepared: Prepared) -> Iterator[None]:
        """Within this block, loading that bundle takes what was prepared already."""
        digest = prepared.loaded.digest
        assert digest is not None
        self._prepared[digest] = prepared
        try:
            yield
        finally:
            self._prepared.pop(digest, None)

    def forget(self, slots: Collection[Slot]) -> None:
        self._residency.forget(slots)
        self._failed.difference_update(slots)

    def release(self, slots: Iterable[Slot]) -> None:
        """Remove bundles of unloaded tasks from the devices and from host memory."""
        self._residency.release(slots)


def _loaded(
    digest: str,
    host: types.HostCopy,
    on: Mapping[torch.device, Task],
    parents: tuple[types.LoadedBundle, ...],
) -> types.LoadedBundle:
    return types.LoadedBundle(digest, host.task_type, host.labels, on, parents, host.weights.drift)


def check_finite(logits: types.Floats) -> None:
    """Raise TaskMismatch unless answers are finite and far from overflow."""
    if not np.isfinite(logits).all():
        raise TaskMismatch("its answers are not finite: its weights are too large")
    largest = float(np.abs(logits).max(initial=0.0))
    if largest > LARGEST_ANSWER:
        raise TaskMismatch(
            f"its answer {largest:.3g} exceeds the limit of {LARGEST_ANSWER:.0e}: its weights are "
            f"too large"
        )


def check_golden(logits: types.Floats, expected: types.Floats, tolerance: float) -> None:
    """Raise TaskMismatch unless the logits agree within `tolerance` of the largest (at least 1)."""
    if logits.shape != expected.shape:
        raise TaskMismatch(
            f"its golden answers have the shape {expected.shape}, and the replay returned "
            f"{logits.shape}"
        )
    allowed = tolerance * max(1.0, float(np.abs(expected).max()))
    difference = float(np.abs(logits - expected).max())
    # Negated, so that NaN is rejected too.
    if not difference <= allowed:
        raise TaskMismatch(
            f"its golden answers differ by {difference:.3g} (at most {allowed:.3g} is allowed): it "
            f"was trained with another backbone, memory placement or preprocessing"
        )
