"""Data that the parts of the engine pass to each other, and its answers."""

import hashlib
import os
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field
from operator import itemgetter
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from engram_bundle.schema import TaskType

from engram_server.errors import ImageError
from engram_server.model.backbone import Backbone
from engram_server.model.heads.drift import DriftReference
from engram_server.model.heads.ood import OodScorer
from engram_server.model.tasks import Task, TaskWeights

Floats = npt.NDArray[np.float32]
# Decoded and resized (H, W, 3), or normalised floats (3, H, W).
Pixels = npt.NDArray[np.uint8] | npt.NDArray[np.float32]
# The bytes of an image file, the digest (`sha256:…`) of a cached image, or normalised pixel values
# (3, H, W) of the backbone's image size.
Image = bytes | str | Floats
CacheState = Literal["hit", "miss", "off"]
VersionKey = tuple[str, int | None]  # a task's name and version


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Sizes and limits of an engine. `devices` may repeat a device: its workers share it."""

    devices: tuple[str, ...] = ("cpu",)
    dtype: torch.dtype = torch.float32
    int8: bool = False  # quantise the backbone's matrices to eight bits; CPU only
    budget_rows: int = 4096
    queue_images: int = 256
    several_callers: bool = False  # each has a share of the queue, whatever the others send
    decode_threads: int = field(default_factory=lambda: os.cpu_count() or 1)
    max_pixels: int = 64_000_000
    decoded_bytes: int = 1 << 30  # for all images being decoded
    decode_seconds: float = 10.0  # CPU time for one image
    cache_bytes: int = 1 << 30
    cache_dtype: torch.dtype | None = torch.float16
    cache_device: str | None = "cpu"  # None keeps contexts on the device that computed them
    resident_bytes: int | None = None
    pinned_tasks: frozenset[str] = frozenset()
    shadow_aliases: tuple[str, ...] = ("shadow",)
    shadow_thumbnails: bool = False  # of images on which a shadow differs
    rollback_rules: tuple[str, ...] = ()  # empty: no automatic rollback
    poll_seconds: float = 1.0
    max_corrections: int = 100_000  # of one task
    correction_bytes: int = 64 << 20  # of one task
    correction_days: float | None = None  # None: keep corrections
    heartbeat_seconds: float | None = None  # None: write no heartbeats
    address: str | None = None  # the URL under which other servers list this one
    process: int | None = None  # the number of this server, if several share the address
    version: str = ""  # of this software
    compiled: bool = False


def short_name(backbone: str) -> str:
    """The last part of a folder or hub name, which does not reveal local paths."""
    return backbone.rstrip("/").rpartition("/")[2] or backbone


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """What callers may know about the backbone."""

    name: str
    fingerprint: str
    precision: str
    image_size: tuple[int, int]
    patch_size: tuple[int, int]
    tokens: int  # base rows of one image
    width: int
    resize: int | tuple[int, int] | None
    crop: tuple[int, int] | None
    resample: str
    largest_value: float  # of normalised pixels, in absolute value

    @classmethod
    def of(cls, backbone: Backbone) -> "ModelInfo":
        preprocessing = backbone.preprocessing
        return cls(
            name=short_name(backbone.name),
            fingerprint=backbone.fingerprint,
            precision=backbone.precision,
            image_size=backbone.image_size,
            patch_size=backbone.geometry.patch_size,
            tokens=backbone.geometry.tokens,
            width=backbone.width,
            resize=preprocessing.resize,
            crop=preprocessing.crop,
            resample=preprocessing.resample,
            largest_value=preprocessing.largest_value,
        )


@dataclass(frozen=True, slots=True, eq=False)
class TaskVersion:
    """One version of a task, without its tensors."""

    name: str
    version: int | None
    task_type: TaskType
    labels: tuple[str, ...]


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class ServedTask:
    """One version of a task on every device. Holding it keeps its tensors on the devices."""

    name: str
    version: int | None  # None for `base`, the backbone's classifier
    digest: str | None
    task_type: TaskType
    labels: tuple[str, ...]
    on: Mapping[torch.device, Task] = field(repr=False)
    drift: DriftReference | None = field(default=None, repr=False)
    # For those that must not keep the tensors on the devices.
    light: TaskVersion = field(init=False, repr=False)

    def __post_init__(self) -> None:
        light = TaskVersion(self.name, self.version, self.task_type, self.labels)
        object.__setattr__(self, "light", light)

    @property
    def rows(self) -> int:
        """Token rows that the task adds to an image, including those of its ancestors."""
        task = next(iter(self.on.values()))
        return 0 if task.token is None else len(task.lineage)

    @property
    def ood(self) -> OodScorer | None:
        return next(iter(self.on.values())).ood


@dataclass(frozen=True, slots=True)
class Canary:
    """A version that answers a share of the images in place of another."""

    task: ServedTask
    share: float

    def takes(self, digest: str) -> bool:
        """Whether it answers an image: always the same for an image, whatever the request."""
        chosen = hashlib.sha256(f"{self.task.name} {digest}".encode()).digest()[:8]
        return int.from_bytes(chosen) < self.share * 2**64


@dataclass(frozen=True, slots=True)
class HostCopy:
    """The weights of a bundle in host memory: enough to prepare it without reading the store."""

    weights: TaskWeights
    task_type: TaskType
    labels: tuple[str, ...]


@dataclass(frozen=True, slots=True, eq=False)
class LoadedBundle:
    """The tensors of a bundle on every device, shared by all versions that publish it."""

    digest: str | None
    task_type: TaskType
    labels: tuple[str, ...]
    on: Mapping[torch.device, Task]
    parents: tuple["LoadedBundle", ...] = ()
    drift: DriftReference | None = None
    _served: dict[VersionKey, ServedTask] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        """Bytes on the device where the bundle takes most."""
        return max(task.nbytes for task in self.on.values())

    def served_as(self, key: VersionKey) -> ServedTask:
        """The same object for every call with the same name and version."""
        served = self._served.get(key)
        if served is None:
            made = ServedTask(*key, self.digest, self.task_type, self.labels, self.on, self.drift)
            served = self._served.setdefault(key, made)
        return served

    def drop_versions(self, live: Set[VersionKey]) -> None:
        for key in [key for key in list(self._served) if key not in live]:
            self._served.pop(key, None)


@dataclass(slots=True)
class Stage:
    """When a stage started and ended, by time.monotonic; None: not (yet)."""

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
    """The stages of one image, recorded as they happen, also when the request fails."""

    digest: str = ""  # of the image, once its bytes were read
    thumbnail: bytes = b""  # of the image, if one was requested
    decode: Stage = field(default_factory=Stage)
    queue: Stage = field(default_factory=Stage)
    forward: Stage = field(default_factory=Stage)
    batch: Batch | None = None


class Timings(NamedTuple):
    """Seconds. The slowest image of a request counts, so the stages add up to about `total`."""

    queue: float
    decode: float
    forward: float
    total: float


class RunOptions(NamedTuple):
    features: bool = False  # also return the features that each head reads
    attention: bool = False  # also return the attention map of each task
    deadline: float | None = None  # by time.monotonic
    owner: str | None = None  # cached contexts are found by their owner only; None: shared
    caller: str = ""  # whose share of threads and batches is used
    thumbnails: bool = False  # also make a thumbnail of each image whose bytes were sent
    canaries: bool = False  # let the canaries of aliases answer their share of images


@dataclass(frozen=True, slots=True)
class ReadImage:
    """An image that was read for teaching, or why it could not be."""

    digest: str
    features: Floats | None = None  # (F,); None if not requested, or if a digest is not cached
    thumbnail: bytes = b""  # a WebP file; empty if not requested, or if only a digest was sent
    error: ImageError | None = None


@dataclass(frozen=True, slots=True)
class Unreadable:
    """A photo of a request that cannot be read."""

    index: int  # in the request
    name: str | None  # of its file
    reason: str


@dataclass(slots=True)  # not frozen: creating a frozen one takes three times as long
class TaskAnswer:
    """The answer of one task for one image. With an `error`, its numbers are not finite."""

    served: ServedTask
    logits: Floats  # (K,)
    features: Floats | None  # (D,)
    attention: Floats | None = None  # (rows, columns): attention of the class token to the patches
    ood_score: float | None = None  # None: the task has no OOD detector
    error: str | None = None

    @property
    def in_distribution(self) -> bool | None:
        if self.ood_score is None:
            return None
        return self.ood_score <= 1

    @property
    def uniform_share(self) -> float:
        """The share of the uniform distribution in the class probabilities."""
        if self.ood_score is None or (detector := self.served.ood) is None:
            return 0.0
        return detector.uniform_share(self.ood_score)


@dataclass(slots=True)
class ImageAnswer:
    digest: str
    cache: CacheState
    tasks: dict[str, TaskAnswer]  # by reference


Prediction = tuple[str, int, float]  # label, index of the class, and score


class PredictAnswer(NamedTuple):
    generation: int
    images: list[ImageAnswer]
    timings: Timings


@dataclass(frozen=True, slots=True)
class EngineStatus:
    """Readiness of the engine, and how far it follows the store."""

    reasons: tuple[str, ...]  # why the engine is not ready
    generation: int  # that requests are answered from
    generation_seen: int  # newest generation read from the store; may still be loading
    seconds_since_read: float | None  # of the store; None before the first read
    store_error: str | None  # why the last read failed
    tasks_ready: int
    versions_failed: int
    pending_images: int

    @property
    def ready(self) -> bool:
        return not self.reasons


def class_scores(answers: Sequence[TaskAnswer]) -> Floats:
    """The scores (n, K) of answers of one task, computed together, which is faster.

    Class probabilities (softmax or sigmoid); the logits themselves for other task types.
    """
    logits: Floats = np.array([answer.logits for answer in answers])
    task_type = answers[0].served.task_type
    if task_type == "single_label":
        # By the ufuncs: `max` and `sum` add a call in Python, as long as the work for one answer.
        highest: Floats = np.maximum.reduce(logits, axis=1, keepdims=True)
        shifted: Floats = np.exp(logits - highest)
        total: Floats = np.add.reduce(shifted, axis=1, keepdims=True)
        distribution: Floats = shifted / total
        shares = [answer.uniform_share for answer in answers]
        if any(shares):
            classes = logits.shape[1]
            kept = np.array([1 - share for share in shares], np.float32)
            added = np.array([share / classes for share in shares], np.float32)
            distribution = kept[:, None] * distribution + added[:, None]
        return distribution
    if task_type == "multi_label":
        # The sigmoid by tanh, which does not overflow for large logits.
        halves: Floats = np.tanh(0.5 * logits)
        return 0.5 * (1.0 + halves)
    return logits


def top_predictions(
    answers: Sequence[TaskAnswer], top_k: int, threshold: float | None = None
) -> list[list[Prediction]]:
    """The `top_k` highest scores of each answer of one task, in descending order.

    Those below the threshold are omitted.
    """
    values, labels = class_scores(answers), answers[0].served.labels
    if top_k < values.shape[1]:
        chosen = (-values).argpartition(top_k - 1)[:, :top_k]
        chosen.sort()
    else:
        chosen = (-values).argsort(kind="stable")
    highest = values[np.arange(len(values))[:, None], chosen]
    # Ties go to the lower index, so that equal answers are written equally: sorting keeps order.
    return [
        [
            (labels[index] if index < len(labels) else str(index), index, score)
            for score, index in sorted(
                zip(scores, indices, strict=True), key=itemgetter(0), reverse=True
            )
            if threshold is None or score >= threshold
        ]
        for scores, indices in zip(highest.tolist(), chosen.tolist(), strict=True)
    ]


def slowest(timelines: Sequence[Timeline], total: float) -> Timings:
    queue = decode = forward = 0.0
    for each in timelines:
        queue = max(queue, each.queue.seconds)
        decode = max(decode, each.decode.seconds)
        forward = max(forward, each.forward.seconds)
    return Timings(queue, decode, forward, total)
