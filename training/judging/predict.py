"""Answers of finished tasks to a set of images: the very pass that the server runs."""

from collections.abc import Sequence
from concurrent.futures import Executor

import torch
from torch import Tensor

from server.model import Backbone
from server.model.masked_pass import masked_pass
from server.model.tasks import StackCache, Task
from training.data.images import ImageSet
from training.progress import OnProgress


def predict(
    backbone: Backbone,
    images: ImageSet,
    tasks: Sequence[Task],
    batch: int,
    pool: Executor,
    on_progress: OnProgress | None = None,
) -> list[Tensor]:
    """Logits (n, K) of each task, all of them in one pass over the images."""
    logits: list[list[Tensor]] = [[] for _ in tasks]
    starts = range(0, len(images), batch)
    parts = [range(start, min(start + batch, len(images))) for start in starts]
    stacks = StackCache()
    upcoming = pool.submit(images.batch, parts[0]) if parts else None
    for position, places in enumerate(parts):
        assert upcoming is not None
        pixels = upcoming.result()
        if position + 1 < len(parts):
            upcoming = pool.submit(images.batch, parts[position + 1])
        for rows, values in zip(logits, answer(backbone, pixels, tasks, stacks), strict=True):
            rows.append(values)
        if on_progress is not None:
            on_progress(places.stop, len(images))
    return [
        torch.cat(rows) if rows else torch.zeros(0, task.head_weight.shape[0])
        for rows, task in zip(logits, tasks, strict=True)
    ]


def answer(
    backbone: Backbone, pixels: Tensor, tasks: Sequence[Task], stacks: StackCache
) -> list[Tensor]:
    """Logits (B, K) of each task for uint8 images (B, H, W, 3)."""
    view = backbone.preprocessing.normalise(pixels.to(backbone.device), backbone.dtype)
    with torch.no_grad():
        result = masked_pass(backbone, view, None, [list(tasks)] * len(view), stacks)
    by_task = {one.task: one.values.cpu() for one in result.logits}
    return [by_task[task] for task in tasks]
