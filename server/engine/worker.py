"""The worker: the one thread that runs the model on its device.

It takes a batch, makes one masked pass of it and hands every waiter its part. Jobs about one image
are one image of the pass, asked the union of their tasks. Whatever goes wrong in a batch is told to
that batch's waiters, and the loop lives on.
"""

import logging
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from server.engine.context_cache import ContextCache
from server.engine.observer import EngineObserver
from server.engine.queue import Job, JobQueue, JobResult, Selection
from server.engine.types import Floats, Pixels
from server.errors import BatchFailed, DeadlineExceeded
from server.model.backbone import Backbone
from server.model.context import Context, ContextBatch
from server.model.masked_pass import PassResult, masked_pass
from server.model.tasks import StackCache, Task, TaskWeights, prepare

_log = logging.getLogger("engram.worker")


@dataclass(slots=True)
class _Image:
    """One image of a pass and the jobs that are about it."""

    key: str
    pixels: Pixels | None
    context: Context | None
    cache: ContextCache | None = None
    jobs: list[Job] = field(default_factory=list)


class Worker(threading.Thread):
    """Owns a device. Starts by warming up; `warm` is set when it takes work."""

    def __init__(
        self,
        name: str,
        backbone: Backbone,
        queue: JobQueue,
        observer: EngineObserver,
        *,
        budget_rows: int,
        compiled: bool = False,
    ) -> None:
        super().__init__(name=name, daemon=True)
        self._backbone = backbone
        self._queue = queue
        self._observer = observer
        self._budget_rows = budget_rows
        self._compiled = compiled
        self._stacks = StackCache()
        self.warm = threading.Event()
        self.failure: BaseException | None = None
        self.rows_per_second = 0.0

    def run(self) -> None:
        try:
            self._warm_up()
        except Exception as error:  # noqa: BLE001 - told to whoever starts the engine
            self.failure = error
            return
        finally:
            self.warm.set()
        while True:
            selection = self._queue.take(
                budget_rows=self._budget_rows,
                base_rows=self._backbone.geometry.tokens,
                clock=time.monotonic,
            )
            if selection is None:
                return
            self._serve(selection)
            del selection  # Waiting for work must not keep the last batch's tasks alive.

    def _serve(self, selection: Selection) -> None:
        for job in selection.expired:
            if job.future.set_running_or_notify_cancel():
                job.future.set_exception(
                    DeadlineExceeded("the deadline passed while the image waited for the model")
                )
        jobs = [job for job in selection.batch if job.future.set_running_or_notify_cancel()]
        if not jobs:
            return
        started = time.monotonic()
        try:
            results = self._answer(jobs, started)
        except Exception as error:  # noqa: BLE001 - the boundary: every waiter is told
            _log.exception("a batch of %d images failed", len(jobs))
            self._observer.batch_failed()
            for job in jobs:
                failure = BatchFailed(f"the model failed on this batch ({type(error).__name__})")
                failure.__cause__ = error
                job.future.set_exception(failure)
            return
        seconds = time.monotonic() - started
        self._note_speed(selection.rows, seconds)
        self._observer.batch(len(jobs), selection.rows, seconds)
        for job, result in zip(jobs, results, strict=True):
            job.future.set_result(result)

    def _answer(self, jobs: Sequence[Job], started: float) -> list[JobResult]:
        images = self._images_of(jobs)
        result = self._run(images)
        features_wanted = any(job.features for job in jobs)
        logits: dict[tuple[int, Task], Floats] = {}
        features: dict[tuple[int, Task], Floats] = {}
        for answer in result.logits:
            _spread(answer.images, answer.task, answer.values, logits)
            if features_wanted:
                _spread(answer.images, answer.task, answer.features, features)
        forward = time.monotonic() - started
        self._keep_contexts(images, result.contexts)

        place = {job: number for number, image in enumerate(images) for job in image.jobs}
        results = []
        for job in jobs:
            number = place[job]
            tasks = [(task, task.on[self._backbone.device]) for task in job.tasks]
            warm = images[number].context is not None
            results.append(
                JobResult(
                    logits={task: logits[number, bound] for task, bound in tasks},
                    features={task: features[number, bound] for task, bound in tasks}
                    if job.features
                    else {},
                    queue_seconds=started - job.enqueued,
                    forward_seconds=forward,
                    cache="hit" if warm else "off" if job.cache is None else "miss",
                )
            )
        return results

    def _images_of(self, jobs: Sequence[Job]) -> list[_Image]:
        """The images of a batch, cold ones first as a pass wants them."""
        images: dict[str, _Image] = {}
        for job in jobs:
            image = images.get(job.key)
            if image is None:
                # Another request may have brought the context while this one waited.
                context = job.context
                if context is None and job.cache is not None:
                    context = job.cache.get(job.key)
                image = images[job.key] = _Image(job.key, job.pixels, context, job.cache)
            image.context = image.context or job.context
            image.jobs.append(job)
        return sorted(images.values(), key=lambda image: image.context is not None)

    @torch.inference_mode()
    def _run(self, images: Sequence[_Image]) -> PassResult:
        backbone = self._backbone
        cold = [image for image in images if image.context is None]
        contexts = [image.context for image in images if image.context is not None]
        wanted = [
            list(
                dict.fromkeys(task.on[backbone.device] for job in image.jobs for task in job.tasks)
            )
            for image in images
        ]
        return masked_pass(
            backbone,
            self._pixels(cold) if cold else None,
            ContextBatch.stack(contexts, backbone.device, backbone.dtype) if contexts else None,
            wanted,
            self._stacks,
            keep_contexts=any(image.cache is not None for image in cold),
            compiled=self._compiled,
        )

    def _pixels(self, images: Sequence[_Image]) -> Tensor:
        """The cold images on the device, normalised there: bytes are a quarter of the floats."""
        stacked = torch.from_numpy(
            np.stack([image.pixels for image in images if image.pixels is not None])
        )
        if self._backbone.device.type == "cuda":
            stacked = stacked.pin_memory()
        stacked = stacked.to(self._backbone.device, non_blocking=True)
        return self._backbone.preprocessing.normalise(stacked, self._backbone.dtype)

    def _keep_contexts(self, images: Sequence[_Image], contexts: ContextBatch | None) -> None:
        if contexts is None:
            return
        cold = [image for image in images if image.context is None]
        for cache in {image.cache for image in cold if image.cache is not None}:
            kept = [place for place, image in enumerate(cold) if image.cache is cache]
            chosen = contexts if len(kept) == len(cold) else contexts.pick(kept)
            cache.keep([cold[place].key for place in kept], chosen)

    def _warm_up(self) -> None:
        """One pass over a blank image and a blank task: the first request meets no lazy set-up."""
        backbone = self._backbone
        blank = np.zeros((*backbone.image_size, 3), dtype=np.uint8)
        token, head = torch.zeros(backbone.width), torch.zeros(1, backbone.width)
        task = prepare(backbone, TaskWeights(head_weight=head, class_token=token))
        with torch.inference_mode():
            masked_pass(
                backbone,
                self._pixels([_Image("warm-up", blank, None)]),
                None,
                [[task]],
                self._stacks,
                keep_contexts=True,
                compiled=self._compiled,
            )

    def _note_speed(self, rows: int, seconds: float) -> None:
        """A running mean, for telling a refused client when to come back."""
        speed = rows / max(seconds, 1e-6)
        known = self.rows_per_second
        self.rows_per_second = speed if known == 0 else 0.8 * known + 0.2 * speed


def _spread(
    images: Sequence[int], task: Task, values: Tensor, into: dict[tuple[int, Task], Floats]
) -> None:
    # One copy to the host for all images of a task; each waiter gets its own row of it.
    host: Floats = values.cpu().numpy()
    for image, row in zip(images, host, strict=True):
        into[image, task] = row
