"""Bundles of taught tasks: making them from examples, and reading the examples back.

If the backbone has a text tower, a task can also be taught by the names of its classes. Its head is
then normalised, and the bundle keeps the head from the names for later updates.

The same examples give the same bytes, in whatever order they were added. The bundle therefore has
no times, and no golden examples: their logits would depend on the rest of the batch.
"""

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from engram_bundle import BackboneRef, Manifest, OodSpec, TaskBundle, TaughtSpec
from engram_bundle.limits import DEFAULT_LIMITS
from engram_bundle.media import NO_MEDIA, Media, pack_media, unpack_media

from engram_server.model.backbone import Backbone
from engram_server.model.heads.closed_form import solve
from engram_server.model.heads.drift import DriftReference, class_shares, fit_drift_reference
from engram_server.model.heads.examples import Examples
from engram_server.model.heads.lda import ClosedFormHead
from engram_server.model.heads.ood import OodDetector, fit_ood_detector
from engram_server.model.heads.text_head import TextHead
from engram_server.model.tasks import drift_spec, feature_layout


def taught_bundle(
    examples: Examples,
    backbone: Backbone,
    *,
    name: str,
    text: TextHead | None = None,
    description: str = "",
    license: str | None = None,
    check: Callable[[], None] = lambda: None,
) -> tuple[TaskBundle, ClosedFormHead]:
    """Make a task without a row from examples and class names, or raise UnteachableExamples.

    `check` is called between steps and may raise to stop.
    """
    if text is not None:
        examples = examples.with_labels(text.labels)
        text = text.reindexed(examples.labels)
    solved = solve(examples, text, feature_layout(backbone), check)
    width = backbone.width
    ood = _ood_detector(examples, width)
    tensors: dict[str, Any] = {"head.weight": solved.weight[:, :width], "head.bias": solved.bias}
    layers, layer_weight = _layer_weight(solved.weight[:, width:], backbone)
    if layers:
        tensors["layers.weight"] = layer_weight
    if text is not None:
        tensors["head.projection"] = text.projection
    if len(examples):
        tensors["examples.features"] = examples.features[:, :width]
        summaries = examples.features[:, width:]
        if summaries.size:
            tensors["summaries"] = summaries.reshape(-1, *backbone.summary_shape)
        tensors["examples.labels"] = examples.targets.astype(np.uint8)
        tensors["examples.digests"] = examples.digests
        tensors |= pack_media(_bounded(examples.media))
        if text is not None:
            tensors |= {"text.weight": text.weight, "text.bias": text.bias}
    if ood is not None:
        tensors |= {"ood.means": ood.means, "ood.axes": ood.axes}
    drift = _drift_reference(examples, width, ood)
    if drift is not None:
        tensors |= drift.arrays()
    bundle = TaskBundle(
        Manifest(
            name=name,
            description=description,
            task_type=examples.task_type,
            labels=examples.labels,
            backbone=BackboneRef(name=backbone.name, fingerprint=backbone.fingerprint),
            preprocessing=backbone.preprocessing,
            temperature=solved.temperature,
            normalised=None if text is None else True,
            layers=layers or None,
            ood=None if ood is None else _ood_spec(ood),
            drift=drift_spec(drift),
            metrics=_metrics(examples, solved),
            taught=TaughtSpec(templates=() if text is None else tuple(text.templates)),
            training={"tool": "engram teach"},
            license=license,
        ),
        tensors,
    )
    return bundle, solved


def _bounded(media: Sequence[Media]) -> list[Media]:
    """Drop names and thumbnails beyond the size limit, in the order of the examples."""
    sizes = itertools.accumulate(each.size for each in media)
    fitting = [size <= DEFAULT_LIMITS.max_media_bytes for size in sizes]
    return [each if fits else NO_MEDIA for each, fits in zip(media, fitting, strict=True)]


def _layer_weight(
    weight: npt.NDArray[np.float32], backbone: Backbone
) -> tuple[tuple[int, ...], npt.NDArray[np.float32]]:
    """Return the layers that a head reads, and its weight on them (K, b, P, D), in half precision.

    `weight` is that on whole summaries, or empty.
    """
    by_layer = weight.reshape(len(weight), -1, *backbone.summary_shape[1:])
    read = np.flatnonzero(by_layer.any(axis=(0, 2, 3)))
    rounded = by_layer[:, read].astype(np.float16).astype(np.float32)
    return tuple(backbone.summary_layers[position] for position in read), rounded


def _ood_detector(examples: Examples, width: int) -> OodDetector | None:
    if not len(examples):
        return None
    classes = None
    if examples.task_type == "single_label":
        # Classes with a name and no images have no mean.
        classes = np.unique(examples.targets.argmax(axis=1), return_inverse=True)[1]
    features = examples.features[:, :width].astype(np.float64)
    return fit_ood_detector(features, classes, soft=True)


def _drift_reference(
    examples: Examples, width: int, ood: OodDetector | None
) -> DriftReference | None:
    shares = None
    if examples.task_type == "single_label" and len(examples):
        shares = class_shares(examples.targets.argmax(axis=1), len(examples.labels))
    typical = None if ood is None else ood.typical
    return fit_drift_reference(examples.features[:, :width].astype(np.float64), shares, typical)


def _ood_spec(ood: OodDetector) -> OodSpec:
    return OodSpec(threshold=ood.distance, angle=ood.angle, softness=ood.softness)


def examples_of(bundle: TaskBundle) -> Examples | None:
    """Return the examples of a taught bundle, which are empty if it was taught by names alone."""
    if bundle.task_type != "single_label" and bundle.task_type != "multi_label":
        return None
    names = ("examples.features", "examples.labels", "examples.digests")
    if names[0] not in bundle.tensors:
        return Examples.of(bundle.task_type, []) if is_taught(bundle) else None
    features, labels, digests = (bundle.tensors[name] for name in names)
    summaries = bundle.get("summaries")
    if summaries is not None:
        features = np.concatenate([features, summaries.reshape(len(summaries), -1)], axis=1)
    media = unpack_media(bundle.tensors)
    return Examples(bundle.task_type, bundle.labels, features, labels > 0, digests, media)


def text_of(bundle: TaskBundle) -> TextHead | None:
    """Return the head from the class names of a taught bundle, or None if it has none."""
    taught = bundle.manifest.taught
    if taught is None or not bundle.manifest.normalised:
        return None
    # Without examples, the head itself is the text head.
    source = "text" if "text.weight" in bundle.tensors else "head"
    weight, bias = bundle.tensors[f"{source}.weight"], bundle.get(f"{source}.bias")
    if bias is not None and not bias.any():
        bias = None
    text = TextHead(bundle.labels, weight, bias, bundle.get("head.projection"), taught.templates)
    # Without classes that have only examples and no name.
    return text.reindexed(tuple(itertools.compress(text.labels, text.named)))


def is_taught(bundle: TaskBundle) -> bool:
    """Whether the head was solved from examples or names, and can be solved again."""
    manifest = bundle.manifest
    has_material = "examples.features" in bundle.tensors or manifest.normalised is not None
    return manifest.taught is not None and has_material


def _metrics(examples: Examples, solved: ClosedFormHead) -> dict[str, Any]:
    result = solved.leave_one_out
    if not len(examples):
        return {}
    metrics = {"examples": float(len(examples)), "leave_one_out_images": float(result.images)}
    if result.accuracy is not None:
        low, high = result.interval
        metrics |= {
            "leave_one_out_accuracy": round(result.accuracy, 6),
            "leave_one_out_accuracy_low": round(low, 6),
            "leave_one_out_accuracy_high": round(high, 6),
        }
    return metrics
