"""When training ends: variants that fall behind stop first, and all of them without progress.

Everything follows from the epochs so far, so a resumed run decides as an uninterrupted one.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

SMOOTHED: Final = 3  # epochs whose mean score counts
FIRST_CHECK: Final = 4  # epochs before the first decision
PATIENCE: Final = 4  # epochs without progress of any variant
DEVIATIONS: Final = 2.0  # standard errors behind the best: stopped
MIN_GAIN: Final = 0.01  # share of its loss that counts as progress


@dataclass(slots=True)
class Epoch:
    """The results of one epoch for each variant; NaN for those that did not run."""

    step: int  # at the end of the epoch
    train_loss: list[float]
    train_score: list[float]
    val_loss: list[float] | None = None
    val_score: list[float] | None = None
    row_loss: list[float] | None = None  # on validation images, without the closed form


def smoothed_scores(epochs: Sequence[Epoch]) -> list[float]:
    """Return the mean score of each variant over the last epochs."""
    last = [epoch.val_score or epoch.train_score for epoch in epochs[-SMOOTHED:]]
    return [sum(scores) / len(scores) for scores in zip(*last, strict=True)]


def last_figures(epochs: Sequence[Epoch]) -> list[tuple[float, float]]:
    """Return the smoothed score and the loss of each variant when it last ran."""
    figures = []
    for index in range(len(epochs[0].train_loss)):
        ran = [e for e in epochs if math.isfinite((e.val_score or e.train_score)[index])]
        last = (ran or epochs)[-1]
        loss = (last.val_loss or last.train_loss)[index]
        figures.append((smoothed_scores(ran or epochs)[index], loss))
    return figures


def behind(epochs: Sequence[Epoch], images: int) -> set[int]:
    """Return the variants that are clearly behind the best one on this many validation images."""
    if len(epochs) < FIRST_CHECK:
        return set()
    scores = smoothed_scores(epochs)
    best = max((score for score in scores if math.isfinite(score)), default=0.0)
    share = min(max(best, 0.0), 1.0)
    error = math.sqrt(2 * max(share * (1 - share), 1 / images) / images)
    return {i for i, score in enumerate(scores) if not score >= best - DEVIATIONS * error}


def has_stalled(epochs: Sequence[Epoch]) -> bool:
    """Whether no variant had a clearly lower validation loss in the last epochs.

    Rows count without the closed form: at first they add nothing to it.
    """
    if len(epochs) <= max(PATIENCE, FIRST_CHECK):
        return False
    earlier, recent = epochs[:-PATIENCE], epochs[-PATIENCE:]
    return not any(
        _lowest(recent, index) < _lowest(earlier, index) * (1 - MIN_GAIN)
        for index in range(len(epochs[0].train_loss))
    )


def _lowest(epochs: Sequence[Epoch], variant: int) -> float:
    losses = [epoch.row_loss[variant] for epoch in epochs if epoch.row_loss is not None]
    return min(filter(math.isfinite, losses), default=math.inf)
