"""Nearest images by the cosine of their embeddings: exact, in blocks, without an index.

The embedding is the first part of a readout, the input of head-only tasks. Only two blocks of it
and the best results are in memory.
"""

from collections.abc import Collection, Iterator, Sequence
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from engram_server.parts.kept import KeptFolder

Floats = npt.NDArray[np.float32]
Integers = npt.NDArray[np.int64]

BLOCK: Final = 2048  # images


class Match(NamedTuple):
    image: int
    other: int  # of the query, or of the second image of a pair
    similarity: float  # cosine


class _Best:
    """The best matches so far, at most `top`, in arrays of equal length."""

    def __init__(self, top: int, least: float) -> None:
        self._top = top
        self.least = least  # that a new match needs
        self._similarities = np.zeros(0, np.float32)
        self._pairs = np.zeros((0, 2), np.int64)

    def add(self, similarities: Floats, indices: Integers, others: Integers) -> None:
        values = np.concatenate([self._similarities, similarities])
        pairs = np.concatenate([self._pairs, np.stack([indices, others], axis=1)])
        if len(values) > self._top:
            # Those that equal the last one stay, so that the order below decides between them.
            last = np.partition(-values, self._top - 1)[self._top - 1]
            enough = -values <= last
            values, pairs = values[enough], pairs[enough]
        order = np.lexsort((pairs[:, 1], pairs[:, 0], -values))[: self._top]
        self._similarities, self._pairs = values[order], pairs[order]
        if len(values) >= self._top:
            self.least = max(self.least, float(self._similarities[-1]))

    def matches(self) -> list[Match]:
        images, others = self._pairs.T.tolist()
        return list(map(Match, images, others, self._similarities.tolist()))


def embeddings(kept: KeptFolder, indices: Sequence[int]) -> Floats:
    """Return the embeddings of images divided by their length, (n, D); zeros if there is none."""
    return unit_rows(kept.readouts(indices)[:, : kept.embedding_width].astype(np.float32))


def unit_rows(rows: Floats) -> Floats:
    lengths = np.linalg.norm(rows, axis=1, keepdims=True)
    units: Floats = np.divide(rows, lengths, out=np.zeros_like(rows), where=lengths > 0)
    return units


def nearest(
    kept: KeptFolder,
    queries: Floats,
    top: int,
    *,
    exclude: Collection[int] = (),
    least: float = -1.0,
) -> list[Match]:
    """Return the images nearest to one of the queries (q, D), which have length one, best first."""
    best, excluded = _Best(top, least), np.array(sorted(exclude), dtype=np.int64)
    for indices, rows in _blocks(kept):
        of_image, query = np.full(len(rows), -np.inf, np.float32), np.zeros(len(rows), np.int64)
        for start in range(0, len(queries), BLOCK):
            found = rows @ queries[start : start + BLOCK].T
            place = found.argmax(axis=1)
            value = found[np.arange(len(rows)), place]
            query = np.where(value > of_image, start + place, query)
            of_image = np.maximum(value, of_image)
        places = np.arange(indices.start, indices.stop)
        usable = rows.any(axis=1) & ~np.isin(places, excluded) & (of_image >= best.least)
        best.add(of_image[usable], places[usable], query[usable])
    return best.matches()


def near_duplicates(kept: KeptFolder, top: int, least: float) -> list[Match]:
    """Return the pairs of images that are nearest to each other, best first."""
    best = _Best(top, least)
    for indices, rows in _blocks(kept):
        for others, columns in _blocks(kept, indices.start):
            similarities = rows @ columns.T
            if others.start == indices.start:  # each pair once
                similarities[np.tril_indices(len(rows))] = -np.inf
            first, second = np.nonzero(similarities >= best.least)
            found = similarities[first, second]
            best.add(found, first + indices.start, second + others.start)
    return best.matches()


def _blocks(kept: KeptFolder, start: int = 0) -> Iterator[tuple[range, Floats]]:
    for first in range(start, len(kept), BLOCK):
        indices = range(first, min(first + BLOCK, len(kept)))
        yield indices, embeddings(kept, indices)
