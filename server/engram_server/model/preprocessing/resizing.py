"""Resize an array of pixels.

Bilinear and bicubic run in torch, whose kernels for bytes are 7 to 10 times as fast as Pillow's;
the other filters run in Pillow. torch's results are within 1 of 255 levels of Pillow's for photos,
and within 2 for a few pixels of any picture (docs/explanation/precision.md#resizing). These kernels
use the calling thread only and release the GIL.
"""

import math
from collections.abc import Mapping
from typing import Final

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from engram_bundle.schema import Resample
from PIL import Image

Pixels = npt.NDArray[np.uint8]  # (H, W, 3)
Size = tuple[int, int]  # width, height
Extent = tuple[float, float]  # width and height of the part to resize, from the upper left corner

FILTERS: Mapping[Resample, Image.Resampling] = {
    "nearest": Image.Resampling.NEAREST,
    "box": Image.Resampling.BOX,
    "bilinear": Image.Resampling.BILINEAR,
    "hamming": Image.Resampling.HAMMING,
    "bicubic": Image.Resampling.BICUBIC,
    "lanczos": Image.Resampling.LANCZOS,
}
_IN_TORCH: Final = frozenset({"bilinear", "bicubic"})


def resize(
    pixels: Pixels,
    size: Size,
    resample: Resample,
    *,
    extent: Extent | None = None,
    sideways: bool = False,
) -> Pixels:
    """Resize to `size`. `sideways`: with the result of the picture that is turned upright first."""
    whole = pixels.shape[1], pixels.shape[0]
    width, height = extent or whole
    rows_first = _are_rows_first(whole, size, sideways=sideways)
    if resample in _IN_TORCH and not rows_first:
        return _in_torch(pixels, size, resample, (width, height))  # columns first, as it does
    # One axis at a time, because the order changes the result where a filter overshoots.
    between = _between(whole, size, rows_first=rows_first)
    first: Extent = (whole[0], height) if rows_first else (width, whole[1])
    second: Extent = (width, size[1]) if rows_first else (size[0], height)
    if resample in _IN_TORCH:
        return _in_torch(_in_torch(pixels, between, resample, first), size, resample, second)
    kernel = FILTERS[resample]
    image = Image.fromarray(pixels).resize(between, kernel, (0, 0, *first))
    return np.asarray(image.resize(size, kernel, (0, 0, *second)))


def resizing_bytes(whole: Size, size: Size, resample: Resample, *, sideways: bool) -> int:
    """Return the memory that `resize` needs, without `pixels`."""
    rows_first = _are_rows_first(whole, size, sideways=sideways)
    resized = math.prod(_between(whole, size, rows_first=rows_first)) + math.prod(size)
    if resample in _IN_TORCH:
        return 3 * resized
    # Pillow has four bytes for a pixel, and needs a copy of the original.
    return 4 * (math.prod(whole) + resized) + 3 * math.prod(size)


def _between(whole: Size, size: Size, *, rows_first: bool) -> Size:
    """The size after the first of two passes."""
    return (whole[0], size[1]) if rows_first else (size[0], whole[1])


def _are_rows_first(whole: Size, size: Size, *, sideways: bool) -> bool:
    """Whether the rows are resized before the columns, in the order of Pillow 13."""
    columns, rows = (old - new for old, new in zip(whole, size, strict=True))
    if sideways:  # the order of the upright picture, whose rows are these columns
        columns, rows = rows, columns
    return (0 < rows > 2 * columns) is not sideways


def _in_torch(pixels: Pixels, size: Size, resample: Resample, extent: Extent) -> Pixels:
    planes = torch.from_numpy(pixels)[None].permute(0, 3, 1, 2)  # in this order: "channels last"
    # torch takes scales where the extent ends within a pixel, and rounds the size down.
    scales = [
        math.nextafter(new / old, math.inf)
        for new, old in zip(reversed(size), reversed(extent), strict=True)
    ]
    resized = F.interpolate(planes, scale_factor=scales, mode=resample, antialias=True)
    return resized[0].permute(1, 2, 0).numpy()
