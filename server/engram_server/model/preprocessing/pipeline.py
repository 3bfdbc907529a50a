"""The preprocessing pipeline: from an image file to the backbone's input.

It has two steps, because they run in different places. `Preprocessing.__call__` decodes, resizes
and crops in a worker thread and returns a small uint8 array. `Preprocessing.normalise` converts a
batch of them to floats on the device. The first step is within 1 of 255 levels of Hugging Face's
Pillow image processors for ViT, DeiT, CLIP and DINOv2 (BiT) for photos, the second within 1e-6.
JPEGs much larger than their resized size are decoded at reduced size and differ more, by at most 2
levels in the mean and 20 in a pixel (docs/explanation/precision.md has the figures).
"""

import hashlib
import json
import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import torch
from engram_bundle.preprocessing import MAX_EDGE, PreprocessingSpec
from engram_bundle.untrusted import first_error
from PIL import Image
from pydantic import ValidationError

from engram_server.errors import BackboneError, ImageTooLarge
from engram_server.model.preprocessing import decoding
from engram_server.model.preprocessing.budget import Stop
from engram_server.model.preprocessing.resizing import Extent, Pixels, Size, resize, resizing_bytes
from engram_server.model.preprocessing.thumbnails import encode_thumbnail

Reserve = Callable[[int], AbstractContextManager[object]]

MAX_RESIZED_PIXELS = 2 * MAX_EDGE * MAX_EDGE  # twice a square of the largest edge


GOLDEN_SEED = 2022


class Preprocessing(PreprocessingSpec):
    """The preprocessing of a bundle or backbone, with the steps that carry it out."""

    def __init__(self, *values: Any, **fields: Any) -> None:  # noqa: ANN401 - those of the spec
        try:
            super().__init__(*values, **fields)
        except ValidationError as error:
            where, reason = first_error(error)
            raise BackboneError(f"Invalid preprocessing: {where}: {reason}.") from error

    @property
    def fingerprint(self) -> str:
        """A short hash of all fields for cache keys, the same in every process."""
        return _fingerprint(self)

    @property
    def largest_value(self) -> float:
        """The largest magnitude of a normalised pixel."""
        return max(
            abs(level * self.rescale - mean) / std
            for mean, std in zip(self.mean, self.std, strict=True)
            for level in (0, 255)
        )

    @property
    def output_size(self) -> tuple[int, int]:
        """(height, width) of every preprocessed image."""
        if self.crop is not None:
            return self.crop
        if isinstance(self.resize, tuple):
            return self.resize
        raise BackboneError(
            "This preprocessing has no fixed output size. Set crop_size, or size with height and "
            "width."
        )

    def with_size(self, size: int | tuple[int, int]) -> "Preprocessing":
        """Return the same preprocessing with another output size, resize and crop scaled alike."""
        height, width = (size, size) if isinstance(size, int) else size
        rows, columns = height / self.output_size[0], width / self.output_size[1]
        if self.crop is None:
            return replace(self, resize=(height, width))
        resize = self.resize
        if isinstance(resize, tuple):
            resize = (round(resize[0] * rows), round(resize[1] * columns))
        elif resize is not None:
            # The larger of the two scales, so that the crop stays inside the resized image.
            resize = round(resize * max(rows, columns))
        return replace(self, resize=resize, crop=(height, width))

    def __call__(
        self,
        data: bytes,
        *,
        max_pixels: int | None,
        reserve: Reserve = nullcontext,
        stop: Stop = lambda: None,
    ) -> Pixels:
        """Decode, orient, resize and crop an image file of at most `max_pixels`.

        `max_pixels=None` decodes trusted files of any size. `reserve` is called with the number of
        bytes that decoding needs, and may wait or raise. `stop` is called at each read of the file,
        and may raise.
        """
        return self.read(data, max_pixels=max_pixels, reserve=reserve, stop=stop)[0]

    def read(
        self,
        data: bytes,
        *,
        max_pixels: int | None,
        reserve: Reserve,
        stop: Stop,
        thumbnail: bool = False,
    ) -> tuple[Pixels, bytes]:
        """Do the same, and with `thumbnail` return one of the whole image as well, else b""."""

        with decoding.open_image(data, stop) as image:
            decoding.check_pixels(image, max_pixels)
            size = self._stored_size(image)
            extent = None
            # The nearest filter copies pixels of the original, so they must be decoded.
            if self.resize is not None and self.resample != "nearest":
                extent = decoding.scale_down(image, size)
            with reserve(decoding.decoding_bytes(image) + self._resizing_bytes(image, size)):
                rgb = self._upright(image, None if extent is None else (size, extent))
                small = b""
                if thumbnail:
                    # The original's size: that of a file decoded at reduced size is rounded.
                    small = encode_thumbnail(rgb, decoding.upright_size(image))
                return self._crop(rgb), small

    def from_image(self, image: Image.Image) -> Pixels:
        """Preprocess an image opened with Pillow, at full size. The image is not changed."""
        self._stored_size(image)  # rejects extreme aspect ratios before decoding
        return self._crop(self._upright(image))

    def _stored_size(self, image: Image.Image) -> Size:
        """(width, height) of the resized image before its EXIF orientation is applied."""
        if self.resize is None:
            return image.size
        resize = self.resize
        if isinstance(resize, tuple) and decoding.lies_sideways(image):
            resize = resize[1], resize[0]
        return _resized_size(resize, image.size)

    def _resizing_bytes(self, image: Image.Image, size: Size) -> int:
        copies = 2 * 3 * math.prod(size)  # upright, and cropped
        if self.resize is None:
            return copies
        sideways = decoding.lies_sideways(image)
        return copies + resizing_bytes(image.size, size, self.resample, sideways=sideways)

    def _upright(self, image: Image.Image, scaled: tuple[Size, Extent] | None = None) -> Pixels:
        """Decode and resize; `scaled` for an image that is decoded at reduced size."""
        pixels = decoding.decode(image)
        if self.resize is not None:
            size, extent = scaled or (self._stored_size(image), None)
            sideways = decoding.lies_sideways(image)
            pixels = resize(pixels, size, self.resample, extent=extent, sideways=sideways)
        return decoding.upright(pixels, decoding.orientation_of(image))

    def _crop(self, rgb: Pixels) -> Pixels:
        """Crop the centre, with black around a smaller image."""
        if self.crop is None:
            return np.require(rgb, requirements=["C", "W"])  # torch needs writable memory
        height, width = self.crop
        rows, columns, _ = rgb.shape
        # Rounded down also for smaller images, where Hugging Face pads with zeros.
        top, left = (rows - height) // 2, (columns - width) // 2
        inside = rgb[max(top, 0) : top + height, max(left, 0) : left + width]
        cropped = np.zeros((height, width, 3), dtype=np.uint8)
        down, right = max(-top, 0), max(-left, 0)
        cropped[down : down + inside.shape[0], right : right + inside.shape[1]] = inside
        return cropped

    @property
    def affine(self) -> torch.Tensor:
        """Factor and shift of each channel, (2, 3) in double, so that y = factor · x + shift."""
        factor = [self.rescale / std for std in self.std]
        shift = [-mean / std for mean, std in zip(self.mean, self.std, strict=True)]
        return torch.tensor([factor, shift], dtype=torch.float64)

    def normalise(self, pixels: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Convert uint8 (B, H, W, 3) to contiguous (B, 3, H, W) of `dtype`, on the same device."""
        # In float32 whatever `dtype` is: rounding the constants to bf16 would shift every value.
        multiply, add = _affine_on(self, pixels.device)
        # Permuted while they are bytes, for a quarter of the memory traffic.
        planes = pixels.permute(0, 3, 1, 2).contiguous()
        return torch.addcmul(add, planes.to(torch.float32), multiply).to(dtype)


@cache
def _affine_on(preprocessing: Preprocessing, device: torch.device) -> torch.Tensor:
    """Return (2, 3, 1, 1) in float32. Cached, because copying to a GPU synchronises with it."""
    with torch.inference_mode(False):
        return preprocessing.affine.to(device, torch.float32).view(2, 3, 1, 1)


@cache
def _fingerprint(preprocessing: Preprocessing) -> str:
    # Cached, because the event loop needs it for the cache key of every image.
    canonical = json.dumps(preprocessing.to_json(), sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(canonical.encode()).hexdigest()[:16]


def _resized_size(resize: tuple[int, int] | int, size: tuple[int, int]) -> tuple[int, int]:
    """Return (width, height) after resizing an image of this (width, height)."""
    if isinstance(resize, tuple):
        return resize[1], resize[0]
    width, height = size
    # Truncated, not rounded, like Hugging Face and torchvision.
    longest = int(resize * max(size) / min(size))
    if resize * longest > MAX_RESIZED_PIXELS:
        raise ImageTooLarge(
            f"The aspect ratio of the image, {width} × {height} pixels, is too extreme: with its "
            f"shortest edge resized to {resize} it would have {resize * longest} pixels; at most "
            f"{MAX_RESIZED_PIXELS} are allowed."
        )
    return (resize, longest) if width <= height else (longest, resize)


def golden_pixels(size: tuple[int, int]) -> Pixels:
    """Return two images (2, H, W, 3), the same for every bundle: coarse colour patches and noise.

    A server replays them when it loads a bundle and rejects a bundle with different logits. They
    are synthetic so that a bundle contains no training images.
    """
    height, width = size
    random = np.random.default_rng(GOLDEN_SEED)
    patches = random.integers(0, 256, (8, 8, 3), dtype=np.uint8)
    rows, columns = np.arange(height) * 8 // height, np.arange(width) * 8 // width
    noise = random.integers(0, 256, (height, width, 3), dtype=np.uint8)
    return np.stack([patches[rows][:, columns], noise])
