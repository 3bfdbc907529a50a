"""Out-of-distribution detection: Mahalanobis distance to the nearest class mean, with a threshold.

The detector reads the backbone's class token for every task. The class token of a trained task
keeps only what separates its classes and no longer shows what is different (on the demo task
cifar100, it separates flowers from CIFAR images with an AUROC of 0.81, and the backbone's with
0.99).

All classes share one covariance. Its r largest directions are kept; the variance in the others is
taken as equal. With A (r, D), an input x is in distribution if

    min over the class means m of  |x - m|² - |A (x - m)|²  ≤  threshold

The threshold is chosen for a fixed false alarm rate on images of the same kind that were held out.

Shapes: n features, C class means, D width, r axes.
"""

import math
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from engram_server.model.heads.lda import ClassIndices, Floats, LdaStatistics, Z

RANK: Final = 64
FALSE_ALARM_RATE: Final = 0.025  # target share of in-distribution images that are rejected
MIN_IMAGES: Final = 10  # to fit a threshold
MIN_IMAGES_FOR_QUANTILE: Final = 100  # with fewer, the quantile is extrapolated
_MIN_THRESHOLD: Final = 1e-3  # above the rounding of float32, if all images are equal
_TINY: Final = 1e-9


@dataclass(frozen=True, slots=True)
class OodDetector:
    """The detector as a bundle stores it."""

    means: npt.NDArray[np.float16]  # (C, D)
    axes: npt.NDArray[np.float16]  # (r, D)
    threshold: float

    def distances(self, features: Floats) -> Floats:
        """Return the distances to the nearest class mean, (n,), in the units of the threshold."""
        scorer = OodScorer.of(self, torch.device("cpu"))
        distances: Floats = scorer.distances(torch.from_numpy(features).float()).numpy()
        return distances.astype(np.float64)


@dataclass(frozen=True, slots=True)
class OodScorer:
    """The detector on a device, with everything precomputed that does not depend on the input."""

    axes: Tensor  # (r, D)
    directions: Tensor  # (C, D): (I - AᵀA) m
    offsets: Tensor  # (C,): m (I - AᵀA) m
    threshold: float

    @classmethod
    def of(cls, detector: OodDetector, device: torch.device) -> "OodScorer":
        means, axes = torch.tensor(detector.means).double(), torch.tensor(detector.axes).double()
        directions = means - (means @ axes.T) @ axes
        offsets = (means * directions).sum(dim=1)
        axes, directions, offsets = (
            part.to(device, torch.float32) for part in (axes, directions, offsets)
        )
        return cls(axes, directions, offsets, detector.threshold)

    def distances(self, features: Tensor) -> Tensor:
        """Return the distances (n,) of features (n, D)."""
        own = features.square().sum(dim=1) - (features @ self.axes.T).square().sum(dim=1)
        return own + (self.offsets - 2 * (features @ self.directions.T)).amin(dim=1)

    @property
    def width(self) -> int:
        return self.axes.shape[1]

    @property
    def tensors(self) -> list[Tensor]:
        return [self.axes, self.directions, self.offsets]


def fit_ood_detector(features: Floats, classes: ClassIndices | None) -> OodDetector | None:
    """Fit a detector to the class tokens of training images; None if there are too few.

    Without classes there is one mean. The threshold follows from leave-one-out distances.
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
    detector = OodDetector(means, axes.astype(np.float16), math.inf)
    distances = detector.distances(features) * _leave_one_out_ratio(statistics, covariance)
    return replace(detector, threshold=_threshold(distances[not_singleton]))


def _leave_one_out_ratio(statistics: LdaStatistics, covariance: Floats) -> Floats:
    """Return the factor by which leaving an example out increases its distance."""
    inverse = np.linalg.inv(covariance)
    scaled, means = statistics.points @ inverse, statistics.shrunk_means
    squares = (scaled * statistics.points).sum(axis=1)[:, None] - 2 * scaled @ means.T
    squares += ((means @ inverse) * means).sum(axis=1)
    left_out = statistics.leave_one_out_distances().min(axis=1)
    ratio: Floats = left_out / np.maximum(squares.min(axis=1), _TINY)
    return np.maximum(ratio, 1)


def _threshold(distances: Floats) -> float:
    """Return the quantile of the distances for the false alarm rate.

    With few distances their logarithms are taken as normal, and the quantile follows Student's t.
    """
    if len(distances) >= MIN_IMAGES_FOR_QUANTILE:
        return max(float(np.quantile(distances, 1 - FALSE_ALARM_RATE)), _MIN_THRESHOLD)
    logs, count = np.log(np.maximum(distances, _MIN_THRESHOLD)), len(distances)
    student = Z + (Z**3 + Z) / (4 * (count - 1))
    return math.exp(logs.mean() + student * logs.std(ddof=1) * math.sqrt(1 + 1 / count))
