"""DINOv2, with and without registers: layer scale, and heads that also read the patches."""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any, Final

from server.model.backbone import Embedding
from server.model.families import vit
from server.model.families.family import Family, embedding, linear_head


def _embedding(trunk: Any) -> Embedding:  # noqa: ANN401 - a module of the checkpoint
    parts = trunk.embeddings
    registers = getattr(parts, "register_tokens", None)  # join after positions were added
    return embedding(
        parts.patch_embeddings.projection,
        parts.cls_token,
        parts.position_embeddings[0],
        other_prefix=None if registers is None else registers[0],
    )


_DINOV2: Final = Family(
    trunks={"Dinov2Model": "", "Dinov2ForImageClassification": "dinov2"},
    embedding=_embedding,
    blocks="encoder.layer",
    block=replace(
        vit.BLOCK,
        norm1="norm1",
        norm2="norm2",
        scale1="layer_scale1.lambda1",
        scale2="layer_scale2.lambda1",
    ),
    final_norm="layernorm",
    processor="BitImageProcessor",
    head=partial(linear_head, reads=("class", "patches")),
)
FAMILIES: Final[Mapping[str, Family]] = {
    "dinov2": _DINOV2,
    "dinov2_with_registers": replace(
        _DINOV2,
        trunks={
            "Dinov2WithRegistersModel": "",
            "Dinov2WithRegistersForImageClassification": "dinov2_with_registers",
        },
        antialias=True,
    ),
}
