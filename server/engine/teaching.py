"""Taught tasks as bundles: what is solved from examples, and the examples a bundle brings.

A task may also be taught by the names of its classes, where the backbone has a text tower: its head
is then a normalised one, and the bundle keeps what the names gave, for more photos to come.

The same examples give the same bytes, whoever taught them and in whatever order. So there are no
times here, and no golden examples: their answers would depend on what else is in the batch.
"""

import itertools
from typing import Any

import numpy as np

from server.model.backbone import Backbone
from server.model.closed_form import Solved, solve
from server.model.examples import Examples
from server.model.known import Known, fit_known
from server.model.text_head import TextHead
from task_store import BackboneRef, KnownSpec, Manifest, PreprocessingSpec, TaskBundle

TOOL = "engram teach"


def taught_bundle(
    examples: Examples,
    backbone: Backbone,
    *,
    text: TextHead | None = None,
    description: str = "",
    license: str | None = None,
) -> tuple[TaskBundle, Solved]:
    """A head-only task for these examples and class names; raises UnteachableExamples."""
    if text is not None:
        examples = examples.with_labels(text.labels)
        text = text.over(examples.labels)
    solved = solve(examples, text)
    known = _what_is_known(examples)
    seen = len(examples) > 0
    bundle = TaskBundle(
        manifest=Manifest(
            description=description,
            problem=examples.problem,
            labels=examples.labels,
            backbone=BackboneRef(name=backbone.name, fingerprint=backbone.fingerprint),
            preprocessing=PreprocessingSpec.of(backbone.preprocessing),
            temperature=solved.temperature,
            normalised=None if text is None else True,
            known=None if known is None else KnownSpec(threshold=known.threshold),
            metrics=_metrics(examples, solved),
            training={"tool": TOOL} | ({} if text is None else {"templates": [*text.templates]}),
            license=license,
        ),
        head_weight=solved.weight,
        head_bias=solved.bias,
        head_projection=None if text is None else text.projection,
        text_weight=text.weight if text is not None and seen else None,
        text_bias=text.bias if text is not None and seen else None,
        known_means=None if known is None else known.means,
        known_axes=None if known is None else known.axes,
        examples_features=examples.features if seen else None,
        examples_labels=examples.targets.astype(np.uint8) if seen else None,
        examples_digests=examples.digests if seen else None,
    )
    return bundle, solved


def _what_is_known(examples: Examples) -> Known | None:
    if not len(examples):
        return None
    classes = None
    if examples.problem == "single_label":
        # Classes that have a name and no photo have no middle.
        classes = np.unique(examples.targets.argmax(axis=1), return_inverse=True)[1]
    return fit_known(examples.features.astype(np.float64), classes)


def examples_of(bundle: TaskBundle) -> Examples | None:
    """The photos a bundle was taught from; none of them where it was taught by names alone."""
    features, labels, digests = (
        bundle.examples_features,
        bundle.examples_labels,
        bundle.examples_digests,
    )
    if bundle.problem != "single_label" and bundle.problem != "multi_label":
        return None
    if features is None or labels is None or digests is None:
        return Examples.of(bundle.problem, []) if is_taught(bundle) else None
    return Examples(bundle.problem, bundle.labels, features, labels > 0, digests)


def text_of(bundle: TaskBundle) -> TextHead | None:
    """What the names of a taught bundle's classes gave; None where nobody gave it names."""
    if not bundle.normalised or not is_taught(bundle):
        return None
    weight, bias = bundle.text_weight, bundle.text_bias
    if weight is None:  # names alone: what they gave is the head
        weight, bias = bundle.head_weight, bundle.head_bias
    if bias is not None and not bias.any():
        bias = None
    templates = bundle.manifest.training.get("templates")
    read = tuple(map(str, templates)) if isinstance(templates, list) else ()
    text = TextHead(bundle.labels, weight, bias, bundle.head_projection, read)
    # Classes that came with photos alone have none.
    return text.over(tuple(itertools.compress(text.labels, text.named)))


def is_taught(bundle: TaskBundle) -> bool:
    """Whether the head was solved from the examples, and may be solved anew from more of them."""
    material = bundle.examples_features is not None or bundle.normalised
    return bundle.manifest.training.get("tool") == TOOL and material


def _metrics(examples: Examples, solved: Solved) -> dict[str, Any]:
    result = solved.leave_one_out
    if not len(examples):
        return {}
    metrics = {"examples": float(len(examples)), "leave_one_out_images": float(result.judged)}
    if result.accuracy is not None:
        low, high = result.interval
        metrics |= {
            "leave_one_out_accuracy": round(result.accuracy, 6),
            "leave_one_out_accuracy_low": round(low, 6),
            "leave_one_out_accuracy_high": round(high, 6),
        }
    return metrics
