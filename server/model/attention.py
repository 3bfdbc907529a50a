"""Where tasks looked: the attention of the class token that a head reads, over the image's patches.

Taken from the last layer, the one whose output the head reads, as the mean over heads of the
softmax weights as they are. They add up to less than 1: the rest of a task's attention lies on
class, distillation and register tokens and on memory.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from server.model.backbone import Geometry
from server.model.tasks import Task


@dataclass(frozen=True, slots=True)
class TaskAttention:
    """Where one task looked in a pass: row i of `grids` is about image `images[i]`."""

    task: Task
    images: list[int]
    grids: Tensor  # (n, rows of patches, columns of patches) float32


def over_patches(weights: Tensor, geometry: Geometry) -> Tensor:
    """Weights (n, H, S) on an image's base rows to the grid of its patches."""
    return weights[..., geometry.prefix_tokens :].mean(dim=1).view(-1, *geometry.grid)


def class_weights(queries: Tensor, keys: Tensor) -> Tensor:
    """The backbone's own class token: queries (n, H, d) on keys (n, H, S, d), (n, H, S)."""
    # The fused kernel of the pass keeps no weights, so those asked for are computed here again.
    queries, keys = queries.float() * queries.shape[-1] ** -0.5, keys.float()
    return torch.softmax((keys @ queries[..., None]).squeeze(-1), dim=-1)
