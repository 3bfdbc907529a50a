"""A checkpoint of the public reproduction as bundles, one per task.

checkpoint = read_checkpoint(Path("extended_model.pt"))
names = task_names(["places"], len(checkpoint.tasks))
labels = task_labels([], checkpoint, names)
bundles = make_bundles(checkpoint, load_backbone(folder), names, labels)
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from server.model import Backbone, MultiTaskViT
from task_store import TaskBundle
from task_store.manifest import shown
from training.bundles import golden_pixels, make_bundle
from training.data.labels import Labels
from training.importing.backbone import check_backbone
from training.importing.checkpoint import Checkpoint, CheckpointTask


@dataclass(frozen=True, slots=True)
class Imported:
    """One task of a checkpoint as a bundle."""

    name: str
    bundle: TaskBundle
    parents: tuple[str, ...]  # names


def make_bundles(
    checkpoint: Checkpoint,
    backbone: Backbone,
    names: Sequence[str],
    labels: Sequence[Labels],
) -> list[Imported]:
    """A bundle for each task, parents before their children, with golden examples."""
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
            problem="single_label",
            labels=labels[position],
            extends=[made[parent].bundle.digest for parent in task.parents],
            training={
                "imported_from": _printable(checkpoint.file_name),
                "sha256": checkpoint.sha256,
                "kind": checkpoint.kind,
                "position": position + 1,
            },
            golden=(pixels, logits[name]),
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
    """A file's name may have bytes that are no text; a manifest may not."""
    return shown(file_name, 200) if not file_name.isprintable() else file_name[:200]
