"""The teaching service: updates the examples of a task, solves its head, and publishes it.

An update applies to the newest version in the store. If another client has changed the task
meanwhile, the update is applied again to the new version, so both changes are kept. `teach` blocks
and uses a CPU core: call it in the thread for changes.

A trained task cannot be solved again. Its corrections are kept beside it for the next training.
"""

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Final

import engram_store
import numpy as np
from engram_bundle import BundleLimits, IncompatibleBundle, TaskBundle, TaskRef
from engram_bundle.schema import LabelledTaskType
from engram_store.corrections import CorrectionRecord

from engram_server import errors
from engram_server.engine.predictions import Predictions
from engram_server.engine.tasks.service import PublishOutcome, TaskService
from engram_server.engine.taught_bundle import (
    examples_of,
    is_taught,
    taught_bundle,
    text_of,
)
from engram_server.engine.types import RunOptions
from engram_server.model.backbone import Backbone
from engram_server.model.families.text_tower import TextTower, no_text_tower
from engram_server.model.heads.closed_form import solve
from engram_server.model.heads.examples import Example, Examples
from engram_server.model.heads.lda import ClosedFormHead
from engram_server.model.heads.text_head import TextHead
from engram_server.model.tasks import feature_layout

MAX_LABEL_ISSUES: Final = 20
_MAX_EXAMPLES: Final = BundleLimits().max_examples
# Of the features of all examples: most of a bundle.
MAX_FEATURE_BYTES: Final = BundleLimits().max_file_bytes * 3 // 4
PATIENCE_SECONDS: Final = 60.0  # for concurrent updates
_CACHED_VERSIONS: Final = 16
_LABELS_NOTED, _LABEL_CHARS_NOTED = 4, 40


@dataclass(frozen=True, slots=True)
class LabelledPhoto:
    """A photo in a request: its bytes or digest, its labels, and its name in error messages."""

    image: bytes | str
    labels: frozenset[str]
    name: str


@dataclass(frozen=True, slots=True)
class ExampleUpdate:
    """A change to the examples of a task. New labels of a photo replace its earlier ones."""

    task: str
    added: Sequence[Example] = ()
    # Digests of images that are not cached, with their labels: they must be examples already.
    relabelled: Sequence[tuple[bytes, frozenset[str]]] = ()
    removed: frozenset[str] = frozenset()  # digests
    task_type: LabelledTaskType | None = None  # None: unchanged
    description: str | None = None  # None: unchanged
    classes: Sequence[str] = ()  # class names for the text tower
    templates: Sequence[str] = ()  # texts for the class names; empty: unchanged

    def apply(self, before: Examples | None, *, named: bool = False) -> Examples:
        """The examples after the update. `named`: class names alone suffice for the task."""
        if before is None:
            before = Examples.of(self.task_type or "single_label", [])
        elif self.task_type not in (None, before.task_type):
            raise errors.UnteachableExamples(
                f"task '{self.task}' is {before.task_type} and cannot become {self.task_type}: "
                f"teach a new task"
            )
        features = {one.digest: one.feature for one in before}
        after = before
        added = [*self.added, *self._relabelled_examples(features)]
        if added:
            after = before.with_added(added, relabel=True)
        if self.removed:
            after = after.without(self._removed_digests(features))
            if not len(after) and not named:
                raise errors.UnteachableExamples(
                    f"task '{self.task}' would have no examples left: retire the task instead"
                )
        if after.features.nbytes > MAX_FEATURE_BYTES:
            raise errors.UnteachableExamples(
                f"task '{self.task}' would have {len(after)} examples of "
                f"{after.features[0].nbytes:,} bytes, and the limit is {MAX_FEATURE_BYTES:,} "
                f"bytes: train a task on that many photos"
            )
        if len(after) > _MAX_EXAMPLES:
            raise errors.UnteachableExamples(
                f"task '{self.task}' would have {len(after)} examples, and the limit is "
                f"{_MAX_EXAMPLES}: train a task on that many photos"
            )
        return after

    def _relabelled_examples(self, features: Mapping[bytes, np.ndarray]) -> list[Example]:
        for digest, _ in self.relabelled:
            if digest not in features:
                raise errors.ContextNotCached(
                    f"the image sha256:{digest.hex()} is not cached and is not an example of task "
                    f"'{self.task}'; send its bytes again"
                )
        return [Example(digest, features[digest], labels) for digest, labels in self.relabelled]

    def _removed_digests(self, features: Mapping[bytes, np.ndarray]) -> set[bytes]:
        unknown = [digest for digest in self.removed if _to_bytes(digest) not in features]
        if unknown:
            raise errors.UnknownExample(
                f"task '{self.task}' has no example {', '.join(sorted(unknown)[:3])}", unknown
            )
        return set(map(_to_bytes, self.removed))


@dataclass(frozen=True, slots=True)
class LabelIssue:
    """An example whose label contradicts the other examples, and the label they suggest."""

    digest: str
    labels: tuple[str, ...]
    suggested: tuple[str, ...]
    probability: float


@dataclass(frozen=True, slots=True)
class TaughtVersion:
    """The examples of one version of a task, with their leave-one-out predictions."""

    examples: Examples
    solved: ClosedFormHead
    text: TextHead | None = None  # the head from the class names

    @property
    def classes(self) -> list[tuple[str, int]]:
        """Each label and its number of examples."""
        counts = self.examples.targets.sum(axis=0).tolist()
        return list(zip(self.examples.labels, counts, strict=True))

    def labels_at(self, index: int) -> tuple[str, ...]:
        return self._names(self.examples.targets[index])

    def digest_at(self, index: int) -> str:
        return f"sha256:{self.examples.digests[index].tobytes().hex()}"

    def probability_at(self, index: int) -> float | None:
        """The leave-one-out probability of the labels; None for the only example of a class."""
        probability = float(self.solved.leave_one_out.probabilities[index])
        return None if np.isnan(probability) else probability

    def label_issues(self) -> list[LabelIssue]:
        """Suspected label errors, the least probable labels first."""
        suspicious = self.solved.leave_one_out.most_suspicious(MAX_LABEL_ISSUES)
        return [
            LabelIssue(
                self.digest_at(index),
                self.labels_at(index),
                self._suggested(index),
                float(self.solved.leave_one_out.probabilities[index]),
            )
            for index in suspicious
        ]

    def _suggested(self, index: int) -> tuple[str, ...]:
        """The likeliest other label; for multi-label tasks, the labels with the worst flipped."""
        target = self.examples.targets[index]
        features = self.examples.features[index : index + 1]
        feature = features[0] if self.text is None else self.text.normalised(features)[0]
        logits = self.solved.weight @ feature.astype(np.float32) + self.solved.bias
        if self.examples.task_type == "single_label":
            return (self.examples.labels[int(np.where(target, -np.inf, logits).argmax())],)
        flipped = target.copy()
        worst = int(np.where(target, logits, -logits).argmin())
        flipped[worst] = not flipped[worst]
        return self._names(flipped)

    def _names(self, target: np.ndarray[tuple[int], np.dtype[np.bool_]]) -> tuple[str, ...]:
        return tuple(self.examples.labels[k] for k in np.flatnonzero(target))


@dataclass(frozen=True, slots=True)
class TeachOutcome:
    published: PublishOutcome
    version: TaughtVersion
    difference: "Difference"


class Teaching:
    """Updates taught tasks, and keeps corrections of trained ones."""

    def __init__(
        self,
        backbone: Backbone,
        store: engram_store.TaskStore,
        tasks: TaskService,
        predictions: Predictions,
        text_tower: TextTower | None = None,
    ) -> None:
        self._backbone = backbone
        self._store = store
        self._tasks = tasks
        self._predictions = predictions
        self._text_tower = text_tower  # None: class names cannot be used
        self.examples = lru_cache(_CACHED_VERSIONS)(self._read_version)

    @property
    def reads_class_names(self) -> bool:
        return self._text_tower is not None

    async def add_photos(
        self, update: ExampleUpdate, photos: Sequence[LabelledPhoto], options: RunOptions
    ) -> ExampleUpdate:
        """Read the features of photos through the queue, and add them to an update."""
        named = [(photo.name, photo.image) for photo in photos]
        features = await self._predictions.read_images(named, options)
        added: list[Example] = []
        relabelled: list[tuple[bytes, frozenset[str]]] = []
        for photo, (digest, feature) in zip(photos, features, strict=True):
            if feature is None:
                relabelled.append((_to_bytes(digest), photo.labels))
            else:
                added.append(Example(_to_bytes(digest), feature, photo.labels))
        return replace(update, added=added, relabelled=relabelled)

    def teach(
        self, update: ExampleUpdate, *, actor: str, condition: engram_store.Condition | None = None
    ) -> TeachOutcome:
        """Publish the next version of a task, under a condition on the catalog. Blocks."""
        give_up = time.monotonic() + PATIENCE_SECONDS
        while True:
            catalog = self._store.refresh()
            if condition is not None:
                condition(catalog)
            change, version, difference = self._solve(update, catalog)
            unchanged = _unless_changed(update.task, catalog, condition)
            try:
                published = self._tasks.publish(change, actor=actor, condition=unchanged)
            except ConcurrentUpdate:
                if time.monotonic() > give_up:
                    raise
                continue
            return TeachOutcome(published, version, difference)

    def _solve(
        self, update: ExampleUpdate, catalog: engram_store.Catalog
    ) -> tuple[engram_store.Publish, TaughtVersion, "Difference"]:
        bundle = self._newest(update, catalog)
        before = None if bundle is None else examples_of(bundle)
        text = self._read_class_names(update, bundle)
        if before is None and not update.task_type and update.classes and self._text_tower:
            update = replace(update, task_type=self._text_tower.task_type)
        after = update.apply(before, named=text is not None)
        if text is not None:
            after = after.without_summaries(self._backbone.width)
        difference = Difference.between(before, after, len(set(update.classes)))
        description = update.description
        if description is None:
            description = "" if bundle is None else bundle.manifest.description
        solved_bundle, solved = taught_bundle(
            after,
            self._backbone,
            text=text,
            description=description,
            license=None if bundle is None else bundle.manifest.license,
        )
        change = engram_store.Publish(update.task, solved_bundle, note=str(difference))
        return change, TaughtVersion(_with_classes(after, text), solved, text), difference

    def _read_class_names(
        self, update: ExampleUpdate, before: TaskBundle | None
    ) -> TextHead | None:
        """The head from the class names so far and those of the update."""
        known = None if before is None else text_of(before)
        if not update.classes:
            return known
        if self._text_tower is None:
            raise no_text_tower(self._backbone.name)
        templates = update.templates or (() if known is None else known.templates)
        read = self._text_tower.read(update.classes, templates)
        return read if known is None else known.merged_with(read)

    def _newest(self, update: ExampleUpdate, catalog: engram_store.Catalog) -> TaskBundle | None:
        """The bundle that an update applies to; None for a new task."""
        if update.task not in catalog.tasks and not update.removed:
            return None
        task = catalog.task(update.task)
        bundle = self._read_taught(task.versions[task.aliases["default"]].digest)
        if bundle.manifest.backbone.fingerprint != self._backbone.fingerprint:
            raise IncompatibleBundle(
                f"Task '{update.task}' was taught with the backbone "
                f"'{bundle.manifest.backbone.name}', and this server has another: its examples "
                f"cannot be used here.",
                names=[update.task],
            )
        return bundle

    def _read_taught(self, digest: str) -> TaskBundle:
        bundle = self._store.read_bundle(digest)
        if not is_taught(bundle):
            raise errors.NotTaught(
                "the task was trained, not taught from examples: send corrections to "
                "/tasks/{task}/corrections, for its next training"
            )
        return bundle

    def _read_version(self, digest: str) -> TaughtVersion:
        """The examples in a bundle; NotTaught if it has none."""
        bundle = self._read_taught(digest)
        examples, text = examples_of(bundle), text_of(bundle)
        assert examples is not None, "it was taught"
        examples = _with_classes(examples, text)
        text = None if text is None else text.reindexed(examples.labels)
        return TaughtVersion(examples, solve(examples, text, feature_layout(self._backbone)), text)

    def corrections(self, task: str) -> list[CorrectionRecord]:
        return self._store.corrections.read(task)

    def correct(
        self, task: str, photos: Sequence[tuple[str, frozenset[str]]], *, actor: str
    ) -> int:
        """Keep photos (digest, labels) of a trained task and return how many differ. Blocks."""
        bundle = self._store.read_bundle(self._store.refresh().resolve(TaskRef(task)).digest)
        if is_taught(bundle):
            raise errors.IsTaught(
                f"task '{task}' is taught from examples: send corrections to /tasks/{task}/examples"
            )
        task_type = bundle.task_type
        if task_type != "single_label" and task_type != "multi_label":
            raise errors.UnteachableExamples(
                f"task '{task}' is a {task_type} task; only classification tasks accept corrections"
            )
        # Checks that the labels fit the task type and each other; the features do not matter.
        blank = np.zeros(1, np.float16)
        examples = [Example(_to_bytes(digest), blank, labels) for digest, labels in photos]
        corrections = [
            engram_store.Correction(
                digest=f"sha256:{one.digest.hex()}", labels=tuple(sorted(one.labels))
            )
            for one in Examples.of(task_type, examples)
        ]
        self._store.correct(task, corrections, actor=actor)
        return len(corrections)


def _with_classes(examples: Examples, text: TextHead | None) -> Examples:
    return examples if text is None else examples.with_labels(text.labels)


@dataclass(frozen=True, slots=True)
class Difference:
    """How the examples of two versions differ; `str()` is the note in the history."""

    added: Counter[str]  # by label
    moved: Counter[str]  # by new label
    photos_added: int
    photos_moved: int
    photos_removed: int
    names_read: int = 0

    @classmethod
    def between(cls, before: Examples | None, after: Examples, names_read: int = 0) -> "Difference":
        old = {} if before is None else {one.digest: one.labels for one in before}
        new = {one.digest: one.labels for one in after}
        added = [labels for digest, labels in new.items() if digest not in old]
        moved = [labels for digest, labels in new.items() if labels != old.get(digest, labels)]
        return cls(
            Counter(label for labels in added for label in labels),
            Counter(label for labels in moved for label in labels),
            len(added),
            len(moved),
            len(old.keys() - new.keys()),
            names_read,
        )

    def __str__(self) -> str:
        parts = []
        if self.photos_added:
            parts.append(f"{_count(self.photos_added)} added ({_summary(self.added)})")
        if self.photos_moved:
            parts.append(f"{_count(self.photos_moved)} corrected ({_summary(self.moved)})")
        if self.photos_removed:
            parts.append(f"{_count(self.photos_removed)} removed")
        if self.names_read:
            parts.append(f"{self.names_read} classes named")
        return ", ".join(parts)


def _count(examples: int) -> str:
    return "1 example" if examples == 1 else f"{examples} examples"


def _summary(counts: Counter[str]) -> str:
    shown = [
        f"{count} {label[:_LABEL_CHARS_NOTED]}"
        for label, count in sorted(counts.items())[:_LABELS_NOTED]
    ]
    more = [] if len(counts) <= _LABELS_NOTED else ["…"]
    return ", ".join([*shown, *more]) or "no label"


class ConcurrentUpdate(engram_store.PreconditionFailed):
    """Another client has changed the task since it was read."""


def _unless_changed(
    task: str, seen: engram_store.Catalog, condition: engram_store.Condition | None
) -> engram_store.Condition:
    digest = _default_digest(seen, task)

    def check(catalog: engram_store.Catalog) -> None:
        if condition is not None:
            condition(catalog)
        if _default_digest(catalog, task) != digest:
            raise ConcurrentUpdate(
                f"Other clients keep changing task '{task}': try again.", names=[task]
            )

    return check


def _default_digest(catalog: engram_store.Catalog, task: str) -> str | None:
    info = catalog.tasks.get(task)
    return None if info is None else info.versions[info.aliases["default"]].digest


def _to_bytes(digest: str) -> bytes:
    return bytes.fromhex(digest.removeprefix("sha256:"))
