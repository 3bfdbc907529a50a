"""The images a loop steps through, their targets, and their contexts where those can be kept."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from server.model import Backbone
from training.data.contexts import KeptContexts
from training.data.dataset import SplitName
from training.data.images import ImageSet
from training.data.prepared import PreparedData
from training.data.workspace import Workspace
from training.fitting.targets import Scaling


@dataclass(frozen=True, slots=True)
class Part:
    """One split."""

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
            kept.fill(batch, workspace.stage(f"encoding {split} images"), stop)
        targets = torch.from_numpy(prepared.data.part(split).targets())
        if len(images):
            parts[split] = Part(images, scaling.apply(targets), kept)
    return parts
