"""Convert a checkpoint of the public reproduction to bundles, one per task."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from engram_bundle import TaskBundle
from engram_bundle.untrusted import printable
from engram_server.model import Backbone, MultiTaskViT
from engram_server.model.kernels.linear import plain
from engram_server.model.preprocessing.pipeline import golden_pixels
from torch import Tensor

from engram_training.bundles import Labels, make_bundle
from engram_training.errors import BackboneDiffers
from engram_training.importing.checkpoint import (
    CLASS_TOKEN,
    LAYER,
    POSITIONS,
    Checkpoint,
    CheckpointTask,
)

# Tensors of the backbone that no pass uses: its head and parts that transformers may have added.
_UNREAD = ("classifiers.0.", "vit.pooler.", "vit.embeddings.mask_token")
_LAYER_PARTS = {
    "attention.output.dense": "out",
    "intermediate.dense": "up",
    "output.dense": "down",
    "layernorm_before": "norm1",
    "layernorm_after": "norm2",
}


@dataclass(frozen=True, slots=True)
class Imported:
    name: str
    bundle: TaskBundle
    parents: tuple[str, ...]  # names


def make_bundles(
    checkpoint: Checkpoint, backbone: Backbone, names: Sequence[str], labels: Sequence[Labels]
) -> list[Imported]:
    """Make a bundle for each task, parents before children, with golden examples."""
    check_backbone(checkpoint, backbone)
    model = MultiTaskViT(backbone)
    for position in checkpoint.order:
        task = checkpoint.tasks[position]
        parents = [names[parent] for parent in task.parents]
        model.add(names[position], task.weights, extends=parents)
    pixels = golden_pixels(backbone.image_size)
    logits = model(torch.from_numpy(pixels), tasks=names)
    made: dict[int, Imported] = {}
    for position in checkpoint.order:
        task, name = checkpoint.tasks[position], names[position]
        bundle = make_bundle(
            backbone,
            task.weights,
            (pixels, logits[name]),
            name=name,
            task_type="single_label",
            labels=labels[position],
            extends=tuple(made[parent].bundle.digest for parent in task.parents),
            training={
                "imported_from": _printable(checkpoint.file_name),
                "sha256": checkpoint.sha256,
                "kind": checkpoint.kind,
                "position": position + 1,
            },
            description=_describe(checkpoint, task),
        )
        made[position] = Imported(name, bundle, tuple(names[parent] for parent in task.parents))
    return list(made.values())


def _describe(checkpoint: Checkpoint, task: CheckpointTask) -> str:
    origin = (
        f"Imported from the public reproduction's checkpoint {_printable(checkpoint.file_name)}"
    )
    if checkpoint.kind == "single":
        return f"{origin}."
    return f"{origin} ({checkpoint.kind}), task {task.position + 1} of {len(checkpoint.tasks)}."


def _printable(file_name: str) -> str:
    """Make a file name printable, as a manifest requires."""
    return printable(file_name, 200) if not file_name.isprintable() else file_name[:200]


def check_backbone(checkpoint: Checkpoint, backbone: Backbone) -> None:
    """Raise BackboneDiffers unless the frozen weights of the checkpoint equal this backbone.

    A bundle with the fingerprint of a wrong backbone would load and return wrong results. Tensors
    stored in half precision are compared in half precision.
    """
    if checkpoint.layers != backbone.layers:
        raise BackboneDiffers(
            f"The checkpoint has {checkpoint.layers} layers, but backbone '{backbone.name}' has "
            f"{backbone.layers}. Use the backbone it was trained on."
        )
    embedding = backbone.embedding
    plain = embedding.class_position is not None and embedding.norm_weight is None
    if backbone.geometry.prefix_tokens != 1 or not plain:
        raise BackboneDiffers(
            f"The checkpoint is a plain ViT, but backbone '{backbone.name}' is of another family. "
            "Use the backbone it was trained on."
        )
    expected = dict(_checkpoint_tensors(backbone))
    for key in checkpoint.backbone:
        if key not in expected and not key.startswith(_UNREAD):
            raise BackboneDiffers(
                f"The checkpoint has the unknown tensor '{printable(key)}', which is neither in "
                f"backbone '{backbone.name}' nor in a task of the public reproduction."
            )
    different = {
        key: how
        for key, tensor in expected.items()
        if (how := _difference(key, tensor, checkpoint.backbone.get(key))) is not None
    }
    if different:
        key, how = next(iter(different.items()))
        raise BackboneDiffers(
            f"The checkpoint was not trained on backbone '{backbone.name}': '{key}' {how} "
            f"({len(different)} of {len(expected)} tensors differ). Use the backbone it was "
            "trained on."
        )


def _difference(key: str, ours: Tensor, theirs: Tensor | None) -> str | None:
    if theirs is None:
        # A model without qkv_bias lacks these; the backbone has zeros.
        optional = key.endswith(("query.bias", "key.bias", "value.bias"))
        return None if optional and not ours.any() else "is missing"
    if theirs.shape != ours.shape:
        return f"is {tuple(theirs.shape)} instead of {tuple(ours.shape)}"
    if torch.equal(ours.to(theirs.dtype), theirs):
        return None
    return f"differs by up to {float((ours - theirs.to(torch.float32)).abs().max()):.3g}"


def _checkpoint_tensors(backbone: Backbone) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of the backbone with the names and shapes of a checkpoint."""
    embedding, width = backbone.embedding, backbone.width
    assert embedding.class_token is not None
    assert embedding.class_position is not None
    assert embedding.patch_positions is not None, "a plain ViT has positions"
    yield CLASS_TOKEN.format(0), embedding.class_token.view(1, 1, width)
    yield POSITIONS, torch.cat([embedding.class_position[None], embedding.patch_positions])[None]
    patches = "vit.embeddings.patch_embeddings.projection."
    yield patches + "weight", embedding.patch_weight.view(width, 3, *backbone.geometry.patch_size)
    yield patches + "bias", embedding.patch_bias
    for index, block in enumerate(backbone.blocks):
        layer = LAYER.format(index)
        weights, biases = plain(block.qkv_weight).chunk(3), block.qkv_bias.chunk(3)
        for name, weight, bias in zip(("query", "key", "value"), weights, biases, strict=True):
            yield f"{layer}attention.attention.{name}.weight", weight
            yield f"{layer}attention.attention.{name}.bias", bias
        for name, part in _LAYER_PARTS.items():
            for kind in ("weight", "bias"):
                yield f"{layer}{name}.{kind}", getattr(block, f"{part}_{kind}")
    assert backbone.final_norm_weight is not None
    assert backbone.final_norm_bias is not None
    yield "vit.layernorm.weight", backbone.final_norm_weight
    yield "vit.layernorm.bias", backbone.final_norm_bias
