"""Create and load bundles for training."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from engram_bundle import (
    BackboneRef,
    LoraSpec,
    Manifest,
    OodSpec,
    TaskBundle,
    check_compatible,
)
from engram_bundle.files import write_whole as write_atomically
from engram_server.model import Backbone, TaskWeights
from engram_server.model.lora import LoraWeight
from engram_server.model.preprocessing.resizing import Pixels
from engram_server.model.tasks import LayerWeights, Task, drift_spec, prepare
from torch import Tensor

from engram_training.errors import CannotWrite, SettingsConflict

Labels = tuple[str, ...]


def make_bundle(
    backbone: Backbone,
    weights: TaskWeights,
    golden: tuple[Pixels, Tensor],
    **about: Any,  # noqa: ANN401 - fields of Manifest, checked by it
) -> TaskBundle:
    """Create a bundle; `golden` are pixels (G, H, W, 3) and their logits (G, K)."""
    ood = weights.ood
    manifest = Manifest(
        ood=None if ood is None else OodSpec(threshold=ood.distance, angle=ood.angle),
        drift=drift_spec(weights.drift),
        normalised=True if weights.normalised else None,
        placement=weights.placement,
        lora=lora_spec(weights),
        layers=None if weights.layers is None else weights.layers.layers,
        backbone=BackboneRef(name=backbone.name, fingerprint=backbone.fingerprint),
        preprocessing=backbone.preprocessing,
        **about,
    )
    answers = {"golden.pixels": golden[0], "golden.logits": golden[1].numpy()}
    return TaskBundle(manifest, {**weights.arrays(), **answers})


def lora_spec(weights: TaskWeights) -> LoraSpec | None:
    if not weights.lora:
        return None
    rank = next(iter(weights.lora.values())).rank
    return LoraSpec(rank=rank, targets=tuple(weights.lora))


def rounded(weights: TaskWeights) -> TaskWeights:
    """Round LoRA and weights on the readout to float16, and omit layers that are not read."""
    lora = {
        name: LoraWeight(*(tensor.half().float() for tensor in change))
        for name, change in weights.lora.items()
    }
    layers = weights.layers
    if layers is not None:
        half = layers.weight.half().float()
        read = [index for index in range(half.shape[1]) if half[:, index].any()]
        chosen = tuple(layers.layers[index] for index in read)
        layers = LayerWeights(chosen, half[:, read]) if read else None
    feature = weights.feature_weight
    feature = None if feature is None else feature.half().float()
    return replace(weights, lora=lora, layers=layers, feature_weight=feature)


def default_labels(classes: int) -> Labels:
    return tuple(f"class_{index}" for index in range(classes))


def write_whole(path: Path, data: bytes) -> None:
    """Write a file atomically; raise CannotWrite."""
    try:
        write_atomically(path, data)
    except OSError as error:
        raise CannotWrite(f"Cannot write '{path}': {error.strerror or error}") from error


@dataclass(frozen=True, slots=True)
class LoadedTasks:
    bundles: list[TaskBundle]
    tasks: list[Task]

    def youngest(self) -> "LoadedTasks":
        """Return the tasks that no other extends; they include all others as ancestors."""
        old = {ancestor for task in self.tasks for ancestor in task.ancestors}
        kept = [index for index, task in enumerate(self.tasks) if task not in old]
        return LoadedTasks([self.bundles[i] for i in kept], [self.tasks[i] for i in kept])


def load_tasks(backbone: Backbone, paths: Sequence[Path | str]) -> LoadedTasks:
    """Load bundles, which must include their parents."""
    by_path = {str(path): TaskBundle.load(path) for path in paths}
    names = {bundle.digest: path for path, bundle in by_path.items()}
    bundles = {bundle.digest: bundle for bundle in by_path.values()}
    for bundle in bundles.values():
        check_compatible(
            bundle,
            fingerprint=backbone.fingerprint,
            layers=backbone.layers,
            width=backbone.width,
            preprocessing=backbone.preprocessing,
            image_size=backbone.image_size,
        )
    ready: dict[str, Task] = {}

    def prepared(bundle: TaskBundle) -> Task:
        # A digest covers the digests of the parents, so there are no cycles.
        if bundle.digest not in ready:
            for parent in bundle.extends:
                if parent not in bundles:
                    raise SettingsConflict(
                        f"'{names[bundle.digest]}' extends the bundle {parent}. Pass that bundle "
                        "as well."
                    )
            parents = [prepared(bundles[parent]) for parent in bundle.extends]
            ready[bundle.digest] = prepare(backbone, TaskWeights.from_bundle(bundle), parents)
        return ready[bundle.digest]

    return LoadedTasks(list(bundles.values()), [prepared(bundle) for bundle in bundles.values()])
