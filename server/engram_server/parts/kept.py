"""Folders of what the backbone computed for a corpus, from which new tasks need no photos.

| level | what is kept of each image | serves |
|---|---|---|
| `embeddings` | the final rows that heads read | tasks with a head only |
| `summaries` | and the summary of the layers | also taught tasks and heads that read layers |
| `contexts` | and the keys and values of all layers | every task |

A part is `part-00000.csv`, its images; `part-00000.readouts.npy`, (n, F); and at the level
`contexts`, `part-00000.states.npy`, (n, L, 2, H, S, d). Arrays are float16 and are read through a
memory map. The rows of images with an error are zeros. `_manifest.json` has the backbone.
"""

import os
from collections.abc import Iterator, Sequence
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, Final, Literal, Self, get_args

import numpy as np
import numpy.typing as npt
import torch

from engram_server.errors import TaskMismatch, UnreadableSource, UnusableOutput
from engram_server.model.backbone import Backbone
from engram_server.model.context import Context, ContextBatch
from engram_server.model.tasks import Task
from engram_server.parts.columns import IMAGE_COLUMNS, Row
from engram_server.parts.output import Json, Output, differences, read_manifest

Level = Literal["embeddings", "summaries", "contexts"]  # each has what those before it have
LEVELS: Final[tuple[Level, ...]] = get_args(Level)
Halves = npt.NDArray[np.float16]
TensorName = Literal["readouts", "states"]

_PARTS_OPEN = 16


def tensor_shapes(backbone: Backbone, level: Level) -> dict[TensorName, tuple[int, ...]]:
    """Return the shape of each tensor that is kept of one image."""
    geometry, width = backbone.geometry, len(backbone.readout) * backbone.width
    if level == "embeddings":
        return {"readouts": (width,)}
    layers, parts, columns = backbone.summary_shape
    shapes: dict[TensorName, tuple[int, ...]] = {"readouts": (width + layers * parts * columns,)}
    if level == "contexts":
        sizes = (geometry.layers, 2, geometry.heads, geometry.tokens, geometry.head_width)
        shapes["states"] = sizes
    return shapes


def needed_level(task: Task) -> Level:
    """Return the least that has to be kept for a task."""
    if task.token is not None:
        return "contexts"
    return "summaries" if task.reads_layers else "embeddings"


def kept_facts(backbone: Backbone) -> Json:
    """Return what has to be the same for kept tensors to stand for photos."""
    return {
        "fingerprint": backbone.fingerprint,
        "precision": backbone.precision,
        "image_size": list(backbone.image_size),
        "readout": list(backbone.readout),
        "preprocessing": backbone.preprocessing.fingerprint,
    }


def is_kept(folder: Path) -> bool:
    """Whether a folder has tensors, and not images or rows."""
    try:
        return "kept" in (read_manifest(folder) or {})
    except UnusableOutput:
        return False  # photos may have a file of this name beside them


def part_file(folder: Path, number: int, name: TensorName) -> Path:
    return folder / f"part-{number:05}.{name}.npy"


class KeptFolder:
    """The kept tensors of a corpus, by the index of an image. Call it from any thread."""

    def __init__(self, folder: Path, manifest: Json) -> None:
        self.folder = folder
        self.manifest = manifest
        self.level: Level = manifest["kept"]["level"]
        self._part_images: int = manifest["kept"]["part_images"]
        self.embedding_width: int = manifest["kept"]["embedding_width"]
        self._images: int = manifest["source"]["images"]
        self._index = Output(folder, "csv", IMAGE_COLUMNS)
        self._rows = lru_cache(_PARTS_OPEN)(self._read_rows)
        self._tensor = lru_cache(2 * _PARTS_OPEN)(self._open_tensor)

    @classmethod
    def open(cls, folder: Path) -> Self:
        """Raise UnreadableSource if the folder has no tensors, or not all of them."""
        manifest = read_manifest(folder)
        if manifest is None or "kept" not in manifest:
            raise UnreadableSource(
                f"'{folder}' has no kept tensors. Write them with engram batch SOURCE --keep "
                f"summaries {folder}."
            )
        kept = cls(folder, manifest)
        missing = sorted(set(range(kept.parts)) - set(kept._index.finished()))
        if missing:
            raise UnreadableSource(
                f"'{folder}' is not complete: {len(missing)} of {kept.parts} parts are missing. "
                f"Run the command that writes it again; it continues."
            )
        return kept

    def __len__(self) -> int:
        return self._images

    @property
    def name(self) -> str:
        return str(self.folder)

    @property
    def digest(self) -> str:
        """A hash of all paths in order."""
        return str(self.manifest["source"]["listing"])

    @property
    def parts(self) -> int:
        return -(-self._images // self._part_images)

    def check_backbone(self, backbone: Backbone) -> None:
        """Raise TaskMismatch unless this backbone computes what the folder has."""
        kept = {name: value for name, value in self.manifest["backbone"].items() if name != "name"}
        changes = list(differences(kept, kept_facts(backbone)))
        if changes:
            raise TaskMismatch(
                f"'{self.folder}' was kept with the backbone '{self.manifest['backbone']['name']}',"
                f" which differs from '{backbone.name}': {'; '.join(changes)}. Use that backbone "
                f"with the same settings (ENGRAM_BACKBONE, ENGRAM_PRECISION, ENGRAM_IMAGE_SIZE), or"
                f" run over the photos."
            )

    def image(self, index: int) -> Row:
        """Return the columns of an image: path, digest, size and error."""
        part, place = divmod(index, self._part_images)
        return self._rows(part)[place]

    @cached_property
    def paths(self) -> list[str]:
        """The paths of all images."""
        return [
            row["path"] for part in range(self.parts) for row in self._index.read(part, ["path"])
        ]

    @cached_property
    def _by_name(self) -> dict[str, int]:
        """The index of each image by its path, absolute and relative to the source too."""
        folder = f"{str(self.manifest['source']['name']).rstrip('/')}/"
        found: dict[str, int] = {}
        for index, path in reversed(list(enumerate(self.paths))):
            for name in (path, path.removeprefix(folder), os.path.abspath(path)):
                found[name] = index
        return found

    def find(self, name: str, root: Path) -> int | None:
        """Return the index of an image by its path in a table in the folder `root`."""
        by_name = self._by_name
        return by_name.get(name, by_name.get(os.path.abspath(root / name)))

    def readouts(self, indices: Sequence[int]) -> Halves:
        """Return the readouts of images, (n, F)."""
        if isinstance(indices, range):
            return np.concatenate(list(self._slices(indices)))
        return np.stack([self._of_image(index, "readouts") for index in indices])

    def _slices(self, indices: range) -> Iterator[Halves]:
        """The readouts of consecutive images, part by part."""
        start, size = indices.start, self._part_images
        while start < indices.stop:
            part, place = divmod(start, size)
            end = min(size, place + indices.stop - start)
            yield self._tensor(part, "readouts")[place:end]
            start += end - place

    def contexts(
        self,
        indices: Sequence[int],
        device: torch.device,
        dtype: torch.dtype,
        *,
        rows: bool = True,
    ) -> ContextBatch:
        """Return what is kept of images for a pass; states if they are kept and `rows` is set."""
        readout = torch.from_numpy(self.readouts(indices).astype(np.float32))
        if self.level != "contexts" or not rows:
            return ContextBatch((), readout.to(device))
        images = [
            Context(torch.from_numpy(self._of_image(index, "states")), one)
            for index, one in zip(indices, readout, strict=True)
        ]
        return ContextBatch.stack(images, device, dtype)

    def _of_image(self, index: int, name: TensorName) -> Halves:
        part, place = divmod(index, self._part_images)
        one: Halves = self._tensor(part, name)[place]
        return one

    def _read_rows(self, part: int) -> list[Row]:
        return self._index.read(part, [column.name for column in IMAGE_COLUMNS])

    def _open_tensor(self, part: int, name: TensorName) -> npt.NDArray[Any]:
        path = part_file(self.folder, part, name)
        images = min(self._part_images, self._images - part * self._part_images)
        shape = (images, *self.manifest["kept"]["tensors"][name])
        try:
            # Not `numpy.load`: it parses Python in the header, which fails in several threads at
            # once on Python 3.11. Copied on write, because torch warns about read-only memory.
            offset = path.stat().st_size - 2 * int(np.prod(shape))
            if offset < 0:
                raise ValueError("the file is too short")
            array = np.memmap(path, dtype="<f2", mode="c", offset=offset, shape=shape)
        except (OSError, ValueError) as error:
            raise UnreadableSource(
                f"Cannot read '{path}': {error}. Delete the part's .csv file and run the command "
                f"that writes the folder again."
            ) from error
        return array
