"""How right answers are: losses for training, counts while training, and figures for reports.

Shapes: V variants, n images, K outputs. Targets are (n,) indices, (n, K) of 0 and 1, or (n, K)
numbers, as `training.data` makes them.
"""

import math
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from training.data import Problem

Floats = npt.NDArray[np.float64]
CALIBRATION_BINS = 15
# A score of 95 % confidence: 1.96 standard deviations.
Z = 1.959963984540054


def losses(logits: Tensor, targets: Tensor, problem: Problem) -> Tensor:
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


def hits(logits: Tensor, targets: Tensor, problem: Problem) -> Tensor:
    """What adds up to the score: (V, 3) of counts."""
    if problem == "single_label":
        right = (logits.argmax(dim=2) == targets).sum(dim=1)
        return torch.stack([right, torch.full_like(right, logits.shape[1]), right * 0], 1).double()
    if problem == "multi_label":
        said, true = logits > 0, targets > 0.5
        both = (said & true).sum(dim=(1, 2))
        return torch.stack([both, said.sum(dim=(1, 2)), true.sum().expand_as(both)], 1).double()
    wrong = (logits - targets).square().sum(dim=(1, 2)).double()
    return torch.stack([wrong, torch.full_like(wrong, targets.numel()), wrong * 0], 1)


def score(counts: Tensor, problem: Problem) -> Tensor:
    """(V, 3) of added counts to one figure each, larger is better: accuracy, micro F1, or R².

    R² is of targets that were brought to variance one, as the loop has them.
    """
    first, second, third = counts.unbind(1)
    if problem == "single_label":
        return first / second.clamp(min=1)
    if problem == "multi_label":
        return 2 * first / (second + third).clamp(min=1)
    return 1 - first / second.clamp(min=1)


SCORE_NAMES = {"single_label": "accuracy", "multi_label": "micro F1", "regression": "R²"}


# --- figures of one variant or bundle -------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Calibration:
    """Confidence against accuracy, in bins of equal width."""

    confidence: list[float]
    accuracy: list[float]
    count: list[int]
    error: float  # expected calibration error


@dataclass(frozen=True, slots=True)
class ClassFigures:
    """One class; `share` is of its images, so for several labels it is the recall."""

    label: str
    images: int
    right: int
    predicted: int

    @property
    def recall(self) -> float:
        return self.right / self.images if self.images else math.nan

    @property
    def precision(self) -> float:
        return self.right / self.predicted if self.predicted else math.nan


@dataclass(frozen=True, slots=True)
class Figures:
    """What the answers to a set of images are worth."""

    problem: Problem
    images: int
    values: dict[str, float]  # by name: accuracy, loss, …
    interval: tuple[float, float] | None = None  # of the accuracy, 95 %
    classes: list[ClassFigures] = field(default_factory=list)
    confusion: npt.NDArray[np.int64] | None = None  # (K, K): rows are true
    calibration: Calibration | None = None

    @property
    def headline(self) -> tuple[str, float]:
        name = next(iter(self.values))
        return name, self.values[name]


def figures(logits: Tensor, targets: Tensor, problem: Problem, labels: tuple[str, ...]) -> Figures:
    """Of answers (n, K)."""
    if problem == "single_label":
        return _single_label(logits, targets, labels)
    if problem == "multi_label":
        return _multi_label(logits, targets, labels)
    return _regression(logits, targets)


def wilson(right: int, count: int) -> tuple[float, float]:
    """The 95 % interval of a share, which stays sensible near 0 and 1 and for few images."""
    if not count:
        return 0.0, 1.0
    share, square = right / count, Z * Z
    middle = (share + square / (2 * count)) / (1 + square / count)
    spread = math.sqrt(share * (1 - share) / count + square / (4 * count * count))
    half = Z * spread / (1 + square / count)
    return max(0.0, middle - half), min(1.0, middle + half)


def _single_label(logits: Tensor, targets: Tensor, labels: tuple[str, ...]) -> Figures:
    count, outputs = logits.shape
    said = logits.argmax(dim=1)
    right = int((said == targets).sum())
    confusion = torch.bincount(targets * outputs + said, minlength=outputs * outputs)
    table = confusion.view(outputs, outputs).numpy()
    confidence = logits.softmax(dim=1).amax(dim=1).double().numpy()
    correct = (said == targets).double().numpy()
    calibration = calibrate(confidence, correct)
    top = min(5, outputs)
    among = (logits.topk(top, dim=1).indices == targets[:, None]).any(dim=1).double().mean()
    values = {
        "accuracy": right / count,
        f"top{top}_accuracy": float(among),
        "loss": float(F.cross_entropy(logits, targets)),
        "calibration_error": calibration.error,
    }
    classes = [
        ClassFigures(label, int(table[k].sum()), int(table[k, k]), int(table[:, k].sum()))
        for k, label in enumerate(labels)
    ]
    return Figures("single_label", count, values, wilson(right, count), classes, table, calibration)


def _multi_label(logits: Tensor, targets: Tensor, labels: tuple[str, ...]) -> Figures:
    said, true = logits > 0, targets > 0.5
    both = (said & true).sum(dim=0)
    precisions = [
        average_precision(logits[:, k].double().numpy(), true[:, k].numpy())
        for k in range(logits.shape[1])
    ]
    known = [value for value in precisions if not math.isnan(value)]
    total = int(said.sum() + true.sum())
    values = {
        "mean_average_precision": float(np.mean(known)) if known else 0.0,
        "micro_f1": 2 * int(both.sum()) / total if total else 0.0,
        "exact_match": float((said == true).all(dim=1).double().mean()),
        "loss": float(loss_sums(logits[None], targets, "multi_label")[0] / len(logits)),
    }
    classes = [
        ClassFigures(label, int(true[:, k].sum()), int(both[k]), int(said[:, k].sum()))
        for k, label in enumerate(labels)
    ]
    return Figures("multi_label", len(logits), values, None, classes)


def _regression(predicted: Tensor, targets: Tensor) -> Figures:
    error = (predicted - targets).double()
    spread = (targets - targets.mean(dim=0)).double().square().sum()
    explained = 1 - float(error.square().sum() / spread) if float(spread) else 0.0
    values = {
        "r2": explained,
        "mean_absolute_error": float(error.abs().mean()),
        "root_mean_square_error": float(error.square().mean().sqrt()),
    }
    return Figures("regression", len(predicted), values)


def average_precision(scores: Floats, true: npt.NDArray[np.bool_]) -> float:
    """The area under precision over recall; NaN where nothing is true."""
    if not true.any():
        return math.nan
    order = np.argsort(-scores, kind="stable")
    ranked = true[order]
    precision = np.cumsum(ranked) / np.arange(1, len(ranked) + 1)
    return float(precision[ranked].mean())


def calibrate(confidence: Floats, correct: Floats) -> Calibration:
    place = np.minimum((confidence * CALIBRATION_BINS).astype(int), CALIBRATION_BINS - 1)
    counts = np.bincount(place, minlength=CALIBRATION_BINS)
    sure = np.bincount(place, confidence, CALIBRATION_BINS) / np.maximum(counts, 1)
    right = np.bincount(place, correct, CALIBRATION_BINS) / np.maximum(counts, 1)
    error = float((counts * np.abs(sure - right)).sum() / max(1, counts.sum()))
    return Calibration(sure.tolist(), right.tolist(), counts.tolist(), error)
