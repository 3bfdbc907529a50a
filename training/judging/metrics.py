"""How right answers are: the figures of reports, manifests and evaluations.

Logits are (n, K) of n images and K outputs. Targets are (n,) indices, (n, K) of 0 and 1, or (n, K)
numbers, as `training.data.dataset` makes them.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from server.model.closed_form import wilson
from training.data.dataset import Problem
from training.fitting.losses import loss_sums

Floats = npt.NDArray[np.float64]
CALIBRATION_BINS = 15
# A score of 95 % confidence: 1.96 standard deviations.


@dataclass(frozen=True, slots=True)
class Calibration:
    """Confidence against accuracy, in bins of equal width."""

    confidence: list[float]
    accuracy: list[float]
    count: list[int]
    error: float  # expected calibration error


@dataclass(frozen=True, slots=True)
class ClassFigures:
    """One class: how many images it has, how many were given its label, and how many rightly."""

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
    """How right the answers to a set of images are."""

    problem: Problem
    images: int
    values: dict[str, float]  # by name: accuracy, loss, …
    interval: tuple[float, float] | None = None  # of the accuracy, 95 %
    classes: list[ClassFigures] = field(default_factory=list)
    confusion: npt.NDArray[np.int64] | None = None  # (K, K): rows are true
    calibration: Calibration | None = None

    @property
    def headline(self) -> tuple[str, float]:
        return next(iter(self.values.items()))


def figures(logits: Tensor, targets: Tensor, problem: Problem, labels: tuple[str, ...]) -> Figures:
    if problem == "single_label":
        return _single_label(logits, targets, labels)
    if problem == "multi_label":
        return _multi_label(logits, targets, labels)
    return _regression(logits, targets)


def manifest_metrics(figures: Mapping[str, Figures]) -> dict[str, float]:
    """Figures by split as a manifest has them: `test_accuracy`, `test_accuracy_low` …"""
    metrics: dict[str, float] = {}
    for split, one in figures.items():
        metrics[f"{split}_images"] = float(one.images)
        metrics |= {f"{split}_{name}": round(value, 6) for name, value in one.values.items()}
        if one.interval is not None:
            name = one.headline[0]
            for end, value in zip(("low", "high"), one.interval, strict=True):
                metrics[f"{split}_{name}_{end}"] = round(value, 6)
    return metrics


def _single_label(logits: Tensor, targets: Tensor, labels: tuple[str, ...]) -> Figures:
    count, outputs = logits.shape
    predicted = logits.argmax(dim=1)
    right = int((predicted == targets).sum())
    confusion = torch.bincount(targets * outputs + predicted, minlength=outputs * outputs)
    table = confusion.view(outputs, outputs).numpy()
    confidence = logits.softmax(dim=1).amax(dim=1).double().numpy()
    correct = (predicted == targets).double().numpy()
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
    predicted, true = logits > 0, targets > 0.5
    both = (predicted & true).sum(dim=0)
    precisions = [
        average_precision(logits[:, k].double().numpy(), true[:, k].numpy())
        for k in range(logits.shape[1])
    ]
    known = [value for value in precisions if not math.isnan(value)]
    total = int(predicted.sum() + true.sum())
    values = {
        "mean_average_precision": float(np.mean(known)) if known else 0.0,
        "micro_f1": 2 * int(both.sum()) / total if total else 0.0,
        "exact_match": float((predicted == true).all(dim=1).double().mean()),
        "loss": float(loss_sums(logits[None], targets, "multi_label")[0] / len(logits)),
    }
    classes = [
        ClassFigures(label, int(true[:, k].sum()), int(both[k]), int(predicted[:, k].sum()))
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
