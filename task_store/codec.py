"""The safetensors container, read with suspicion and written deterministically.

We parse the header ourselves because the file may come from anyone: every size in it is checked
against the bytes that are really there before anything is allocated. And we write it ourselves
because identity is the sha256 of the file, which must not move with a library's version.

    8 bytes    n, the header's length, little endian
    n bytes    JSON {"__metadata__": {…}, name: {"dtype", "shape", "data_offsets"}, …}
    the rest   the tensors, end to end, without holes
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from task_store.errors import MalformedBundle
from task_store.limits import Limits
from task_store.manifest import loads_strictly, shown

FloatDtype = Literal["F32", "F16"]
FloatArray = NDArray[np.float32]
HalfArray = NDArray[np.float16]
ByteArray = NDArray[np.uint8]

FLOAT_DTYPES = frozenset({"F32", "F16", "BF16"})
_ITEM_BYTES = {"F32": 4, "F16": 2, "BF16": 2, "U8": 1}
_MAX_RANK = 4
_MAX_TENSORS = 64

# What people upload by mistake, recognised by its first bytes.
_FOREIGN_FORMATS: dict[str, bytes | tuple[bytes, ...]] = {
    "a PyTorch or zip file": b"PK\x03\x04",
    "a PyTorch or pickle file": (b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05"),
    "a NumPy file": b"\x93NUMPY",
    "an HDF5 file": b"\x89HDF",
    "a gzip file": b"\x1f\x8b",
    "a JPEG image": b"\xff\xd8\xff",
    "a PNG image": b"\x89PNG",
    "a Git LFS pointer, not the file it stands for": b"version https://git-lfs",
}


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One tensor as the header describes it; offsets count from the start of the file."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int


def read_header(data: bytes, limits: Limits) -> tuple[dict[str, str], dict[str, TensorSpec]]:
    """The checked metadata and tensors of a whole file, or MalformedBundle."""
    if len(data) > limits.max_file_bytes:
        raise MalformedBundle(
            f"The file has {len(data)} bytes, more than the {limits.max_file_bytes} allowed."
        )
    length = _header_length(data, limits)
    try:
        text = data[8 : 8 + length].decode()
    except UnicodeDecodeError:
        raise MalformedBundle("The file's header is not valid UTF-8.") from None
    entries = loads_strictly(text, what="The file's header")
    metadata = entries.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        raise MalformedBundle("The file's __metadata__ must map text to text.")
    if len(entries) > _MAX_TENSORS:
        raise MalformedBundle(
            f"The file lists {len(entries)} tensors; a bundle has no more than two dozen."
        )
    base = 8 + length
    tensors = {name: _spec(name, entry, base) for name, entry in entries.items()}
    _check_layout(tensors, base, len(data))
    return metadata, tensors


def decode(data: bytes, spec: TensorSpec) -> NDArray[Any]:
    """A tensor, read-only: floats as float32. F32 and U8 are views of `data`, not copies."""
    raw = memoryview(data)[spec.start : spec.end]
    values: NDArray[Any]
    if spec.dtype == "U8":
        values = np.frombuffer(raw, dtype=np.uint8)
    elif spec.dtype == "F32":
        values = np.frombuffer(raw, dtype="<f4")
        if not values.flags.aligned:
            values = values.copy()
    elif spec.dtype == "F16":
        values = np.frombuffer(raw, dtype="<f2").astype(np.float32)
    else:
        # bfloat16 is the upper half of a float32: widening is a shift, exact for every value.
        values = (np.frombuffer(raw, dtype="<u2").astype(np.uint32) << 16).view(np.float32)
    return values.reshape(spec.shape)


def encode(tensors: Mapping[str, NDArray[Any]], metadata: Mapping[str, str]) -> bytes:
    """The file's bytes: tensors in the order of the mapping, the same bytes every time."""
    header: dict[str, Any] = {"__metadata__": dict(sorted(metadata.items()))}
    chunks: list[bytes] = []
    cursor = 0
    for name, array in tensors.items():
        dtype, chunk = _stored(array)
        header[name] = {
            "dtype": dtype,
            "shape": list(array.shape),
            "data_offsets": [cursor, cursor + len(chunk)],
        }
        cursor += len(chunk)
        chunks.append(chunk)
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    # Spaces up to a multiple of eight keep every float32 aligned for readers that map the file.
    text += b" " * (-len(text) % 8)
    return b"".join([len(text).to_bytes(8, "little"), text, *chunks])


def _header_length(data: bytes, limits: Limits) -> int:
    length = int.from_bytes(data[:8], "little")
    if len(data) < 10:
        raise MalformedBundle(f"The file has only {len(data)} bytes: it is empty or truncated.")
    if data[8:9] != b"{":
        # Only then: a genuine file with a header of 640 bytes starts like a pickle, with 80 02.
        for name, magic in _FOREIGN_FORMATS.items():
            if data.startswith(magic):
                hint = "; convert a checkpoint with `engram import`" if "PyTorch" in name else ""
                raise MalformedBundle(f"This looks like {name}, not a safetensors bundle{hint}.")
    if length > limits.max_header_bytes:
        raise MalformedBundle(
            f"The file announces a header of {length} bytes, more than the "
            f"{limits.max_header_bytes} allowed: it is not a bundle or is damaged."
        )
    if length > len(data) - 8:
        raise MalformedBundle(
            f"The file announces a header of {length} bytes and has {len(data) - 8}: "
            f"it is truncated."
        )
    if length < 2 or data[8:9] != b"{":
        raise MalformedBundle("The file's header does not start with '{': it is not safetensors.")
    return length


def _spec(name: str, entry: object, base: int) -> TensorSpec:
    where = f"Tensor '{shown(name)}'"
    if not isinstance(entry, dict) or entry.keys() != {"dtype", "shape", "data_offsets"}:
        raise MalformedBundle(f"{where} must have exactly dtype, shape and data_offsets.")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in _ITEM_BYTES:
        raise MalformedBundle(
            f"{where} is stored as {shown(str(dtype))}; only {', '.join(_ITEM_BYTES)} are accepted."
        )
    if not _is_naturals(shape) or not 1 <= len(shape) <= _MAX_RANK or 0 in shape:
        raise MalformedBundle(
            f"{where} has the shape {shown(str(shape))}; one to four sizes above zero are needed."
        )
    if not _is_naturals(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise MalformedBundle(f"{where} has the data_offsets {shown(str(offsets))}.")
    size = _ITEM_BYTES[dtype]
    for side in shape:
        size *= side
    if size != offsets[1] - offsets[0]:
        raise MalformedBundle(
            f"{where} of shape {shown(str(shape))} and type {dtype} needs {shown(str(size))} "
            f"bytes, and its data_offsets span {shown(str(offsets[1] - offsets[0]))}."
        )
    return TensorSpec(dtype, tuple(shape), base + offsets[0], base + offsets[1])


def _is_naturals(value: object) -> bool:
    # bool is an int in Python; `true` is no size. 2**48 keeps later products printable.
    return isinstance(value, list) and all(type(x) is int and 0 <= x < 2**48 for x in value)


def _check_layout(tensors: Mapping[str, TensorSpec], base: int, end: int) -> None:
    """No holes, no overlaps, nothing after: hidden bytes would be part of the identity."""
    cursor = base
    for name, spec in sorted(tensors.items(), key=lambda item: item[1].start):
        if spec.start != cursor:
            raise MalformedBundle(
                f"Tensor '{shown(name)}' starts at byte {spec.start - base} of the data and should "
                f"start at {cursor - base}: tensors must follow each other without holes."
            )
        cursor = spec.end
    if cursor > end:
        raise MalformedBundle(
            f"The header promises {cursor - base} bytes of tensors and the file has {end - base}: "
            f"it is truncated."
        )
    if cursor < end:
        raise MalformedBundle(f"The file has {end - cursor} bytes that no tensor claims.")


def _stored(array: NDArray[Any]) -> tuple[str, bytes]:
    if array.dtype == np.uint8:
        return "U8", array.tobytes()
    if array.dtype == np.float16:
        return "F16", array.astype("<f2").tobytes()
    return "F32", array.astype("<f4").tobytes()
