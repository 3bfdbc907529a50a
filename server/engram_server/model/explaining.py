"""Attention maps: the attention of the class token that a head reads, over the patches of an image.

They are the mean over heads of the softmax weights in the last layer, whose output the head reads.
The weights on patches sum to less than 1: the rest is on class, distillation and register tokens
and on memory. A pass does not keep the weights of task rows, so they are recomputed from the
queries and keys of its last layer. All head-only tasks share the map in `Readout.patch_attention`.
A `base` head that reads only the mean over patches has a uniform map.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from engram_server.model.backbone import Backbone
from engram_server.model.context import ContextBatch
from engram_server.model.masked_pass import PassResult, images_by_task
from engram_server.model.tasks import Task


@dataclass(frozen=True, slots=True)
class AttentionMaps:
    """The attention maps of one task: row i of `grids` belongs to image `images[i]`."""

    task: Task
    images: list[int]
    grids: Tensor  # (n, rows of patches, columns of patches) float32


def attention_maps(
    backbone: Backbone,
    result: PassResult,
    warm: ContextBatch | None,
    explained: Sequence[Sequence[Task]],
) -> list[AttentionMaps]:
    """Return the attention maps of the tasks `explained[i]` on image i of a pass."""
    last, geometry = result.last_layer, backbone.geometry
    maps = []
    if last is not None and last.task_rows is not None:
        weights = last.task_rows.weights(backbone.layers - 1, last.task, last.base)
        on_patches = weights[..., geometry.prefix_tokens : geometry.tokens]
        grids = on_patches.mean(dim=1).view(-1, *geometry.grid)
        for task, images in images_by_task(explained, with_rows=True).items():
            maps.append(AttentionMaps(task, images, grids[last.task_rows.find(task, images)]))
    images_of = images_by_task(explained, with_rows=False)
    if images_of:
        cold = len(explained) - (0 if warm is None else len(warm))
        patch_attention = _patch_attention(result, warm, cold, geometry.patches)
        for task, images in images_of.items():
            weights = patch_attention[images]
            head = task.head_weight
            # A `base` head that has zero weights for the first of several parts (`BaseHead`).
            if head.shape[1] > geometry.width and not head[:, : geometry.width].any():
                weights = torch.full_like(weights, 1 / geometry.patches)
            grids = weights.view(-1, *geometry.grid)
            maps.append(AttentionMaps(task, images, grids))
    return maps


def _patch_attention(
    result: PassResult, warm: ContextBatch | None, cold: int, patches: int
) -> Tensor:
    """Return the attention map of the readout for each image of a pass, (images, patches)."""
    if result.readout is not None:
        attention = result.readout.patch_attention
    else:  # no task reads the cold images; zeros keep the indices of the warm images right
        attention = torch.zeros(cold, patches)
    if warm is None:
        return attention
    assert warm.patch_attention is not None, "these contexts were encoded without it"
    return torch.cat([attention, warm.patch_attention])
