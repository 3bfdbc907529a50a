"""Images, decoded once: the view that the server takes, and what training crops from.

Reading them all before the first step finds every unreadable one at once, and no epoch waits for a
decoder again. What does not fit into the scratch file is decoded again where it is needed.
"""

from collections.abc import Sequence
from concurrent.futures import Executor
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from server.errors import ImageError
from server.model.preprocessing import Preprocessing, read_header
from training.data.augment import Augmentation, Pixels, augment, choose
from training.data.dataset import DataSet, SplitName, classes_without
from training.data.workspace import Scratch, Slot, Workspace
from training.errors import DataError
from training.progress import OnProgress

HEADERS_READ = 64
# Images to crop from are kept at this many times the size of a view: a crop of half the area has
# all the detail the model can see.
SOURCE_SCALE = 1.5


@dataclass(frozen=True, slots=True)
class Unreadable:
    path: Path
    reason: str


class ImageSet:
    """Some images of one data set, by number; those that cannot be read are left out."""

    def __init__(
        self,
        paths: Sequence[Path],
        view: Preprocessing,
        scratch: Scratch,
        *,
        sources: bool = False,
    ) -> None:
        self.paths = list(paths)
        self.view = view
        self._scratch = scratch
        self._sources = sources
        self._slots: list[Slot | None] = [None] * len(paths)

    def __len__(self) -> int:
        return len(self.paths)

    def read_all(self, pool: Executor, on_progress: OnProgress | None = None) -> list[Unreadable]:
        """Decode every image and drop those that cannot be; returns which, and why."""
        bad: dict[int, str] = {}
        for place, failure in enumerate(pool.map(self._read, range(len(self)))):
            if failure is not None:
                bad[place] = failure
            if on_progress is not None:
                on_progress(place + 1, len(self))
        unreadable = [Unreadable(self.paths[place], reason) for place, reason in bad.items()]
        good = [place for place in range(len(self)) if place not in bad]
        self.paths = [self.paths[place] for place in good]
        self._slots = [self._slots[place] for place in good]
        return unreadable

    def pixels(self, place: int) -> Pixels:
        """The server's view of an image, (H, W, 3)."""
        slot = self._slots[place]
        if slot is not None and not self._sources:
            return self._scratch.get(slot)
        return self.view(self.paths[place].read_bytes(), max_pixels=None)

    def batch(self, places: Sequence[int]) -> Tensor:
        """(B, H, W, 3) uint8."""
        return torch.from_numpy(np.stack([self.pixels(place) for place in places]))

    def augmented_batch(
        self, places: Sequence[int], how: Augmentation, seed: Sequence[int]
    ) -> Tensor:
        """The same of training views; an image's draw depends on `seed` and its number alone."""
        views = []
        for place in places:
            slot = self._slots[place]
            if slot is not None and self._sources:
                source = self._scratch.get(slot)
            else:
                source = self._source(self.paths[place].read_bytes())
            views.append(augment(source, how, self.view, np.random.default_rng([*seed, place])))
        return torch.from_numpy(np.stack(views))

    def _read(self, place: int) -> str | None:
        try:
            data = self.paths[place].read_bytes()
            pixels = self._source(data) if self._sources else self.view(data, max_pixels=None)
        except FileNotFoundError:
            return "there is no such file"
        except OSError as error:
            return f"it cannot be opened: {error.strerror or error}"
        except ImageError as error:
            return str(error)
        self._slots[place] = self._scratch.put(pixels)
        return None

    def _source(self, data: bytes) -> Pixels:
        """Upright RGB, no larger than cropping needs."""
        edge = round(SOURCE_SCALE * max(self.view.output_size))
        header = read_header(data)
        shrunk = edge if min(header.width, header.height) > edge else None
        return replace(self.view, resize=shrunk, crop=None)(data, max_pixels=None)


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
        on_progress = workspace.watcher.stage(f"reading {split} images")
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
