"""The teaching service: updates the examples of a task, solves its head, and publishes it.

An update applies to the newest version in the store. If another client has changed the task
meanwhile, the update is applied again to the new version, so both changes are kept. `teach` blocks
and uses a CPU core: call it in a thread for solving. It commits through `commit`, which may be
another thread.

A trained task cannot be solved again. Its corrections are kept beside it for the next training.
"""

import contextlib
import sys
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import CancelledError
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Final, Protocol, TypeVar

import engram_store
import numpy as np
import numpy.typing as npt
from engram_bundle import IncompatibleBundle, TaskBundle, TaskRef
from engram_bundle.limits import DEFAULT_LIMITS
from engram_bundle.media import NO_MEDIA, Media
from engram_bundle.schema import LabelledTaskType
from engram_store.corrections import CorrectionPage

from engram_server import errors
from engram_server.engine.predictions import Predictions
from engram_server.engine.tasks.service import PublishOutcome, TaskService
from engram_server.engine.tasks.upload_parts import Relabelled, UploadPart
from engram_server.engine.taught_bundle import (
    examples_of,
    is_taught,
    taught_bundle,
    text_of,
)
from engram_server.engine.types import RunOptions, Unreadable
from engram_server.model.backbone import Backbone
from engram_server.model.families.text_tower import TextTower, no_text_tower
from engram_server.model.heads.closed_form import solve
from engram_server.model.heads.examples import Example, Examples
from engram_server.model.heads.lda import ClosedFormHead, LeaveOneOut
from engram_server.model.heads.text_head import TextHead
from engram_server.model.tasks import feature_layout

MAX_LABEL_ISSUES: Final = 20
PATIENCE_SECONDS: Final = 60.0  # for concurrent updates
# Of evaluated versions, with their thumbnails; more than the largest of them.
_CACHED_BYTES: Final = 128 * 1024**2
_CLASSES_SHOWN: Final = 8
_REASONS_SHOWN: Final = 5


T = TypeVar("T")


class Commit(Protocol):
    """Runs what changes the store, perhaps in another thread."""

    def __call__(self, work: Callable[[], T]) -> T: ...


def commit_here(work: Callable[[], T]) -> T:
    return work()


@dataclass(frozen=True, slots=True)
class LabelledPhoto:
    """A photo in a request: its bytes or digest, its labels, and the name of its file."""

    image: bytes | str
    labels: frozenset[str]
    name: str  # empty if unknown
    place: str  # in the request, for error messages

    @property
    def shown(self) -> str:
        """What error messages call it."""
        return f"'{self.name}'" if self.name else self.place


@dataclass(frozen=True, slots=True)
class ExampleUpdate:
    """A change to the examples of a task. New labels of a photo replace its earlier ones."""

    task: str
    added: Sequence[Example] = ()
    # Digests of images that are not cached, with their labels: they must be examples already.
    relabelled: Sequence[Relabelled] = ()
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
        known = {one.digest: one for one in before}
        after = before
        added = [*self.added, *self._relabelled_examples(known)]
        if added:
            after = before.with_added(added, relabel=True)
        if self.removed:
            after = after.without(self._removed_digests(known))
            if not len(after) and not named:
                raise errors.UnteachableExamples(
                    f"task '{self.task}' would have no examples left: retire the task instead"
                )
        self._check_size(after)
        return after

    def _check_size(self, examples: Examples) -> None:
        count, limit = len(examples), DEFAULT_LIMITS.max_examples
        if count:
            # What the work and memory of solving depend on.
            limit = min(
                limit,
                DEFAULT_LIMITS.max_example_values // examples.features.shape[1],
                DEFAULT_LIMITS.max_example_labels // max(1, len(examples.labels)),
            )
        if count > limit:
            raise errors.UnteachableExamples(
                f"task '{self.task}' would have {count} examples of {len(examples.labels)} "
                f"classes, and the limit for that many classes is {limit} examples: train a task "
                f"on that many photos"
            )

    def _relabelled_examples(self, known: Mapping[bytes, Example]) -> list[Example]:
        known = {**known, **{one.digest: one for one in self.added}}
        for digest, _ in self.relabelled:
            if digest not in known:
                raise errors.ContextNotCached(
                    f"the image sha256:{digest.hex()} is not cached and is not an example of task "
                    f"'{self.task}'; send its bytes again"
                )
        return [replace(known[digest], labels=labels) for digest, labels in self.relabelled]

    def _removed_digests(self, known: Mapping[bytes, Example]) -> set[bytes]:
        unknown = [digest for digest in self.removed if _to_bytes(digest) not in known]
        if unknown:
            raise errors.UnknownExample(
                f"task '{self.task}' has no example {', '.join(sorted(unknown)[:3])}", unknown
            )
        return set(map(_to_bytes, self.removed))


@dataclass(frozen=True, slots=True)
class ReadPhotos:
    """The photos of a request after reading them."""

    added: list[Example] = field(default_factory=list)
    relabelled: list[Relabelled] = field(default_factory=list)
    unreadable: list[Unreadable] = field(default_factory=list)
    reasons: list[errors.ImageError] = field(default_factory=list)  # of the same photos

    def check(self) -> None:
        """Raise an error that lists all photos that cannot be read, if there are any."""
        if not self.reasons:
            return
        reasons = list(map(str, self.reasons))
        if len(reasons) > 1:
            more = len(reasons) - _REASONS_SHOWN
            shown = [*reasons[:_REASONS_SHOWN], *([f"And {more} more."] if more > 0 else [])]
            reasons = [f"{len(reasons)} photos cannot be read.", *shown]
        kinds = {type(error) for error in self.reasons}
        error = (kinds.pop() if len(kinds) == 1 else errors.UnreadableImage)(" ".join(reasons))
        error.unreadable = [asdict(each) for each in self.unreadable]
        raise error


@dataclass(frozen=True, slots=True)
class LabelIssue:
    """An example whose label contradicts the other examples, and the label they suggest."""

    digest: str
    name: str | None  # of its file
    labels: tuple[str, ...]
    suggested: tuple[str, ...]
    probability: float


@dataclass(frozen=True, slots=True)
class ClassEvaluation:
    label: str
    examples: int
    # Share of the examples with this label that have it in their leave-one-out prediction.
    accuracy: float | None


@dataclass(frozen=True, slots=True)
class Evaluation:
    """The examples of one version of a task and their leave-one-out predictions.

    Without their features, which would fill the memory.
    """

    task_type: LabelledTaskType
    labels: tuple[str, ...]
    digests: npt.NDArray[np.uint8]  # (n, 32)
    targets: npt.NDArray[np.bool_]  # (n, K)
    media: tuple[Media, ...]  # of each example; empty if none has any
    leave_one_out: LeaveOneOut
    label_issues: tuple[LabelIssue, ...]  # suspected label errors, the least probable labels first

    @classmethod
    def of(cls, examples: Examples, solved: ClosedFormHead, text: TextHead | None) -> "Evaluation":
        """Evaluate examples by the head solved from them, and by that of the class names."""
        evaluation = cls(
            examples.task_type,
            examples.labels,
            examples.digests,
            examples.targets,
            examples.media,
            solved.leave_one_out,
            (),
        )
        issues = []
        for index in solved.leave_one_out.most_suspicious(MAX_LABEL_ISSUES):
            features = examples.features[index : index + 1]
            feature = features[0] if text is None else text.normalised(features)[0]
            logits = solved.weight @ feature.astype(np.float32) + solved.bias
            issue = LabelIssue(
                evaluation.digest_at(index),
                evaluation.media_at(index).name or None,
                evaluation.labels_at(index),
                evaluation.suggested(index, logits),
                float(solved.leave_one_out.probabilities[index]),
            )
            issues.append(issue)
        return replace(evaluation, label_issues=tuple(issues))

    def __len__(self) -> int:
        return len(self.digests)

    @property
    def nbytes(self) -> int:
        result = self.leave_one_out
        arrays = (self.digests, self.targets, result.probabilities, result.predicted)
        media = sum(sys.getsizeof(part) for each in self.media for part in each)
        names = sum(map(sys.getsizeof, self.labels))
        return sum(array.nbytes for array in arrays) + media + names

    @property
    def classes(self) -> list[ClassEvaluation]:
        result = self.leave_one_out
        measured = self.targets & ~np.isnan(result.probabilities)[:, None]
        right = (measured & result.predicted).sum(axis=0)
        counts = zip(
            self.labels, self.targets.sum(axis=0), right, measured.sum(axis=0), strict=True
        )
        return [
            ClassEvaluation(label, int(examples), float(r / m) if m else None)
            for label, examples, r, m in counts
        ]

    def indices_of(self, digests: Collection[str]) -> list[int]:
        """The places of those of these examples that there are."""
        wanted = set(map(_to_bytes, digests))
        return [index for index, row in enumerate(self.digests) if row.tobytes() in wanted]

    def media_at(self, index: int) -> Media:
        return self.media[index] if self.media else NO_MEDIA

    def labels_at(self, index: int) -> tuple[str, ...]:
        return self._names(self.targets[index])

    def predicted_at(self, index: int) -> tuple[str, ...] | None:
        """The labels of its leave-one-out prediction; None for the only example of a class."""
        if self.probability_at(index) is None:
            return None
        return self._names(self.leave_one_out.predicted[index])

    def digest_at(self, index: int) -> str:
        return _to_text(self.digests[index])

    def probability_at(self, index: int) -> float | None:
        """The leave-one-out probability of the labels; None for the only example of a class."""
        probability = float(self.leave_one_out.probabilities[index])
        return None if np.isnan(probability) else probability

    def suggested(self, index: int, logits: npt.NDArray[np.float32]) -> tuple[str, ...]:
        """The likeliest other label; for multi-label tasks, the labels with the worst flipped."""
        target = self.targets[index]
        if self.task_type == "single_label":
            return (self.labels[int(np.where(target, -np.inf, logits).argmax())],)
        flipped = target.copy()
        worst = int(np.where(target, logits, -logits).argmin())
        flipped[worst] = not flipped[worst]
        return self._names(flipped)

    def _names(self, target: npt.NDArray[np.bool_]) -> tuple[str, ...]:
        return tuple(self.labels[k] for k in np.flatnonzero(target))


@dataclass(frozen=True, slots=True)
class TeachOutcome:
    published: PublishOutcome
    version: Evaluation
    difference: "Difference"
    purged: Sequence[int] | None = None  # versions; None: no purge was requested


class Teaching:
    """Updates taught tasks, and keeps corrections of trained ones."""

    def __init__(
        self,
        backbone: Backbone,
        store: engram_store.TaskStore,
        tasks: TaskService,
        predictions: Predictions,
        text_tower: TextTower | None = None,
        *,
        correction_limits: engram_store.CorrectionLimits | None = None,
    ) -> None:
        self._backbone = backbone
        self._store = store
        self._tasks = tasks
        self._predictions = predictions
        self._text_tower = text_tower  # None: class names cannot be used
        self._correction_limits = correction_limits
        self._evaluations: OrderedDict[str, Evaluation] = OrderedDict()  # the newest last
        self._lock = threading.Lock()

    @property
    def reads_class_names(self) -> bool:
        return self._text_tower is not None

    async def read_photos(
        self, photos: Sequence[LabelledPhoto], options: RunOptions
    ) -> "ReadPhotos":
        """Read the features of photos through the queue, and with `options.thumbnails` more."""
        images = await self._predictions.read_images([photo.image for photo in photos], options)
        read = ReadPhotos()
        for index, (photo, image) in enumerate(zip(photos, images, strict=True)):
            if (error := image.error) is not None:
                read.unreadable.append(Unreadable(index, photo.name or None, str(error)))
                read.reasons.append(type(error)(f"{photo.shown}: {error}"))
                continue
            digest = _to_bytes(image.digest)
            if image.features is None:
                read.relabelled.append((digest, photo.labels))
            else:
                name = photo.name if options.thumbnails else ""
                media = Media(name, image.thumbnail)
                read.added.append(Example(digest, image.features, photo.labels, media))
        return read

    def teach(
        self,
        update: ExampleUpdate,
        *,
        actor: str,
        condition: engram_store.Condition | None = None,
        commit: Commit = commit_here,
        stop: threading.Event | None = None,
    ) -> TeachOutcome:
        """Publish the next version of a task, under a condition on the catalog. Blocks.

        `stop` ends it with CancelledError while it solves, and before it commits.
        """
        check = _checked(stop)
        give_up = time.monotonic() + PATIENCE_SECONDS
        while True:
            catalog = self._store.refresh()
            if condition is not None:
                condition(catalog)
            change, version, difference = self._solve(update, catalog, check)
            unchanged = _unless_changed(update.task, catalog, condition)
            publish = partial(self._tasks.publish, change, actor=actor, condition=unchanged)
            check()
            try:
                published = commit(publish)
            except ConcurrentUpdate:
                if time.monotonic() > give_up:
                    raise
                continue
            self._cache(published.digest, version)  # solved already, and shown next
            return TeachOutcome(published, version, difference)

    def add_part(
        self, draft: engram_store.Draft, part: UploadPart, condition: engram_store.Condition | None
    ) -> int:
        """Keep photos until `publish_draft`, and return the number of parts. Blocks.

        The first part is checked against the task, so that a long upload does not fail at its end.
        """
        catalog = self._store.refresh()
        if condition is not None:
            condition(catalog)
        if not self._store.drafts.count(draft):
            self._newest(ExampleUpdate(draft.task), catalog)
        if not part.added and not part.relabelled:
            return self._store.drafts.count(draft)
        return self._store.add_part(draft, part.name, part.to_bytes(self._backbone.fingerprint))

    def publish_draft(
        self,
        draft: engram_store.Draft,
        update: ExampleUpdate,
        *,
        actor: str,
        condition: engram_store.Condition | None = None,
        commit: Commit = commit_here,
        stop: threading.Event | None = None,
    ) -> TeachOutcome:
        """Publish the parts of a draft and an update as one version. Blocks.

        Raises UnknownUpload if there are no parts. Repeating it changes nothing.
        """
        version = self._store.drafts.published(draft)
        if version is not None:
            return self._unchanged(self._store.refresh().version(draft.task, version))
        added, relabelled = list(update.added), list(update.relabelled)
        for data in self._store.read_parts(draft):
            part = UploadPart.from_bytes(data, self._backbone.fingerprint)
            added += part.added
            relabelled += part.relabelled
        whole = replace(update, added=added, relabelled=relabelled)
        outcome = self.teach(whole, actor=actor, condition=condition, commit=commit, stop=stop)
        # What is left behind expires, and publishing it again would change nothing.
        with contextlib.suppress(engram_store.StoreUnavailable):
            self._store.finish_draft(draft, outcome.published.version)
        return outcome

    def purge_examples(
        self,
        update: ExampleUpdate,
        *,
        actor: str,
        condition: engram_store.Condition | None = None,
        commit: Commit = commit_here,
        stop: threading.Event | None = None,
    ) -> TeachOutcome:
        """Remove examples, and purge all earlier versions that have one of them. Blocks.

        The version without them becomes the default first, so the task always has one. Nothing is
        changed if a version cannot be purged. Repeating the call completes an interrupted one.
        """
        name, catalog = update.task, self._store.refresh()
        default = catalog.resolve(TaskRef(name))
        self._read_taught(default.digest)  # raises NotTaught
        holding = self._versions_with(name, update.removed, catalog)
        unknown = update.removed.difference(*holding.values())
        if unknown:
            raise errors.UnknownExample(
                f"task '{name}' has no example {', '.join(sorted(unknown)[:3])}", sorted(unknown)
            )
        _check_purge(name, tuple(holding), catalog)
        if default.version in holding:
            current = replace(update, removed=holding[default.version])
            outcome = self.teach(
                current, actor=actor, condition=condition, commit=commit, stop=stop
            )
            condition = None  # it held, and the task has changed since
            catalog = self._store.refresh()
            holding = self._versions_with(name, update.removed, catalog)
            default = catalog.resolve(TaskRef(name))
        else:
            outcome = self._unchanged(default)
        versions = sorted(holding.keys() - {default.version})
        purge = engram_store.Purge(name, tuple(versions))
        snapshot = commit(partial(self._tasks.commit, purge, actor=actor, condition=condition))
        published = replace(outcome.published, snapshot=snapshot)
        return replace(outcome, published=published, purged=versions)

    def _versions_with(
        self, task: str, digests: frozenset[str], catalog: engram_store.Catalog
    ) -> dict[int, frozenset[str]]:
        """The versions that have some of these examples, also retired ones, and which of them."""
        found: dict[int, frozenset[str]] = {}
        for version, info in catalog.task(task).versions.items():
            rows = self._store.read_bundle(info.digest).get("examples.digests")
            if rows is not None and (held := digests & {_to_text(row) for row in rows}):
                found[version] = frozenset(held)
        return found

    def _unchanged(self, info: engram_store.VersionInfo) -> TeachOutcome:
        """The outcome of an update that leaves the default version as it is."""
        version = self.examples(info.digest)
        published = PublishOutcome(
            info.task, self._tasks.sync(), info.version, info.digest, created=False
        )
        return TeachOutcome(published, version, Difference())

    def _solve(
        self, update: ExampleUpdate, catalog: engram_store.Catalog, check: Callable[[], None]
    ) -> tuple[engram_store.Publish, Evaluation, "Difference"]:
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
            name=update.task,
            text=text,
            description=description,
            license=None if bundle is None else bundle.manifest.license,
            check=check,
        )
        change = engram_store.Publish(update.task, solved_bundle, note=str(difference))
        evaluation = Evaluation.of(_with_classes(after, text), solved, text)
        return change, evaluation, difference

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

    def examples(self, digest: str, stop: threading.Event | None = None) -> Evaluation:
        """The evaluated examples of a bundle; NotTaught if it has none. Blocks."""
        with self._lock:
            found = self._evaluations.pop(digest, None)
        if found is None:
            found = self._evaluate(digest, _checked(stop))
        self._cache(digest, found)
        return found

    def _cache(self, digest: str, evaluation: Evaluation) -> None:
        with self._lock:
            self._evaluations[digest] = evaluation
            while sum(one.nbytes for one in self._evaluations.values()) > _CACHED_BYTES:
                self._evaluations.popitem(last=False)

    def forget(self, digests: Collection[str]) -> None:
        """Drop cached examples of purged bundles."""
        with self._lock:
            for digest in digests:
                self._evaluations.pop(digest, None)

    def _evaluate(self, digest: str, check: Callable[[], None]) -> Evaluation:
        bundle = self._read_taught(digest)
        examples, text = examples_of(bundle), text_of(bundle)
        assert examples is not None, "it was taught"
        examples = _with_classes(examples, text)
        text = None if text is None else text.reindexed(examples.labels)
        solved = solve(examples, text, feature_layout(self._backbone), check)
        return Evaluation.of(examples, solved, text)

    def corrections(self, task: str, offset: int, limit: int) -> CorrectionPage:
        return self._store.corrections.read(task, offset=offset, limit=limit)

    def remove_corrections(
        self,
        task: str,
        digests: Collection[str] | None,
        condition: engram_store.Condition | None = None,
    ) -> int:
        """Remove the corrections of these photos, or all, and return their number. Blocks."""
        catalog = self._store.refresh()
        if condition is not None:
            condition(catalog)
        if task not in catalog.all_tasks:  # those of a retired task can be removed too
            catalog.task(task)  # raises UnknownTask
        return self._store.corrections.remove(task, digests)

    def abort_draft(self, draft: engram_store.Draft) -> None:
        """Delete the parts of an upload, or raise UnknownUpload. Blocks."""
        if not self._store.drafts.abort(draft):
            raise engram_store.unknown_upload(draft)

    def correct(
        self,
        task: str,
        photos: Sequence[tuple[str, frozenset[str]]],
        *,
        actor: str,
        condition: engram_store.Condition | None = None,
    ) -> int:
        """Keep photos (digest, labels) of a trained task and return how many differ. Blocks."""
        catalog = self._store.refresh()
        if condition is not None:
            condition(catalog)
        bundle = self._store.read_bundle(catalog.resolve(TaskRef(task)).digest)
        if is_taught(bundle):
            raise errors.IsTaught(
                f"task '{task}' is taught from examples: send corrections to /tasks/{task}/examples"
            )
        task_type = bundle.task_type
        if task_type != "single_label" and task_type != "multi_label":
            raise errors.UnteachableExamples(
                f"task '{task}' is a {task_type} task; only classification tasks accept corrections"
            )
        _check_labels(task, bundle.labels, [labels for _, labels in photos])
        # Checks that the labels fit the task type and each other; the features do not matter.
        blank = np.zeros(1, np.float16)
        examples = [Example(_to_bytes(digest), blank, labels) for digest, labels in photos]
        corrections = [
            engram_store.Correction(
                digest=f"sha256:{one.digest.hex()}", labels=tuple(sorted(one.labels))
            )
            for one in Examples.of(task_type, examples)
        ]
        self._store.correct(task, corrections, actor=actor, limits=self._correction_limits)
        return len(corrections)


def _checked(stop: threading.Event | None) -> Callable[[], None]:
    def check() -> None:
        if stop is not None and stop.is_set():
            raise CancelledError

    return check


def _with_classes(examples: Examples, text: TextHead | None) -> Examples:
    return examples if text is None else examples.with_labels(text.labels)


@dataclass(frozen=True, slots=True)
class Difference:
    """How the examples of two versions differ; `str()` is the note in the history.

    The note stays in the log for good, so it has counts and no labels, which may be personal data.
    """

    photos_added: int = 0
    photos_moved: int = 0
    photos_removed: int = 0
    names_read: int = 0

    @classmethod
    def between(cls, before: Examples | None, after: Examples, names_read: int = 0) -> "Difference":
        old = {} if before is None else {one.digest: one.labels for one in before}
        new = {one.digest: one.labels for one in after}
        moved = sum(labels != old.get(digest, labels) for digest, labels in new.items())
        return cls(len(new.keys() - old.keys()), moved, len(old.keys() - new.keys()), names_read)

    def __str__(self) -> str:
        parts = []
        if self.photos_added:
            parts.append(f"{_count(self.photos_added)} added")
        if self.photos_moved:
            parts.append(f"{_count(self.photos_moved)} corrected")
        if self.photos_removed:
            parts.append(f"{_count(self.photos_removed)} removed")
        if self.names_read:
            parts.append(f"{self.names_read} classes named")
        return ", ".join(parts)


def _count(examples: int) -> str:
    return "1 example" if examples == 1 else f"{examples} examples"


def _check_labels(task: str, known: Sequence[str], labels: Iterable[frozenset[str]]) -> None:
    unknown = sorted(frozenset().union(*labels).difference(known))
    if unknown:
        shown = ", ".join(known[:_CLASSES_SHOWN]) + (", …" if len(known) > _CLASSES_SHOWN else "")
        raise errors.UnteachableExamples(
            f"task '{task}' has no class '{unknown[0]}', so a correction cannot have that label; "
            f"its classes are {shown}"
        )


def _check_purge(task: str, versions: tuple[int, ...], catalog: engram_store.Catalog) -> None:
    """Raise if these versions could not be purged after `default` has moved to another."""
    info = catalog.task(task)
    aliases = {alias: v for alias, v in info.aliases.items() if alias != "default"}
    moved = {**catalog.all_tasks, task: replace(info, aliases=aliases)}
    engram_store.Purge(task, versions).plan(replace(catalog, all_tasks=moved))


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


def _to_text(digest: np.ndarray[tuple[int], np.dtype[np.uint8]]) -> str:
    return f"sha256:{digest.tobytes().hex()}"


def _to_bytes(digest: str) -> bytes:
    return bytes.fromhex(digest.removeprefix("sha256:"))
