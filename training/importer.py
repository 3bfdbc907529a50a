"""Turning a checkpoint of the seed reproduction into bundles, one per task.

    checkpoint = read_checkpoint(Path("extended_model.pt"))
    names = task_names(["places"], len(checkpoint.tasks))
    labels = task_labels([], checkpoint, names)
    bundles = make_bundles(checkpoint, load_backbone(folder), names, labels)

Nothing here prints or writes but `save_all`, which writes every bundle or none.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from server.model import Backbone, MultiTaskViT, TaskWeights
from task_store import BackboneRef, Manifest, PreprocessingSpec, TaskBundle, check_task_name
from task_store.codec import ByteArray
from task_store.manifest import shown
from training.errors import BackboneDiffers, WrongLabels, WrongOutput
from training.golden import golden_pixels
from training.labels import Labels, default_labels, read_labels
from training.seed_checkpoint import CLASS_TOKEN, LAYER, POSITIONS, SeedCheckpoint, SeedTask

SUFFIX = ".safetensors"

# Of the backbone, and read by no pass: its own head and parts that transformers may have added.
_UNREAD = ("classifiers.0.", "vit.pooler.", "vit.embeddings.mask_token")


@dataclass(frozen=True, slots=True)
class Imported:
    """One task of a checkpoint as a bundle."""

    name: str
    bundle: TaskBundle
    parents: tuple[str, ...]  # names


# --- the backbone ---------------------------------------------------------------------------------


def check_backbone(checkpoint: SeedCheckpoint, backbone: Backbone) -> None:
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
    expected = dict(_seed_tensors(backbone))
    for key in checkpoint.backbone:
        if key not in expected and not key.startswith(_UNREAD):
            raise BackboneDiffers(
                f"the checkpoint has '{shown(key)}', which neither the backbone '{backbone.name}' "
                "nor a task of the seed reproduction has"
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


def _seed_tensors(backbone: Backbone) -> Iterator[tuple[str, Tensor]]:
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


# --- names, labels and files ----------------------------------------------------------------------


def task_names(given: Sequence[str], count: int) -> list[str]:
    """One name per task, in the checkpoint's order; a single one given is a prefix for several."""
    names = list(given)
    if len(names) == 1 and count > 1:
        names = [f"{names[0]}-{number}" for number in range(1, count + 1)]
    if len(names) != count:
        raise WrongOutput(
            f"{_tasks(count)} but {len(names)} names were given; give one --name for each, in the "
            "checkpoint's order, or a single one to number them"
        )
    for name in names:
        check_task_name(name)
    if repeated := [name for name in names if names.count(name) > 1]:
        raise WrongOutput(f"the name '{repeated[0]}' was given to more than one task")
    return names


def task_labels(
    files: Sequence[Path], checkpoint: SeedCheckpoint, names: Sequence[str]
) -> list[Labels]:
    """The labels of each task, from a file each, or `class_0`, `class_1` … without files."""
    classes = [task.head_weight.shape[0] for task in checkpoint.tasks]
    if not files:
        return [default_labels(count) for count in classes]
    if len(files) != len(classes):
        raise WrongLabels(
            f"{_tasks(len(classes))} but {len(files)} labels files were given; give one --labels "
            "for each, in the checkpoint's order, or none"
        )
    labels = [read_labels(file) for file in files]
    for file, found, name, count in zip(files, labels, names, classes, strict=True):
        if len(found) != count:
            raise WrongLabels(
                f"'{file}' names {len(found)} labels, and '{name}' has {count} classes"
            )
    return labels


def output_files(out: str, names: Sequence[str]) -> list[Path]:
    """Where each bundle goes: a `.safetensors` file, a pattern with `{name}`, or a folder."""
    if "{name}" in out:
        files = [Path(out.replace("{name}", _file_stem(name))) for name in names]
    elif out.endswith(SUFFIX) and not Path(out).is_dir():
        if len(names) > 1:
            raise WrongOutput(
                f"{_tasks(len(names))} and '{out}' is one file; give a folder, or a pattern such "
                f"as '{{name}}{SUFFIX}'"
            )
        files = [Path(out)]
    else:
        files = [Path(out, _file_stem(name) + SUFFIX) for name in names]
    if repeated := [file for file in files if files.count(file) > 1]:
        raise WrongOutput(f"two tasks would be written to '{repeated[0]}'; choose other names")
    return files


def _file_stem(name: str) -> str:
    return name.replace("/", "-")  # a team's task


def _tasks(count: int) -> str:
    return "the checkpoint has one task" if count == 1 else f"the checkpoint has {count} tasks"


# --- the bundles ----------------------------------------------------------------------------------


def make_bundles(
    checkpoint: SeedCheckpoint,
    backbone: Backbone,
    names: Sequence[str],
    labels: Sequence[Labels],
) -> list[Imported]:
    """A bundle for each task, parents before their children, with golden examples."""
    check_backbone(checkpoint, backbone)
    pixels = golden_pixels(backbone.image_size)
    logits = _golden_logits(checkpoint, backbone, names, pixels)
    made: dict[int, Imported] = {}
    for position in checkpoint.order:
        task, name = checkpoint.tasks[position], names[position]
        parents = [made[parent] for parent in task.parents]
        bundle = TaskBundle(
            manifest=Manifest(
                description=_describe(checkpoint, task),
                problem="single_label",
                labels=labels[position],
                placement="post_norm",
                backbone=BackboneRef(name=backbone.name, fingerprint=backbone.fingerprint),
                preprocessing=PreprocessingSpec.of(backbone.preprocessing),
                extends=tuple(parent.bundle.digest for parent in parents),
                training={
                    "imported_from": _printable(checkpoint.file_name),
                    "sha256": checkpoint.sha256,
                    "kind": checkpoint.kind,
                    "position": position + 1,
                },
            ),
            head_weight=task.head_weight.numpy(),
            head_bias=None if task.head_bias is None else task.head_bias.numpy(),
            class_token=task.class_token.numpy(),
            memory=task.memory.numpy(),
            golden_pixels=pixels,
            golden_logits=logits[name].numpy(),
        )
        made[position] = Imported(name, bundle, tuple(parent.name for parent in parents))
    return list(made.values())


def _golden_logits(
    checkpoint: SeedCheckpoint, backbone: Backbone, names: Sequence[str], pixels: ByteArray
) -> dict[str, Tensor]:
    model = MultiTaskViT(backbone)
    for position in checkpoint.order:
        task = checkpoint.tasks[position]
        weights = TaskWeights(
            head_weight=task.head_weight,
            head_bias=task.head_bias,
            class_token=task.class_token,
            memory=task.memory,
            placement="post_norm",
        )
        model.add(names[position], weights, extends=[names[parent] for parent in task.parents])
    return model(torch.from_numpy(pixels), tasks=names)


def _describe(checkpoint: SeedCheckpoint, task: SeedTask) -> str:
    where = f"Imported from the seed reproduction's checkpoint {_printable(checkpoint.file_name)}"
    if checkpoint.kind == "single":
        return f"{where}."
    return f"{where} ({checkpoint.kind}), task {task.position + 1} of {len(checkpoint.tasks)}."


def _printable(file_name: str) -> str:
    """A file's name may have bytes that are no text; a manifest may not."""
    return shown(file_name, 200) if not file_name.isprintable() else file_name[:200]


# --- writing --------------------------------------------------------------------------------------


def save_all(files: Mapping[Path, TaskBundle]) -> None:
    """Write every bundle or none. Files that hold these very bytes already are left as they are."""
    new = {path: bundle for path, bundle in files.items() if not _is_there(path, bundle)}
    with ExitStack() as undo:
        for path, bundle in new.items():
            _make_folder(path.parent, undo)
            undo.callback(path.unlink, missing_ok=True)
            bundle.save(path)
        undo.pop_all()


def _is_there(path: Path, bundle: TaskBundle) -> bool:
    try:
        if not path.exists():
            return False
        same = path.is_file() and path.read_bytes() == bundle.to_bytes()
    except OSError as error:
        raise WrongOutput(f"'{path}' cannot be used: {error.strerror}") from error
    if not same:
        raise WrongOutput(
            f"'{path}' exists and is something else; remove it or choose another --out"
        )
    return True


def _make_folder(folder: Path, undo: ExitStack) -> None:
    if folder.is_dir():
        return
    _make_folder(folder.parent, undo)
    try:
        folder.mkdir(exist_ok=True)
    except OSError as error:
        raise WrongOutput(f"the folder '{folder}' cannot be made: {error.strerror}") from error
    undo.callback(_remove_if_empty, folder)


def _remove_if_empty(folder: Path) -> None:
    with suppress(OSError):
        folder.rmdir()
