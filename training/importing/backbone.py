"""Whether a checkpoint was trained on the backbone that is given."""

from collections.abc import Iterator

import torch
from torch import Tensor

from server.model import Backbone
from task_store.manifest import shown
from training.errors import BackboneDiffers
from training.importing.checkpoint import CLASS_TOKEN, LAYER, POSITIONS, Checkpoint

# Of the backbone, and read by no pass: its own head and parts that transformers may have added.
_UNREAD = ("classifiers.0.", "vit.pooler.", "vit.embeddings.mask_token")


def check_backbone(checkpoint: Checkpoint, backbone: Backbone) -> None:
    """Refuse unless the checkpoint's frozen weights are those of this backbone.

    A bundle names the backbone it belongs to by fingerprint; one bound to the wrong backbone would
    be loaded and answer nonsense. Tensors stored in half precision are compared in it.
    """
    if checkpoint.layers != backbone.layers:
        raise BackboneDiffers(
            f"the checkpoint has {checkpoint.layers} layers, and the backbone '{backbone.name}' "
            f"has {backbone.layers}; give the backbone it was trained on"
        )
    if backbone.geometry.prefix_tokens != 1 or backbone.embedding.norm_weight is not None:
        raise BackboneDiffers(
            f"the checkpoint is of a plain ViT, and the backbone '{backbone.name}' is of another "
            "family; give the backbone it was trained on"
        )
    expected = dict(_checkpoint_tensors(backbone))
    for key in checkpoint.backbone:
        if key not in expected and not key.startswith(_UNREAD):
            raise BackboneDiffers(
                f"the checkpoint has '{shown(key)}', which neither the backbone '{backbone.name}' "
                "nor a task of the public reproduction has"
            )
    different = {
        key: how
        for key, tensor in expected.items()
        if (how := _difference(key, tensor, checkpoint.backbone.get(key))) is not None
    }
    if different:
        key, how = next(iter(different.items()))
        raise BackboneDiffers(
            f"the checkpoint was trained on another backbone than '{backbone.name}': '{key}' {how} "
            f"({len(different)} of {len(expected)} tensors differ); give the backbone it was "
            "trained on, or its tasks would answer nonsense"
        )


def _difference(key: str, ours: Tensor, theirs: Tensor | None) -> str | None:
    if theirs is None:
        # Without qkv_bias a model has none of these, which the backbone holds as zeros.
        optional = key.endswith(("query.bias", "key.bias", "value.bias"))
        return None if optional and not ours.any() else "is missing"
    if theirs.shape != ours.shape:
        return f"is {tuple(theirs.shape)} instead of {tuple(ours.shape)}"
    if torch.equal(ours.to(theirs.dtype), theirs):
        return None
    return f"differs by up to {float((ours - theirs.to(torch.float32)).abs().max()):.3g}"


def _checkpoint_tensors(backbone: Backbone) -> Iterator[tuple[str, Tensor]]:
    """The backbone's tensors, by the names and in the shapes of a checkpoint."""
    embedding, width = backbone.embedding, backbone.width
    yield CLASS_TOKEN.format(0), embedding.class_token.view(1, 1, width)
    positions = torch.cat([embedding.class_position[None], embedding.patch_positions])
    yield POSITIONS, positions[None]
    patches = "vit.embeddings.patch_embeddings.projection."
    yield patches + "weight", embedding.patch_weight.view(width, 3, *backbone.geometry.patch_size)
    yield patches + "bias", embedding.patch_bias
    for index, block in enumerate(backbone.blocks):
        layer = LAYER.format(index)
        weights, biases = block.qkv_weight.chunk(3), block.qkv_bias.chunk(3)
        for name, weight, bias in zip(("query", "key", "value"), weights, biases, strict=True):
            yield f"{layer}attention.attention.{name}.weight", weight
            yield f"{layer}attention.attention.{name}.bias", bias
        yield layer + "attention.output.dense.weight", block.out_weight
        yield layer + "attention.output.dense.bias", block.out_bias
        yield layer + "intermediate.dense.weight", block.up_weight
        yield layer + "intermediate.dense.bias", block.up_bias
        yield layer + "output.dense.weight", block.down_weight
        yield layer + "output.dense.bias", block.down_bias
        yield layer + "layernorm_before.weight", block.norm1_weight
        yield layer + "layernorm_before.bias", block.norm1_bias
        yield layer + "layernorm_after.weight", block.norm2_weight
        yield layer + "layernorm_after.bias", block.norm2_bias
    yield "vit.layernorm.weight", backbone.final_norm_weight
    yield "vit.layernorm.bias", backbone.final_norm_bias
