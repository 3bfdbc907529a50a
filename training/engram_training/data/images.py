"""Images, decoded once: the server's view, and the sources for augmentation.

All images are read before the first step, so that unreadable ones are found at once and no epoch
waits for a decoder. Images that do not fit into the scratch file are decoded again when needed.
"""

from collections.abc import Sequence
from concurrent.futures import Executor
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from engram_server.errors import ImageError
from engram_server.model import Backbone, ContextBatch
from engram_server.model.masked_pass import encode as encode_images
from engram_server.model.preprocessing import Preprocessing, read_header
from engram_server.parts.kept import KeptFolder
from torch import Tensor

from engram_training.data.augment import Augmentation, Pixels, augment, choose
from engram_training.data.dataset import DataSet, SplitName, classes_without
from engram_training.data.workspace import OnProgress, Scratch, Slot, Workspace
from engram_training.errors import DataError

HEADERS_READ = 64
SOURCE_SCALE = 1.5  # of sources to views: a crop of half the area then has full detail


Inputs = Tensor | ContextBatch  # uint8 images (B, H, W, 3), or what was kept of them


def encode(backbone: Backbone, inputs: Inputs, *, rows: bool = True) -> ContextBatch:
    """Encode images; without `rows`, only the readout."""
    if isinstance(inputs, ContextBatch):
        contexts = inputs
    else:
        pixels = inputs.to(backbone.device)
        contexts = encode_images(backbone, backbone.preprocessing.normalise(pixels, backbone.dtype))
    return contexts if rows else ContextBatch((), contexts.readout)


@dataclass(frozen=True, slots=True)
class Unreadable:
    path: Path
    reason: str


class ImageSet:
    """Images of a data set by index, without unreadable ones."""

    def __init__(
        self, paths: Sequence[Path], view: Preprocessing, scratch: Scratch, *, sources: bool = False
    ) -> None:
        self.paths = list(paths)
        self.view = view
        self._scratch = scratch
        self._sources = sources
        self._slots: list[Slot | None] = [None] * len(paths)

    def __len__(self) -> int:
        return len(self.paths)

    def read_all(self, pool: Executor, on_progress: OnProgress | None = None) -> list[Unreadable]:
        """Decode every image; remove and return the unreadable ones."""
        bad: dict[int, str] = {}
        for index, failure in enumerate(pool.map(self._read, range(len(self)))):
            if failure is not None:
                bad[index] = failure
            if on_progress is not None:
                on_progress(index + 1, len(self))
        unreadable = [Unreadable(self.paths[index], reason) for index, reason in bad.items()]
        good = [index for index in range(len(self)) if index not in bad]
        self.paths = [self.paths[index] for index in good]
        self._slots = [self._slots[index] for index in good]
        return unreadable

    def pixels(self, index: int) -> Pixels:
        """Return the server's view of an image, (H, W, 3)."""
        slot = self._slots[index]
        if slot is not None and not self._sources:
            return self._scratch.get(slot)
        return self.view(self.paths[index].read_bytes(), max_pixels=None)

    def batch(self, indices: Sequence[int]) -> Tensor:
        """Return the server's views, (B, H, W, 3) uint8."""
        return torch.from_numpy(np.stack([self.pixels(index) for index in indices]))

    def inputs(self, indices: Sequence[int], *, rows: bool = True) -> Inputs:
        """Return what a pass takes; `rows`: a task row reads it."""
        return self.batch(indices)

    def augmented_batch(
        self, indices: Sequence[int], how: Augmentation, seed: Sequence[int]
    ) -> Tensor:
        """Return augmented views; the augmentation depends only on `seed` and the index."""
        views = []
        for index in indices:
            slot = self._slots[index]
            if slot is not None and self._sources:
                source = self._scratch.get(slot)
            else:
                source = self._source(self.paths[index].read_bytes())
            views.append(augment(source, how, self.view, np.random.default_rng([*seed, index])))
        return torch.from_numpy(np.stack(views))

    def _read(self, index: int) -> str | None:
        try:
            data = self.paths[index].read_bytes()
            pixels = self._source(data) if self._sources else self.view(data, max_pixels=None)
        except FileNotFoundError:
            return "the file does not exist"
        except OSError as error:
            return f"cannot open the file: {error.strerror or error}"
        except ImageError as error:
            return str(error)
        self._slots[index] = self._scratch.put(pixels)
        return None

    def _source(self, data: bytes) -> Pixels:
        """Decode to upright RGB, no larger than cropping needs."""
        edge = round(SOURCE_SCALE * max(self.view.output_size))
        header = read_header(data)
        resize = edge if min(header.width, header.height) > edge else None
        return replace(self.view, resize=resize, crop=None)(data, max_pixels=None)


class KeptImageSet(ImageSet):
    """Images of which `engram batch --keep` kept what a pass needs. The photos may be gone."""

    def __init__(
        self,
        data: DataSet,
        view: Preprocessing,
        scratch: Scratch,
        kept: KeptFolder,
        device: torch.device,
    ) -> None:
        super().__init__([sample.path for sample in data.samples], view, scratch)
        self._kept = kept
        self._device = device
        self._places = [find_kept(kept, path, data.root) for path in self.paths]

    def read_all(self, pool: Executor, on_progress: OnProgress | None = None) -> list[Unreadable]:
        """Remove and return the images of which nothing was kept."""
        reasons = [
            f"not in '{self._kept.name}'" if place is None else self._kept.image(place)["error"]
            for place in self._places
        ]
        bad = [
            Unreadable(path, reason)
            for path, reason in zip(self.paths, reasons, strict=True)
            if reason is not None
        ]
        good = [index for index, reason in enumerate(reasons) if reason is None]
        self.paths = [self.paths[index] for index in good]
        self._places = [self._places[index] for index in good]
        self._slots = [None] * len(good)
        return bad

    def inputs(self, indices: Sequence[int], *, rows: bool = True) -> ContextBatch:
        places = [place for index in indices if (place := self._places[index]) is not None]
        return self._kept.contexts(places, self._device, torch.float32, rows=rows)


def find_kept(kept: KeptFolder, path: Path, root: Path) -> int | None:
    """Find an image of a table in the folder `root` by its path."""
    name = path.relative_to(root) if path.is_relative_to(root) else path
    return kept.find(str(name), root)


@dataclass(frozen=True, slots=True)
class PreparedData:
    """A data set without unreadable images, and its images by split."""

    data: DataSet
    images: dict[SplitName, ImageSet]
    augmentation: Augmentation
    skipped: list[Unreadable]
    kept: KeptFolder | None = None  # what the images are read from, instead of files

    def are_small(self, image_size: tuple[int, int]) -> bool:
        """Whether training images have less than half the side of the backbone's input."""
        sides = _short_sides(self.data) if self.kept is None else self._kept_sides(self.kept)
        return bool(len(sides)) and 2 * float(np.median(sides)) < min(image_size)

    def _kept_sides(self, kept: KeptFolder) -> npt.NDArray[np.int64]:
        samples, root = self.data.part("train").samples, self.data.root
        some = samples[:: max(1, len(samples) // HEADERS_READ)]
        places = (find_kept(kept, sample.path, root) for sample in some)
        images = [kept.image(place) for place in places if place is not None]
        return np.array([min(one["width"], one["height"]) for one in images], dtype=np.int64)


def suited_augmentation(data: DataSet) -> Augmentation:
    return choose(_short_sides(data))


def _short_sides(data: DataSet) -> npt.NDArray[np.int64]:
    """The short sides of some training images, in pixels."""
    paths = [sample.path for sample in data.part("train").samples]
    sides = []
    for path in paths[:: max(1, len(paths) // HEADERS_READ)]:
        # Unreadable images are reported later.
        with suppress(OSError, ImageError):
            header = read_header(path.read_bytes())
            sides.append(min(header.width, header.height))
    return np.array(sides, dtype=np.int64)


def read_images(
    data: DataSet,
    augmentation: Augmentation,
    backbone: Backbone,
    workspace: Workspace,
    kept: KeptFolder | None = None,
) -> PreparedData:
    """Decode every image, or find it in `kept`; skip unreadable ones, with a note."""
    images: dict[SplitName, ImageSet] = {}
    skipped: list[Unreadable] = []
    splits: tuple[SplitName, ...] = ("val", "test", "train")
    for split in splits:
        part, view = data.part(split), backbone.preprocessing
        if kept is not None:
            images[split] = KeptImageSet(part, view, workspace.scratch, kept, backbone.device)
        else:
            paths = [sample.path for sample in part.samples]
            cropped = split == "train" and augmentation != "none"
            images[split] = ImageSet(paths, view, workspace.scratch, sources=cropped)
        on_progress = workspace.watcher.stage(f"reading {split}")
        skipped += images[split].read_all(workspace.pool, on_progress)
    if skipped:
        first = skipped[0]
        workspace.note(f"skipped {len(skipped)} images, first '{first.path}': {first.reason}")
    readable = data.without(image.path for image in skipped)
    if not len(readable.part("train")):
        raise DataError(f"No training image of '{data.name}' can be read.")
    if data.task_type != "regression":
        readable = _without_lost_classes(readable, workspace)
    _note_unvalidated(readable, workspace)
    return PreparedData(readable, images, augmentation, skipped, kept)


def _without_lost_classes(data: DataSet, workspace: Workspace) -> DataSet:
    present = {str(value) for sample in data.samples for value in sample.values}
    lost = [label for label in data.labels if label not in present]
    if lost:
        workspace.note(f"no image of {_listed(lost)} can be read; excluded from the task")
        data = replace(data, labels=tuple(sorted(present)))
    if data.task_type == "single_label" and len(data.labels) < 2:
        raise DataError("Only images of one class can be read. A task needs at least two classes.")
    if untrained := classes_without(data, "train"):
        workspace.note(f"no training image of {_listed(untrained)}")
    return data


def _note_unvalidated(data: DataSet, workspace: Workspace) -> None:
    if not len(data.part("val")):
        workspace.note(
            "no validation images: the best variant is selected on training images, which says "
            "little about new images"
        )
    elif data.task_type == "single_label" and (missing := classes_without(data, "val")):
        workspace.note(f"no validation image of {_listed(missing)}: too few images")


def _listed(names: Sequence[str], most: int = 5) -> str:
    shown = ", ".join(f"'{name[:60]}'" for name in names[:most])
    return shown if len(names) <= most else f"{shown} and {len(names) - most} more"
