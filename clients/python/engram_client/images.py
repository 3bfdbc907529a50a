"""Images as callers have them, and as they are sent.

Paths and bytes are sent as they are. Pillow images and numpy arrays are encoded without loss, after
the very resizing that the server would do, so that little is sent and the answer stays the same
(nearly so for JPEGs that are large enough for the server to decode them at a fraction); with
`shrink`, files are treated so too. Neither Pillow nor numpy is imported unless such an object is
given or shrinking is asked for.
"""

import io
import os
import struct
import sys
import zlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, TypeGuard

from engram_client.errors import BadImage, WrongUse

if TYPE_CHECKING:
    import numpy as np
    from PIL.Image import Image as PillowImage

    Image = str | os.PathLike[str] | bytes | PillowImage | np.ndarray[Any, Any]
    Images = Image | Iterable[Image]

DIGEST = "sha256:"
# What is taken for an image in a folder.
SUFFIXES = (
    *(".jpg", ".jpeg", ".mpo", ".png", ".webp", ".gif", ".bmp", ".tif", ".tiff", ".avif"),
    *(".ppm", ".pgm", ".pbm", ".pfm"),
)
# What an image that is still to be encoded counts when requests are filled.
ENCODED_BYTES = 256 * 1024
# Modes of more than eight bits a channel: only the server knows how it looks at them.
_DEEP_MODES = ("I", "F")
_PNG_COLOURS = {1: 0, 2: 4, 3: 2, 4: 6}  # channels: PNG's colour type


@dataclass(frozen=True, slots=True)
class InputSize:
    """The resizing of a server: (height, width), or the shortest edge, and the filter."""

    resize: tuple[int, int] | int
    resample: str

    @classmethod
    def read(cls, document: object) -> "InputSize | None":
        """From the member `input` of /readyz; None where it says nothing that can be used."""
        if not isinstance(document, Mapping):
            return None
        resize, resample = document.get("resize"), document.get("resample")
        if not isinstance(resample, str):
            return None
        match resize:
            case int():
                return cls(resize, resample)
            case [int(height), int(width)]:
                return cls((height, width), resample)
        return None

    def of(self, width: int, height: int) -> tuple[int, int]:
        """(width, height) of an image of this width and height after resizing."""
        if isinstance(self.resize, tuple):
            return self.resize[1], self.resize[0]
        # Truncated, as the server does.
        longest = int(self.resize * max(width, height) / min(width, height))
        return (self.resize, longest) if width <= height else (longest, self.resize)


def as_images(given: "Images") -> "Iterable[Image]":
    """One image is a list of one; an array of four dimensions is a list of arrays."""
    if _is_array(given):
        return [given] if given.ndim <= 3 else given
    if isinstance(given, str | bytes | bytearray | memoryview | os.PathLike) or _is_pillow(given):
        return [given]  # type: ignore[list-item]  # narrowed just now, which mypy cannot follow
    if isinstance(given, Iterable):
        return given
    raise WrongUse(f"{type(given).__name__} is no image and no list of images.")


def name_of(image: "Image", index: int) -> str:
    """What an image is called in answers and errors."""
    if isinstance(image, str):
        return image
    if isinstance(image, os.PathLike):
        return os.fspath(image)
    file = getattr(image, "filename", None)
    return file if isinstance(file, str) and file else f"image {index}"


def size_of(image: "Image") -> int:
    """About how many bytes will be sent for it, without reading it."""
    if _is_digest(image) or isinstance(image, bytes | bytearray | memoryview):
        return len(image)
    if isinstance(image, str | os.PathLike):
        try:
            return os.stat(image).st_size
        except OSError:
            return 0  # reported when it is read
    return ENCODED_BYTES


def needs_input_size(image: "Image", shrink: bool) -> bool:
    """Whether encoding it depends on the server."""
    encoded = _is_array(image) or _is_pillow(image)
    return encoded or (shrink and not _is_digest(image))


def load(image: "Image", size: InputSize | None, shrink: bool) -> bytes | str | BadImage:
    """The bytes to send, or the digest; what is wrong with it is returned, not raised."""
    try:
        if _is_digest(image):
            return image
        if _is_pillow(image):
            return _encode(image, size)
        if _is_array(image):
            return _encode_array(image, size)
        data = _read(image)
    except BadImage as error:
        return error
    if not data:
        return BadImage("It is empty.")
    return _shrunk(data, size) if shrink and size is not None else data


def check_shrinking() -> None:
    """Shrinking files needs Pillow."""
    if find_spec("PIL") is None:
        raise WrongUse("Shrinking images needs Pillow: pip install pillow.")


def walk(folder: str) -> Iterator[str]:
    """The images below a folder, sorted; hidden files and folders are left out."""
    for place, folders, files in os.walk(folder):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        for name in sorted(files):
            if not name.startswith(".") and name.lower().endswith(SUFFIXES):
                yield os.path.join(place, name)


# --- reading --------------------------------------------------------------------------------------


def _is_digest(image: object) -> TypeGuard[str]:
    return isinstance(image, str) and image.startswith(DIGEST)


def _is_array(image: object) -> "TypeGuard[np.ndarray[Any, Any]]":
    # Whoever has an array has imported numpy already.
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(image, numpy.ndarray)


def _is_pillow(image: object) -> "TypeGuard[PillowImage]":
    pillow = sys.modules.get("PIL.Image")
    return pillow is not None and isinstance(image, pillow.Image)


def _read(image: object) -> bytes:
    if isinstance(image, bytes):
        return image
    if isinstance(image, bytearray | memoryview):
        return bytes(image)
    if not isinstance(image, str | os.PathLike):
        raise BadImage(
            f"{type(image).__name__} is no image: give a path, bytes, a Pillow image, a numpy "
            f"array or a digest."
        )
    try:
        with open(image, "rb") as file:  # not pathlib, which keeps the name of every file
            return file.read()
    except FileNotFoundError:
        raise BadImage("There is no such file.") from None
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise BadImage(f"It cannot be read: {reason}.") from None


# --- encoding -------------------------------------------------------------------------------------


def _encode_array(array: "np.ndarray[Any, Any]", size: InputSize | None) -> bytes:
    channels = 1 if array.ndim == 2 else array.shape[-1]
    if array.dtype != "uint8" or array.ndim not in (2, 3) or channels not in _PNG_COLOURS:
        raise BadImage(
            f"It is an array of {array.dtype} with the shape {array.shape}: give uint8 and "
            f"(height, width), (height, width, 3) or (height, width, 4)."
        )
    if not array.size:
        raise BadImage("It is empty.")
    if find_spec("PIL") is None:
        return _png(array.tobytes(), array.shape[1], array.shape[0], channels)
    from PIL import Image

    flat = array[:, :, 0] if array.ndim == 3 and channels == 1 else array
    return _encode(Image.fromarray(flat), size)


def _encode(image: "PillowImage", size: InputSize | None) -> bytes:
    """A file that the server sees as it would have seen the picture itself."""
    try:
        if image.mode.startswith(_DEEP_MODES):
            return _saved(image, "TIFF")
        return _saved(_resized(_upright_rgb(image), size), "PNG")
    except (OSError, ValueError, SyntaxError, MemoryError) as error:
        raise BadImage(f"It cannot be encoded: {error}.") from error


def _upright_rgb(image: "PillowImage") -> "PillowImage":
    """As the server does: transparency lies over white, and the camera's orientation is applied."""
    from PIL import Image, ImageOps

    image.load()  # a PNG may say its orientation behind its pixels, and a TIFF turns itself
    if image.has_transparency_data:
        over = image.convert("RGBA")
        rgb = Image.alpha_composite(Image.new("RGBA", image.size, "white"), over).convert("RGB")
        rgb.info = dict(image.info)
    else:
        rgb = image if image.mode == "RGB" else image.convert("RGB")
    return ImageOps.exif_transpose(rgb)


def _resized(image: "PillowImage", size: InputSize | None) -> "PillowImage":
    """What the server would make of it first, where that is less to send."""
    from PIL.Image import Resampling

    if size is None or size.resample.upper() not in Resampling.__members__:
        return image
    width, height = size.of(image.width, image.height)
    if width * height >= image.width * image.height:
        return image
    return image.resize((width, height), Resampling[size.resample.upper()])


def _saved(image: "PillowImage", kind: str) -> bytes:
    out = io.BytesIO()
    image.save(out, kind)
    return out.getvalue()


def _shrunk(data: bytes, size: InputSize) -> bytes:
    """A smaller file with the same answer; as it is where Pillow cannot read it or gains nothing.

    What is wrong with such a file is the server's to say.
    """
    from PIL import Image

    try:
        with Image.open(io.BytesIO(data)) as image:
            encoded = _encode(image, size)
    except (BadImage, OSError, ValueError, SyntaxError, Warning, Image.DecompressionBombError):
        return data
    return min(data, encoded, key=len)


def _png(pixels: bytes, width: int, height: int, channels: int) -> bytes:
    """A PNG file of rows of pixels, for those without Pillow."""

    def chunk(kind: bytes, body: bytes) -> bytes:
        return (
            struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))
        )

    header = struct.pack(">IIBBBBB", width, height, 8, _PNG_COLOURS[channels], 0, 0, 0)
    row = width * channels
    # Each row begins with the filter it was written with: 0 is none.
    lines = b"".join(b"\0" + pixels[at : at + row] for at in range(0, len(pixels), row))
    parts = ((b"IHDR", header), (b"IDAT", zlib.compress(lines)), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunk(kind, body) for kind, body in parts)
