"""Small bundles for tests; numpy only, so that child processes start quickly."""

from typing import Any

import numpy as np

from task_store import BackboneRef, Manifest, PreprocessingSpec, TaskBundle

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


def manifest(**changes: Any) -> Manifest:
    values: dict[str, Any] = {
        "problem": "single_label",
        "labels": ("cat", "dog", "eel"),
        "backbone": BackboneRef(name="tiny-vit", fingerprint=FINGERPRINT),
        "preprocessing": PREPROCESSING,
    }
    return Manifest(**(values | changes))


def bundle(seed: int = 0, *, memory: int = 2, golden: bool = False, **changes: Any) -> TaskBundle:
    """Three classes, four wide, two layers; other seeds are other bytes."""
    random = np.random.default_rng(seed)

    def floats(*shape: int) -> np.ndarray:
        return random.standard_normal(shape).astype(np.float32)

    return TaskBundle(
        manifest=manifest(**changes),
        head_weight=floats(3, 4),
        head_bias=floats(3),
        class_token=floats(4),
        memory=floats(2, memory, 4) if memory else None,
        golden_pixels=random.integers(0, 256, (2, 4, 4, 3), dtype=np.uint8) if golden else None,
        golden_logits=floats(2, 3) if golden else None,
    )
