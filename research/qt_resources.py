"""Reads Qt resource files (`.rcc`): GCompris keeps its photos in them."""

import struct
import zlib
from collections.abc import Iterator
from pathlib import Path

_HEADER = struct.Struct(">4sIIII")  # magic, version, and where tree, data and names begin
_FOLDER, _DEFLATED, _ZSTD = 2, 1, 4


def files_in(path: Path) -> Iterator[tuple[str, bytes]]:
    """The path and content of every file in it; those packed with zstd are left out."""
    raw = path.read_bytes()
    magic, version, tree, data, names = _HEADER.unpack_from(raw)
    if magic != b"qres":
        raise ValueError(f"'{path.name}' is no Qt resource file")
    row = 14 if version == 1 else 22  # since the second version with a time at the end

    def name(at: int) -> str:
        (length,) = struct.unpack_from(">H", raw, names + at)
        start = names + at + 6  # length and hash
        return raw[start : start + 2 * length].decode("utf-16-be")

    def walk(place: int, folder: str) -> Iterator[tuple[str, bytes]]:
        at, flags = struct.unpack_from(">IH", raw, tree + place * row)
        here = f"{folder}/{name(at)}" if place else ""
        first, second = struct.unpack_from(">II", raw, tree + place * row + 6)
        if flags & _FOLDER:
            for child in range(second, second + first):
                yield from walk(child, here)
        elif not flags & _ZSTD:
            start = data + second
            (length,) = struct.unpack_from(">I", raw, start)
            content = raw[start + 4 : start + 4 + length]
            yield here, zlib.decompress(content[4:]) if flags & _DEFLATED else content

    yield from walk(0, "")
