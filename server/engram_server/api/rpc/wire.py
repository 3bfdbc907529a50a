"""Separate the payloads of an inference request from the rest, on protobuf's wire format.

protobuf would copy each payload twice, and would expand some messages to many times their size
while it holds the interpreter lock. Here a payload is a view of the message, and protobuf parses
only the rest, whose size is limited.
"""

import struct
from collections.abc import Iterator
from typing import Final, NamedTuple

from engram_server.errors import InvalidRequest, MalformedRequest

# The request without payloads: names, shapes, parameters and requested outputs.
MAX_HEAD_BYTES: Final = 256 * 1024
MAX_FIELDS: Final = 8192

# Numbers of fields, as in open_inference.proto.
_INPUTS, _RAW_INPUT_CONTENTS = 5, 7
_CONTENTS = 5  # of an input
_CONTENTS_OF: Final = {"FP32": (6, "fp32_contents"), "BYTES": (8, "bytes_contents")}

_VARINT, _EIGHT_BYTES, _LENGTH, _FOUR_BYTES = 0, 1, 2, 5
_ELEMENT_LENGTH = struct.Struct("<I")


class Field(NamedTuple):
    number: int
    wire_type: int
    encoded: memoryview  # with its number
    value: memoryview


class SplitRequest(NamedTuple):
    """A ModelInferRequest. `contents` has the parts of each input's `contents`, in order."""

    head: bytes
    raw: list[memoryview]
    contents: list[list[memoryview]]


def split_request(message: bytes) -> SplitRequest:
    """Split a message into its payloads and what protobuf may parse."""
    head = bytearray()
    raw: list[memoryview] = []
    contents: list[list[memoryview]] = []
    for number, wire_type, encoded, value in _fields(memoryview(message)):
        if (number, wire_type) == (_RAW_INPUT_CONTENTS, _LENGTH):
            raw.append(value)
        elif (number, wire_type) == (_INPUTS, _LENGTH):
            rest, parts = _split_input(value)
            _append(head, bytes([_INPUTS << 3 | _LENGTH]) + _encode_varint(len(rest)) + rest)
            contents.append(parts)
        else:
            _append(head, encoded)
    return SplitRequest(bytes(head), raw, contents)


def _split_input(message: memoryview) -> tuple[bytes, list[memoryview]]:
    rest = bytearray()
    parts: list[memoryview] = []
    for number, wire_type, encoded, value in _fields(message):
        if (number, wire_type) == (_CONTENTS, _LENGTH):
            parts.append(value)
        else:
            _append(rest, encoded)
    return bytes(rest), parts


def _append(head: bytearray, encoded: bytes | memoryview) -> None:
    if len(head) + len(encoded) > MAX_HEAD_BYTES:
        raise InvalidRequest(
            f"The request has more than {MAX_HEAD_BYTES} bytes of names, shapes and parameters."
        )
    head += encoded


def join_contents(name: str, datatype: str, parts: list[memoryview]) -> memoryview | None:
    """The typed contents of an input as `raw_input_contents` would have them.

    None for datatypes that no input has.
    """
    if datatype not in _CONTENTS_OF:
        return None
    expected, field = _CONTENTS_OF[datatype]
    values: list[bytes | memoryview] = []
    for part in parts:
        for number, wire_type, _, value in _fields(part):
            if number != expected or wire_type in (_VARINT, _EIGHT_BYTES):
                raise InvalidRequest(
                    f"Input '{name}' has the datatype {datatype}: send its data in {field}."
                )
            if datatype == "BYTES":
                values.append(_ELEMENT_LENGTH.pack(len(value)))
            values.append(value)
    return memoryview(b"".join(values))


def _fields(message: memoryview) -> Iterator[Field]:
    """The fields of a message, one level deep; MalformedRequest if it is not a message."""
    start, count = 0, 0
    while start < len(message):
        count += 1
        if count > MAX_FIELDS:
            raise InvalidRequest(
                f"A message has more than {MAX_FIELDS} fields. Use packed fields, or "
                f"raw_input_contents."
            )
        key, begin = _decode_varint(message, start)
        wire_type, end = key & 7, len(message) + 1
        if wire_type == _VARINT:
            end = _decode_varint(message, begin)[1]
        elif wire_type == _EIGHT_BYTES:
            end = begin + 8
        elif wire_type == _FOUR_BYTES:
            end = begin + 4
        elif wire_type == _LENGTH:
            length, begin = _decode_varint(message, begin)
            end = begin + length
        if end > len(message):  # also for other wire types
            raise _malformed()
        yield Field(key >> 3, wire_type, message[start:end], message[begin:end])
        start = end


def _decode_varint(message: memoryview, start: int) -> tuple[int, int]:
    """An integer, and where it ends."""
    value = 0
    for position, byte in enumerate(message[start : start + 10]):
        value |= (byte & 0x7F) << 7 * position
        if byte < 0x80:
            return value, start + position + 1
    raise _malformed()


def _encode_varint(value: int) -> bytes:
    encoded = bytearray()
    while value >= 0x80:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    encoded.append(value)
    return bytes(encoded)


def _malformed() -> MalformedRequest:
    return MalformedRequest("The message is not a valid ModelInferRequest.")
