"""Closed-form heads on one block of features, with leave-one-out predictions.

Single label: linear discriminant analysis (LDA). Classes are Gaussians with a shared covariance:
the covariance within classes plus a small share of the covariance of all examples (the only one
there is with one image per class), shrunk towards a multiple of the identity. Class means are
shrunk towards the mean of all examples. Multi label: ridge regression on 0 and 1.

Leaving an example out moves the means and changes the covariance by rank two, so all leave-one-out
predictions follow from one eigendecomposition. They are used to fit the temperature, which is
folded into the head, and the OOD threshold (`heads.ood`).

If class names were read as well (`families.text_tower`), the text of a class is its prior and
counts like a few images; such a class may have no images at all.

Shapes: n examples, K classes, D width. Everything is computed in float64.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
import numpy.typing as npt

from engram_server.errors import UnteachableExamples
from engram_server.model.heads.text_head import TextHead

Floats = npt.NDArray[np.float64]
ClassIndices = npt.NDArray[np.int64]

# Measured by research/closed_form.py; docs/explanation/teaching.md has the tables.
PRIOR_COUNT: Final = 2.0  # the mean of all examples counts like this many examples of a class
TOTAL_WEIGHT: Final = 10.0  # the covariance of all examples counts like this many examples
MIN_SHRINKAGE: Final = 0.15  # of the covariance, with infinitely many examples
MAX_SHRINKAGE: Final = 0.8  # with one image per class
PRIOR_TEMPERATURE: Final = 0.25  # of LDA logits, times the root of the number of classes
TEMPERATURE_WEIGHT: Final = 4.0  # prior precision of the log temperature
RIDGE: Final = 0.3  # shrinkage of the covariance in ridge regression
PRIOR_SLOPE: Final = 10.0  # of a logit, between images without a label and images with it
SHIFT_WEIGHT: Final = 0.5  # prior precision of the shift of a logit
ERROR_RATE: Final = 0.1  # of labels, before the examples are seen
Z: Final = 1.959963984540054  # quantile of the normal distribution for a 95 % interval
_CHUNK: Final = 4096  # examples left out at a time
_TINY: Final = 1e-9  # in place of a variance of zero
_RANK_TOLERANCE: Final = 1e-12  # of the largest eigenvalue: directions without variance


@dataclass(frozen=True, slots=True)
class LeaveOneOut:
    """Leave-one-out predictions of the examples.

    A singleton, the only example of its class, has none: without it the class does not exist.
    """

    images: int  # without singletons
    correct: int  # in all labels
    probabilities: Floats  # (n,): of the example's label, or the lowest of its labels; NaN if none
    predicted: npt.NDArray[np.bool_]  # (n, K): the predicted labels

    @property
    def accuracy(self) -> float | None:
        return self.correct / self.images if self.images else None

    @property
    def interval(self) -> tuple[float, float]:
        """The 95 % interval of the accuracy."""
        return wilson(self.correct, self.images)

    def most_suspicious(self, most: int) -> list[int]:
        """Return the indices of suspected label errors, the least likely label first.

        An error is suspected where it is more likely than a correct label by Bayes' rule, if one
        label in ten is wrong and replaces the correct one by any other.
        """
        error = ERROR_RATE / max(1, self.predicted.shape[1] - 1)
        limit = error / (error + 1 - ERROR_RATE)
        order = [int(index) for index in np.argsort(self.probabilities, kind="stable")]
        return [index for index in order if self.probabilities[index] < limit][:most]


@dataclass(frozen=True, slots=True)
class ClosedFormHead:
    """A calibrated head and its leave-one-out predictions."""

    weight: npt.NDArray[np.float32]  # (K, D)
    bias: npt.NDArray[np.float32]  # (K,)
    temperature: float | None  # already folded into weight and bias
    leave_one_out: LeaveOneOut


def check_label(name: str, count: int, images: int) -> None:
    if count == images:
        raise UnteachableExamples(
            f"Every image has the label '{name[:60]}'. Add images without it."
        )


def wilson(correct: int, count: int) -> tuple[float, float]:
    """Return the Wilson 95 % interval of a share, which also holds near 0 and 1."""
    if not count:
        return 0.0, 1.0
    share, square = correct / count, Z * Z
    centre = (share + square / (2 * count)) / (1 + square / count)
    deviation = math.sqrt(share * (1 - share) / count + square / (4 * count * count))
    half = Z * deviation / (1 + square / count)
    return max(0.0, centre - half), min(1.0, centre + half)


@dataclass(frozen=True, slots=True)
class Block:
    """A head on one block of features that is not calibrated, and its leave-one-out logits."""

    weight: Floats  # (K, D)
    bias: Floats  # (K,)
    left_out: Floats  # (n, K)


def solve_lda(
    features: Floats, classes: ClassIndices, text: TextHead | None = None
) -> ClosedFormHead:
    """Solve a single-label head; a class without an example needs a text."""
    (block,) = lda_blocks(features, classes, min_classes=0 if text is None else len(text.labels))
    if text is None:
        return calibrate_lda(block, classes)
    counts = np.bincount(classes, minlength=len(text.labels))
    text_logits = text.leave_one_out_logits(features, np.eye(len(counts), dtype=bool)[classes])
    # Images have the weight that the texts do not have.
    prior = lda_temperature(len(counts)) / (1 - float(text.share(counts[classes]).mean()))
    head = calibrate_lda(block, classes, prior, text_logits)
    share = text.share(counts)[:, None]
    return replace(head, weight=(head.weight + share * text.weight).astype(np.float32))


def lda_blocks(
    features: Floats,
    classes: ClassIndices,
    shrinkages: Sequence[float | None] = (None,),
    min_classes: int = 0,
) -> list[Block]:
    """Solve one head for each shrinkage of the covariance; None depends on the examples."""
    points, basis = in_span(features)
    statistics = LdaStatistics.of(points, classes, min_classes, features.shape[1])
    scatter = statistics.left_out_scatter()
    blocks = []
    for shrinkage in shrinkages:
        one = replace(statistics, shrinkage=shrinkage)
        weight, bias = lifted(*one.discriminant(), features, basis)
        blocks.append(Block(weight, bias, -0.5 * one.leave_one_out_distances(scatter)))
    return blocks


def lda_temperature(classes: int) -> float:
    """The temperature of LDA logits that is expected before any is fitted."""
    return PRIOR_TEMPERATURE * math.sqrt(classes)


def calibrate_lda(
    block: Block,
    classes: ClassIndices,
    prior: float | None = None,
    text_logits: Floats | float = 0.0,
) -> ClosedFormHead:
    """Fit the temperature around `prior` (default: that of LDA), and fold it into the head."""
    outputs = len(block.bias)
    singleton = np.bincount(classes, minlength=outputs)[classes] == 1
    text_logits = np.broadcast_to(text_logits, block.left_out.shape)
    temperature = fit_temperature(
        block.left_out[~singleton],
        classes[~singleton],
        lda_temperature(outputs) if prior is None else prior,
        text_logits[~singleton],
    )
    logits = block.left_out / temperature + text_logits
    true = log_softmax(logits)[np.arange(len(classes)), classes]
    probabilities = np.where(singleton, np.nan, np.exp(true))
    best = logits.argmax(axis=1)
    correct = int((best == classes)[~singleton].sum())
    return ClosedFormHead(
        (block.weight / temperature).astype(np.float32),
        (block.bias / temperature).astype(np.float32),
        temperature,
        LeaveOneOut(
            int((~singleton).sum()), correct, probabilities, best[:, None] == np.arange(outputs)
        ),
    )


def in_span(features: Floats) -> tuple[Floats, Floats | None]:
    """Return coordinates in the span of centred features, and its basis (D, r).

    Heads and leave-one-out predictions only depend on the span, which has fewer dimensions than the
    features if there are few examples. Otherwise the features are returned, without a basis.
    """
    count, width = features.shape
    if count > width:
        return features, None
    points = features - features.mean(axis=0)
    values, vectors = np.linalg.eigh(points @ points.T)
    used = values > max(values[-1], _TINY) * _RANK_TOLERANCE
    if not used.any():  # all examples are equal
        return points[:, :1], np.eye(width, 1)
    lengths = np.sqrt(values[used])
    return vectors[:, used] * lengths, points.T @ (vectors[:, used] / lengths)


def lifted(
    weight: Floats, bias: Floats, features: Floats, basis: Floats | None
) -> tuple[Floats, Floats]:
    """Return weights and biases for features, from those for their coordinates (`in_span`)."""
    if basis is None:
        return weight, bias
    weight = weight @ basis.T
    return weight, bias - weight @ features.mean(axis=0)


@dataclass(frozen=True, slots=True)
class LdaStatistics:
    """Class means and shared covariance, relative to the mean of all examples."""

    centre: Floats  # (D,)
    points: Floats  # (n, D)
    classes: ClassIndices  # (n,)
    counts: ClassIndices  # (K,)
    means: Floats  # (K, D)
    width: int  # D, or the width of the features whose coordinates in their span these are
    shrinkage: float | None = None  # of the covariance; None: by the degrees of freedom

    @classmethod
    def of(
        cls,
        features: Floats,
        classes: ClassIndices,
        min_classes: int = 0,
        width: int | None = None,
    ) -> "LdaStatistics":
        """Count at least `min_classes` classes; one without examples has the mean of all."""
        centre = features.mean(axis=0)
        points = features - centre
        counts = np.bincount(classes, minlength=min_classes)
        sums = np.zeros((len(counts), features.shape[1]))
        np.add.at(sums, classes, points)
        means = sums / np.maximum(counts, 1)[:, None]
        return cls(centre, points, classes, counts, means, width or features.shape[1])

    @property
    def shrunk_means(self) -> Floats:
        """The class means, shrunk towards the mean of all examples, (K, D)."""
        return self.means * mean_shrinkage(self.counts)[:, None]

    def covariance(self) -> Floats:
        """Return the shrunk shared covariance, (D, D)."""
        count = len(self.points)
        freedom = count - np.count_nonzero(self.counts)
        covariance = self._scatter(count) / (freedom + TOTAL_WEIGHT)
        return shrunk(covariance, float(self._shrinkage(freedom)), self.width)

    def discriminant(self) -> tuple[Floats, Floats]:
        """Return weights (K, D) and biases (K,) for uncentred features."""
        means = self.shrunk_means
        weight: Floats = np.linalg.solve(self.covariance(), means.T).T.astype(np.float64)
        bias: Floats = -0.5 * (means * weight).sum(axis=1) - weight @ self.centre
        return weight, bias

    def left_out_scatter(self) -> tuple[Floats, Floats]:
        """Return eigenvalues and axes of the scatter that leave-one-out distances start from."""
        values, axes = np.linalg.eigh(self._scatter(len(self.points) - 1))
        return values, axes

    def leave_one_out_distances(self, scatter: tuple[Floats, Floats] | None = None) -> Floats:
        """Return the squared distances (n, K) of every example to all means without the example.

        A singleton is infinitely far from its class. `scatter` is `left_out_scatter`, if known.
        """
        distances = np.empty((len(self.points), len(self.counts)))
        for chunk, left_out in self._left_out(scatter):
            distances[chunk] = left_out.distances()
        singletons = self.counts[self.classes] == 1
        distances[singletons, self.classes[singletons]] = np.inf
        return distances

    def leave_one_out_cosines(self) -> Floats:
        """Return the largest cosine (n,) of each example with a class mean, both without it.

        Seen from the mean of all examples, in the space where the covariance is the identity.
        """
        cosines = [left_out.cosines().max(axis=1) for _, left_out in self._left_out(None)]
        return np.concatenate(cosines)

    def _left_out(
        self, scatter: tuple[Floats, Floats] | None
    ) -> Iterator[tuple[slice, "_LeftOut"]]:
        values, axes = self.left_out_scatter() if scatter is None else scatter
        rotated = replace(self, points=self.points @ axes, means=self.means @ axes)
        for start in range(0, len(self.points), _CHUNK):
            chunk = slice(start, start + _CHUNK)
            yield chunk, rotated._leave_out(chunk, values)

    def _shrinkage(self, freedom: npt.ArrayLike) -> Floats:
        if self.shrinkage is None:
            return shrinkage(freedom, self.width)
        return np.full_like(np.asarray(freedom, dtype=np.float64), self.shrinkage)

    def _scatter(self, count: int) -> Floats:
        """Return the scatter within classes, plus that of all examples scaled to `TOTAL_WEIGHT`."""
        within = self.points - self.means[self.classes]
        return within.T @ within + TOTAL_WEIGHT / max(count, 1) * (self.points.T @ self.points)

    def _leave_out(self, chunk: slice, values: Floats) -> "_LeftOut":
        """Leave out each example of a chunk, on axes where the scatter is diagonal (`values`)."""
        points, classes = self.points[chunk], self.classes[chunk]
        count, own = len(self.points), self.counts[classes]
        # An example is this much further from the mean of the others than from the mean with
        # itself.
        further = (own / np.maximum(own - 1, 1))[:, None]
        off_class = (points - self.means[classes]) * np.sqrt(further)
        off_all = points * math.sqrt(TOTAL_WEIGHT / (count - 1) * count / (count - 1))

        freedom = count - 1 - np.count_nonzero(self.counts) + (own == 1)
        shrink = self._shrinkage(freedom)
        traces = values.sum() - _squares(off_class) - _squares(off_all)
        traces = np.maximum(traces, _TINY + _TINY * values.sum())
        own_mean = points - (points - self.means[classes]) * further
        inverse = 1 / (values + (shrink / (1 - shrink) * traces / self.width)[:, None])
        return _LeftOut(
            points,
            classes,
            count,
            mean_shrinkage(self.counts),
            self.shrunk_means,
            mean_shrinkage(own - 1)[:, None],
            own_mean,
            inverse,
            off_class,
            off_all,
            (
                1 - (off_class * inverse * off_class).sum(axis=1)[:, None],
                (off_class * inverse * off_all).sum(axis=1)[:, None],
                1 - (off_all * inverse * off_all).sum(axis=1)[:, None],
            ),
            ((freedom + TOTAL_WEIGHT) / (1 - shrink))[:, None],
        )


@dataclass(frozen=True, slots=True)
class _LeftOut:
    """A chunk of c examples, each seen by the statistics of all others.

    Products are those of the inverse covariance without the example: that of the diagonal matrix
    `inverse`, corrected by Woodbury's identity for what the example added, `off_class` and
    `off_all`. Leaving an example out also moves the mean of all examples.
    """

    points: Floats  # (c, D)
    classes: ClassIndices  # (c,)
    count: int  # of all examples
    keep: Floats  # (K,): the factor that shrinks each mean
    means: Floats  # (K, D), shrunk
    own_keep: Floats  # (c, 1): the factor of the example's class without it
    own_mean: Floats  # (c, D): the mean of its class without it
    inverse: Floats  # (c, D)
    off_class: Floats  # (c, D)
    off_all: Floats  # (c, D)
    core: tuple[Floats, Floats, Floats]  # (c, 1) each: of Woodbury's identity
    scale: Floats  # (c, 1)

    def distances(self) -> Floats:
        """Return the squared distances to all means, (c, K)."""
        squares, products, means = self._products()
        reach = 1 + (1 - self.keep) / (self.count - 1)
        distances: Floats = squares * reach**2 - 2 * reach * products + means
        own_reach = 1 + (1 - self.own_keep) / (self.count - 1)
        away = self.points * own_reach - self.own_keep * self.own_mean
        return self._with_own(distances * self.scale, self._square(away) * self.scale)

    def cosines(self) -> Floats:
        """Return the cosines with all means, seen from the mean of the others, (c, K)."""
        moved = 1 / (self.count - 1)
        squares, products, means = self._products()
        along = products + self.keep * moved * squares
        lengths = means + 2 * self.keep * moved * products + (self.keep * moved) ** 2 * squares
        own = self.own_keep * (self.own_mean + self.points * moved)
        along = self._with_own(along, self._product(self.points, own))
        lengths = self._with_own(lengths, self._square(own))
        return np.asarray(along / np.sqrt(np.maximum(lengths * squares, _TINY)))

    def _with_own(self, values: Floats, own: Floats) -> Floats:
        values[np.arange(len(values)), self.classes] = own[:, 0]
        return values

    def _square(self, rows: Floats) -> Floats:
        return self._product(rows, rows)

    def _product(self, one: Floats, other: Floats) -> Floats:
        """Return the products of the rows of two (c, D), (c, 1)."""
        plain = (one * self.inverse * other).sum(axis=1)[:, None]
        return self._corrected(plain, self._along(one), self._along(other))

    def _products(self) -> tuple[Floats, Floats, Floats]:
        """Return the squares of the examples (c, 1), their products with all means (c, K), and
        the squares of all means (c, K).
        """
        scaled = self.points * self.inverse
        of_points = self._along(self.points)
        of_means = (
            (self.inverse * self.off_class) @ self.means.T,
            (self.inverse * self.off_all) @ self.means.T,
        )
        squares = (scaled * self.points).sum(axis=1)[:, None]
        return (
            self._corrected(squares, of_points, of_points),
            self._corrected(scaled @ self.means.T, of_points, of_means),
            self._corrected(self.inverse @ (self.means**2).T, of_means, of_means),
        )

    def _along(self, rows: Floats) -> tuple[Floats, Floats]:
        scaled = self.inverse * rows
        first = (scaled * self.off_class).sum(axis=1)[:, None]
        return first, (scaled * self.off_all).sum(axis=1)[:, None]

    def _corrected(
        self, plain: Floats, one: tuple[Floats, Floats], other: tuple[Floats, Floats]
    ) -> Floats:
        a, b, c = self.core
        mixed = one[0] * other[1] + one[1] * other[0]
        more = c * one[0] * other[0] + b * mixed + a * one[1] * other[1]
        return np.asarray(plain + more / (a * c - b * b))


def shrinkage(freedom: npt.ArrayLike, width: int) -> Floats:
    """Return the shrinkage of the covariance, which falls with the degrees of freedom."""
    share = width / (width + np.asarray(freedom, dtype=np.float64))
    return np.asarray(MIN_SHRINKAGE + (MAX_SHRINKAGE - MIN_SHRINKAGE) * share)


def mean_shrinkage(counts: ClassIndices) -> Floats:
    """Return the factor that shrinks the mean of this many examples towards the mean of all."""
    return np.asarray(counts / (counts + PRIOR_COUNT))


def shrunk(covariance: Floats, shrinkage: float, width: int) -> Floats:
    """Shrink a covariance towards the identity times its mean variance over `width` directions."""
    variance = max(float(np.trace(covariance)), _TINY) / width
    return (1 - shrinkage) * covariance + shrinkage * variance * np.eye(len(covariance))


def _squares(rows: Floats) -> Floats:
    return np.asarray((rows * rows).sum(axis=1))


def log_softmax(logits: Floats) -> Floats:
    shifted = logits - logits.max(axis=1, keepdims=True)
    return np.asarray(shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True)))


def fit_temperature(
    logits: Floats, classes: ClassIndices, prior: float = 1.0, text_logits: Floats | float = 0.0
) -> float:
    """Return the temperature that calibrates logits: maximum a posteriori around `prior`.

    The prior keeps the temperature finite if all of a few examples are right. `text_logits` are
    added after the division, because they are calibrated already.
    """
    centre = math.log(prior)

    def cost(log_temperature: float) -> float:
        log_probabilities = log_softmax(logits / math.exp(log_temperature) + text_logits)
        fit = -float(log_probabilities[np.arange(len(classes)), classes].sum())
        offset = log_temperature - centre
        return fit + 0.5 * TEMPERATURE_WEIGHT * offset * offset

    return math.exp(golden_section_minimum(cost, centre - 3, centre + 3))


def golden_section_minimum(cost: Callable[[float], float], low: float, high: float) -> float:
    """Return the minimum of a unimodal cost, within 0.01 % of the range."""
    golden = (math.sqrt(5) - 1) / 2
    left, right = high - golden * (high - low), low + golden * (high - low)
    at_left, at_right = cost(left), cost(right)
    for _ in range(20):
        if at_left < at_right:
            high, right, at_right = right, left, at_left
            left = high - golden * (high - low)
            at_left = cost(left)
        else:
            low, left, at_left = left, right, at_right
            right = low + golden * (high - low)
            at_right = cost(right)
    return (low + high) / 2


def solve_ridge(features: Floats, targets: npt.NDArray[np.bool_]) -> ClosedFormHead:
    """Solve a multi-label head; every label must be on some of the examples, but not on all."""
    return _fit_ridge(features, targets).head(targets)


def solve_ridge_with_text(
    features: Floats, targets: npt.NDArray[np.bool_], text: TextHead
) -> ClosedFormHead:
    """Mix text and images; a label on no image, or on all, comes from its text alone."""
    count, labels = targets.shape
    positive = targets.sum(axis=0)
    fitted = (positive > 0) & (positive < count)
    for k in np.flatnonzero(~fitted & ~text.named):
        check_label(text.labels[k], int(positive[k]), count)
    weight, bias = np.zeros((labels, features.shape[1])), np.zeros(labels)
    left_out, singleton = np.zeros(targets.shape), np.zeros(targets.shape, dtype=bool)
    temperature = None
    if fitted.any():
        ridge = _fit_ridge(features, targets[:, fitted])
        temperature = ridge.temperature
        weight[fitted], bias[fitted] = ridge.weight, ridge.bias
        left_out[:, fitted] = ridge.left_out
        singleton[:, fitted] = ridge.singleton & ~text.named[fitted]
    # The images of a label have the weight that its text does not have.
    share = np.where(text.named, np.where(fitted, text.share(positive), 1.0), 0.0)
    without = np.where(text.named, np.where(fitted, text.share(positive - targets), 1.0), 0.0)
    logits = without * (features @ text.weight.T + text.biases) + (1 - without) * left_out
    weight = share[:, None] * text.weight + (1 - share)[:, None] * weight
    bias = share * text.biases + (1 - share) * bias
    return _Ridge(weight, bias, temperature, logits, singleton).head(targets)


@dataclass(frozen=True, slots=True)
class _Ridge:
    weight: Floats  # (K, D)
    bias: Floats  # (K,)
    temperature: float | None
    left_out: Floats  # (n, K): leave-one-out logits
    singleton: npt.NDArray[np.bool_]  # (n, K): without the example the head would not exist

    def head(self, targets: npt.NDArray[np.bool_]) -> ClosedFormHead:
        signed = np.where(targets, self.left_out, -self.left_out)
        whole = ~self.singleton.any(axis=1)
        return ClosedFormHead(
            self.weight.astype(np.float32),
            self.bias.astype(np.float32),
            self.temperature,
            LeaveOneOut(
                int(whole.sum()),
                int(np.asarray((signed > 0).all(axis=1))[whole].sum()),
                np.where(whole, np.exp(-np.logaddexp(0, -signed)).min(axis=1), np.nan),
                self.left_out > 0,
            ),
        )


def _fit_ridge(features: Floats, targets: npt.NDArray[np.bool_]) -> _Ridge:
    return _calibrate_ridge(ridge_block(features, targets), targets)


def ridge_block(features: Floats, targets: npt.NDArray[np.bool_]) -> Block:
    """Scale the scores so that the mean with a label is 1 above that without, and 0 is between."""
    points, basis = in_span(features)
    regression = RidgeRegression.of(points, targets.astype(np.float64), features.shape[1])
    weight, bias = regression.solve(RIDGE)
    scores = points @ weight.T + bias
    positive = targets.sum(axis=0)
    with_label = (scores * targets).sum(axis=0) / positive
    without = (scores * ~targets).sum(axis=0) / (len(targets) - positive)
    gap = np.maximum(with_label - without, _TINY)
    midpoint = (with_label + without) / 2
    left_out = (regression.leave_one_out_scores(RIDGE) - midpoint) / gap
    weight, bias = lifted(weight, bias, features, basis)
    return Block(weight / gap[:, None], (bias - midpoint) / gap, left_out)


def calibrate_ridge(block: Block, targets: npt.NDArray[np.bool_]) -> ClosedFormHead:
    """Fit a slope and a shift per label, and fold them into the head."""
    return _calibrate_ridge(block, targets).head(targets)


def _calibrate_ridge(block: Block, targets: npt.NDArray[np.bool_]) -> _Ridge:
    singleton = label_singletons(targets)
    slope, shift = _fit_logistic(block.left_out, targets, ~singleton)
    return _Ridge(
        block.weight * slope,
        block.bias * slope + shift,
        1 / slope,
        block.left_out * slope + shift,
        singleton,
    )


def label_singletons(targets: npt.NDArray[np.bool_]) -> npt.NDArray[np.bool_]:
    """Mark (n, K) only examples and only counterexamples: without them, no label is learned."""
    positive = targets.sum(axis=0)
    return np.asarray(np.where(targets, positive == 1, len(targets) - positive == 1))


@dataclass(frozen=True, slots=True)
class RidgeRegression:
    centre: Floats  # (D,)
    share: Floats  # (K,)
    points: Floats  # (n, D), centred
    targets: Floats  # (n, K), centred
    width: int  # as in `LdaStatistics`

    @classmethod
    def of(cls, features: Floats, truth: Floats, width: int | None = None) -> "RidgeRegression":
        centre, share = features.mean(axis=0), truth.mean(axis=0)
        return cls(centre, share, features - centre, truth - share, width or features.shape[1])

    def solve(self, shrinkage: float) -> tuple[Floats, Floats]:
        """Return weights (K, D) and biases (K,) for uncentred features."""
        covariance = shrunk(self.points.T @ self.points, shrinkage, self.width)
        joint = (1 - shrinkage) * (self.points.T @ self.targets)
        weight: Floats = np.linalg.solve(covariance, joint).T.astype(np.float64)
        return weight, self.share - weight @ self.centre

    def leave_one_out_scores(self, shrinkage: float) -> Floats:
        """Return the score of every example without it, (n, K)."""
        count, width = len(self.points), self.width
        values, axes = np.linalg.eigh(self.points.T @ self.points)
        points, further = self.points @ axes, count / max(count - 1, 1)
        traces = values.sum() - further * _squares(points)
        traces = np.maximum(traces, _TINY + _TINY * values.sum())
        inverse = points / (values + (shrinkage / (1 - shrinkage) * traces / width)[:, None])
        leverage = (inverse * points).sum(axis=1)[:, None]
        fitted = inverse @ (points.T @ self.targets) - further * leverage * self.targets
        share = self.share - self.targets / max(count - 1, 1)
        return np.asarray(share + further / (1 - further * leverage) * fitted)


def _fit_logistic(
    scores: Floats, targets: npt.NDArray[np.bool_], used: npt.NDArray[np.bool_]
) -> tuple[float, Floats]:
    """Fit one slope for all labels and a shift per label, both with a prior."""
    signs = np.where(targets, 1.0, -1.0)

    def fit_shifts(slope: float) -> Floats:
        shift = np.zeros(scores.shape[1])
        for _ in range(6):  # Newton
            probability = 1 / (1 + np.exp(-np.clip(scores * slope + shift, -50, 50)))
            gradient = ((probability - targets) * used).sum(axis=0) + SHIFT_WEIGHT * shift
            curvature = (probability * (1 - probability) * used).sum(axis=0) + SHIFT_WEIGHT
            shift = shift - gradient / curvature
        return shift

    def cost(log_slope: float) -> float:
        slope = math.exp(log_slope)
        shift = fit_shifts(slope)
        losses = np.logaddexp(0, -signs * (scores * slope + shift))
        offset = log_slope - math.log(PRIOR_SLOPE)
        penalty = TEMPERATURE_WEIGHT * offset * offset + SHIFT_WEIGHT * float(shift @ shift)
        return float((losses * used).sum()) + 0.5 * penalty

    centre = math.log(PRIOR_SLOPE)
    slope = math.exp(golden_section_minimum(cost, centre - 3, centre + 3))
    return slope, fit_shifts(slope)
