"""The engine: what a request goes through, from admission to its answers.

Admission → decoding in threads → queue → one worker thread per device → answers. A request pins the
catalog snapshot it started with, so all its answers are of one generation.
"""

import asyncio
import hashlib
import math
import os
import socket
import time
import uuid
from collections.abc import AsyncIterator, Coroutine, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from typing import Any, TypeVar

import numpy as np
import torch

from server.engine.context_cache import ContextCache, ContextKey
from server.engine.decoding_memory import DecodingMemory
from server.engine.lessons import Teacher
from server.engine.observer import EngineObserver
from server.engine.queue import Job, JobQueue, JobResult
from server.engine.replicas import Replicas
from server.engine.tasks.changes import TaskChanges
from server.engine.tasks.follower import StoreFollower
from server.engine.tasks.loader import TaskLoader, TaskPreparer
from server.engine.tasks.slots import Residency
from server.engine.tasks.snapshot import Snapshot
from server.engine.types import (
    EngineStatus,
    Floats,
    ImageAnswer,
    Pixels,
    PredictAnswer,
    PredictRequest,
    ResidentTask,
    ServedTask,
    Timeline,
    Timings,
)
from server.engine.worker import Worker
from server.engine.workers import Workers
from server.errors import (
    ContextNotCached,
    DeadlineExceeded,
    DeviceFailed,
    Draining,
    EngramError,
    GenerationNotReached,
    ImageError,
    Overloaded,
)
from server.model.backbone import Backbone
from server.model.context import Context
from server.model.tasks import TaskWeights, prepare
from server.model.text import TextTower
from task_store import Entry, Heartbeat, TaskBundle, TaskStore, replica_id

T = TypeVar("T")
# An image's digest, and its context or else its pixels.
_Decoded = tuple[str, Pixels | None, Context | None]

_LONGEST_RETRY_SECONDS = 30.0
GOLDEN_CACHE_BYTES = 64 * 2**20


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """How the engine is sized. `devices` may name one device twice: two workers share it."""

    devices: tuple[str, ...] = ("cpu",)
    dtype: torch.dtype = torch.float32
    int8: bool = False  # whether the backbone's matrices are in eight bits; on CPUs only
    budget_rows: int = 4096
    queue_images: int = 256
    decode_threads: int = field(default_factory=lambda: os.cpu_count() or 1)
    max_pixels: int = 64_000_000
    decoded_bytes: int = 1 << 30  # of all images being decoded
    cache_bytes: int = 1 << 30
    cache_dtype: torch.dtype | None = torch.float16
    cache_device: str | None = "cpu"  # None keeps contexts on the device that made them
    resident_bytes: int | None = None
    pinned_tasks: frozenset[str] = frozenset()
    poll_seconds: float = 1.0
    heartbeat_seconds: float | None = None  # None: say nothing to other servers of the store
    address: str | None = None  # where others may find this server
    version: str = ""  # of this software
    compiled: bool = False


class Engine:
    """One backbone, its workers and its tasks. `start` before use, `stop` after."""

    def __init__(
        self,
        backbone: Backbone,
        store: TaskStore,
        config: EngineConfig,
        observer: EngineObserver,
        *,
        text_tower: TextTower | None = None,
    ) -> None:
        self.text_tower = text_tower  # None: tasks are taught by photos alone
        self.config = config
        self._store = store
        self._observer = observer
        self._queue = JobQueue(observer.queue_depth)
        self.cache = ContextCache(
            config.cache_bytes,
            dtype=config.cache_dtype,
            device=None if config.cache_device is None else torch.device(config.cache_device),
            observer=observer,
        )
        self._golden = _golden_contexts()
        devices = {_device(name) for name in config.devices}
        backbones = {device: _placed(backbone, device, config) for device in devices}
        self.backbone = next(iter(backbones.values()))
        makers = [
            partial(self._worker, number, backbones[_device(name)])
            for number, name in enumerate(config.devices)
        ]
        self._workers = Workers(makers, self._queue, observer)
        self._reader = _feature_reader(backbones)
        self._loader = TaskLoader(
            store,
            TaskPreparer(backbones, self._replay),
            Residency(config.resident_bytes, observer),
            observer,
        )
        self.replica_id = replica_id(socket.gethostname(), uuid.uuid4().hex[:8])
        self._born = datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
        self.replicas: Replicas | None = None
        if config.heartbeat_seconds is not None:
            self.replicas = Replicas(store.heartbeats, self.heartbeat, observer)
        self._follower = StoreFollower(
            store,
            self._loader,
            observer,
            poll_seconds=config.poll_seconds,
            pinned=config.pinned_tasks,
            on_served=(lambda: None) if self.replicas is None else self.replicas.wake,
        )
        self._offer_changes(TaskChanges(store, self._follower, self._loader))
        self.store_url = store.url
        self._decoding = DecodingMemory(config.decoded_bytes, observer)
        self._decoders = ThreadPoolExecutor(config.decode_threads, "engram-decode")
        self._loaders = ThreadPoolExecutor(1, "engram-load")
        self._catching_up = ThreadPoolExecutor(1, "engram-catch-up")
        self.pending_images = 0  # admitted and not answered yet
        self._started = False
        self._draining = False
        self._idle: asyncio.Event | None = None

    def _offer_changes(self, changes: TaskChanges) -> None:
        """Catching up and changing tasks, for the API: all of it blocks."""
        self.sync = self._follower.sync
        self.change = changes.make
        self.validate = changes.validate
        self.reload = changes.reload
        self.unload = self._follower.unload
        teacher = Teacher(self.backbone, self._store, self.text_tower)
        self.teach = teacher.teach
        self.examples = teacher.examples
        self.correct = teacher.correct
        self.corrections = self._store.corrections.read

    def _worker(self, number: int, backbone: Backbone) -> Worker:
        return Worker(
            f"engram-worker-{number}",
            backbone,
            self._queue,
            self._observer,
            budget_rows=self.config.budget_rows,
            compiled=self.config.compiled,
        )

    # Starting and stopping

    def start(self) -> None:
        """Warms the workers up and reads the store. Blocks; raises what stops it."""
        self._workers.start()
        self._follower.start()
        if self.replicas is not None:
            # Become one of the store's servers before the first request.
            if self.replicas.beat():
                # A change made before we could be seen did not wait for us: we must have it.
                self.sync()
            self.replicas.start()
        self._started = True

    def heartbeat(self) -> Heartbeat:
        """What this server is, and what it serves now."""
        return Heartbeat(
            id=self.replica_id,
            generation=self.snapshot.generation,
            interval=self.config.heartbeat_seconds or math.inf,
            hostname=socket.gethostname(),
            address=self.config.address,
            started=self._born,
            version=self.config.version,
            backbone=self.backbone.name,
            fingerprint=self.backbone.fingerprint,
        )

    @property
    def status(self) -> EngineStatus:
        reasons = []
        if not self._started:
            reasons.append("the backbone is warming up and the task store is being read")
        if self._draining:
            reasons.append("the server is shutting down")
        snapshot = self.snapshot
        return EngineStatus(
            reasons=tuple(dict.fromkeys([*reasons, *self._workers.problems, *self.broken])),
            generation=snapshot.generation,
            generation_seen=self._follower.generation_seen,
            seconds_since_read=self._follower.seconds_since_poll,
            store_error=self._follower.store_error,
            tasks_ready=len(snapshot.ready_names),
            versions_failed=snapshot.versions_of(self._loader.failed),
            pending_images=self.pending_images,
        )

    @property
    def broken(self) -> tuple[str, ...]:
        """What only a new process repairs."""
        broken = list(self._workers.lost)
        if not self._follower.alive:
            broken.append("the task store is no longer followed")
        if self.replicas is not None and not self.replicas.alive:
            broken.append("this server no longer tells the others that it is there")
        return tuple(broken)

    async def drain(self, timeout: float) -> bool:
        """Refuses new work and waits for what was accepted. False if that took too long."""
        self._draining = True
        if self.pending_images == 0:
            return True
        self._idle = asyncio.Event()
        try:
            async with asyncio.timeout(timeout):
                await self._idle.wait()
        except TimeoutError:
            return False
        return True

    def stop(self) -> None:
        self._draining = True
        if self.replicas is not None:
            self.replicas.stop()
        self._follower.stop()
        self._queue.close()
        self._workers.stop()
        for pool in (self._decoders, self._loaders, self._catching_up):
            pool.shutdown(wait=False, cancel_futures=True)

    # Predicting: admission, the tasks, each image, the answer

    async def predict(self, request: PredictRequest) -> PredictAnswer:
        """Answers a request. Cancelling the caller withdraws what still waits."""
        started = time.monotonic()
        async with self._admitted(request, started):
            return await self._predict(request, started)

    async def _predict(self, request: PredictRequest, started: float) -> PredictAnswer:
        snapshot = await self.snapshot_for(request.tasks, request.at_least)
        references = request.references(snapshot.ready_names)
        resolved = self._loader.resolve(snapshot, references)
        if resolved is None:
            resolved = await asyncio.get_running_loop().run_in_executor(
                self._loaders, self._loader.resolve_loading, snapshot, references
            )
        tasks = tuple(dict.fromkeys(task for _, task in resolved))
        request.timelines[:] = [Timeline() for _ in request.images]
        results = await _gather(
            [
                self._predict_image(image, tasks, request, timeline)
                for image, timeline in zip(request.images, request.timelines, strict=True)
            ]
        )
        for task in tasks:
            self._observer.predicted(task.served.name, task.served.version)
        images = [
            ImageAnswer(digest, result.cache, {ref: result.answers[task] for ref, task in resolved})
            for digest, result in results
        ]
        for image in images:
            for answer in image.tasks.values():
                if answer.error is not None:
                    self._observer.not_finite(answer.served.name, answer.served.version)
        stages = {
            stage: max(getattr(timeline, stage).seconds for timeline in request.timelines)
            for stage in ("queue", "decode", "forward")
        }
        for stage, seconds in stages.items():
            self._observer.stage(stage, seconds)
        timings = Timings(**stages, total=time.monotonic() - started)
        return PredictAnswer(snapshot.generation, self.backbone.name, images, timings)

    async def read_features(
        self, request: PredictRequest, names: Sequence[str]
    ) -> list[tuple[str, Floats | None]]:
        """Each image's digest and the backbone's class token of it, as a head reads it, (D,).

        None where a digest is given whose context is not cached (any more). An image that cannot
        be read is told by its name.
        """

        async def read(image: bytes | str, name: str) -> tuple[str, Floats | None]:
            try:
                digest, result = await self._predict_image(
                    image, (self._reader,), request, Timeline()
                )
            except ContextNotCached:
                return str(image), None
            except ImageError as error:
                raise type(error)(f"{name}: {error}") from error
            return digest, result.answers[self._reader].features

        started = time.monotonic()
        async with self._admitted(request, started):
            images = [image for image in request.images if isinstance(image, bytes | str)]
            return await _gather([read(*each) for each in zip(images, names, strict=True)])

    # Admission

    def check_room(self, images: int = 1) -> None:
        """Refuses what could not be admitted now, before anybody takes the trouble to read it."""
        limit = self.config.queue_images
        if self.pending_images + images > limit:
            self._observer.rejected("queue_full")
            raise Overloaded(
                f"{self.pending_images} images are being worked on and the limit is {limit}; "
                "try again later",
                retry_after=self._retry_after(),
            )

    def _check_open(self) -> None:
        if self._draining:
            self._observer.rejected("draining")
            raise Draining("the server is shutting down and takes no new requests")
        if not self._started:
            self._observer.rejected("starting")
            raise Draining("the server is starting and takes no requests yet")
        problems = self._workers.problems
        if problems:
            self._observer.rejected("device")
            raise DeviceFailed("; ".join(problems))

    @asynccontextmanager
    async def _admitted(self, request: PredictRequest, started: float) -> AsyncIterator[None]:
        """Room for a request's images, or an immediate refusal; and no longer than its deadline."""
        self._check_open()
        images = len(request.images)
        self.check_room(images)
        self.pending_images += images
        self._observer.admitted(images)
        left = None if request.deadline is None else request.deadline - time.monotonic()
        try:
            async with asyncio.timeout(left):
                yield
        except (TimeoutError, DeadlineExceeded) as error:
            self._observer.rejected("deadline")
            seconds = time.monotonic() - started
            raise DeadlineExceeded(
                f"the deadline passed after {seconds:.3f} s, before there was an answer"
            ) from error
        finally:
            self.pending_images -= images
            if self.pending_images == 0 and self._idle is not None:
                self._idle.set()

    def _retry_after(self) -> float:
        """When about half of what waits will be done, at the speed of late."""
        speed = self._workers.rows_per_second
        if speed == 0:
            return 1.0
        rows = self.pending_images * self.backbone.geometry.tokens / 2
        return min(max(math.ceil(rows / speed), 1), _LONGEST_RETRY_SECONDS)

    # The tasks of a request

    async def snapshot_for(
        self, refs: Sequence[str] | None, at_least: int | None = None
    ) -> Snapshot:
        """What a request that starts now is answered by.

        One that needs a version or generation this server has not reached waits until the store
        was polled once, and shares that poll with all others that do. GenerationNotReached if the
        store has not got there, StoreUnavailable if it cannot be read.
        """
        snapshot = self.snapshot
        if not snapshot.lacks(refs, at_least):
            return snapshot
        loop = asyncio.get_running_loop()
        snapshot = await loop.run_in_executor(
            self._catching_up, self._follower.catch_up, self._follower.polls
        )
        if at_least is not None and snapshot.generation < at_least:
            raise GenerationNotReached(
                f"generation {at_least} was asked for, and the task store is at "
                f"{snapshot.generation}"
            )
        return snapshot

    # One image: decoding, then the queue to the workers

    async def _predict_image(
        self,
        image: bytes | str | Floats,
        tasks: tuple[ResidentTask, ...],
        request: PredictRequest,
        timeline: Timeline,
    ) -> tuple[str, JobResult]:
        future: Future[JobResult] = Future()
        if isinstance(image, str):
            self._enqueue(self._cached(image, request.owner), tasks, request, timeline, future)
        else:
            # From its thread straight into the queue: the event loop need not wake up in between.
            self._queue.expect()
            self._decoders.submit(self._decode_and_enqueue, image, tasks, request, timeline, future)
        result = await asyncio.wrap_future(future)
        return timeline.digest, result

    def _decode_and_enqueue(
        self,
        image: bytes | Floats,
        tasks: tuple[ResidentTask, ...],
        request: PredictRequest,
        timeline: Timeline,
        future: Future[JobResult],
    ) -> None:
        """In a decoding thread. What fails there fails the future."""
        try:
            if future.cancelled():
                return
            decoded = self._decode(image, request, timeline)
            self._enqueue(decoded, tasks, request, timeline, future)
        except BaseException as error:  # noqa: BLE001 - the boundary of the thread
            if future.set_running_or_notify_cancel():
                future.set_exception(error)
        finally:
            self._queue.decoded()

    def _enqueue(
        self,
        decoded: _Decoded,
        tasks: tuple[ResidentTask, ...],
        request: PredictRequest,
        timeline: Timeline,
        future: Future[JobResult],
    ) -> None:
        timeline.digest, pixels, context = decoded
        if context is None:
            self._observer.cache_miss()
        else:
            self._observer.cache_hit()
        job = Job(
            key=self._context_key(timeline.digest, request.owner),
            tasks=tasks,
            pixels=pixels,
            context=context,
            deadline=request.deadline,
            features=request.features,
            attention=request.attention,
            cache=self.cache if self.cache.enabled else None,
            timeline=timeline,
            future=future,
        )
        timeline.queue.started = time.monotonic()
        self._queue.put(job)

    def _cached(self, digest: str, owner: str | None) -> _Decoded:
        """An image that was sent before, by its digest alone."""
        context = self.cache.get(self._context_key(digest, owner))
        if context is None:
            raise ContextNotCached(
                f"the image {digest} is not held here (any more); send its bytes once again"
            )
        return digest, None, context

    def _decode(
        self, image: bytes | Floats, request: PredictRequest, timeline: Timeline
    ) -> _Decoded:
        """In a decoding thread."""
        timeline.decode.started = time.monotonic()
        if isinstance(image, bytes):
            digest = f"sha256:{hashlib.sha256(image).hexdigest()}"
        else:
            # A name of another kind: a file of the same bytes is another image.
            digest = f"pixels:{hashlib.sha256(image.tobytes()).hexdigest()}"
        context = self.cache.get(self._context_key(digest, request.owner))
        pixels: Pixels | None = None
        if context is None and isinstance(image, bytes):
            pixels = self.backbone.preprocessing(
                image,
                max_pixels=self.config.max_pixels,
                reserve=partial(self._decoding.reserved, deadline=request.deadline),
            )
        elif not isinstance(image, bytes):
            pixels = image
        timeline.decode.ended = time.monotonic()
        return digest, pixels, context

    def _context_key(self, digest: str, owner: str | None) -> ContextKey:
        backbone = self.backbone
        return ContextKey(
            owner, f"{digest}/{backbone.preprocessing.fingerprint}/{backbone.fingerprint}"
        )

    def _replay(self, task: ResidentTask, images: Sequence[Pixels]) -> Floats:
        """A task's logits (G, K) of given pixels, run among the traffic. Not for the event loop."""
        futures: list[Future[JobResult]] = []
        for pixels in images:
            key = ContextKey(None, f"golden/{hashlib.sha256(pixels.tobytes()).hexdigest()}")
            job = Job(key, (task,), pixels, self._golden.get(key), cache=self._golden)
            self._queue.put(job)
            futures.append(job.future)
        return np.stack([future.result().answers[task].logits for future in futures])

    # What is served, and what the store knows of it. Reading the store blocks.

    @property
    def snapshot(self) -> Snapshot:
        """What a request that starts now is answered by."""
        return self._follower.snapshot

    def class_labels(self, snapshot: Snapshot, ref: str) -> tuple[str, ...] | None:
        """The names of a task's classes; None while it is not loaded here."""
        try:
            (match,) = snapshot.find([ref])
        except EngramError:
            return None
        return match.slot.labels

    def read_bytes(self, digest: str) -> bytes:
        return self._store.read_bytes(digest)

    def read_bundle(self, digest: str) -> TaskBundle:
        return self._store.read_bundle(digest)

    def history(self, task: str, limit: int) -> list[Entry]:
        """What was changed about a task, newest first."""
        return self._store.history(task, limit)


def _feature_reader(backbones: Mapping[torch.device, Backbone]) -> ResidentTask:
    """A task whose answer is nobody's business: its features are the backbone's class token."""
    on = {
        device: prepare(backbone, TaskWeights(head_weight=torch.zeros(1, backbone.width)))
        for device, backbone in backbones.items()
    }
    return ResidentTask(ServedTask("features", None, None, "embedding", ()), on)


def _placed(backbone: Backbone, device: torch.device, config: EngineConfig) -> Backbone:
    """The backbone on a device, as fast as it may be there.

    The engine keeps no other, so that plain matrices can go with the backbone that was given.
    """
    placed = backbone.to(device, config.dtype)
    # What is compiled is compiled of plain matrices.
    in_float32 = config.dtype == torch.float32 and not config.compiled
    if device.type == "cpu" and (config.int8 or in_float32):
        return placed.packed(int8=config.int8)
    return placed


def _golden_contexts() -> ContextCache:
    """Bundles are checked by the same few pictures: after the first their base rows are known.

    In full precision: a golden answer leaves no room for rounding.
    """
    return ContextCache(GOLDEN_CACHE_BYTES, dtype=None, device=None, observer=EngineObserver())


def _device(name: str) -> torch.device:
    device = torch.device(name)
    # "cuda" and "cuda:0" are one device; tensors report the latter.
    return torch.device("cuda", 0) if device.type == "cuda" and device.index is None else device


async def _gather(waiting: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    """All results in order; the first failure, or a cancellation, withdraws the others."""
    if len(waiting) == 1:
        return [await waiting[0]]
    tasks = [asyncio.ensure_future(one) for one in waiting]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
