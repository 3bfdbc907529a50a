"""HEIC images, the photos of phones, decoded by libheif and libde265 (`pi-heif`).

libheif checks that a decoded picture has the size in the file. It still decodes everything that the
primary image consists of, and a file of a kilobyte may name a thousand large pictures for that, so
`check_heic` follows the same references first: a picture, or a grid of pictures, with its alpha
plane. Thumbnails, depth maps, metadata and other images of the file are never read.

The rotation of a HEIC image is part of the picture and applied by libheif. Its EXIF orientation
repeats it and is ignored, as the format requires.
"""

import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import _pi_heif  # type: ignore[import-not-found]  # the extension module has no stubs
from PIL import ImageFile

from engram_server.errors import ImageTooLarge, UnreadableImage

BRANDS: Final = frozenset({b"heic", b"heix", b"heim", b"heis", b"mif1"})
MAX_PARTS: Final = 65_536  # boxes, references and properties of a file; phones write hundreds
# Of all coded pictures, to those of the image: its tiles, and auxiliary planes such as alpha.
MAX_CODED_SHARE: Final = 4
MORE_CODED_PIXELS: Final = 1 << 19  # for small images, whose tiles are larger
_ONCE: Final = frozenset({b"meta", b"pitm", b"iinf", b"iref", b"iprp", b"ipco", b"ipma"})
_PICTURE, _GRID = b"hvc1", b"grid"

# Arguments of load_file: one thread, eight bits, no BGR, padded rows, any decoder, with limits.
_LOAD_OPTIONS: Final = (1, True, False, False, True, "", False)


class HeicImageFile(ImageFile.ImageFile):
    """The primary image of a HEIC file."""

    format = "HEIC"
    format_description = "HEIC image"
    _primary: Any = None  # pi-heif's image until it is decoded

    def _open(self) -> None:
        assert self.fp is not None
        images = _pi_heif.load_file(self.fp.read(), *_LOAD_OPTIONS)
        self._primary = next((one for one in images if one is not None and one.primary), None)
        if self._primary is None:
            raise SyntaxError("it has no primary image")
        self._size, self._mode = self._primary.size_mode
        self.tile = []

    def load(self) -> Any:  # noqa: ANN401 - Pillow's own type
        if self._primary is not None:
            primary, self._primary = self._primary, None
            pixels = primary.data
            if primary.size_mode != (self._size, self._mode):
                raise SyntaxError("its size differs from its header")
            self.load_prepare()
            self.frombytes(pixels, "raw", (self._mode, primary.stride))
        return super().load()


@dataclass(frozen=True, slots=True)
class _Items:
    """The items of a file: pictures, grids of pictures, and how they belong together."""

    primary: int
    kinds: Mapping[int, bytes]
    pixels: Mapping[int, int]
    parts: Mapping[int, Sequence[int]]  # of a grid
    auxiliary: Sequence[int]  # planes of the primary image


def check_heic(data: bytes) -> None:
    """Reject files whose image is made of more pictures than its size explains."""
    try:
        items = _read_items(data)
        coded = sum(_coded_pixels(items, item) for item in (items.primary, *items.auxiliary))
        shown = items.pixels[items.primary]
    except (struct.error, LookupError, ValueError) as error:
        raise UnreadableImage(
            f"The HEIC image cannot be decoded; it is damaged or incomplete: {error}"
        ) from error
    if coded > MAX_CODED_SHARE * shown + MORE_CODED_PIXELS:
        raise ImageTooLarge(
            f"The HEIC image has {shown} pixels and is made of pictures with {coded}. Save it "
            f"again with another program."
        )


def _coded_pixels(items: _Items, item: int, *, tile: bool = False) -> int:
    """The pixels that are decoded for an item."""
    kind = items.kinds[item]
    if kind == _PICTURE:
        return items.pixels[item]
    if kind != _GRID or tile:
        text = kind.decode("ascii", "backslashreplace")
        raise UnreadableImage(
            f"HEIC images with pictures of the kind '{text}' are not supported. Save it as JPEG."
        )
    return sum(_coded_pixels(items, part, tile=True) for part in items.parts.get(item, ()))


def _read_items(data: bytes) -> _Items:
    boxes = _Boxes(data)
    top = boxes.once(0, len(data))
    if b"moov" in top:
        raise UnreadableImage("HEIC sequences are not supported. Save a single image.")
    start, end = top[b"meta"]
    inside = boxes.once(start + 4, end)
    properties = boxes.once(*inside[b"iprp"])
    at = inside[b"pitm"][0]
    (primary,) = struct.unpack_from(">I" if data[at] else ">H", data, at + 4)
    parts: dict[int, list[int]] = {}
    auxiliary: list[int] = []
    for kind, item, others in boxes.references(*inside.get(b"iref", (0, 0))):
        if kind == b"dimg":
            parts.setdefault(item, []).extend(others)
        elif kind == b"auxl" and primary in others:
            auxiliary.append(item)
    kinds = boxes.kinds(*inside[b"iinf"])
    return _Items(primary, kinds, boxes.pixels(properties), parts, auxiliary)


class _Boxes:
    """Reads the boxes of an ISO media file, a limited number of them."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._parts = 0

    def _count(self, parts: int) -> None:
        self._parts += parts
        if self._parts > MAX_PARTS:
            raise ImageTooLarge(
                f"The HEIC image has more than {MAX_PARTS} parts. Save it again with another "
                f"program."
            )

    def inside(self, start: int, end: int) -> Iterator[tuple[bytes, int, int]]:
        """The kind of each box, and where its content starts and ends."""
        while start < end:
            self._count(1)
            size, kind = struct.unpack_from(">I4s", self._data, start)
            head = 8
            if size == 1:
                (size,) = struct.unpack_from(">Q", self._data, start + 8)
                head = 16
            stop = end if size == 0 else start + size
            if (size and size < head) or stop > end:
                raise ValueError(f"a part has the size {size}")
            yield kind, start + head, stop
            start = stop

    def once(self, start: int, end: int) -> dict[bytes, tuple[int, int]]:
        """Where the boxes of each kind are. Readers differ in which of two they use."""
        found: dict[bytes, tuple[int, int]] = {}
        for kind, begin, stop in self.inside(start, end):
            if kind in _ONCE and kind in found:
                raise ValueError(f"it has two parts {kind.decode()}")
            found[kind] = begin, stop
        return found

    def kinds(self, start: int, end: int) -> dict[int, bytes]:
        """The kind of each item (`iinf`)."""
        kinds: dict[int, bytes] = {}
        for _, at, _ in self.inside(start + (8 if self._data[start] else 6), end):
            form = ">I2x4s" if self._data[at] > 2 else ">H2x4s"
            item, kind = struct.unpack_from(form, self._data, at + 4)
            if item in kinds:
                raise ValueError(f"it has two items {item}")
            kinds[item] = kind
        return kinds

    def references(self, start: int, end: int) -> Iterator[tuple[bytes, int, Sequence[int]]]:
        """The kind of each reference, its item, and the items that it refers to (`iref`)."""
        if start == end:
            return
        form = "I" if self._data[start] else "H"
        size = struct.calcsize(f">{form}")
        for kind, at, _ in self.inside(start + 4, end):
            item, count = struct.unpack_from(f">{form}H", self._data, at)
            self._count(count)
            yield kind, item, struct.unpack_from(f">{count}{form}", self._data, at + size + 2)

    def pixels(self, properties: Mapping[bytes, tuple[int, int]]) -> dict[int, int]:
        """The pixels of each item (`ipma` and its `ispe` in `ipco`)."""
        sizes: dict[int, int] = {}
        for index, (kind, at, _) in enumerate(self.inside(*properties[b"ipco"]), start=1):
            if kind == b"ispe":
                width, height = struct.unpack_from(">II", self._data, at + 4)
                sizes[index] = width * height
        pixels: dict[int, int] = {}
        for item, index in self._associations(properties[b"ipma"][0]):
            if index in sizes:
                if item in pixels:
                    raise ValueError(f"item {item} has two sizes")
                pixels[item] = sizes[index]
        return pixels

    def _associations(self, at: int) -> Iterator[tuple[int, int]]:
        """Pairs of an item and the number of one of its properties (`ipma`)."""
        version, flags, count = struct.unpack_from(">B2xBI", self._data, at)
        item_form, index_form = ">IB" if version else ">HB", ">H" if flags & 1 else ">B"
        at += 8
        for _ in range(count):
            item, indices = struct.unpack_from(item_form, self._data, at)
            self._count(1 + indices)
            at += struct.calcsize(item_form)
            for _ in range(indices):
                (index,) = struct.unpack_from(index_form, self._data, at)
                at += struct.calcsize(index_form)
                yield item, index & (0x7FFF if flags & 1 else 0x7F)
