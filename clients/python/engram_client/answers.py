"""What a server answers, as frozen dataclasses: the one declaration of its JSON.

`replies.build` reads them by their fields, and commands print them as JSON by the same fields.
Members that this client does not know are left out.

Figures come in one shape everywhere: `Answers.rows()` is what `to_pandas()` and `engram predict
--csv` show.
"""

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pandas import DataFrame  # type: ignore[import-untyped]

COLUMNS = ("image", "task", "version", "label", "index", "score", "value", "error")
Row = dict[str, object]  # keyed by COLUMNS


# --- predictions ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Prediction:
    """One label of a task and how sure it is."""

    label: str
    index: int
    score: float


@dataclass(frozen=True, slots=True)
class Attention:
    """Where in the image a task looked, with `explain="attention"`."""

    on_patches: float  # the sum of the grid; the rest lies on other tokens
    grid: tuple[tuple[float, ...], ...]  # a weight for each patch, row by row from the top left


@dataclass(frozen=True, slots=True)
class TaskAnswer:
    """One task about one image. Which member is set depends on the task and on what was asked."""

    version: int | None  # None for `base`, the backbone's own head
    predictions: tuple[Prediction, ...] | None = None
    values: tuple[float, ...] | None = None
    logits: tuple[float, ...] | None = None
    embedding: tuple[float, ...] | None = None
    attention: Attention | None = None
    error: str | None = None  # why this task has no answer for this image
    known: bool | None = None  # looks like what the task was made of; None: it cannot tell

    @property
    def top(self) -> Prediction | None:
        """The best prediction; None where there is none, such as below a threshold."""
        return self.predictions[0] if self.predictions else None

    def _rows(self) -> Iterator[Row]:
        if self.error is not None:
            yield {"error": self.error}
        for one in self.predictions or ():
            yield {"label": one.label, "index": one.index, "score": one.score}
        for index, value in enumerate(self.values or self.logits or self.embedding or ()):
            yield {"index": index, "value": value}


@dataclass(frozen=True, slots=True)
class ImageAnswer:
    """All tasks about one image, by the reference that was asked for."""

    image: str  # its path or digest, or its number where it came as pixels or bytes
    index: int  # its place in the list given
    digest: str | None = None  # names it in later requests
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
        """One row for each prediction or number, each with every column."""
        empty: Row = dict.fromkeys(COLUMNS)
        if self.error is not None:
            yield {**empty, "image": self.image, "error": self.error}
        for name, task in self.tasks.items():
            for row in task._rows():
                yield {**empty, "image": self.image, "task": name, "version": task.version, **row}

    def to_pandas(self) -> "DataFrame":
        return Answers((self,)).to_pandas()


class Answers(tuple[ImageAnswer, ...]):
    """The answers about a list of images, in its order."""

    __slots__ = ()

    @property
    def top(self) -> list[dict[str, Prediction]]:
        """For each image, the best prediction of each task."""
        return [answer.top for answer in self]

    def rows(self) -> Iterator[Row]:
        for answer in self:
            yield from answer.rows()

    def to_pandas(self) -> "DataFrame":
        from pandas import DataFrame

        return DataFrame(list(self.rows()), columns=list(COLUMNS))


# --- tasks ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class TaskSummary:
    """A task as the list shows it: what its default version is."""

    task: str
    version: int | None  # None for `base`
    status: str  # ready, failed, on_demand or unloaded
    reason: str | None  # why it failed
    problem: str
    classes: int
    description: str
    labels: Mapping[str, int]
    versions: tuple[int, ...]  # live ones


@dataclass(frozen=True, slots=True)
class Version:
    """One published version of a task."""

    version: int
    digest: str
    size_bytes: int
    labels: tuple[str, ...]
    status: str
    reason: str | None
    resident: bool
    problem: str
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
    """A task with its live versions, oldest first, and the names of its classes if loaded."""

    generation: int
    class_labels: tuple[str, ...] | None
    version_details: tuple[Version, ...]


@dataclass(frozen=True, slots=True)
class Change:
    """One entry of a task's history; what it was about is in `details`."""

    generation: int
    time: str
    actor: str
    kind: str  # publish, label, retire or restore
    details: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Rollout:
    """Which replicas serve a change, after `wait="all"`, by their ids."""

    serving: tuple[str, ...]
    behind: tuple[str, ...]  # did not when the time was over: they will
    error: str | None = None  # why that is not known

    @property
    def complete(self) -> bool:
        return not self.behind and self.error is None


@dataclass(frozen=True, slots=True)
class Published:
    """A bundle that is being served now."""

    task: str
    version: int
    digest: str
    generation: int
    created: bool  # False when the task had these bytes already
    labels: tuple[str, ...]  # that point to the version now
    replicas: Rollout | None = None  # with `wait="all"`


@dataclass(frozen=True, slots=True)
class ClassExamples:
    """A label, and how many examples have it."""

    label: str
    examples: int


@dataclass(frozen=True, slots=True)
class LeaveOneOut:
    """The share of examples answered right by a task made without them, and its 95 % interval."""

    accuracy: float
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class Doubt:
    """A photo that looks mislabelled, and what the others say it is."""

    digest: str
    labels: tuple[str, ...]
    suggested: tuple[str, ...]
    probability: float  # of its labels, by a task made without it
    photo: str | None = None  # its path, where this call has sent it


@dataclass(frozen=True, slots=True, kw_only=True)
class Taught(Published):
    """A task that was taught, and is being served now."""

    problem: str
    examples: int
    classes: tuple[ClassExamples, ...]
    leave_one_out: LeaveOneOut | None  # None while no class has two examples
    doubtful: tuple[Doubt, ...]  # the most doubtful ones, worst first
    added: int
    moved: int  # photos that were examples with other labels
    removed: int


@dataclass(frozen=True, slots=True)
class Example:
    """One photo that a task was taught from."""

    digest: str
    labels: tuple[str, ...]
    probability: float | None  # of its labels, by a task made without it


@dataclass(frozen=True, slots=True)
class Examples:
    """What a version of a task was taught from."""

    task: str
    version: int
    problem: str
    classes: tuple[ClassExamples, ...]
    leave_one_out: LeaveOneOut | None
    doubtful: tuple[Doubt, ...]
    examples: tuple[Example, ...]


@dataclass(frozen=True, slots=True)
class CorrectionsKept:
    """Corrections of a trained task, which wait for its next training."""

    task: str
    corrections: int  # photos


@dataclass(frozen=True, slots=True)
class Correction:
    """What somebody said that a photo shows."""

    digest: str
    labels: tuple[str, ...]
    version: int  # of the task that was served then
    time: str
    actor: str


@dataclass(frozen=True, slots=True)
class Changed:
    """What a task is after a change; without versions when it is retired."""

    task: str
    generation: int
    labels: Mapping[str, int]
    versions: tuple[int, ...]
    replicas: Rollout | None = None  # with `wait="all"`


@dataclass(frozen=True, slots=True)
class Replica:
    """One server of a store, as its last heartbeat tells it."""

    id: str
    this: bool  # the one that was asked
    generation: int
    age_seconds: float
    hostname: str
    address: str | None
    started: str
    version: str
    backbone: str
    fingerprint: str


@dataclass(frozen=True, slots=True)
class Bundle:
    """The file of one version, checked against its digest."""

    task: str
    version: int
    digest: str
    data: bytes = field(repr=False)

    @property
    def filename(self) -> str:
        """Such as `team-birds-3.safetensors`."""
        return f"{self.task.replace('/', '-')}-{self.version}.safetensors"

    def save(self, out: str | os.PathLike[str] = ".") -> Path:
        """Write the file, whole or not at all; into a folder by its own name."""
        path = Path(out, self.filename) if Path(out).is_dir() else Path(out)
        part = path.with_name(f".{path.name}.{os.getpid()}.part")
        try:
            part.write_bytes(self.data)
            part.replace(path)
        finally:
            part.unlink(missing_ok=True)
        return path


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a bundle is, and whether the server could serve it."""

    valid: bool
    digest: str | None
    problems: tuple[str, ...]
    manifest: Mapping[str, Any] | None
    classes: int | None
    memory_tokens: int | None
