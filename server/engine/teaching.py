"""Taught tasks as bundles: what is solved from examples, and the examples a bundle brings.

The same examples give the same bytes, whoever taught them and in whatever order. So there are no
times here, and no golden examples: their answers would depend on what else is in the batch.
"""

from typing import Any

import numpy as np

from server.model.backbone import Backbone
from server.model.closed_form import Solved, solve
from server.model.examples import Examples
from server.model.known import fit_known
from task_store import BackboneRef, KnownSpec, Manifest, PreprocessingSpec, TaskBundle

TOOL = "engram teach"


def taught_bundle(
    examples: Examples,
    backbone: Backbone,
    *,
    description: str = "",
    license: str | None = None,
) -> tuple[TaskBundle, Solved]:
    """A head-only task for these examples; raises UnteachableExamples."""
    solved = solve(examples)
    single = examples.problem == "single_label"
    known = fit_known(
        examples.features.astype(np.float64), examples.targets.argmax(axis=1) if single else None
    )
    bundle = TaskBundle(
        manifest=Manifest(
            description=description,
            problem=examples.problem,
            labels=examples.labels,
            backbone=BackboneRef(name=backbone.name, fingerprint=backbone.fingerprint),
            preprocessing=PreprocessingSpec.of(backbone.preprocessing),
            temperature=solved.temperature,
            known=None if known is None else KnownSpec(threshold=known.threshold),
            metrics=_metrics(examples, solved),
            training={"tool": TOOL},
            license=license,
        ),
        head_weight=solved.weight,
        head_bias=solved.bias,
        known_means=None if known is None else known.means,
        known_axes=None if known is None else known.axes,
        examples_features=examples.features,
        examples_labels=examples.targets.astype(np.uint8),
        examples_digests=examples.digests,
    )
    return bundle, solved


def examples_of(bundle: TaskBundle) -> Examples | None:
    """What a bundle was taught from; None where it does not say."""
    features, labels, digests = (
        bundle.examples_features,
        bundle.examples_labels,
        bundle.examples_digests,
    )
    if features is None or labels is None or digests is None:
        return None
    if bundle.problem != "single_label" and bundle.problem != "multi_label":
        return None
    return Examples(bundle.problem, bundle.labels, features, labels > 0, digests)


def is_taught(bundle: TaskBundle) -> bool:
    """Whether the head was solved from the examples, and may be solved anew from more of them."""
    return bundle.manifest.training.get("tool") == TOOL and bundle.examples_features is not None


def _metrics(examples: Examples, solved: Solved) -> dict[str, Any]:
    result = solved.leave_one_out
    metrics = {"examples": float(len(examples)), "leave_one_out_images": float(result.judged)}
    if result.accuracy is not None:
        low, high = result.interval
        metrics |= {
            "leave_one_out_accuracy": round(result.accuracy, 6),
            "leave_one_out_accuracy_low": round(low, 6),
            "leave_one_out_accuracy_high": round(high, 6),
        }
    return metrics
