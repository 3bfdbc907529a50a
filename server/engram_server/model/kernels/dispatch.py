"""Choose the attention kernel for task rows: Triton on GPUs, plain torch elsewhere."""

import logging
from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor

_log = logging.getLogger("engram.model")


RaggedAttention = Callable[..., None]  # `ragged_attention.attend_ragged`, which needs Triton


def ragged_attention(like: Tensor) -> RaggedAttention | None:
    """Return the kernel for rows like `like`, (R, H, d), or None for torch, which has gradients."""
    if like.device.type != "cuda" or torch.is_grad_enabled():
        return None
    return compile_kernel(like.device, like.dtype, like.shape[-1])


@cache
def compile_kernel(device: torch.device, dtype: torch.dtype, width: int) -> RaggedAttention | None:
    """Compile all forms of the kernel before they are needed; None if that fails."""
    try:
        from engram_server.model.kernels.ragged_attention import attend_ragged, try_kernel

        try_kernel(device, dtype, width)
    except Exception as error:  # noqa: BLE001 - no Triton, no C compiler, a GPU too old for it
        _log.warning("The Triton kernel for task rows is not available; using torch: %s", error)
        return None
    return attend_ragged
