"""Decoding a file to an upright RGB image.

| file | outcome |
|---|---|
| JPEG (MPO included), PNG, WebP, GIF, BMP, TIFF, PPM/PGM/PBM/PFM, AVIF | decoded |
| JPEG much larger than it is resized to | decoded at 1/2, 1/4 or 1/8 (`scale_down`) |
| EXIF orientation, all eight | applied; Hugging Face leaves this to its caller |
| EXIF that cannot be read | taken as upright |
| palette, 1-bit, grey, CMYK and YCCK, YCbCr, LAB | converted to RGB by Pillow |
| any transparency (RGBA, grey + alpha, palette entries, a PNG's tRNS colour) | laid over white |
| 16-bit grey | the high byte, as Pillow itself does for 16-bit RGB (not clipped to white) |
| 12-bit grey TIFF | its high eight bits |
| 32-bit integer or float grey | black is 0, white the first of 1 (floats only), 255, 65535 or the |
|   | brightest pixel that holds every pixel; NaN and negative values are black |
| several frames or pages | the first |
| colour profile | ignored, as Hugging Face does |
| truncated before the last pixel | `UnreadableImage`, never a half-grey picture |
| more pixels than `max_pixels` | `ImageTooLarge`, known from the header, nothing decoded |
| TIFF and WebP past Pillow's own limits (89 and 179 million pixels) | `ImageTooLarge`, likewise |
| so elongated that resizing its shortest edge needs absurd memory | `ImageTooLarge`, likewise |
| empty, text, HTML, SVG, PDF, PostScript, HEIC, anything else | `UnreadableImage` naming it |

A file is given to one decoder, chosen by its first bytes. Pillow's guessing is never used, so the
formats that start other programs (PostScript) cannot be reached. One thing no decoder tells: a JPEG
damaged in the middle of its data, or cut short and closed with a proper end marker, decodes to a
damaged picture without an error.
"""

import io
import struct
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import NoReturn

import numpy as np
import numpy.typing as npt
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

from server.errors import ImageTooLarge, UnreadableImage

Pixels = npt.NDArray[np.uint8]  # (H, W, 3)

# Everything Pillow and its decoders were seen to raise on damaged files. `Warning` is for processes
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

# Opened directly, not through Image.open: that warns about every large image by a limit of its own,
# and a warning cannot be caught without touching the other threads.
DECODERS: Mapping[str, Callable[[io.BytesIO], ImageFile.ImageFile]] = {
    "JPEG": JpegImagePlugin.JpegImageFile,
    "PNG": PngImagePlugin.PngImageFile,
    "WEBP": WebPImagePlugin.WebPImageFile,
    "GIF": GifImagePlugin.GifImageFile,
    "BMP": BmpImagePlugin.BmpImageFile,
    "TIFF": TiffImagePlugin.TiffImageFile,
    "PPM": PpmImagePlugin.PpmImageFile,
    "AVIF": AvifImagePlugin.AvifImageFile,
}


@dataclass(frozen=True, slots=True)
class ImageHeader:
    """What a file says of itself before it is decoded."""

    width: int  # as stored; an EXIF orientation may turn the picture a quarter later
    height: int
    format: str  # a key of DECODERS


def read_header(data: bytes) -> ImageHeader:
    """Read the size of an image without decoding it."""
    with open_image(data) as image:
        return ImageHeader(width=image.width, height=image.height, format=str(image.format))


def open_image(data: bytes) -> ImageFile.ImageFile:
    kind = _recognise(data)
    if kind is None:
        raise UnreadableImage(f"The bytes look like {_describe(data)}; {SUPPORTED}.")
    try:
        return DECODERS[kind](io.BytesIO(data))
    except BOMBS as error:
        raise ImageTooLarge(f"The {kind} image is too large to be opened: {error}") from error
    except DECODER_ERRORS as error:
        _refuse(kind, error)


def check_pixels(image: ImageFile.ImageFile, max_pixels: int | None) -> None:
    limits = [max_pixels]
    if image.format == "TIFF":
        limits.append(Image.MAX_IMAGE_PIXELS)  # past this one its decoder warns, which nobody hears
    limit = min((limit for limit in limits if limit is not None), default=None)
    pixels = image.width * image.height
    if limit is not None and pixels > limit:
        raise ImageTooLarge(
            f"The image has {image.width} × {image.height} = {pixels} pixels; "
            f"at most {limit} are allowed."
        )


# How many times as large as the resized one a picture still is when its JPEG is decoded smaller.
GAP = 3

Box = tuple[float, float, float, float]  # left, top, right, bottom


def scale_down(image: ImageFile.ImageFile, size: tuple[int, int]) -> Box | None:
    """Have a JPEG decoded at 1/2, 1/4 or 1/8, as far as that leaves `GAP` times a stored size.

    Returns which part of the smaller image is the picture, as its last column and row may be partly
    filled; None if the file is to be decoded whole.
    """
    if not (_has_one_scan(image) or image.info.get("progressive")):
        # libjpeg never scales a lossless one, whatever it is asked: its rows would be too long for
        # the smaller image. Other files of several scans are rare.
        return None
    drafted = image.draft(None, (GAP * size[0], GAP * size[1]))
    return drafted[1] if drafted is not None and _scale(image) > 1 else None


def _has_one_scan(image: ImageFile.ImageFile) -> bool:
    """Whether a JPEG holds all that is told of a block in one place."""
    if image.format != "JPEG" or image.info.get("progressive") or image.fp is None:
        return False
    # It was read up to its pixels, so this is the scan's header: all channels, all frequencies.
    channels = len(image.getbands())
    image.fp.seek(-(8 + 2 * channels), io.SEEK_CUR)
    header = image.fp.read(8 + 2 * channels)
    return header.rfind(b"\xff\xda") == 0 and header.endswith(b"\x00\x3f\x00")


def _scale(image: ImageFile.ImageFile) -> int:
    return int(image.decoderconfig[0]) if image.format == "JPEG" and image.decoderconfig else 1


def _refuse(kind: str | None, error: BaseException) -> NoReturn:
    name = f"{kind} image" if kind else "image"
    raise UnreadableImage(
        f"The {name} cannot be decoded, it is damaged or incomplete: {error or 'out of data'}"
    ) from error


# Bytes a pixel that a format's own decoder takes beside the image, measured and rounded up:
# libwebp's canvases, the planes of an AVIF, the largest strip of a TIFF, runs of a BMP.
DECODER_BYTES: Mapping[str, int] = {"WEBP": 12, "AVIF": 16, "TIFF": 8, "BMP": 4}
PYTHON_DECODER_BYTES: Mapping[str, int] = {"ppm_plain": 64, "ppm": 16}  # by Pillow's name of it


def decoding_bytes(image: ImageFile.ImageFile) -> int:
    """What decoding takes at most at once, with the copies on the way to upright RGB."""
    try:
        pixels = image.width * image.height
        taken = _bytes_each(image) * pixels
        if image.format == "JPEG" and not _has_one_scan(image):
            # The coefficients of the whole picture, at whatever scale it is decoded.
            taken += 2 * len(image.getbands()) * pixels * _scale(image) ** 2
        return taken
    except DECODER_ERRORS as error:
        _refuse(image.format, error)


def _bytes_each(image: ImageFile.ImageFile) -> int:
    # Pillow keeps three channels in four bytes.
    each = 1 if image.mode in ("1", "L", "P") else 2 if image.mode.startswith("I;16") else 4
    if image.mode != "RGB" or image.has_transparency_data:
        each += 4
    # A PNG may say behind its pixels that it wants to be turned.
    if image.format == "PNG" or _turn(image) is not None:
        each += 4
    each += DECODER_BYTES.get(str(image.format), 0)
    decoder = str(image.tile[0][0]) if image.tile else ""
    each += PYTHON_DECODER_BYTES.get(decoder, 0)
    return each + 1  # for all that is small


TILE_PIXELS = 1 << 16

TURNS: Mapping[int, Image.Transpose] = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
SIDEWAYS = [TURNS[orientation] for orientation in (5, 6, 7, 8)]
BITS_PER_SAMPLE = 258  # the TIFF tag


def lies_sideways(image: Image.Image) -> bool:
    """Whether turning it upright swaps its width and height."""
    return _turn(image) in SIDEWAYS


def upright_rgb(
    image: Image.Image, shrink: Callable[[Image.Image], Image.Image] | None = None
) -> Image.Image:
    """The picture as it is looked at; `shrink` is given it before it is turned."""
    try:
        image.load()
        rgb = _to_rgb(image) if shrink is None else shrink(_to_rgb(image))
        # Read after loading: a PNG may carry it behind its pixels, and TIFF turns itself.
        turn = _turn(image)
        return rgb if turn is None else rgb.transpose(turn)
    except BOMBS as error:
        raise ImageTooLarge(f"The image is too large to be decoded: {error}") from error
    except DECODER_ERRORS as error:
        _refuse(image.format, error)


def _turn(image: Image.Image) -> Image.Transpose | None:
    try:
        orientation = image.getexif().get(ExifTags.Base.Orientation)
    except DECODER_ERRORS:
        return None  # broken metadata does not spoil a good picture
    return TURNS.get(orientation) if isinstance(orientation, int) else None


def _to_rgb(image: Image.Image) -> Image.Image:
    if image.mode == "RGB" and not image.has_transparency_data:
        return image
    convert = _deep_grey_to_rgb(image) if _is_deep_grey(image) else _tile_to_rgb
    rgb = Image.new("RGB", image.size)
    for box, tile in _tiles(image):
        rgb.paste(convert(tile), box)
    return rgb


def _tiles(image: Image.Image) -> Iterator[tuple[tuple[int, int, int, int], Image.Image]]:
    """Parts of an image with their places: copies on the way to RGB are of one at a time."""
    columns = min(image.width, TILE_PIXELS)
    rows = max(1, TILE_PIXELS // columns)
    for top in range(0, image.height, rows):
        for left in range(0, image.width, columns):
            right, bottom = min(left + columns, image.width), min(top + rows, image.height)
            box = left, top, right, bottom
            yield box, image.crop(box)


def _tile_to_rgb(tile: Image.Image) -> Image.Image:
    if not tile.has_transparency_data:
        return tile.convert("RGB")
    white = Image.new("RGBA", tile.size, "white")
    return Image.alpha_composite(white, tile.convert("RGBA")).convert("RGB")


def _is_deep_grey(image: Image.Image) -> bool:
    """Grey of more than eight bits; Pillow's own conversion clips at 255."""
    return image.mode in ("I", "F") or image.mode.startswith("I;16")


def _deep_grey_to_rgb(image: Image.Image) -> Callable[[Image.Image], Image.Image]:
    bits = _known_bits(image)
    white = 0.0 if bits is not None else _white(image)
    transparent = image.info.get("transparency")

    def convert(tile: Image.Image) -> Image.Image:
        values = np.asarray(tile)
        if bits is not None:
            grey = (values >> (bits - 8)).astype(np.uint8)
        else:
            floats = values.astype(np.float32)
            floats = np.nan_to_num(floats, nan=0.0, posinf=white, neginf=0.0).clip(0.0, white)
            grey = (floats / white * 255.0 + 0.5).astype(np.uint8)
        if isinstance(transparent, int):
            grey[values == transparent] = 255
        return Image.fromarray(grey).convert("RGB")

    return convert


def _white(image: Image.Image) -> float:
    """The value of white: the first of the usual ones that holds every pixel, or the brightest."""
    peak = 0.0
    for _, tile in _tiles(image):
        values = np.asarray(tile).astype(np.float32)
        peak = max(peak, float(values.max(initial=0.0, where=np.isfinite(values))))
    usual = (1.0, 255.0, 65535.0) if image.mode == "F" else (255.0, 65535.0)
    return next((scale for scale in usual if peak <= scale), peak)


def _known_bits(image: Image.Image) -> int | None:
    """How many bits the brightest grey has, where the file fixes it."""
    if image.mode == "I" and image.format == "PPM":
        return 16  # Pillow stretches every deep PGM to this
    if not image.mode.startswith("I;16"):
        return None
    twelve = isinstance(image, TiffImagePlugin.TiffImageFile) and image.tag_v2.get(
        BITS_PER_SAMPLE
    ) == (12,)
    return 12 if twelve else 16


# --- telling files by their first bytes -----------------------------------------------------------

TIFF_STARTS = (b"II*\0", b"MM\0*", b"II+\0", b"MM\0+")
PPM_STARTS = tuple(f"P{kind}{space}".encode() for kind in "123456fF" for space in " \t\r\n")

STARTS: Mapping[str, tuple[bytes, ...]] = {
    "JPEG": (b"\xff\xd8\xff",),
    "PNG": (b"\x89PNG\r\n\x1a\n",),
    "GIF": (b"GIF87a", b"GIF89a"),
    "BMP": (b"BM",),
    "TIFF": TIFF_STARTS,
    "PPM": PPM_STARTS,
}
# Only for the error message: what people upload by mistake.
STRANGERS: Mapping[str, tuple[bytes, ...]] = {
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
SUPPORTED = "supported are JPEG, PNG, WebP, GIF, BMP, TIFF, PPM and AVIF"


def _recognise(data: bytes) -> str | None:
    for kind, starts in STARTS.items():
        if data.startswith(starts):
            return kind
    if data[:4] == b"RIFF" and data[8:12] == b"WEBP":
        return "WEBP"
    return "AVIF" if {b"avif", b"avis"} & _brands(data) else None


def _brands(data: bytes) -> set[bytes]:
    """The brands of an ISO media file: AVIF, HEIC and MP4 begin alike."""
    if data[4:8] != b"ftyp":
        return set()
    end = min(int.from_bytes(data[:4]), 256)
    return {data[start : start + 4] for start in (8, *range(16, end - 3, 4))}


def _describe(data: bytes) -> str:
    if not data:
        return "nothing: there are no bytes"
    for name, starts in STRANGERS.items():
        if data.startswith(starts):
            return name
    if brands := _brands(data):
        heic = any(brand.startswith((b"hei", b"hev", b"mif")) for brand in brands)
        return "a HEIC image" if heic else "a video"
    head = data[:1024].lstrip(b"\xef\xbb\xbf \t\r\n").lower()
    if b"<svg" in head:
        return "an SVG drawing"
    if head.startswith((b"<!doctype html", b"<html")) or b"<html" in head:
        return "an HTML page"
    printable = all(byte >= 32 or byte in b"\t\r\n\f" for byte in head)
    # A character may be cut at the end of the sample: what is valid before it decides.
    is_utf8 = "\ufffd" not in head[:256].decode("utf-8", errors="replace")[:-1]
    return "text" if printable and is_utf8 else "no image format known here"
