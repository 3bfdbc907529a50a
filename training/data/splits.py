"""Which images are trained on, validated on and tested on."""

from collections import defaultdict
from dataclasses import replace

import numpy as np

from training.data.dataset import DataSet, SplitName
from training.errors import DataError

Fractions = tuple[float, float, float]  # of train, val and test
DEFAULT_FRACTIONS: Fractions = (0.8, 0.1, 0.1)


def split_data(data: DataSet, fractions: Fractions, seed: int) -> DataSet:
    """Put every sample into a split: the one the data names, or else a seeded stratified draw.

    Data with a training but no validation split gives part of its training images to validation.
    Every class keeps an image to train on, and one to validate on where it has two.
    """
    given = {sample.split for sample in data.samples}
    if None not in given and {"train", "val"} <= given:
        return data
    if None not in given and "train" not in given:
        raise DataError(f"no image of '{data.name}' is in the split 'train'")
    train, val, test = fractions
    if given & {"val", "test"} or None not in given:
        train, test = train + test, 0.0
    if "val" in given:
        val = 0.0
    rng = np.random.default_rng([seed, 0x5A17])
    splits = [sample.split for sample in data.samples]
    for members in _strata(data).values():
        places = [place for place in members if splits[place] in (None, "train")]
        order = [places[int(i)] for i in rng.permutation(len(places))]
        for place, split in zip(order, _draw(len(order), val, test), strict=True):
            splits[place] = split
    samples = tuple(
        replace(sample, split=split) for sample, split in zip(data.samples, splits, strict=True)
    )
    return replace(data, samples=samples)


def _draw(count: int, val: float, test: float) -> list[SplitName]:
    """Splits of so many images: one at least to train on, then one to validate on."""
    validated = max(1, round(count * val)) if val > 0 and count > 1 else 0
    tested = max(0, min(round(count * test), count - validated - 1))
    validated = min(validated, count - 1)
    counts: list[tuple[SplitName, int]] = [("val", validated), ("test", tested)]
    counts.append(("train", count - validated - tested))
    return [split for split, many in counts for _ in range(many)]


def _strata(data: DataSet) -> dict[str, list[int]]:
    """Places of the samples by class; several labels and numbers are drawn as one."""
    strata: dict[str, list[int]] = defaultdict(list)
    for place, sample in enumerate(data.samples):
        label = str(sample.values[0]) if data.problem == "single_label" else ""
        strata[label].append(place)
    return {label: strata[label] for label in sorted(strata)}


def classes_without(data: DataSet, split: SplitName) -> list[str]:
    seen = {value for sample in data.part(split).samples for value in sample.values}
    return [label for label in data.labels if label not in seen]
