"""Two tasks on the same images, in pairs: what one gets right that the other does not.

Both see the same images, so most of what makes images hard is common to both: the difference of
pairs is known far better than the difference of two shares.
"""

import math
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from server.model import Backbone
from server.model.closed_form import Z
from task_store import TaskBundle
from training.bundles import load_tasks
from training.data.dataset import DataSet
from training.data.images import ImageSet
from training.data.workspace import Workspace
from training.errors import DataError
from training.judging.evaluation import BATCH, HELD_OUT, KEPT_BYTES, predict
from training.progress import Watcher


@dataclass(frozen=True, slots=True)
class Contender:
    """A bundle file with its parents, on the backbone it was made for."""

    bundles: list[Path]  # the one to judge comes first
    backbone: Backbone


@dataclass(frozen=True, slots=True)
class Pairs:
    """Scores of the same images by an old and a new task.

    A score is 1 where all labels are right and 0 else; of numbers it is the mean absolute error.
    """

    images: int
    figure: str  # what the scores are
    old: float  # mean
    new: float
    difference: float  # new - old
    interval: tuple[float, float]  # of the difference, 95 %
    only_old: int  # images that are right by the old task alone
    only_new: int

    @classmethod
    def of(cls, old: Tensor, new: Tensor, figure: str) -> "Pairs":
        """Of scores (n,) each, in the same order."""
        differences = (new - old).double()
        count, mean = len(differences), float(differences.mean())
        spread = float(differences.std()) if count > 1 else math.inf
        half = Z * spread / math.sqrt(count)
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
    """The name of the held-out split of `data`, and how the two answer its images."""
    split = next((name for name in HELD_OUT if len(data.part(name))), None)
    if split is None:
        raise DataError(f"'{data.name}' has no images that were held out: nothing to compare on")
    part = data.part(split)
    logits: list[Tensor] = []
    with Workspace(KEPT_BYTES, watcher=watcher) as workspace:
        for name, one in (("old", old), ("new", new)):
            paths = [sample.path for sample in part.samples]
            images = ImageSet(paths, one.backbone.preprocessing, workspace.scratch)
            stage = workspace.watcher.stage
            skipped = images.read_all(workspace.pool, stage(f"reading {split} images"))
            part = part.without(each.path for each in skipped)
            task = load_tasks(one.backbone, one.bundles).tasks[0]
            on_progress = stage(f"judging the {name} task")
            logits += predict(one.backbone, images, [task], BATCH, workspace.pool, on_progress)
    if not len(part):
        raise DataError(f"no image of '{part.name}' can be read")
    labels = TaskBundle.load(old.bundles[0]).labels, TaskBundle.load(new.bundles[0]).labels
    figure = "mean absolute error" if part.problem == "regression" else "accuracy"
    scores = [_scores(part, rows, names) for rows, names in zip(logits, labels, strict=True)]
    return split, Pairs.of(*scores, figure)


def _scores(data: DataSet, logits: Tensor, labels: tuple[str, ...]) -> Tensor:
    targets = torch.from_numpy(data.targets(labels or None))
    if data.problem == "single_label":
        return (logits.argmax(dim=1) == targets).double()
    if data.problem == "multi_label":
        return ((logits > 0) == (targets > 0)).all(dim=1).double()
    return (logits - targets).abs().mean(dim=1).double()
