"""Everything that needs no gradient: closed-form heads, the OOD detector and the temperature."""

from dataclasses import replace
from typing import NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from engram_server.model import Backbone, TaskWeights
from engram_server.model.heads import lda
from engram_server.model.heads.closed_form import (
    fit_weights,
    fuse_lda,
    fuse_ridge,
    sigmoid_loss,
    softmax_loss,
)
from engram_server.model.heads.drift import DriftReference, class_shares, fit_drift_reference
from engram_server.model.heads.examples import FeatureLayout
from engram_server.model.heads.lda import Floats, LeaveOneOut, solve_lda, solve_ridge
from engram_server.model.heads.ood import OodDetector, fit_ood_detector
from engram_server.model.masked_pass import masked_pass
from engram_server.model.tasks import StackCache, prepare
from torch import Tensor

from engram_training.data.dataset import TaskType
from engram_training.data.images import encode
from engram_training.fitting.parts import Part

Row = TypeVar("Row", bound=np.generic)

ABSENT = 10.0  # negative bias of a label without training images, relative to an average label
_TINY = 1e-9
MAX_IMAGES = 20_000  # for OOD detectors
MAX_VALUES = 40_000_000  # of the features that a closed-form head is solved from


class SolvedHead(NamedTuple):
    weight: Tensor  # (K, D), or (K, F) if it reads every layer
    bias: Tensor  # (K,)
    leave_one_out: LeaveOneOut | None = None
    stride: int = 1  # it was solved from every image at a multiple of this index


def example_features(backbone: Backbone, part: Part, batch: int) -> npt.NDArray[np.float16]:
    """Return the features of each image, (n, F), rounded like kept contexts.

    The batches do not depend on how many contexts are kept, so the result is always the same.
    """
    kept = [] if part.kept is None else part.kept.readouts
    first = len(kept) // batch * batch
    readouts = kept[:first]
    for start in range(first, len(part), batch):
        places = range(start, min(start + batch, len(part)))
        readout = encode(backbone, part.images.inputs(places, rows=False), rows=False).readout
        readouts += readout.cpu().half().unbind(0)
    return backbone.features_of(torch.stack(readouts).numpy())


@torch.no_grad()
def row_features(backbone: Backbone, part: Part, batch: int) -> Floats:
    """Return the features of an untrained task row for each image, (n, D).

    They are close to the backbone's class token, if it has one, and different otherwise.
    """
    blank = torch.zeros(1, backbone.width)
    task = prepare(backbone, TaskWeights(blank, class_token=backbone.first_token))
    features = torch.empty(len(part), backbone.width)
    for start in range(0, len(part), batch):
        places = range(start, min(start + batch, len(part)))
        if part.kept is None:
            contexts, order = encode(backbone, part.images.batch(places)), list(range(len(places)))
        else:
            contexts, order = part.kept.batch(places)
        result = masked_pass(backbone, None, contexts, [[task]] * len(places), StackCache())
        features[[places[position] for position in order]] = result.logits[0].features.cpu()
    return features.double().numpy()


def solved_head(
    features: npt.NDArray[np.floating],
    targets: npt.NDArray[np.generic],
    task_type: TaskType,
    outputs: int,
    layout: FeatureLayout | None = None,
) -> SolvedHead | None:
    """Solve the head in closed form; None if training has fewer than two classes.

    With a layout, the features have summaries, and the head reads every layer.
    """
    most = max(1, MAX_VALUES // features.shape[1])
    chosen, stride = some(features, most)
    values, targets = chosen.astype(np.float64), some(targets, most)[0]
    weight, bias = torch.zeros(outputs, values.shape[1]), torch.full((outputs,), -ABSENT)
    if task_type == "single_label":
        present, classes = np.unique(targets, return_inverse=True)
        if len(present) < 2:
            return None
        if layout is None:
            solved = solve_lda(values, classes)
        else:
            solved = fuse_lda(values, layout, np.eye(len(present), dtype=np.bool_)[classes])
    elif task_type == "multi_label":
        has_label = targets.astype(np.bool_)
        (present,) = np.nonzero(has_label.any(axis=0) & ~has_label.all(axis=0))
        bias[torch.from_numpy(has_label.all(axis=0))] = ABSENT
        if not len(present):
            return None
        if layout is None:
            solved = solve_ridge(values, has_label[:, present])
        else:
            solved = fuse_ridge(values, layout, has_label[:, present])
    else:
        return None
    weight[present], bias[present] = torch.from_numpy(solved.weight), torch.from_numpy(solved.bias)
    return SolvedHead(weight, bias, solved.leave_one_out, stride)


def fit_detector(
    tokens: npt.NDArray[np.floating],
    targets: npt.NDArray[np.generic],
    task_type: TaskType,
    small_images: bool = False,
) -> OodDetector | None:
    values = some(tokens, MAX_IMAGES)[0].astype(np.float64)
    targets, _ = some(targets, MAX_IMAGES)
    single = task_type == "single_label"
    classes = np.unique(targets, return_inverse=True)[1] if single else None
    return fit_ood_detector(values, classes, small_images=small_images)


def fit_reference(
    tokens: npt.NDArray[np.floating],
    targets: npt.NDArray[np.generic],
    task_type: TaskType,
    classes: int,
    ood: OodDetector | None,
) -> DriftReference | None:
    """Fit the drift reference of a task to the class tokens of its training images."""
    values = some(tokens, MAX_IMAGES)[0].astype(np.float64)
    shares = None
    if task_type == "single_label":
        shares = class_shares(targets.astype(np.int64), classes)
    return fit_drift_reference(values, shares, None if ood is None else ood.typical)


def some(rows: npt.NDArray[Row], most: int) -> tuple[npt.NDArray[Row], int]:
    """Take every n-th row, from all classes, because images are sorted by path; return n too."""
    stride = 1 + (len(rows) - 1) // most
    return rows[::stride], stride


def fit_temperature(logits: Tensor, targets: Tensor, task_type: TaskType) -> float:
    """Fit the temperature on held-out images; each label of a multi-label task is binary."""
    values = logits.double().numpy()
    if task_type == "single_label":
        return lda.fit_temperature(values, targets.numpy())
    flat = values.reshape(-1)
    classes = targets.numpy().reshape(-1).astype(np.int64)
    return lda.fit_temperature(np.stack([np.zeros_like(flat), flat], axis=1), classes)


def fused(
    closed_form: Tensor, row: Tensor, targets: Tensor, task_type: TaskType
) -> tuple[float, float]:
    """Fit the factors of two logits (n, K) whose sum predicts best on held-out images.

    The closed form is the prior, as the final feature is among layers (`heads.closed_form`).
    """
    deviation = max(float(row.std()), _TINY)
    logits = torch.stack([closed_form, row / deviation]).double().cpu().numpy()
    if task_type == "single_label":
        loss = softmax_loss(logits, targets.cpu().numpy())
    else:
        loss = sigmoid_loss(logits.reshape(2, -1), targets.cpu().numpy().reshape(-1) > 0)
    of_closed_form, of_row = fit_weights(loss, 2, 1.0)
    return float(of_closed_form), float(of_row) / deviation


def with_temperature(weights: TaskWeights, temperature: float) -> TaskWeights:
    """Divide the logits of a head by folding the temperature into it."""
    bias, layers, feature = weights.head_bias, weights.layers, weights.feature_weight
    return replace(
        weights,
        head_weight=weights.head_weight / temperature,
        head_bias=None if bias is None else bias / temperature,
        layers=None if layers is None else replace(layers, weight=layers.weight / temperature),
        feature_weight=None if feature is None else feature / temperature,
    )
