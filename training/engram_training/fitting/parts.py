"""The data of the training loop: images, targets and kept contexts."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from engram_server.model import Backbone, TaskWeights
from torch import Tensor

from engram_training.data.contexts import KeptContexts
from engram_training.data.dataset import SplitName, TaskType
from engram_training.data.images import ImageSet, PreparedData
from engram_training.data.workspace import Workspace


@dataclass(frozen=True, slots=True)
class Scaling:
    """Scales regression targets to mean zero and variance one."""

    mean: Tensor
    deviation: Tensor

    @classmethod
    def of(cls, targets: Tensor) -> "Scaling":
        deviation = targets.std(dim=0, correction=0)
        return cls(targets.mean(dim=0), torch.where(deviation > 0, deviation, 1.0))

    def apply(self, targets: Tensor) -> Tensor:
        return (targets - self.mean) / self.deviation

    def undo(self, weights: TaskWeights) -> TaskWeights:
        """Convert a head trained on scaled targets to the original units."""
        assert weights.head_bias is not None
        return replace(
            weights,
            head_weight=weights.head_weight * self.deviation[:, None],
            head_bias=weights.head_bias * self.deviation + self.mean,
        )


def starting_bias(targets: Tensor, task_type: TaskType) -> Tensor | None:
    """Return the frequency of each label as a logit for multi-label tasks, else None."""
    if task_type != "multi_label":
        return None
    share = (targets.sum(dim=0) + 1) / (len(targets) + 2)
    return torch.log(share / (1 - share))


@dataclass(frozen=True, slots=True)
class Part:
    images: ImageSet
    targets: Tensor
    kept: KeptContexts | None  # None: augmented views differ in each epoch

    def __len__(self) -> int:
        return len(self.images)


def make_parts(
    prepared: PreparedData,
    scaling: Scaling | None,
    backbone: Backbone,
    workspace: Workspace,
    *,
    batch: int,
    rows: bool,
    stop: Callable[[], bool],
) -> dict[SplitName, Part]:
    """Prepare the data of training and validation; `rows`: a variant has a task row."""
    parts: dict[SplitName, Part] = {}
    splits: tuple[SplitName, ...] = ("val", "train")
    for split in splits:
        images, kept = prepared.images[split], None
        if split == "val" or prepared.augmentation == "none":
            kept = KeptContexts(backbone, images, workspace.scratch, rows=rows)
            kept.fill(batch, workspace.watcher.stage(f"encoding {split}"), stop)
        targets = torch.from_numpy(prepared.data.part(split).targets())
        if scaling is not None:
            targets = scaling.apply(targets)
        if len(images):
            parts[split] = Part(images, targets, kept)
    return parts
