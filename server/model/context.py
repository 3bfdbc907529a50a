"""An image's context: what the backbone made of it, enough to answer any task now or later.

No base row ever attends to a task, so an image's keys and values at every layer depend on the image
alone. With the readout of its final base rows they replace the pixels: a warm image costs only its
task rows.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Context:
    """One image. May live on another device or in half precision; a pass converts it back."""

    states: Tensor  # (L, 2, H, S, d): keys and values of the base rows at each layer
    readout: Tensor  # (n · D,) float32: final base rows that `base` and head-only tasks read
    class_query: Tensor | None = None  # (H, d) float32, of the last layer: where those tasks look

    @property
    def nbytes(self) -> int:
        query = 0 if self.class_query is None else self.class_query.nbytes
        return self.states.nbytes + self.readout.nbytes + query


@dataclass(frozen=True, slots=True)
class ContextBatch:
    """Several images' contexts as a pass makes and takes them."""

    states: tuple[Tensor, ...]  # per layer (2, B, H, S, d)
    readout: Tensor  # (B, n · D) float32
    class_query: Tensor | None = None  # (B, H, d); None where nobody will ask where tasks look

    def __len__(self) -> int:
        return self.readout.shape[0]

    @classmethod
    def stack(
        cls, contexts: Sequence[Context], device: torch.device, dtype: torch.dtype
    ) -> "ContextBatch":
        queries = [each.class_query for each in contexts if each.class_query is not None]
        query = torch.stack(queries) if len(queries) == len(contexts) else None
        return cls(
            _stacked([context.states for context in contexts], device, dtype).unbind(),
            torch.stack([context.readout for context in contexts]).to(device, non_blocking=True),
            None if query is None else query.to(device, non_blocking=True),
        )

    def unstack(
        self, device: torch.device | None = None, dtype: torch.dtype | None = None
    ) -> list[Context]:
        """One context per image, each its own memory, so that keeping one keeps no batch alive."""
        return [
            Context(
                torch.stack([layer[:, image] for layer in self.states]).to(device, dtype),
                self.readout[image].to(device, copy=True),
                None
                if self.class_query is None
                else self.class_query[image].to(device, torch.float32, copy=True),
            )
            for image in range(len(self))
        ]

    def join(self, other: "ContextBatch") -> "ContextBatch":
        """These images, then the others."""
        states = tuple(
            torch.cat(pair, dim=1) for pair in zip(self.states, other.states, strict=True)
        )
        query = None
        if self.class_query is not None and other.class_query is not None:
            query = torch.cat([self.class_query, other.class_query])
        return ContextBatch(states, torch.cat([self.readout, other.readout]), query)

    def pick(self, images: Sequence[int]) -> "ContextBatch":
        """Some of these images, in the order given."""
        chosen = list(images)
        return ContextBatch(
            tuple(layer[:, chosen] for layer in self.states),
            self.readout[chosen],
            None if self.class_query is None else self.class_query[chosen],
        )


def _stacked(states: Sequence[Tensor], device: torch.device, dtype: torch.dtype) -> Tensor:
    """States (L, 2, H, S, d) side by side, (L, 2, B, H, S, d): each read once and written once.

    Those of one image that are where and what they should be are not copied at all.
    """
    if len(states) == 1:
        return states[0].unsqueeze(2).to(device, dtype, non_blocking=True)
    layers, kinds, *rest = states[0].shape
    stacked = torch.empty(layers, kinds, len(states), *rest, device=device, dtype=dtype)
    for place, one in enumerate(states):
        stacked[:, :, place].copy_(one, non_blocking=True)
    return stacked
