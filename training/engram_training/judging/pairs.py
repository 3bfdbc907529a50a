"""Paired comparison of two tasks on the same images.

Both tasks see the same images, so the paired difference has a much smaller variance than the
difference of two independent accuracies.
"""

import math
from dataclasses import dataclass
from pathlib import Path

import torch
from engram_server.model import Backbone
from engram_server.model.heads.lda import Z
from torch import Tensor

from engram_training.bundles import load_tasks
from engram_training.data.dataset import DataSet
from engram_training.data.workspace import Watcher, Workspace
from engram_training.errors import DataError
from engram_training.judging.evaluation import BATCH, HELD_OUT, KEPT_BYTES, read_and_predict


@dataclass(frozen=True, slots=True)
class Contender:
    """A bundle file with its parents, and its backbone."""

    bundles: list[Path]  # the one to evaluate first
    backbone: Backbone


@dataclass(frozen=True, slots=True)
class Pairs:
    """Scores of the same images by an old and a new task.

    A score is 1 where all labels are right and 0 else; of numbers it is the mean absolute error.
    """

    images: int
    figure: str  # name of the score
    old: float  # mean
    new: float
    difference: float  # new - old
    interval: tuple[float, float]  # of the difference, 95 %
    only_old: int  # images where only the old task is right
    only_new: int

    @classmethod
    def of(cls, old: Tensor, new: Tensor, figure: str) -> "Pairs":
        """Compare scores (n,) in the same order."""
        differences = (new - old).double()
        count, mean = len(differences), float(differences.mean())
        deviation = float(differences.std()) if count > 1 else math.inf
        half = Z * deviation / math.sqrt(count)
        return cls(
            count,
            figure,
            float(old.double().mean()),
            float(new.double().mean()),
            mean,
            (mean - half, mean + half),
            int((differences < 0).sum()),
            int((differences > 0).sum()),
        )


def compare(
    data: DataSet, old: Contender, new: Contender, watcher: Watcher | None = None
) -> tuple[str, Pairs]:
    """Compare two tasks on the held-out split of `data`; returns its name and the result."""
    split = next((name for name in HELD_OUT if len(data.part(name))), None)
    if split is None:
        raise DataError(f"'{data.name}' has no held-out images to compare on.")
    part = data.part(split)
    logits: list[Tensor] = []
    labels: list[tuple[str, ...]] = []
    with Workspace(KEPT_BYTES, watcher=watcher) as workspace:
        for name, one in (("old", old), ("new", new)):
            loaded = load_tasks(one.backbone, one.bundles)
            labels.append(loaded.bundles[0].labels)
            stages = f"reading {split} images", f"evaluating the {name} task"
            answers, skipped = read_and_predict(
                one.backbone, part, loaded.tasks[:1], BATCH, workspace, stages
            )
            logits += answers
            part = part.without(each.path for each in skipped)
    if not len(part):
        raise DataError(f"No image of '{part.name}' can be read.")
    figure = "mean absolute error" if part.task_type == "regression" else "accuracy"
    before, after = (_scores(part, rows, names) for rows, names in zip(logits, labels, strict=True))
    return split, Pairs.of(before, after, figure)


def _scores(data: DataSet, logits: Tensor, labels: tuple[str, ...]) -> Tensor:
    targets = torch.from_numpy(data.targets(labels or None))
    if data.task_type == "single_label":
        return (logits.argmax(dim=1) == targets).double()
    if data.task_type == "multi_label":
        return ((logits > 0) == (targets > 0)).all(dim=1).double()
    return (logits - targets).abs().mean(dim=1).double()
