"""The base pass in a few sizes, each captured once as a CUDA graph and then replayed.

A pass is hundreds of kernels, and for a small batch the host needs longer to launch them than a GPU
to run them. A graph is launched as one, but has fixed shapes and fixed tensors: so a batch is
padded to the next of a few sizes, and what padding gives is dropped. Task rows stay outside. What
they need depends on which tasks are asked for, and the host launches them while the graph runs.
"""

from bisect import bisect_left
from collections.abc import Callable
from functools import partial
from typing import TypeVar

import torch
from torch import Tensor

from server.model.backbone import Backbone
from server.model.context import ContextBatch
from server.model.masked_pass import encode

T = TypeVar("T")
Encode = Callable[[Tensor], ContextBatch]
Capture = Callable[[Encode, Tensor], Encode]  # of a function, and of an example of its argument


def batch_sizes(largest: int) -> list[int]:
    """Powers of two and the middles between them, up to `largest`: padding is a third at most."""
    powers = [2**exponent for exponent in range(largest.bit_length())]
    sizes = {size for power in powers for size in (power, power + power // 2)}
    return sorted({size for size in sizes if size < largest} | {largest})


def capture_on(device: torch.device) -> Capture | None:
    """How a pass is captured there; None where there is nothing to gain."""
    return CudaGraphs() if device.type == "cuda" else None


class CapturedEncoder:
    """`encode` for batches of any size; those of up to `largest` images are replayed.

    What it gives is overwritten by the next call: use it, or copy it, before.
    """

    def __init__(self, backbone: Backbone, largest: int, capture: Capture) -> None:
        self._backbone = backbone
        self._sizes = batch_sizes(largest)
        blank = torch.zeros(
            largest, *backbone.image_size, 3, dtype=torch.uint8, device=backbone.device
        )
        # The largest first: the others find room in its memory.
        self._captured = {
            size: capture(partial(encode, backbone), blank[:size]) for size in reversed(self._sizes)
        }

    def __call__(self, pixels: Tensor) -> ContextBatch:
        """Of images as `Backbone.embed_images` takes them."""
        images = len(pixels)
        place = bisect_left(self._sizes, images)
        if place == len(self._sizes) or pixels.dtype != torch.uint8:  # too many; pixel values
            return encode(self._backbone, pixels)
        size = self._sizes[place]
        if images < size:
            pixels = torch.cat([pixels, pixels.new_zeros(size - images, *pixels.shape[1:])])
        return self._captured[size](pixels).first(images)


class CudaGraphs:
    """Captures functions as graphs that share their memory: never two of them at once."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, run: Callable[[Tensor], T], example: Tensor) -> Callable[[Tensor], T]:
        with torch.cuda.device(example.device):
            given = example.clone()
            # Libraries set themselves up in a first run, which no graph can have.
            aside = torch.cuda.Stream()  # type: ignore[no-untyped-call]
            aside.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(aside):
                run(given)
            torch.cuda.current_stream().wait_stream(aside)
            graph = torch.cuda.CUDAGraph()
            # Threads that load tasks, or run another worker, go on meanwhile.
            with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
                result = run(given)

        def replay(pixels: Tensor) -> T:
            given.copy_(pixels)
            graph.replay()
            return result

        return replay
