"""The worker: the only thread that runs the model on its device.

It takes a batch, runs one masked pass over it, and completes each job with its part of the result.
Jobs with the same image become one image of the pass, with the union of their tasks.

Shadows run after the callers of a batch are answered, on the contexts that the batch has computed,
so they change no answer, to the last bit. While other images wait, they are dropped.

A batch that fails is halved recursively, down to the jobs that fail alone: all others are answered.
If memory runs out, the next batches are also smaller for a while. After several batches in a row
without a single answer the thread ends, and `workers` replaces it.
"""

import logging
import sys
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

import numpy as np
import torch
from torch import Tensor

from engram_server.engine import observer as metrics
from engram_server.engine.context_cache import ContextCache, ContextKey
from engram_server.engine.cuda_graphs import CapturedEncoder, capture_on
from engram_server.engine.queue import Job, JobQueue, JobResult, Selection, select_batch
from engram_server.engine.rollout.service import Rollouts
from engram_server.engine.rollout.shadows import AnsweredBatch, TaskRows, observe
from engram_server.engine.staging import Staged, staging_for
from engram_server.engine.types import Batch, CacheState, Floats, Pixels, TaskAnswer
from engram_server.errors import BatchFailed, DeadlineExceeded, DeviceFailed
from engram_server.model.backbone import Backbone
from engram_server.model.context import Context, ContextBatch
from engram_server.model.explaining import AttentionMaps, attention_maps
from engram_server.model.masked_pass import PassResult, masked_pass
from engram_server.model.tasks import StackCache, Task, TaskWeights, prepare

_log = logging.getLogger("engram.worker")

Pass = Callable[..., PassResult]  # with the signature of `masked_pass`
_Pair = tuple[int, Task]  # index of the image, and task
_ByPair = dict[_Pair, Floats]

# Batches in a row without an answer after which a worker ends.
FAILED_BATCHES: Final = 3
# Answered batches after which a budget that was reduced for lack of memory grows again.
_ANSWERED_BATCHES: Final = 100
_NO_LIMIT: Final = sys.maxsize
# The time that a batch may take while there are several callers: an image waits for the end of the
# batch before its own.
CONTENDED_SECONDS: Final = 0.025
# How long a CPU worker waits for images that are being decoded: short compared to a pass.
CPU_PATIENCE_SECONDS: Final = 0.025

NOT_FINITE = "the answer is not finite: the task's weights or the image's values are too large"


@dataclass(slots=True)
class _Image:
    """One image of a pass and its jobs."""

    key: ContextKey
    pixels: Pixels | None
    context: Context | None
    cache: ContextCache | None = None
    staged: Staged | None = None
    jobs: list[Job] = field(default_factory=list)


class Worker(threading.Thread):
    """Owns a device. Warms up first; `warm` is set when it takes jobs."""

    def __init__(
        self,
        name: str,
        backbone: Backbone,
        queue: JobQueue,
        observer: metrics.EngineObserver,
        *,
        budget_rows: int,
        compiled: bool = False,
        rollouts: Rollouts | None = None,
        run_pass: Pass = masked_pass,
    ) -> None:
        super().__init__(name=name, daemon=True)
        self._backbone = replace(backbone, compiled=compiled)
        self._queue = queue
        self._observer = observer
        self._rollouts = rollouts
        self._run_pass = run_pass
        self._budget = _Budget(budget_rows)
        self._stacks = StackCache()
        self._encoder: CapturedEncoder | None = None  # None: base and task rows run together
        self._staging = staging_for(backbone.device)
        self._patience = CPU_PATIENCE_SECONDS if backbone.device.type == "cpu" else 0.0
        self._in_flight: list[Job] = []  # taken and not answered
        self._failed_batches = 0  # in a row
        self.warm = threading.Event()
        self.failure: BaseException | None = None  # why the thread ended
        self.has_answered = False
        self.rows_per_second = 0.0

    def run(self) -> None:
        try:
            if self._backbone.device.type == "cuda":
                torch.cuda.set_device(self._backbone.device)
            self._warm_up()
            self.warm.set()
            self._take_work()
        except BaseException as error:  # noqa: BLE001 - thread boundary
            self.failure = error
            _log.exception("%s ended", self.name)
        finally:
            self.warm.set()

    def fail_in_flight(self, reason: str) -> None:
        """Fail the jobs of a worker whose thread has ended."""
        for job in self._in_flight:
            if not job.future.done():
                job.future.set_exception(DeviceFailed(reason))
        self._in_flight = []

    def _take_work(self) -> None:
        while True:
            selection = self._queue.take(
                budget_rows=self._batch_rows(),
                base_rows=self._backbone.geometry.tokens,
                clock=time.monotonic,
                patience=self._patience,
            )
            if selection is None:
                return
            self._serve(selection)
            del selection  # waiting must not keep the last batch's tasks alive

    def _batch_rows(self) -> int:
        """The budget of the next batch; `select_batch` takes at least one image."""
        rows = self._budget.rows
        if self.rows_per_second and self._queue.contended:
            return min(rows, int(self.rows_per_second * CONTENDED_SECONDS))
        return rows

    def _serve(self, selection: Selection) -> None:
        _expire([job for job in selection.expired if job.future.set_running_or_notify_cancel()])
        jobs = [job for job in selection.batch if job.future.set_running_or_notify_cancel()]
        if not jobs:
            return
        self._in_flight = jobs
        failure: Exception | None = None
        answered = False
        parts = [jobs]
        while parts:
            part = select_batch(
                parts.pop(),
                budget_rows=_NO_LIMIT,
                base_rows=self._backbone.geometry.tokens,
                now=time.monotonic(),
            )
            _expire(part.expired)  # during earlier parts
            if not part.batch:
                continue
            failure = self._try(part)
            if failure is None:
                answered = self.has_answered = True
            elif len(part.batch) > 1:
                middle = len(part.batch) // 2
                parts += [part.batch[middle:], part.batch[:middle]]
            else:
                error = BatchFailed(f"the model failed on this image ({type(failure).__name__})")
                error.__cause__ = failure
                part.batch[0].future.set_exception(error)
                self._note_failed(part.batch[0])
        self._in_flight = []
        self._note_outcome(answered, failure)

    def _try(self, part: Selection) -> Exception | None:
        """Answer the jobs of a part in one pass; on failure, return the error and complete none."""
        started = time.monotonic()
        batch = Batch(len(part.batch), part.rows, str(self._backbone.device))
        for job in part.batch:
            job.timeline.queue.ended = job.timeline.forward.started = started
            job.timeline.batch = batch
        try:
            results, answered = self._answer(part.batch)
        except Exception as error:  # noqa: BLE001 - boundary: any job may cause it
            # Parts of a failed batch are retried: log the traceback of single jobs only.
            alone = len(part.batch) == 1
            _log.error("a batch of %d images failed: %r", len(part.batch), error, exc_info=alone)
            self._observer.record(metrics.BATCH_FAILURES)
            failure = error
        else:
            seconds = time.monotonic() - started
            self._note_speed(part.rows, seconds)
            self._budget.note_answered()
            self._observer.record(metrics.BATCH_IMAGES, len(part.batch))
            self._observer.record(metrics.BATCH_ROWS, part.rows)
            self._observer.record(metrics.BATCH_SECONDS, seconds)
            for job, result in zip(part.batch, results, strict=True):
                job.future.set_result(result)
            if self._rollouts is not None and not part.batch[0].golden:
                self._observe(answered, self._rollouts)
            return None
        # The traceback holds tensors of the pass, and the next attempt needs their memory.
        failure.__traceback__ = failure.__context__ = failure.__cause__ = None
        if _lacks_memory(failure):
            self._budget.note_lack_of_memory(part.rows)
            self._free_memory(part.batch)
        return failure

    def _note_failed(self, job: Job) -> None:
        for task in job.tasks:
            if self._rollouts is not None and not job.golden:
                self._rollouts.note_failed(task.light)

    def _free_memory(self, jobs: Sequence[Job]) -> None:
        self._stacks = StackCache()
        self._encoder = None  # CUDA graphs hold memory; without them the pass is slower
        if self._backbone.device.type == "cuda":
            for cache in {job.cache for job in jobs if job.cache is not None}:
                if cache.on_device:
                    cache.clear()
            torch.cuda.empty_cache()

    def _note_outcome(self, answered: bool, failure: Exception | None) -> None:
        if answered or failure is None:
            self._failed_batches = 0
            return
        self._failed_batches += 1
        if self._failed_batches == FAILED_BATCHES:
            raise failure

    def _answer(self, jobs: Sequence[Job]) -> tuple[list[JobResult], AnsweredBatch]:
        images = self._images_of(jobs)
        result, maps, contexts = self._run(images)
        broken: set[_Pair] = set()
        values = _on_host([each.values for each in result.logits])
        rows = [
            TaskRows(each.task, each.images, host, each.ood_scores)
            for each, host in zip(result.logits, values, strict=True)
        ]
        logits = _by_pair([(each.task, each.images, each.logits) for each in rows], broken)
        features: _ByPair = {}
        if any(job.features for job in jobs):
            inputs = _on_host([each.features for each in result.logits])
            features = _by_pair(
                [(each.task, each.images, host) for each, host in zip(rows, inputs, strict=True)],
                broken,
            )
        ood_scores = _ood_scores(result)
        grids = zip(maps, _on_host([each.grids for each in maps]), strict=True)
        attention = _by_pair([(each.task, each.images, host) for each, host in grids], broken)
        ended = time.monotonic()
        self._keep_contexts(images, result.contexts)

        index_of = {job: index for index, image in enumerate(images) for job in image.jobs}
        results = []
        for job in jobs:
            job.timeline.forward.ended = ended
            index = index_of[job]
            answers = {}
            for task in job.tasks:
                pair = index, task.on[self._backbone.device]
                answers[task] = TaskAnswer(
                    task,
                    logits[pair],
                    features[pair] if job.features else None,
                    attention[pair] if job.attention else None,
                    ood_scores.get(pair),
                    NOT_FINITE if pair in broken else None,
                )
            warm = images[index].context is not None
            cache: CacheState = "hit" if warm else "off" if job.cache is None else "miss"
            results.append(JobResult(answers, cache))
        return results, AnsweredBatch([image.jobs for image in images], rows, contexts)

    def _observe(self, answered: AnsweredBatch, rollouts: Rollouts) -> None:
        """Report a batch whose callers are answered; run its shadows unless images wait."""
        device, run = self._backbone.device, None if len(self._queue) else self._run_shadows
        try:
            observation = observe(answered, device, run)
        except Exception:  # noqa: BLE001 - boundary: the callers are answered
            _log.exception("running shadows failed")
            observation = observe(answered, device, None)
        rollouts.observe(observation)

    @torch.inference_mode()
    def _run_shadows(
        self, contexts: ContextBatch, requested: Sequence[Sequence[Task]]
    ) -> PassResult:
        return self._run_pass(self._backbone, None, contexts, requested, self._stacks)

    def _images_of(self, jobs: Sequence[Job]) -> list[_Image]:
        """The images of a batch in the order of the pass: cold ones first."""
        images: dict[ContextKey, _Image] = {}
        for job in jobs:
            image = images.get(job.key)
            if image is None:
                # Another request may have cached the context meanwhile.
                context = job.context
                if context is None and job.cache is not None:
                    context = job.cache.get(job.key)
                image = images[job.key] = _Image(job.key, job.pixels, context, job.cache)
            image.context = image.context or job.context
            image.staged = image.staged or job.staged
            image.jobs.append(job)
        return sorted(images.values(), key=_order)

    @torch.inference_mode()
    def _run(
        self, images: Sequence[_Image]
    ) -> tuple[PassResult, list[AttentionMaps], list[tuple[int, ContextBatch]]]:
        """Run a pass; also return the contexts of its images, as far as they are kept."""
        backbone = self._backbone
        cold = [image for image in images if image.context is None]
        contexts = [image.context for image in images if image.context is not None]
        warm = None
        if contexts:
            tasks = {
                task
                for image in images
                for job in image.jobs
                for task in (*job.tasks, *job.shadows)
            }
            warm = ContextBatch.stack(
                contexts,
                backbone.device,
                backbone.dtype,
                with_states=any(task.rows for task in tasks),
            )
        kept = [] if warm is None else [(len(cold), warm)]
        pixels = self._pixels(cold) if cold else None
        encoded = None
        if pixels is not None and self._encoder is not None:
            # Encode the base rows first: then only task rows of warm images are left.
            encoded = self._encoder(pixels)
            pixels = None
            warm = encoded if warm is None else encoded.join(warm)
        result = self._run_pass(
            backbone,
            pixels,
            warm,
            [self._tasks_of(image.jobs) for image in images],
            self._stacks,
            keep_contexts=any(image.cache is not None for image in cold),
        )
        if encoded is not None:
            result = replace(result, contexts=encoded)
        if result.contexts is not None:
            kept.insert(0, (0, result.contexts))
        self._send_waiting()
        explained = [self._tasks_of(job for job in image.jobs if job.attention) for image in images]
        maps = attention_maps(backbone, result, warm, explained) if any(explained) else []
        return result, maps, kept

    def _tasks_of(self, jobs: Iterable[Job]) -> list[Task]:
        """The distinct tasks of jobs, on this device."""
        return list(
            dict.fromkeys(task.on[self._backbone.device] for job in jobs for task in job.tasks)
        )

    def _pixels(self, images: Sequence[_Image]) -> Tensor:
        """The cold images as `embed_images` takes them, on the device."""
        backbone = self._backbone
        decoded = [
            image for image in images if image.pixels is not None and image.pixels.dtype == np.uint8
        ]
        normalised = images[len(decoded) :]
        parts: list[Tensor] = []
        if decoded:
            # Normalise on the device: bytes are a quarter of the size of floats.
            pixels = self._moved(decoded)
            if not normalised:
                return pixels
            parts.append(backbone.preprocessing.normalise(pixels, backbone.dtype))
        parts.append(self._moved(normalised).to(backbone.dtype))
        return torch.cat(parts)

    def _moved(self, images: Sequence[_Image]) -> Tensor:
        staging = self._staging
        arrays = [image.pixels for image in images if image.pixels is not None]
        if staging is None:
            return torch.from_numpy(np.stack(arrays)).to(self._backbone.device)
        sent = [
            image.staged if image.staged and image.staged.by is staging else staging.send(array)
            for image, array in zip(images, arrays, strict=True)
        ]
        return staging.stack(sent)

    def _send_waiting(self) -> None:
        """Send the pixels of the next batch while the device computes this one."""
        if self._staging is None:
            return
        for job in self._queue.next_batch(
            budget_rows=self._batch_rows(),
            base_rows=self._backbone.geometry.tokens,
            clock=time.monotonic,
        ):
            if job.pixels is not None and job.context is None and job.staged is None:
                job.staged = self._staging.send(job.pixels)

    def _keep_contexts(self, images: Sequence[_Image], contexts: ContextBatch | None) -> None:
        if contexts is None:
            return
        cold = [image for image in images if image.context is None]
        for cache in {image.cache for image in cold if image.cache is not None}:
            kept = [index for index, image in enumerate(cold) if image.cache is cache]
            chosen = contexts if len(kept) == len(cold) else contexts.pick(kept)
            cache.keep([cold[index].key for index in kept], chosen)

    def _warm_up(self) -> None:
        """Run one pass over a blank image and task, so that lazy set-up delays no request."""
        backbone = self._backbone
        blank = np.zeros((*backbone.image_size, 3), dtype=np.uint8)
        token, head = torch.zeros(backbone.width), torch.zeros(1, backbone.width)
        task = prepare(backbone, TaskWeights(head_weight=head, class_token=token))
        with torch.inference_mode():
            result = self._run_pass(
                backbone,
                self._pixels([_Image(ContextKey(None, "warm-up"), blank, None)]),
                None,
                [[task]],
                self._stacks,
                keep_contexts=True,
            )
        result.logits[0].values.cpu()  # a device may report a failure only on reading
        self._capture()

    def _capture(self) -> None:
        """Capture the base pass as CUDA graphs where they are supported."""
        backbone = self._backbone
        capture = capture_on(backbone.device)
        if capture is None:
            return
        largest = max(1, self._budget.rows // backbone.geometry.tokens)
        try:
            with torch.inference_mode():
                self._encoder = CapturedEncoder(backbone, largest, capture)
        except RuntimeError as error:  # out of memory, or an operation that graphs do not support
            _log.warning("%s runs without CUDA graphs: %s", self.name, error)

    def _note_speed(self, rows: int, seconds: float) -> None:
        """Update the moving average from which Retry-After is computed."""
        speed = rows / max(seconds, 1e-6)
        known = self.rows_per_second
        self.rows_per_second = speed if known == 0 else 0.8 * known + 0.2 * speed


class _Budget:
    """Token rows of one batch: halved when memory runs out, and slowly restored."""

    def __init__(self, rows: int) -> None:
        self._most = rows
        self.rows = rows
        self._answered = 0  # batches since the last change

    def note_lack_of_memory(self, rows: int) -> None:
        self.rows = max(1, min(self.rows, rows) // 2)
        self._answered = 0

    def note_answered(self) -> None:
        if self.rows == self._most:
            return
        self._answered += 1
        if self._answered == _ANSWERED_BATCHES:
            self.rows = min(2 * self.rows, self._most)
            self._answered = 0


def _lacks_memory(failure: Exception) -> bool:
    # The last is the message of torch's CPU allocator.
    return isinstance(
        failure, torch.OutOfMemoryError | MemoryError
    ) or "can't allocate memory" in str(failure)


def _expire(jobs: Iterable[Job]) -> None:
    for job in jobs:
        job.future.set_exception(
            DeadlineExceeded("the deadline passed while the image waited in the queue")
        )


def _order(image: _Image) -> int:
    """Cold images before warm ones, and decoded images before pixel values."""
    if image.context is not None:
        return 2
    return 0 if image.pixels is None or image.pixels.dtype == np.uint8 else 1


def _ood_scores(result: PassResult) -> dict[_Pair, float]:
    """By image and task, the scores of the OOD detectors."""
    found: dict[_Pair, float] = {}
    for each in result.logits:
        if each.ood_scores is not None:
            for image, score in zip(each.images, each.ood_scores.tolist(), strict=True):
                found[image, each.task] = score
    return found


def _by_pair(results: Iterable[tuple[Task, Sequence[int], Floats]], broken: set[_Pair]) -> _ByPair:
    """The rows of a pass on the host, by image and task; adds non-finite pairs to `broken`."""
    values: _ByPair = {}
    for task, images, host in results:
        for image, row in zip(images, host, strict=True):
            values[image, task] = row
        if not np.isfinite(host).all():
            broken.update(
                (image, task) for image in images if not np.isfinite(values[image, task]).all()
            )
    return values


def _on_host(tensors: Sequence[Tensor]) -> list[Floats]:
    """One copy for all; each job gets its row."""
    if not tensors or tensors[0].device.type == "cpu":
        return [tensor.numpy() for tensor in tensors]
    return in_one_copy(tensors)


def in_one_copy(tensors: Sequence[Tensor]) -> list[Floats]:
    """Copy tensors to the host at once: each copy waits for the device."""
    flat: Floats = torch.cat([tensor.flatten() for tensor in tensors]).cpu().numpy()
    ends = np.cumsum([tensor.numel() for tensor in tensors])
    parts = np.split(flat, ends[:-1])
    return [part.reshape(tensor.shape) for part, tensor in zip(parts, tensors, strict=True)]
