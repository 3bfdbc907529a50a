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
        layers = range(contexts[0].states.shape[0])
        known = [each.looked for each in contexts if each.looked is not None]
        looked = torch.stack(known) if len(known) == len(contexts) else None
        return cls(
            tuple(
                torch.stack([context.states[layer] for context in contexts], dim=1).to(
                    device, dtype, non_blocking=True
                )
                for layer in layers
            ),
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

    def pick(self, images: Sequence[int]) -> "ContextBatch":
        """Some of these images, in the order given."""
        chosen = list(images)
        return ContextBatch(
            tuple(layer[:, chosen] for layer in self.states),
            self.readout[chosen],
            None if self.looked is None else self.looked[chosen],
        )
