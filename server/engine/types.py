"""What the parts of the engine hand to each other, and what it answers."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import numpy.typing as npt
import torch

from server.model.backbone import Problem
from server.model.tasks import Task

Floats = npt.NDArray[np.float32]
# Decoded and resized (H, W, 3), or floats (3, H, W) as the backbone reads them.
Pixels = npt.NDArray[np.uint8] | npt.NDArray[np.float32]
CacheState = Literal["hit", "miss", "off"]


@dataclass(frozen=True, slots=True)
class ServedTask:
    """One version of a task as requests see it. `base` has neither version nor digest."""

    name: str
    version: int | None
    digest: str | None
    problem: Problem
    labels: tuple[str, ...]


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class ResidentTask:
    """A served task bound to every device. Whoever holds it keeps its tensors where they are."""

    served: ServedTask
    on: Mapping[torch.device, Task]

    @property
    def rows(self) -> int:
        """Token rows it adds for one image: its own and its ancestors'."""
        task = next(iter(self.on.values()))
        return 0 if task.token is None else len(task.lineage)


@dataclass(slots=True)
class Stage:
    """When a part of the work began and ended, on the clock of time.monotonic; None: not (yet)."""

    started: float | None = None
    ended: float | None = None

    @property
    def seconds(self) -> float:
        return 0.0 if self.started is None or self.ended is None else self.ended - self.started


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """The pass that an image was part of."""

    images: int
    rows: int
    device: str


@dataclass(slots=True)
class Timeline:
    """What one image went through, written down as it happens: a failed request has one too."""

    digest: str = ""  # of the image, once its bytes were read
    decode: Stage = field(default_factory=Stage)
    queue: Stage = field(default_factory=Stage)
    forward: Stage = field(default_factory=Stage)
    batch: Batch | None = None


@dataclass(frozen=True, slots=True)
class PredictRequest:
    """Each image is its bytes, the digest (`sha256:…`) of one already sent, or pixel values.

    Pixel values are normalised floats (3, H, W) of the backbone's size, given to it as they are.
    Without an `owner` a context is shared with every other request that has none.
    """

    images: Sequence[bytes | str | Floats]
    tasks: Sequence[str] | None = None  # task references; None: every ready task
    at_least: int | None = None  # the generation that must have been reached
    features: bool = False  # also give what each head read
    attention: bool = False  # also give the attention of each task
    deadline: float | None = None  # on the clock of time.monotonic
    owner: str | None = None  # whose images these are: contexts are found by their owner alone
    # Without `tasks`: those of the ready tasks, by name, that are meant. None: all.
    permitted: Callable[[tuple[str, ...]], tuple[str, ...]] | None = None
    # Filled by the engine while it works: one for each image.
    timelines: list[Timeline] = field(default_factory=list, compare=False)

    def references(self, ready: tuple[str, ...]) -> Sequence[str]:
        """The tasks that are asked, where these are ready."""
        if self.tasks is not None:
            return self.tasks
        return ready if self.permitted is None else self.permitted(ready)


@dataclass(frozen=True, slots=True)
class TaskAnswer:
    """One task about one image. With an `error` its numbers are not finite: show none of them."""

    served: ServedTask
    logits: Floats  # (K,)
    features: Floats | None  # (D,)
    attention: Floats | None = None  # (rows, columns): the class token's weights on the patches
    known: bool | None = None  # does it look like what the task was made of? None: it cannot say
    error: str | None = None


@dataclass(frozen=True, slots=True)
class ImageAnswer:
    digest: str
    cache: CacheState
    tasks: dict[str, TaskAnswer]  # by reference


@dataclass(slots=True)  # not frozen: those take three times as long to make
class Prediction:
    label: str
    index: int
    score: float


@dataclass(frozen=True, slots=True)
class Timings:
    """Seconds. Of several images the longest counts, so that the parts add up to about `total`."""

    queue: float
    decode: float
    forward: float
    total: float


@dataclass(frozen=True, slots=True)
class PredictAnswer:
    generation: int
    backbone: str
    images: list[ImageAnswer]
    timings: Timings


@dataclass(frozen=True, slots=True)
class EngineStatus:
    """Whether the engine may be sent traffic, and how far it follows the store."""

    reasons: tuple[str, ...]  # why no traffic should be sent
    generation: int  # that requests are answered from
    generation_seen: int  # the newest read from the store; ahead of the other while tasks load
    seconds_since_read: float | None  # of the store; None before the first time
    store_error: str | None  # why it could not be read the last time
    tasks_ready: int
    versions_failed: int
    pending_images: int

    @property
    def ready(self) -> bool:
        return not self.reasons


def scores(answer: TaskAnswer) -> Floats:
    """Probabilities for labels (softmax, or one sigmoid each); other outputs are as they are."""
    logits = answer.logits
    if answer.served.problem == "single_label":
        shifted = np.exp(logits - logits.max())
        distribution: Floats = shifted / shifted.sum()
        return distribution
    if answer.served.problem == "multi_label":
        # Written with tanh so that large logits overflow nothing.
        halves: Floats = np.tanh(0.5 * logits)
        return 0.5 * (1.0 + halves)
    return logits


def best(answer: TaskAnswer, top_k: int, threshold: float | None = None) -> list[Prediction]:
    """The `top_k` highest scores, best first; with a threshold, of those only the ones above it."""
    values, labels = scores(answer), answer.served.labels
    falling = -values
    if top_k < len(values):
        order = falling.argpartition(top_k - 1)[:top_k]
        order.sort()  # ties go to the lower index, so that equal answers read equally
        order = order[falling[order].argsort(kind="stable")]
    else:
        order = falling.argsort(kind="stable")
    return [
        Prediction(labels[index] if index < len(labels) else str(index), index, score)
        for index, score in zip(order.tolist(), values[order].tolist(), strict=True)
        if threshold is None or score >= threshold
    ]
