"""Images in the forms that callers have, encoded for sending.

Paths and bytes are sent unchanged. Pillow images and numpy arrays, and files with `shrink`, are
resized to the server's input size and encoded losslessly: less is sent, and the answer is almost
the same. Pillow resizes within one of 255 levels of the server, whose torch the client does not
need; JPEGs that the server decodes at a reduced size differ more. Pillow and numpy are imported
only if needed.
"""

import base64
import io
import os
import struct
import sys
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from mimetypes import MimeTypes
from typing import TYPE_CHECKING, Any, TypeGuard

from engram_vit.errors import ImageError, UsageError

if TYPE_CHECKING:
    import numpy as np
    from PIL.Image import Image as PillowImage

    Image = str | os.PathLike[str] | bytes | PillowImage | np.ndarray[Any, Any]
    Images = Image | Iterable[Image]

DIGEST = "sha256:"
# Image files in a folder. Files with an unknown suffix, or none, are recognised by their content.
SUFFIXES = (
    *(".jpg", ".jpeg", ".mpo", ".png", ".webp", ".gif", ".bmp", ".tif", ".tiff", ".avif"),
    *(".heic", ".heif", ".hif", ".ppm", ".pgm", ".pbm", ".pfm"),
)
# Photos that cannot be decoded. They are reported, because their owner expects an answer.
UNSUPPORTED = (
    *(".arw", ".cr2", ".cr3", ".dng", ".nef", ".orf", ".pef", ".raf", ".raw", ".rw2"),
    *(".jp2", ".jxl", ".psd", ".svg"),
)
_STARTS = (b"\xff\xd8\xff", b"\x89PNG\r\n\x1a\n", b"GIF8", b"II*\0", b"MM\0*", b"\0\0\0\x0cjP  ")
_ISO_STARTS = tuple(
    b"ftyp" + brand
    for brand in (b"avif", b"avis", b"heic", b"heix", b"heim", b"hevc", b"mif1", b"msf1")
)
ENCODED_BYTES = 256 * 1024  # assumed for an image that is not encoded yet
_DEEP_MODES = ("I", "F")  # more than eight bits per channel: the server converts them
_PNG_COLOURS = {1: 0, 2: 4, 3: 2, 4: 6}  # channels: PNG's colour type


@dataclass(frozen=True, slots=True)
class InputSize:
    """The server's resizing: (height, width) or the shortest edge, and the filter."""

    resize: tuple[int, int] | int
    resample: str

    @classmethod
    def read(cls, document: object) -> "InputSize | None":
        """Read the member `input` of /readyz; None if it is missing or unusable."""
        match document:
            case {"resize": int(edge), "resample": str(resample)}:
                return cls(edge, resample)
            case {"resize": [int(height), int(width)], "resample": str(resample)}:
                return cls((height, width), resample)
        return None

    def of(self, width: int, height: int) -> tuple[int, int]:
        """(width, height) after resizing an image of this width and height."""
        if isinstance(self.resize, tuple):
            return self.resize[1], self.resize[0]
        # Truncated, as the server does.
        longest = int(self.resize * max(width, height) / min(width, height))
        return (self.resize, longest) if width <= height else (longest, self.resize)


def as_images(images: "Images") -> "Iterable[Image]":
    """Wrap a single image in a list; a 4-D array is a list of arrays."""
    if _is_array(images):
        return [images] if images.ndim <= 3 else images
    if isinstance(images, str | bytes | bytearray | memoryview | os.PathLike) or _is_pillow(images):
        return [images]  # type: ignore[list-item]  # mypy cannot follow the narrowing
    if isinstance(images, Iterable):
        return images
    raise UsageError(f"{type(images).__name__} is not an image or a list of images.")


def name_of(image: "Image", index: int) -> str:
    """The image's name in answers and errors."""
    if isinstance(image, str | os.PathLike):
        return os.fspath(image)
    file = getattr(image, "filename", None)
    return file if isinstance(file, str) and file else f"image {index}"


def size_of(image: "Image") -> int:
    """Estimate the bytes to send without reading the image."""
    if _is_digest(image) or isinstance(image, bytes | bytearray | memoryview):
        return len(image)
    if isinstance(image, str | os.PathLike):
        try:
            return os.stat(image).st_size
        except OSError:
            return 0  # reported when it is read
    return ENCODED_BYTES


def needs_input_size(image: "Image", shrink: bool) -> bool:
    """Whether encoding depends on the server's resizing."""
    encoded = _is_array(image) or _is_pillow(image)
    return encoded or (shrink and not _is_digest(image))


def load(image: "Image", size: InputSize | None, shrink: bool) -> bytes | str | ImageError:
    """Return the bytes to send or the digest; errors are returned, not raised."""
    try:
        if _is_digest(image):
            return image
        if _is_pillow(image):
            return _encode(image, size)
        if _is_array(image):
            return _encode_array(image, size)
        data = _read(image)
    except ImageError as error:
        return error
    if not data:
        return ImageError("The image is empty.")
    return _shrunk(data, size) if shrink and size is not None else data


def as_json(body: bytes | str) -> dict[str, object]:
    if isinstance(body, str):
        return {"digest": body}
    return {"b64": base64.b64encode(body).decode()}


def check_shrinking() -> None:
    if find_spec("PIL") is None:
        raise UsageError("Shrinking images requires Pillow: pip install pillow.")


def walk(folder: str) -> Iterator[str]:
    """Yield the images below a folder, sorted, without hidden files and folders.

    Photos in unsupported formats are among them: reading them fails with the reason.
    """
    for place, folders, files in os.walk(folder):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        for name in sorted(files):
            path = os.path.join(place, name)
            if not name.startswith(".") and _is_photo(path):
                yield path


def is_photo_name(name: str) -> bool | None:
    """Whether a file is a photo by its name; None if the name does not tell."""
    if name.lower().endswith((*SUFFIXES, *UNSUPPORTED)):
        return True
    kind, _ = _types().guess_type(name)
    return None if kind is None else kind.startswith("image/")


def _is_photo(path: str) -> bool:
    by_name = is_photo_name(path)
    if by_name is not None:
        return by_name
    try:
        with open(path, "rb") as file:
            head = file.read(12)
    except OSError:
        return False
    return head.startswith(_STARTS) or head[8:] == b"WEBP" or head[4:] in _ISO_STARTS


@cache
def _types() -> MimeTypes:
    return MimeTypes()  # the built-in table: the same files are images on every machine


def _is_digest(image: object) -> TypeGuard[str]:
    return isinstance(image, str) and image.startswith(DIGEST)


def _is_array(image: object) -> "TypeGuard[np.ndarray[Any, Any]]":
    # If the caller has an array, numpy is imported.
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(image, numpy.ndarray)


def _is_pillow(image: object) -> "TypeGuard[PillowImage]":
    pillow = sys.modules.get("PIL.Image")
    return pillow is not None and isinstance(image, pillow.Image)


def _read(image: object) -> bytes:
    if isinstance(image, bytes | bytearray | memoryview):
        return bytes(image)
    if not isinstance(image, str | os.PathLike):
        raise ImageError(
            f"{type(image).__name__} is not an image. Use a path, bytes, a Pillow image, a numpy "
            f"array or a digest."
        )
    suffix = os.path.splitext(image)[1].lower()
    if suffix in UNSUPPORTED:
        raise ImageError(f"{suffix} files are not supported. Convert it to JPEG or PNG.")
    try:
        with open(image, "rb") as file:  # not pathlib, which keeps the name of every file
            return file.read()
    except FileNotFoundError:
        raise ImageError("The file does not exist.") from None
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ImageError(f"Cannot read the file: {reason}.") from None


def _encode_array(array: "np.ndarray[Any, Any]", size: InputSize | None) -> bytes:
    channels = 1 if array.ndim == 2 else array.shape[-1]
    if array.dtype != "uint8" or array.ndim not in (2, 3) or channels not in _PNG_COLOURS:
        raise ImageError(
            f"Unsupported array of {array.dtype} with shape {array.shape}. Use uint8 with shape "
            f"(height, width), (height, width, 3) or (height, width, 4)."
        )
    if not array.size:
        raise ImageError("The image is empty.")
    if find_spec("PIL") is None:
        return _png(array.tobytes(), array.shape[1], array.shape[0], channels)
    from PIL import Image

    flat = array[:, :, 0] if array.ndim == 3 and channels == 1 else array
    return _encode(Image.fromarray(flat), size)


def _encode(image: "PillowImage", size: InputSize | None) -> bytes:
    """Encode an image so that the server decodes the same pixels."""
    try:
        if image.mode.startswith(_DEEP_MODES):
            return _saved(image, "TIFF")
        return _saved(_resized(_upright_rgb(image), size), "PNG")
    except (OSError, ValueError, SyntaxError, MemoryError) as error:
        raise ImageError(f"Cannot encode the image: {error}.") from error


def _upright_rgb(image: "PillowImage") -> "PillowImage":
    """Blend transparency over white and apply the EXIF orientation, as the server does."""
    from PIL import Image, ImageOps

    image.load()  # a PNG may store its orientation after the pixels
    if image.has_transparency_data:
        over = image.convert("RGBA")
        rgb = Image.alpha_composite(Image.new("RGBA", image.size, "white"), over).convert("RGB")
        rgb.info = dict(image.info)
    else:
        rgb = image if image.mode == "RGB" else image.convert("RGB")
    return ImageOps.exif_transpose(rgb)


def _resized(image: "PillowImage", size: InputSize | None) -> "PillowImage":
    """Resize with the server's filter to its size, if the result is smaller."""
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


def _open(data: bytes) -> "PillowImage":
    from PIL import Image

    if data[4:8] == b"ftyp" and find_spec("pi_heif") is not None:
        from pi_heif import is_supported, read_heif  # type: ignore[import-untyped]

        if is_supported(io.BytesIO(data)):
            # Upright, and without an EXIF orientation.
            image: PillowImage = read_heif(io.BytesIO(data)).to_pillow()
            return image
    return Image.open(io.BytesIO(data))


def _shrunk(data: bytes, size: InputSize) -> bytes:
    """Return a smaller file with the same answer, or the original if that is not possible."""
    from PIL import Image

    try:
        with _open(data) as image:
            encoded = _encode(image, size)
    except (
        *(ImageError, OSError, ValueError, SyntaxError, RuntimeError, EOFError, Warning),
        Image.DecompressionBombError,
    ):
        return data  # the server reports what is wrong with it
    return min(data, encoded, key=len)


def _png(pixels: bytes, width: int, height: int, channels: int) -> bytes:
    """Write a PNG without Pillow."""

    def chunk(kind: bytes, body: bytes) -> bytes:
        checksum = struct.pack(">I", zlib.crc32(kind + body))
        return struct.pack(">I", len(body)) + kind + body + checksum

    header = struct.pack(">IIBBBBB", width, height, 8, _PNG_COLOURS[channels], 0, 0, 0)
    row = width * channels
    # Each row starts with its filter type: 0 is none.
    lines = b"".join(b"\0" + pixels[at : at + row] for at in range(0, len(pixels), row))
    parts = ((b"IHDR", header), (b"IDAT", zlib.compress(lines)), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunk(kind, body) for kind, body in parts)
