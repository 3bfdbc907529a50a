"""Resizing and cropping, pixel-equal to Hugging Face's Pillow image processors."""

from collections.abc import Mapping
from typing import Literal

from PIL import Image

from server.errors import ImageTooLarge

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


def resized_size(resize: tuple[int, int] | int, size: tuple[int, int]) -> tuple[int, int]:
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


def centre_crop(image: Image.Image, size: tuple[int, int]) -> Image.Image:
    """The middle (height, width) of an image, with black around a smaller one."""
    height, width = size
    # Rounding down also where the image is smaller: Pillow fills what lies outside with black,
    # which is where Hugging Face pads with zeros.
    left, top = (image.width - width) // 2, (image.height - height) // 2
    return image.crop((left, top, left + width, top + height))
