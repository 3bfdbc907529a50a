"""CLIP's vision tower.

A `CLIPForImageClassification` loads without its head: that averages patch rows before the final
norm, which is not a readout we serve.
"""

from collections.abc import Mapping
from typing import Any, Final

from transformers import PreTrainedModel

from server.model.backbone import BaseHead, Embedding
from server.model.families.family import BlockPaths, Family, embedding, packed


def _embedding(trunk: Any) -> Embedding:  # noqa: ANN401 - a module of the checkpoint
    parts = trunk.embeddings
    return embedding(
        parts.patch_embedding,
        parts.class_embedding,
        parts.position_embedding.weight,
        norm=trunk.pre_layrnorm,
    )


def _head(model: PreTrainedModel) -> BaseHead | None:
    """CLIP's projection into the space it shares with text: an embedding, not a classifier."""
    projection: Any = getattr(model, "visual_projection", None)
    if projection is None:
        return None
    weight = packed(projection.weight)
    labels = tuple(f"dim_{index}" for index in range(weight.shape[0]))
    return BaseHead(weight, None, labels, "embedding")


_CLIP: Final = Family(
    trunks={
        "CLIPVisionModel": "",
        "CLIPVisionModelWithProjection": "vision_model",
        "CLIPModel": "vision_model",
        "CLIPForImageClassification": "vision_model",
    },
    embedding=_embedding,
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
    head=_head,
    config=lambda config: getattr(config, "vision_config", config),
    unused_weights=("text_model.", "text_projection", "logit_scale"),
)
FAMILIES: Final[Mapping[str, Family]] = {"clip": _CLIP, "clip_vision_model": _CLIP}
