"""The images of a run in batches, read ahead: photos, or what was kept of them."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Executor, Future
from itertools import islice
from typing import NamedTuple, Protocol, TypeVar

import torch

from engram_server.batch.decoding import DecodedImage, Decoder
from engram_server.batch.sources import Source
from engram_server.engine.types import Pixels
from engram_server.model.context import ContextBatch
from engram_server.parts.kept import KeptFolder

T = TypeVar("T")
U = TypeVar("U")
Inputs = Sequence[Pixels] | ContextBatch


class ImageBatch(NamedTuple):
    images: Sequence[DecodedImage]
    inputs: Inputs  # of the images without an error, in order

    @property
    def places(self) -> list[int]:
        """The positions of the images without an error."""
        return [place for place, image in enumerate(self.images) if image.error is None]


class Images(Protocol):
    """All images of a run, by index."""

    def load(self, batch: range) -> ImageBatch:
        """Read one batch in this thread."""

    def load_ahead(
        self, batches: Sequence[range], pool: Executor, ahead: int
    ) -> Iterator[ImageBatch]:
        """Read batches in order, with at most `ahead` of them read in advance."""


class Photos:
    def __init__(self, source: Source, decoder: Decoder) -> None:
        self._source = source
        self._decoder = decoder

    def load(self, batch: range) -> ImageBatch:
        return _decoded([self._decoder(self._source, index) for index in batch])

    def load_ahead(
        self, batches: Sequence[range], pool: Executor, ahead: int
    ) -> Iterator[ImageBatch]:
        # Image by image, so that all threads decode those that are needed first.
        indices = (index for batch in batches for index in batch)
        largest = max(map(len, batches), default=0)
        images = ahead_map(
            pool, lambda index: self._decoder(self._source, index), indices, ahead * largest
        )
        for batch in batches:
            yield _decoded(list(islice(images, len(batch))))


def _decoded(images: Sequence[DecodedImage]) -> ImageBatch:
    return ImageBatch(images, [image.pixels for image in images if image.pixels is not None])


class KeptImages:
    def __init__(self, kept: KeptFolder, dtype: torch.dtype) -> None:
        self._kept = kept
        self._dtype = dtype

    def load(self, batch: range) -> ImageBatch:
        images = [DecodedImage(**self._kept.image(index)) for index in batch]
        good: Sequence[int] = batch
        if any(image.error is not None for image in images):
            good = [index for index, image in zip(batch, images, strict=True) if not image.error]
        if not good:
            return ImageBatch(images, ())
        return ImageBatch(images, self._kept.contexts(good, torch.device("cpu"), self._dtype))

    def load_ahead(
        self, batches: Sequence[range], pool: Executor, ahead: int
    ) -> Iterator[ImageBatch]:
        return ahead_map(pool, self.load, batches, ahead)


def ahead_map(
    pool: Executor, function: Callable[[T], U], items: Iterable[T], ahead: int
) -> Iterator[U]:
    """Yield the results in order, with at most `ahead` of them computed in advance."""
    waiting: deque[Future[U]] = deque()
    for item in items:
        waiting.append(pool.submit(function, item))
        if len(waiting) > ahead:
            yield waiting.popleft().result()
    while waiting:
        yield waiting.popleft().result()
