"""What a task knows: where the photos it was made of lie, and how far from them is too far.

For every task it is the backbone's own class token that is looked at. What a trained task reads has
been turned to what tells its classes apart, and no longer shows what is something else (the demo
task cifar100 tells flowers from its own photos with an AUROC of 0.81 by its own class token, and of
0.99 by the backbone's).

The distance is that of Mahalanobis from the nearest of some middles (those of the classes), with
one spread for all. Of the spread the directions in which it is largest are kept, and in the others
it is taken as equal: `known` if, with A of r rows shorter than one,

    min over the middles m of  |x - m|² - |A (x - m)|²  ≤  threshold

The threshold is such that few photos of the same kind, which the task was not made of, lie beyond.

Shapes: n features, C middles, D width, r axes.
"""

import math
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from server.model.closed_form import Clouds, Floats, Places

RANK: Final = 64
OWN_UNKNOWN: Final = 0.025  # the share of its own photos that a task is meant to call unknown
FEWEST: Final = 10  # photos to fit a threshold on
ENOUGH: Final = 100  # photos to count those beyond a threshold, instead of guessing
_Z: Final = 1.959964  # the quantile of a normal distribution beyond which that share lies
_LEAST: Final = 1e-3  # a threshold, where all photos are the same: more than float32 rounds
_TINY: Final = 1e-9


@dataclass(frozen=True, slots=True)
class Known:
    """As a bundle keeps it."""

    means: npt.NDArray[np.float16]  # (C, D)
    axes: npt.NDArray[np.float16]  # (r, D)
    threshold: float

    def distances(self, features: Floats) -> Floats:
        """From the nearest middle, (n,), in the units of the threshold."""
        region = KnownRegion.of(self, torch.device("cpu"))
        distances: Floats = region.distances(torch.from_numpy(features).float()).numpy()
        return distances.astype(np.float64)


@dataclass(frozen=True, slots=True)
class KnownRegion:
    """The same on a device, with all that depends on no image computed once."""

    axes: Tensor  # (r, D)
    towards: Tensor  # (C, D): (I - AᵀA) m
    offsets: Tensor  # (C,): m (I - AᵀA) m
    threshold: float

    @classmethod
    def of(cls, known: Known, device: torch.device) -> "KnownRegion":
        means, axes = torch.tensor(known.means).double(), torch.tensor(known.axes).double()
        towards = means - (means @ axes.T) @ axes
        offsets = (means * towards).sum(dim=1)
        axes, towards, offsets = (
            part.to(device, torch.float32) for part in (axes, towards, offsets)
        )
        return cls(axes, towards, offsets, known.threshold)

    def distances(self, features: Tensor) -> Tensor:
        """(n, D) to (n,)."""
        own = features.square().sum(dim=1) - (features @ self.axes.T).square().sum(dim=1)
        return own + (self.offsets - 2 * (features @ self.towards.T)).amin(dim=1)

    @property
    def width(self) -> int:
        return self.axes.shape[1]

    @property
    def tensors(self) -> list[Tensor]:
        return [self.axes, self.towards, self.offsets]


def fit_known(features: Floats, classes: Places | None) -> Known | None:
    """What a task knows that was made of photos with these class tokens; None: too few to tell.

    Without classes there is one middle. The threshold follows from how far each photo lies when it
    is left out.
    """
    grouped = np.zeros(len(features), dtype=np.int64) if classes is None else classes
    clouds = Clouds.of(features, grouped)
    judged = clouds.counts[grouped] > 1
    if judged.sum() < FEWEST:
        return None
    spread = clouds.spread()
    values, vectors = np.linalg.eigh(spread)
    rank = min(RANK, len(values) - 1)
    rest = max(values[:-rank].mean(), values[-1] * 1e-6)
    axes = np.sqrt(np.maximum(0, 1 - rest / values[-rank:]))[:, None] * vectors[:, -rank:].T
    means = (clouds.middles + clouds.centre).astype(np.float16)
    known = Known(means, axes.astype(np.float16), math.inf)
    distances = known.distances(features) * _growth(clouds, spread)
    return replace(known, threshold=_threshold(distances[judged]))


def _growth(clouds: Clouds, spread: Floats) -> Floats:
    """How many times further an example lies from the nearest middle when it is left out."""
    inverse = np.linalg.inv(spread)
    turned, middles = clouds.points @ inverse, clouds.middles
    squares = (turned * clouds.points).sum(axis=1)[:, None] - 2 * turned @ middles.T
    squares += ((middles @ inverse) * middles).sum(axis=1)
    growth: Floats = clouds.distances_left_out().min(axis=1) / np.maximum(
        squares.min(axis=1), _TINY
    )
    return np.maximum(growth, 1)


def _threshold(distances: Floats) -> float:
    """Beyond which the wanted share lies.

    Few distances do not tell, so their logarithms are taken as normal: the fewer, the further, by
    Student's t.
    """
    if len(distances) >= ENOUGH:
        return max(float(np.quantile(distances, 1 - OWN_UNKNOWN)), _LEAST)
    logs, count = np.log(np.maximum(distances, _LEAST)), len(distances)
    student = _Z + (_Z**3 + _Z) / (4 * (count - 1))
    return math.exp(logs.mean() + student * logs.std(ddof=1) * math.sqrt(1 + 1 / count))
