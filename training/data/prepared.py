"""The images of a run, decoded once: what can be read, and what the rest means for the task."""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

import numpy as np

from server.errors import ImageError
from server.model import Preprocessing
from server.model.preprocessing import read_header
from training.data.augment import Augmentation, choose
from training.data.dataset import DataSet, SplitName
from training.data.images import ImageSet, Unreadable
from training.data.splits import classes_without
from training.data.workspace import Workspace
from training.errors import DataError

HEADERS_READ = 64


@dataclass(frozen=True, slots=True)
class PreparedData:
    """A data set without its unreadable images, and the others by split."""

    data: DataSet
    images: dict[SplitName, ImageSet]
    augmentation: Augmentation
    skipped: list[Unreadable]


def suited_augmentation(data: DataSet) -> Augmentation:
    """What suits the size of the training images, as the headers of some of them give it."""
    paths = [sample.path for sample in data.part("train").samples]
    sides = []
    for path in paths[:: max(1, len(paths) // HEADERS_READ)]:
        # Unreadable images are reported later, all at once.
        with suppress(OSError, ImageError):
            header = read_header(path.read_bytes())
            sides.append(min(header.width, header.height))
    return choose(np.array(sides, dtype=np.int64))


def read_images(
    data: DataSet, augmentation: Augmentation, view: Preprocessing, workspace: Workspace
) -> PreparedData:
    """Decode every image; those that cannot be read are left out, with a note."""
    images: dict[SplitName, ImageSet] = {}
    skipped: list[Unreadable] = []
    splits: tuple[SplitName, ...] = ("val", "test", "train")
    for split in splits:
        paths = [sample.path for sample in data.part(split).samples]
        cropped = split == "train" and augmentation != "none"
        images[split] = ImageSet(paths, view, workspace.scratch, sources=cropped)
        on_progress = workspace.stage(f"reading {split} images")
        skipped += images[split].read_all(workspace.pool, on_progress)
    if skipped:
        first = skipped[0]
        workspace.note(f"{len(skipped)} images were skipped, first '{first.path}': {first.reason}")
    readable = data.without(image.path for image in skipped)
    if not len(readable.part("train")):
        raise DataError(f"no training image of '{data.name}' can be read")
    if data.problem != "regression":
        readable = _without_lost_classes(readable, workspace)
    _note_unvalidated(readable, workspace)
    return PreparedData(readable, images, augmentation, skipped)


def _without_lost_classes(data: DataSet, workspace: Workspace) -> DataSet:
    """Classes of which no image is left are no classes of the task."""
    present = {str(value) for sample in data.samples for value in sample.values}
    lost = [label for label in data.labels if label not in present]
    if lost:
        workspace.note(f"no image of {_listed(lost)} can be read: left out of the task")
        data = replace(data, labels=tuple(sorted(present)))
    if data.problem == "single_label" and len(data.labels) < 2:
        raise DataError("images of one class only can be read; a task needs two or more")
    if untrained := classes_without(data, "train"):
        workspace.note(f"training has no image of {_listed(untrained)}")
    return data


def _note_unvalidated(data: DataSet, workspace: Workspace) -> None:
    if not len(data.part("val")):
        workspace.note(
            "no image is left to validate on, so the best variant is the one that fits the "
            "training images best, which says little about new ones"
        )
    elif data.problem == "single_label" and (lonely := classes_without(data, "val")):
        workspace.note(f"no image to validate {_listed(lonely)} on: too few images")


def _listed(names: Sequence[str], most: int = 5) -> str:
    shown = ", ".join(f"'{name[:60]}'" for name in names[:most])
    return shown if len(names) <= most else f"{shown} and {len(names) - most} more"
