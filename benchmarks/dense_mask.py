"""The peer: every task's tokens in one sequence under a dense mask, as the reproduction does.

Written to be as quick as the approach allows (one fused QKV, one SDPA call, the mask built once),
so that the comparison is with the approach and not with a slow program.
"""

import torch
import torch.nn.functional as F
from engram_server.model.backbone import ACTIVATIONS, Backbone
from engram_server.model.kernels.linear import plain
from engram_server.model.tasks import TaskWeights
from torch import Tensor


class DenseMaskViT:
    """Concatenated tasks over a packed backbone: all tasks for all images, nothing ragged."""

    def __init__(self, backbone: Backbone, tasks: list[TaskWeights]) -> None:
        self._backbone = backbone
        self._heads = [(task.head_weight, task.head_bias) for task in tasks]
        tokens = [token for task in tasks if (token := task.class_token) is not None]
        memories = [memory for task in tasks if (memory := task.memory) is not None]
        self._tokens = backbone.embed_class_token(torch.stack(tokens))  # (T, D)
        self._memory = torch.cat(memories, dim=1)  # (L, ΣM, D)
        self._mask = _mask(backbone.geometry.tokens, [memory.shape[1] for memory in memories])

    @torch.no_grad()
    def __call__(self, pixels: Tensor) -> list[Tensor]:
        backbone, geometry = self._backbone, self._backbone.geometry
        count = len(pixels)
        rows = torch.cat([backbone.embed_images(pixels), self._tokens.expand(count, -1, -1)], dim=1)
        rows = dense_layers(backbone, rows, self._memory, self._mask)
        final = backbone.final_norm(rows[:, geometry.tokens :])
        return [F.linear(final[:, k], *head) for k, head in enumerate(self._heads)]


def dense_layers(backbone: Backbone, rows: Tensor, memories: Tensor, mask: Tensor) -> Tensor:
    """All layers over one sequence (B, S + T, D), with memory (L, ΣM, D) under one mask."""
    geometry, count = backbone.geometry, len(rows)
    for block, memory in zip(backbone.blocks, memories, strict=True):
        whole = torch.cat([rows, memory.expand(count, -1, -1)], dim=1)
        whole = F.layer_norm(
            whole, (geometry.width,), block.norm1_weight, block.norm1_bias, geometry.epsilon
        )
        states = F.linear(whole, plain(block.qkv_weight), block.qkv_bias)
        states = states.view(count, whole.shape[1], 3, geometry.heads, geometry.head_width)
        queries, keys, values = states.permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(
            queries[:, :, : rows.shape[1]], keys, values, attn_mask=mask
        )
        attended = attended.transpose(1, 2).flatten(2)
        rows = rows + F.linear(attended, plain(block.out_weight), block.out_bias)
        normed = F.layer_norm(
            rows, (geometry.width,), block.norm2_weight, block.norm2_bias, geometry.epsilon
        )
        hidden = F.linear(normed, plain(block.up_weight), block.up_bias)
        hidden = ACTIVATIONS[geometry.activation](hidden)
        rows = rows + F.linear(hidden, plain(block.down_weight), block.down_bias)
    return rows


def _mask(base: int, memories: list[int]) -> Tensor:
    """(S + T, S + T + ΣM): 0 where a query may attend, -inf where it may not."""
    tasks = len(memories)
    mask = torch.full((base + tasks, base + tasks + sum(memories)), -torch.inf)
    mask[:, :base] = 0
    start = base + tasks
    for task, size in enumerate(memories):
        mask[base + task, base + task] = 0
        mask[base + task, start : start + size] = 0
        start += size
    return mask
