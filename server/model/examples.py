"""What a task is taught from: features of photos with their labels, one for each photo.

A photo is known by the SHA-256 of its file and never kept. Examples lie in the order of their
digests and labels in the order of their names, so that what is made of them does not depend on who
added what first: adding an example and taking it away again gives the same bytes.
"""

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from server.errors import UnteachableExamples

TaughtProblem = Literal["single_label", "multi_label"]
DIGEST_BYTES = 32
_SHOWN = 60


@dataclass(frozen=True, slots=True)
class Example:
    """One photo: the SHA-256 of its file, what a head reads of it, and its labels."""

    digest: bytes
    feature: npt.NDArray[np.floating]  # (D,)
    labels: frozenset[str]


@dataclass(frozen=True, slots=True, eq=False)
class Examples:
    """n photos with K labels, in the order of digests and of names.

    A row of `targets` has one label set where the problem is `single_label`, and any number of them
    where it is `multi_label`: a photo of nothing that is named is an example, too.
    """

    problem: TaughtProblem
    labels: tuple[str, ...]  # (K,), sorted
    features: npt.NDArray[np.float16]  # (n, D)
    targets: npt.NDArray[np.bool_]  # (n, K)
    digests: npt.NDArray[np.uint8]  # (n, 32), sorted

    @classmethod
    def of(cls, problem: TaughtProblem, examples: Iterable[Example]) -> "Examples":
        """Raises UnteachableExamples where single-label examples contradict each other."""
        by_digest: dict[bytes, Example] = {}
        for example in examples:
            known = by_digest.get(example.digest)
            labels = example.labels if known is None else known.labels | example.labels
            if problem == "single_label" and len(labels) != 1:
                raise UnteachableExamples(_contradiction(example.digest, labels))
            first = example if known is None else known
            by_digest[example.digest] = Example(example.digest, first.feature, labels)
        rows = [by_digest[digest] for digest in sorted(by_digest)]
        names = tuple(sorted({label for row in rows for label in row.labels}))
        place = {name: k for k, name in enumerate(names)}
        targets = np.zeros((len(rows), len(names)), dtype=np.bool_)
        for target, row in zip(targets, rows, strict=True):
            target[[place[label] for label in row.labels]] = True
        width = len(rows[0].feature) if rows else 0
        features = np.array([row.feature for row in rows], np.float16).reshape(len(rows), width)
        digests = np.frombuffer(b"".join(row.digest for row in rows), np.uint8)
        return cls(problem, names, features, targets, digests.reshape(-1, DIGEST_BYTES))

    def __len__(self) -> int:
        return len(self.digests)

    def __getitem__(self, place: int) -> Example:
        labels = frozenset(self.labels[k] for k in np.flatnonzero(self.targets[place]))
        return Example(self.digests[place].tobytes(), self.features[place], labels)

    def __iter__(self) -> Iterator[Example]:
        return map(self.__getitem__, range(len(self)))

    def with_added(self, examples: Sequence[Example], *, relabel: bool = False) -> "Examples":
        """These and others; with `relabel` a photo that is here already takes its new labels.

        Otherwise its labels are added, which a single-label task refuses unless they are the same.
        """
        given = {example.digest for example in examples} if relabel else set()
        # A photo keeps the feature it came with: another batch may round it differently.
        features = {one.digest: one.feature for one in self}
        fresh = [
            Example(one.digest, features.get(one.digest, one.feature), one.labels)
            for one in examples
        ]
        kept = [one for one in self if one.digest not in given]
        return Examples.of(self.problem, [*kept, *fresh])

    def with_labels(self, labels: Iterable[str]) -> "Examples":
        """The same photos, and labels that none of them has to have."""
        names = tuple(sorted({*self.labels, *labels}))
        targets = np.zeros((len(self), len(names)), dtype=np.bool_)
        targets[:, [names.index(name) for name in self.labels]] = self.targets
        return Examples(self.problem, names, self.features, targets, self.digests)

    def without(self, digests: Collection[bytes]) -> "Examples":
        """The others; a label that no example has any more is gone, too."""
        return Examples.of(self.problem, [one for one in self if one.digest not in digests])


def _contradiction(digest: bytes, labels: frozenset[str]) -> str:
    photo = f"the photo sha256:{digest.hex()}"
    if not labels:
        return f"{photo} has no label; a single-label task needs one for each photo"
    named = " and as ".join(f"'{label[:_SHOWN]}'" for label in sorted(labels)[:3])
    return (
        f"{photo} is given as {named}, and a single-label task has one label for each photo: "
        f"keep one, or teach a multi-label task"
    )
