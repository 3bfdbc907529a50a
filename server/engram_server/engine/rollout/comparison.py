"""How a candidate version answers the images that another version of its task answered.

A `Comparison` has counters of fixed size and the digests of the last images on which the two
differ. Labels are compared by name: versions may have different classes, or another order.
"""

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt
from engram_store import PairEvidence

from engram_server.engine.types import Floats, TaskVersion
from engram_server.model.heads.drift import DriftReference

Indices = npt.NDArray[np.int64]

TOP_K: Final = 5
COUNTED_CLASSES: Final = 256  # the first of a task; more are counted in the total only
KEPT_DISAGREEMENTS: Final = 50
CLASSIFICATION: Final = ("single_label", "multi_label")


class ObservedImage(NamedTuple):
    digest: str
    thumbnail: bytes = b""


@dataclass(frozen=True, slots=True)
class Disagreement:
    """An image on which two versions differ."""

    digest: str
    baseline: str  # its top label
    candidate: str
    baseline_score: float
    candidate_score: float
    thumbnail: bytes = b""  # a WebP file, if the operator wants them


@dataclass(frozen=True, slots=True)
class Answers:
    """The answers of a version for some of the images that were observed together."""

    by: TaskVersion
    images: Indices  # (n,): ascending, unique
    logits: Floats  # (n, K)
    ood_scores: Floats | None = None  # (n,)
    reference: DriftReference | None = None

    @property
    def finite(self) -> npt.NDArray[np.bool_]:
        return np.asarray(np.isfinite(self.logits).all(axis=1))

    @property
    def usable(self) -> "Answers":
        """The finite answers; without a copy if all are."""
        # A sum is finite if all its parts are, and is read once.
        return self if math.isfinite(float(self.logits.sum())) else self.at(self.finite)

    def at(self, rows: Indices | npt.NDArray[np.bool_]) -> "Answers":
        scores = None if self.ood_scores is None else self.ood_scores[rows]
        return replace(self, images=self.images[rows], logits=self.logits[rows], ood_scores=scores)


@dataclass(slots=True)
class Comparison:
    """Counters of one pair of versions. Not thread-safe."""

    baseline: TaskVersion
    candidate: TaskVersion
    images: int = 0
    agreed: int = 0
    agreed_top_k: int = 0
    score_difference: float = 0.0
    dropped: int = 0
    not_finite: int = 0
    # By whether the baseline and the candidate were right, according to feedback.
    feedback: dict[tuple[bool, bool], int] = field(default_factory=dict)
    classes: npt.NDArray[np.int32] = field(init=False)  # (2, classes): images, and agreements
    disagreements: deque[Disagreement] = field(
        default_factory=lambda: deque(maxlen=KEPT_DISAGREEMENTS)
    )
    _columns: Indices | None = field(init=False)  # the candidate's index of each baseline label

    def __post_init__(self) -> None:
        labels, others = self.baseline.labels, self.candidate.labels
        self.classes = np.zeros((2, min(len(labels), COUNTED_CLASSES)), np.int32)
        self._columns = None
        if labels != others:
            index_of = {label: index for index, label in enumerate(others)}
            self._columns = np.array([index_of.get(label, -1) for label in labels], np.int64)

    @property
    def comparable(self) -> bool:
        """Whether both are classification tasks of one type."""
        task_type = self.baseline.task_type
        return task_type in CLASSIFICATION and task_type == self.candidate.task_type

    def add(self, ours: Answers, theirs: Answers, images: Sequence[ObservedImage]) -> None:
        """Count images that both versions answered; `images` are all that were observed."""
        _, left, right = np.intersect1d(
            ours.images, theirs.images, assume_unique=True, return_indices=True
        )
        ours, theirs = ours.at(left), theirs.at(right)
        self.not_finite += int(np.count_nonzero(~theirs.finite))
        usable = ours.finite & theirs.finite
        ours, theirs = ours.at(usable), theirs.at(usable)
        if not len(ours.images) or not self.comparable:
            return
        first, own = _scores(ours), _scores(theirs)
        second = self._aligned(own)
        rows, tops = np.arange(len(first)), first.argmax(axis=1)
        agreed = self._agree(first, own, second)
        self.images += len(rows)
        self.agreed += int(agreed.sum())
        matching = second[rows, tops]
        better = (own > matching[:, None]).sum(axis=1)
        self.agreed_top_k += int(np.count_nonzero((better < TOP_K) & (matching >= 0)))
        self.score_difference += float(np.abs(first[rows, tops] - matching.clip(min=0)).sum())
        counted = tops < self.classes.shape[1]
        np.add.at(self.classes[0], tops[counted], 1)
        np.add.at(self.classes[1], tops[counted & agreed], 1)
        for row in np.flatnonzero(~agreed)[-KEPT_DISAGREEMENTS:].tolist():
            self._note(images[ours.images[row]], first[row], own[row])

    def _aligned(self, scores: Floats) -> Floats:
        """Return the candidate's scores of the baseline's labels; -1 for labels it lacks."""
        if self._columns is None:
            return scores
        aligned = scores[:, self._columns]
        aligned[:, self._columns < 0] = -1
        return aligned

    def _agree(self, first: Floats, own: Floats, second: Floats) -> npt.NDArray[np.bool_]:
        if self.baseline.task_type == "multi_label":
            same = ((first >= 0.5) == (second >= 0.5)).all(axis=1)
            return np.asarray(same & ((own >= 0.5).sum(axis=1) == (second >= 0.5).sum(axis=1)))
        # Not the highest of `second`: a label that only the candidate has may be its answer.
        tops = first.argmax(axis=1)
        return np.asarray(second[np.arange(len(tops)), tops] == own.max(axis=1))

    def _note(self, image: ObservedImage, first: Floats, second: Floats) -> None:
        top, other = int(first.argmax()), int(second.argmax())
        self.disagreements.append(
            Disagreement(
                image.digest,
                label_of(self.baseline, top),
                label_of(self.candidate, other),
                float(first[top]),
                float(second[other]),
                image.thumbnail,
            )
        )

    def score(self, *, baseline_right: bool, candidate_right: bool) -> None:
        """Count feedback about an image that both versions answered."""
        key = baseline_right, candidate_right
        self.feedback[key] = self.feedback.get(key, 0) + 1

    def forget(self, digests: frozenset[str] | None) -> None:
        """Drop the disagreements of these images, or all; counts stay."""
        kept = [one for one in self.disagreements if digests and one.digest not in digests]
        self.disagreements.clear()
        self.disagreements.extend(kept)

    def evidence(self) -> PairEvidence:
        baseline, candidate = self.baseline.version, self.candidate.version
        assert baseline is not None
        assert candidate is not None, "only versions are compared"
        seen = np.flatnonzero(self.classes[0])
        return PairEvidence(
            baseline=baseline,
            candidate=candidate,
            images=self.images,
            agreed=self.agreed,
            agreed_top_k=self.agreed_top_k,
            score_difference=self.score_difference,
            dropped=self.dropped,
            not_finite=self.not_finite,
            both_right=self.feedback.get((True, True), 0),
            only_baseline_right=self.feedback.get((True, False), 0),
            only_candidate_right=self.feedback.get((False, True), 0),
            both_wrong=self.feedback.get((False, False), 0),
            classes={
                label_of(self.baseline, index): (
                    int(self.classes[0, index]),
                    int(self.classes[1, index]),
                )
                for index in seen.tolist()
            },
        )


def label_of(task: TaskVersion, index: int) -> str:
    return task.labels[index] if index < len(task.labels) else str(index)


def _scores(answers: Answers) -> Floats:
    """Class probabilities (n, K), without the uniform share: it moves no rank."""
    logits = answers.logits.astype(np.float32)
    if answers.by.task_type == "multi_label":
        sigmoid: Floats = 0.5 * (1 + np.tanh(0.5 * logits))
        return sigmoid
    shifted = np.exp(logits - logits.max(axis=1, keepdims=True))
    distribution: Floats = shifted / shifted.sum(axis=1, keepdims=True)
    return distribution
