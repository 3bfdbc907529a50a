"""The safetensors container, read and written without a library.

Files are untrusted: every size is checked before anything is allocated. The SHA-256 of a file is
the bundle's identity, so its bytes must not change with the version of a library.

    8 bytes    n, the header's length, little endian
    n bytes    JSON {"__metadata__": {…}, name: {"dtype", "shape", "data_offsets"}, …}
    the rest   the tensors, end to end, without holes
"""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from engram_bundle.errors import MalformedBundle
from engram_bundle.limits import BundleLimits, readable_size
from engram_bundle.schema import TENSORS
from engram_bundle.untrusted import parse_json, printable

FloatDtype = Literal["F32", "F16"]

# The NumPy dtype of each dtype in a file; BF16 is read as its bits.
_DTYPES = {"F32": "<f4", "F16": "<f2", "BF16": "<u2", "U8": "|u1"}

# Files that are often uploaded by mistake, by their first bytes.
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
class StoredTensor:
    """One tensor as the header describes it; offsets count from the start of the file."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int


def read_header(
    data: bytes, limits: BundleLimits
) -> tuple[dict[str, str], dict[str, StoredTensor]]:
    """Read and check the metadata and tensors of a whole file, or raise MalformedBundle."""
    check_file_size(len(data), limits)
    length = _header_length(data, limits)
    try:
        text = data[8 : 8 + length].decode()
    except UnicodeDecodeError:
        raise MalformedBundle("The file's header is not valid UTF-8.") from None
    entries = parse_json(text, what="The file's header")
    metadata = entries.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        raise MalformedBundle("The file's __metadata__ must map text to text.")
    if len(entries) > len(TENSORS):
        raise MalformedBundle(
            f"The file has {len(entries)} tensors; a bundle has at most {len(TENSORS)}."
        )
    base = 8 + length
    tensors = {name: _stored_tensor(name, entry, base) for name, entry in entries.items()}
    _check_layout(tensors, base, len(data))
    return metadata, tensors


def check_file_size(size: int, limits: BundleLimits) -> None:
    if size > limits.max_file_bytes:
        raise MalformedBundle(
            f"The file has {readable_size(size)}; at most {readable_size(limits.max_file_bytes)} "
            f"are allowed."
        )


def decode(data: bytes, spec: StoredTensor) -> NDArray[Any]:
    """Return a read-only tensor, floats as float32. F32 and U8 are views of `data`, not copies."""
    raw = memoryview(data)[spec.start : spec.end]
    values: NDArray[Any] = np.frombuffer(raw, dtype=_DTYPES[spec.dtype])
    if spec.dtype == "BF16":
        # bfloat16 is the upper half of a float32: widening is a shift, exact for every value.
        values = (values.astype(np.uint32) << 16).view(np.float32)
    elif spec.dtype == "F16":
        values = values.astype(np.float32)
    elif not values.flags.aligned:
        values = values.copy()
    return values.reshape(spec.shape)


def encode(tensors: Mapping[str, NDArray[Any]], metadata: Mapping[str, str]) -> bytes:
    """Write a file with the tensors in the order of the mapping, the same bytes every time."""
    header: dict[str, Any] = {"__metadata__": dict(sorted(metadata.items()))}
    chunks: list[bytes] = []
    cursor = 0
    for name, array in tensors.items():
        dtype = {"uint8": "U8", "float16": "F16"}.get(array.dtype.name, "F32")
        chunk = array.astype(_DTYPES[dtype]).tobytes()
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


def _header_length(data: bytes, limits: BundleLimits) -> int:
    length = int.from_bytes(data[:8], "little")
    if len(data) < 10:
        raise MalformedBundle(f"The file has only {len(data)} bytes: it is empty or truncated.")
    if data[8:9] != b"{":
        # Only now, because a valid file with a header of 640 bytes starts like a pickle: 80 02.
        for name, magic in _FOREIGN_FORMATS.items():
            if data.startswith(magic):
                hint = "; convert a checkpoint with `engram import`" if "PyTorch" in name else ""
                raise MalformedBundle(f"This looks like {name}, not a safetensors bundle{hint}.")
    if length > limits.max_header_bytes:
        raise MalformedBundle(
            f"The file declares a header of {length} bytes; at most {limits.max_header_bytes} are "
            f"allowed: it is not a bundle or is damaged."
        )
    if length > len(data) - 8:
        raise MalformedBundle(
            f"The file declares a header of {length} bytes but has only {len(data) - 8}: "
            f"it is truncated."
        )
    if length < 2 or data[8:9] != b"{":
        raise MalformedBundle("The file's header does not start with '{': it is not safetensors.")
    return length


def _stored_tensor(name: str, entry: object, base: int) -> StoredTensor:
    where = f"Tensor '{printable(name)}'"
    if not isinstance(entry, dict) or entry.keys() != {"dtype", "shape", "data_offsets"}:
        raise MalformedBundle(f"{where} must have exactly dtype, shape and data_offsets.")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in _DTYPES:
        raise MalformedBundle(
            f"{where} is stored as {printable(str(dtype))}; it must be one of {', '.join(_DTYPES)}."
        )
    if not _is_naturals(shape) or not 1 <= len(shape) <= 4 or 0 in shape:
        raise MalformedBundle(
            f"{where} has shape {printable(str(shape))}; it needs one to four sizes above zero."
        )
    if not _is_naturals(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise MalformedBundle(f"{where} has invalid data_offsets {printable(str(offsets))}.")
    size = np.dtype(_DTYPES[dtype]).itemsize * math.prod(shape)
    if size != offsets[1] - offsets[0]:
        raise MalformedBundle(
            f"{where} of shape {printable(str(shape))} and type {dtype} needs {size} bytes, but "
            f"its data_offsets span {offsets[1] - offsets[0]}."
        )
    return StoredTensor(dtype, tuple(shape), base + offsets[0], base + offsets[1])


def _is_naturals(value: object) -> bool:
    # `type`, because bool is an int in Python. 2**48 keeps later products printable.
    return isinstance(value, list) and all(type(x) is int and 0 <= x < 2**48 for x in value)


def _check_layout(tensors: Mapping[str, StoredTensor], base: int, end: int) -> None:
    """Reject holes, overlaps and trailing bytes, which would hide data in the file."""
    cursor = base
    for name, spec in sorted(tensors.items(), key=lambda item: item[1].start):
        if spec.start != cursor:
            raise MalformedBundle(
                f"Tensor '{printable(name)}' starts at byte {spec.start - base} of the data, not "
                f"at {cursor - base}: tensors must follow each other without holes."
            )
        cursor = spec.end
    if cursor > end:
        raise MalformedBundle(
            f"The header declares {cursor - base} bytes of tensors but the file has {end - base}: "
            f"it is truncated."
        )
    if cursor < end:
        raise MalformedBundle(f"The file has {end - cursor} bytes that belong to no tensor.")
