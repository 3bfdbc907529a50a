"""Closed-form heads of tasks that are taught from examples and class names.

A head reads the final feature of an image, and every layer through its summary. Each of these
blocks of features gets its own closed-form heads (`heads.lda`) with exact leave-one-out logits: the
final feature one, and layers one for each of two shrinkages. The logits of the task are a weighted
sum of theirs. The weights are not negative and follow from a logistic regression on the
leave-one-out logits.

With few examples the final feature is the safest block, so it is the prior: its weight is fitted
alone first, and then all weights with a penalty on those of the layers and on moving away from the
first. Layers with a negligible weight are dropped. The sum of linear heads is one linear head.

Shapes: n examples, K classes, D width, P parts of a summary, F features: D, then P · D per layer.
"""

import itertools
from collections.abc import Callable, Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

from engram_server.errors import UnteachableExamples
from engram_server.model.heads.examples import Examples, FeatureLayout
from engram_server.model.heads.lda import (
    Block,
    ClassIndices,
    ClosedFormHead,
    Floats,
    LeaveOneOut,
    calibrate_lda,
    calibrate_ridge,
    check_label,
    fit_temperature,
    label_singletons,
    lda_blocks,
    lda_temperature,
    log_softmax,
    ridge_block,
    solve_lda,
    solve_ridge,
    solve_ridge_with_text,
)
from engram_server.model.heads.text_head import TextHead

Mask = npt.NDArray[np.bool_]
# Of B weights: the loss in nats, its gradient (B,) and its Hessian (B, B).
Loss = Callable[[Floats], tuple[float, Floats, Floats]]
Features = npt.NDArray[np.floating]
Check = Callable[[], None]

# Of the covariance of a layer. Which one is better depends on the data, and the fusion decides.
SHRINKAGES: Final = (0.05, 0.8)
PENALTY: Final = 1.0  # nats per weight of a layer, whose logits have unit deviation
MIN_SHARE: Final = 0.25  # of its own weight that the final feature keeps
NEGLIGIBLE: Final = 0.02  # of the sum of weights: a head with less is dropped
MAX_LAYERS: Final = 5  # that a task reads; the others hardly contribute, and cost space and time
MAX_STEPS: Final = 200
# Examples to which the weights are fitted: enough for so few weights, and little work.
FITTED_EXAMPLES: Final = 1000
FITTED_LOGITS: Final = 200_000
_TOLERANCE: Final = 1e-7
_TINY: Final = 1e-9


def solve(
    examples: Examples,
    text: TextHead | None = None,
    layout: FeatureLayout | None = None,
    check: Check = lambda: None,
) -> ClosedFormHead:
    """Compute the head of a task; raise UnteachableExamples if there are too few classes.

    With a text head of the same classes the result is a normalised head. `layout` is that of
    features with summaries. `check` is called between steps and may raise to stop.
    """
    check_teachable(examples, text)
    if text is not None and _lacks_images(examples):
        unknown = np.full(len(examples), np.nan)
        nothing = LeaveOneOut(0, 0, unknown, np.zeros_like(examples.targets))
        return ClosedFormHead(text.weight, text.biases.astype(np.float32), None, nothing)
    single_label = examples.task_type == "single_label"
    if layout is not None and text is None and examples.features.shape[1] > layout.width:
        fuse = fuse_lda if single_label else fuse_ridge
        return fuse(examples.features, layout, examples.targets, check)
    features = examples.features.astype(np.float64)
    if text is not None:
        features = text.normalised(features)
    if single_label:
        text = None if text is None else text.centred()
        return solve_lda(features, examples.targets.argmax(axis=1), text)
    if text is not None:
        return solve_ridge_with_text(features, examples.targets, text)
    return solve_ridge(features, examples.targets)


def _lacks_images(examples: Examples) -> bool:
    """Whether the images cannot separate anything: there are none, or all are of one class."""
    classes = int(examples.targets.any(axis=0).sum())
    return not len(examples) or (examples.task_type == "single_label" and classes < 2)


def check_teachable(examples: Examples, text: TextHead | None = None) -> None:
    single_label = examples.task_type == "single_label"
    if text is not None:
        if single_label and len(examples.labels) < 2:
            raise UnteachableExamples(
                f"'{text.labels[0][:60]}' is the only class. A single-label task needs at least "
                f"two: add another class name."
            )
        if single_label and _lacks_images(examples):
            for label in itertools.compress(examples.labels, ~text.named):
                raise UnteachableExamples(
                    f"All images are of class '{label[:60]}', which has no class name to compare "
                    f"with. Name this class too, or add images of the other classes."
                )
        return
    if not len(examples):
        raise UnteachableExamples("There are no images to learn from. Add labelled images.")
    names = examples.labels
    if single_label:
        if len(names) < 2:
            raise UnteachableExamples(
                f"All images are of class '{names[0][:60]}'. A single-label task needs at least "
                f"two classes: add images of another class, for example 'other'."
            )
        return
    for name, count in zip(names, examples.targets.sum(axis=0), strict=True):
        check_label(name, int(count), len(examples))
    if not names:
        raise UnteachableExamples("No image has a label. Label some of the images.")


def fuse_lda(
    features: Features, layout: FeatureLayout, targets: Mask, check: Check = lambda: None
) -> ClosedFormHead:
    """Solve a single-label head (K, F) on every layer."""
    classes = targets.argmax(axis=1)
    used = np.bincount(classes)[classes] > 1  # a singleton has no leave-one-out logits
    final, *layers = layout.blocks(features.shape[1])
    scales = np.empty(features.shape[1])
    # One block at a time: as float64, all features would take four times their memory.
    scaled, scales[final] = _scaled(features[:, final], layout.width)
    blocks, columns = lda_blocks(scaled, classes), [final]
    for layer in layers:
        check()
        scaled, scales[layer] = _scaled(features[:, layer], layout.width)
        blocks += lda_blocks(scaled, classes, SHRINKAGES)
        columns += [layer] * len(SHRINKAGES)
    del scaled
    factors = np.eye(1, len(blocks))[0]
    if used.any():
        used = _some(used, targets.shape[1])
        logits = np.stack([block.left_out[used].astype(np.float32) for block in blocks])
        logits -= logits.mean(axis=2, keepdims=True)  # which softmax ignores
        deviations = np.maximum(logits.std(axis=(1, 2)), _TINY)
        expected = lda_temperature(targets.shape[1])
        temperature = fit_temperature(logits[0], classes[used], expected)
        logits /= deviations[:, None, None].astype(np.float32)
        loss = _checked(softmax_loss(logits, classes[used]), check)
        weights = fit_weights(loss, len(blocks), deviations[0] / temperature)
        factors = _of_strongest_layers(weights, columns) / deviations
    fused = _fused(blocks, factors, columns, scales)
    # Fitted factors contain the temperature.
    return calibrate_lda(fused, classes, 1.0 if used.any() else None)


def fuse_ridge(
    features: Features, layout: FeatureLayout, targets: Mask, check: Check = lambda: None
) -> ClosedFormHead:
    """Solve a multi-label head (K, F) on every layer."""
    used = ~label_singletons(targets)
    columns = layout.blocks(features.shape[1])
    scales, blocks = np.empty(features.shape[1]), []
    for of in columns:
        check()
        scaled, scales[of] = _scaled(features[:, of], layout.width)
        blocks.append(ridge_block(scaled, targets))
    del scaled
    factors = np.eye(1, len(blocks))[0]
    if used.any():
        rows: Mask = np.logical_or.reduce(used, axis=1)
        used &= _some(rows, targets.shape[1])[:, None]
        logits = np.stack([block.left_out[used].astype(np.float32) for block in blocks])
        deviations = np.maximum(logits.std(axis=1), _TINY)
        temperature = calibrate_ridge(blocks[0], targets).temperature
        assert temperature is not None
        logits /= deviations[:, None].astype(np.float32)
        loss = _checked(sigmoid_loss(logits, targets[used]), check)
        weights = fit_weights(loss, len(blocks), deviations[0] / temperature)
        factors = _of_strongest_layers(weights, columns) / deviations
    # Every block scores an example with a label 1 above one without, and so does their mean.
    return calibrate_ridge(_fused(blocks, factors / factors.sum(), columns, scales), targets)


def _some(used: Mask, classes: int) -> Mask:
    """Select evenly spaced examples, if there are more than the weights need."""
    indices = np.flatnonzero(used)
    count = max(FITTED_EXAMPLES, FITTED_LOGITS // classes)
    if len(indices) <= count:
        return used
    selected = np.zeros_like(used)
    selected[indices[np.linspace(0, len(indices) - 1, count).astype(int)]] = True
    return selected


def _of_strongest_layers(weights: Floats, columns: Sequence[slice]) -> Floats:
    """Set the weights of weaker layers to zero. The first column is the final feature."""
    of_layer: dict[int, float] = {}
    for weight, column in zip(weights[1:], columns[1:], strict=True):
        of_layer[column.start] = of_layer.get(column.start, 0.0) + weight
    strongest = sorted(of_layer, key=of_layer.__getitem__, reverse=True)[:MAX_LAYERS]
    return np.where([column.start in (0, *strongest) for column in columns], weights, 0.0)


def _scaled(block: Features, width: int) -> tuple[Floats, Floats]:
    """Divide each part of a block by its deviation; return the deviation of each column as well."""
    scaled = block.astype(np.float64)
    parts = (scaled - scaled.mean(axis=0)).reshape(len(scaled), -1, width)
    deviations = np.sqrt(np.einsum("npd,npd->p", parts, parts) / (len(scaled) * width))
    scales = np.repeat(np.maximum(deviations, _TINY), width)
    scaled /= scales
    return scaled, scales


def _checked(loss: Loss, check: Check) -> Loss:
    def checked(weights: Floats) -> tuple[float, Floats, Floats]:
        check()
        return loss(weights)

    return checked


def _fused(
    blocks: Sequence[Block], factors: Floats, columns: Sequence[slice], scales: Floats
) -> Block:
    """Add heads of scaled blocks to one head of all features, with zeros for those of factor 0."""
    weight = np.zeros((len(blocks[0].bias), len(scales)))
    bias, left_out = np.zeros(len(weight)), np.zeros_like(blocks[0].left_out)
    for block, factor, of in zip(blocks, factors, columns, strict=True):
        if factor:
            weight[:, of] += factor * block.weight / scales[of]
            bias += factor * block.bias
            left_out += factor * block.left_out
    return Block(weight, bias, left_out)


def softmax_loss(logits: Features, classes: ClassIndices) -> Loss:
    """The loss of a weighted sum of logits (B, n, K), by its B weights."""
    flat, rows = logits.reshape(len(logits), -1), np.arange(len(classes))
    of_class = logits[:, rows, classes].sum(axis=1)

    def loss(weights: Floats) -> tuple[float, Floats, Floats]:
        log_probabilities = log_softmax(np.tensordot(weights, logits, 1))
        weighted = logits * np.exp(log_probabilities)
        means = weighted.sum(axis=2)  # (B, n)
        hessian = weighted.reshape(flat.shape) @ flat.T - means @ means.T
        value = -float(log_probabilities[rows, classes].sum())
        return value, means.sum(axis=1) - of_class, hessian

    return loss


def sigmoid_loss(logits: Features, targets: Mask) -> Loss:
    """The loss of a weighted sum of logits (B, m), by its B weights."""
    signs = np.where(targets, 1.0, -1.0)

    def loss(weights: Floats) -> tuple[float, Floats, Floats]:
        margins = signs * (weights @ logits)
        wrong = np.exp(-np.logaddexp(0, margins))  # the probability of the other answer
        hessian = (logits * (wrong * (1 - wrong))) @ logits.T
        return float(np.logaddexp(0, -margins).sum()), -logits @ (signs * wrong), hessian

    return loss


def fit_weights(loss: Loss, count: int, first: float) -> Floats:
    """Minimise the penalised loss over weights that are not negative, by projected Newton steps.

    `first` is the weight of the first block alone, which keeps a part of it. Negligible weights of
    other blocks become zero.
    """
    is_first = np.eye(1, count)[0]
    lowest = is_first * MIN_SHARE * first

    def penalised(weights: Floats) -> tuple[float, Floats, Floats]:
        value, gradient, hessian = loss(weights)
        off = weights[0] - first
        value += PENALTY * (float(weights[1:].sum()) + 0.5 * off * off)
        gradient = gradient + PENALTY * np.where(is_first, off, 1.0)
        return value, gradient, hessian + PENALTY * np.diag(is_first)

    weights = first * is_first
    value, gradient, hessian = penalised(weights)
    for _ in range(MAX_STEPS):
        free = (weights > lowest) | (gradient < 0)
        step = np.zeros(count)
        ridge = _TINY * (1 + np.trace(hessian)) * np.eye(int(free.sum()))
        step[free] = -np.linalg.solve(hessian[np.ix_(free, free)] + ridge, gradient[free])
        size, moved = 1.0, np.maximum(weights + step, lowest)
        following = penalised(moved)
        while following[0] > value and size > _TOLERANCE:
            size /= 2
            moved = np.maximum(weights + size * step, lowest)
            following = penalised(moved)
        gain = value - following[0]
        if gain > 0:
            weights, (value, gradient, hessian) = moved, following
        if gain <= _TOLERANCE * abs(value):
            break
    return np.where((weights >= NEGLIGIBLE * weights.sum()) | (is_first > 0), weights, 0.0)
