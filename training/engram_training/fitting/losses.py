"""The loss that training minimises, and the score that compares variants.

Shapes: V variants, n images, K outputs. Targets are (n,) indices, (n, K) of 0 and 1, or (n, K)
numbers, as returned by `DataSet.targets`.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from engram_training.data.dataset import TaskType

SCORE_NAMES = {"single_label": "accuracy", "multi_label": "micro F1", "regression": "R²"}


def mean_losses(logits: Tensor, targets: Tensor, task_type: TaskType) -> Tensor:
    """Return the mean loss of each variant: (V, n, K) to (V,)."""
    variants, count, outputs = logits.shape
    if task_type == "single_label":
        expanded = targets.expand(variants, count).reshape(-1)
        flat = F.cross_entropy(logits.reshape(-1, outputs), expanded, reduction="none")
        return flat.view(variants, count).sum(dim=1) / count
    expanded = targets.expand(variants, count, outputs)
    if task_type == "multi_label":
        each = F.binary_cross_entropy_with_logits(logits, expanded, reduction="none")
    else:
        each = (logits - expanded).square()
    return each.sum(dim=(1, 2)) / count


def count_hits(logits: Tensor, targets: Tensor, task_type: TaskType) -> Tensor:
    """Return the counts that sum up to the score, (V, 3)."""
    if task_type == "single_label":
        right = (logits.argmax(dim=2) == targets).sum(dim=1)
        return torch.stack([right, torch.full_like(right, logits.shape[1]), right * 0], 1).double()
    if task_type == "multi_label":
        predicted, true = logits > 0, targets > 0.5
        both = (predicted & true).sum(dim=(1, 2))
        counts = [both, predicted.sum(dim=(1, 2)), true.sum().expand_as(both)]
        return torch.stack(counts, 1).double()
    wrong = (logits - targets).square().sum(dim=(1, 2)).double()
    return torch.stack([wrong, torch.full_like(wrong, targets.numel()), wrong * 0], 1)


def score_of(counts: Tensor, task_type: TaskType) -> Tensor:
    """Convert summed counts (V, 3) to accuracy, micro F1 or R², (V,); larger is better.

    R² assumes targets with variance one, as in the training loop.
    """
    first, second, third = counts.unbind(1)
    if task_type == "single_label":
        return first / second.clamp(min=1)
    if task_type == "multi_label":
        return 2 * first / (second + third).clamp(min=1)
    return 1 - first / second.clamp(min=1)
