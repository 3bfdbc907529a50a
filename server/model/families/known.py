"""What a family says of itself, and those we read: ViT, DeiT, DINOv2 and CLIP's vision tower."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel

from server.model.backbone import BaseHead, Embedding, Problem, ReadoutPart


@dataclass(frozen=True, slots=True)
class BlockPaths:
    """Where one block of a family keeps its parts."""

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


@dataclass(frozen=True, slots=True)
class Family:
    """Where a family keeps its trunk and what its classes' heads read."""

    trunks: Mapping[str, str]  # class name → path of the trunk inside it; the first is the default
    embedding: Callable[[Any], Embedding]  # of the trunk
    blocks: str
    block: BlockPaths
    final_norm: str
    processor: str  # image processor whose defaults hold where the folder has no configuration
    head: Callable[[PreTrainedModel], BaseHead | None]
    antialias: bool = False  # how it interpolates position embeddings
    config: Callable[[PretrainedConfig], PretrainedConfig] = lambda config: config
    unused_weights: tuple[str, ...] = ()  # parts of a checkpoint that may be missing


def packed(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu", torch.float32).contiguous()


def _packed_embedding(
    patch: nn.Conv2d,
    class_token: Tensor,
    positions: Tensor,
    *,
    other_prefix: Tensor | None = None,
    norm: nn.LayerNorm | None = None,
) -> Embedding:
    """`positions` (1 + patches, D): the class token's first. `other_prefix` (n, D) has its own."""
    positions = packed(positions)
    width = positions.shape[1]
    return Embedding(
        patch_weight=packed(patch.weight).flatten(1),
        patch_bias=torch.zeros(width) if patch.bias is None else packed(patch.bias),
        class_token=packed(class_token).reshape(width),
        class_position=positions[0],
        other_prefix=torch.empty(0, width) if other_prefix is None else packed(other_prefix),
        patch_positions=positions[1:],
        norm_weight=None if norm is None else packed(norm.weight),
        norm_bias=None if norm is None else packed(norm.bias),
    )


def _linear_head(
    model: PreTrainedModel, reads: tuple[ReadoutPart, ...] = ("class",)
) -> BaseHead | None:
    """The classifier of the Hugging Face class, where the model has one."""
    classifier = getattr(model, "classifier", None)
    if not isinstance(classifier, nn.Linear):
        return None
    bias = None if classifier.bias is None else packed(classifier.bias)
    return _head_of(model.config, packed(classifier.weight), bias, reads)


def _head_of(
    config: PretrainedConfig, weight: Tensor, bias: Tensor | None, reads: tuple[ReadoutPart, ...]
) -> BaseHead:
    """A classifier with the labels and the problem that the configuration states."""
    names: dict[Any, str] = config.id2label or {}
    problems: dict[str | None, Problem] = {
        "regression": "regression",
        "multi_label_classification": "multi_label",
    }
    problem = problems.get(config.problem_type, "single_label")
    return BaseHead(weight, bias, tuple(names[index] for index in sorted(names)), problem, reads)


def _embedding(trunk: Any) -> Embedding:  # noqa: ANN401 - a module of the checkpoint
    """Of a ViT, with the distillation token of a DeiT or the registers of a DINOv2."""
    parts = trunk.embeddings
    positions = parts.position_embeddings[0]
    other_prefix = None
    if hasattr(parts, "distillation_token"):  # has a position of its own, after the class token's
        other_prefix = parts.distillation_token[0] + positions[1:2]
        positions = torch.cat([positions[:1], positions[2:]])
    elif hasattr(parts, "register_tokens"):  # join after positions were added
        other_prefix = parts.register_tokens[0]
    patch = parts.patch_embeddings.projection
    return _packed_embedding(patch, parts.cls_token, positions, other_prefix=other_prefix)


def _clip_embedding(trunk: Any) -> Embedding:  # noqa: ANN401 - a module of the checkpoint
    parts = trunk.embeddings
    positions = parts.position_embedding.weight
    norm = trunk.pre_layrnorm
    return _packed_embedding(parts.patch_embedding, parts.class_embedding, positions, norm=norm)


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
    if projection is None:
        return None
    weight = packed(projection.weight)
    labels = tuple(f"dim_{index}" for index in range(weight.shape[0]))
    return BaseHead(weight, None, labels, "embedding")


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
# Layer scale, and heads that also read the patches.
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
    antialias=True,
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

# By Hugging Face's `model_type`.
FAMILIES: Final[Mapping[str, Family]] = {
    "vit": _VIT,
    "deit": _DEIT,
    "dinov2": _DINOV2,
    "dinov2_with_registers": _DINOV2_WITH_REGISTERS,
    "clip": _CLIP,
    "clip_vision_model": _CLIP,
}
