"""The prediction service: from admission to answers.

    plan = await predictions.resolve(["pets", "scene@3"])
    answer = await predictions.predict(plan, [image], RunOptions(deadline=…))

Admission → decoding in threads → queue → one worker thread per device → answers. A plan pins one
snapshot of the catalog, so all answers of a request come from one generation.
"""

import asyncio
import hashlib
import itertools
import math
import threading
import time
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from types import MappingProxyType
from typing import Any, Final, NamedTuple, TypeVar

import numpy as np
import torch
from engram_bundle.limits import readable_size

from engram_server import errors
from engram_server.engine import observer as metrics
from engram_server.engine import types
from engram_server.engine.context_cache import ContextCache, ContextKey
from engram_server.engine.queue import Job, JobQueue, JobResult
from engram_server.engine.shares import FairExecutor, Pool
from engram_server.engine.tasks.follower import StoreFollower
from engram_server.engine.tasks.loader import TaskLoader
from engram_server.engine.tasks.snapshot import Plan
from engram_server.engine.workers import Workers
from engram_server.model.backbone import Backbone
from engram_server.model.context import Context
from engram_server.model.tasks import readout_task

T = TypeVar("T")
AllowedTasks = Callable[[tuple[str, ...]], tuple[str, ...]]
# Decoding leaves the cores to a pass: one that loses a core takes twice as long for all its images.
DECODE_NICENESS: Final = 10


class _Decoded(NamedTuple):
    """An image's digest, its pixels or else its context, and its thumbnail if requested."""

    digest: str
    pixels: types.Pixels | None
    context: Context | None
    thumbnail: bytes = b""


_LONGEST_RETRY_SECONDS = 30.0


class DecodingMemory:
    """A memory budget that all decoding threads share.

    A small file may need hundreds of megabytes when decoded. An image waits until the budget has
    room for it; an image larger than the whole budget is rejected.
    """

    def __init__(self, capacity_bytes: int, observer: metrics.EngineObserver) -> None:
        self._capacity = capacity_bytes
        self._observer = observer
        self._used = 0
        self._freed = threading.Condition()
        # Held while waiting, so that images are served in order and a large one is not starved.
        self._turn = threading.Lock()

    @property
    def contended(self) -> bool:
        """Whether an image waits for memory."""
        return self._turn.locked()

    @contextmanager
    def reserved(self, nbytes: int, deadline: float | None) -> Iterator[None]:
        """Reserve memory for one image. Blocks until it is free, or until the deadline."""
        if nbytes > self._capacity:
            raise errors.ImageTooLarge(
                f"Decoding the image takes {readable_size(nbytes)}, and the limit is "
                f"{readable_size(self._capacity)}: send a smaller image, or another format."
            )
        with self._turn, self._freed:
            left = None if deadline is None else deadline - time.monotonic()
            if not self._freed.wait_for(lambda: self._used + nbytes <= self._capacity, left):
                raise errors.DeadlineExceeded(
                    "the deadline passed while the image waited to be decoded"
                )
            self._note(nbytes)
        try:
            yield
        finally:
            with self._freed:
                self._note(-nbytes)
                self._freed.notify_all()

    def _note(self, nbytes: int) -> None:
        self._used += nbytes
        self._observer.record(metrics.DECODING_BYTES, self._used)


def decoding_limit(
    seconds: float, deadline: float | None, cancelled: Callable[[], bool]
) -> Callable[[], None]:
    """Create a function for this thread that raises when the decoding of an image must stop.

    The limit is CPU time: an image does not fail because the machine is busy, or because it waited
    for memory.
    """
    latest = time.thread_time() + seconds

    def stop() -> None:
        if cancelled():
            raise CancelledError
        if deadline is not None and time.monotonic() > deadline:
            raise errors.DeadlineExceeded("the deadline passed while the image was decoded")
        if time.thread_time() > latest:
            raise errors.ImageTooLarge(
                f"Decoding the image took longer than {seconds:g} s. Send a smaller image, or save "
                f"it as a baseline JPEG."
            )

    return stop


class Predictions:
    """Runs predictions. Call it from one event loop."""

    def __init__(
        self,
        backbones: Mapping[torch.device, Backbone],
        config: types.EngineConfig,
        observer: metrics.EngineObserver,
        *,
        queue: JobQueue,
        workers: Workers,
        cache: ContextCache,
        follower: StoreFollower,
        loader: TaskLoader,
    ) -> None:
        backbone = self._backbone = next(iter(backbones.values()))
        # How pixels become contexts: a part of each context's key.
        self._reading = f"{backbone.preprocessing.fingerprint}/{backbone.fingerprint}"
        self._config = config
        self._observer = observer
        self._queue = queue
        self._workers = workers
        self._cache = cache
        self._follower = follower
        self._loader = loader
        self._feature_task = _feature_task(backbones)
        self._decoding = DecodingMemory(config.decoded_bytes, observer)
        self._decoders = FairExecutor(
            config.decode_threads, "engram-decode", niceness=DECODE_NICENESS
        )
        self._loaders = ThreadPoolExecutor(1, "engram-load")
        self.started = False
        self.draining = False
        # Images that are admitted and not answered yet.
        self._pending = Pool(config.queue_images, shared=config.several_callers)
        self._idle: asyncio.Event | None = None

    @property
    def pending_images(self) -> int:
        return self._pending.used

    async def drain(self, timeout: float) -> bool:
        """Reject new requests and wait for accepted ones. False if that takes too long."""
        self.draining = True
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
        self._decoders.shutdown()
        self._loaders.shutdown(wait=False, cancel_futures=True)

    async def resolve(
        self,
        references: Sequence[str] | None = None,
        *,
        at_least: int | None = None,
        allowed: AllowedTasks | None = None,
        max_tasks: int | None = None,
    ) -> Plan:
        """Pin a snapshot and resolve task references in it.

        Without references, the plan has every ready task that `allowed` returns, the oldest
        `max_tasks` of them. A request for a
        generation (`at_least`) or version that this server has not reached waits for one poll of
        the store. Raises UnknownTask, TaskUnavailable, TooManyTasks, GenerationNotReached or
        StoreUnavailable.
        """
        snapshot = self._follower.snapshot
        if snapshot.lacks(references, at_least):
            snapshot = await self._follower.snapshot_for(references, at_least)
        if references is None:
            ready = snapshot.ready_names if allowed is None else allowed(snapshot.ready_names)
            # The oldest, so that no new task changes the answers about the others.
            names = ready if max_tasks is None else snapshot.oldest(ready, max_tasks)
            return Plan(snapshot, snapshot.resolve(names), len(ready) - len(names))
        if max_tasks is not None and len(references) > max_tasks:
            raise errors.TooManyTasks(
                f"The request names {len(references)} tasks, and the limit is {max_tasks}."
            )
        return Plan(snapshot, snapshot.resolve(references))

    async def predict(
        self,
        plan: Plan,
        images: Sequence[types.Image],
        options: types.RunOptions = types.RunOptions(),  # noqa: B008 - immutable
        *,
        timelines: Sequence[types.Timeline] | None = None,
    ) -> types.PredictAnswer:
        """Run a plan on images. Cancelling the caller withdraws jobs that still wait.

        `timelines`, one for each image, are filled while the work proceeds, also if it fails.
        """
        started = time.monotonic()
        if timelines is None:
            timelines = [types.Timeline() for _ in images]
        with self._admitted(len(images), options.caller):
            work = self._predict(plan, images, options, timelines)
            if options.deadline is not None:
                work = self._within(options.deadline, started, work)
            answers = await work
            timings = types.slowest(timelines, time.monotonic() - started)
            self._report(answers)
            self._observer.record(metrics.STAGES, timings.queue, "queue")
            self._observer.record(metrics.STAGES, timings.decode, "decode")
            self._observer.record(metrics.STAGES, timings.forward, "forward")
            return types.PredictAnswer(plan.generation, answers, timings)

    async def _predict(
        self,
        plan: Plan,
        images: Sequence[types.Image],
        options: types.RunOptions,
        timelines: Sequence[types.Timeline],
    ) -> list[types.ImageAnswer]:
        served = self._loader.served_tasks(plan.tasks)
        if served is None:
            served = await asyncio.get_running_loop().run_in_executor(
                self._loaders, self._loader.load_served_tasks, plan.tasks
            )
        tasks = tuple(dict.fromkeys(served.values()))
        shadows = self._loader.shadows_of(plan.tasks)
        canaries = self._loader.canaries_of(plan.tasks) if options.canaries else {}
        jobs = [self._job(tasks, options, timeline, shadows, canaries) for timeline in timelines]
        results = await self._run(images, jobs, thumbnails=options.thumbnails)
        return [
            types.ImageAnswer(
                timeline.digest,
                result.cache,
                {
                    reference: result.answers.get(task) or result.answers[canaries[task].task]
                    for reference, task in served.items()
                },
            )
            for timeline, result in zip(timelines, results, strict=True)
        ]

    def _report(self, images: Sequence[types.ImageAnswer]) -> None:
        answers = [answer for image in images for answer in image.tasks.values()]
        for task in {answer.served for answer in answers}:
            self._observer.record_task(metrics.PREDICTIONS, task.name, task.version)
        for answer in answers:
            if answer.error is not None:
                served = answer.served
                self._observer.record_task(metrics.NOT_FINITE, served.name, served.version)

    async def read_images(
        self, images: Sequence[bytes | str], options: types.RunOptions
    ) -> list[types.ReadImage]:
        """Read images without running tasks; those that cannot be read have an `error`.

        Without `options.features`, images are decoded only.
        """
        gone = threading.Event()  # the caller, or its deadline
        try:
            started = time.monotonic()
            with self._admitted(len(images), options.caller):
                reading = _gather([self._read_image(image, options, gone) for image in images])
                if options.deadline is None:
                    return await reading
                return await self._within(options.deadline, started, reading)
        finally:
            gone.set()

    async def _read_image(
        self, image: bytes | str, options: types.RunOptions, gone: threading.Event
    ) -> types.ReadImage:
        timeline, task = types.Timeline(), self._feature_task
        try:
            if options.features:
                job = self._job((task,), options, timeline)
                (result,) = await self._run([image], [job], thumbnails=options.thumbnails)
                readout = result.answers[task].features
                assert readout is not None, "they were requested"
                features = self._backbone.features_of(readout)
                return types.ReadImage(timeline.digest, features, timeline.thumbnail)
            if isinstance(image, bytes):
                decode = partial(self._decode, image, options.owner, options.deadline, gone.is_set)
                decoded = self._decoders.submit(options.caller, decode)
                return types.ReadImage((await asyncio.wrap_future(decoded)).digest)
        except errors.ContextNotCached:
            pass
        except errors.ImageError as error:
            return types.ReadImage("", error=error)
        return types.ReadImage(str(image))

    def check_capacity(self, caller: str, images: int = 1) -> None:
        """Raise Overloaded if this many images of a caller could not be admitted now."""
        if not self._pending.has(caller, images):
            self._observer.rejected("queue_full")
            raise errors.Overloaded(
                f"{self._pending.describe('images', caller)}; try again later",
                retry_after=self._retry_after(),
            )

    def _check_open(self) -> None:
        if self.draining:
            self._observer.rejected("draining")
            raise errors.Draining("the server is shutting down and accepts no requests")
        if not self.started:
            self._observer.rejected("starting")
            raise errors.Draining("the server is starting and accepts no requests yet")
        if failures := self._workers.failures:
            self._observer.rejected("device")
            raise errors.DeviceFailed("; ".join(failures))

    @contextmanager
    def _admitted(self, images: int, caller: str) -> Iterator[None]:
        """Admit images or reject them at once."""
        self._check_open()
        self.check_capacity(caller, images)
        self._pending.take(caller, images)
        self._observer.record(metrics.IMAGES_ADMITTED, images)
        try:
            yield
        finally:
            self._pending.give_back(caller, images)
            if self.pending_images == 0 and self._idle is not None:
                self._idle.set()

    async def _within(self, deadline: float, started: float, work: Coroutine[Any, Any, T]) -> T:
        """Await work; cancel it at its deadline."""
        try:
            async with asyncio.timeout(deadline - time.monotonic()):
                return await work
        except (TimeoutError, errors.DeadlineExceeded) as error:
            self._observer.rejected("deadline")
            seconds = time.monotonic() - started
            raise errors.DeadlineExceeded(
                f"the deadline passed after {seconds:.3f} s, before the answer was ready"
            ) from error

    def _retry_after(self) -> float:
        """Seconds until about half of the pending images are done, at the recent speed."""
        speed = self._workers.rows_per_second
        if speed == 0:
            return 1.0
        rows = self.pending_images * self._backbone.geometry.tokens / 2
        return min(max(math.ceil(rows / speed), 1), _LONGEST_RETRY_SECONDS)

    def _job(
        self,
        tasks: tuple[types.ServedTask, ...],
        options: types.RunOptions,
        timeline: types.Timeline,
        shadows: tuple[types.ServedTask, ...] = (),
        canaries: Mapping[types.ServedTask, types.Canary] = MappingProxyType({}),
    ) -> Job:
        """The work on one image, which `_run` adds to it."""
        return Job(
            ContextKey(options.owner, ""),
            tasks,
            caller=options.caller,
            canaries=canaries,
            shadows=shadows,
            deadline=options.deadline,
            features=options.features,
            attention=options.attention,
            cache=self._cache if self._cache.enabled else None,
            timeline=timeline,
        )

    async def _run(
        self, images: Sequence[types.Image], jobs: Sequence[Job], *, thumbnails: bool
    ) -> list[JobResult]:
        """Run each job on its image; the first failure, or a cancellation, withdraws the others."""
        try:
            self._submit(images, jobs, thumbnails=thumbnails)
            return await _all_results([job.future for job in jobs])
        except BaseException:
            for job in jobs:
                job.future.cancel()
            raise

    def _submit(
        self, images: Sequence[types.Image], jobs: Sequence[Job], *, thumbnails: bool
    ) -> None:
        """Put jobs with cached images into the queue, and have the other images decoded."""
        cached = []
        for image, job in zip(images, jobs, strict=True):
            if isinstance(image, str):
                context = self._cache.get(self._context_key(image, job.key.owner))
                if context is None:
                    raise errors.ContextNotCached(
                        f"the image {image} is not cached; send its bytes again"
                    )
                self._prepare(job, _Decoded(image, None, context))
                cached.append(job)
            else:
                # The decoding thread puts the job into the queue, which saves a trip through the
                # event loop.
                self._queue.expect()
                thumbnail = thumbnails or (bool(job.shadows) and self._config.shadow_thumbnails)
                decode = partial(self._decode_and_enqueue, image, job, thumbnail=thumbnail)
                self._decoders.submit(job.caller, decode)
        if cached:
            self._observer.record(metrics.CACHE_HITS, len(cached))
            self._queue.put(*cached, wake=False)
            # When the event loop has handled all requests that have arrived: they become one batch,
            # and the worker does not compete with it for the interpreter lock.
            asyncio.get_running_loop().call_soon(self._queue.wake)

    def _decode_and_enqueue(
        self, image: bytes | types.Floats, job: Job, *, thumbnail: bool
    ) -> None:
        """Run in a decoding thread. An error fails the job's future."""
        try:
            if job.future.cancelled():
                return
            job.timeline.decode.started = time.monotonic()
            decoded = self._decode(
                image, job.key.owner, job.deadline, job.future.cancelled, thumbnail=thumbnail
            )
            job.timeline.decode.ended = time.monotonic()
            miss = decoded.context is None
            self._observer.record(metrics.CACHE_MISSES if miss else metrics.CACHE_HITS)
            self._prepare(job, decoded)
            self._queue.put(job)
        except BaseException as error:  # noqa: BLE001 - thread boundary
            if job.future.set_running_or_notify_cancel():
                job.future.set_exception(error)
        finally:
            self._queue.decoded()

    def _prepare(self, job: Job, decoded: _Decoded) -> None:
        """Complete a job for the queue."""
        job.pixels, job.context = decoded.pixels, decoded.context
        job.timeline.digest, job.timeline.thumbnail = decoded.digest, decoded.thumbnail
        job.key = self._context_key(decoded.digest, job.key.owner)
        if job.canaries:
            chosen = (
                canary.task
                if (canary := job.canaries.get(task)) and canary.takes(decoded.digest)
                else task
                for task in job.tasks
            )
            job.tasks = tuple(dict.fromkeys(chosen))
        job.timeline.queue.started = time.monotonic()

    def _decode(
        self,
        image: bytes | types.Floats,
        owner: str | None,
        deadline: float | None,
        cancelled: Callable[[], bool],
        *,
        thumbnail: bool = False,
    ) -> _Decoded:
        """Run in a decoding thread."""
        if not isinstance(image, bytes):
            # Another prefix: a file with the same bytes is a different image.
            digest = f"pixels:{hashlib.sha256(image.tobytes()).hexdigest()}"
            return _Decoded(digest, image, self._cache.get(self._context_key(digest, owner)))
        digest = f"sha256:{hashlib.sha256(image).hexdigest()}"
        context = self._cache.get(self._context_key(digest, owner))
        if context is not None and not thumbnail:
            return _Decoded(digest, None, context)
        pixels, small = self._backbone.preprocessing.read(
            image,
            max_pixels=self._config.max_pixels,
            reserve=partial(self._decoding.reserved, deadline=deadline),
            stop=decoding_limit(self._config.decode_seconds, deadline, cancelled),
            thumbnail=thumbnail,
        )
        return _Decoded(digest, pixels if context is None else None, context, small)

    def _context_key(self, digest: str, owner: str | None) -> ContextKey:
        return ContextKey(owner, f"{digest}/{self._reading}")


class GoldenReplay:
    """Runs the golden images of a bundle through the queue, among the traffic. Blocks.

    Bundles share the same few images, so their contexts are cached, in full precision because
    golden answers are compared exactly.
    """

    def __init__(self, queue: JobQueue, cache_bytes: int) -> None:
        self._queue = queue
        self._cache = ContextCache(
            cache_bytes, dtype=None, device=None, observer=metrics.EngineObserver()
        )

    def __call__(self, task: types.ServedTask, images: Sequence[types.Pixels]) -> types.Floats:
        """The logits (G, K) of a task for G images."""
        futures: list[Future[JobResult]] = []
        for pixels in images:
            key = ContextKey(None, f"golden/{hashlib.sha256(pixels.tobytes()).hexdigest()}")
            job = Job(key, (task,), pixels, self._cache.get(key), golden=True, cache=self._cache)
            self._queue.put(job)
            futures.append(job.future)
        return np.stack([future.result().answers[task].logits for future in futures])


def _feature_task(backbones: Mapping[torch.device, Backbone]) -> types.ServedTask:
    """A task for reading the features of examples: the whole readout of an image."""
    on = {device: readout_task(backbone) for device, backbone in backbones.items()}
    return types.ServedTask("features", None, None, "embedding", (), on)


async def _all_results(futures: Sequence[Future[T]]) -> list[T]:
    """All results in order; raises as soon as one has failed.

    The event loop is woken once, not for each future.
    """
    loop = asyncio.get_running_loop()
    ended: asyncio.Future[None] = loop.create_future()
    left = itertools.count(len(futures) - 1, -1)  # `next` is atomic: they end in other threads
    failed: list[Future[T]] = []

    def end() -> None:
        if not ended.done():
            ended.set_result(None)

    def note(future: Future[T]) -> None:
        if future.cancelled() or future.exception() is not None:
            failed.append(future)
        if (next(left) == 0 or failed) and not loop.is_closed():
            loop.call_soon_threadsafe(end)

    for future in futures:
        future.add_done_callback(note)
    await ended
    for future in failed:
        future.result()  # raises
    return [future.result() for future in futures]


async def _gather(waiting: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    """All results in order; the first failure, or a cancellation, cancels the others."""
    if len(waiting) == 1:
        return [await waiting[0]]
    tasks = [asyncio.ensure_future(one) for one in waiting]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
