"""From the bytes of an image to what the backbone was trained on.

Two steps, because they run in different places. `Preprocessing.__call__` decodes, resizes and crops
with Pillow in a worker thread and ends in a small uint8 array; `Preprocessing.normalise` turns a
batch of those into floats on the device. The first is pixel-equal to the Pillow image processors of
Hugging Face for ViT, DeiT, CLIP and DINOv2 (BiT) configurations, the second equal within 1e-6.

What happens to each kind of file:

| file | outcome |
|---|---|
| JPEG (MPO included), PNG, WebP, GIF, BMP, TIFF, PPM/PGM/PBM/PFM, AVIF | decoded |
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
| more pixels than `max_pixels` | `ImageTooLarge`, told from the header, nothing decoded |
| TIFF and WebP past Pillow's own limits (89 and 179 million pixels) | `ImageTooLarge`, likewise |
| so elongated that resizing its shortest edge needs absurd memory | `ImageTooLarge`, likewise |
| empty, text, HTML, SVG, PDF, PostScript, HEIC, anything else | `UnreadableImage` naming it |

A file is given to one decoder, chosen by its first bytes. Pillow's guessing is never used, so the
formats that start other programs (PostScript) cannot be reached. One thing no decoder tells: a JPEG
damaged in the middle of its data, or cut short and closed with a proper end marker, decodes to a
damaged picture without an error.
"""

import hashlib
import io
import json
import math
import struct
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Literal, NoReturn, TypeGuard, get_args

import numpy as np
import numpy.typing as npt
import torch
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

from server.errors import BackboneError, ImageTooLarge, UnreadableImage

__all__ = ["ImageHeader", "Preprocessing", "Resample", "read_header"]

Resample = Literal["nearest", "box", "bilinear", "hamming", "bicubic", "lanczos"]
Pixels = npt.NDArray[np.uint8]  # (H, W, 3)

# A square at the largest edge allowed is half of the pixels allowed for a resized image.
MAX_EDGE = 4096
MAX_RESIZED_PIXELS = 2 * MAX_EDGE * MAX_EDGE


# ---------------------------------------------------------------------------------------------
# The description of a preprocessing


@dataclass(frozen=True, slots=True)
class Preprocessing:
    """How an image becomes pixel values; bundles carry it and it is compared field by field."""

    resize: tuple[int, int] | int | None  # (height, width) exactly; int: the shortest edge
    resample: Resample
    crop: tuple[int, int] | None  # centre crop (height, width); black around smaller images
    rescale: float  # usually 1/255
    mean: tuple[float, float, float]
    std: tuple[float, float, float]

    def __post_init__(self) -> None:
        _check(self)

    @classmethod
    def from_huggingface(cls, config: Mapping[str, object]) -> "Preprocessing":
        """Read a parsed `preprocessor_config.json`, in its old and new spellings."""
        settings = _with_class_defaults(config)
        normalised = bool(settings["do_normalize"])
        return cls(
            resize=_read_size(settings) if settings["do_resize"] else None,
            resample=_read_resample(settings["resample"]),
            crop=_read_crop(settings) if settings["do_center_crop"] else None,
            rescale=_number("rescale_factor", settings["rescale_factor"])
            if settings["do_rescale"]
            else 1.0,
            mean=_read_channels("image_mean", settings["image_mean"] if normalised else 0.0),
            std=_read_channels("image_std", settings["image_std"] if normalised else 1.0),
        )

    @classmethod
    def from_folder(cls, folder: Path) -> "Preprocessing | None":
        """Read the preprocessing of a model folder; None where the folder does not say."""
        config = _find_config(folder)
        if config is None:
            return None
        if not _type_name(config):
            # Files of the first years name no class; like Hugging Face, ask the model's type.
            model = _read_json(folder / "config.json") or {}
            model_type = model.get("model_type")
            if isinstance(model_type, str) and model_type in MODEL_TYPES:
                named = f"{MODEL_TYPES[model_type]}ImageProcessor"
                config = {**config, "image_processor_type": named}
        return cls.from_huggingface(config)

    @classmethod
    def from_json(cls, value: object) -> "Preprocessing":
        """Read what `to_json` wrote; unknown and missing fields are errors."""
        names = {field.name for field in fields(cls)}
        if not isinstance(value, Mapping) or set(value) != names:
            given = sorted(map(str, value)) if isinstance(value, Mapping) else type(value).__name__
            raise BackboneError(f"A preprocessing has the fields {sorted(names)}; got {given}.")
        resize, crop = value["resize"], value["crop"]
        return cls(
            resize=resize if resize is None or _is_int(resize) else _pair("resize", resize),
            resample=value["resample"],
            crop=None if crop is None else _pair("crop", crop),
            rescale=_number("rescale", value["rescale"]),
            mean=_triple("mean", value["mean"]),
            std=_triple("std", value["std"]),
        )

    def to_json(self) -> dict[str, object]:
        """The fields as JSON values; equal preprocessings give equal dictionaries."""
        return {
            "resize": list(self.resize) if isinstance(self.resize, tuple) else self.resize,
            "resample": self.resample,
            "crop": None if self.crop is None else list(self.crop),
            "rescale": float(self.rescale),
            "mean": [float(value) for value in self.mean],
            "std": [float(value) for value in self.std],
        }

    @property
    def fingerprint(self) -> str:
        """A short name of the whole description, the same in every process: for cache keys."""
        canonical = json.dumps(self.to_json(), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(canonical.encode()).hexdigest()[:16]

    @property
    def output_size(self) -> tuple[int, int]:
        """(height, width) of every result."""
        if self.crop is not None:
            return self.crop
        if isinstance(self.resize, tuple):
            return self.resize
        raise BackboneError(
            "This preprocessing gives images of different sizes: it has neither a centre crop nor "
            "an exact height and width. Set crop_size, or size with height and width."
        )

    def with_size(self, size: int | tuple[int, int]) -> "Preprocessing":
        """The same view of an image at another output size: resize and crop scale together."""
        height, width = (size, size) if isinstance(size, int) else size
        rows, columns = height / self.output_size[0], width / self.output_size[1]
        if self.crop is None:
            return replace(self, resize=(height, width))
        resize = self.resize
        if isinstance(resize, tuple):
            resize = (round(resize[0] * rows), round(resize[1] * columns))
        elif resize is not None:
            # Of the two scales the larger, so that the crop stays inside the resized image.
            resize = round(resize * max(rows, columns))
        return replace(self, resize=resize, crop=(height, width))

    def __call__(self, data: bytes, *, max_pixels: int | None) -> Pixels:
        """Decode, orient, resize and crop the bytes of a file of at most `max_pixels`.

        `max_pixels=None` decodes images of any size: for files one trusts.
        """
        with _open(data) as image:
            _check_pixels(image, max_pixels)
            return self.from_image(image)

    def from_image(self, image: Image.Image) -> Pixels:
        """The same for an image already opened with Pillow, which stays as it is."""
        self._resized(image.size)  # refuses the absurdly elongated before anything is decoded
        rgb = _upright_rgb(image)
        size = self._resized(rgb.size)
        if size is not None:
            rgb = rgb.resize(size, FILTERS[self.resample])
        if self.crop is not None:
            height, width = self.crop
            # Rounding down also where the image is smaller: Pillow fills what lies outside with
            # black, which is where Hugging Face pads with zeros.
            left, top = (rgb.width - width) // 2, (rgb.height - height) // 2
            rgb = rgb.crop((left, top, left + width, top + height))
        return np.array(rgb)  # a copy: torch wants memory that may be written to

    def normalise(self, pixels: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """(B, H, W, 3) uint8 → (B, 3, H, W) contiguous `dtype`, on the device of `pixels`."""
        # (x · rescale - mean) / std = x · factor + shift, with the constants worked out in double.
        factor = [self.rescale / std for std in self.std]
        shift = [-mean / std for mean, std in zip(self.mean, self.std, strict=True)]
        # In fp32 whatever the result is to be: constants rounded to bf16 would move every value,
        # one rounding at the end does not.
        constants = torch.tensor([factor, shift], dtype=torch.float32, device=pixels.device)
        multiply, add = constants.view(2, 3, 1, 1)
        # Turned while they are bytes: a quarter of the memory traffic.
        planes = pixels.permute(0, 3, 1, 2).contiguous()
        return torch.addcmul(add, planes.to(torch.float32), multiply).to(dtype)

    def _resized(self, size: tuple[int, int]) -> tuple[int, int] | None:
        """(width, height) of an image of this (width, height) after resizing; None: as it is."""
        if self.resize is None:
            return None
        if isinstance(self.resize, tuple):
            return self.resize[1], self.resize[0]
        width, height = size
        # Truncated, not rounded: so does Hugging Face, and torchvision before it.
        longest = int(self.resize * max(size) / min(size))
        if self.resize * longest > MAX_RESIZED_PIXELS:
            raise ImageTooLarge(
                f"The image is {width} × {height} pixels, too elongated: with its shortest edge "
                f"resized to {self.resize} it would have {self.resize * longest} pixels; at most "
                f"{MAX_RESIZED_PIXELS} are allowed."
            )
        return (self.resize, longest) if width <= height else (longest, self.resize)


FILTERS: Mapping[Resample, Image.Resampling] = {
    "nearest": Image.Resampling.NEAREST,
    "box": Image.Resampling.BOX,
    "bilinear": Image.Resampling.BILINEAR,
    "hamming": Image.Resampling.HAMMING,
    "bicubic": Image.Resampling.BICUBIC,
    "lanczos": Image.Resampling.LANCZOS,
}


def _check(it: Preprocessing) -> None:
    for name, size in (("resize", it.resize), ("crop", it.crop)):
        edges = size if isinstance(size, tuple) else () if size is None else (size,)
        if not all(_is_int(edge) and 1 <= edge <= MAX_EDGE for edge in edges):
            raise BackboneError(
                f"{name} is {size!r}; edges are whole numbers from 1 to {MAX_EDGE}."
            )
    if it.resample not in get_args(Resample):
        known = ", ".join(get_args(Resample))
        raise BackboneError(f"resample is {it.resample!r}; it is one of {known}.")
    if not math.isfinite(it.rescale) or it.rescale <= 0:
        raise BackboneError(f"rescale is {it.rescale!r}; it is a positive number, usually 1/255.")
    if not all(math.isfinite(value) for value in it.mean):
        raise BackboneError(f"mean is {it.mean!r}; it has finite numbers only.")
    if not all(math.isfinite(value) and value > 0 for value in it.std):
        raise BackboneError(f"std is {it.std!r}; it has positive numbers only.")


# ---------------------------------------------------------------------------------------------
# Reading preprocessor_config.json

IMAGENET_STANDARD: Mapping[str, object] = {"image_mean": 0.5, "image_std": 0.5}
OPENAI_CLIP: Mapping[str, object] = {
    "image_mean": (0.48145466, 0.4578275, 0.40821073),
    "image_std": (0.26862954, 0.26130258, 0.27577711),
}
EVERY_CLASS: Mapping[str, object] = {
    "do_resize": True,
    "do_center_crop": True,
    "do_rescale": True,
    "do_normalize": True,
    "do_pad": False,
    "rescale_factor": 1 / 255,
    "default_to_square": True,
    "crop_size": 224,
    "resample": 3,
}
SHORTEST_EDGE: Mapping[str, object] = {"size": {"shortest_edge": 224}, "default_to_square": False}

# What a key left out (or null) means, by the class the file names. BiT's is DINOv2's.
CLASS_DEFAULTS: Mapping[str, Mapping[str, object]] = {
    "ViT": {
        **EVERY_CLASS,
        **IMAGENET_STANDARD,
        "size": 224,
        "resample": 2,
        "do_center_crop": False,
        "crop_size": None,
    },
    "DeiT": {**EVERY_CLASS, **IMAGENET_STANDARD, "size": 256},
    "CLIP": {**EVERY_CLASS, **OPENAI_CLIP, **SHORTEST_EDGE},
    "Bit": {**EVERY_CLASS, **OPENAI_CLIP, **SHORTEST_EDGE},
}
MODEL_TYPES: Mapping[str, str] = {
    "vit": "ViT",
    "deit": "DeiT",
    "clip": "CLIP",
    "clip_vision_model": "CLIP",
    "dinov2": "Bit",
    "dinov2_with_registers": "Bit",
}
CLASS_SUFFIXES = ("Fast", "Pil", "ImageProcessor", "FeatureExtractor")
RESAMPLE_CODES: Mapping[int, Resample] = {int(code): name for name, code in FILTERS.items()}


def _find_config(folder: Path) -> Mapping[str, object] | None:
    # The newest releases nest it in processor_config.json, and prefer that where both exist.
    nested = (_read_json(folder / "processor_config.json") or {}).get("image_processor")
    if isinstance(nested, Mapping):
        return nested
    return _read_json(folder / "preprocessor_config.json")


def _read_json(path: Path) -> Mapping[str, object] | None:
    try:
        value = json.loads(path.read_bytes())
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise BackboneError(f"{path} cannot be read as JSON: {error}") from error
    if not isinstance(value, dict):
        raise BackboneError(f"{path} holds a JSON {type(value).__name__}, not an object.")
    return value


def _type_name(config: Mapping[str, object]) -> str:
    name = config.get("image_processor_type") or config.get("feature_extractor_type") or ""
    return str(name)


def _with_class_defaults(config: Mapping[str, object]) -> Mapping[str, object]:
    name = _type_name(config)
    family = name
    for suffix in CLASS_SUFFIXES:
        family = family.removesuffix(suffix)
    if family not in CLASS_DEFAULTS:
        known = ", ".join(f"{known}ImageProcessor" for known in CLASS_DEFAULTS)
        raise BackboneError(
            f"The preprocessor configuration names the image processor {name!r}; known are {known}."
            if name
            else f"The preprocessor configuration names no image_processor_type; known are {known}."
        )
    given = {key: value for key, value in config.items() if value is not None}
    settings = {**CLASS_DEFAULTS[family], **given}
    for option in ("do_pad", "use_square_size"):
        if settings.get(option):
            raise BackboneError(f"The preprocessor configuration sets {option}: not supported.")
    return settings


def _read_size(settings: Mapping[str, object]) -> tuple[int, int] | int:
    size = settings["size"]
    if isinstance(size, Mapping):
        size = {key: value for key, value in size.items() if value is not None}
        if set(size) == {"shortest_edge"}:
            return _edge("size", size["shortest_edge"])
    elif _is_int(size) and not settings["default_to_square"]:
        return size
    return _read_pair("size", size)


def _read_crop(settings: Mapping[str, object]) -> tuple[int, int]:
    if settings["crop_size"] is None:
        raise BackboneError("The preprocessor configuration sets do_center_crop but no crop_size.")
    return _read_pair("crop_size", settings["crop_size"])


def _read_pair(name: str, value: object) -> tuple[int, int]:
    """(height, width) from 224, [224, 224] or {"height": 224, "width": 224}."""
    if isinstance(value, Mapping):
        value = {key: edge for key, edge in value.items() if edge is not None}
        if set(value) != {"height", "width"}:
            raise BackboneError(
                f"The preprocessor configuration gives {name} as {sorted(map(str, value))}; "
                "supported are height with width, and for size also shortest_edge alone."
            )
        return _edge(name, value["height"]), _edge(name, value["width"])
    return (value, value) if _is_int(value) else _pair(name, value)


def _read_resample(value: object) -> Resample:
    if _is_int(value) and value in RESAMPLE_CODES:
        return RESAMPLE_CODES[value]
    raise BackboneError(f"resample is {value!r}; it is one of Pillow's filters 0 to 5.")


def _read_channels(name: str, value: object) -> tuple[float, float, float]:
    return _triple(name, value if isinstance(value, Sequence) else (value,) * 3)


# ---------------------------------------------------------------------------------------------
# Values of a JSON file, checked


def _is_int(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_list(value: object, length: int) -> TypeGuard[Sequence[object]]:
    return isinstance(value, list | tuple) and len(value) == length


def _edge(name: str, value: object) -> int:
    if _is_int(value):
        return value
    raise BackboneError(f"{name} is {value!r}; its edges are whole numbers of pixels.")


def _pair(name: str, value: object) -> tuple[int, int]:
    if _is_list(value, 2):
        return _edge(name, value[0]), _edge(name, value[1])
    raise BackboneError(f"{name} is {value!r}; it is a height and a width.")


def _triple(name: str, value: object) -> tuple[float, float, float]:
    if _is_list(value, 3):
        return _number(name, value[0]), _number(name, value[1]), _number(name, value[2])
    raise BackboneError(f"{name} is {value!r}; it has three numbers: red, green and blue.")


def _number(name: str, value: object) -> float:
    if isinstance(value, float) or (_is_int(value) and abs(value) < 2**64):
        return float(value)
    raise BackboneError(f"{name} is {value!r}; it is a number.")


# ---------------------------------------------------------------------------------------------
# Opening a file

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

TIFF_STARTS = (b"II*\0", b"MM\0*", b"II+\0", b"MM\0+")
PPM_STARTS = tuple(f"P{kind}{space}".encode() for kind in "123456fF" for space in " \t\r\n")

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


@dataclass(frozen=True, slots=True)
class ImageHeader:
    """What a file says of itself before it is decoded."""

    width: int  # as stored; an EXIF orientation may turn the picture a quarter later
    height: int
    format: str  # a key of DECODERS


def read_header(data: bytes) -> ImageHeader:
    """Read the size of an image without decoding it."""
    with _open(data) as image:
        return ImageHeader(width=image.width, height=image.height, format=str(image.format))


def _open(data: bytes) -> ImageFile.ImageFile:
    kind = _recognise(data)
    if kind is None:
        raise UnreadableImage(f"The bytes look like {_describe(data)}; {SUPPORTED}.")
    try:
        return DECODERS[kind](io.BytesIO(data))
    except BOMBS as error:
        raise ImageTooLarge(f"The {kind} image is too large to be opened: {error}") from error
    except DECODER_ERRORS as error:
        _refuse(kind, error)


def _check_pixels(image: ImageFile.ImageFile, max_pixels: int | None) -> None:
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


def _refuse(kind: str | None, error: BaseException) -> NoReturn:
    name = f"{kind} image" if kind else "image"
    raise UnreadableImage(
        f"The {name} cannot be decoded, it is damaged or incomplete: {error or 'out of data'}"
    ) from error


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
    return "text" if printable and _is_utf8(head[:256]) else "no image format known here"


def _is_utf8(head: bytes) -> bool:
    # A character may be cut at the end of the sample: what is valid before it decides.
    return "\ufffd" not in head.decode("utf-8", errors="replace")[:-1]


# ---------------------------------------------------------------------------------------------
# Decoding to upright RGB

TURNS: Mapping[int, Image.Transpose] = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
BITS_PER_SAMPLE = 258  # the TIFF tag


def _upright_rgb(image: Image.Image) -> Image.Image:
    try:
        image.load()
        rgb = _to_rgb(image)
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
    if image.mode in ("I", "F") or image.mode.startswith("I;16"):
        return Image.fromarray(_eight_bits(image)).convert("RGB")
    if image.has_transparency_data:
        over = image.convert("RGBA")
        white = Image.new("RGBA", image.size, "white")
        return Image.alpha_composite(white, over).convert("RGB")
    return image if image.mode == "RGB" else image.convert("RGB")


def _eight_bits(image: Image.Image) -> Pixels:
    """Grey of more than eight bits as (H, W) uint8; Pillow's own conversion clips at 255."""
    values = np.asarray(image)
    bits = _known_bits(image)
    if bits is not None:
        grey = (values >> (bits - 8)).astype(np.uint8)
    else:
        values = values.astype(np.float32)
        peak = float(values.max(initial=0.0, where=np.isfinite(values)))
        usual = (1.0, 255.0, 65535.0) if image.mode == "F" else (255.0, 65535.0)
        white = next((scale for scale in usual if peak <= scale), peak)
        values = np.nan_to_num(values, nan=0.0, posinf=white, neginf=0.0).clip(0.0, white)
        grey = (values / white * 255.0 + 0.5).astype(np.uint8)
    transparent = image.info.get("transparency")
    if isinstance(transparent, int):
        grey[np.asarray(image) == transparent] = 255
    return grey


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
