"""The examples of a few-shot task: the features and the labels of each image.

Features are the final feature of the backbone, followed by the summary of the image. Examples of
tasks that are taught by class names have no summary: their head reads the final feature only.

An image is identified by the SHA-256 of its file. The image itself is not stored, but its file name
and a thumbnail may be. Examples are sorted by digest and labels by name, so the result does not
depend on the order in which they were added: adding an example and removing it again gives the same
bytes.
"""

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
from engram_bundle.media import NO_MEDIA, Media
from engram_bundle.names import format_digest
from engram_bundle.schema import LabelledTaskType

from engram_server.errors import UnteachableExamples

DIGEST_BYTES = 32
_SHOWN = 60


@dataclass(frozen=True, slots=True)
class FeatureLayout:
    """Where features have the final feature and the summaries of layers."""

    width: int  # D
    parts: int  # P

    def blocks(self, features: int) -> list[slice]:
        """The columns of the final feature, then those of each layer."""
        step = self.parts * self.width
        layers = [slice(start, start + step) for start in range(self.width, features, step)]
        return [slice(0, self.width), *layers]


@dataclass(frozen=True, slots=True)
class Example:
    digest: bytes
    feature: npt.NDArray[np.floating]  # (F,)
    labels: frozenset[str]
    media: Media = NO_MEDIA


@dataclass(frozen=True, slots=True, eq=False)
class Examples:
    """n images with K labels, sorted by digest and by name.

    A row of `targets` has exactly one label for `single_label` tasks, and any number, including
    none, for `multi_label` tasks.
    """

    task_type: LabelledTaskType
    labels: tuple[str, ...]  # (K,), sorted
    features: npt.NDArray[np.float16]  # (n, F)
    targets: npt.NDArray[np.bool_]  # (n, K)
    digests: npt.NDArray[np.uint8]  # (n, 32), sorted
    media: tuple[Media, ...] = ()  # of each image; empty if no image has any

    @classmethod
    def of(cls, task_type: LabelledTaskType, examples: Iterable[Example]) -> "Examples":
        """Build from examples; raise UnteachableExamples if single-label examples contradict."""
        by_digest: dict[bytes, Example] = {}
        for example in examples:
            earlier = by_digest.get(example.digest)
            labels = example.labels if earlier is None else earlier.labels | example.labels
            if task_type == "single_label" and len(labels) != 1:
                raise UnteachableExamples(_contradiction(example.digest, labels))
            first = example if earlier is None else earlier
            media = _first(first.media, example.media)
            by_digest[example.digest] = Example(example.digest, first.feature, labels, media)
        rows = [by_digest[digest] for digest in sorted(by_digest)]
        names = tuple(sorted({label for row in rows for label in row.labels}))
        index = {name: k for k, name in enumerate(names)}
        targets = np.zeros((len(rows), len(names)), dtype=np.bool_)
        for target, row in zip(targets, rows, strict=True):
            target[[index[label] for label in row.labels]] = True
        width = len(rows[0].feature) if rows else 0
        features = np.array([row.feature for row in rows], np.float16).reshape(len(rows), width)
        digests = np.frombuffer(b"".join(row.digest for row in rows), np.uint8)
        digests = digests.reshape(-1, DIGEST_BYTES)
        all_media = tuple(row.media for row in rows)
        return cls(task_type, names, features, targets, digests, all_media)

    def __len__(self) -> int:
        return len(self.digests)

    def __getitem__(self, index: int) -> Example:
        labels = frozenset(self.labels[k] for k in np.flatnonzero(self.targets[index]))
        media = self.media[index] if self.media else NO_MEDIA
        return Example(self.digests[index].tobytes(), self.features[index], labels, media)

    def __iter__(self) -> Iterator[Example]:
        return map(self.__getitem__, range(len(self)))

    def with_added(self, examples: Sequence[Example], *, relabel: bool = False) -> "Examples":
        """Add examples; `relabel` replaces the labels of an image that is already present.

        Otherwise its labels are merged, which fails for a single-label task if they differ.
        """
        relabelled = {example.digest for example in examples} if relabel else set()
        # An image keeps its first features: another batch may round them differently.
        before = {one.digest: one for one in self}
        # Examples without a summary stay without.
        width = self.features.shape[1] if len(self) else None
        fresh = []
        for one in examples:
            first = before.get(one.digest, one)
            media = _first(first.media, one.media)
            fresh.append(Example(one.digest, first.feature[:width], one.labels, media))
        kept = [one for one in self if one.digest not in relabelled]
        return Examples.of(self.task_type, [*kept, *fresh])

    def with_labels(self, labels: Iterable[str]) -> "Examples":
        """Add labels that no image needs to have."""
        names = tuple(sorted({*self.labels, *labels}))
        targets = np.zeros((len(self), len(names)), dtype=np.bool_)
        targets[:, [names.index(name) for name in self.labels]] = self.targets
        return replace(self, labels=names, targets=targets)

    def without_summaries(self, width: int) -> "Examples":
        """Keep the final feature only, which has this width."""
        return replace(self, features=self.features[:, :width])

    def without(self, digests: Collection[bytes]) -> "Examples":
        """Remove examples, and the labels that no remaining example has."""
        return Examples.of(self.task_type, [one for one in self if one.digest not in digests])


def _first(media: Media, later: Media) -> Media:
    """The first name and the first thumbnail that an image has."""
    return Media(media.name or later.name, media.thumbnail or later.thumbnail)


def _contradiction(digest: bytes, labels: frozenset[str]) -> str:
    image = f"Image {format_digest(digest)}"
    if not labels:
        return f"{image} has no label. A single-label task needs exactly one label per image."
    named = " and as ".join(f"'{label[:_SHOWN]}'" for label in sorted(labels)[:3])
    return (
        f"{image} is labelled as {named}, but a single-label task needs exactly one label per "
        f"image. Keep one of them, or create a multi-label task."
    )
