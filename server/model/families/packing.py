"""From the modules of a loaded Hugging Face model to the packed `Backbone`."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel

from server.errors import BackboneError, BrokenCheckpoint, NotAVisionTransformer
from server.model.backbone import (
    ACTIVATIONS,
    Backbone,
    BaseHead,
    Embedding,
    Geometry,
    Layer,
    fingerprint,
    named_tensors,
)
from server.model.families.family import BlockPaths, Family, packed
from server.model.preprocessing import Preprocessing

# Hugging Face's names of activations, as ours.
_ACTIVATION_NAMES: Final[Mapping[str, str]] = {
    "gelu": "gelu",
    "gelu_python": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "quick_gelu": "quick_gelu",
    "relu": "relu",
    "silu": "silu",
    "swish": "silu",
}


def pack(
    name: str,
    model: PreTrainedModel,
    trunk: nn.Module,
    family: Family,
    config: PretrainedConfig,
    preprocessing: Preprocessing,
) -> Backbone:
    blocks = tuple(_block(block, family.block) for block in submodule(trunk, family.blocks))
    norm = submodule(trunk, family.final_norm)
    final_norm = packed(norm.weight), packed(norm.bias)
    geometry = _geometry(config, blocks[0], preprocessing.output_size)
    stored = family.embedding(trunk)
    geometry = replace(geometry, prefix_tokens=1 + stored.other_prefix.shape[0])
    _check(geometry, stored, blocks, final_norm)
    base = family.head(model)
    if base is not None:
        _check_head(base, geometry)
    positions = stored.patch_positions
    if geometry.image_size != pair(config.image_size):
        positions = _interpolated(positions, geometry.grid, family.antialias)
    return Backbone(
        name=Path(name).name,
        fingerprint=fingerprint(geometry, stored, blocks, *final_norm),
        geometry=geometry,
        preprocessing=preprocessing,
        embedding=replace(stored, patch_positions=positions),
        blocks=blocks,
        final_norm_weight=final_norm[0],
        final_norm_bias=final_norm[1],
        base=base,
    )


def _geometry(config: PretrainedConfig, first: Layer, image_size: tuple[int, int]) -> Geometry:
    activation = _ACTIVATION_NAMES.get(str(config.hidden_act))
    if getattr(config, "use_swiglu_ffn", False):
        activation = "swiglu"
    if activation not in ACTIVATIONS:
        raise NotAVisionTransformer(
            f"the activation '{config.hidden_act}' is not one we compute; "
            f"we compute {', '.join(sorted(ACTIVATIONS))}"
        )
    attention_width = first.out_weight.shape[1]
    if attention_width % config.num_attention_heads:
        raise BrokenCheckpoint(
            f"an attention width of {attention_width} cannot be split into "
            f"{config.num_attention_heads} heads"
        )
    patch_size = pair(config.patch_size)
    if image_size[0] < patch_size[0] or image_size[1] < patch_size[1]:
        raise BackboneError(
            f"an image of {image_size[0]}×{image_size[1]} pixels holds no patch of "
            f"{patch_size[0]}×{patch_size[1]}; choose a larger image size"
        )
    return Geometry(
        image_size=image_size,
        patch_size=patch_size,
        layers=config.num_hidden_layers,
        heads=config.num_attention_heads,
        head_width=attention_width // config.num_attention_heads,
        width=config.hidden_size,
        prefix_tokens=1,
        activation=activation,
        epsilon=config.layer_norm_eps,
    )


def _block(block: nn.Module, paths: BlockPaths) -> Layer:
    norm1, norm2 = submodule(block, paths.norm1), submodule(block, paths.norm2)
    parts = [_linear(submodule(block, path)) for path in (paths.query, paths.key, paths.value)]
    out_weight, out_bias = _scaled(block, paths.out, paths.scale1)
    if hasattr(submodule(block, "mlp"), "gate_proj"):  # SwiGLU: gate and up side by side
        gate = _linear(submodule(block, "mlp.gate_proj"))
        up = _linear(submodule(block, "mlp.up_proj"))
        up_weight, up_bias = torch.cat([gate[0], up[0]]), torch.cat([gate[1], up[1]])
        down_weight, down_bias = _scaled(block, "mlp.down_proj", paths.scale2)
    else:
        up_weight, up_bias = _linear(submodule(block, paths.up))
        down_weight, down_bias = _scaled(block, paths.down, paths.scale2)
    return Layer(
        norm1_weight=packed(norm1.weight),
        norm1_bias=packed(norm1.bias),
        qkv_weight=torch.cat([weight for weight, _ in parts]),
        qkv_bias=torch.cat([bias for _, bias in parts]),
        out_weight=out_weight,
        out_bias=out_bias,
        norm2_weight=packed(norm2.weight),
        norm2_bias=packed(norm2.bias),
        up_weight=up_weight,
        up_bias=up_bias,
        down_weight=down_weight,
        down_bias=down_bias,
    )


def _scaled(block: nn.Module, linear: str, scale: str | None) -> tuple[Tensor, Tensor]:
    """A linear map with the layer scale behind it folded in."""
    weight, bias = _linear(submodule(block, linear))
    if scale is None:
        return weight, bias
    owner, _, parameter = scale.rpartition(".")
    factor = packed(getattr(submodule(block, owner), parameter))
    return weight * factor[:, None], bias * factor


def _linear(linear: Any) -> tuple[Tensor, Tensor]:  # noqa: ANN401 - a module of the checkpoint
    weight = packed(linear.weight)
    bias = torch.zeros(weight.shape[0]) if linear.bias is None else packed(linear.bias)
    return weight, bias


def submodule(module: nn.Module, path: str) -> Any:  # noqa: ANN401 - a module of the checkpoint
    return module.get_submodule(path)


def _interpolated(positions: Tensor, grid: tuple[int, int], antialias: bool) -> Tensor:
    """Position embeddings of the trained, square grid of patches, resampled to another one."""
    side = round(positions.shape[0] ** 0.5)
    if (side, side) == grid:
        return positions
    if side * side != positions.shape[0]:
        raise BackboneError(
            f"the {positions.shape[0]} trained positions are not a square, so they cannot be "
            f"resampled to {grid[0]}×{grid[1]}; leave image_size out"
        )
    square = positions.reshape(1, side, side, -1).permute(0, 3, 1, 2)
    resampled = F.interpolate(
        square, size=grid, mode="bicubic", align_corners=False, antialias=antialias
    )
    return resampled.permute(0, 2, 3, 1).reshape(grid[0] * grid[1], -1).contiguous()


def _check(
    geometry: Geometry,
    embedding: Embedding,
    blocks: tuple[Layer, ...],
    final_norm: tuple[Tensor, Tensor],
) -> None:
    parts: list[Embedding | Layer] = [embedding, *blocks]
    tensors = [*final_norm, *(tensor for part in parts for _, tensor in named_tensors(part))]
    if not all(bool(torch.isfinite(tensor).all()) for tensor in tensors):
        raise BrokenCheckpoint("some weights are not finite numbers (NaN or infinity)")
    if embedding.patch_weight.shape[1] != 3 * geometry.patch_size[0] * geometry.patch_size[1]:
        raise NotAVisionTransformer("only models of three colour channels are read")


def _check_head(base: BaseHead, geometry: Geometry) -> None:
    expected = (len(base.labels), len(base.reads) * geometry.width)
    if tuple(base.weight.shape) != expected:
        raise BrokenCheckpoint(
            f"the classifier's weights are {tuple(base.weight.shape)}, but {len(base.labels)} "
            f"labels over {expected[1]} features need {expected}"
        )
    if not all(
        bool(torch.isfinite(part).all()) for part in (base.weight, base.bias) if part is not None
    ):
        raise BrokenCheckpoint("some weights of the classifier are not finite numbers")


def pair(size: int | tuple[int, int] | list[int]) -> tuple[int, int]:
    if isinstance(size, int):
        return size, size
    height, width = size
    return int(height), int(width)
