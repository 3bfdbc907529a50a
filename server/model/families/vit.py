"""ViT, as Google published it."""

from collections.abc import Mapping
from typing import Any, Final

from server.model.backbone import Embedding
from server.model.families.family import BlockPaths, Family, embedding, linear_head


def _embedding(trunk: Any) -> Embedding:  # noqa: ANN401 - a module of the checkpoint
    parts = trunk.embeddings
    return embedding(
        parts.patch_embeddings.projection, parts.cls_token, parts.position_embeddings[0]
    )


BLOCK: Final = BlockPaths(
    norm1="layernorm_before",
    query="attention.q_proj",
    key="attention.k_proj",
    value="attention.v_proj",
    out="attention.o_proj",
    norm2="layernorm_after",
)
FAMILIES: Final[Mapping[str, Family]] = {
    "vit": Family(
        trunks={"ViTModel": "", "ViTForImageClassification": "vit"},
        embedding=_embedding,
        blocks="layers",
        block=BLOCK,
        final_norm="layernorm",
        processor="ViTImageProcessor",
        head=linear_head,
    ),
}
