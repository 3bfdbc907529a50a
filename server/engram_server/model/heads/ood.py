"""Out-of-distribution detection: how far an image is from the classes of a task.

The detector reads the backbone's class token for every task. The class token of a trained task
keeps only what separates its classes and no longer shows what is different.

All classes share one covariance. Its r largest directions are kept; the variance in the others is
taken as equal. With A (r, D), the product of two vectors is u·v - Au·Av. There are two limits:

- on the distance: the smallest squared distance of x from a class mean m;
- on the angle: 1 - the largest cosine of x - c with m - c, where c is the mean of the class means.
  An image of one of the classes points in its direction, also if it has another resolution or style
  than the training images, which changes distances more than directions.

A task without classes has one mean, and so no directions. A task trained on small images has no
limit on the distance: every sharp photo is far from them.

The score of an image is the larger of distance / limit and angle / limit, and it is in distribution
if the score is at most 1. Limits are chosen for a fixed false alarm rate on images left out.

The class probabilities of tasks taught from few examples say little about images of classes that
the task does not have. Their detector has a `softness` s: such a task mixes its probabilities with
the uniform distribution. The share of that is near 0 up to a score of 1, and near 3/4 from 1 + 2s.
So images in distribution keep their probabilities, and the best class stays visible in the others:
photos that are nearly equal, as from a webcam, make a task doubt every other view.

Shapes: n features, C class means, D width, r axes.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from engram_server.model.heads.lda import ClassIndices, Floats, LdaStatistics

RANK: Final = 64
FALSE_ALARM_RATE: Final = 0.01  # target share of in-distribution images beyond each limit
MIN_IMAGES: Final = 10  # to fit a limit
MIN_IMAGES_FOR_QUANTILE: Final = 400  # with fewer, the quantile is extrapolated
SOFTNESS: Final = 0.18
_STEEPNESS: Final = 5.0
_LARGEST_SHARE: Final = 0.75
_QUANTILE: Final = 2.3263478740408408  # of the normal distribution, for the false alarm rate
_MIN_LIMIT: Final = 1e-3  # above the rounding of float32, if all images are equal
_TINY: Final = 1e-9


@dataclass(frozen=True, slots=True)
class OodDetector:
    """The detector as a bundle stores it. At least one of the limits is present."""

    means: npt.NDArray[np.float16]  # (C, D)
    axes: npt.NDArray[np.float16]  # (r, D)
    distance: float | None = None
    angle: float | None = None
    softness: float | None = None
    # Mean and standard deviation of the training images' leave-one-out scores; not stored with it.
    typical: tuple[float, float] | None = None

    def scores(self, features: Floats) -> Floats:
        """Return the scores (n,)."""
        scores: Floats = self._scorer.scores(torch.from_numpy(features).float()).numpy()
        return scores.astype(np.float64)

    def distances_and_angles(self, features: Floats) -> tuple[Floats, Floats]:
        distances, angles = self._scorer.distances_and_angles(torch.from_numpy(features).float())
        return distances.double().numpy(), angles.double().numpy()

    @property
    def _scorer(self) -> "OodScorer":
        return OodScorer.of(self, torch.device("cpu"))


@dataclass(frozen=True, slots=True)
class OodScorer:
    """The detector on a device, with everything precomputed that does not depend on the input."""

    axes: Tensor  # (r, D)
    centre: Tensor  # (D,): the mean of the class means
    directions: Tensor  # (C, D): (I - AᵀA) (m - c)
    squares: Tensor  # (C,): (m - c) (I - AᵀA) (m - c)
    distance: float | None
    angle: float | None
    softness: float | None

    @classmethod
    def of(cls, detector: OodDetector, device: torch.device) -> "OodScorer":
        means, axes = torch.tensor(detector.means).double(), torch.tensor(detector.axes).double()
        centre = means.mean(dim=0)
        means = means - centre
        directions = means - (means @ axes.T) @ axes
        squares = (means * directions).sum(dim=1)
        axes, centre, directions, squares = (
            part.to(device, torch.float32) for part in (axes, centre, directions, squares)
        )
        limits = (detector.distance, detector.angle, detector.softness)
        return cls(axes, centre, directions, squares, *limits)

    def distances_and_angles(self, features: Tensor) -> tuple[Tensor, Tensor]:
        """Return the distances (n,) and angles (n,) of features (n, D)."""
        away = features - self.centre
        own = away.square().sum(dim=1) - (away @ self.axes.T).square().sum(dim=1)
        along = away @ self.directions.T
        lengths = self.squares.clamp(min=_TINY).sqrt() * own.clamp(min=_TINY).sqrt()[:, None]
        return own + (self.squares - 2 * along).amin(dim=1), 1 - (along / lengths).amax(dim=1)

    def scores(self, features: Tensor) -> Tensor:
        """Return the scores (n,) of features (n, D)."""
        distances, angles = self.distances_and_angles(features)
        if self.angle is None:
            assert self.distance is not None
            return distances / self.distance
        if self.distance is None:
            return angles / self.angle
        return torch.maximum(distances / self.distance, angles / self.angle)

    def uniform_share(self, score: float) -> float:
        """The share of the uniform distribution in the class probabilities."""
        if self.softness is None:
            return 0.0
        way = math.tanh(_STEEPNESS / 2 * ((score - 1) / self.softness - 1))
        return _LARGEST_SHARE * (0.5 + 0.5 * way)

    @property
    def width(self) -> int:
        return self.axes.shape[1]

    @property
    def tensors(self) -> list[Tensor]:
        return [self.axes, self.centre, self.directions, self.squares]


def fit_ood_detector(
    features: Floats,
    classes: ClassIndices | None,
    *,
    small_images: bool = False,
    soft: bool = False,
) -> OodDetector | None:
    """Fit a detector to the class tokens of training images; None if there are too few.

    Without classes there is one mean. The limits follow from leave-one-out values. `small_images`
    are smaller than the input of the backbone.
    """
    grouped = np.zeros(len(features), dtype=np.int64) if classes is None else classes
    statistics = LdaStatistics.of(features, grouped)
    not_singleton = statistics.counts[grouped] > 1
    if not_singleton.sum() < MIN_IMAGES:
        return None
    covariance = statistics.covariance()
    values, vectors = np.linalg.eigh(covariance)
    rank = min(RANK, len(values) - 1)
    rest = max(values[:-rank].mean(), values[-1] * 1e-6)
    axes = np.sqrt(np.maximum(0, 1 - rest / values[-rank:]))[:, None] * vectors[:, -rank:].T
    means = (statistics.shrunk_means + statistics.centre).astype(np.float16)
    detector = OodDetector(means, axes.astype(np.float16))
    distances, angles = detector.distances_and_angles(features)
    scores = np.zeros(np.count_nonzero(not_singleton))
    if len(means) > 1:
        angles = (angles + _leave_one_out_increase(statistics, covariance))[not_singleton]
        angle = _limit(angles)
        scores = angles / angle
        detector = replace(detector, angle=angle)
    if len(means) == 1 or not small_images:
        distances = (distances * _leave_one_out_ratio(statistics, covariance))[not_singleton]
        # With few values, their logarithms are closer to normal.
        distance = _limit(distances, np.log, math.exp)
        scores = np.maximum(scores, distances / distance)
        detector = replace(detector, distance=distance)
    detector = replace(detector, typical=(float(scores.mean()), float(scores.std())))
    if soft and len(means) > 1:
        detector = replace(detector, softness=SOFTNESS)
    return detector


def _leave_one_out_increase(statistics: LdaStatistics, covariance: Floats) -> Floats:
    """Return how much leaving an example out increases its angle."""
    inverse, means = np.linalg.inv(covariance), statistics.shrunk_means
    scaled = statistics.points @ inverse
    squares = (scaled * statistics.points).sum(axis=1)[:, None]
    lengths = ((means @ inverse) * means).sum(axis=1)
    cosines = scaled @ means.T / np.sqrt(np.maximum(squares * lengths, _TINY))
    increase: Floats = cosines.max(axis=1) - statistics.leave_one_out_cosines()
    return np.maximum(increase, 0)


def _leave_one_out_ratio(statistics: LdaStatistics, covariance: Floats) -> Floats:
    """Return the factor by which leaving an example out increases its distance."""
    inverse = np.linalg.inv(covariance)
    scaled, means = statistics.points @ inverse, statistics.shrunk_means
    squares = (scaled * statistics.points).sum(axis=1)[:, None] - 2 * scaled @ means.T
    squares += ((means @ inverse) * means).sum(axis=1)
    left_out = statistics.leave_one_out_distances().min(axis=1)
    ratio: Floats = left_out / np.maximum(squares.min(axis=1), _TINY)
    return np.maximum(ratio, 1)


def _limit(
    values: Floats,
    transform: Callable[[Floats], Floats] = np.asarray,
    back: Callable[[float], float] = float,
) -> float:
    """Return the quantile of the values for the false alarm rate.

    With few values they are taken as normal after a transform, and it follows Student's t.
    """
    values = np.maximum(values, _MIN_LIMIT)
    if len(values) >= MIN_IMAGES_FOR_QUANTILE:
        return float(np.quantile(values, 1 - FALSE_ALARM_RATE))
    values, count = transform(values), len(values)
    student = _QUANTILE + (_QUANTILE**3 + _QUANTILE) / (4 * (count - 1))
    deviation = float(values.std(ddof=1)) * math.sqrt(1 + 1 / count)
    return max(back(float(values.mean()) + student * deviation), _MIN_LIMIT)
