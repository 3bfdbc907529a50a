"""DeiT: a ViT with a distillation token beside the class token."""

from collections.abc import Mapping
from typing import Any, Final

import torch
from transformers import PreTrainedModel

from server.model.backbone import BaseHead, Embedding
from server.model.families import vit
from server.model.families.family import Family, embedding, labels, linear_head, packed, problem


def _embedding(trunk: Any) -> Embedding:  # noqa: ANN401 - a module of the checkpoint
    parts = trunk.embeddings
    positions = parts.position_embeddings[0]
    # The distillation token has a position of its own, after the class token's.
    return embedding(
        parts.patch_embeddings.projection,
        parts.cls_token,
        torch.cat([positions[:1], positions[2:]]),
        other_prefix=parts.distillation_token[0] + positions[1:2],
    )


def _head(model: PreTrainedModel) -> BaseHead | None:
    """DeiT with a teacher averages two heads: one head over both rows with halved weights."""
    first: Any = getattr(model, "cls_classifier", None)
    if first is None:
        return linear_head(model)
    second: Any = model.distillation_classifier
    return BaseHead(
        torch.cat([packed(first.weight), packed(second.weight)], dim=1) / 2,
        (packed(first.bias) + packed(second.bias)) / 2,
        labels(model.config),
        problem(model.config),
        ("class", "distillation"),
    )


FAMILIES: Final[Mapping[str, Family]] = {
    "deit": Family(
        trunks={
            "DeiTModel": "",
            "DeiTForImageClassification": "deit",
            "DeiTForImageClassificationWithTeacher": "deit",
        },
        embedding=_embedding,
        blocks="layers",
        block=vit.BLOCK,
        final_norm="layernorm",
        processor="DeiTImageProcessor",
        head=_head,
    ),
}
