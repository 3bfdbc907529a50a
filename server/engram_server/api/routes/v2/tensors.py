"""Tensors of the Open Inference Protocol, as JSON or in the binary-data extension.

A body is JSON. With the extension, the raw bytes of its tensors follow in the order in which they
are listed, and the header `Inference-Header-Content-Length` has the length of the JSON. FP32 is
little-endian and row-major; each element of BYTES is preceded by its length in four bytes.
"""

import binascii
import math
import struct
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeVar

import numpy as np
from engram_bundle.limits import readable_size
from pydantic import BaseModel, BeforeValidator, Field

from engram_server.api.bodies import decode_base64
from engram_server.api.direct import Json, encode, encode_in_parts
from engram_server.api.inference import rounded
from engram_server.engine.types import Floats
from engram_server.errors import BodyTooLarge, InvalidRequest, MalformedRequest

T = TypeVar("T")

HEADER_LENGTH = "Inference-Header-Content-Length"

_LENGTH = struct.Struct("<I")
ENCODED_AT_ONCE = 16384  # values
_AUTOMATIC = zlib.MAX_WBITS | 32  # detects gzip and zlib by their first bytes

Size = Annotated[int, Field(strict=True, ge=0, lt=2**63)]
Text = Annotated[str, Field(max_length=1024)]


def _null_is_empty(value: object) -> object:
    return {} if value is None else value


# Some clients write `"parameters": null`.
OrNull = Annotated[T, BeforeValidator(_null_is_empty)]


class InputParameters(BaseModel):
    """`binary_data_size`: the data follows the JSON in this many bytes."""

    binary_data_size: Size | None = None
    shared_memory_region: Any = None


class InputTensor(BaseModel):
    """One input, with its data in the JSON or, with `binary_data_size`, behind it."""

    name: Text
    shape: Annotated[list[Size], Field(max_length=8, fail_fast=True)]
    datatype: Text
    parameters: OrNull[InputParameters] = InputParameters()
    data: Any = None


def decompress(body: bytes, limit: int) -> bytes:
    """Decompress a gzip or deflate body; BodyTooLarge beyond the limit."""
    stream = zlib.decompressobj(_AUTOMATIC)
    try:
        plain = stream.decompress(body, limit + 1)
    except zlib.error as error:
        raise MalformedRequest(f"The compressed body cannot be decompressed: {error}.") from None
    if len(plain) > limit:
        raise BodyTooLarge(f"The decompressed body exceeds the limit of {readable_size(limit)}.")
    if not stream.eof or stream.unused_data:
        raise MalformedRequest("The compressed body is truncated, or followed by other data.")
    return plain


def split_body(body: bytes, header_length: str | None) -> tuple[bytes, memoryview]:
    """The JSON of a body, and the binary data behind it."""
    if header_length is None:
        return body, memoryview(b"")
    if not (header_length.isascii() and header_length.isdecimal()):
        raise MalformedRequest(f"{HEADER_LENGTH} must be the number of bytes of the JSON.")
    length = int(header_length[:20])
    if length > len(body):
        raise MalformedRequest(
            f"{HEADER_LENGTH} is {length}, and the body has only {len(body)} bytes."
        )
    return body[:length], memoryview(body)[length:]


def assign_binary(inputs: Sequence[InputTensor], binary: memoryview) -> dict[str, memoryview]:
    """The binary data of each input that has some, by name."""
    by_name: dict[str, memoryview] = {}
    start = 0
    for each in inputs:
        size = each.parameters.binary_data_size
        if size is None:
            continue
        if size > len(binary) - start:
            raise InvalidRequest(
                f"Input '{each.name}' has a binary_data_size of {size}, and only "
                f"{len(binary) - start} bytes follow: check {HEADER_LENGTH} and the body."
            )
        by_name[each.name] = binary[start : start + size]
        start += size
    if start != len(binary):
        raise InvalidRequest(
            f"{len(binary) - start} bytes follow that belong to no input: check binary_data_size."
        )
    return by_name


def read_floats(tensor: InputTensor, binary: memoryview | None) -> Floats:
    """An FP32 tensor in its shape; InvalidRequest for values that are not finite."""
    values = _floats_of_json(tensor) if binary is None else _floats_of_bytes(tensor, binary)
    _check_count(tensor, values.size, "values")
    if not values.size:  # its shape may be one that no array can have
        raise InvalidRequest(f"Input '{tensor.name}' has the shape {tensor.shape}: no values.")
    finite = np.isfinite(values)
    if not finite.all():
        index = int(finite.argmin())
        raise InvalidRequest(
            f"Input '{tensor.name}' has values that are not finite: image "
            f"{index // math.prod(tensor.shape[1:])} has {values[index]}."
        )
    return values.reshape(tensor.shape)


def read_elements(tensor: InputTensor, binary: memoryview | None) -> list[bytes]:
    """The elements of a BYTES tensor, in order; in JSON they are base64."""
    if binary is not None:
        return _elements_of_bytes(tensor, binary)
    elements = _elements_of_json(tensor)
    _check_count(tensor, len(elements), "elements")
    return elements


def _check_count(tensor: InputTensor, count: int, what: str) -> None:
    expected = math.prod(tensor.shape)
    if count != expected:
        raise InvalidRequest(
            f"Input '{tensor.name}' has {count} {what}, and its shape {tensor.shape} requires "
            f"{expected}."
        )


def _floats_of_bytes(tensor: InputTensor, binary: memoryview) -> Floats:
    if len(binary) % 4:
        raise InvalidRequest(
            f"Input '{tensor.name}' has {len(binary)} bytes, which is not a multiple of four."
        )
    return np.frombuffer(binary, dtype="<f4")


def _floats_of_json(tensor: InputTensor) -> Floats:
    flat = _flat(tensor.data, len(tensor.shape))
    # Check each value: numpy would parse text as numbers.
    if flat is None or not all(type(value) in (int, float) for value in flat):
        raise InvalidRequest(
            f"The data of input '{tensor.name}' must be a list of numbers, flat or in its shape."
        )
    try:
        with np.errstate(over="ignore"):  # overflow is rejected later as not finite
            return np.array(flat, dtype=np.float64).astype(np.float32)
    except OverflowError:
        return np.full(len(flat), np.inf, dtype=np.float32)


def _elements_of_bytes(tensor: InputTensor, binary: memoryview) -> list[bytes]:
    elements: list[bytes] = []
    start = 0
    for number in range(math.prod(tensor.shape)):
        begin = end = start + _LENGTH.size
        if end <= len(binary):
            end += _LENGTH.unpack_from(binary, start)[0]
        if end > len(binary):
            raise InvalidRequest(
                f"Element {number} of input '{tensor.name}' ends beyond the {len(binary)} bytes of "
                f"the tensor: each must be preceded by its length (four bytes, little-endian)."
            )
        elements.append(bytes(binary[begin:end]))
        start = end
    if start != len(binary):
        raise InvalidRequest(
            f"Input '{tensor.name}' has {len(binary) - start} bytes beyond the elements of its "
            f"shape {tensor.shape}."
        )
    return elements


def _elements_of_json(tensor: InputTensor) -> list[bytes]:
    elements: list[bytes] = []
    for text in _flat(tensor.data, len(tensor.shape)) or [None]:
        if not isinstance(text, str):
            raise InvalidRequest(
                f"The data of input '{tensor.name}' must be a list of base64 strings; use the "
                f"binary-data extension to send raw bytes."
            )
        try:
            elements.append(decode_base64(text))
        except (binascii.Error, UnicodeEncodeError) as error:
            raise InvalidRequest(
                f"Element {len(elements)} of input '{tensor.name}' is not valid base64: {error}."
            ) from None
    return elements


def _flat(data: object, dimensions: int) -> list[object] | None:
    """Flatten nested lists, at most as deep as there are dimensions; None if not a list."""
    if not isinstance(data, list):
        return None
    flat: list[object] = data
    for _ in range(dimensions - 1):
        flat = [each for row in flat for each in (row if isinstance(row, list) else [row])]
    return flat


@dataclass(frozen=True, slots=True)
class OutputTensor:
    """One output: numbers (N, K), or text of shape (N, k)."""

    name: str
    values: Floats | Sequence[Sequence[str]]
    binary: bool
    parameters: Mapping[str, object]

    @property
    def datatype(self) -> Literal["FP32", "BYTES"]:
        return "FP32" if isinstance(self.values, np.ndarray) else "BYTES"

    @property
    def shape(self) -> list[int]:
        return [len(self.values), len(self.values[0])]

    def to_bytes(self) -> bytes:
        if isinstance(self.values, np.ndarray):
            return self.values.astype("<f4", copy=False).tobytes()
        texts = (text.encode() for row in self.values for text in row)
        return b"".join(_LENGTH.pack(len(text)) + text for text in texts)

    def to_list(self) -> list[float] | list[str]:
        if isinstance(self.values, np.ndarray):
            flat: list[float] = self.values.ravel().tolist()
            return [rounded(value) for value in flat]
        return [text for row in self.values for text in row]


def write_body(answer: Json, outputs: Sequence[OutputTensor]) -> tuple[bytes, int | None]:
    """A body, and the length of its JSON if binary data follows."""
    listed: list[Json] = []
    tail: list[bytes] = []
    for each in outputs:
        entry: Json = {"name": each.name, "datatype": each.datatype, "shape": each.shape}
        parameters = dict(each.parameters)
        if each.binary:
            tail.append(each.to_bytes())
            parameters["binary_data_size"] = len(tail[-1])
        if parameters:
            entry["parameters"] = parameters
        if not each.binary:
            entry["data"] = each.to_list()
        listed.append(entry)
    if sum(math.prod(each.shape) for each in outputs if not each.binary) <= ENCODED_AT_ONCE:
        head = encode({**answer, "outputs": listed})
    else:
        head = encode_in_parts(answer, "outputs", map(_encode_in_parts, listed))
    return b"".join([head, *tail]), len(head) if tail else None


def _encode_in_parts(entry: Json) -> bytes:
    """Encode an output in parts: the encoder holds the interpreter lock."""
    data = entry.pop("data", None)
    if not isinstance(data, list):
        return encode(entry)
    starts = range(0, len(data), ENCODED_AT_ONCE)
    parts = (encode(data[start : start + ENCODED_AT_ONCE])[1:-1] for start in starts)
    return encode_in_parts(entry, "data", parts)
