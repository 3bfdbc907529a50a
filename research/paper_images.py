"""The images of the paper's tables: which ones of a data set, and how they are read.

research/DATA.md says where to get each data set. A data set is a folder, or a tar file of one.
"""

import hashlib
import tarfile
import tempfile
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Final, Literal

import numpy as np
import torch
from engram_server.model import Backbone
from engram_training.data.images import ImageSet
from engram_training.data.workspace import Scratch
from torch import Tensor

KEEP_BYTES = 8 * 2**30
MOST_VALIDATED = 10  # images of a class

Split = Literal["train", "val", "test"]
SPLITS: Final[tuple[Split, ...]] = ("train", "val", "test")
Listing = Mapping[str, Mapping[str, Sequence[str]]]  # names by split and class


@dataclass(frozen=True, slots=True)
class Selection:
    """The images of one table on one data set, by their names in the archive."""

    labels: tuple[str, ...]
    names: dict[Split, list[str]]

    def targets(self, split: Split) -> Tensor:
        places = {label: place for place, label in enumerate(self.labels)}
        names = self.names[split]
        return torch.tensor([places[PurePosixPath(name).parent.name] for name in names])

    def counts(self) -> dict[str, int]:
        counts = {"classes": len(self.labels)}
        counts.update((split, len(self.names[split])) for split in SPLITS)
        return counts


def find_data(folder: Path, name: str) -> Path:
    """The data set of that name in a folder: a folder, or a tar file of one."""
    return folder / name if (folder / name).is_dir() else folder / f"{name}.tar"


def digest(source: Path) -> str:
    """The SHA-256 of a tar file, or of the names and the contents of a folder's files."""
    if source.is_file():
        return hashlib.sha256(source.read_bytes()).hexdigest()
    whole = hashlib.sha256()
    for path in sorted(path for path in source.rglob("*") if path.is_file()):
        content = hashlib.sha256(path.read_bytes()).hexdigest()
        whole.update(f"{path.relative_to(source).as_posix()} {content}\n".encode())
    return whole.hexdigest()


def list_images(source: Path) -> Listing:
    """What lies at `…/{train,test}/<class>/<file>`, sorted."""
    found: dict[str, dict[str, list[str]]] = {"train": defaultdict(list), "test": defaultdict(list)}
    if source.is_dir():
        files = (path for path in source.rglob("*") if path.is_file())
        names = sorted(path.relative_to(source.parent).as_posix() for path in files)
    else:
        with tarfile.open(source) as tar:
            names = sorted(member.name for member in tar if member.isfile())
    for name in names:
        _, split, label, _ = PurePosixPath(name).parts
        found[split][label].append(name)
    return found


def select(listing: Listing, classes: int, train: int, test: int, seed: int) -> Selection:
    """At most so many classes, training images of a class, and test images in all.

    A seeded draw that takes more where more is needed, so that what is small is part of what is
    large. A tenth of a class's training images validate, but never more than ten.
    """
    everything = sorted(listing["train"])
    order = np.random.default_rng([seed, 0xC1]).permutation(len(everything))
    labels = sorted(everything[place] for place in order[:classes])
    tested = -(-test // len(labels))
    names: dict[Split, list[str]] = {split: [] for split in SPLITS}
    for label in labels:
        rng = np.random.default_rng([seed, everything.index(label)])
        to_learn = _shuffled(listing["train"][label], rng)
        to_test = _shuffled(listing["test"].get(label, []), rng)
        validated = max(1, min(MOST_VALIDATED, len(to_learn) // 10))
        names["val"] += to_learn[:validated]
        names["train"] += to_learn[validated : validated + train]
        names["test"] += to_test[:tested]
    return Selection(tuple(labels), names)


def _shuffled(names: Sequence[str], rng: np.random.Generator) -> list[str]:
    return [names[place] for place in rng.permutation(len(names))]


def unpack(source: Path, names: Collection[str], folder: Path) -> Path:
    """The folder below which the named images are: `folder`, unless the source is one itself."""
    if source.is_dir():
        return source.parent
    with tarfile.open(source) as tar:
        tar.extractall(folder, [member for member in tar if member.name in names], filter="data")
    return folder


@dataclass(frozen=True, slots=True)
class Images:
    """The decoded images of a selection."""

    sets: dict[Split, ImageSet]
    targets: dict[Split, Tensor]
    classes: int
    scratch: Scratch
    pool: Executor


def read_images(source: Path, selection: Selection, backbone: Backbone, stack: ExitStack) -> Images:
    """Unpacks and decodes a selection for as long as `stack` is open."""
    folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
    scratch = stack.enter_context(closing(Scratch(KEEP_BYTES)))
    pool = stack.enter_context(ThreadPoolExecutor(2))
    selected = {name for names in selection.names.values() for name in names}
    root = unpack(source, selected, folder)
    sets: dict[Split, ImageSet] = {}
    for split in SPLITS:
        paths = [root / name for name in selection.names[split]]
        sets[split] = ImageSet(paths, backbone.preprocessing, scratch)
        if bad := sets[split].read_all(pool):
            raise SystemExit(f"'{bad[0].path.name}' in '{source}': {bad[0].reason}")
    targets = {split: selection.targets(split) for split in SPLITS}
    return Images(sets, targets, len(selection.labels), scratch, pool)
