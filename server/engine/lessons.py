"""Teaching: examples are added to a task or taken away, and its head is solved and published anew.

A lesson is applied to the newest version in the store. Where somebody else has taught the task in
the meantime, it is applied again to what they have made of it: both are kept. All of it blocks and
takes a core: for the thread that makes changes.

A trained task cannot be solved anew. Corrections of it are kept beside it, for its next training.
"""

import base64
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Final

import numpy as np

from server.engine.tasks.changes import ChangeOutcome
from server.engine.teaching import examples_of, is_taught, taught_bundle, text_of
from server.engine.types import Floats
from server.errors import (
    ContextNotCached,
    IsTaught,
    NotTaught,
    UnknownExample,
    UnteachableExamples,
)
from server.model.backbone import Backbone
from server.model.closed_form import Solved, solve
from server.model.examples import Example, Examples, TaughtProblem
from server.model.text import TextTower, no_text_tower
from server.model.text_head import TextHead
from task_store import (
    Catalog,
    Condition,
    Correction,
    IncompatibleBundle,
    Limits,
    PreconditionFailed,
    Publish,
    TaskBundle,
    TaskRef,
    TaskStore,
)

Commit = Callable[[Publish, Condition], ChangeOutcome]

MOST_DOUBTS: Final = 20
_MOST_EXAMPLES: Final = Limits().max_examples
_PATIENCE_SECONDS: Final = 60.0
_REMEMBERED: Final = 16  # versions whose examples were judged
_LABELS_NOTED, _LABEL_CHARS_NOTED = 4, 40


@dataclass(frozen=True, slots=True)
class Photo:
    """What a lesson says of a photo. Without a feature the task must know it already."""

    digest: str
    feature: Floats | None
    labels: frozenset[str]


@dataclass(frozen=True, slots=True)
class Lesson:
    """What changes about the examples of a task. What it says of a photo replaces what was known.

    `problem` and `description` of a task that is there already stay as they are when not given.
    """

    task: str
    photos: Sequence[Photo] = ()
    taken_away: frozenset[str] = frozenset()
    problem: TaughtProblem | None = None
    description: str | None = None
    classes: Sequence[str] = ()  # names to be read by the text tower
    templates: Sequence[str] = ()  # in which they are read; as before when not given

    def applied_to(self, before: Examples | None, *, named: bool = False) -> Examples:
        """The examples after the lesson; raises what speaks against it.

        `named`: names of its classes alone are enough for the task.
        """
        if before is None:
            before = Examples.of(self.problem or "single_label", [])
        elif self.problem not in (None, before.problem):
            raise UnteachableExamples(
                f"task '{self.task}' is {before.problem}, and cannot become {self.problem}: teach "
                f"a new task"
            )
        known = {one.digest: one.feature for one in before}
        after = before
        if self.photos:
            added = [self._example(photo, known) for photo in self.photos]
            after = before.with_added(added, relabel=True)
        if self.taken_away:
            after = after.without(self._digests_taken(known))
            if not len(after) and not named:
                raise UnteachableExamples(
                    f"no example would be left of task '{self.task}': retire the task instead"
                )
        if len(after) > _MOST_EXAMPLES:
            raise UnteachableExamples(
                f"task '{self.task}' would have {len(after)} examples, and at most "
                f"{_MOST_EXAMPLES} are kept: train a task of that many photos"
            )
        return after

    def _example(self, photo: Photo, known: dict[bytes, Floats]) -> Example:
        digest = _to_bytes(photo.digest)
        feature = known.get(digest, photo.feature)
        if feature is None:
            raise ContextNotCached(
                f"the image {photo.digest} is not held here (any more), and is no example of task "
                f"'{self.task}'; send its bytes once again"
            )
        return Example(digest, feature, photo.labels)

    def _digests_taken(self, known: dict[bytes, Floats]) -> set[bytes]:
        unknown = [digest for digest in self.taken_away if _to_bytes(digest) not in known]
        if unknown:
            raise UnknownExample(
                f"task '{self.task}' has no example {', '.join(sorted(unknown)[:3])}", unknown
            )
        return set(map(_to_bytes, self.taken_away))


@dataclass(frozen=True, slots=True)
class Doubt:
    """An example that the others speak against, and what they say it is."""

    digest: str
    labels: tuple[str, ...]
    suggested: tuple[str, ...]
    probability: float


@dataclass(frozen=True, slots=True)
class TaughtVersion:
    """The examples of one version of a task, and how they are answered without themselves."""

    examples: Examples
    solved: Solved
    text: TextHead | None = None  # what the names of the classes gave

    @property
    def classes(self) -> list[tuple[str, int]]:
        """Each label, and how many examples have it."""
        counts = self.examples.targets.sum(axis=0).tolist()
        return list(zip(self.examples.labels, counts, strict=True))

    def labels_at(self, place: int) -> tuple[str, ...]:
        return self._names(self.examples.targets[place])

    def digest_at(self, place: int) -> str:
        return f"sha256:{self.examples.digests[place].tobytes().hex()}"

    def probability_at(self, place: int) -> float | None:
        """Of its labels, by a head made without it; None where there is no such head."""
        probability = float(self.solved.leave_one_out.probabilities[place])
        return None if np.isnan(probability) else probability

    def doubts(self) -> list[Doubt]:
        """The examples whose labels are less likely than not, the least likely first."""
        places = self.solved.leave_one_out.most_suspicious(MOST_DOUBTS)
        return [
            Doubt(
                self.digest_at(place),
                self.labels_at(place),
                self._suggested(place),
                float(self.solved.leave_one_out.probabilities[place]),
            )
            for place in places
        ]

    def _suggested(self, place: int) -> tuple[str, ...]:
        """The likeliest other label; of a multi-label task the labels with the worst one turned."""
        given = self.examples.targets[place]
        features = self.examples.features[place : place + 1]
        feature = features[0] if self.text is None else self.text.units(features)[0]
        logits = self.solved.weight @ feature.astype(np.float32) + self.solved.bias
        if self.examples.problem == "single_label":
            return (self.examples.labels[int(np.where(given, -np.inf, logits).argmax())],)
        turned = given.copy()
        worst = int(np.where(given, logits, -logits).argmin())
        turned[worst] = not turned[worst]
        return self._names(turned)

    def _names(self, target: np.ndarray[tuple[int], np.dtype[np.bool_]]) -> tuple[str, ...]:
        return tuple(self.examples.labels[k] for k in np.flatnonzero(target))


@dataclass(frozen=True, slots=True)
class LessonOutcome:
    """What a lesson has made, and what is served now."""

    publish: Publish
    version: TaughtVersion
    change: ChangeOutcome
    difference: "Difference"


class Teacher:
    """Applies lessons to the tasks of a store."""

    def __init__(
        self, backbone: Backbone, store: TaskStore, text_tower: TextTower | None = None
    ) -> None:
        self._backbone = backbone
        self._store = store
        self._text_tower = text_tower
        self.examples = lru_cache(_REMEMBERED)(self._judged)

    def teach(
        self, lesson: Lesson, commit: Commit, condition: Condition | None = None
    ) -> LessonOutcome:
        """Publish the next version of a task, under a condition on the catalog, by `commit`."""
        give_up = time.monotonic() + _PATIENCE_SECONDS
        while True:
            catalog = self._store.refresh()
            if condition is not None:
                condition(catalog)
            before = self._newest(lesson, catalog)
            known = None if before is None else examples_of(before)
            text = self._read_names(lesson, before)
            lesson = self._with_problem(lesson, known)
            examples = lesson.applied_to(known, named=text is not None)
            difference = Difference.between(known, examples, len(set(lesson.classes)))
            description = lesson.description
            if description is None:
                description = "" if before is None else before.manifest.description
            bundle, solved = taught_bundle(
                examples,
                self._backbone,
                text=text,
                description=description,
                license=None if before is None else before.manifest.license,
            )
            publish = Publish(lesson.task, bundle, note=str(difference))
            try:
                change = commit(publish, _unless_overtaken(lesson.task, catalog, condition))
            except _Overtaken:
                if time.monotonic() > give_up:
                    raise
                continue
            version = TaughtVersion(_of_classes(examples, text), solved, text)
            return LessonOutcome(publish, version, change, difference)

    def _with_problem(self, lesson: Lesson, known: Examples | None) -> Lesson:
        """Where nobody says, a task that is named is what the text tower was trained for."""
        if known is not None or lesson.problem or not lesson.classes or not self._text_tower:
            return lesson
        return replace(lesson, problem=self._text_tower.problem)

    def _read_names(self, lesson: Lesson, before: TaskBundle | None) -> TextHead | None:
        """What the names of the classes gave before, and what those of the lesson give."""
        known = None if before is None else text_of(before)
        if not lesson.classes:
            return known
        if self._text_tower is None:
            raise no_text_tower(self._backbone.name)
        templates = lesson.templates or (() if known is None else known.templates)
        read = self._text_tower.read(lesson.classes, templates)
        return read if known is None else known.joined(read)

    def correct(self, task: str, photos: Sequence[Photo], *, actor: str) -> None:
        """Keep what photos show beside a trained task."""
        bundle = self._store.read_bundle(self._store.refresh().resolve(TaskRef(task)).digest)
        if is_taught(bundle):
            raise IsTaught(
                f"task '{task}' is taught by examples: send its corrections to "
                f"/tasks/{task}/examples, and they are served at once"
            )
        problem = bundle.problem
        if problem != "single_label" and problem != "multi_label":
            raise UnteachableExamples(
                f"the answers of task '{task}' are no labels ({problem}), and a correction is"
            )
        # Nothing is solved: this says whether the labels fit the problem, and each other.
        blank = np.zeros(1, np.float16)
        examples = [Example(_to_bytes(one.digest), blank, one.labels) for one in photos]
        merged = Examples.of(problem, examples)
        features = {_to_bytes(one.digest): one.feature for one in photos}
        corrections = [
            Correction(
                digest=f"sha256:{one.digest.hex()}",
                labels=tuple(sorted(one.labels)),
                feature=_to_text(features[one.digest]),
            )
            for one in merged
        ]
        self._store.correct(task, corrections, actor=actor)

    def _newest(self, lesson: Lesson, catalog: Catalog) -> TaskBundle | None:
        """The bundle that a lesson is applied to; None for a task that is to be made."""
        if lesson.task not in catalog.tasks and not lesson.taken_away:
            return None
        digest = _default_digest(catalog, lesson.task)
        if digest is None:
            catalog.task(lesson.task)  # raises UnknownTask
            return None
        bundle = self._taught(digest)
        if bundle.backbone_fingerprint != self._backbone.fingerprint:
            raise IncompatibleBundle(
                f"Task '{lesson.task}' was taught with the backbone "
                f"'{bundle.manifest.backbone.name}', and this server has another: its examples "
                f"mean nothing here.",
                names=[lesson.task],
            )
        return bundle

    def _taught(self, digest: str) -> TaskBundle:
        bundle = self._store.read_bundle(digest)
        if not is_taught(bundle):
            raise NotTaught(
                "the task was trained, and not taught from examples: its corrections are kept "
                "beside it, below /corrections, for the next training"
            )
        return bundle

    def _judged(self, digest: str) -> TaughtVersion:
        """The examples in a bundle; NotTaught if there are none."""
        bundle = self._taught(digest)
        examples, text = examples_of(bundle), text_of(bundle)
        assert examples is not None, "it was taught"
        examples = _of_classes(examples, text)
        text = None if text is None else text.over(examples.labels)
        return TaughtVersion(examples, solve(examples, text), text)


def _of_classes(examples: Examples, text: TextHead | None) -> Examples:
    return examples if text is None else examples.with_labels(text.labels)


@dataclass(frozen=True, slots=True)
class Difference:
    """How the examples of two versions differ, for people: str() is what the log says of it."""

    added: Counter[str]  # by label
    moved: Counter[str]  # by the label they have now
    photos_added: int
    photos_moved: int
    photos_taken: int
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
            parts.append(f"{_photos(self.photos_added)} added ({_counted(self.added)})")
        if self.photos_moved:
            parts.append(f"{_photos(self.photos_moved)} corrected ({_counted(self.moved)})")
        if self.photos_taken:
            parts.append(f"{_photos(self.photos_taken)} taken away")
        if self.names_read:
            parts.append(f"{self.names_read} classes named")
        return ", ".join(parts)


def _photos(count: int) -> str:
    return "1 example" if count == 1 else f"{count} examples"


def _counted(counts: Counter[str]) -> str:
    shown = [
        f"{count} {label[:_LABEL_CHARS_NOTED]}"
        for label, count in sorted(counts.items())[:_LABELS_NOTED]
    ]
    more = [] if len(counts) <= _LABELS_NOTED else ["…"]
    return ", ".join([*shown, *more]) or "no label"


class _Overtaken(PreconditionFailed):
    """Somebody else has changed the task since it was read."""


def _unless_overtaken(task: str, seen: Catalog, condition: Condition | None) -> Condition:
    digest = _default_digest(seen, task)

    def check(catalog: Catalog) -> None:
        if condition is not None:
            condition(catalog)
        if _default_digest(catalog, task) != digest:
            raise _Overtaken(
                f"Task '{task}' is being changed by others all the time: try again.", names=[task]
            )

    return check


def _default_digest(catalog: Catalog, task: str) -> str | None:
    info = catalog.tasks.get(task)
    return None if info is None else info.versions[info.labels["default"]].digest


def _to_bytes(digest: str) -> bytes:
    return bytes.fromhex(digest.removeprefix("sha256:"))


def _to_text(feature: Floats | None) -> str | None:
    return None if feature is None else base64.b64encode(feature.astype("<f2").tobytes()).decode()
