"""Where tasks looked: the attention of the class token that a head reads, over the image's patches.

Taken from the last layer, the one whose output the head reads, as the mean over heads of the
softmax weights. They add up to less than 1: the rest of a task's attention lies on class,
distillation and register tokens and on memory. A pass keeps no weights of task rows; those asked
for are computed again from the queries and keys of its last layer. Of what head-only tasks read,
which is the same for all of them, `readout` has them. A `base` that reads the mean patch alone
looks at all patches alike, whatever head-only tasks read.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from server.model.backbone import Backbone, Geometry
from server.model.context import ContextBatch
from server.model.masked_pass import PassResult, images_by_task
from server.model.tasks import Task


@dataclass(frozen=True, slots=True)
class AttentionMaps:
    """Where one task looked in a pass: row i of `grids` is about image `images[i]`."""

    task: Task
    images: list[int]
    grids: Tensor  # (n, rows of patches, columns of patches) float32


def attention_maps(
    backbone: Backbone,
    result: PassResult,
    warm: ContextBatch | None,
    explained: Sequence[Sequence[Task]],
) -> list[AttentionMaps]:
    """Where in image i of a pass the tasks `explained[i]` looked, some of those it answered."""
    last, geometry = result.last_layer, backbone.geometry
    maps = []
    if last is not None and last.task_rows is not None:
        weights = last.task_rows.weights(backbone.layers - 1, last.own, last.base)
        grids = _over_patches(weights, geometry)
        for task, images in images_by_task(explained, with_rows=True).items():
            maps.append(AttentionMaps(task, images, grids[last.task_rows.find(task, images)]))
    images_of = images_by_task(explained, with_rows=False)
    if images_of:
        cold = len(explained) - (0 if warm is None else len(warm))
        looked = _looked(result, warm, cold, geometry.patches)
        for task, images in images_of.items():
            seen = looked[images]
            if _reads_mean_alone(task, geometry):
                seen = torch.full_like(seen, 1 / geometry.patches)
            grids = seen.view(-1, *geometry.grid)
            maps.append(AttentionMaps(task, images, grids))
    return maps


def _reads_mean_alone(task: Task, geometry: Geometry) -> bool:
    """A `base` of several parts that has no weight for the first one (`BaseHead`)."""
    head = task.head_weight
    return head.shape[1] > geometry.width and not head[:, : geometry.width].any()


def _over_patches(weights: Tensor, geometry: Geometry) -> Tensor:
    """Weights (n, H, S …) on an image's base rows, and others, to the grid of its patches."""
    on_patches = weights[..., geometry.prefix_tokens : geometry.tokens]
    return on_patches.mean(dim=1).view(-1, *geometry.grid)


def _looked(result: PassResult, warm: ContextBatch | None, cold: int, patches: int) -> Tensor:
    """Where the backbone looked in each image of a pass, (images, patches)."""
    parts = []
    if result.readout is not None:
        parts.append(result.readout.looked)
    else:  # Nobody reads the cold images; the place keeps the numbers of the others right.
        parts.append(torch.zeros(cold, patches))
    if warm is not None:
        assert warm.looked is not None, "these contexts were made without it"
        parts.append(warm.looked)
    return torch.cat(parts)
