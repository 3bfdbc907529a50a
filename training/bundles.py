"""Bundles as training makes them and reads them: golden examples, manifest, tensors, parents."""

import shlex
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from server.model import Backbone, TaskWeights
from server.model.adapters import LowRank
from server.model.multitask import weights_of
from server.model.tasks import Task, prepare
from task_store import (
    BackboneRef,
    KnownSpec,
    Manifest,
    PreprocessingSpec,
    TaskBundle,
    check_compatible,
    files,
)
from task_store.codec import ByteArray, FloatArray
from task_store.manifest import AdapterSpec
from training.errors import CannotWrite, SettingsConflict

Labels = tuple[str, ...]


def make_bundle(
    backbone: Backbone,
    weights: TaskWeights,
    golden: tuple[ByteArray, Tensor],
    **about: Any,  # noqa: ANN401 - fields of Manifest, checked by it
) -> TaskBundle:
    """`golden` are pixels (G, H, W, 3) and the logits (G, K) they give."""
    known = weights.known
    adapter = {
        f"adapter_{name}_{part}": tensor.numpy()
        for name, change in weights.adapter.items()
        for part, tensor in change._asdict().items()
    }
    manifest = Manifest(
        known=None if known is None else KnownSpec(threshold=known.threshold),
        normalised=True if weights.normalised else None,
        placement=weights.placement,
        adapter=adapter_spec(weights),
        backbone=BackboneRef(name=backbone.name, fingerprint=backbone.fingerprint),
        preprocessing=PreprocessingSpec.of(backbone.preprocessing),
        **about,
    )
    return TaskBundle(
        manifest=manifest,
        head_weight=weights.head_weight.numpy(),
        head_bias=_array(weights.head_bias),
        head_projection=_array(weights.head_projection),
        class_token=_array(weights.class_token),
        memory=_array(weights.memory),
        known_means=None if known is None else known.means,
        known_axes=None if known is None else known.axes,
        golden_pixels=golden[0],
        golden_logits=golden[1].numpy(),
        **adapter,
    )


def _array(tensor: Tensor | None) -> FloatArray | None:
    return None if tensor is None else tensor.numpy()


def adapter_spec(weights: TaskWeights) -> AdapterSpec | None:
    """What a manifest says of the adapter."""
    if not weights.adapter:
        return None
    rank = next(iter(weights.adapter.values())).rank
    return AdapterSpec(rank=rank, maps=tuple(weights.adapter))


def rounded_adapter(weights: TaskWeights) -> TaskWeights:
    """With an adapter that float16 can hold: its bundle is half as large."""
    adapter = {
        name: LowRank(*(tensor.half().float() for tensor in change))
        for name, change in weights.adapter.items()
    }
    return replace(weights, adapter=adapter)


def default_labels(classes: int) -> Labels:
    """Names for classes that nobody named."""
    return tuple(f"class_{index}" for index in range(classes))


def push_command(bundle: Path, name: str) -> str:
    """What to type to have a bundle served."""
    named = [] if bundle.stem == name else ["--name", name]
    return shlex.join(["engram", "push", str(bundle), *named])


def write_whole(path: Path, data: bytes) -> None:
    """Write a file whole or not at all; raises CannotWrite."""
    try:
        files.write_whole(path, data)
    except OSError as error:
        raise CannotWrite(f"'{path}' cannot be written: {error.strerror or error}") from error


@dataclass(frozen=True, slots=True)
class LoadedTasks:
    """Bundles prepared on a backbone, in the order given."""

    bundles: list[TaskBundle]
    tasks: list[Task]

    def youngest(self) -> "LoadedTasks":
        """Those that no other extends: the fewest that bring all along."""
        old = {ancestor for task in self.tasks for ancestor in task.ancestors}
        kept = [place for place, task in enumerate(self.tasks) if task not in old]
        return LoadedTasks([self.bundles[i] for i in kept], [self.tasks[i] for i in kept])


def load_tasks(backbone: Backbone, paths: Sequence[Path | str]) -> LoadedTasks:
    """Bundles and their parents, which must be among them."""
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
        # A digest covers the digests it names, so there are no circles.
        if bundle.digest not in ready:
            for parent in bundle.extends:
                if parent not in bundles:
                    raise SettingsConflict(
                        f"'{names[bundle.digest]}' extends the bundle {parent}, which is not among "
                        "those given; give that one too"
                    )
            parents = [prepared(bundles[parent]) for parent in bundle.extends]
            ready[bundle.digest] = prepare(backbone, weights_of(bundle), parents)
        return ready[bundle.digest]

    return LoadedTasks(list(bundles.values()), [prepared(bundle) for bundle in bundles.values()])
