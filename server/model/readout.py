"""What `base` and head-only tasks read of an image, and where the image was looked at for it."""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from server.model.backbone import ACTIVATIONS, Backbone, Geometry, Pooling


class Readout(NamedTuple):
    """Of B images."""

    values: Tensor  # (B, parts · D) float32, the parts in the order of `Backbone.readout`
    looked: Tensor  # (B, patches) float32: the weight of each patch in the first part


def read(backbone: Backbone, rows: Tensor, images: int, queries: Tensor, keys: Tensor) -> Readout:
    """Final base rows (B · n, D), with queries and keys (B, H, …, d) of the last layer's rows.

    Where a class token is read, `looked` is its attention in the last layer, whose output it is; a
    probe's is its own; a mean looks at all patches alike.
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
        looked = torch.full((images, patches), 1 / patches, device=rows.device)
    else:
        looked = weights[..., prefix:].mean(dim=1)
    values = [parts[part]().float() for part in backbone.readout]
    return Readout(torch.cat(values, dim=1), looked)


def pool(pooling: Pooling, geometry: Geometry, rows: Tensor) -> tuple[Tensor, Tensor]:
    """Final rows (B, S, D) to one of each image, (B, D), and its weights on them, (B, H, S)."""
    width, heads = geometry.width, geometry.heads
    query = F.linear(pooling.probe, pooling.qkv_weight[:width], pooling.qkv_bias[:width])
    states = F.linear(rows, pooling.qkv_weight[width:], pooling.qkv_bias[width:])
    states = states.view(*rows.shape[:2], 2, heads, -1)
    keys, values = states.permute(2, 0, 3, 1, 4)  # (B, H, S, d)
    weights = attention_weights(query.view(heads, -1), keys)
    taken = (weights.to(rows.dtype)[:, :, None] @ values).flatten(1)  # (B, D)
    # Unlike in a layer, nothing is added to the probe.
    mixed = F.linear(taken, pooling.out_weight, pooling.out_bias)
    normed = geometry.norm(mixed, pooling.norm_weight, pooling.norm_bias)
    raised = F.linear(normed, pooling.up_weight, pooling.up_bias)
    hidden = ACTIVATIONS[geometry.activation](raised)
    return mixed + F.linear(hidden, pooling.down_weight, pooling.down_bias), weights


def attention_weights(queries: Tensor, keys: Tensor) -> Tensor:
    """Of one query a head, (…, H, d), on keys (B, H, S, d): (B, H, S) in float32."""
    queries = queries * queries.shape[-1] ** -0.5
    scores = (keys @ queries[..., None]).squeeze(-1)
    return torch.softmax(scores, dim=-1, dtype=torch.float32)
