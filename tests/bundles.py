"""Bundles for tests, built in one place. Numpy only, so that child processes start quickly.

`bundle(1)` is for a backbone that does not exist; `bundle(1, backbone=backbone)` is for a real one.
Golden logits of a real backbone need torch: tests add them with `with_tensors(made, …)`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from engram_bundle import BackboneRef, LoraSpec, LoraTarget, Manifest, PreprocessingSpec, TaskBundle
from engram_bundle.schema import lora_names
from numpy.typing import NDArray

FINGERPRINT = "sha256:" + "ab" * 32
OTHER_FINGERPRINT = "sha256:" + "cd" * 32
PREPROCESSING = PreprocessingSpec(
    resize=(4, 4),
    resample="bilinear",
    crop=None,
    rescale=1 / 255,
    mean=(0.5, 0.5, 0.5),
    std=(0.5, 0.5, 0.5),
)


class BackboneFacts(Protocol):
    """The facts of a backbone that a bundle must match; `engram_server.model.Backbone` has them."""

    @property
    def name(self) -> str: ...
    @property
    def fingerprint(self) -> str: ...
    @property
    def layers(self) -> int: ...
    @property
    def width(self) -> int: ...
    @property
    def image_size(self) -> tuple[int, int]: ...
    @property
    def preprocessing(self) -> PreprocessingSpec: ...


@dataclass(frozen=True)
class TinyBackbone:
    """Facts without a model: two layers, four wide."""

    name: str = "tiny-vit"
    fingerprint: str = FINGERPRINT
    layers: int = 2
    width: int = 4
    summary_layers: tuple[int, ...] = (1,)
    summary_parts: int = 3
    summary_shape: tuple[int, int, int] = (1, 3, 4)
    image_size: tuple[int, int] = (4, 4)
    preprocessing: PreprocessingSpec = PREPROCESSING


TINY = TinyBackbone()


def manifest(*, backbone: BackboneFacts = TINY, classes: int = 3, **changes: Any) -> Manifest:
    values: dict[str, Any] = {
        "task_type": "single_label",
        "labels": tuple(f"class-{index}" for index in range(classes)),
        "backbone": BackboneRef(name=backbone.name, fingerprint=backbone.fingerprint),
        "preprocessing": backbone.preprocessing,
    }
    return Manifest(**(values | changes))


def bundle(
    seed: int = 0,
    *,
    backbone: BackboneFacts = TINY,
    classes: int = 3,
    memory: int = 2,
    class_token: bool = True,
    parents: Sequence[TaskBundle] = (),
    targets: Mapping[LoraTarget, tuple[int, int]] | None = None,
    rank: int = 2,
    golden: int = 0,
    **changes: Any,
) -> TaskBundle:
    """A random task; other seeds are other bytes. `changes` are keys of its manifest.

    `targets` maps LoRA targets to their input and output widths. The `golden` examples have random
    logits, which no backbone gives.
    """
    random = np.random.default_rng(seed)
    layers, width = backbone.layers, backbone.width

    def floats(*shape: int) -> NDArray[np.float32]:
        return random.standard_normal(shape).astype(np.float32)

    if parents:
        changes["extends"] = tuple(parent.digest for parent in parents)
    lora: dict[str, NDArray[np.float32]] = {}
    if targets:
        changes["lora"] = LoraSpec(rank=rank, targets=tuple(targets))
        for name, (into, out) in targets.items():
            a, b = lora_names(name)
            lora[a] = floats(layers, into, rank) / np.float32(into**0.5)
            lora[b] = floats(layers, rank, out)
    images = (golden, *backbone.image_size, 3)
    # In this order, so that a seed gives the same values as ever.
    tensors = {
        **lora,
        "head.weight": floats(classes, width) / np.float32(width**0.5),
        "head.bias": floats(classes),
        "class_token": floats(width) if class_token else None,
        "memory": floats(layers, memory, width) if memory and class_token else None,
        "golden.pixels": random.integers(0, 256, images, dtype=np.uint8) if golden else None,
        "golden.logits": floats(golden, classes) if golden else None,
    }
    return TaskBundle(manifest(backbone=backbone, classes=classes, **changes), tensors)


def with_tensors(
    made: TaskBundle, tensors: Mapping[str, Any], manifest: Manifest | None = None
) -> TaskBundle:
    """Copy a bundle with other tensors (None: without them), and perhaps another manifest."""
    return TaskBundle(manifest or made.manifest, {**made.tensors, **tensors})
