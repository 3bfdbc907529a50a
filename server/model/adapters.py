"""Row adapters: low-rank changes to the linear maps that a task's own row goes through.

At every layer a map becomes `W x + (x A) B` for the rows of one task alone. Base rows never see it,
so contexts are shared as before and tasks stay apart.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal, NamedTuple, get_args

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from server.errors import TaskMismatch
from server.model.backbone import Backbone

# Query and output of attention, up and down of the MLP; a gated MLP's gate is part of its up.
AdaptedMap = Literal["query", "output", "up", "down"]
ADAPTED_MAPS: Final[tuple[AdaptedMap, ...]] = get_args(AdaptedMap)


class LowRank(NamedTuple):
    """What is added to one map: x A B."""

    a: Tensor  # (L, in, r)
    b: Tensor  # (L, r, out)

    @property
    def rank(self) -> int:
        return int(self.a.shape[-1])


Adapter = Mapping[AdaptedMap, LowRank]


def map_sizes(backbone: Backbone) -> dict[AdaptedMap, tuple[int, int]]:
    """How wide the rows are that go into each map, and those that come out."""
    width, inner = backbone.width, backbone.geometry.attention_width
    block = backbone.blocks[0]
    return {
        "query": (width, inner),
        "output": (inner, width),
        "up": (width, block.up_weight.shape[0]),
        "down": (block.down_weight.shape[1], width),
    }


def check_adapter(backbone: Backbone, adapter: Adapter) -> None:
    """TaskMismatch unless every change has the shape of its map."""
    sizes = map_sizes(backbone)
    for name, (a, b) in adapter.items():
        if name not in sizes:
            raise TaskMismatch(f"'{name}' is no map of a row; use {', '.join(ADAPTED_MAPS)}")
        into, out = sizes[name]
        rank = a.shape[-1] if a.ndim == 3 else 0
        if rank == 0 or a.shape != (backbone.layers, into, rank):
            raise TaskMismatch(
                f"the adapter's {name}.a is {tuple(a.shape)}, but backbone '{backbone.name}' needs "
                f"({backbone.layers}, {into}, r)"
            )
        if b.shape != (backbone.layers, rank, out):
            raise TaskMismatch(
                f"the adapter's {name}.b is {tuple(b.shape)}, but backbone '{backbone.name}' and "
                f"{name}.a need ({backbone.layers}, {rank}, {out})"
            )


@dataclass(frozen=True, slots=True, eq=False)
class AdapterStack:
    """The adapters of some tasks of a `TaskStack` side by side.

    T tasks have one. Lower ranks, and maps that a task leaves as they are, are filled with zeros.
    """

    # A lies transposed: with a rank far below the width, its product is twice as fast so.
    maps: dict[AdaptedMap, LowRank]  # a (L, T, r, in), b (L, T, r, out)
    place_of_task: npt.NDArray[np.int64]  # by place in the task stack; -1 without an adapter

    @classmethod
    def of(cls, adapters: Sequence[Adapter]) -> "AdapterStack | None":
        """`adapters[t]` is that of task t, empty where it has none; None if all are."""
        present = [adapter for adapter in adapters if adapter]
        if not present:
            return None
        has = np.array([bool(adapter) for adapter in adapters])
        places = np.where(has, np.cumsum(has) - 1, -1)
        maps: dict[AdaptedMap, LowRank] = {}
        for name in ADAPTED_MAPS:
            changes = [adapter.get(name) for adapter in present]
            if any(change is not None for change in changes):
                maps[name] = _stacked(changes)
        return cls(maps, places)

    def __len__(self) -> int:
        return int(self.place_of_task.max()) + 1

    @property
    def nbytes(self) -> int:
        return sum(a.nbytes + b.nbytes for a, b in self.maps.values())


def _stacked(changes: Sequence[LowRank | None]) -> LowRank:
    known = [change for change in changes if change is not None]
    rank = max(change.rank for change in known)
    nothing = LowRank(known[0].a[..., :0], known[0].b[:, :0])
    present = [nothing if change is None else change for change in changes]

    def side_by_side(parts: Sequence[Tensor]) -> Tensor:
        """Of (L, up to r, width) each: (L, T, r, width)."""
        return torch.stack([F.pad(part, (0, 0, 0, rank - part.shape[1])) for part in parts], dim=1)

    return LowRank(
        side_by_side([change.a.mT for change in present]),
        side_by_side([change.b for change in present]),
    )
