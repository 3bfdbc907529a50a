"""Metrics of reports, manifests and evaluations, and the cost of a task.

Logits are (n, K) of n images and K outputs. Targets are (n,) indices, (n, K) of 0 and 1, or (n, K)
numbers, as returned by `DataSet.targets`.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from engram_server.model import Backbone, TaskWeights
from engram_server.model.heads.lda import Floats, wilson
from torch import Tensor

from engram_training.data.dataset import TaskType
from engram_training.fitting.losses import mean_losses

CALIBRATION_BINS = 15


@dataclass(frozen=True, slots=True)
class Calibration:
    """Confidence and accuracy in bins of equal width."""

    confidence: list[float]
    accuracy: list[float]
    count: list[int]
    error: float  # expected calibration error


@dataclass(frozen=True, slots=True)
class ClassFigures:
    """The counts of one class: images, correct predictions and all predictions."""

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
    task_type: TaskType
    images: int
    values: dict[str, float]  # by name: accuracy, loss, …
    interval: tuple[float, float] | None = None  # of the accuracy, 95 %
    classes: list[ClassFigures] = field(default_factory=list)
    confusion: npt.NDArray[np.int64] | None = None  # (K, K): rows are true
    calibration: Calibration | None = None

    @property
    def headline(self) -> tuple[str, float]:
        return next(iter(self.values.items()))

    @property
    def labels(self) -> list[str]:
        return [one.label for one in self.classes]


def figures(
    logits: Tensor, targets: Tensor, task_type: TaskType, labels: tuple[str, ...]
) -> Figures:
    if task_type == "single_label":
        return _single_label(logits, targets, labels)
    if task_type == "multi_label":
        return _multi_label(logits, targets, labels)
    return _regression(logits, targets)


def manifest_metrics(figures: Mapping[str, Figures]) -> dict[str, float]:
    """Flatten figures by split for the manifest: `test_accuracy`, `test_accuracy_low` …"""
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
    correct = predicted == targets
    right = int(correct.sum())
    confusion = torch.bincount(targets * outputs + predicted, minlength=outputs * outputs)
    table = confusion.view(outputs, outputs).numpy()
    confidence = logits.softmax(dim=1).amax(dim=1).double().numpy()
    calibration = calibrate(confidence, correct.double().numpy())
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
    defined = [value for value in precisions if not math.isnan(value)]
    total = int(predicted.sum() + true.sum())
    values = {
        "mean_average_precision": float(np.mean(defined)) if defined else 0.0,
        "micro_f1": 2 * int(both.sum()) / total if total else 0.0,
        "exact_match": float((predicted == true).all(dim=1).double().mean()),
        "loss": float(mean_losses(logits[None], targets, "multi_label")[0]),
    }
    classes = [
        ClassFigures(label, int(true[:, k].sum()), int(both[k]), int(predicted[:, k].sum()))
        for k, label in enumerate(labels)
    ]
    return Figures("multi_label", len(logits), values, None, classes)


def _regression(predicted: Tensor, targets: Tensor) -> Figures:
    error = (predicted - targets).double()
    variation = (targets - targets.mean(dim=0)).double().square().sum()
    explained = 1 - float(error.square().sum() / variation) if float(variation) else 0.0
    values = {
        "r2": explained,
        "mean_absolute_error": float(error.abs().mean()),
        "root_mean_square_error": float(error.square().mean().sqrt()),
    }
    return Figures("regression", len(predicted), values)


def average_precision(scores: Floats, true: npt.NDArray[np.bool_]) -> float:
    """Return the area under the precision-recall curve; NaN without positives."""
    if not true.any():
        return math.nan
    order = np.argsort(-scores, kind="stable")
    ranked = true[order]
    precision = np.cumsum(ranked) / np.arange(1, len(ranked) + 1)
    return float(precision[ranked].mean())


def calibrate(confidence: Floats, correct: Floats) -> Calibration:
    bins = np.minimum((confidence * CALIBRATION_BINS).astype(int), CALIBRATION_BINS - 1)
    counts = np.bincount(bins, minlength=CALIBRATION_BINS)
    mean_confidence = np.bincount(bins, confidence, CALIBRATION_BINS) / np.maximum(counts, 1)
    accuracy = np.bincount(bins, correct, CALIBRATION_BINS) / np.maximum(counts, 1)
    error = float((counts * np.abs(mean_confidence - accuracy)).sum() / max(1, counts.sum()))
    return Calibration(mean_confidence.tolist(), accuracy.tolist(), counts.tolist(), error)


@dataclass(frozen=True, slots=True)
class Cost:
    """The cost of a task, counted as in Table 5 of the paper. A multiply-add is two FLOPs."""

    parameters: int
    backbone_flops: int  # per image
    task_flops: int  # added by this task, per image

    @property
    def share(self) -> float:
        return self.task_flops / self.backbone_flops


def cost_of(backbone: Backbone, weights: TaskWeights) -> Cost:
    """Count D·L·m + D + D·K parameters, without the K biases as in Table 5, plus LoRA."""
    layers, width = backbone.layers, backbone.width
    outputs = weights.head_weight.shape[0]
    memory = 0 if weights.memory is None else weights.memory.shape[1]
    has_row = weights.class_token is not None
    lora = sum(a.numel() + b.numel() for a, b in weights.lora.values())
    parameters = layers * width * memory + width * has_row + width * outputs + lora
    tokens = backbone.geometry.tokens
    embedding = 2 * backbone.geometry.patches * backbone.embedding.patch_weight.numel()
    trunk = embedding + layers * tokens * _row_flops(backbone, tokens)
    row = layers * _row_flops(backbone, tokens + 1 + memory) if has_row else 0
    # Each LoRA value is multiplied once, with the task row.
    return Cost(parameters, trunk, row + 2 * lora + 2 * width * outputs)


def _row_flops(backbone: Backbone, keys: int) -> int:
    """Return the FLOPs of one row in one layer with this many keys."""
    block = backbone.blocks[0]
    matrices = (block.qkv_weight, block.out_weight, block.up_weight, block.down_weight)
    products = sum(matrix.shape.numel() for matrix in matrices)
    return 2 * products + 4 * keys * backbone.geometry.attention_width
