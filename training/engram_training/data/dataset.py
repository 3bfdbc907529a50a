"""Data sets: images, their labels and their splits.

A data set is a folder of class folders, with or without `train/ val/ test/` above them, or a CSV or
JSONL file of paths and labels. Images are decoded in `data.images`.
"""

import hashlib
import json
import math
import os
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final, Literal, get_args

import numpy as np
import numpy.typing as npt
from engram_bundle.names import digest_of, format_digest
from engram_bundle.schema import SupervisedTaskType
from engram_bundle.untrusted import printable
from engram_vit.images import walk

from engram_training.data.tables import TABLE_SUFFIXES, Row, read_table
from engram_training.errors import DataError

TaskType = SupervisedTaskType
TASK_TYPES: Final[tuple[TaskType, ...]] = get_args(TaskType)
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
Corrections = Mapping[str, tuple[str, ...]]  # labels by the digest of an image
Targets = npt.NDArray[np.int64] | npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Sample:
    path: Path
    values: tuple[Value, ...]
    split: SplitName | None  # None: not in the data


@dataclass(frozen=True, slots=True)
class DataSet:
    """The samples of one task, all with a split or all without."""

    name: str
    task_type: TaskType
    labels: tuple[str, ...]  # sorted; empty for regression
    samples: tuple[Sample, ...]
    digest: str  # of paths, sizes and labels, to recognise the same data
    root: Path  # the folder of the data, or of its table

    def __len__(self) -> int:
        return len(self.samples)

    @property
    def outputs(self) -> int:
        return len(self.labels) if self.task_type != "regression" else len(self.samples[0].values)

    def part(self, split: SplitName | None) -> "DataSet":
        chosen = tuple(sample for sample in self.samples if sample.split == split)
        return replace(self, samples=chosen)

    def without(self, paths: Iterable[Path]) -> "DataSet":
        excluded = set(paths)
        kept = tuple(sample for sample in self.samples if sample.path not in excluded)
        return replace(self, samples=kept)

    def targets(self, labels: Sequence[str] | None = None) -> Targets:
        """Return (n,) indices, (n, K) of 0 and 1, or (n, K) numbers, in the order of `labels`.

        A label that is not in `labels` becomes -1, or a row without a 1.
        """
        if self.task_type == "regression":
            return np.array([sample.values for sample in self.samples], dtype=np.float32)
        index = {label: k for k, label in enumerate(labels or self.labels)}
        if self.task_type == "single_label":
            classes = [index.get(str(sample.values[0]), -1) for sample in self.samples]
            return np.array(classes, dtype=np.int64)
        hot = np.zeros((len(self.samples), len(index)), dtype=np.float32)
        for row, sample in zip(hot, self.samples, strict=True):
            row[[index[str(value)] for value in sample.values if value in index]] = 1
        return hot


def read_data(source: str | Path, task_type: TaskType | None = None) -> DataSet:
    """Read a folder or a table; `task_type` overrides the type guessed from the labels."""
    path = Path(source).expanduser()
    if path.is_dir():
        rows = list(_folder_rows(path))
    elif path.is_file():
        if path.suffix.lower() not in TABLE_SUFFIXES:
            raise DataError(
                f"'{path}' is neither a folder of class folders nor a table of paths and labels "
                f"({', '.join(TABLE_SUFFIXES)})."
            )
        rows = read_table(path)
    else:
        raise DataError(f"'{path}' does not exist. Pass a folder or a table.")
    if not rows:
        raise DataError(f"'{path}' contains no images. It needs one folder of images per class.")
    task_type = task_type or _guess_task_type(rows)
    samples = tuple(_sample(row, task_type) for row in rows)
    labels = labels_of(samples, task_type)
    root = path if path.is_dir() else path.parent
    digest = _digest(samples, root)
    return DataSet(path.resolve().name, task_type, labels, samples, digest, root)


def _folder_rows(root: Path) -> Iterator[Row]:
    inside = _folders(root)
    named = {FOLDERS[folder.name]: folder for folder in inside if folder.name in FOLDERS}
    splits = "train" in named and all(_folders(folder) for folder in named.values())
    others = [folder.name for folder in inside if folder.name not in FOLDERS]
    if not splits or others:
        if not inside and any(root.iterdir()):
            raise DataError(
                f"The images in '{root}' are not in class folders. Put the images of each class "
                "into a folder with the name of the class."
            )
        yield from _class_rows(root, None)
        return
    for split, folder in named.items():
        yield from _class_rows(folder, split)


def _class_rows(root: Path, split: SplitName | None) -> Iterator[Row]:
    for folder in _folders(root):
        for path in walk(str(folder)):
            yield Row(Path(path), (folder.name,), split, str(folder))


def _folders(root: Path) -> list[Path]:
    try:
        return sorted(path for path in root.iterdir() if path.is_dir() and path.name[0] != ".")
    except OSError as error:
        raise DataError(f"Cannot read the folder '{root}': {error.strerror}") from error


def _guess_task_type(rows: Sequence[Row]) -> TaskType:
    """Guess regression if all labels are numbers and one is not an integer, else classes."""
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


def _sample(row: Row, task_type: TaskType) -> Sample:
    if row.split is not None and row.split not in FOLDERS:
        raise DataError(
            f"{row.where} has the unknown split '{printable(row.split)}'. Use train, val or test."
        )
    split = None if row.split is None else FOLDERS[row.split]
    if task_type == "single_label" and len(row.values) != 1:
        raise DataError(
            f"{row.where} has {len(row.values)} labels, but this is a single-label task."
        )
    if task_type == "regression":
        for value in row.values:
            if not _is_number(value):
                raise DataError(
                    f"{row.where} has '{printable(value)}', which is not a finite number."
                )
        return Sample(row.path, tuple(map(float, row.values)), split)
    return Sample(row.path, tuple(dict.fromkeys(row.values)), split)


def labels_of(samples: Sequence[Sample], task_type: TaskType) -> tuple[str, ...]:
    """Return the sorted class labels, empty for regression; raise DataError if too few."""
    if task_type == "regression":
        counts = {len(sample.values) for sample in samples}
        if len(counts) > 1 or 0 in counts:
            raise DataError(
                f"Some images have {min(counts)} numbers and others {max(counts)}. Regression "
                "needs the same number of values for every image."
            )
        return ()
    labels = sorted({str(value) for sample in samples for value in sample.values})
    if "" in labels:
        raise DataError("A label is empty. Name every label.")
    if len(labels) < (2 if task_type == "single_label" else 1):
        raise DataError(
            f"'{printable(labels[0])}' is the only class. A task needs at least two classes."
            if labels
            else "No image has a label."
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
    return format_digest(digest.digest())


def split_data(data: DataSet, fractions: Fractions, seed: int) -> DataSet:
    """Assign every sample to a split: its own, or a seeded stratified draw.

    Data with train but without val uses some training images for validation. Every class keeps an
    image for training, and one for validation if it has two.
    """
    present = {sample.split for sample in data.samples}
    if None not in present and {"train", "val"} <= present:
        return data
    if None not in present and "train" not in present:
        raise DataError(f"No image of '{data.name}' is in the split 'train'.")
    train, val, test = fractions
    if present & {"val", "test"} or None not in present:
        train, test = train + test, 0.0
    if "val" in present:
        val = 0.0
    rng = np.random.default_rng([seed, 0x5A17])
    splits = [sample.split for sample in data.samples]
    for members in _strata(data).values():
        free = [index for index in members if splits[index] in (None, "train")]
        order = [free[int(i)] for i in rng.permutation(len(free))]
        for index, split in zip(order, _draw(len(order), val, test), strict=True):
            splits[index] = split
    samples = tuple(
        replace(sample, split=split) for sample, split in zip(data.samples, splits, strict=True)
    )
    return replace(data, samples=samples)


def _draw(count: int, val: float, test: float) -> list[SplitName]:
    """Return the splits of `count` images: at least one for training, then one for validation."""
    validated = max(1, round(count * val)) if val > 0 and count > 1 else 0
    tested = max(0, min(round(count * test), count - validated - 1))
    validated = min(validated, count - 1)
    counts: list[tuple[SplitName, int]] = [("val", validated), ("test", tested)]
    counts.append(("train", count - validated - tested))
    return [split for split, many in counts for _ in range(many)]


def _strata(data: DataSet) -> dict[str, list[int]]:
    """Group sample indices by class; multi-label and regression data is one group."""
    strata: dict[str, list[int]] = defaultdict(list)
    for index, sample in enumerate(data.samples):
        label = str(sample.values[0]) if data.task_type == "single_label" else ""
        strata[label].append(index)
    return {label: strata[label] for label in sorted(strata)}


def classes_without(data: DataSet, split: SplitName) -> list[str]:
    seen = {value for sample in data.part(split).samples for value in sample.values}
    return [label for label in data.labels if label not in seen]


def corrected(data: DataSet, corrections: Corrections, pool: Executor) -> tuple[DataSet, str]:
    """Return the data with the labels that users corrected at a server, and a note.

    A correction replaces the labels of its image in any split; without the image it has no effect.
    """
    if data.task_type == "regression":
        raise DataError("Corrections are labels, but this is a regression task.")
    digests = dict(zip(data.samples, pool.map(_file_digest, data.samples), strict=True))
    changed: dict[Sample, Sample] = {}
    for sample, digest in digests.items():
        labels = corrections.get(digest or "")
        if labels is None or set(labels) == set(sample.values):
            continue
        if data.task_type == "single_label" and len(labels) != 1:
            raise DataError(
                f"A correction of '{printable(str(sample.path))}' has {len(labels)} labels, but "
                f"this is a single-label task."
            )
        changed[sample] = replace(sample, values=labels)
    samples = tuple(changed.get(sample, sample) for sample in data.samples)
    used = len(set(digests.values()) & set(corrections))
    unused = len(corrections) - used
    note = f"{used} of {len(corrections)} corrections are of images in the data; "
    note += f"{len(changed)} labels changed"
    if unused:
        note += f"; {unused} are not used because their images are not in the data"
    identity = json.dumps([data.digest, [one.values for one in samples]])
    if not changed:
        return data, note
    digest = digest_of(identity.encode("utf-8", "surrogatepass"))
    classes = labels_of(samples, data.task_type)
    return replace(data, samples=samples, labels=classes, digest=digest), note


def _file_digest(sample: Sample) -> str | None:
    try:
        return digest_of(sample.path.read_bytes())
    except OSError:
        return None  # reported when the images are read
