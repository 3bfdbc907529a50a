"""Bundles for tests, built in one place. Numpy only, so that child processes start quickly.

`bundle(1)` is for a backbone that exists in name alone; `bundle(1, backbone=backbone)` is for a
real one. What a bundle for a real backbone answers takes torch to say: tests that need golden
examples add them with `dataclasses.replace(made, golden_pixels=…, golden_logits=…)`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from task_store import BackboneRef, Manifest, PreprocessingSpec, TaskBundle
from task_store.codec import FloatArray
from task_store.manifest import AdapterSpec

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
    """What a bundle must agree with; `server.model.Backbone` is one."""

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
    def preprocessing(self) -> object: ...


@dataclass(frozen=True)
class TinyBackbone:
    """No model at all: two layers, four wide."""

    name: str = "tiny-vit"
    fingerprint: str = FINGERPRINT
    layers: int = 2
    width: int = 4
    image_size: tuple[int, int] = (4, 4)
    preprocessing: object = PREPROCESSING


TINY = TinyBackbone()


def manifest(*, backbone: BackboneFacts = TINY, classes: int = 3, **changes: Any) -> Manifest:
    values: dict[str, Any] = {
        "problem": "single_label",
        "labels": tuple(f"class-{index}" for index in range(classes)),
        "backbone": BackboneRef(name=backbone.name, fingerprint=backbone.fingerprint),
        "preprocessing": PreprocessingSpec.of(backbone.preprocessing),
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
    maps: Mapping[str, tuple[int, int]] | None = None,
    rank: int = 2,
    golden: int = 0,
    **changes: Any,
) -> TaskBundle:
    """A random task; other seeds are other bytes. `changes` are keys of its manifest.

    With `maps`, how wide rows go in and come out, it has an adapter of them.

    `golden` so many examples have random answers, which no backbone gives.
    """
    random = np.random.default_rng(seed)
    layers, width = backbone.layers, backbone.width

    def floats(*shape: int) -> FloatArray:
        return random.standard_normal(shape).astype(np.float32)

    if parents:
        changes["extends"] = tuple(parent.digest for parent in parents)
    adapter: dict[str, FloatArray] = {}
    if maps:
        changes["adapter"] = AdapterSpec(rank=rank, maps=tuple(maps))
        for name, (into, out) in maps.items():
            adapter[f"adapter_{name}_a"] = floats(layers, into, rank) / np.float32(into**0.5)
            adapter[f"adapter_{name}_b"] = floats(layers, rank, out)
    images = (golden, *backbone.image_size, 3)
    return TaskBundle(
        manifest=manifest(backbone=backbone, classes=classes, **changes),
        head_weight=floats(classes, width) / np.float32(width**0.5),
        head_bias=floats(classes),
        class_token=floats(width) if class_token else None,
        memory=floats(layers, memory, width) if memory and class_token else None,
        golden_pixels=random.integers(0, 256, images, dtype=np.uint8) if golden else None,
        golden_logits=floats(golden, classes) if golden else None,
        **adapter,
    )
