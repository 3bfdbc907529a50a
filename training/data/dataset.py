"""Data sets: which images there are, what is known about each, and which are held out.

A folder of class folders, with or without `train/ val/ test/` above them, or a CSV or JSONL of
paths and labels. Nothing is decoded here; `training.data.images` does that.
"""

import hashlib
import json
import math
import os
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final, Literal, get_args

import numpy as np
import numpy.typing as npt

from task_store.manifest import shown
from training.data.tables import TABLE_SUFFIXES, Row, read_table
from training.errors import DataError

Problem = Literal["single_label", "multi_label", "regression"]
PROBLEMS: Final[tuple[Problem, ...]] = get_args(Problem)
SplitName = Literal["train", "val", "test"]
SPLITS: Final[tuple[SplitName, ...]] = get_args(SplitName)
FOLDERS: Final[Mapping[str, SplitName]] = {
    "train": "train",
    "training": "train",
    "val": "val",
    "valid": "val",
    "validation": "val",
    "test": "test",
}
Fractions = tuple[float, float, float]  # of train, val and test
Value = str | float
Targets = npt.NDArray[np.int64] | npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Sample:
    path: Path
    values: tuple[Value, ...]
    split: SplitName | None  # None where the data does not say


@dataclass(frozen=True, slots=True)
class DataSet:
    """Samples of one problem, each in a split, or all in none."""

    name: str
    problem: Problem
    labels: tuple[str, ...]  # sorted; names of the outputs, empty for a single number
    samples: tuple[Sample, ...]
    digest: str  # of paths, sizes and labels, by which a later run knows the same data

    def __len__(self) -> int:
        return len(self.samples)

    @property
    def outputs(self) -> int:
        return len(self.labels) if self.problem != "regression" else len(self.samples[0].values)

    def part(self, split: SplitName | None) -> "DataSet":
        chosen = tuple(sample for sample in self.samples if sample.split == split)
        return replace(self, samples=chosen)

    def without(self, paths: Iterable[Path]) -> "DataSet":
        left_out = set(paths)
        kept = tuple(sample for sample in self.samples if sample.path not in left_out)
        return replace(self, samples=kept)

    def targets(self, labels: Sequence[str] | None = None) -> Targets:
        """(n,) indices, (n, K) of 0 and 1, or (n, K) numbers, in the order of `labels` if given.

        A label that is not among them becomes -1, or a row without a 1.
        """
        if self.problem == "regression":
            return np.array([sample.values for sample in self.samples], dtype=np.float32)
        index = {label: place for place, label in enumerate(labels or self.labels)}
        if self.problem == "single_label":
            places = [index.get(str(sample.values[0]), -1) for sample in self.samples]
            return np.array(places, dtype=np.int64)
        hot = np.zeros((len(self.samples), len(index)), dtype=np.float32)
        for row, sample in zip(hot, self.samples, strict=True):
            row[[index[str(value)] for value in sample.values if value in index]] = 1
        return hot


def read_data(source: str | Path, problem: Problem | None = None) -> DataSet:
    """The data set in a folder or a table; `problem` overrides what the labels look like."""
    path = Path(source).expanduser()
    if path.is_dir():
        rows = list(_folder_rows(path))
    elif path.is_file():
        if path.suffix.lower() not in TABLE_SUFFIXES:
            raise DataError(
                f"'{path}' is neither a folder of class folders nor a table of paths and labels "
                f"({', '.join(TABLE_SUFFIXES)})"
            )
        rows = read_table(path)
    else:
        raise DataError(f"there is no folder or file '{path}'")
    if not rows:
        raise DataError(
            f"'{path}' holds no images; it should hold one folder of images for each class"
        )
    problem = problem or _guess_problem(rows)
    samples = tuple(_sample(row, problem) for row in rows)
    labels = labels_of(samples, problem)
    digest = _digest(samples, path if path.is_dir() else path.parent)
    return DataSet(path.resolve().name, problem, labels, samples, digest)


# --- folders --------------------------------------------------------------------------------------


def _folder_rows(root: Path) -> Iterator[Row]:
    inside = _folders(root)
    named = {FOLDERS[folder.name]: folder for folder in inside if folder.name in FOLDERS}
    splits = "train" in named and all(_folders(folder) for folder in named.values())
    strangers = [folder.name for folder in inside if folder.name not in FOLDERS]
    if not splits or strangers:
        if not inside and any(root.iterdir()):
            raise DataError(
                f"the images in '{root}' lie in no class folder; put those of each class into a "
                "folder named after it"
            )
        yield from _class_rows(root, None)
        return
    for split, folder in named.items():
        yield from _class_rows(folder, split)


def _class_rows(root: Path, split: SplitName | None) -> Iterator[Row]:
    for folder in _folders(root):
        for directory, inner, files in os.walk(folder):
            inner[:] = sorted(name for name in inner if not name.startswith("."))
            for name in sorted(files):
                if not name.startswith("."):
                    yield Row(Path(directory, name), (folder.name,), split, str(folder))


def _folders(root: Path) -> list[Path]:
    try:
        return sorted(path for path in root.iterdir() if path.is_dir() and path.name[0] != ".")
    except OSError as error:
        raise DataError(f"the folder '{root}' cannot be read: {error.strerror}") from error


# --- what the labels mean -------------------------------------------------------------------------


def _guess_problem(rows: Sequence[Row]) -> Problem:
    """Numbers, one of them with a point or an exponent, are quantities; all else names classes."""
    values = [value for row in rows for value in row.values]
    if all(row.values for row in rows) and all(map(_is_number, values)):
        whole = all(value.lstrip("+-").isdigit() for value in values)
        if not whole:
            return "regression"
    several = any(row.several or len(row.values) != 1 for row in rows)
    return "multi_label" if several else "single_label"


def _is_number(text: str) -> bool:
    with suppress(ValueError):
        return math.isfinite(float(text))
    return False


def _sample(row: Row, problem: Problem) -> Sample:
    if row.split is not None and row.split not in FOLDERS:
        raise DataError(f"{row.where} names the split '{shown(row.split)}'; use train, val or test")
    split = None if row.split is None else FOLDERS[row.split]
    if problem == "single_label" and len(row.values) != 1:
        raise DataError(f"{row.where} has {len(row.values)} labels, and this problem has one")
    if problem == "regression":
        for value in row.values:
            if not _is_number(value):
                raise DataError(f"{row.where} has '{shown(value)}', which is no finite number")
        return Sample(row.path, tuple(map(float, row.values)), split)
    return Sample(row.path, tuple(dict.fromkeys(row.values)), split)


def labels_of(samples: Sequence[Sample], problem: Problem) -> tuple[str, ...]:
    """The names of the classes, sorted; none for numbers. DataError where there are too few."""
    if problem == "regression":
        counts = {len(sample.values) for sample in samples}
        if len(counts) > 1 or 0 in counts:
            raise DataError(
                f"some images have {min(counts)} numbers and others {max(counts)}; regression "
                "needs the same numbers for every image"
            )
        return ()
    labels = sorted({str(value) for sample in samples for value in sample.values})
    if "" in labels:
        raise DataError("a label is empty; every label needs a name")
    if len(labels) < (2 if problem == "single_label" else 1):
        raise DataError(
            f"there is one class only, '{shown(labels[0])}'; a task needs two or more to tell apart"
            if labels
            else "no image has a label"
        )
    return tuple(labels)


def _digest(samples: Sequence[Sample], root: Path) -> str:
    digest = hashlib.sha256()
    for sample in sorted(samples, key=lambda sample: str(sample.path)):
        try:
            size = sample.path.stat().st_size
        except OSError:
            size = -1
        relative = os.path.relpath(sample.path, root)
        line = json.dumps([relative, size, sample.values, sample.split])
        digest.update(line.encode("utf-8", "surrogatepass"))
    return f"sha256:{digest.hexdigest()}"


# --- splits ---------------------------------------------------------------------------------------


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
