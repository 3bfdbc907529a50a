"""Reference statistics of a task's training images, to notice when its inputs change.

The backbone's class tokens of the training images are projected on their main axes, each scaled to
variance 1. There, the mean of images like them is the reference's mean, up to sampling: for n
images and N training images, n N / (n + N) times the squared distance of the means follows a
chi-squared distribution with one degree of freedom for each axis. The out-of-distribution score is
one more axis: images of other classes may have the same mean as those of the training, and are yet
far from each class.

Shapes: n features, D width, q axes, K classes.
"""

import math
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from engram_server.model.heads.lda import Floats

MAX_AXES: Final = 24
MAX_AXES_BYTES: Final = 40_960  # of float16: with the shares of MAX_CLASSES, below 64 kB
MAX_CLASSES: Final = 4096
MIN_IMAGES: Final = 20
IMAGES_PER_AXIS: Final = 4  # fewer training images have fewer axes
_MOST: Final = 5.0  # standard deviations that one score counts
ALARM_RATE: Final = 0.001  # share of checks without drift beyond the limit


@dataclass(frozen=True, slots=True)
class DriftReference:
    axes: npt.NDArray[np.float16]  # (q, D)
    centre: npt.NDArray[np.float32]  # (q,): the mean on the axes
    images: int  # of the training
    shares: npt.NDArray[np.float32] | None = None  # (K,): of the classes; None: no single labels
    # Mean and standard deviation of out-of-distribution scores; None: the task has no detector.
    scores: tuple[float, float] | None = None

    def arrays(self) -> dict[str, npt.NDArray[Any]]:
        """Return the tensors of a bundle, by name."""
        arrays: dict[str, npt.NDArray[Any]] = {"drift.axes": self.axes, "drift.centre": self.centre}
        return arrays if self.shares is None else {**arrays, "drift.shares": self.shares}

    def project(
        self,
        features: npt.NDArray[np.float32],
        ood_scores: npt.NDArray[np.floating] | None = None,
    ) -> npt.NDArray[np.float32]:
        """Return features (n, D) on the axes, relative to the mean: (n, q), or (n, q + 1)."""
        projected = features @ self.axes.T.astype(np.float32) - self.centre
        if self.scores is not None:
            mean, deviation = self.scores
            scores = mean if ood_scores is None else ood_scores
            # One very strange image is an outlier, many are drift.
            last = np.clip((scores - mean) / max(deviation, 1e-6), -_MOST, _MOST)
            projected = np.column_stack([projected, np.broadcast_to(last, len(projected))])
        return np.asarray(projected, np.float32)

    def limit(self, images: float) -> float:
        """The largest distance of the mean of this many images if nothing has changed."""
        count = len(self.centre) + (self.scores is not None)
        return math.sqrt(_chi_squared(count) / count * (1 / images + 1 / self.images))


def fit_drift_reference(
    features: Floats,
    shares: npt.NDArray[np.float32] | None = None,
    scores: tuple[float, float] | None = None,
) -> DriftReference | None:
    """Fit a reference to the class tokens of training images; None if there are too few."""
    count, width = features.shape
    too_many = shares is not None and len(shares) > MAX_CLASSES
    if count < MIN_IMAGES:
        return None
    mean = features.mean(axis=0)
    values, vectors = _axes(features - mean)
    rank = min(MAX_AXES, MAX_AXES_BYTES // (2 * width), count // IMAGES_PER_AXIS, width - 1)
    # If all images are equal, float16 must still hold the axes.
    least = 1e-6 * values[0] + 1e-8 * max(1.0, float(np.square(features).mean()))
    scales = np.sqrt(np.maximum(values[:rank], least))
    axes = (vectors[:rank] / scales[:, None]).astype(np.float16)
    centre = (mean @ axes.T.astype(np.float64)).astype(np.float32)
    return DriftReference(axes, centre, count, None if too_many else shares, scores)


def _axes(centred: Floats) -> tuple[Floats, Floats]:
    """The variances of centred features, largest first, and their axes as rows."""
    if len(centred) < centred.shape[1]:  # the case of taught tasks, and then much faster
        _, values, vectors = np.linalg.svd(centred, full_matrices=False)
        return values**2 / (len(centred) - 1), vectors
    values, vectors = np.linalg.eigh(np.cov(centred, rowvar=False))
    return values[::-1], vectors.T[::-1]


def class_shares(targets: npt.NDArray[np.integer], classes: int) -> npt.NDArray[np.float32]:
    """The share of each class in the class indices of training images."""
    counts = np.bincount(targets.astype(np.int64), minlength=classes)
    return np.asarray(counts / max(1, counts.sum()), np.float32)


def _chi_squared(count: int) -> float:
    """The quantile of the chi-squared distribution for the alarm rate (Wilson and Hilferty)."""
    z, variance = NormalDist().inv_cdf(1 - ALARM_RATE), 2 / (9 * count)
    return float(count * (1 - variance + z * math.sqrt(variance)) ** 3)
