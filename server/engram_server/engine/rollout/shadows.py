"""Shadows: versions that answer the images of a batch without being returned.

They run after the callers of the batch are answered, as tasks of warm images on the contexts that
the batch has computed. So they cost their own rows only, or nothing but a head without a row, and
cannot change an answer.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from engram_server.engine.queue import Job
from engram_server.engine.rollout.comparison import Answers, ObservedImage
from engram_server.engine.rollout.service import Observation
from engram_server.engine.types import Floats, ServedTask
from engram_server.model.context import ContextBatch
from engram_server.model.masked_pass import PassResult
from engram_server.model.tasks import Task

Run = Callable[[ContextBatch, Sequence[Sequence[Task]]], PassResult]
Tasks = Callable[[Job], Iterable[ServedTask]]


@dataclass(frozen=True, slots=True)
class TaskRows:
    """The logits of a task on the host: row i belongs to image `images[i]` of the batch."""

    task: Task
    images: Sequence[int]
    logits: Floats  # (n, K)
    ood_scores: Tensor | None  # (n,)


@dataclass(frozen=True, slots=True)
class AnsweredBatch:
    """A batch whose callers are answered."""

    jobs: Sequence[Sequence[Job]]  # of each image, in the order of the pass
    rows: Sequence[TaskRows]
    # Contexts of images that follow each other in the batch, and the index of the first.
    contexts: Sequence[tuple[int, ContextBatch]]

    @property
    def shadowed(self) -> bool:
        return any(job.shadows for jobs in self.jobs for job in jobs)


def observe(batch: AnsweredBatch, device: torch.device, run: Run | None) -> Observation:
    """Describe a batch with the answers of its shadows; they are dropped if `run` is None."""
    shadows: list[TaskRows] = []
    covered: set[int] = set()
    for start, contexts in batch.contexts if run and batch.shadowed else ():
        assert run is not None
        images = range(start, start + len(contexts))
        covered.update(images)
        requested = [list(_on(device, batch.jobs[image])) for image in images]
        if any(requested):
            shadows += rows_of(run(contexts, requested), start)
    timelines = [jobs[0].timeline for jobs in batch.jobs]
    observed = [ObservedImage(each.digest, each.thumbnail) for each in timelines]
    dropped = [
        (task.light, shadow.light)
        for image, jobs in enumerate(batch.jobs)
        if image not in covered
        for job in jobs
        for shadow in job.shadows
        for task in job.tasks
        if task.name == shadow.name and task.version != shadow.version
    ]
    answers = _by_version(batch.rows, batch.jobs, device, lambda job: job.tasks)
    others = _by_version(shadows, batch.jobs, device, lambda job: job.shadows)
    widths = [each.reference.axes.shape[1] for each in answers if each.reference is not None]
    features = _features(batch, max(widths)) if widths else None
    return Observation(observed, answers, others, dropped, features)


def _features(batch: AnsweredBatch, width: int) -> Floats | None:
    """The class tokens of the images (B, D); rows of images without a context are NaN."""
    if not batch.contexts:
        return None
    features = np.full((len(batch.jobs), width), np.nan, np.float32)
    for start, contexts in batch.contexts:
        features[start : start + len(contexts)] = contexts.readout[:, :width].float().cpu().numpy()
    return features


def rows_of(result: PassResult, first: int = 0) -> list[TaskRows]:
    """Return the logits of a pass; its first image has the index `first` in the batch."""
    return [
        TaskRows(
            each.task,
            [first + image for image in each.images],
            each.values.cpu().numpy(),
            each.ood_scores,
        )
        for each in result.logits
    ]


def _on(device: torch.device, jobs: Iterable[Job]) -> dict[Task, None]:
    return {shadow.on[device]: None for job in jobs for shadow in job.shadows}


def _by_version(
    rows: Sequence[TaskRows], jobs: Sequence[Sequence[Job]], device: torch.device, tasks: Tasks
) -> list[Answers]:
    """Return the answers of every version; versions with the same bundle share a task."""
    images: dict[ServedTask, dict[int, None]] = {}
    for image, of in enumerate(jobs):
        for job in of:
            for task in tasks(job):
                if task.version is not None:
                    images.setdefault(task, {})[image] = None
    by_task: dict[Task, list[TaskRows]] = {}
    for each in rows:
        by_task.setdefault(each.task, []).append(each)
    return [
        answers
        for served, seen in images.items()
        for part in by_task.get(served.on[device], ())
        if len((answers := _answers(served, part, np.fromiter(seen, np.int64))).images)
    ]


def _answers(
    served: ServedTask, part: TaskRows, seen: np.ndarray[tuple[int], np.dtype[np.int64]]
) -> Answers:
    images = np.asarray(part.images, np.int64)
    scores = None if part.ood_scores is None else part.ood_scores.cpu().numpy()
    answers = Answers(served.light, images, part.logits, scores, served.drift)
    return answers if len(seen) == len(images) else answers.at(np.isin(images, seen))
