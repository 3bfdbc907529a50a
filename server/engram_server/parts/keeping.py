"""Write what the backbone computed, in parts that appear whole or not at all.

A part is complete when its images are listed in its CSV file, which is written last.
"""

import io
import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from engram_bundle.files import STAGING_SUFFIX, sync_directory
from torch import Tensor

from engram_server.model.backbone import Backbone
from engram_server.model.context import ContextBatch
from engram_server.parts.columns import IMAGE_COLUMNS, Row
from engram_server.parts.kept import Halves, Level, TensorName, part_file, tensor_shapes
from engram_server.parts.output import Json, Output, write_failure

KeptTensors = dict[TensorName, Halves]  # of some images, (n, …) each

_LARGEST = float(np.finfo(np.float16).max)


def kept_tensors(contexts: ContextBatch) -> KeptTensors:
    """Convert contexts, with or without states, to what a folder keeps of them."""
    tensors: KeptTensors = {"readouts": _halves(contexts.readout)}
    if contexts.states:
        by_image = [_halves(layer.transpose(0, 1)) for layer in contexts.states]
        tensors["states"] = np.stack(by_image, axis=1)  # (n, L, 2, H, S, d)
    return tensors


def _halves(values: Tensor) -> Halves:
    """Convert to float16; larger values become its largest, not infinity."""
    half: Halves = values.clamp(-_LARGEST, _LARGEST).half().cpu().numpy()
    return half


class KeptWriter:
    """A folder of kept tensors that is being written, one part at a time."""

    def __init__(self, folder: Path, level: Level, backbone: Backbone) -> None:
        self.folder = folder
        self._shapes = tensor_shapes(backbone, level)
        self._index = Output(folder, "csv", IMAGE_COLUMNS, option="--keep")
        self._files: dict[TensorName, _ArrayFile] = {}  # of the part that is being written
        self.finished = self._index.finished
        self.read = self._index.read

    def open(self, manifest: Json, *, restart: bool) -> None:
        """Begin or continue a run, or raise UnusableOutput if it has other inputs."""
        self._index.open(manifest, restart=restart)

    def close(self) -> None:
        """Discard a part that is not complete, and let another run write to the folder."""
        for file in self._files.values():
            file.discard()
        self._index.close()

    def begin(self, number: int, images: int) -> None:
        try:
            for name, shape in self._shapes.items():
                path = part_file(self.folder, number, name)
                self._files[name] = _ArrayFile(path, (images, *shape))
        except OSError as error:
            raise write_failure(self.folder, error) from error

    def add(self, places: Sequence[int], tensors: KeptTensors) -> None:
        """Write what is kept of the images at these places of the part."""
        for name, file in self._files.items():
            try:
                file.write(places, tensors[name])
            except OSError as error:
                raise write_failure(file.path, error) from error

    def finish(self, number: int, rows: Sequence[Row]) -> None:
        """Complete the part with the rows of its images."""
        try:
            for file in self._files.values():
                file.finish()
            sync_directory(self.folder)
        except OSError as error:
            raise write_failure(self.folder, error) from error
        self._files.clear()
        self._index.write(number, rows)


class _ArrayFile:
    """A float16 array in a file that is renamed when it is complete.

    It is written and not mapped: a full disk is an error, and not a signal.
    """

    def __init__(self, path: Path, shape: tuple[int, ...]) -> None:
        self.path = path
        self._staged = path.with_name(f".{path.name}{STAGING_SUFFIX}")
        header = io.BytesIO()
        facts = {"descr": "<f2", "fortran_order": False, "shape": shape}
        np.lib.format.write_array_header_1_0(header, facts)
        self._start = header.tell()
        self._row = 2 * int(np.prod(shape[1:]))  # bytes
        self._size = self._start + shape[0] * self._row
        self._file = self._staged.open("wb", buffering=0)
        self._write(0, memoryview(header.getvalue()))

    def write(self, places: Sequence[int], rows: Halves) -> None:
        """Write rows; those of other places stay zeros, which take no space on most disks."""
        if places[-1] - places[0] + 1 == len(places):
            self._write(self._start + places[0] * self._row, _bytes_of(rows))
            return
        for place, row in zip(places, rows, strict=True):
            self._write(self._start + place * self._row, _bytes_of(row))

    def _write(self, offset: int, data: memoryview) -> None:
        self._file.seek(offset)
        while len(data):
            data = data[self._file.write(data) or 0 :]

    def finish(self) -> None:
        self._file.truncate(self._size)
        os.fsync(self._file.fileno())
        self._file.close()
        os.replace(self._staged, self.path)

    def discard(self) -> None:
        self._file.close()
        self._staged.unlink(missing_ok=True)


def _bytes_of(rows: Halves) -> memoryview:
    return np.ascontiguousarray(rows, dtype="<f2").reshape(-1).view(np.uint8).data
