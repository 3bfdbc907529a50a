"""Where tasks looked: the attention of the class token that a head reads, over the image's patches.

Taken from the last layer, the one whose output the head reads, as the mean over heads of the
softmax weights. They add up to less than 1: the rest of a task's attention lies on class,
distillation and register tokens and on memory. A pass keeps no weights; those asked for are
computed again from the queries and keys of its last layer.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from server.model.backbone import Backbone, Geometry
from server.model.context import ContextBatch
from server.model.masked_pass import LastLayer, PassResult, images_by_task
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
        read = sorted(set().union(*images_of.values()))
        cold = len(explained) - (0 if warm is None else len(warm))
        grids = _over_patches(torch.cat([*_class_weights(last, warm, read, cold)]), geometry)
        for task, images in images_of.items():
            maps.append(AttentionMaps(task, images, grids[[read.index(each) for each in images]]))
    return maps


def _over_patches(weights: Tensor, geometry: Geometry) -> Tensor:
    """Weights (n, H, S …) on an image's base rows, and others, to the grid of its patches."""
    on_patches = weights[..., geometry.prefix_tokens : geometry.tokens]
    return on_patches.mean(dim=1).view(-1, *geometry.grid)


def _class_weights(
    last: LastLayer | None, warm: ContextBatch | None, images: list[int], cold: int
) -> Iterator[Tensor]:
    """What the backbone's class token gave the base rows of `images`, (n, H, S) in turn."""
    of_cold = [image for image in images if image < cold]
    of_warm = [image - cold for image in images if image >= cold]
    if of_cold:
        assert last is not None, "a pass finishes the class tokens that are read"
        yield _softmax(last.base.queries[of_cold][:, :, 0], last.base.keys[of_cold])
    if of_warm:
        assert warm is not None
        assert warm.class_query is not None, "these contexts were made without the class query"
        yield _softmax(warm.class_query[of_warm], warm.states[-1][0, of_warm])


def _softmax(queries: Tensor, keys: Tensor) -> Tensor:
    """Queries (n, H, d) on keys (n, H, S, d): weights (n, H, S)."""
    queries, keys = queries.float() * queries.shape[-1] ** -0.5, keys.float()
    return torch.softmax((keys @ queries[..., None]).squeeze(-1), dim=-1)
