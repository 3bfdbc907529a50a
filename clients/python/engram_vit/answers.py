"""The server's responses as frozen dataclasses.

`replies.build` fills them by field name and ignores unknown members; commands print them as JSON.
`Answers.rows()` is the table that `to_pandas()` and `engram predict --csv` show.
"""

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pandas import DataFrame  # type: ignore[import-untyped]

COLUMNS = (
    *("image", "task", "version", "label", "index", "score", "value"),
    *("in_distribution", "error"),
)
Row = dict[str, object]  # keyed by COLUMNS


@dataclass(frozen=True, slots=True)
class Prediction:
    label: str
    index: int
    score: float


@dataclass(frozen=True, slots=True)
class Attention:
    """Attention of a task over the image patches, with `explain="attention"`."""

    on_patches: float  # sum of the grid; the rest is on other tokens
    grid: tuple[tuple[float, ...], ...]  # one weight per patch, from the top left


@dataclass(frozen=True, slots=True)
class TaskAnswer:
    """One task's answer for one image. The task type and the request decide which field is set."""

    version: int | None  # None for `base`, the backbone's own head
    predictions: tuple[Prediction, ...] | None = None
    values: tuple[float, ...] | None = None
    logits: tuple[float, ...] | None = None
    embedding: tuple[float, ...] | None = None
    attention: Attention | None = None
    error: str | None = None  # why this task has no answer for this image
    in_distribution: bool | None = None  # None: the task has no out-of-distribution detector

    @property
    def top(self) -> Prediction | None:
        """The best prediction; None if there is none, for example below a threshold."""
        return self.predictions[0] if self.predictions else None

    def _rows(self) -> Iterator[Row]:
        if self.error is not None:
            yield {"error": self.error}
        for one in self.predictions or ():
            yield {"label": one.label, "index": one.index, "score": one.score}
        for index, value in enumerate(self.values or self.logits or self.embedding or ()):
            yield {"index": index, "value": value}
        if self.predictions == ():  # all below the threshold, or hidden: the row says so
            yield {}


@dataclass(frozen=True, slots=True)
class ImageAnswer:
    """The answers of all tasks for one image, by task reference."""

    image: str  # path or digest; `image N` for pixels and bytes
    index: int  # position in the list of images
    digest: str | None = None  # identifies the image in later requests
    cache: str | None = None  # hit, miss or off
    tasks: Mapping[str, TaskAnswer] = field(default_factory=dict)
    generation: int | None = None
    backbone: str | None = None
    error: str | None = None  # why there is no answer, with `keep_going`

    def __getitem__(self, task: str) -> TaskAnswer:
        return self.tasks[task]

    @property
    def top(self) -> dict[str, Prediction]:
        """The best prediction of each task that has one."""
        return {name: best for name, task in self.tasks.items() if (best := task.top) is not None}

    def rows(self) -> Iterator[Row]:
        """One row per prediction or value, each with every column.

        A task without predictions has one row without a label.
        """
        empty: Row = dict.fromkeys(COLUMNS)
        if self.error is not None:
            yield {**empty, "image": self.image, "error": self.error}
        for name, task in self.tasks.items():
            about: Row = {"task": name, "version": task.version}
            about["in_distribution"] = task.in_distribution
            for row in task._rows():
                yield {**empty, "image": self.image, **about, **row}

    def to_pandas(self) -> "DataFrame":
        return Answers((self,)).to_pandas()


class Answers(tuple[ImageAnswer, ...]):
    """The answers for a list of images, in its order."""

    __slots__ = ()

    @property
    def top(self) -> list[dict[str, Prediction]]:
        return [answer.top for answer in self]

    def rows(self) -> Iterator[Row]:
        for answer in self:
            yield from answer.rows()

    def to_pandas(self) -> "DataFrame":
        from pandas import DataFrame

        return DataFrame(list(self.rows()), columns=list(COLUMNS))


@dataclass(frozen=True, slots=True)
class TaskSummary:
    """A task with the facts of its default version."""

    task: str
    version: int | None  # None for `base`; of a retired task, the default after a restore
    status: str  # ready, failed, on_demand, unloaded or retired
    reason: str | None  # why it failed
    task_type: str
    classes: int
    description: str
    aliases: Mapping[str, int]
    versions: tuple[int, ...]  # live versions; of a retired task, those that a restore brings back


@dataclass(frozen=True, slots=True)
class TaskPage:
    tasks: tuple[TaskSummary, ...]
    next: str | None = None  # the cursor of the next page


@dataclass(frozen=True, slots=True)
class Version:
    version: int
    digest: str
    size_bytes: int
    aliases: tuple[str, ...]
    status: str
    reason: str | None
    resident: bool
    task_type: str
    classes: int
    memory_tokens: int
    description: str
    extends: tuple[str, ...]
    backbone: str
    generation: int
    published: str
    actor: str


@dataclass(frozen=True, slots=True)
class TaskDetail(TaskSummary):
    """A task with its live versions, oldest first, and its class labels if it is loaded."""

    generation: int
    class_labels: tuple[str, ...] | None
    version_details: tuple[Version, ...]
    rollback_target: int | None = None  # where `rollback` would move `default`


@dataclass(frozen=True, slots=True)
class Change:
    """One entry of a task's history; the kind's own fields are in `details`."""

    generation: int
    time: str
    actor: str
    kind: str  # publish, alias, retire, restore or purge
    details: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Rollout:
    """Which replicas serve a change, after `wait="all"`, by their ids."""

    serving: tuple[str, ...]
    behind: tuple[str, ...]  # not yet when the time was over
    error: str | None = None  # why the replicas could not be read

    @property
    def complete(self) -> bool:
        return not self.behind and self.error is None


@dataclass(frozen=True, slots=True)
class PublishResult:
    """A published version, which is being served."""

    task: str
    version: int
    digest: str
    generation: int
    created: bool  # False if the task already had this bundle
    aliases: tuple[str, ...]  # that now point to the version
    replicas: Rollout | None = None  # with `wait="all"`


@dataclass(frozen=True, slots=True)
class ClassExamples:
    label: str
    examples: int
    accuracy: float | None = None  # leave-one-out, of its examples; None if unknown


@dataclass(frozen=True, slots=True)
class LeaveOneOut:
    """Leave-one-out accuracy with its 95 % confidence interval."""

    accuracy: float
    low: float
    high: float
    images: int  # photos it was measured on: those whose class has another
    correct: int  # photos of them that were predicted right


@dataclass(frozen=True, slots=True)
class LabelIssue:
    digest: str
    labels: tuple[str, ...]
    suggested: tuple[str, ...]
    probability: float  # of its labels, leave-one-out
    name: str | None = None  # of its file, if it was kept
    photo: str | None = None  # its path, if this call sent it


@dataclass(frozen=True, slots=True)
class Unreadable:
    """A photo that cannot be read, and was therefore not taught."""

    photo: str  # its path, or its position
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TeachResult(PublishResult):
    """A taught version, which is being served."""

    task_type: str
    examples: int
    classes: tuple[ClassExamples, ...]
    leave_one_out: LeaveOneOut | None  # None while no class has two examples
    label_issues: tuple[LabelIssue, ...]  # suspected label errors, worst first
    added: int
    moved: int  # examples whose labels changed
    removed: int
    unreadable: tuple[Unreadable, ...] = ()  # photos that were left out


@dataclass(frozen=True, slots=True)
class Example:
    digest: str
    labels: tuple[str, ...]
    probability: float | None  # of its labels, leave-one-out
    predicted: tuple[str, ...] | None = None  # leave-one-out; None for the only one of a class
    name: str | None = None  # of its file, if it was kept
    thumbnail: str | None = None  # a data URL of a WebP file, if requested and kept


@dataclass(frozen=True, slots=True)
class Examples:
    task: str
    version: int
    task_type: str
    classes: tuple[ClassExamples, ...]
    leave_one_out: LeaveOneOut | None
    label_issues: tuple[LabelIssue, ...]
    examples: tuple[Example, ...]


@dataclass(frozen=True, slots=True)
class CorrectionsResult:
    """Corrections stored for the next training of a trained task."""

    task: str
    corrections: int  # photos


@dataclass(frozen=True, slots=True)
class CorrectionsRemoved:
    task: str
    removed: int  # corrections


@dataclass(frozen=True, slots=True)
class Correction:
    """The true labels of a photo, reported by a user."""

    digest: str
    labels: tuple[str, ...]
    version: int  # that was the default at that time
    time: str
    actor: str


@dataclass(frozen=True, slots=True)
class ClassAgreement:
    label: str
    images: int
    agreement: float


@dataclass(frozen=True, slots=True)
class Gain:
    """Accuracies of two versions by feedback, and their difference with its 95 % interval."""

    images: int
    baseline_accuracy: float
    candidate_accuracy: float
    gain: float
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class Disagreement:
    """An image for which two versions have different labels."""

    digest: str
    baseline: str
    candidate: str
    baseline_score: float
    candidate_score: float


@dataclass(frozen=True, slots=True)
class VersionPair:
    """Two versions of a task on the same images."""

    baseline: int  # the version that answered
    candidate: int
    images: int
    agreement: float | None  # share of images with the same label
    top_k_agreement: float | None
    mean_score_difference: float | None
    dropped: int  # images on which the candidate was left out under load
    not_finite: int
    classes: tuple[ClassAgreement, ...]  # the lowest agreement first
    feedback: Gain | None
    disagreements: tuple[Disagreement, ...] | None = None  # None without the scope `publish`


@dataclass(frozen=True, slots=True)
class Comparison:
    task: str
    generation: int
    aliases: Mapping[str, int]
    pairs: tuple[VersionPair, ...]


@dataclass(frozen=True, slots=True)
class FeedbackResult:
    task: str
    scored: int  # images whose answers were scored
    repeated: int  # images that had feedback before
    unknown: int  # images that the replica does not remember


@dataclass(frozen=True, slots=True)
class ChangeResult:
    """A task's state after a change; no versions if it is retired."""

    task: str
    generation: int
    aliases: Mapping[str, int]
    versions: tuple[int, ...]
    replicas: Rollout | None = None  # with `wait="all"`


@dataclass(frozen=True, slots=True)
class Replica:
    id: str
    this: bool  # the replica that answered
    generation: int
    age_seconds: float
    hostname: str
    address: str | None
    started: str
    version: str
    backbone: str
    fingerprint: str
    process: int | None = None  # its number, if several processes share the address


def write_file(path: Path, data: bytes) -> None:
    """Write a file atomically."""
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        part.write_bytes(data)
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


@dataclass(frozen=True, slots=True)
class Bundle:
    """The bundle file of one version, checked against its digest."""

    task: str
    version: int
    digest: str
    data: bytes = field(repr=False)

    @property
    def filename(self) -> str:
        """For example `team-birds-3.safetensors`."""
        return f"{self.task.replace('/', '-')}-{self.version}.safetensors"

    def save(self, out: str | os.PathLike[str] = ".") -> Path:
        """Write the file atomically; into a folder under `filename`."""
        path = Path(out, self.filename) if Path(out).is_dir() else Path(out)
        write_file(path, self.data)
        return path


@dataclass(frozen=True, slots=True)
class ValidationResult:
    """Whether the server can serve a bundle, and its manifest."""

    valid: bool
    digest: str | None
    problems: tuple[str, ...]
    manifest: Mapping[str, Any] | None
    classes: int | None
    memory_tokens: int | None
