"""Tensors on the wire, as JSON or in the binary-data extension.

A body is JSON, and with the extension the raw bytes of its tensors follow, in the order in which
they are listed; the header `Inference-Header-Content-Length` says where the JSON ends. FP32 is
little-endian and row-major; each element of BYTES has its length, as four bytes, in front.
"""

import binascii
import json
import math
import struct
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeVar

import numpy as np
from pydantic import BaseModel, BeforeValidator, Field

from server.api.http import decode_base64
from server.api.predict import Json, rounded
from server.api.problems import BodyTooLarge, InvalidRequest, MalformedRequest
from server.engine.types import Floats

T = TypeVar("T")

HEADER_LENGTH = "Inference-Header-Content-Length"

_LENGTH = struct.Struct("<I")
_ENCODED_AT_ONCE = 16384
_encode = json.JSONEncoder(separators=(",", ":")).encode
_AUTOMATIC = zlib.MAX_WBITS | 32  # gzip and zlib, told apart by their first bytes

Size = Annotated[int, Field(strict=True, ge=0, lt=2**63)]
Text = Annotated[str, Field(max_length=1024)]


def _null_is_empty(value: object) -> object:
    return {} if value is None else value


# Some clients write `"parameters": null`.
OrNull = Annotated[T, BeforeValidator(_null_is_empty)]


class InputParameters(BaseModel):
    """`binary_data_size`: the data follows the JSON and has this many bytes."""

    binary_data_size: Size | None = None
    shared_memory_region: Any = None


class InputTensor(BaseModel):
    """One input; its data is here or, with `binary_data_size`, behind the JSON."""

    name: Text
    shape: Annotated[list[Size], Field(max_length=8, fail_fast=True)]
    datatype: Text
    parameters: OrNull[InputParameters] = InputParameters()
    data: Any = None


# Reading


def decompress(body: bytes, limit: int) -> bytes:
    """A gzip or deflate body as it was; BodyTooLarge before it is."""
    stream = zlib.decompressobj(_AUTOMATIC)
    try:
        plain = stream.decompress(body, limit + 1)
    except zlib.error as error:
        raise MalformedRequest(f"The compressed body cannot be read: {error}.") from None
    if len(plain) > limit:
        raise BodyTooLarge(f"The body has more than the {limit} bytes allowed here, unpacked.")
    if not stream.eof or stream.unused_data:
        raise MalformedRequest("The compressed body is cut short, or something follows it.")
    return plain


def split_body(body: bytes, header_length: str | None) -> tuple[bytes, memoryview]:
    """The JSON of a body, and what follows it."""
    if header_length is None:
        return body, memoryview(b"")
    if not (header_length.isascii() and header_length.isdecimal()):
        raise MalformedRequest(f"{HEADER_LENGTH} is the number of bytes of the JSON.")
    length = int(header_length[:20])
    if length > len(body):
        raise MalformedRequest(
            f"{HEADER_LENGTH} says {length} bytes of JSON, and the body has {len(body)}."
        )
    return body[:length], memoryview(body)[length:]


def assign_binary(inputs: Sequence[InputTensor], binary: memoryview) -> dict[str, memoryview]:
    """By name, the bytes of the inputs that have theirs behind the JSON."""
    by_name: dict[str, memoryview] = {}
    start = 0
    for each in inputs:
        size = each.parameters.binary_data_size
        if size is None:
            continue
        if size > len(binary) - start:
            raise InvalidRequest(
                f"Input '{each.name}' has {size} bytes by its binary_data_size, and only "
                f"{len(binary) - start} follow: is {HEADER_LENGTH} set, and the body whole?"
            )
        by_name[each.name] = binary[start : start + size]
        start += size
    if start != len(binary):
        raise InvalidRequest(
            f"{len(binary) - start} bytes follow that no input's binary_data_size accounts for."
        )
    return by_name


def read_floats(given: InputTensor, binary: memoryview | None) -> Floats:
    """An FP32 tensor in its shape; only finite values."""
    values = _floats_of_json(given) if binary is None else _floats_of_bytes(given, binary)
    _check_count(given, values.size, "values")
    if not values.size:  # whose shape may be anything, even one that no array can have
        raise InvalidRequest(f"Input '{given.name}' has the shape {given.shape}, so no values.")
    finite = np.isfinite(values)
    if not finite.all():
        place = int(finite.argmin())
        raise InvalidRequest(
            f"Input '{given.name}' has values that are not finite numbers: image "
            f"{place // math.prod(given.shape[1:])} has {values[place]}."
        )
    return values.reshape(given.shape)


def read_elements(given: InputTensor, binary: memoryview | None) -> list[bytes]:
    """The elements of a BYTES tensor, in order. In JSON they are base64: no text holds an image."""
    if binary is not None:
        return _elements_of_bytes(given, binary)
    elements = _elements_of_json(given)
    _check_count(given, len(elements), "elements")
    return elements


def _check_count(given: InputTensor, count: int, what: str) -> None:
    expected = math.prod(given.shape)
    if count != expected:
        raise InvalidRequest(
            f"Input '{given.name}' has {count} {what}, and its shape {given.shape} means "
            f"{expected}."
        )


def _floats_of_bytes(given: InputTensor, binary: memoryview) -> Floats:
    if len(binary) % 4:
        raise InvalidRequest(
            f"Input '{given.name}' has {len(binary)} bytes, which is no number of FP32 values."
        )
    return np.frombuffer(binary, dtype="<f4")


def _floats_of_json(given: InputTensor) -> Floats:
    flat = _flat(given.data, len(given.shape))
    # Looked at one by one: numpy would make numbers of text, and much memory of long text.
    if flat is None or not all(type(value) in (int, float) for value in flat):
        raise InvalidRequest(
            f"The data of input '{given.name}' must be a list of numbers, flat or in its shape."
        )
    try:
        with np.errstate(over="ignore"):  # what is too large for FP32 is refused as not finite
            return np.array(flat, dtype=np.float64).astype(np.float32)
    except OverflowError:
        return np.full(len(flat), np.inf, dtype=np.float32)


def _elements_of_bytes(given: InputTensor, binary: memoryview) -> list[bytes]:
    elements: list[bytes] = []
    start = 0
    for number in range(math.prod(given.shape)):
        begin = end = start + _LENGTH.size
        if end <= len(binary):
            end += _LENGTH.unpack_from(binary, start)[0]
        if end > len(binary):
            raise InvalidRequest(
                f"Element {number} of input '{given.name}' ends after the {len(binary)} bytes of "
                f"the tensor: each has its length, as four bytes (little-endian), in front."
            )
        elements.append(bytes(binary[begin:end]))
        start = end
    if start != len(binary):
        raise InvalidRequest(
            f"Input '{given.name}' has {len(binary) - start} bytes more than its shape "
            f"{given.shape} has elements."
        )
    return elements


def _elements_of_json(given: InputTensor) -> list[bytes]:
    elements: list[bytes] = []
    for text in _flat(given.data, len(given.shape)) or [None]:
        if not isinstance(text, str):
            raise InvalidRequest(
                f"The data of input '{given.name}' must be a list of text in base64; the "
                f"binary-data extension takes the bytes as they are."
            )
        try:
            elements.append(decode_base64(text))
        except (binascii.Error, UnicodeEncodeError) as error:
            raise InvalidRequest(
                f"Element {len(elements)} of input '{given.name}' is not valid base64: {error}."
            ) from None
    return elements


def _flat(data: object, dimensions: int) -> list[object] | None:
    """What is in lists of lists, at most as deep as there are dimensions; None if it is no list."""
    if not isinstance(data, list):
        return None
    flat: list[object] = data
    for _ in range(dimensions - 1):
        flat = [each for row in flat for each in (row if isinstance(row, list) else [row])]
    return flat


# Writing


@dataclass(frozen=True, slots=True)
class OutputTensor:
    """One output of an answer: numbers (N, K), or text of the shape (N, k)."""

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
    """A body, and the length of its JSON where something follows it."""
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
    if sum(math.prod(each.shape) for each in outputs if not each.binary) <= _ENCODED_AT_ONCE:
        text = _encode({**answer, "outputs": listed})
    else:
        text = f'{_encode(answer)[:-1]},"outputs":[{",".join(map(_encode_in_pieces, listed))}]}}'
    head = text.encode()
    return b"".join([head, *tail]), len(head) if tail else None


def _encode_in_pieces(entry: Json) -> str:
    """An output, its data a few elements at a time: the encoder lets nothing else run."""
    data = entry.pop("data", None)
    if not isinstance(data, list):
        return _encode(entry)
    starts = range(0, len(data), _ENCODED_AT_ONCE)
    pieces = ",".join(_encode(data[start : start + _ENCODED_AT_ONCE])[1:-1] for start in starts)
    return f'{_encode(entry)[:-1]},"data":[{pieces}]}}'
