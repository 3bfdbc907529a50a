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
    looked: Tensor | None = None  # (patches,) float32: where those tasks look

    @property
    def nbytes(self) -> int:
        looked = 0 if self.looked is None else self.looked.nbytes
        return self.states.nbytes + self.readout.nbytes + looked


@dataclass(frozen=True, slots=True)
class ContextBatch:
    """Several images' contexts as a pass makes and takes them."""

    states: tuple[Tensor, ...]  # per layer (2, B, H, S, d)
    readout: Tensor  # (B, n · D) float32
    looked: Tensor | None = None  # (B, patches) float32; None where nobody will ask for it

    def __len__(self) -> int:
        return self.readout.shape[0]

    @classmethod
    def stack(
        cls, contexts: Sequence[Context], device: torch.device, dtype: torch.dtype
    ) -> "ContextBatch":
        known = [each.looked for each in contexts if each.looked is not None]
        looked = torch.stack(known) if len(known) == len(contexts) else None
        return cls(
            _stacked([context.states for context in contexts], device, dtype).unbind(),
            torch.stack([context.readout for context in contexts]).to(device, non_blocking=True),
            None if looked is None else looked.to(device, non_blocking=True),
        )

    def unstack(
        self, device: torch.device | None = None, dtype: torch.dtype | None = None
    ) -> list[Context]:
        """One context per image, each its own memory, so that keeping one keeps no batch alive."""
        return [
            Context(
                torch.stack([layer[:, image] for layer in self.states]).to(device, dtype),
                self.readout[image].to(device, copy=True),
                None if self.looked is None else self.looked[image].to(device, copy=True),
            )
            for image in range(len(self))
        ]

    def join(self, other: "ContextBatch") -> "ContextBatch":
        """These images, then the others."""
        states = tuple(
            torch.cat(pair, dim=1) for pair in zip(self.states, other.states, strict=True)
        )
        looked = None
        if self.looked is not None and other.looked is not None:
            looked = torch.cat([self.looked, other.looked])
        return ContextBatch(states, torch.cat([self.readout, other.readout]), looked)

    def first(self, count: int) -> "ContextBatch":
        """The first of these images, without a copy."""
        return ContextBatch(
            tuple(layer[:, :count] for layer in self.states),
            self.readout[:count],
            None if self.looked is None else self.looked[:count],
        )

    def pick(self, images: Sequence[int]) -> "ContextBatch":
        """Some of these images, in the order given."""
        chosen = list(images)
        return ContextBatch(
            tuple(layer[:, chosen] for layer in self.states),
            self.readout[chosen],
            None if self.looked is None else self.looked[chosen],
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
