"""What training minimises, and the score by which variants are compared.

Shapes: V variants, n images, K outputs. Targets are (n,) indices, (n, K) of 0 and 1, or (n, K)
numbers, as `training.data.dataset` makes them.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from training.data.dataset import Problem

SCORE_NAMES = {"single_label": "accuracy", "multi_label": "micro F1", "regression": "R²"}


def mean_losses(logits: Tensor, targets: Tensor, problem: Problem) -> Tensor:
    """Mean loss over the images of each variant: (V, n, K) to (V,)."""
    return loss_sums(logits, targets, problem) / logits.shape[1]


def loss_sums(logits: Tensor, targets: Tensor, problem: Problem) -> Tensor:
    variants, count, outputs = logits.shape
    if problem == "single_label":
        spread = targets.expand(variants, count).reshape(-1)
        flat = F.cross_entropy(logits.reshape(-1, outputs), spread, reduction="none")
        return flat.view(variants, count).sum(dim=1)
    spread = targets.expand(variants, count, outputs)
    if problem == "multi_label":
        each = F.binary_cross_entropy_with_logits(logits, spread, reduction="none")
    else:
        each = (logits - spread).square()
    return each.sum(dim=(1, 2))


def count_hits(logits: Tensor, targets: Tensor, problem: Problem) -> Tensor:
    """What adds up to the score: (V, 3) of counts."""
    if problem == "single_label":
        right = (logits.argmax(dim=2) == targets).sum(dim=1)
        return torch.stack([right, torch.full_like(right, logits.shape[1]), right * 0], 1).double()
    if problem == "multi_label":
        predicted, true = logits > 0, targets > 0.5
        both = (predicted & true).sum(dim=(1, 2))
        return torch.stack(
            [both, predicted.sum(dim=(1, 2)), true.sum().expand_as(both)], 1
        ).double()
    wrong = (logits - targets).square().sum(dim=(1, 2)).double()
    return torch.stack([wrong, torch.full_like(wrong, targets.numel()), wrong * 0], 1)


def score_of(counts: Tensor, problem: Problem) -> Tensor:
    """(V, 3) of added counts to one figure each, larger is better: accuracy, micro F1, or R².

    R² is of targets that were brought to variance one, as the loop has them.
    """
    first, second, third = counts.unbind(1)
    if problem == "single_label":
        return first / second.clamp(min=1)
    if problem == "multi_label":
        return 2 * first / (second + third).clamp(min=1)
    return 1 - first / second.clamp(min=1)
