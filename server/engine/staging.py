"""Pixels on their way to a GPU: copied from pinned memory, beside what the GPU computes.

While a batch is computed the images that wait for the next one are sent. The copies have a stream
of their own; whoever reads them waits for that stream, on the device and not on the host.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from server.engine.types import Pixels


class Staged(NamedTuple):
    """The pixels of an image that were sent, and by whom: nobody else knows when they arrive."""

    by: "Staging"
    pixels: Tensor


class Staging:
    """Sends pixels to one device."""

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
        """Images that were sent by this, as one batch."""
        if self._stream is not None:
            current = torch.cuda.current_stream(self._device)
            current.wait_stream(self._stream)
            for image in images:
                # It was allocated for the other stream, and must not be reused before this one.
                image.pixels.record_stream(current)
        return torch.stack([image.pixels for image in images])


def staging_for(device: torch.device) -> Staging | None:
    """None where pixels already are where the pass takes them."""
    return Staging(device) if device.type == "cuda" else None
