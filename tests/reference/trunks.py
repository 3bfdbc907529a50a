"""Where each family keeps its parts, for the reference: the modules of Hugging Face as they are.

Rotary positions and the pooling head are written here from their formulas, since to run the
family's own module would not tell whether we have understood it.
"""

import cmath
import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel


@dataclass(frozen=True)
class Layer:
    norm1: nn.Module
    query: nn.Linear
    key: nn.Linear
    value: nn.Linear
    output: nn.Linear
    scale1: nn.Module
    norm2: nn.Module
    up: Callable[[Tensor], Tensor]
    activation: Callable[[Tensor], Tensor]
    down: nn.Linear
    scale2: nn.Module


@dataclass(frozen=True)
class Trunk:
    embed: Callable[[Tensor], Tensor]  # pixels -> base tokens, before any further norm
    class_position: Tensor  # (D,) position embedding of the backbone's class token
    before: nn.Module  # norm of the embedded tokens; identity except in CLIP
    layers: list[Layer]
    heads: int
    after: nn.Module  # final norm
    base: Callable[[Tensor], Tensor] | None  # normed base tokens (B, S, D) -> (B, K)
    rotate: Callable[[Tensor, Tensor], Tensor] | None = None  # by position: base tokens of a head
    # What a head without a class token reads of the normed base tokens (B, S, D), and its weights
    # on them (B, H, S); without any, the first token and its attention in the last layer.
    pool: Callable[[Tensor], tuple[Tensor, Tensor]] | None = None


def _mlp(mlp: nn.Module) -> tuple[Callable, Callable, nn.Linear]:
    """Up, activation and down of an MLP; a gate is the first half of what goes up."""
    if hasattr(mlp, "fc1"):
        return mlp.fc1, mlp.activation_fn, mlp.fc2
    if not hasattr(mlp, "gate_proj"):
        return mlp.up_proj, mlp.act_fn, mlp.down_proj

    def up(rows: Tensor) -> Tensor:
        return torch.cat([mlp.gate_proj(rows), mlp.up_proj(rows)], dim=-1)

    def gated(raised: Tensor) -> Tensor:
        gate, rest = raised.chunk(2, dim=-1)
        return mlp.act_fn(gate) * rest

    return up, gated, mlp.down_proj


def _vit_layer(layer: nn.Module) -> Layer:
    attention, same = layer.attention, nn.Identity()
    return Layer(
        layer.layernorm_before,
        attention.q_proj,
        attention.k_proj,
        attention.v_proj,
        attention.o_proj,
        same,
        layer.layernorm_after,
        *_mlp(layer.mlp),
        same,
    )


def _dinov2_layer(layer: nn.Module) -> Layer:
    attention = layer.attention
    return Layer(
        layer.norm1,
        attention.q_proj,
        attention.k_proj,
        attention.v_proj,
        attention.o_proj,
        layer.layer_scale1,
        layer.norm2,
        *_mlp(layer.mlp),
        layer.layer_scale2,
    )


def _clip_layer(layer: nn.Module) -> Layer:
    attention, same = layer.self_attn, nn.Identity()
    return Layer(
        layer.layer_norm1,
        attention.q_proj,
        attention.k_proj,
        attention.v_proj,
        attention.out_proj,
        same,
        layer.layer_norm2,
        *_mlp(layer.mlp),
        same,
    )


def _embed(embeddings: nn.Module, pixels: Tensor) -> Tensor:
    """Base tokens; position embeddings are interpolated only for a size not the model's own."""
    own = embeddings.image_size
    own = (own, own) if isinstance(own, int) else tuple(own)
    return embeddings(pixels, interpolate_pos_encoding=tuple(pixels.shape[-2:]) != own)


def _vit_trunk(model: PreTrainedModel) -> Trunk:
    trunk = model.base_model
    if hasattr(model, "classifier"):

        def base(rows: Tensor) -> Tensor:
            return model.classifier(rows[:, 0])

    elif hasattr(model, "cls_classifier"):

        def base(rows: Tensor) -> Tensor:
            by_class = model.cls_classifier(rows[:, 0])
            by_distillation = model.distillation_classifier(rows[:, 1])
            return (by_class + by_distillation) / 2

    else:
        base = None
    return Trunk(
        embed=lambda pixels: _embed(trunk.embeddings, pixels),
        class_position=trunk.embeddings.position_embeddings[0, 0],
        before=nn.Identity(),
        layers=[_vit_layer(layer) for layer in trunk.layers],
        heads=model.config.num_attention_heads,
        after=trunk.layernorm,
        base=base,
    )


def _dinov2_trunk(model: PreTrainedModel) -> Trunk:
    trunk = model.base_model
    first_patch = 1 + getattr(model.config, "num_register_tokens", 0)

    def base(rows: Tensor) -> Tensor:
        features = [rows[:, 0], rows[:, first_patch:].mean(dim=1)]
        return model.classifier(torch.cat(features, dim=1))

    return Trunk(
        embed=trunk.embeddings,
        class_position=trunk.embeddings.position_embeddings[0, 0],
        before=nn.Identity(),
        layers=[_dinov2_layer(layer) for layer in trunk.encoder.layer],
        heads=model.config.num_attention_heads,
        after=trunk.layernorm,
        base=base if hasattr(model, "classifier") else None,
    )


def _clip_trunk(model: PreTrainedModel) -> Trunk:
    trunk = getattr(model, "vision_model", model)
    projection = getattr(model, "visual_projection", None)
    return Trunk(
        embed=lambda pixels: _embed(trunk.embeddings, pixels),
        class_position=trunk.embeddings.position_embedding.weight[0],
        before=trunk.pre_layrnorm,
        layers=[_clip_layer(layer) for layer in trunk.encoder.layers],
        heads=trunk.config.num_attention_heads,
        after=trunk.post_layernorm,
        base=None if projection is None else lambda rows: projection(rows[:, 0]),
    )


def _rotated(config: PreTrainedConfig, pixels: Tensor, rows: Tensor) -> Tensor:
    """Rotary positions as complex numbers: (B, H, S, d), of which the patches are the last.

    Number i of a head is the real part and i + d / 2 the imaginary part. The first half of these
    values rotate with the row of a patch's centre, the second with its column.
    """
    height, width = (side // config.patch_size for side in pixels.shape[-2:])
    quarter = rows.shape[-1] // 4
    rotations = []
    for row in range(height):
        for column in range(width):
            centre = (2 * (row + 0.5) / height - 1, 2 * (column + 0.5) / width - 1)
            angles = [
                2 * math.pi * place / config.rope_theta ** (step / quarter)
                for place in centre
                for step in range(quarter)
            ]
            rotations.append([cmath.exp(1j * angle) for angle in angles])
    rotate = torch.tensor(rotations, dtype=torch.complex128)  # (patches, d / 2)
    before, patches = rows[:, :, : -len(rotations)], rows[:, :, -len(rotations) :].double()
    real, imaginary = patches.chunk(2, dim=-1)
    rotated = torch.complex(real, imaginary) * rotate
    patches = torch.cat([rotated.real, rotated.imag], dim=-1).to(rows.dtype)
    return torch.cat([before, patches], dim=2)


def _dinov3_trunk(model: PreTrainedModel) -> Trunk:
    return Trunk(
        embed=model.embeddings,
        class_position=torch.zeros(model.config.hidden_size),
        before=nn.Identity(),
        layers=[_dinov2_layer(layer) for layer in model.model.layer],
        heads=model.config.num_attention_heads,
        after=model.norm,
        base=None,
        rotate=lambda pixels, rows: _rotated(model.config, pixels, rows),
    )


def _tips_trunk(model: PreTrainedModel) -> Trunk:
    trunk = getattr(model, "vision_model", model)
    return Trunk(
        embed=trunk.embeddings,
        class_position=trunk.embeddings.position_embeddings[0, 0],
        before=nn.Identity(),
        layers=[_dinov2_layer(layer) for layer in trunk.encoder.layer],
        heads=trunk.config.num_attention_heads,
        after=trunk.layernorm,
        base=(lambda rows: rows[:, 0]) if hasattr(model, "text_model") else None,
    )


def _radio_trunk(model: PreTrainedModel) -> Trunk:
    return Trunk(
        embed=lambda pixels: model.embeddings(model.input_conditioner(pixels)),
        class_position=torch.zeros(model.config.hidden_size),
        before=nn.Identity(),
        layers=[_dinov2_layer(layer) for layer in model.encoder.layer],
        heads=model.config.num_attention_heads,
        after=nn.Identity(),
        base=None,
    )


def _mae_trunk(model: PreTrainedModel) -> Trunk:
    trunk = model.base_model

    def embed(pixels: Tensor) -> Tensor:
        patches = (pixels.shape[-2] // trunk.config.patch_size) * (
            pixels.shape[-1] // trunk.config.patch_size
        )
        in_order = torch.arange(patches).expand(len(pixels), -1)
        return trunk.embeddings(pixels, noise=in_order, interpolate_pos_encoding=True)[0]

    return replace(_vit_trunk(model), embed=embed)


def _ijepa_trunk(model: PreTrainedModel) -> Trunk:
    trunk, classifier = model.base_model, getattr(model, "classifier", None)
    heads = model.config.num_attention_heads
    return Trunk(
        embed=lambda pixels: _embed(trunk.embeddings, pixels),
        class_position=torch.zeros(model.config.hidden_size),
        before=nn.Identity(),
        layers=[_vit_layer(layer) for layer in trunk.layers],
        heads=heads,
        after=trunk.layernorm,
        base=None if classifier is None else lambda rows: classifier(rows.mean(dim=1)),
        pool=lambda rows: _mean(rows, heads),
    )


_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": lambda x: x * (1 + torch.erf(x / math.sqrt(2))) / 2,
    "gelu_pytorch_tanh": lambda x: (
        x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))) / 2
    ),
    "quick_gelu": lambda x: x / (1 + torch.exp(-1.702 * x)),
}


def _pooled(head: nn.Module, config: PreTrainedConfig, rows: Tensor) -> tuple[Tensor, Tensor]:
    """SigLIP's pooling head from its numbers alone, head by head: (B, D), and weights (B, H, S).

    Reads only the model's tensors; neither its attention nor its MLP runs.
    """
    width, heads = config.hidden_size, config.num_attention_heads
    # One matrix holds those of queries, keys and values; H heads of width d are side by side.
    split = head.attention.in_proj_weight.reshape(3, heads, width // heads, width)
    shift = head.attention.in_proj_bias.reshape(3, heads, width // heads)
    query = torch.einsum("hdi,i->hd", split[0], head.probe[0, 0]) + shift[0]
    keys = torch.einsum("hdi,bsi->bhsd", split[1], rows) + shift[1][:, None]
    values = torch.einsum("hdi,bsi->bhsd", split[2], rows) + shift[2][:, None]
    powers = (torch.einsum("hd,bhsd->bhs", query, keys) / math.sqrt(width // heads)).exp()
    weights = powers / powers.sum(dim=-1, keepdim=True)
    head_outputs = torch.einsum("bhs,bhsd->bhd", weights, values)
    back = head.attention.out_proj.weight.reshape(width, heads, width // heads)
    mixed = torch.einsum("ohd,bhd->bo", back, head_outputs) + head.attention.out_proj.bias
    apart = mixed - mixed.mean(dim=-1, keepdim=True)
    spread = (apart.square().mean(dim=-1, keepdim=True) + config.layer_norm_eps).sqrt()
    normed = apart / spread * head.layernorm.weight + head.layernorm.bias
    raised = torch.einsum("fi,bi->bf", head.mlp.fc1.weight, normed) + head.mlp.fc1.bias
    hidden = _ACTIVATIONS[config.hidden_act](raised)
    return mixed + torch.einsum(
        "of,bf->bo", head.mlp.fc2.weight, hidden
    ) + head.mlp.fc2.bias, weights


def _siglip_trunk(model: PreTrainedModel) -> Trunk:
    trunk, classifier = getattr(model, "vision_model", model), getattr(model, "classifier", None)
    heads = trunk.config.num_attention_heads

    def pool(rows: Tensor) -> tuple[Tensor, Tensor]:
        return _pooled(trunk.head, trunk.config, rows)

    if classifier is not None:

        def base(rows: Tensor) -> Tensor:
            return classifier(rows.mean(dim=1))

    else:
        base = (lambda rows: pool(rows)[0]) if trunk.use_head else None
    return Trunk(
        embed=lambda pixels: _embed(trunk.embeddings, pixels),
        class_position=torch.zeros(trunk.config.hidden_size),
        before=nn.Identity(),
        layers=[_clip_layer(layer) for layer in trunk.encoder.layers],
        heads=heads,
        after=trunk.post_layernorm,
        base=base,
        pool=pool if trunk.use_head else lambda rows: _mean(rows, heads),
    )


def _mean(rows: Tensor, heads: int) -> tuple[Tensor, Tensor]:
    batch, count, _ = rows.shape
    return rows.mean(dim=1), torch.full((batch, heads, count), 1 / count)


TRUNKS: dict[str, Callable[[PreTrainedModel], Trunk]] = {
    "vit": _vit_trunk,
    "deit": _vit_trunk,
    "dinov2": _dinov2_trunk,
    "dinov2_with_registers": _dinov2_trunk,
    "dinov3_vit": _dinov3_trunk,
    "clip": _clip_trunk,
    "clip_vision_model": _clip_trunk,
    "metaclip_2": _clip_trunk,
    "metaclip_2_vision_model": _clip_trunk,
    "siglip": _siglip_trunk,
    "siglip_vision_model": _siglip_trunk,
    "tipsv2": _tips_trunk,
    "tipsv2_vision_model": _tips_trunk,
    "ijepa": _ijepa_trunk,
    "vit_mae": _mae_trunk,
    "radio": _radio_trunk,
}
