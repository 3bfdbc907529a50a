"""Drift: how far the recent images of a version are from its training images.

All figures are exponentially weighted, and follow about the last 200 images. Without drift, the
distance stays below its limit in all but one of a thousand windows.
"""

import functools
import time
from collections import deque
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from engram_server.engine.rollout.comparison import Answers
from engram_server.engine.types import Floats
from engram_server.model.heads.drift import DriftReference

Doubles = npt.NDArray[np.float64]

DECAY: Final = 0.01  # the weight of the newest image: about 200 images count
MIN_IMAGES: Final = 50  # before that, nothing is reported
POINT_IMAGES: Final = 25  # between two points of the chart
POINTS: Final = 100


@dataclass(frozen=True, slots=True)
class DriftReport:
    """The present figures of one version on this server."""

    images: int
    distance: float | None  # None without a reference, or for too few images
    limit: float | None  # of the distance without drift
    out_of_distribution: float | None  # share of images; None without a detector
    class_divergence: float | None  # total variation distance of the class shares

    @property
    def drifting(self) -> bool:
        return self.distance is not None and self.limit is not None and self.distance > self.limit


@dataclass(frozen=True, slots=True)
class DriftPoint:
    """The figures at one time (seconds since 1970)."""

    time: float
    distance: float | None
    limit: float | None
    out_of_distribution: float | None


class _Average:
    """An exponentially weighted average of numbers or vectors."""

    def __init__(self) -> None:
        self.sum: Doubles = np.zeros(())
        self.total = 0.0  # of the weights
        self.squares = 0.0  # of the weights

    def add(self, sums: Doubles | np.float64, weights: Doubles) -> None:
        """Add the weighted sum of the newest values."""
        kept = (1 - DECAY) ** len(weights)
        self.sum = np.asarray(kept * self.sum + sums)
        self.total = kept * self.total + float(weights.sum())
        self.squares = kept**2 * self.squares + float((weights**2).sum())

    @property
    def mean(self) -> Doubles:
        return np.asarray(self.sum / self.total)

    @property
    def images(self) -> float:
        """The number of equally weighted values with the same variance of the mean."""
        return self.total**2 / self.squares if self.squares else 0.0


class DriftMeter:
    """Statistics of the answers of one version. Not thread-safe."""

    def __init__(self) -> None:
        self.images = 0
        self._projected = _Average()  # (q,): on the axes of the reference
        self._classes = _Average()  # (K,): how often each label was the top one
        self._ood = _Average()
        self._limit = self._divergence = 0.0
        self._points: deque[DriftPoint] = deque(maxlen=POINTS)
        self._next = POINT_IMAGES  # images at the next point of the chart

    def add(self, answers: Answers, features: Floats | None) -> None:
        """Count answers; `features` are the readouts of all images observed."""
        answers = answers.usable
        self.images += len(answers.images)
        if answers.ood_scores is not None:
            weights = _weights(len(answers.images))
            self._ood.add(weights @ (answers.ood_scores > 1), weights)
        if answers.reference is not None and features is not None:
            self._add_features(answers, answers.reference, features)
        if self.images >= self._next:
            self._next = self.images + POINT_IMAGES
            self._add_point()

    def _add_features(self, answers: Answers, reference: DriftReference, features: Floats) -> None:
        known = np.isfinite(features[answers.images, 0])
        answers = answers if known.all() else answers.at(known)
        weights = _weights(len(answers.images))
        own = features[answers.images, : reference.axes.shape[1]]
        projected = reference.project(own, answers.ood_scores)
        self._projected.add(weights @ projected, weights)
        self._limit = reference.limit(max(1.0, self._projected.images))
        if (shares := reference.shares) is not None:
            tops = answers.logits.argmax(axis=1)
            counts = np.bincount(tops, weights, len(shares)).astype(np.float64)
            self._classes.add(counts, weights)
            self._divergence = 0.5 * float(np.abs(self._classes.mean - shares).sum())

    def report(self) -> DriftReport:
        distance = limit = divergence = share = None
        if self._projected.images >= MIN_IMAGES:
            distance, limit = float(np.sqrt(np.mean(self._projected.mean**2))), self._limit
        if self._classes.images >= MIN_IMAGES:
            divergence = self._divergence
        if self._ood.images >= MIN_IMAGES:
            share = float(self._ood.mean)
        return DriftReport(self.images, distance, limit, share, divergence)

    def _add_point(self) -> None:
        now = self.report()
        point = DriftPoint(time.time(), now.distance, now.limit, now.out_of_distribution)
        self._points.append(point)

    @property
    def points(self) -> list[DriftPoint]:
        """The course of the figures, oldest first."""
        return list(self._points)


@functools.lru_cache(maxsize=512)
def _weights(count: int) -> Doubles:
    return np.asarray((1 - DECAY) ** np.arange(count - 1, -1, -1.0))
