"""Decode a file to RGB pixels.

| file | result |
|---|---|
| JPEG (MPO included), PNG, WebP, GIF, BMP, TIFF, PPM/PGM/PBM/PFM, AVIF, HEIC | decoded |
| JPEG with arithmetic coding, BMP with run-length encoding, plain-text PPM | `UnreadableImage` |
| JPEG much larger than it is resized to | decoded at 1/2, 1/4 or 1/8 (`scale_down`) |
| EXIF orientation, all eight | applied (`upright`); Hugging Face leaves this to the caller |
| rotation of a HEIC image | applied; its EXIF orientation repeats it and is ignored |
| unreadable EXIF | treated as upright |
| palette, 1-bit, grey, CMYK and YCCK, YCbCr, LAB | converted to RGB by Pillow |
| any transparency (RGBA, grey + alpha, palette entries, a PNG's tRNS colour) | laid over white |
| 16-bit grey | the high byte, as Pillow does for 16-bit RGB (not clipped to white) |
| 12-bit grey TIFF | its high eight bits |
| 32-bit integer or float grey | black is 0, white the first of 1 (floats only), 255, 65535 or the |
|   | brightest pixel that holds every pixel; NaN and negative values are black |
| several frames or pages | the first |
| colour profile | ignored, as Hugging Face does |
| truncated before the last pixel | `UnreadableImage`, never a partly grey image |
| more pixels than `max_pixels` | `ImageTooLarge`, from the header, without decoding |
| TIFF and WebP past Pillow's own limits (89 and 179 million pixels) | `ImageTooLarge`, likewise |
| extreme aspect ratio, so that resizing needs too much memory | `ImageTooLarge`, likewise |
| more work than its pixels (`budget`) | `ImageTooLarge`, likewise or when it is stopped |
| empty, text, HTML, SVG, PDF, PostScript, anything else | `UnreadableImage` naming it |

The first bytes of a file choose its decoder. JPEGs with one scan are decoded straight into an array
(`simplejpeg`), to the very pixels of Pillow, which uses the same library, libjpeg-turbo. Everything
else is decoded by Pillow, also the JPEGs that `simplejpeg` rejects, so that Pillow alone decides
which files are unreadable. Pillow's format detection is not used, so formats that
start other programs (PostScript) cannot be reached. No decoder detects a JPEG that is damaged in
the middle of its data, or truncated but closed with an end marker: it decodes to a damaged image
without an error.
"""

import io
import math
import struct
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import NoReturn

import numpy as np
import simplejpeg  # type: ignore[import-untyped]
from PIL import (
    AvifImagePlugin,
    BmpImagePlugin,
    ExifTags,
    GifImagePlugin,
    Image,
    ImageFile,
    JpegImagePlugin,
    PngImagePlugin,
    PpmImagePlugin,
    TiffImagePlugin,
    WebPImagePlugin,
)

from engram_server.errors import ImageTooLarge, UnreadableImage
from engram_server.model.preprocessing import budget, heif
from engram_server.model.preprocessing.budget import Stop
from engram_server.model.preprocessing.resizing import Extent, Pixels, Size

# All exceptions that Pillow and its decoders raise on damaged files. `Warning` is for processes
# that turn warnings into errors.
DECODER_ERRORS = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    EOFError,
    LookupError,
    MemoryError,
    OSError,
    RuntimeError,
    SyntaxError,
    TypeError,
    ValueError,
    Warning,
    struct.error,
    zlib.error,
)
BOMBS = (Image.DecompressionBombError, Image.DecompressionBombWarning)

# Opened directly, not with Image.open, which warns about large images; a warning cannot be caught
# without affecting other threads.
DECODERS: Mapping[str, Callable[[io.BytesIO], ImageFile.ImageFile]] = {
    "JPEG": JpegImagePlugin.JpegImageFile,
    "PNG": PngImagePlugin.PngImageFile,
    "WEBP": WebPImagePlugin.WebPImageFile,
    "GIF": GifImagePlugin.GifImageFile,
    "BMP": BmpImagePlugin.BmpImageFile,
    "TIFF": TiffImagePlugin.TiffImageFile,
    "PPM": PpmImagePlugin.PpmImageFile,
    "AVIF": AvifImagePlugin.AvifImageFile,
    "HEIC": heif.HeicImageFile,
}


@dataclass(frozen=True, slots=True)
class ImageHeader:
    """The size and format of an image, read without decoding it."""

    width: int  # as stored; an EXIF orientation may swap width and height
    height: int
    format: str  # a key of DECODERS


def read_header(data: bytes) -> ImageHeader:
    with open_image(data) as image:
        return ImageHeader(width=image.width, height=image.height, format=str(image.format))


def open_image(data: bytes, stop: Stop = lambda: None) -> ImageFile.ImageFile:
    """Read the header of a file. `stop` is called at each read, also while it is decoded."""
    kind = _recognise(data)
    if kind is None:
        raise UnreadableImage(f"The file looks like {_describe(data)}. {SUPPORTED}.")
    if kind == "JPEG":
        budget.check_jpeg(data)
    elif kind == "TIFF":
        budget.check_tiff(data)
    elif kind == "HEIC":
        heif.check_heic(data)
    try:
        image = DECODERS[kind](budget.BoundedFile(data, stop))
    except BOMBS as error:
        raise ImageTooLarge(f"The {kind} image is too large to open: {error}") from error
    except DECODER_ERRORS as error:
        _raise_unreadable(kind, error)
    budget.check_python_decoder(_decoder_name(image), image.width * image.height)
    if isinstance(image, TiffImagePlugin.TiffImageFile) and _is_jpeg_tiff(image):
        budget.check_jpeg(data, _strip_offsets(image))
    return image


def _decoder_name(image: ImageFile.ImageFile) -> str:
    """Pillow's name of the decoder."""
    return str(image.tile[0][0]) if image.tile else ""


def _is_jpeg_tiff(image: TiffImagePlugin.TiffImageFile) -> bool:
    return image.info.get("compression") in ("jpeg", "tiff_jpeg")


def _strip_offsets(image: TiffImagePlugin.TiffImageFile) -> tuple[int, ...]:
    tags = image.tag_v2
    offsets = tags.get(TiffImagePlugin.STRIPOFFSETS) or tags.get(TiffImagePlugin.TILEOFFSETS)
    # A damaged file may have fractions here.
    return tuple(each for each in offsets or () if isinstance(each, int))


def check_pixels(image: ImageFile.ImageFile, max_pixels: int | None) -> None:
    limits = [max_pixels]
    if image.format == "TIFF":
        limits.append(Image.MAX_IMAGE_PIXELS)  # above this, its decoder only warns
    limit = min((limit for limit in limits if limit is not None), default=None)
    pixels = image.width * image.height
    if limit is not None and pixels > limit:
        raise ImageTooLarge(
            f"The image has {image.width} × {image.height} = {pixels} pixels (limit {limit})."
        )


# A JPEG decoded at reduced size is still at least this many times as large as the resized image.
GAP = 3


def scale_down(image: ImageFile.ImageFile, size: Size) -> Extent | None:
    """Set a JPEG to be decoded at 1/2, 1/4 or 1/8, but at least `GAP` times `size`.

    Returns the extent of the picture in the reduced image, whose last column and row may be partly
    filled; None to decode at full size.
    """
    if not (_has_one_scan(image) or image.info.get("progressive")):
        # libjpeg does not scale lossless JPEGs, so their rows would be too long for the reduced
        # image. Other files with several scans are rare.
        return None
    drafted = image.draft(None, (GAP * size[0], GAP * size[1]))
    return drafted[1][2:] if drafted is not None and _scale(image) > 1 else None


def _has_one_scan(image: ImageFile.ImageFile) -> bool:
    """Whether a JPEG is baseline with a single scan."""
    if image.format != "JPEG" or image.info.get("progressive") or image.fp is None:
        return False
    # The file was read up to its pixels, so this is the scan header: all channels and frequencies.
    channels = len(image.getbands())
    image.fp.seek(-(8 + 2 * channels), io.SEEK_CUR)
    header = image.fp.read(8 + 2 * channels)
    return header.rfind(b"\xff\xda") == 0 and header.endswith(b"\x00\x3f\x00")


def _scale(image: ImageFile.ImageFile) -> int:
    return int(image.decoderconfig[0]) if image.format == "JPEG" and image.decoderconfig else 1


def _raise_unreadable(kind: str | None, error: BaseException) -> NoReturn:
    name = f"{kind} image" if kind else "image"
    raise UnreadableImage(
        f"The {name} cannot be decoded; it is damaged or incomplete: {error or 'out of data'}"
    ) from error


# Bytes per pixel that decoders need besides the image, measured and rounded up: canvases of
# libwebp, planes of AVIF and HEIC, the largest strip of a TIFF, runs of a BMP.
DECODER_BYTES: Mapping[str, int] = {"WEBP": 12, "AVIF": 16, "HEIC": 16, "TIFF": 8, "BMP": 4}
PYTHON_DECODER_BYTES: Mapping[str, int] = {"ppm": 16}  # by Pillow's decoder name


def decoding_bytes(image: ImageFile.ImageFile) -> int:
    """Return the peak memory of decoding, with the array that it returns."""
    try:
        pixels = image.width * image.height
        needed = _bytes_per_pixel(image) * pixels
        if image.format == "JPEG" and not _has_one_scan(image):
            # The coefficients of the full-size image, whatever the scale.
            needed += 2 * len(image.getbands()) * pixels * _scale(image) ** 2
        if isinstance(image, TiffImagePlugin.TiffImageFile):
            # A tile may be larger than the image.
            needed += DECODER_BYTES["TIFF"] * max(0, _tile_pixels(image) - pixels)
        return needed
    except DECODER_ERRORS as error:
        _raise_unreadable(image.format, error)


def _tile_pixels(image: TiffImagePlugin.TiffImageFile) -> int:
    tags = image.tag_v2
    edges = tags.get(TiffImagePlugin.TILEWIDTH, 0), tags.get(TiffImagePlugin.TILELENGTH, 0)
    return math.prod(edge for edge in edges if isinstance(edge, int))


def _bytes_per_pixel(image: ImageFile.ImageFile) -> int:
    # Pillow stores three channels in four bytes. The array has three.
    each = 1 if image.mode in ("1", "L", "P") else 2 if image.mode.startswith("I;16") else 4
    each += 3
    if image.format == "TIFF" and orientation_of(image) != 1:
        each += 4  # Pillow turns it
    each += DECODER_BYTES.get(str(image.format), 0)
    each += PYTHON_DECODER_BYTES.get(_decoder_name(image), 0)
    return each + 1  # for everything small


TILE_PIXELS = 1 << 16

# EXIF orientations: whether rows and columns are swapped, then the steps through both.
ORIENTATIONS: Mapping[int, tuple[bool, int, int]] = {
    1: (False, 1, 1),
    2: (False, 1, -1),
    3: (False, -1, -1),
    4: (False, -1, 1),
    5: (True, 1, 1),
    6: (True, 1, -1),
    7: (True, -1, -1),
    8: (True, -1, 1),
}


def orientation_of(image: Image.Image) -> int:
    """The EXIF orientation. A PNG may have it after its pixels, and Pillow applies that of TIFF."""
    try:
        orientation = image.getexif().get(ExifTags.Base.Orientation)
    except DECODER_ERRORS:
        return 1  # the pixels are fine even if the metadata is broken
    return orientation if isinstance(orientation, int) and orientation in ORIENTATIONS else 1


def lies_sideways(image: Image.Image) -> bool:
    """Whether the EXIF orientation swaps width and height."""
    swapped, _, _ = ORIENTATIONS[orientation_of(image)]
    return swapped


def upright_size(image: Image.Image) -> Size:
    """The width and height of an image after its EXIF orientation."""
    return (image.height, image.width) if lies_sideways(image) else image.size


def upright(pixels: Pixels, orientation: int) -> Pixels:
    """Apply an EXIF orientation, without copying."""
    swapped, rows, columns = ORIENTATIONS[orientation]
    return (pixels.swapaxes(0, 1) if swapped else pixels)[::rows, ::columns]


def decode(image: Image.Image) -> Pixels:
    """Decode to RGB, before the EXIF orientation."""
    try:
        pixels = _decode_whole(image)
        if pixels is None:
            image.load()
            pixels = _to_rgb(image)
        return pixels
    except BOMBS as error:
        raise ImageTooLarge(f"The image is too large to decode: {error}") from error
    except DECODER_ERRORS as error:
        _raise_unreadable(image.format, error)


def _decode_whole(image: Image.Image) -> Pixels | None:
    """Decode a JPEG with one scan straight into an array; None if Pillow has to decode it."""
    if not isinstance(image, JpegImagePlugin.JpegImageFile) or image.mode not in ("L", "RGB"):
        return None
    file, scale = image.fp, _scale(image)
    if not isinstance(file, budget.BoundedFile) or not _has_one_scan(image):
        return None
    # Pillow can be stopped in the middle of larger files.
    pixels = image.width * image.height * scale**2
    if pixels > budget.MAX_BLOCK_PIXELS or file.nbytes > budget.MAX_BLOCK_BYTES:
        return None
    rgb = np.empty((image.height, image.width, 3), dtype=np.uint8)
    height, width = (image.height, image.width) if scale > 1 else (0, 0)
    file.seek(0)
    try:
        # Into this array, because libjpeg may find another size than Pillow did.
        decoded = simplejpeg.decode_jpeg(
            file.read(), "RGB", min_height=height, min_width=width, min_factor=scale, buffer=rgb
        )
    except ValueError:
        return None  # damaged, or of an unusual kind
    return rgb if decoded.shape == rgb.shape else None


def _to_rgb(image: Image.Image) -> Pixels:
    # Pillow would clip grey images of more than eight bits at 255.
    deep_grey = image.mode in ("I", "F") or image.mode.startswith("I;16")
    convert = _deep_grey_to_rgb(image) if deep_grey else _tile_to_rgb
    rgb = np.empty((image.height, image.width, 3), dtype=np.uint8)
    for (left, top, right, bottom), tile in _tiles(image):
        rgb[top:bottom, left:right] = convert(tile)
    return rgb


def _tiles(image: Image.Image) -> Iterator[tuple[tuple[int, int, int, int], Image.Image]]:
    """Yield tiles of an image with their boxes, so that conversion copies one tile at a time."""
    columns = min(image.width, TILE_PIXELS)
    rows = max(1, TILE_PIXELS // columns)
    for top in range(0, image.height, rows):
        for left in range(0, image.width, columns):
            right, bottom = min(left + columns, image.width), min(top + rows, image.height)
            box = left, top, right, bottom
            yield box, image.crop(box)


def _tile_to_rgb(tile: Image.Image) -> Pixels:
    if tile.has_transparency_data:
        white = Image.new("RGBA", tile.size, "white")
        tile = Image.alpha_composite(white, tile.convert("RGBA"))
    return np.asarray(tile if tile.mode == "RGB" else tile.convert("RGB"))


def _deep_grey_to_rgb(image: Image.Image) -> Callable[[Image.Image], Pixels]:
    bits = _fixed_bits(image)
    white = 0.0 if bits is not None else _white(image)
    transparent = image.info.get("transparency")

    def convert(tile: Image.Image) -> Pixels:
        values = np.asarray(tile)
        if bits is not None:
            grey = (values >> (bits - 8)).astype(np.uint8)
        else:
            floats = values.astype(np.float32)
            floats = np.nan_to_num(floats, nan=0.0, posinf=white, neginf=0.0).clip(0.0, white)
            grey = (floats / white * 255.0 + 0.5).astype(np.uint8)
        if isinstance(transparent, int):
            grey[values == transparent] = 255
        return grey[:, :, np.newaxis]

    return convert


def _white(image: Image.Image) -> float:
    """Return the value of white: the first common maximum that covers all pixels, or the peak."""
    peak = 0.0
    for _, tile in _tiles(image):
        values = np.asarray(tile).astype(np.float32)
        peak = max(peak, float(values.max(initial=0.0, where=np.isfinite(values))))
    common = (1.0, 255.0, 65535.0) if image.mode == "F" else (255.0, 65535.0)
    return next((scale for scale in common if peak <= scale), peak)


def _fixed_bits(image: Image.Image) -> int | None:
    """Return the bit depth of a grey image if the format fixes it."""
    if image.mode == "I" and image.format == "PPM":
        return 16  # Pillow scales every deep PGM to 16 bits
    if not image.mode.startswith("I;16"):
        return None
    if isinstance(image, TiffImagePlugin.TiffImageFile):
        return 12 if image.tag_v2.get(TiffImagePlugin.BITSPERSAMPLE) == (12,) else 16
    return 16


# --- format detection by the first bytes ----------------------------------------------------------

STARTS: Mapping[str, tuple[bytes, ...]] = {
    "JPEG": (b"\xff\xd8\xff",),
    "PNG": (b"\x89PNG\r\n\x1a\n",),
    "GIF": (b"GIF87a", b"GIF89a"),
    "BMP": (b"BM",),
    "TIFF": (b"II*\0", b"MM\0*", b"II+\0", b"MM\0+"),
    "PPM": tuple(f"P{kind}{space}".encode() for kind in "123456fF" for space in " \t\r\n"),
}
# Only for the error message: common uploads that are not images.
OTHER_FORMATS: Mapping[str, tuple[bytes, ...]] = {
    "a PDF document": (b"%PDF",),
    "a PostScript file": (b"%!PS", b"\xc5\xd0\xd3\xc6"),
    "a ZIP archive or office document": (b"PK\x03\x04",),
    "a gzip archive": (b"\x1f\x8b",),
    "an icon": (b"\0\0\1\0", b"\0\0\2\0"),
    "a Photoshop document": (b"8BPS",),
    "a JPEG 2000 image": (b"\0\0\0\x0cjP  ", b"\xff\x4f\xff\x51"),
    "a JPEG XL image": (b"\xff\x0a", b"\0\0\0\x0cJXL "),
    "a Matroska or WebM video": (b"\x1a\x45\xdf\xa3",),
}
SUPPORTED = "Supported formats: JPEG, PNG, WebP, GIF, BMP, TIFF, PPM, AVIF, HEIC"


def _recognise(data: bytes) -> str | None:
    for kind, starts in STARTS.items():
        if data.startswith(starts):
            return kind
    if data[:4] == b"RIFF" and data[8:12] == b"WEBP":
        return "WEBP"
    brands = _brands(data)
    if {b"avif", b"avis"} & brands:
        return "AVIF"
    return "HEIC" if heif.BRANDS & brands else None


def _brands(data: bytes) -> set[bytes]:
    """Return the brands of an ISO media file, which distinguish AVIF, HEIC and MP4."""
    if data[4:8] != b"ftyp":
        return set()
    end = min(int.from_bytes(data[:4]), 256)
    return {data[start : start + 4] for start in (8, *range(16, end - 3, 4))}


def _describe(data: bytes) -> str:
    if not data:
        return "an empty file"
    for name, starts in OTHER_FORMATS.items():
        if data.startswith(starts):
            return name
    if brands := _brands(data):
        return "a HEIC sequence" if {b"hevc", b"hevx", b"msf1"} & brands else "a video"
    head = data[:1024].lstrip(b"\xef\xbb\xbf \t\r\n").lower()
    if b"<svg" in head:
        return "an SVG drawing"
    if head.startswith((b"<!doctype html", b"<html")) or b"<html" in head:
        return "an HTML page"
    printable = all(byte >= 32 or byte in b"\t\r\n\f" for byte in head)
    # The last character of the sample may be cut off, so it is ignored.
    is_utf8 = "\ufffd" not in head[:256].decode("utf-8", errors="replace")[:-1]
    return "text" if printable and is_utf8 else "an unknown format"
