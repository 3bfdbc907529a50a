"""Answers of finished tasks to a set of images: the very pass that the server runs."""

from collections.abc import Callable, Sequence
from concurrent.futures import Executor

import torch
from torch import Tensor

from server.model import Backbone
from server.model.masked_pass import masked_pass
from server.model.tasks import StackCache, Task
from training.images import ImageSet

Told = Callable[[int, int], None]


def predict(
    backbone: Backbone,
    images: ImageSet,
    tasks: Sequence[Task],
    batch: int,
    pool: Executor,
    told: Told | None = None,
) -> list[Tensor]:
    """Logits (n, K) of each task, all of them in one pass over the images."""
    found: list[list[Tensor]] = [[] for _ in tasks]
    starts = range(0, len(images), batch)
    parts = [range(start, min(start + batch, len(images))) for start in starts]
    stacks = StackCache()
    coming = pool.submit(images.batch, parts[0]) if parts else None
    for position, places in enumerate(parts):
        assert coming is not None
        pixels = coming.result()
        if position + 1 < len(parts):
            coming = pool.submit(images.batch, parts[position + 1])
        for rows, values in zip(found, _answer(backbone, pixels, tasks, stacks), strict=True):
            rows.append(values)
        if told is not None:
            told(places.stop, len(images))
    return [
        torch.cat(rows) if rows else torch.zeros(0, task.head_weight.shape[0])
        for rows, task in zip(found, tasks, strict=True)
    ]


def _answer(
    backbone: Backbone, pixels: Tensor, tasks: Sequence[Task], stacks: StackCache
) -> list[Tensor]:
    view = backbone.preprocessing.normalise(pixels.to(backbone.device), backbone.dtype)
    with torch.no_grad():
        result = masked_pass(backbone, view, None, [list(tasks)] * len(view), stacks)
    by_task = {answer.task: answer.values.cpu() for answer in result.logits}
    return [by_task[task] for task in tasks]
