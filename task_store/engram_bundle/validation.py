"""Checks of a bundle's tensors, derived from the schema."""

import itertools
import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from engram_bundle import schema
from engram_bundle.errors import MalformedBundle
from engram_bundle.limits import BundleLimits
from engram_bundle.manifest import Manifest
from engram_bundle.media import check_media
from engram_bundle.schema import DIMENSIONS, LABELLED_TASK_TYPES, TENSORS, lora_names
from engram_bundle.untrusted import printable

Shapes = Mapping[str, tuple[int, ...]]
Arrays = Mapping[str, NDArray[Any]]


def check_name(name: str) -> None:
    if name not in TENSORS:
        raise MalformedBundle(
            f"Unknown tensor '{printable(name)}'. Valid tensors: {', '.join(TENSORS)}."
        )


def check_stored_dtype(name: str, dtype: str) -> None:
    check_name(name)
    allowed = TENSORS[name].stored_as
    if dtype not in allowed:
        raise MalformedBundle(
            f"Tensor '{name}' is stored as {dtype}; it must be {' or '.join(allowed)}."
        )


def check_shapes(shapes: Shapes, manifest: Manifest, limits: BundleLimits) -> None:
    """Check ranks, sizes, and that tensors and manifest agree."""
    missing = [name for name, tensor in TENSORS.items() if tensor.required and name not in shapes]
    if missing:
        raise MalformedBundle(f"The bundle has no tensor '{missing[0]}', which is required.")
    sizes = _check_sizes(shapes, limits)
    if reason := schema.missing_class_token(shapes, extends=bool(manifest.extends)):
        raise MalformedBundle(reason)
    _check_lora(shapes, manifest)
    _check_companions(shapes)
    _check_examples(shapes, limits)
    _check_manifest(shapes, manifest)
    named, outputs = len(manifest.labels), sizes["K"]
    if named != outputs and (named or manifest.task_type in LABELLED_TASK_TYPES):
        raise MalformedBundle(
            f"The manifest has {named} labels, and the head has {outputs} outputs."
        )


def _check_sizes(shapes: Shapes, limits: BundleLimits) -> dict[str, int]:
    """Return the size of each symbol, which must be the same in every tensor."""
    sizes: dict[str, int] = {}
    first: dict[str, str] = {}  # the first tensor with a symbol
    for name, tensor in TENSORS.items():
        shape = shapes.get(name)
        if shape is None:
            continue
        fixed = [
            int(symbol) if symbol.isdigit() else size
            for symbol, size in zip(tensor.shape, shape, strict=False)
        ]
        if len(shape) != len(tensor.shape) or list(shape) != fixed:
            raise MalformedBundle(
                f"Tensor '{name}' has shape {list(shape)}; it must be [{', '.join(tensor.shape)}]."
            )
        for symbol, size in zip(tensor.shape, shape, strict=True):
            if size != sizes.setdefault(symbol, size):
                raise MalformedBundle(
                    f"Tensor '{name}' has shape {list(shape)}, so {symbol} = {size}, but "
                    f"'{first[symbol]}' has {symbol} = {sizes[symbol]}."
                )
            first.setdefault(symbol, name)
    for symbol, dimension in DIMENSIONS.items():
        most = dimension.factor * getattr(limits, dimension.limit)
        most = min(most, sizes.get(dimension.at_most, most))
        if symbol in sizes and not 1 <= sizes[symbol] <= most:
            raise MalformedBundle(
                f"Tensor '{first[symbol]}' has {symbol} = {sizes[symbol]}; it must be between 1 "
                f"and {most}."
            )
    return sizes


def _check_examples(shapes: Shapes, limits: BundleLimits) -> None:
    """Check the size of examples, which determines the work and memory of solving the head."""
    features = sum(math.prod(shapes[n]) for n in ("examples.features", "summaries") if n in shapes)
    labels = math.prod(shapes["examples.labels"]) if "examples.labels" in shapes else 0
    for what, count, most in (
        ("features", features, limits.max_example_values),
        ("labels", labels, limits.max_example_labels),
    ):
        if count > most:
            raise MalformedBundle(
                f"The {what} of the examples have {count} values; at most {most} are allowed. "
                f"Train a task on that many images."
            )


def _check_companions(shapes: Shapes) -> None:
    """Check that tensors which are only useful with others come with them."""
    for name in shapes:
        tensor = TENSORS[name]
        if tensor.needs and tensor.needs not in shapes:
            raise MalformedBundle(f"Tensor '{name}' needs '{tensor.needs}', which is missing.")
    for group in schema.GROUPS:
        names = [name for name, tensor in TENSORS.items() if tensor.group == group]
        missing = [name for name in names if name not in shapes]
        if 0 < len(missing) < len(names):
            raise MalformedBundle(
                f"Tensor '{missing[0]}' is missing: {', '.join(names)} must be present together."
            )


def _check_manifest(shapes: Shapes, manifest: Manifest) -> None:
    """Check that the manifest declares what the tensors need, and the other way round."""
    if ("ood.means" in shapes) != (manifest.ood is not None):
        raise MalformedBundle("The manifest's ood and the tensors ood.* must be present together.")
    if {"drift.axes", "drift.centre"}.issubset(shapes) != (manifest.drift is not None):
        raise MalformedBundle(
            "The manifest's drift and the tensors drift.axes and drift.centre must be present "
            "together."
        )
    read = 0 if manifest.layers is None else len(manifest.layers)
    weighted = shapes["layers.weight"][1] if "layers.weight" in shapes else 0
    if read != weighted:
        raise MalformedBundle(
            f"The manifest lists {read} layers, and tensor 'layers.weight' has weights for "
            f"{weighted}."
        )
    if "head.projection" in shapes and manifest.normalised is None:
        raise MalformedBundle("Tensor 'head.projection' needs normalised = true in the manifest.")
    if "examples.labels" in shapes and manifest.task_type not in LABELLED_TASK_TYPES:
        raise MalformedBundle(
            f"Tensors examples.* need task type {' or '.join(LABELLED_TASK_TYPES)}, not "
            f"'{manifest.task_type}'."
        )


def _check_lora(shapes: Shapes, manifest: Manifest) -> None:
    spec = manifest.lora
    targets = () if spec is None else spec.targets
    named = {name for target in targets for name in lora_names(target)}
    present = {name for name in shapes if TENSORS[name].group == "lora"}
    for name in sorted(named - present):
        raise MalformedBundle(f"Tensor '{name}' is missing; the manifest's lora lists its target.")
    for name in sorted(present - named):
        raise MalformedBundle(f"The manifest's lora does not list the target of tensor '{name}'.")
    if spec is not None:
        rank = shapes[lora_names(spec.targets[0])[0]][2]
        if rank != spec.rank:
            raise MalformedBundle(
                f"The manifest's lora has rank {spec.rank}, but its tensors have rank {rank}."
            )


def check_values(arrays: Arrays, manifest: Manifest, limits: BundleLimits) -> None:
    """Check that values are finite, that examples are labelled and sorted, and their media."""
    for name, array in arrays.items():
        if array.dtype != np.uint8 and not np.isfinite(array).all():
            raise MalformedBundle(
                f"Tensor '{name}' has values that are not finite (NaN or infinity)."
            )
    if "examples.labels" not in arrays:
        return
    labels, digests = arrays["examples.labels"], arrays["examples.digests"]
    if labels.max() > 1:
        raise MalformedBundle("Tensor 'examples.labels' has values other than 0 and 1.")
    if manifest.task_type == "single_label" and (labels.sum(axis=1) != 1).any():
        raise MalformedBundle(
            "Tensor 'examples.labels' must have exactly one label per image in a single-label task."
        )
    # Sorted, so that the same examples give the same bytes in whatever order they were added.
    rows = [row.tobytes() for row in digests]
    if any(one >= other for one, other in itertools.pairwise(rows)):
        raise MalformedBundle("Tensor 'examples.digests' must be ascending and unique.")
    check_media(arrays, limits)
