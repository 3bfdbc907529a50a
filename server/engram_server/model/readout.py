"""The readout of an image: everything that heads read from its base rows, and an attention map.

The first parts are final rows, for `base` and head-only tasks. The summary follows if a task reads
layers: class token, mean over patches and standard deviation over patches of the normalised rows
that enter some of the layers (`Backbone.summary_layers`).
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from engram_server.model.backbone import ACTIVATIONS, Backbone, Geometry, Pooling


class Readout(NamedTuple):
    values: Tensor  # (B, parts · D) float32, in the order of `Backbone.readout`; then the summary
    patch_attention: Tensor  # (B, patches) float32: the weight of each patch in the first part


def read(
    backbone: Backbone,
    rows: Tensor,
    images: int,
    queries: Tensor,
    keys: Tensor,
    summary: Sequence[Tensor] = (),
) -> Readout:
    """Read final base rows (B · n, D); queries and keys (B, H, …, d) are of the last layer.

    `summary` has the output of `summarise` for each layer of the summary, or nothing.

    `patch_attention` is the last layer's attention of the class token, or the attention of the
    pooling probe, or uniform for the mean over patches.
    """
    geometry = backbone.geometry
    prefix, patches = geometry.prefix_tokens, geometry.patches
    normed = backbone.final_norm(rows.view(images, -1, backbone.width))
    parts = {"class": lambda: normed[:, 0], "distillation": lambda: normed[:, 1]}
    parts["patches"] = lambda: normed[:, prefix:].float().mean(dim=1)
    weights = None  # (B, H, S)
    if backbone.pooling is not None:
        pooled, weights = pool(backbone.pooling, geometry, normed)
        parts["pooled"] = lambda: pooled
    elif backbone.feature == "class":
        weights = attention_weights(queries[:, :, 0], keys)
    if weights is None:
        patch_attention = torch.full((images, patches), 1 / patches, device=rows.device)
    else:
        patch_attention = weights[..., prefix:].mean(dim=1)
    values = [parts[part]().float() for part in backbone.readout]
    return Readout(torch.cat([*values, *summary], dim=1), patch_attention)


def summarise(backbone: Backbone, rows: Tensor) -> Tensor:
    """Summarise normalised base rows (B, S, D) of one layer: (B, parts · D) float32."""
    rows = rows.float()
    patches = rows[:, backbone.geometry.prefix_tokens :]
    mean = patches.mean(dim=1)
    # Not `torch.std_mean`, which takes 15 times as long on a CPU.
    deviation = (patches - mean[:, None]).square().mean(dim=1).sqrt()
    parts = [mean, deviation]
    if backbone.embedding.class_token is not None:
        parts.insert(0, rows[:, 0])
    return torch.cat(parts, dim=1)


def pool(pooling: Pooling, geometry: Geometry, rows: Tensor) -> tuple[Tensor, Tensor]:
    """Pool final rows (B, S, D) to one row per image, (B, D), with its weights (B, H, S)."""
    width, heads = geometry.width, geometry.heads
    query = F.linear(pooling.probe, pooling.qkv_weight[:width], pooling.qkv_bias[:width])
    states = F.linear(rows, pooling.qkv_weight[width:], pooling.qkv_bias[width:])
    states = states.view(*rows.shape[:2], 2, heads, -1)
    keys, values = states.permute(2, 0, 3, 1, 4)  # (B, H, S, d)
    weights = attention_weights(query.view(heads, -1), keys)
    out = (weights.to(rows.dtype)[:, :, None] @ values).flatten(1)  # (B, D)
    # Unlike in a layer, there is no residual around the attention.
    x = F.linear(out, pooling.out_weight, pooling.out_bias)
    normed = geometry.norm(x, pooling.norm_weight, pooling.norm_bias)
    hidden = F.linear(normed, pooling.up_weight, pooling.up_bias)
    hidden = ACTIVATIONS[geometry.activation](hidden)
    return x + F.linear(hidden, pooling.down_weight, pooling.down_bias), weights


def attention_weights(queries: Tensor, keys: Tensor) -> Tensor:
    """Softmax weights (B, H, S) of one query per head, (…, H, d), on keys (B, H, S, d)."""
    queries = queries * queries.shape[-1] ** -0.5
    scores = (keys @ queries[..., None]).squeeze(-1)
    return torch.softmax(scores, dim=-1, dtype=torch.float32)
