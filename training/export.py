"""The best variant as a bundle: its tensors, where they come from, and examples to check it by."""

import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from server.model import Backbone, TaskWeights
from task_store import BackboneRef, Manifest, PreprocessingSpec, TaskBundle
from task_store.codec import ByteArray
from training.data import Problem
from training.metrics import Figures


def scale_head(weights: TaskWeights, mean: Tensor, spread: Tensor) -> TaskWeights:
    """A head trained on targets of mean zero and variance one, to answer in their own units."""
    assert weights.head_bias is not None
    return TaskWeights(
        weights.head_weight * spread[:, None],
        weights.head_bias * spread + mean,
        weights.class_token,
        weights.memory,
        weights.placement,
    )


def make_bundle(
    backbone: Backbone,
    weights: TaskWeights,
    *,
    problem: Problem,
    labels: Sequence[str],
    extends: Sequence[str],
    metrics: Mapping[str, float],
    training: Mapping[str, Any],
    golden: tuple[ByteArray, Tensor],
    description: str = "",
    license: str | None = None,
) -> TaskBundle:
    """`golden` are pixels (G, H, W, 3) and the logits (G, K) they give."""
    manifest = Manifest(
        description=description,
        problem=problem,
        labels=tuple(labels),
        placement=weights.placement,
        backbone=BackboneRef(name=backbone.name, fingerprint=backbone.fingerprint),
        preprocessing=PreprocessingSpec.of(backbone.preprocessing),
        extends=tuple(extends),
        metrics=dict(metrics),
        training=dict(training),
        license=license,
    )
    return TaskBundle(
        manifest=manifest,
        head_weight=weights.head_weight.numpy(),
        head_bias=None if weights.head_bias is None else weights.head_bias.numpy(),
        class_token=None if weights.class_token is None else weights.class_token.numpy(),
        memory=None if weights.memory is None else weights.memory.numpy(),
        golden_pixels=golden[0],
        golden_logits=golden[1].numpy(),
    )


def manifest_metrics(figures: Mapping[str, Figures]) -> dict[str, float]:
    """Figures by split as the manifest has them: `test_accuracy`, `test_accuracy_low` …"""
    found: dict[str, float] = {}
    for split, one in figures.items():
        found[f"{split}_images"] = float(one.images)
        for name, value in one.values.items():
            found[f"{split}_{name}"] = round(value, 6)
        if one.interval is not None:
            low, high = one.interval
            name = one.headline[0]
            found[f"{split}_{name}_low"] = round(low, 6)
            found[f"{split}_{name}_high"] = round(high, 6)
    return found


def push_command(bundle: Path, name: str) -> str:
    """What to type to have a bundle served."""
    named = [] if bundle.stem == name else ["--name", name]
    return shlex.join(["engram", "push", str(bundle), *named])
