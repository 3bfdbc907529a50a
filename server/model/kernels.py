"""Which kernels there are, on which device, beyond those of torch: the one place that chooses."""

import logging
from functools import cache
from typing import Protocol

import torch
from torch import Tensor

_log = logging.getLogger("engram.model")


class RaggedAttention(Protocol):
    """Writes into `taken` what task rows take; `server.model.ragged_attention` has the shapes."""

    def __call__(
        self,
        taken: Tensor,
        own: tuple[Tensor, Tensor, Tensor],
        image: tuple[Tensor, Tensor],
        memory: tuple[Tensor, Tensor, Tensor | None] | None,
        lineage: tuple[Tensor, Tensor] | None,
        *,
        starts: Tensor,
        widest: int,
        tasks: Tensor,
    ) -> None: ...


def ragged_attention(like: Tensor) -> RaggedAttention | None:
    """The kernel for task rows such as `like`, (R, H, d); None where the plain form must do.

    It has no gradients.
    """
    if like.device.type != "cuda" or torch.is_grad_enabled():
        return None
    return _tried(like.device, like.dtype, like.shape[-1])


@cache
def _tried(device: torch.device, dtype: torch.dtype, width: int) -> RaggedAttention | None:
    """The kernel, if it runs there: it is compiled here, in all its forms, before it is needed."""
    try:
        from server.model.ragged_attention import attend_ragged, try_kernel

        try_kernel(device, dtype, width)
    except Exception as error:  # noqa: BLE001 - no Triton, no C compiler, a GPU too old for it
        _log.warning("task rows attend without the Triton kernel: %s", error)
        return None
    return attend_ragged
