"""Bounds on the work that one file can cause before and while it is decoded.

Pixels and bytes bound most decoders: 64 million pixels and 32 MiB, the defaults, take 0.2 to 4
seconds on one core. The files below need far more work, so they are refused, or stopped.

| file                                                  | bound                               |
|-------------------------------------------------------|-------------------------------------|
| JPEG with many scans, 9 ms each at 8000 × 8000        | `MAX_SCANS`                         |
| JPEG with arithmetic coding, slow and never used      | refused                             |
| TIFF with many strips or tiles, 10 µs each            | `MAX_STRIPS`                        |
| formats that Pillow decodes in Python                 | `PYTHON_PIXELS`                     |
| HEIC made of more pictures than its size explains     | `heif.MAX_CODED_SHARE`              |
| thousands of segments, chunks or comments             | `MAX_READS`, `MAX_SEGMENTS`         |
| any other slow file                                   | `Stop`, called at each read         |

A decoder cannot be interrupted while it works on one block of a file (64 KiB; all of a compressed
TIFF, a WebP, an AVIF or a HEIC; all of a JPEG with one scan up to `MAX_BLOCK_PIXELS` and
`MAX_BLOCK_BYTES`), so `Stop` alone would not do. Worker processes could be killed, but they cost
more: 4.2 ms of CPU time for a JPEG of 640 × 480 pixels and 56 kB, where threads need 3.8 ms, and
94 MiB of memory for each process.
"""

import io
import re
import struct
from collections.abc import Callable, Iterable, Mapping

import numpy as np

from engram_server.errors import ImageTooLarge, UnreadableImage

# Raises an error to stop decoding. Called often.
Stop = Callable[[], None]

MAX_SCANS = 64  # ordinary progressive JPEGs have about 10
MAX_SEGMENTS = 65_536
MAX_STRIPS = 65_536
MAX_READS = 1_000_000
# Of a JPEG with one scan that is decoded without a stop: at most 0.15 seconds.
MAX_BLOCK_PIXELS = 16_000_000
MAX_BLOCK_BYTES = 16 << 20
# The most pixels of each decoder that Pillow has in Python; 400,000 take about a second.
PYTHON_PIXELS: Mapping[str, int] = {"ppm": 400_000, "ppm_plain": 0, "bmp_rle": 0}
_PYTHON_ADVICE: Mapping[str, str] = {
    "ppm": "PPM images with a maximum other than 255 are limited to {limit} pixels; this one has "
    "{pixels}. Save it with a maximum of 255, or as PNG.",
    "ppm_plain": "Plain-text PPM, PGM and PBM images are not supported. Save it in binary form, or "
    "as PNG.",
    "bmp_rle": "BMP images with run-length encoding are not supported. Save it without "
    "compression, or as PNG.",
}


class BoundedFile(io.BytesIO):
    """A file in memory that counts reads and can be stopped at each of them."""

    def __init__(self, data: bytes, stop: Stop) -> None:
        super().__init__(data)
        self.nbytes = len(data)
        self._stop = stop
        self._reads = 0

    def read(self, size: int | None = -1, /) -> bytes:
        self._reads += 1
        if self._reads > MAX_READS:
            raise ImageTooLarge(
                f"The file has too many parts: decoding it takes more than {MAX_READS} reads. Save "
                f"it again with another program."
            )
        self._stop()
        return super().read(size)


def check_python_decoder(name: str, pixels: int) -> None:
    """Reject what Pillow would decode in Python, pixel by pixel."""
    limit = PYTHON_PIXELS.get(name)
    if limit is None or pixels <= limit:
        return
    advice = _PYTHON_ADVICE[name].format(limit=limit, pixels=pixels)
    raise ImageTooLarge(advice) if limit else UnreadableImage(advice)


# JPEG

_SOI, _EOI, _SOS, _TEM = 0xD8, 0xD9, 0xDA, 0x01
_ARITHMETIC = frozenset({0xC9, 0xCA, 0xCB, 0xCD, 0xCE, 0xCF})
# A marker, as libjpeg finds it; stuffed zeros and restart markers are part of the pixels.
_MARKER = re.compile(rb"\xff+([^\x00\xd0-\xd7\xff])")


def _count_scans(data: bytes) -> int:
    """Count the markers of scans, in a tenth of the time that bytes.count takes."""
    marker = int.from_bytes(bytes([0xFF, _SOS]), "little")
    halves = (np.frombuffer(data, "<u2", (len(data) - odd) // 2, odd) for odd in (0, 1))
    return sum(int(np.count_nonzero(half == marker)) for half in halves)


def check_jpeg(data: bytes, starts: Iterable[int] = (0,)) -> None:
    """Reject JPEGs with too many scans, or with arithmetic coding. `starts` are their offsets."""
    # A thumbnail or a video behind the image has such bytes too, so count only if there are many.
    many_scans = _count_scans(data) > MAX_SCANS
    segments = 0
    for start in starts:
        scans, position = 0, start
        while (found := _MARKER.search(data, position)) is not None:
            marker, position = found[1][0], found.end()
            segments += 1
            scans += marker == _SOS
            if scans > MAX_SCANS or segments > MAX_SEGMENTS:
                raise ImageTooLarge(
                    f"The JPEG image has more than {MAX_SCANS} scans, or {MAX_SEGMENTS} segments. "
                    f"Save it as a baseline JPEG."
                )
            if marker in _ARITHMETIC:
                raise UnreadableImage(
                    "JPEG images with arithmetic coding are not supported. Save it as a baseline "
                    "JPEG."
                )
            if marker == _EOI or (marker == _SOS and not many_scans):
                break
            if marker not in (_SOI, _TEM):
                position += int.from_bytes(data[position : position + 2])


# TIFF

_STRIP_OFFSETS, _TILE_OFFSETS = 273, 324
_MAX_TAGS = 65_535


def check_tiff(data: bytes) -> None:
    """Reject TIFFs with too many strips or tiles, before Pillow lists them."""
    order = "<" if data.startswith(b"I") else ">"
    big = data[2:3] == b"+"  # as Pillow decides it
    start_form, count_form, entry_form = ("8xQ", "Q", "HHQ8x") if big else ("4xI", "H", "HHI4x")
    try:
        (start,) = struct.unpack_from(order + start_form, data)
        (tags,) = struct.unpack_from(order + count_form, data, start)
    except (struct.error, OverflowError):
        return  # Pillow cannot read it either
    start += struct.calcsize(order + count_form)
    entry = struct.Struct(order + entry_form)
    end = start + min(tags, _MAX_TAGS) * entry.size
    whole = data[start:end]
    entries = entry.iter_unpack(whole[: len(whole) // entry.size * entry.size])
    strips = max((n for tag, _, n in entries if tag in (_STRIP_OFFSETS, _TILE_OFFSETS)), default=0)
    if tags > _MAX_TAGS or strips > MAX_STRIPS:
        raise ImageTooLarge(
            f"The TIFF image has {strips} strips or tiles and {tags} tags; the limits are "
            f"{MAX_STRIPS} and {_MAX_TAGS}. Save it with larger strips."
        )
