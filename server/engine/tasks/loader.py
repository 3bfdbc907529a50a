"""Loads bundles onto the devices, notes which could not be, and gives requests their tasks.

A bundle comes from host memory, if it was evicted; from the publish that has just prepared it; or
from the store. One that cannot be served is failed alone, with its reason, and tried again later.

Golden examples are a bundle's own questions and answers. Replaying them through the server as it
runs catches what no shape tells: another preprocessing, the wrong placement of memory, a backbone
that only claims to be the right one. Two pictures are asked of every bundle, whatever it brings:
one whose answers are no numbers is refused before anybody asks it.
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

from server.engine.observer import EngineObserver
from server.engine.tasks.slots import HostCopy, Key, Loaded, Residency, Slot
from server.engine.tasks.snapshot import Match, Snapshot, unavailable
from server.engine.types import Floats, Pixels, ResidentTask
from server.errors import ExtensionError, TaskMismatch, TaskUnavailable
from server.model.backbone import Backbone
from server.model.golden import golden_pixels
from server.model.multitask import weights_of
from server.model.tasks import Task, base_task, prepare
from task_store import (
    GOLDEN_TOLERANCE,
    MissingParent,
    StoreUnavailable,
    TaskBundle,
    TaskStore,
    TaskStoreError,
    check_compatible,
)

Replay = Callable[[ResidentTask, Sequence[Pixels]], Floats]
ResolvedTasks = list[tuple[str, ResidentTask]]  # each with the reference that stands for it

# Relative to the largest golden logit, as GOLDEN_TOLERANCE is: bfloat16 keeps 8 bits, and a dozen
# layers add up their roundings.
HALF_PRECISION_TOLERANCE: Final = 5e-2
# The golden pictures are patches and noise, which eight bits move further than photos: 0.02 to 0.07
# for the demo tasks. Another backbone's answers differ by about as much as they are.
INT8_TOLERANCE: Final = 0.2
GOLDEN_TOLERANCES: Final = {
    "float32": GOLDEN_TOLERANCE,
    "bfloat16": HALF_PRECISION_TOLERANCE,
    "float16": HALF_PRECISION_TOLERANCE,
    "int8": INT8_TOLERANCE,
}
# No unit of measure needs a larger number, and eight powers of ten more are infinite in float32:
# another picture could get there.
LARGEST_ANSWER: Final = 1e30
_PASSED_REMEMBERED: Final = 4096
_THREADS: Final = 4

_log = logging.getLogger("engram.tasks")


@dataclass(frozen=True, slots=True)
class Prepared:
    """A bundle that has been checked and prepared, and answers the pictures it was asked."""

    host: HostCopy
    loaded: Loaded


class TaskPreparer:
    """Binds bundles to the backbone on every device, and asks them what they must know."""

    def __init__(self, backbones: Mapping[torch.device, Backbone], replay: Replay) -> None:
        self._backbones = dict(backbones)
        # On one of the devices: they are the same but for precision.
        self._backbone = next(iter(self._backbones.values()))
        self._replay = replay
        self._pictures = golden_pixels(self._backbone.image_size)
        precisions = {one.precision for one in self._backbones.values()}
        self._tolerance = max(GOLDEN_TOLERANCES[precision] for precision in precisions)
        # Digests that answered right: a bundle that is loaded again is not replayed again.
        self._passed: OrderedDict[str | None, None] = OrderedDict()

    def base(self) -> Slot | None:
        """The backbone's own head, where it has one: always there, never counted."""
        head = self._backbone.base
        if head is None:
            return None
        tasks = {device: base_task(backbone) for device, backbone in self._backbones.items()}
        on = {device: task for device, task in tasks.items() if task is not None}
        slot = Slot("")
        slot.loaded = Loaded(None, head.problem, head.labels, MappingProxyType(on))
        return slot

    def check(self, bundle: TaskBundle) -> HostCopy:
        """What of a bundle is kept in host memory; IncompatibleBundle if it is not for us."""
        backbone = self._backbone
        check_compatible(
            bundle,
            fingerprint=backbone.fingerprint,
            layers=backbone.layers,
            width=backbone.width,
            preprocessing=backbone.preprocessing.to_json(),
            image_size=backbone.image_size,
        )
        return HostCopy(weights_of(bundle), bundle.problem, bundle.labels)

    def prepare(self, digest: str, host: HostCopy, parents: tuple[Loaded, ...]) -> Loaded:
        """Tensors on every device. Parents are shared: their tasks are these very objects."""
        on: dict[torch.device, Task] = {}
        for device, backbone in self._backbones.items():
            with torch.no_grad():
                on[device] = prepare(backbone, host.weights, [one.on[device] for one in parents])
            if device.type == "cuda":
                # The worker may use another stream: hand over nothing that is still on its way.
                torch.cuda.current_stream(device).synchronize()
        return Loaded(digest, host.problem, host.labels, MappingProxyType(on), parents)

    def examine(self, bundle: TaskBundle, loaded: Loaded, key: Key) -> None:
        """TaskMismatch unless all answers are usable, and the bundle's golden ones right."""
        if loaded.digest in self._passed:
            return
        pixels, expected = bundle.golden_pixels, bundle.golden_logits
        pictures = list(self._pictures)
        if pixels is not None and not np.array_equal(pixels, self._pictures):
            # Copies: a bundle's arrays are read-only, which torch cannot express.
            pictures += [image.copy() for image in pixels]
        got = self._replay(loaded.served_as(key), pictures)
        check_usable(got)
        if expected is not None:
            check_golden(got[-len(expected) :], expected, self._tolerance)
        self._passed[loaded.digest] = None
        while len(self._passed) > _PASSED_REMEMBERED:
            self._passed.popitem(last=False)


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
        self._ticks = itertools.count(1)  # a clock of requests: who was used longest ago?
        self.base = preparer.base()

    @property
    def failed(self) -> tuple[Slot, ...]:
        """The bundles that could not be loaded when last tried."""
        return tuple(self._failed)

    # The tasks of a request

    def resolve(self, snapshot: Snapshot, refs: Sequence[str] | None) -> ResolvedTasks | None:
        """The tasks references stand for; None if one must be loaded first. Never waits.

        Without references: every ready task. Raises UnknownTask or TaskUnavailable.
        """
        matches = snapshot.find(refs)
        tick = next(self._ticks)
        resolved: ResolvedTasks = []
        for match in matches:
            loaded = match.slot.loaded
            if loaded is None:
                self._refuse_failed(matches)
                return None
            match.slot.used = tick
            resolved.append((match.ref, loaded.served_as(match.key)))
        return resolved

    def _refuse_failed(self, matches: Iterable[Match]) -> None:
        """TaskUnavailable if some have failed and it is too early to try again."""
        now = self._clock()
        reasons = {
            match.ref: failure.reason
            for match in matches
            if (failure := match.slot.failure) is not None
            and not match.slot.ready
            and not match.slot.due(now)
        }
        if reasons:
            raise unavailable(reasons)

    def resolve_loading(self, snapshot: Snapshot, refs: Sequence[str] | None) -> ResolvedTasks:
        """Like `resolve`, and loads what is missing. Blocks: not for the event loop."""
        tick = next(self._ticks)
        resolved: ResolvedTasks = []
        reasons: dict[str, str] = {}
        for match in snapshot.find(refs):
            match.slot.used = tick
            try:
                loaded = self.load(match.slot)
            except TaskUnavailable as error:
                reasons[match.ref] = str(error)
            else:
                resolved.append((match.ref, loaded.served_as(match.key)))
        if reasons:
            raise unavailable(reasons)
        return resolved

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
                return Loaded(slot.digest, host.problem, host.labels, in_use, parents)
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
        self._preparer.examine(bundle, loaded, key)
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


def check_usable(got: Floats) -> None:
    """Raise TaskMismatch unless answers are finite, and far enough from where they would not be."""
    if not np.isfinite(got).all():
        raise TaskMismatch(
            "its answers are not finite numbers: its weights are too large to compute with"
        )
    largest = float(np.abs(got).max(initial=0.0))
    if largest > LARGEST_ANSWER:
        raise TaskMismatch(
            f"it answers {largest:.3g}, and no answer may be beyond {LARGEST_ANSWER:.0e}: its "
            f"weights are too large to compute with"
        )


def check_golden(got: Floats, expected: Floats, tolerance: float) -> None:
    """Raise TaskMismatch unless the logits agree within `tolerance` of the largest (at least 1)."""
    if got.shape != expected.shape:
        raise TaskMismatch(
            f"its golden answers have the shape {expected.shape}, and the replay gave {got.shape}"
        )
    allowed = tolerance * max(1.0, float(np.abs(expected).max()))
    difference = float(np.abs(got - expected).max())
    # Written so that NaN is refused too.
    if not difference <= allowed:
        raise TaskMismatch(
            f"its golden answers differ by {difference:.3g}, and at most {allowed:.3g} is allowed: "
            f"it was trained with another backbone, placement of memory or preprocessing"
        )
