"""From the bytes of an image to what the backbone was trained on.

Two steps, because they run in different places. `Preprocessing.__call__` decodes, resizes and crops
with Pillow in a worker thread and ends in a small uint8 array; `Preprocessing.normalise` turns a
batch of those into floats on the device. The first is pixel-equal to the Pillow image processors of
Hugging Face for ViT, DeiT, CLIP and DINOv2 (BiT) configurations, the second equal within 1e-6. Only
JPEGs much larger than what they are resized to differ, by at most 2 of 255 levels in the mean and
20 in a pixel: they are decoded at a fraction (docs/explanation/precision.md has the figures).
"""

import hashlib
import json
import math
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import cache
from typing import Literal, get_args

import numpy as np
import torch
from PIL import Image

from server.errors import BackboneError, ImageTooLarge
from server.model.preprocessing.decoding import (
    Pixels,
    check_pixels,
    decoding_bytes,
    lies_sideways,
    open_image,
    scale_down,
    upright_rgb,
)

Reserve = Callable[[int], AbstractContextManager[object]]

Resample = Literal["nearest", "box", "bilinear", "hamming", "bicubic", "lanczos"]
FILTERS: Mapping[Resample, Image.Resampling] = {
    "nearest": Image.Resampling.NEAREST,
    "box": Image.Resampling.BOX,
    "bilinear": Image.Resampling.BILINEAR,
    "hamming": Image.Resampling.HAMMING,
    "bicubic": Image.Resampling.BICUBIC,
    "lanczos": Image.Resampling.LANCZOS,
}

# A square at the largest edge allowed is half of the pixels allowed for a resized image.
MAX_EDGE = 4096
MAX_RESIZED_PIXELS = 2 * MAX_EDGE * MAX_EDGE


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
        for name, size in (("resize", self.resize), ("crop", self.crop)):
            edges = size if isinstance(size, tuple) else () if size is None else (size,)
            if not all(isinstance(edge, int) and 1 <= edge <= MAX_EDGE for edge in edges):
                raise BackboneError(
                    f"{name} is {size!r}; edges are whole numbers from 1 to {MAX_EDGE}."
                )
        if self.resample not in get_args(Resample):
            known = ", ".join(get_args(Resample))
            raise BackboneError(f"resample is {self.resample!r}; it is one of {known}.")
        if not math.isfinite(self.rescale) or self.rescale <= 0:
            raise BackboneError(
                f"rescale is {self.rescale!r}; it is a positive number, usually 1/255."
            )
        if not all(math.isfinite(value) for value in self.mean):
            raise BackboneError(f"mean is {self.mean!r}; it has finite numbers only.")
        if not all(math.isfinite(value) and value > 0 for value in self.std):
            raise BackboneError(f"std is {self.std!r}; it has positive numbers only.")

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
        return _fingerprint(self)

    @property
    def largest_value(self) -> float:
        """The largest magnitude that a pixel of a decoded image has when it is normalised."""
        return max(
            abs(level * self.rescale - mean) / std
            for mean, std in zip(self.mean, self.std, strict=True)
            for level in (0, 255)
        )

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

    def __call__(
        self, data: bytes, *, max_pixels: int | None, reserve: Reserve = nullcontext
    ) -> Pixels:
        """Decode, orient, resize and crop the bytes of a file of at most `max_pixels`.

        `max_pixels=None` decodes images of any size: for files one trusts. `reserve` is told how
        many bytes decoding will take, and may wait, or refuse.
        """
        with open_image(data) as image:
            check_pixels(image, max_pixels)
            if self.resize is None:
                with reserve(decoding_bytes(image)):
                    return self.from_image(image)
            resize = self.resize
            if isinstance(resize, tuple) and lies_sideways(image):
                resize = resize[1], resize[0]
            size = _resized_size(resize, image.size)  # as stored
            # Nearest takes some pixels of the picture as they are: those must be there.
            box = None if self.resample == "nearest" else scale_down(image, size)
            # Of the resized image there are two for a while, of four bytes a pixel.
            with reserve(decoding_bytes(image) + 8 * math.prod(size)):
                if box is None:
                    return self.from_image(image)
                kernel = FILTERS[self.resample]
                return self._crop(upright_rgb(image, lambda rgb: rgb.resize(size, kernel, box)))

    def from_image(self, image: Image.Image) -> Pixels:
        """The same for an image already opened with Pillow, which stays as it is: decoded whole."""
        if self.resize is not None:
            _resized_size(self.resize, image.size)  # refuses the absurdly elongated, undecoded
        rgb = upright_rgb(image)
        if self.resize is not None:
            rgb = rgb.resize(_resized_size(self.resize, rgb.size), FILTERS[self.resample])
        return self._crop(rgb)

    def _crop(self, rgb: Image.Image) -> Pixels:
        if self.crop is not None:
            rgb = _centre_crop(rgb, self.crop)
        return np.array(rgb)  # a copy: torch needs memory that may be written to

    @property
    def affine(self) -> torch.Tensor:
        """Normalising a byte of each channel is `factor · x + shift`: (2, 3), in double."""
        factor = [self.rescale / std for std in self.std]
        shift = [-mean / std for mean, std in zip(self.mean, self.std, strict=True)]
        return torch.tensor([factor, shift], dtype=torch.float64)

    def normalise(self, pixels: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """(B, H, W, 3) uint8 → (B, 3, H, W) contiguous `dtype`, on the device of `pixels`."""
        # In fp32 whatever the result is to be: constants rounded to bf16 would move every value,
        # one rounding at the end does not.
        multiply, add = _affine_on(self, pixels.device)
        # Turned while they are bytes: a quarter of the memory traffic.
        planes = pixels.permute(0, 3, 1, 2).contiguous()
        return torch.addcmul(add, planes.to(torch.float32), multiply).to(dtype)


@cache
def _affine_on(preprocessing: Preprocessing, device: torch.device) -> torch.Tensor:
    """(2, 3, 1, 1) in float32. Kept: copying it to a GPU waits for all that runs there."""
    with torch.inference_mode(False):
        return preprocessing.affine.to(device, torch.float32).view(2, 3, 1, 1)


@cache
def _fingerprint(preprocessing: Preprocessing) -> str:
    # Kept: it is part of the key of every image that is asked about, on the event loop.
    canonical = json.dumps(preprocessing.to_json(), sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(canonical.encode()).hexdigest()[:16]


def _resized_size(resize: tuple[int, int] | int, size: tuple[int, int]) -> tuple[int, int]:
    """(width, height) after resizing an image of this (width, height)."""
    if isinstance(resize, tuple):
        return resize[1], resize[0]
    width, height = size
    # Truncated, not rounded: so does Hugging Face, and torchvision before it.
    longest = int(resize * max(size) / min(size))
    if resize * longest > MAX_RESIZED_PIXELS:
        raise ImageTooLarge(
            f"The image is {width} × {height} pixels, too elongated: with its shortest edge "
            f"resized to {resize} it would have {resize * longest} pixels; at most "
            f"{MAX_RESIZED_PIXELS} are allowed."
        )
    return (resize, longest) if width <= height else (longest, resize)


def _centre_crop(image: Image.Image, size: tuple[int, int]) -> Image.Image:
    """The middle (height, width) of an image, with black around a smaller one."""
    height, width = size
    # Rounding down also where the image is smaller: Pillow fills what lies outside with black,
    # which is where Hugging Face pads with zeros.
    left, top = (image.width - width) // 2, (image.height - height) // 2
    return image.crop((left, top, left + width, top + height))
