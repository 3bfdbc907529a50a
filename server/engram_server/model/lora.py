"""LoRA on task rows: `W x + (x A) B` in the linear layers, for the rows of one task alone.

Base rows never go through it, so contexts are shared and tasks stay independent. `LoraWeight` is
the update of one linear layer of one task; `BatchedLora` holds the updates of many tasks.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from engram_bundle.schema import LORA_TARGETS, LoraTarget
from torch import Tensor

from engram_server.errors import TaskMismatch
from engram_server.model.backbone import Backbone


class LoraWeight(NamedTuple):
    a: Tensor  # (L, in, r)
    b: Tensor  # (L, r, out)

    @property
    def rank(self) -> int:
        return int(self.a.shape[-1])


Lora = Mapping[LoraTarget, LoraWeight]


def target_sizes(backbone: Backbone) -> dict[LoraTarget, tuple[int, int]]:
    """Return the input and output width of each linear layer."""
    width, inner = backbone.width, backbone.geometry.attention_width
    block = backbone.blocks[0]
    return {
        "query": (width, inner),
        "output": (inner, width),
        "up": (width, block.up_weight.shape[0]),
        "down": (block.down_weight.shape[1], width),
    }


def check_lora(backbone: Backbone, lora: Lora) -> None:
    """Raise TaskMismatch unless every update has the shape of its linear layer."""
    sizes = target_sizes(backbone)
    for name, (a, b) in lora.items():
        if name not in sizes:
            raise TaskMismatch(
                f"Unknown LoRA target '{name}'. Valid targets: {', '.join(LORA_TARGETS)}."
            )
        into, out = sizes[name]
        rank = a.shape[-1] if a.ndim == 3 else 0
        if rank == 0 or a.shape != (backbone.layers, into, rank):
            raise TaskMismatch(
                f"LoRA tensor {name}.a is {tuple(a.shape)}, but backbone '{backbone.name}' needs "
                f"({backbone.layers}, {into}, r)"
            )
        if b.shape != (backbone.layers, rank, out):
            raise TaskMismatch(
                f"LoRA tensor {name}.b is {tuple(b.shape)}, but backbone '{backbone.name}' and "
                f"{name}.a need ({backbone.layers}, {rank}, {out})"
            )


@dataclass(frozen=True, slots=True, eq=False)
class BatchedLora:
    """The stacked LoRA weights of T tasks of a `TaskStack`; smaller ranks are padded with zeros."""

    # A is transposed: with a rank far below the width, its product is twice as fast that way.
    weights: dict[LoraTarget, LoraWeight]  # a (L, T, r, in), b (L, T, r, out)
    index_of_task: npt.NDArray[np.int64]  # by position in the task stack; -1 without LoRA

    @classmethod
    def of(cls, loras: Sequence[Lora]) -> "BatchedLora | None":
        """Stack `loras[t]` of task t, empty for a task without LoRA; None if all are empty."""
        present = [lora for lora in loras if lora]
        if not present:
            return None
        has = np.array([bool(lora) for lora in loras])
        indices = np.where(has, np.cumsum(has) - 1, -1)
        weights: dict[LoraTarget, LoraWeight] = {}
        for name in LORA_TARGETS:
            updates = [lora.get(name) for lora in present]
            if any(update is not None for update in updates):
                weights[name] = _stacked(updates)
        return cls(weights, indices)

    def __len__(self) -> int:
        return int(self.index_of_task.max()) + 1

    @property
    def nbytes(self) -> int:
        return sum(a.nbytes + b.nbytes for a, b in self.weights.values())


def _stacked(updates: Sequence[LoraWeight | None]) -> LoraWeight:
    present = [update for update in updates if update is not None]
    rank = max(update.rank for update in present)
    empty = LoraWeight(present[0].a[..., :0], present[0].b[:, :0])
    filled = [empty if update is None else update for update in updates]

    def stack(parts: Sequence[Tensor]) -> Tensor:
        """Pad and stack tensors (L, up to r, width) to (L, T, r, width)."""
        return torch.stack([F.pad(part, (0, 0, 0, rank - part.shape[1])) for part in parts], dim=1)

    return LoraWeight(
        stack([update.a.mT for update in filled]), stack([update.b for update in filled])
    )
