"""Asynchronous copies of pixels from pinned memory to a GPU.

While the GPU computes a batch, the images of the next one are copied on a separate stream. The
reader waits for that stream on the device, not on the host.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from engram_server.engine.types import Pixels


class Staged(NamedTuple):
    """The pixels of an image on a device, and the `Staging` whose stream copies them."""

    by: "Staging"
    pixels: Tensor


class Staging:
    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream: torch.cuda.Stream | None = None
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def send(self, pixels: Pixels) -> Staged:
        kind = torch.uint8 if pixels.dtype == "uint8" else torch.float32
        host = torch.empty(pixels.shape, dtype=kind, pin_memory=self._stream is not None)
        host.numpy()[...] = pixels
        if self._stream is None:
            return Staged(self, host.to(self._device))
        with torch.cuda.stream(self._stream):
            return Staged(self, host.to(self._device, non_blocking=True))

    def stack(self, images: Sequence[Staged]) -> Tensor:
        """Stack images that this object sent into one batch."""
        if self._stream is not None:
            current = torch.cuda.current_stream(self._device)
            current.wait_stream(self._stream)
            for image in images:
                # Allocated on the other stream: keep the memory until this stream has read it.
                image.pixels.record_stream(current)
        return torch.stack([image.pixels for image in images])


def staging_for(device: torch.device) -> Staging | None:
    """A `Staging` for GPUs; None for CPUs, which need no copies."""
    return Staging(device) if device.type == "cuda" else None
