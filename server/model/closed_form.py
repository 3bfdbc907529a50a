"""Heads that are solved instead of trained, with what leaving out each example tells.

Single label: linear discriminant analysis. Classes are clouds of one shape around their middles.
The shape is the spread within classes, mixed with a little of the spread of all examples (all there
is with one photo a class) and drawn towards a sphere, the more the fewer examples there are. The
middles are drawn towards that of all. Multi label: ridge regression on 0 and 1.

Leaving an example out moves the middles and changes the spread by a rank of two: every head without
one example follows from one eigendecomposition, and none is solved anew. On the answers
that examples get from the heads without them a temperature is fitted, which is folded into the
head, and the threshold of what the task knows (`server.model.known`).

Where class names were read, too (`server.model.text`), each class starts from what its name says,
which counts like so many photos; a class may then have none.

Shapes: n examples, K classes, D width. Everything is computed in float64.
"""

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
import numpy.typing as npt

from server.errors import UnteachableExamples
from server.model.examples import Examples
from server.model.text_head import TextHead

Floats = npt.NDArray[np.float64]
Places = npt.NDArray[np.int64]

# Measured by research/closed_form.py; docs/explanation/teaching.md has the tables.
PULL: Final = 2.0  # the middle of all counts like so many examples of each class
ALL_WEIGHT: Final = 10.0  # the spread of all examples counts like so many examples
LEAST_SHRINKAGE: Final = 0.15  # of the spread towards a sphere, with endless examples
MOST_SHRINKAGE: Final = 0.8  # with one photo a class
USUAL_TEMPERATURE: Final = 0.25  # of a discriminant, times the root of the number of classes
TEMPERATURE_WEIGHT: Final = 4.0  # how many nats a factor of e away from the usual one costs
RIDGE: Final = 0.3  # how far the spread of all examples is drawn towards a sphere
USUAL_STEEPNESS: Final = 10.0  # of a logit, between photos without a label and those with it
SHIFT_WEIGHT: Final = 0.5
Z: Final = 1.959963984540054  # 95 % of a normal distribution
_CHUNK: Final = 4096  # examples left out at a time
_TINY: Final = 1e-9  # of a variance, where there is none


@dataclass(frozen=True, slots=True)
class LeaveOneOut:
    """How the examples are answered by heads that were made without them.

    The only example of a class cannot be judged: without it there is no such class.
    """

    judged: int
    right: int  # in all labels, where there are several
    probabilities: Floats  # (n,): of the given label, or the least of the given labels; NaN

    @property
    def accuracy(self) -> float | None:
        return self.right / self.judged if self.judged else None

    @property
    def interval(self) -> tuple[float, float]:
        """Of the accuracy, 95 %."""
        return wilson(self.right, self.judged)

    def most_suspicious(self, most: int) -> list[int]:
        """Places of examples whose label is less likely than not, the least likely first."""
        doubtful = [int(place) for place in np.argsort(self.probabilities, kind="stable")]
        return [place for place in doubtful if self.probabilities[place] < 0.5][:most]


@dataclass(frozen=True, slots=True)
class Solved:
    """A head for features, calibrated, and what is known of it."""

    weight: npt.NDArray[np.float32]  # (K, D)
    bias: npt.NDArray[np.float32]  # (K,)
    temperature: float | None  # that is folded in already
    leave_one_out: LeaveOneOut


def solve(examples: Examples, text: TextHead | None = None) -> Solved:
    """The head of a task; raises UnteachableExamples where there are too few classes.

    With a text, of the same classes, it is a normalised head.
    """
    check_teachable(examples, text)
    if text is not None and _is_told_by_names(examples):
        judged = LeaveOneOut(0, 0, np.full(len(examples), np.nan))
        return Solved(text.weight, text.biases.astype(np.float32), None, judged)
    features = examples.features.astype(np.float64)
    if text is not None:
        features = text.units(features)
    if examples.problem == "single_label":
        text = None if text is None else text.centred()
        return solve_discriminant(features, examples.targets.argmax(axis=1), text)
    if text is not None:
        return _solve_ridge_with_text(features, examples.targets, text)
    return solve_ridge(features, examples.targets)


def _is_told_by_names(examples: Examples) -> bool:
    """Whether photos tell nothing yet: of one class alone they do not say what it is not."""
    classes = int(examples.targets.any(axis=0).sum())
    return not len(examples) or (examples.problem == "single_label" and classes < 2)


def check_teachable(examples: Examples, text: TextHead | None = None) -> None:
    if text is not None:
        if examples.problem == "single_label" and len(examples.labels) < 2:
            raise UnteachableExamples(
                f"'{text.labels[0][:60]}' is the only class, and a task needs two or more to tell "
                f"apart; name another"
            )
        if examples.problem == "single_label" and _is_told_by_names(examples):
            for label in itertools.compress(examples.labels, ~text.named):
                raise UnteachableExamples(
                    f"all photos are '{label[:60]}', which was not named, so nothing tells it from "
                    f"the classes that were; name it too, or add photos of them"
                )
        return
    if not len(examples):
        raise UnteachableExamples("there is no photo to learn from")
    names, targets = examples.labels, examples.targets
    if examples.problem == "single_label":
        if len(names) < 2:
            raise UnteachableExamples(
                f"all photos are '{names[0][:60]}', and a task needs two classes or more to tell "
                f"apart; add photos of something else, such as a class 'other'"
            )
        return
    for name, count in zip(names, targets.sum(axis=0), strict=True):
        _check_label(name, int(count), len(examples))
    if not names:
        raise UnteachableExamples("no photo has a label; give one to some of them")


def _check_label(name: str, count: int, photos: int) -> None:
    if count == photos:
        raise UnteachableExamples(
            f"every photo has the label '{name[:60]}', so nothing shows what it is not; add "
            f"photos without it"
        )


def wilson(right: int, count: int) -> tuple[float, float]:
    """The 95 % interval of a share, which stays sensible near 0 and 1 and for few examples."""
    if not count:
        return 0.0, 1.0
    share, square = right / count, Z * Z
    middle = (share + square / (2 * count)) / (1 + square / count)
    spread = math.sqrt(share * (1 - share) / count + square / (4 * count * count))
    half = Z * spread / (1 + square / count)
    return max(0.0, middle - half), min(1.0, middle + half)


# --- single label -----------------------------------------------------------------------------


def solve_discriminant(features: Floats, classes: Places, text: TextHead | None = None) -> Solved:
    """For one label each; every class below the highest has an example, or `text` stands in."""
    clouds = Clouds.of(features, classes, 0 if text is None else len(text.labels))
    weight, bias = clouds.discriminant()
    said = np.zeros((len(features), len(clouds.counts)))
    if text is not None:
        said = text.said_without_each(features, np.eye(len(clouds.counts), dtype=bool)[classes])
    lonely = clouds.counts[classes] == 1
    logits = -0.5 * clouds.distances_left_out()
    usual = USUAL_TEMPERATURE * math.sqrt(len(clouds.counts))
    if text is not None:  # photos count for as much as names do not
        usual /= 1 - float(text.share(clouds.counts[classes]).mean())
    temperature = fit_temperature(logits[~lonely], classes[~lonely], usual, said[~lonely])
    logits = logits / temperature + said
    given = log_softmax(logits)[np.arange(len(classes)), classes]
    probabilities = np.where(lonely, np.nan, np.exp(given))
    right = int((logits.argmax(axis=1) == classes)[~lonely].sum())
    weight, bias = weight / temperature, bias / temperature
    if text is not None:
        weight = weight + text.share(clouds.counts)[:, None] * text.weight
    return Solved(
        weight.astype(np.float32),
        bias.astype(np.float32),
        temperature,
        LeaveOneOut(int((~lonely).sum()), right, probabilities),
    )


@dataclass(frozen=True, slots=True)
class Clouds:
    """Classes as clouds of one shape around their middles, all counted from the middle of all."""

    centre: Floats  # (D,)
    points: Floats  # (n, D)
    classes: Places  # (n,)
    counts: Places  # (K,)
    means: Floats  # (K, D)

    @classmethod
    def of(cls, features: Floats, classes: Places, fewest: int = 0) -> "Clouds":
        """So many classes, or more; one without an example is in the middle of all."""
        centre = features.mean(axis=0)
        points = features - centre
        counts = np.bincount(classes, minlength=fewest)
        sums = np.zeros((len(counts), features.shape[1]))
        np.add.at(sums, classes, points)
        return cls(centre, points, classes, counts, sums / np.maximum(counts, 1)[:, None])

    @property
    def middles(self) -> Floats:
        """(K, D): means of few examples are drawn towards the middle of all."""
        return self.means * _trust(self.counts)[:, None]

    def spread(self) -> Floats:
        """The common covariance (D, D)."""
        count = len(self.points)
        freedom = count - np.count_nonzero(self.counts)
        covariance = self._scatter(count) / (freedom + ALL_WEIGHT)
        return _drawn(covariance, float(shrinkage(freedom, self.points.shape[1])))

    def discriminant(self) -> tuple[Floats, Floats]:
        """Weights (K, D) and biases (K,), for features as they were given."""
        middles = self.middles
        weight: Floats = np.linalg.solve(self.spread(), middles.T).T.astype(np.float64)
        bias: Floats = -0.5 * (middles * weight).sum(axis=1) - weight @ self.centre
        return weight, bias

    def distances_left_out(self) -> Floats:
        """Squared distances (n, K) of every example from all middles, measured without it.

        An example that is alone in its class is infinitely far from it.
        """
        count = len(self.points)
        values, axes = np.linalg.eigh(self._scatter(count - 1))
        turned = replace(self, points=self.points @ axes, means=self.means @ axes)
        distances = np.empty((count, len(self.counts)))
        for start in range(0, count, _CHUNK):
            chunk = slice(start, start + _CHUNK)
            distances[chunk] = turned._without_each(chunk, values)
        return distances

    def _scatter(self, count: int) -> Floats:
        """Within classes, and of all examples as if those were `ALL_WEIGHT` of `count`."""
        within = self.points - self.means[self.classes]
        return within.T @ within + ALL_WEIGHT / max(count, 1) * (self.points.T @ self.points)

    def _without_each(self, chunk: slice, values: Floats) -> Floats:
        """`distances_left_out` of some examples, along axes where the scatter is `values`."""
        points, classes = self.points[chunk], self.classes[chunk]
        (count, width), rows = self.points.shape, np.arange(len(points))
        own = self.counts[classes]
        # How much further an example is from the mean of the others than from that of all.
        further = (own / np.maximum(own - 1, 1))[:, None]
        further_all = count / (count - 1)
        off_class = (points - self.means[classes]) * np.sqrt(further)
        off_all = points * math.sqrt(ALL_WEIGHT / (count - 1) * further_all)

        freedom = count - 1 - np.count_nonzero(self.counts) + (own == 1)
        drawn = shrinkage(freedom, width)
        traces = values.sum() - _squares(off_class) - _squares(off_all)
        traces = np.maximum(traces, _TINY + _TINY * values.sum())
        inverse = 1 / (values + (drawn / (1 - drawn) * traces / width)[:, None])  # (c, D)

        # From the middle of class k an example is (reach_k · point - middle_k) away: without it
        # the middle of all moves, too.
        trust, middles = _trust(self.counts), self.middles
        reach = 1 + (1 - trust) / (count - 1)
        own_trust = _trust(own - 1)[:, None]
        own_mean = points - (points - self.means[classes]) * further
        away = points * (1 + (1 - own_trust) / (count - 1)) - own_trust * own_mean

        def along(vectors: Floats) -> Floats:
            """Products (c, K) of a vector of each example with its ways from all middles."""
            sums = (vectors * points).sum(axis=1)[:, None]
            products: Floats = sums * reach - vectors @ middles.T
            products[rows, classes] = (vectors * away).sum(axis=1)
            return products

        weighted = (points * inverse * points).sum(axis=1)[:, None] * reach**2
        between = weighted - 2 * reach * ((points * inverse) @ middles.T) + inverse @ (middles**2).T
        between[rows, classes] = (away * inverse * away).sum(axis=1)
        # Woodbury: the inverse of B - off_class off_classᵀ - off_all off_allᵀ.
        first, second = along(inverse * off_class), along(inverse * off_all)
        a = 1 - (off_class * inverse * off_class).sum(axis=1)[:, None]
        b = (off_class * inverse * off_all).sum(axis=1)[:, None]
        c = 1 - (off_all * inverse * off_all).sum(axis=1)[:, None]
        gained = (c * first**2 + 2 * b * first * second + a * second**2) / (a * c - b * b)
        distances: Floats = (between + gained) * ((freedom + ALL_WEIGHT) / (1 - drawn))[:, None]
        distances[rows[own == 1], classes[own == 1]] = np.inf
        return distances


def shrinkage(freedom: npt.ArrayLike, width: int) -> Floats:
    """How far the spread is drawn towards a sphere: less, the more examples beyond one a class."""
    share = width / (width + np.asarray(freedom, dtype=np.float64))
    return np.asarray(LEAST_SHRINKAGE + (MOST_SHRINKAGE - LEAST_SHRINKAGE) * share)


def _trust(counts: Places) -> Floats:
    """How much of the mean of so many examples counts."""
    trust: Floats = counts / (counts + PULL)
    return trust


def _drawn(covariance: Floats, shrinkage: float) -> Floats:
    """Towards a sphere of the same mean variance; where there is none at all, a tiny one."""
    width = len(covariance)
    sphere = max(float(np.trace(covariance)), _TINY) / width
    return (1 - shrinkage) * covariance + shrinkage * sphere * np.eye(width)


def _squares(rows: Floats) -> Floats:
    squares: Floats = (rows * rows).sum(axis=1)
    return squares


def log_softmax(logits: Floats) -> Floats:
    shifted = logits - logits.max(axis=1, keepdims=True)
    logs: Floats = shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))
    return logs


def fit_temperature(
    logits: Floats, classes: Places, usual: float = 1.0, said: Floats | float = 0.0
) -> float:
    """What to divide logits by, so that scores are as sure as they are right.

    `said` is added to the divided logits; it has been calibrated before.
    The likeliest one, drawn a little to the usual one: few examples, all of them right, would say
    that nothing is ever wrong.
    """
    middle = math.log(usual)

    def cost(log_temperature: float) -> float:
        likely = log_softmax(logits / math.exp(log_temperature) + said)
        fit = -float(likely[np.arange(len(classes)), classes].sum())
        off = log_temperature - middle
        return fit + 0.5 * TEMPERATURE_WEIGHT * off * off

    return math.exp(_least(cost, middle - 3, middle + 3))


def _least(cost: Callable[[float], float], low: float, high: float) -> float:
    """Where a cost with one valley is least, within a hundredth of a percent of the range."""
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


# --- multi label ------------------------------------------------------------------------------


def solve_ridge(features: Floats, targets: npt.NDArray[np.bool_]) -> Solved:
    """For any number of labels each; every label is on some of the examples, and not on all."""
    return _fit_ridge(features, targets).judged(targets)


def _solve_ridge_with_text(
    features: Floats, targets: npt.NDArray[np.bool_], text: TextHead
) -> Solved:
    """A label without photos, or on all of them, is what its text says."""
    count, labels = targets.shape
    positive = targets.sum(axis=0)
    told = (positive > 0) & (positive < count)
    for k in np.flatnonzero(~told & ~text.named):
        _check_label(text.labels[k], int(positive[k]), count)
    weight, bias = np.zeros((labels, features.shape[1])), np.zeros(labels)
    left_out, lonely = np.zeros(targets.shape), np.zeros(targets.shape, dtype=bool)
    temperature = None
    if told.any():
        fitted = _fit_ridge(features, targets[:, told])
        temperature = fitted.temperature
        weight[told], bias[told] = fitted.weight, fitted.bias
        left_out[:, told], lonely[:, told] = fitted.left_out, fitted.lonely & ~text.named[told]
    # What photos say of a label counts as much as its text does not.
    share = np.where(text.named, np.where(told, text.share(positive), 1.0), 0.0)
    without = np.where(text.named, np.where(told, text.share(positive - targets), 1.0), 0.0)
    logits = without * (features @ text.weight.T + text.biases) + (1 - without) * left_out
    weight = share[:, None] * text.weight + (1 - share)[:, None] * weight
    bias = share * text.biases + (1 - share) * bias
    return _Ridge(weight, bias, temperature, logits, lonely).judged(targets)


@dataclass(frozen=True, slots=True)
class _Ridge:
    """Calibrated heads of some labels, and what examples get from heads made without them."""

    weight: Floats  # (K, D)
    bias: Floats  # (K,)
    temperature: float | None
    left_out: Floats  # (n, K)
    lonely: npt.NDArray[np.bool_]  # (n, K): without the example there would be no such head

    def judged(self, targets: npt.NDArray[np.bool_]) -> Solved:
        given = np.where(targets, self.left_out, -self.left_out)
        whole = ~self.lonely.any(axis=1)
        return Solved(
            self.weight.astype(np.float32),
            self.bias.astype(np.float32),
            self.temperature,
            LeaveOneOut(
                int(whole.sum()),
                int(np.asarray((given > 0).all(axis=1))[whole].sum()),
                np.where(whole, np.exp(-np.logaddexp(0, -given)).min(axis=1), np.nan),
            ),
        )


def _fit_ridge(features: Floats, targets: npt.NDArray[np.bool_]) -> _Ridge:
    line = Regression.of(features, targets.astype(np.float64))
    weight, bias = line.ridge(RIDGE)
    positive = targets.sum(axis=0)
    # Without its only example a label would not exist, and without its only counterexample neither.
    lonely = np.where(targets, positive == 1, len(targets) - positive == 1)
    # Half way between what photos with a label and those without get is 0, and both are 1 apart.
    scores = features @ weight.T + bias
    with_label = (scores * targets).sum(axis=0) / positive
    without = (scores * ~targets).sum(axis=0) / (len(targets) - positive)
    gap = np.maximum(with_label - without, _TINY)
    middle = (with_label + without) / 2
    left_out = (line.scores_left_out(RIDGE) - middle) / gap
    steepness, shift = _fit_logistic(left_out, targets, ~lonely)
    slope = steepness / gap
    return _Ridge(
        weight * slope[:, None],
        (bias - middle) * slope + shift,
        1 / steepness,
        left_out * steepness + shift,
        lonely,
    )


@dataclass(frozen=True, slots=True)
class Regression:
    """Points and what is said of them, both counted from their means."""

    centre: Floats  # (D,)
    share: Floats  # (K,)
    points: Floats  # (n, D)
    marks: Floats  # (n, K)

    @classmethod
    def of(cls, features: Floats, truth: Floats) -> "Regression":
        centre, share = features.mean(axis=0), truth.mean(axis=0)
        return cls(centre, share, features - centre, truth - share)

    def ridge(self, shrinkage: float) -> tuple[Floats, Floats]:
        """Weights (K, D) and biases (K,), for features as they were given."""
        drawn = _drawn(self.points.T @ self.points, shrinkage)
        joint = (1 - shrinkage) * (self.points.T @ self.marks)
        weight: Floats = np.linalg.solve(drawn, joint).T.astype(np.float64)
        return weight, self.share - weight @ self.centre

    def scores_left_out(self, shrinkage: float) -> Floats:
        """What every example gets without it, (n, K)."""
        count, width = self.points.shape
        values, axes = np.linalg.eigh(self.points.T @ self.points)
        points, further = self.points @ axes, count / max(count - 1, 1)
        traces = values.sum() - further * _squares(points)
        traces = np.maximum(traces, _TINY + _TINY * values.sum())
        inverse = points / (values + (shrinkage / (1 - shrinkage) * traces / width)[:, None])
        leverage = (inverse * points).sum(axis=1)[:, None]
        fitted = inverse @ (points.T @ self.marks) - further * leverage * self.marks
        share = self.share - self.marks / max(count - 1, 1)
        scores: Floats = share + further / (1 - further * leverage) * fitted
        return scores


def _fit_logistic(
    scores: Floats, targets: npt.NDArray[np.bool_], judged: npt.NDArray[np.bool_]
) -> tuple[float, Floats]:
    """One steepness for all labels and a shift for each, both drawn a little to the usual."""
    signs = np.where(targets, 1.0, -1.0)

    def shifts(steepness: float) -> Floats:
        shift = np.zeros(scores.shape[1])
        for _ in range(6):  # Newton
            chance = 1 / (1 + np.exp(-np.clip(scores * steepness + shift, -50, 50)))
            slope = ((chance - targets) * judged).sum(axis=0) + SHIFT_WEIGHT * shift
            bend = (chance * (1 - chance) * judged).sum(axis=0) + SHIFT_WEIGHT
            shift = shift - slope / bend
        return shift

    def cost(log_steepness: float) -> float:
        steepness = math.exp(log_steepness)
        shift = shifts(steepness)
        wrong = np.logaddexp(0, -signs * (scores * steepness + shift))
        off = log_steepness - math.log(USUAL_STEEPNESS)
        drawn = TEMPERATURE_WEIGHT * off * off + SHIFT_WEIGHT * float(shift @ shift)
        return float((wrong * judged).sum()) + 0.5 * drawn

    usual = math.log(USUAL_STEEPNESS)
    steepness = math.exp(_least(cost, usual - 3, usual + 3))
    return steepness, shifts(steepness)
