"""CUDA graphs of the base pass, captured once for a few batch sizes and then replayed.

A pass launches hundreds of kernels; for a small batch the host needs longer to launch them than the
GPU to run them. A graph is one launch, but has fixed shapes and tensors, so a batch is padded to
the next captured size. Task rows are not part of the graph: their kernels depend on the requested
tasks, and the host launches them while the graph runs.
"""

from bisect import bisect_left
from collections.abc import Callable
from functools import partial
from typing import TypeVar

import torch
from torch import Tensor

from engram_server.model.backbone import Backbone
from engram_server.model.context import ContextBatch
from engram_server.model.masked_pass import encode

T = TypeVar("T")
Encode = Callable[[Tensor], ContextBatch]
Capture = Callable[[Encode, Tensor], Encode]  # a function and an example of its argument


def batch_sizes(largest: int) -> list[int]:
    """Return powers of two and the midpoints between them: padding is at most a third."""
    powers = [2**exponent for exponent in range(largest.bit_length())]
    sizes = {size for power in powers for size in (power, power + power // 2)}
    return sorted({size for size in sizes if size < largest} | {largest})


def capture_on(device: torch.device) -> Capture | None:
    """Return how to capture a pass on this device, or None if it has no graphs."""
    return CudaGraphs() if device.type == "cuda" else None


class CapturedEncoder:
    """`encode` for batches of any size; batches of up to `largest` images replay a graph.

    The next call overwrites the result: use it or copy it before.
    """

    def __init__(self, backbone: Backbone, largest: int, capture: Capture) -> None:
        self._backbone = backbone
        self._sizes = batch_sizes(largest)
        blank = torch.zeros(
            largest, *backbone.image_size, 3, dtype=torch.uint8, device=backbone.device
        )
        # The largest first: the others reuse its memory.
        self._captured = {
            size: capture(partial(encode, backbone), blank[:size]) for size in reversed(self._sizes)
        }

    def __call__(self, pixels: Tensor) -> ContextBatch:
        """Encode images as `Backbone.embed_images` takes them."""
        images = len(pixels)
        index = bisect_left(self._sizes, images)
        if index == len(self._sizes) or pixels.dtype != torch.uint8:  # too many, or pixel values
            return encode(self._backbone, pixels)
        size = self._sizes[index]
        if images < size:
            pixels = torch.cat([pixels, pixels.new_zeros(size - images, *pixels.shape[1:])])
        return self._captured[size](pixels).first(images)


class CudaGraphs:
    """Capture functions as graphs that share memory; only one of them may run at a time."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, run: Callable[[Tensor], T], example: Tensor) -> Callable[[Tensor], T]:
        with torch.cuda.device(example.device):
            buffer = example.clone()
            # Libraries initialise themselves in a first run, which cannot be captured.
            warm_up = torch.cuda.Stream()  # type: ignore[no-untyped-call]
            warm_up.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(warm_up):
                run(buffer)
            torch.cuda.current_stream().wait_stream(warm_up)
            graph = torch.cuda.CUDAGraph()
            # Threads that load tasks or run another worker continue during the capture.
            with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
                result = run(buffer)

        def replay(pixels: Tensor) -> T:
            buffer.copy_(pixels)
            graph.replay()
            return result

        return replay
