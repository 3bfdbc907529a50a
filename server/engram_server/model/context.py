"""The context of an image: the keys and values of its base rows at every layer, and its readout.

No base row attends to a task, so a context depends on the image alone and can be cached. It
replaces the pixels: a warm image (one with a cached context) costs only its task rows.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Context:
    """The context of one image, on any device and in any precision; a pass converts it."""

    states: Tensor  # (L, 2, H, S, d): keys and values of the base rows at each layer
    readout: Tensor  # (n · D,) float32: final base rows that `base` and head-only tasks read
    patch_attention: Tensor | None = None  # (patches,) float32: attention of the readout

    @property
    def nbytes(self) -> int:
        attention = 0 if self.patch_attention is None else self.patch_attention.nbytes
        return self.states.nbytes + self.readout.nbytes + attention


@dataclass(frozen=True, slots=True)
class ContextBatch:
    """The contexts of B images in the layout of a pass."""

    states: tuple[Tensor, ...]  # per layer (2, B, H, S, d); empty if it is not needed
    readout: Tensor  # (B, n · D) float32
    patch_attention: Tensor | None = None  # (B, patches) float32; None if it is not needed

    def __len__(self) -> int:
        return self.readout.shape[0]

    @classmethod
    def stack(
        cls,
        contexts: Sequence[Context],
        device: torch.device,
        dtype: torch.dtype,
        *,
        with_states: bool = True,
    ) -> "ContextBatch":
        """Without states, which are large, the batch serves only tasks without rows."""
        states = [context.states for context in contexts] if with_states else []
        present = [one for each in contexts if (one := each.patch_attention) is not None]
        attention = torch.stack(present) if len(present) == len(contexts) else None
        return cls(
            _stacked(states, device, dtype).unbind() if states else (),
            torch.stack([context.readout for context in contexts]).to(device, non_blocking=True),
            None if attention is None else attention.to(device, non_blocking=True),
        )

    def unstack(
        self, device: torch.device | None = None, dtype: torch.dtype | None = None
    ) -> list[Context]:
        """Return one context per image, each a copy: keeping one does not keep the batch."""
        return [
            Context(
                torch.stack([layer[:, image] for layer in self.states]).to(device, dtype),
                self.readout[image].to(device, copy=True),
                None
                if self.patch_attention is None
                else self.patch_attention[image].to(device, copy=True),
            )
            for image in range(len(self))
        ]

    def join(self, other: "ContextBatch") -> "ContextBatch":
        """Join two batches; without states if one of them has none."""
        states = tuple(torch.cat(pair, dim=1) for pair in zip(self.states, other.states))  # noqa: B905
        attention = None
        if self.patch_attention is not None and other.patch_attention is not None:
            attention = torch.cat([self.patch_attention, other.patch_attention])
        return ContextBatch(states, torch.cat([self.readout, other.readout]), attention)

    def first(self, count: int) -> "ContextBatch":
        """Return the first `count` images, without a copy."""
        return self.pick(slice(count))

    def pick(self, images: list[int] | slice) -> "ContextBatch":
        return ContextBatch(
            tuple(layer[:, images] for layer in self.states),
            self.readout[images],
            None if self.patch_attention is None else self.patch_attention[images],
        )


def _stacked(states: Sequence[Tensor], device: torch.device, dtype: torch.dtype) -> Tensor:
    """Stack states (L, 2, H, S, d) to (L, 2, B, H, S, d) with one copy each.

    A single image that already has this device and dtype is not copied.
    """
    if len(states) == 1:
        return states[0].unsqueeze(2).to(device, dtype, non_blocking=True)
    layers, kinds, *rest = states[0].shape
    stacked = torch.empty(layers, kinds, len(states), *rest, device=device, dtype=dtype)
    for index, one in enumerate(states):
        stacked[:, :, index].copy_(one, non_blocking=True)
    return stacked
