"""Images, decoded once: the view that the server takes, and what training crops from.

Reading them all before the first step finds every unreadable one at once, and no epoch waits for a
decoder again. What does not fit into the scratch file is decoded again where it is needed.
"""

from collections.abc import Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from server.errors import ImageError
from server.model.preprocessing import Preprocessing, read_header
from training.data.augment import Augmentation, augment
from training.data.scratch import Scratch, Slot
from training.progress import OnProgress

Pixels = npt.NDArray[np.uint8]

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

    def augmented(self, place: int, how: Augmentation, rng: np.random.Generator) -> Pixels:
        """A training view of an image, (H, W, 3)."""
        slot = self._slots[place]
        if slot is not None and self._sources:
            source = self._scratch.get(slot)
        else:
            source = self._source(self.paths[place].read_bytes())
        return augment(source, how, self.view, rng)

    def batch(self, places: Sequence[int]) -> Tensor:
        """(B, H, W, 3) uint8."""
        return _stacked([self.pixels(place) for place in places])

    def augmented_batch(
        self, places: Sequence[int], how: Augmentation, seed: Sequence[int]
    ) -> Tensor:
        """The same of training views; an image's draw depends on `seed` and its number alone."""
        drawn = [
            self.augmented(place, how, np.random.default_rng([*seed, place])) for place in places
        ]
        return _stacked(drawn)

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


def _stacked(images: Sequence[Pixels]) -> Tensor:
    return torch.from_numpy(np.stack(images))
