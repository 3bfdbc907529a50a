"""What a loop steps through: images, what a head is trained towards, and kept contexts."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from server.model import Backbone, TaskWeights
from training.data.contexts import KeptContexts
from training.data.dataset import Problem, SplitName
from training.data.images import ImageSet, PreparedData
from training.data.workspace import Workspace


@dataclass(frozen=True, slots=True)
class Scaling:
    """Regression trains on numbers of mean zero and variance one; elsewhere this is neutral."""

    problem: Problem
    mean: Tensor
    spread: Tensor

    @classmethod
    def of(cls, targets: Tensor, problem: Problem) -> "Scaling":
        if problem != "regression":
            return cls(problem, torch.zeros(1), torch.ones(1))
        spread = targets.std(dim=0, correction=0)
        return cls(problem, targets.mean(dim=0), torch.where(spread > 0, spread, 1.0))

    def apply(self, targets: Tensor) -> Tensor:
        return (targets - self.mean) / self.spread if self.problem == "regression" else targets

    def undo(self, weights: TaskWeights) -> TaskWeights:
        """A head trained on scaled targets, so that it answers in their own units."""
        if self.problem != "regression":
            return weights
        assert weights.head_bias is not None
        return replace(
            weights,
            head_weight=weights.head_weight * self.spread[:, None],
            head_bias=weights.head_bias * self.spread + self.mean,
        )


def starting_bias(targets: Tensor, problem: Problem) -> Tensor | None:
    """For several labels how frequent each is, as a logit; else None: zero."""
    if problem != "multi_label":
        return None
    share = (targets.sum(dim=0) + 1) / (len(targets) + 2)
    return torch.log(share / (1 - share))


@dataclass(frozen=True, slots=True)
class Part:
    images: ImageSet
    targets: Tensor
    kept: KeptContexts | None  # None: the views differ from epoch to epoch

    def __len__(self) -> int:
        return len(self.images)


def make_parts(
    prepared: PreparedData,
    scaling: Scaling,
    backbone: Backbone,
    workspace: Workspace,
    *,
    batch: int,
    rows: bool,
    stop: Callable[[], bool],
) -> dict[SplitName, Part]:
    """What training and validation step through; `rows`: some variant has a row of its own."""
    parts: dict[SplitName, Part] = {}
    splits: tuple[SplitName, ...] = ("val", "train")
    for split in splits:
        images, kept = prepared.images[split], None
        if split == "val" or prepared.augmentation == "none":
            kept = KeptContexts(backbone, images, workspace.scratch, rows=rows)
            kept.fill(batch, workspace.watcher.stage(f"encoding {split} images"), stop)
        targets = torch.from_numpy(prepared.data.part(split).targets())
        if len(images):
            parts[split] = Part(images, scaling.apply(targets), kept)
    return parts
