"""What a family says of itself, and how parts of its modules become tensors of ours."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

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


def embedding(
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


def linear_head(
    model: PreTrainedModel, reads: tuple[ReadoutPart, ...] = ("class",)
) -> BaseHead | None:
    """The classifier of the Hugging Face class, where the model has one."""
    classifier = getattr(model, "classifier", None)
    if not isinstance(classifier, nn.Linear):
        return None
    bias = None if classifier.bias is None else packed(classifier.bias)
    return BaseHead(
        packed(classifier.weight), bias, labels(model.config), problem(model.config), reads
    )


def labels(config: PretrainedConfig) -> tuple[str, ...]:
    names: dict[Any, str] = config.id2label or {}
    return tuple(names[index] for index in sorted(names))


def problem(config: PretrainedConfig) -> Problem:
    named: dict[str | None, Problem] = {
        "regression": "regression",
        "multi_label_classification": "multi_label",
    }
    return named.get(config.problem_type, "single_label")
