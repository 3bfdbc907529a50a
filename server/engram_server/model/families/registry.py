"""The supported model families (`FAMILIES`).

To add a family, add an entry to `FAMILIES` and a tiny configuration to `tests/families.py`.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final

import torch
import torch.nn.functional as F
from engram_bundle.schema import TaskType
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel

from engram_server.errors import BackboneError
from engram_server.model.backbone import BaseHead, Embedding, Pooling, ReadoutPart


@dataclass(frozen=True, slots=True)
class BlockPaths:
    norm1: str
    query: str
    key: str
    value: str
    out: str
    norm2: str
    up: str = "mlp.fc1"
    down: str = "mlp.fc2"
    scale1: str | None = None  # layer scale after attention
    scale2: str | None = None  # layer scale after the MLP


def resampled(
    positions: Tensor, grid: tuple[int, int], *, mode: str = "bicubic", antialias: bool = False
) -> Tensor:
    """Resample position embeddings from the trained square grid of patches to another grid."""
    side = round(positions.shape[0] ** 0.5)
    if (side, side) == grid:
        return positions
    if side * side != positions.shape[0]:
        raise BackboneError(
            f"the {positions.shape[0]} trained positions are not a square grid and cannot be "
            f"resampled to {grid[0]}×{grid[1]}. Omit image_size."
        )
    square = positions.reshape(1, side, side, -1).permute(0, 3, 1, 2)
    changed = F.interpolate(square, size=grid, mode=mode, align_corners=False, antialias=antialias)
    return changed.permute(0, 2, 3, 1).reshape(grid[0] * grid[1], -1).contiguous()


@dataclass(frozen=True, slots=True)
class Family:
    trunks: Mapping[str, str]  # class name → path of the trunk inside it; the first is the default
    embedding: Callable[[Any], Embedding]  # takes the trunk
    blocks: str
    block: BlockPaths
    final_norm: str | None
    processor: str  # image processor whose defaults apply if the folder has no configuration
    head: Callable[[PreTrainedModel], BaseHead | None]
    # Interpolates position embeddings (patches, D) to another grid.
    resample: Callable[[Tensor, tuple[int, int]], Tensor] = resampled
    pooling: Callable[[Any], Pooling | None] = lambda trunk: None  # takes the trunk
    config: Callable[[PretrainedConfig], PretrainedConfig] = lambda config: config
    unused_weights: tuple[str, ...] = ()  # parts of a checkpoint that may be missing


def packed(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu", torch.float32).contiguous()


def _packed_embedding(
    patch: nn.Conv2d | nn.Linear,
    *,
    class_token: Tensor | None = None,
    class_position: Tensor | None = None,
    other_prefix: Tensor | None = None,
    patch_positions: Tensor | None = None,
    norm: nn.LayerNorm | None = None,
) -> Embedding:
    """Pack vectors of any shape with one row; `other_prefix` (n, D) includes its positions."""
    weight = packed(patch.weight).flatten(1)
    width = weight.shape[0]
    return Embedding(
        patch_weight=weight,
        patch_bias=torch.zeros(width) if patch.bias is None else packed(patch.bias),
        class_token=None if class_token is None else packed(class_token).reshape(width),
        class_position=None if class_position is None else packed(class_position).reshape(width),
        other_prefix=torch.empty(0, width) if other_prefix is None else packed(other_prefix),
        patch_positions=None if patch_positions is None else packed(patch_positions),
        norm_weight=None if norm is None else packed(norm.weight),
        norm_bias=None if norm is None else packed(norm.bias),
    )


def _linear_head(
    model: PreTrainedModel, reads: tuple[ReadoutPart, ...] = ("class",)
) -> BaseHead | None:
    classifier = getattr(model, "classifier", None)
    if not isinstance(classifier, nn.Linear):
        return None
    bias = None if classifier.bias is None else packed(classifier.bias)
    return _head_of(model.config, packed(classifier.weight), bias, reads)


def _head_of(
    config: PretrainedConfig, weight: Tensor, bias: Tensor | None, reads: tuple[ReadoutPart, ...]
) -> BaseHead:
    """Build a classifier with the labels and the task type of the configuration."""
    names: dict[Any, str] = config.id2label or {}
    task_types: dict[str | None, TaskType] = {
        "regression": "regression",
        "multi_label_classification": "multi_label",
    }
    task_type = task_types.get(config.problem_type, "single_label")
    return BaseHead(weight, bias, tuple(names[index] for index in sorted(names)), task_type, reads)


def _embedding(trunk: Any) -> Embedding:  # noqa: ANN401 - a module of the checkpoint
    """Convert a ViT, with the distillation token of DeiT or the registers of DINOv2, if any."""
    parts = trunk.embeddings
    positions = parts.position_embeddings[0]
    if not hasattr(parts, "cls_token"):  # I-JEPA
        return _packed_embedding(parts.patch_embeddings.projection, patch_positions=positions)
    other_prefix, first_patch = None, 1
    if hasattr(parts, "distillation_token"):  # its position follows the class token's
        other_prefix, first_patch = parts.distillation_token[0] + positions[1:2], 2
    elif hasattr(parts, "register_tokens"):  # have no positions
        other_prefix = parts.register_tokens[0]
    return _packed_embedding(
        parts.patch_embeddings.projection,
        class_token=parts.cls_token,
        class_position=positions[0],
        other_prefix=other_prefix,
        patch_positions=positions[first_patch:],
    )


def _clip_embedding(trunk: Any) -> Embedding:  # noqa: ANN401 - a module of the checkpoint
    parts = trunk.embeddings
    positions = parts.position_embedding.weight
    return _packed_embedding(
        parts.patch_embedding,
        class_token=parts.class_embedding,
        class_position=positions[0],
        patch_positions=positions[1:],
        norm=trunk.pre_layrnorm,
    )


def _dinov3_embedding(trunk: Any) -> Embedding:  # noqa: ANN401 - a module of the checkpoint
    """DINOv3 has rotary position embeddings, so none are added."""
    parts = trunk.embeddings
    return _packed_embedding(
        parts.patch_embeddings, class_token=parts.cls_token, other_prefix=parts.register_tokens[0]
    )


def _siglip_embedding(trunk: Any) -> Embedding:  # noqa: ANN401 - a module of the checkpoint
    parts = trunk.embeddings
    return _packed_embedding(parts.patch_embedding, patch_positions=parts.position_embedding.weight)


def _radio_embedding(trunk: Any) -> Embedding:  # noqa: ANN401 - a module of the checkpoint
    """C-RADIO has several class tokens and registers without positions; the first one is used.

    The model normalises the colours itself, which is folded into the patch projection.
    """
    parts = trunk.embeddings
    tokens = parts.cls_register_token
    embedding = _packed_embedding(
        parts.patch_projection,
        class_token=tokens[0],
        other_prefix=tokens[1:],
        patch_positions=parts.position_embedding[0],
    )
    mean, std = (
        packed(part).repeat_interleave(parts.patch_size**2)
        for part in (trunk.input_conditioner.norm_mean, trunk.input_conditioner.norm_std)
    )
    weight = embedding.patch_weight / std
    # In double precision, so that rounding gives the same fingerprint everywhere.
    bias = -(weight.double() * mean.double()).sum(dim=1).float()
    return replace(embedding, patch_weight=weight, patch_bias=bias)


def _radio_resampled(positions: Tensor, grid: tuple[int, int]) -> Tensor:
    """Resample to the enclosing square grid, then crop."""
    side = max(grid)
    square = resampled(positions, (side, side), mode="bilinear").view(side, side, -1)
    return square[: grid[0], : grid[1]].flatten(0, 1).contiguous()


def _siglip_pooling(trunk: Any) -> Pooling | None:  # noqa: ANN401 - a module of the checkpoint
    if not trunk.use_head:
        return None
    head = trunk.head
    return Pooling(
        probe=packed(head.probe).flatten(),
        qkv_weight=packed(head.attention.in_proj_weight),
        qkv_bias=packed(head.attention.in_proj_bias),
        out_weight=packed(head.attention.out_proj.weight),
        out_bias=packed(head.attention.out_proj.bias),
        norm_weight=packed(head.layernorm.weight),
        norm_bias=packed(head.layernorm.bias),
        up_weight=packed(head.mlp.fc1.weight),
        up_bias=packed(head.mlp.fc1.bias),
        down_weight=packed(head.mlp.fc2.weight),
        down_bias=packed(head.mlp.fc2.bias),
    )


def _deit_head(model: PreTrainedModel) -> BaseHead | None:
    """DeiT with a teacher averages two heads: one head over both rows with halved weights."""
    first: Any = getattr(model, "cls_classifier", None)
    if first is None:
        return _linear_head(model)
    second: Any = model.distillation_classifier
    weight = torch.cat([packed(first.weight), packed(second.weight)], dim=1) / 2
    bias = (packed(first.bias) + packed(second.bias)) / 2
    return _head_of(model.config, weight, bias, ("class", "distillation"))


def _clip_head(model: PreTrainedModel) -> BaseHead | None:
    """CLIP's projection into the space it shares with text: an embedding, not a classifier.

    A `CLIPForImageClassification` loads without its head: that averages patch rows before the final
    norm, which is not a readout we serve.
    """
    projection: Any = getattr(model, "visual_projection", None)
    return None if projection is None else _embedding_head(packed(projection.weight), "class")


def _siglip_head(model: PreTrainedModel) -> BaseHead | None:
    """The pooled row, which is in the space shared with text; or a classifier of the mean patch."""
    trunk: Any = getattr(model, "vision_model", model)
    width = trunk.config.hidden_size
    classifier = _linear_head(model, reads=("patches",))
    if classifier is None:
        return _embedding_head(torch.eye(width), "pooled") if trunk.use_head else None
    if not trunk.use_head:
        return classifier
    # Head-only tasks read the pooled row, so it comes first; this head has zero weights for it.
    weight = F.pad(classifier.weight, (width, 0))
    return replace(classifier, weight=weight, reads=("pooled", "patches"))


def _tips_head(model: PreTrainedModel) -> BaseHead | None:
    """With a text tower, the class token is already in the space shared with texts."""
    if not hasattr(model, "text_model"):
        return None
    return _embedding_head(torch.eye(model.config.vision_config.hidden_size), "class")


def _embedding_head(weight: Tensor, reads: ReadoutPart) -> BaseHead:
    labels = tuple(f"dim_{index}" for index in range(weight.shape[0]))
    return BaseHead(weight, None, labels, "embedding", (reads,))


_VIT: Final = Family(
    trunks={"ViTModel": "", "ViTForImageClassification": "vit"},
    embedding=_embedding,
    blocks="layers",
    block=BlockPaths(
        norm1="layernorm_before",
        query="attention.q_proj",
        key="attention.k_proj",
        value="attention.v_proj",
        out="attention.o_proj",
        norm2="layernorm_after",
    ),
    final_norm="layernorm",
    processor="ViTImageProcessor",
    head=_linear_head,
)
_DEIT: Final = replace(
    _VIT,
    trunks={
        "DeiTModel": "",
        "DeiTForImageClassification": "deit",
        "DeiTForImageClassificationWithTeacher": "deit",
    },
    processor="DeiTImageProcessor",
    head=_deit_head,
)
# Has layer scale, and heads that also read the patches.
_DINOV2: Final = replace(
    _VIT,
    trunks={"Dinov2Model": "", "Dinov2ForImageClassification": "dinov2"},
    blocks="encoder.layer",
    block=replace(
        _VIT.block,
        norm1="norm1",
        norm2="norm2",
        scale1="layer_scale1.lambda1",
        scale2="layer_scale2.lambda1",
    ),
    processor="BitImageProcessor",
    head=partial(_linear_head, reads=("class", "patches")),
)
_DINOV2_WITH_REGISTERS: Final = replace(
    _DINOV2,
    trunks={
        "Dinov2WithRegistersModel": "",
        "Dinov2WithRegistersForImageClassification": "dinov2_with_registers",
    },
    resample=partial(resampled, antialias=True),
)
_DINOV3: Final = replace(
    _DINOV2,
    trunks={"DINOv3ViTModel": "", "DINOv3ViTBackbone": ""},
    embedding=_dinov3_embedding,
    blocks="model.layer",
    block=replace(_DINOV2.block, up="mlp.up_proj", down="mlp.down_proj"),
    final_norm="norm",
    processor="DINOv3ViTImageProcessor",
    head=_linear_head,
)
_CLIP: Final = Family(
    trunks={
        "CLIPVisionModel": "",
        "CLIPVisionModelWithProjection": "vision_model",
        "CLIPModel": "vision_model",
        "CLIPForImageClassification": "vision_model",
    },
    embedding=_clip_embedding,
    blocks="encoder.layers",
    block=BlockPaths(
        norm1="layer_norm1",
        query="self_attn.q_proj",
        key="self_attn.k_proj",
        value="self_attn.v_proj",
        out="self_attn.out_proj",
        norm2="layer_norm2",
    ),
    final_norm="post_layernorm",
    processor="CLIPImageProcessor",
    head=_clip_head,
    config=lambda config: getattr(config, "vision_config", config),
    unused_weights=("text_model.", "text_projection", "logit_scale"),
)
_METACLIP_2: Final = replace(
    _CLIP, trunks={name.replace("CLIP", "MetaClip2"): path for name, path in _CLIP.trunks.items()}
)
# No class token: a probe pools the final rows. Includes SigLIP 2 with a fixed resolution.
_SIGLIP: Final = replace(
    _CLIP,
    trunks={
        "SiglipVisionModel": "",
        "SiglipModel": "vision_model",
        "SiglipForImageClassification": "vision_model",
    },
    embedding=_siglip_embedding,
    processor="SiglipImageProcessor",
    head=_siglip_head,
    pooling=_siglip_pooling,
    unused_weights=("text_model.", "logit_scale", "logit_bias"),
)
# Like DINOv2 with registers, but resamples bilinearly; its register is a second class token.
_TIPS: Final = replace(
    _DINOV2_WITH_REGISTERS,
    trunks={"Tipsv2VisionModel": "", "Tipsv2Model": "vision_model"},
    processor="Tipsv2ImageProcessor",
    head=_tips_head,
    resample=partial(resampled, mode="bilinear", antialias=True),
    config=_CLIP.config,
    unused_weights=("text_model.", "temperature"),
)
# No class token: heads read the mean over patches.
_IJEPA: Final = replace(
    _VIT,
    trunks={"IJepaModel": "", "IJepaForImageClassification": "ijepa"},
    head=partial(_linear_head, reads=("patches",)),
)
# The encoder runs on all patches here, not on the quarter it sees in training.
_MAE: Final = replace(
    _VIT, trunks={"ViTMAEModel": "", "ViTMAEForPreTraining": "vit"}, unused_weights=("decoder.",)
)
_RADIO: Final = replace(
    _DINOV2,
    trunks={"RadioModel": ""},
    embedding=_radio_embedding,
    final_norm=None,
    processor="CLIPImageProcessor",
    head=lambda model: None,
    resample=_radio_resampled,
)

# By Hugging Face's `model_type`.
FAMILIES: Final[Mapping[str, Family]] = {
    "vit": _VIT,
    "deit": _DEIT,
    "dinov2": _DINOV2,
    "dinov2_with_registers": _DINOV2_WITH_REGISTERS,
    "dinov3_vit": _DINOV3,
    "clip": _CLIP,
    "clip_vision_model": _CLIP,
    "metaclip_2": _METACLIP_2,
    "metaclip_2_vision_model": _METACLIP_2,
    "siglip": _SIGLIP,
    "siglip_vision_model": _SIGLIP,
    "tipsv2": _TIPS,
    "tipsv2_vision_model": _TIPS,
    "ijepa": _IJEPA,
    "vit_mae": _MAE,
    "radio": _RADIO,
}

# Why similar models are not supported.
_REASONS: Final[Mapping[str, tuple[str, ...]]] = {
    "takes images of any shape, and the server needs a fixed size; SigLIP 2 models with a fixed "
    "resolution have the type 'siglip'": ("siglip2", "siglip2_vision_model"),
    "has windowed attention": ("swin", "swinv2", "pvt", "hiera"),
    "is a convolutional network": ("dinov3_convnext", "convnext", "convnextv2", "resnet"),
    "has a relative position bias": ("beit", "data2vec-vision"),
    "uses RMSNorm": ("aimv2",),
    "needs timm and torchvision, which the server does not install": ("timm_wrapper",),
}
UNSUPPORTED: Final = {
    model_type: reason for reason, types in _REASONS.items() for model_type in types
}
