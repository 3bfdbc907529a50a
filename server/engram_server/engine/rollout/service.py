"""The rollout service: watches the answers of all versions, and moves `default` on evidence.

Workers report each batch after its callers are answered (`observe`). Batches are collected and
counted some dozens of images at a time, which costs microseconds per image. A thread counts what is
left, and writes the evidence of this server to the store, where other replicas read it.
"""

import itertools
import logging
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

import numpy as np
from engram_bundle import TaskStoreError
from engram_store import Catalog, Condition, Evidence, MoveAlias, PairEvidence, TaskEvidence

from engram_server.engine import observer as metrics
from engram_server.engine.rollout.comparison import (
    Answers,
    Comparison,
    Disagreement,
    ObservedImage,
)
from engram_server.engine.rollout.drift import DriftMeter, DriftPoint, DriftReport
from engram_server.engine.rollout.promotion import Criteria, plan_promotion
from engram_server.engine.rollout.recent import RecentAnswers
from engram_server.engine.rollout.rules import WINDOW_IMAGES, Figure, Rule, Window
from engram_server.engine.types import Floats, TaskVersion

# The least recently updated are dropped.
MAX_TASKS: Final = 10_000  # with compared versions
MAX_PAIRS: Final = 16  # of versions of one task
MAX_METERS: Final = 10_000
WRITE_SECONDS: Final = 15.0  # what a killed server loses at most
# Collected before they are counted; few enough to need little memory.
_IMAGES_AT_ONCE: Final = 256
_VALUES_AT_ONCE: Final = 4_000_000  # logits
_OLDEST_SECONDS: Final = 1.0
_WRITES_AT_ONCE: Final = 500
_STOP_SECONDS: Final = 5.0

_Versions = tuple[int | None, int | None]  # of the version that answered, and of the candidate

_log = logging.getLogger("engram.rollouts")


@dataclass(frozen=True, slots=True)
class Observation:
    """One batch after its callers were answered."""

    images: Sequence[ObservedImage]
    answers: Sequence[Answers]  # that callers received
    shadows: Sequence[Answers] = ()
    # Shadows that were left out, each with the version that answered; once for every image.
    dropped: Sequence[tuple[TaskVersion, TaskVersion]] = ()
    features: Floats | None = None  # (B, D): what tasks with a drift reference are measured on


@dataclass(frozen=True, slots=True)
class FeedbackOutcome:
    scored: int  # images whose answers were remembered
    repeated: int  # images that had feedback before
    unknown: int  # images that this server does not remember


@dataclass(slots=True)
class _Buffer:
    observations: list[Observation] = field(default_factory=list)
    images: int = 0
    values: int = 0  # logits
    since: float = 0.0


class Rollouts:
    """Compares versions on traffic. Thread-safe."""

    def __init__(
        self,
        evidence: Evidence,
        replica: str,
        observer: metrics.EngineObserver,
        rules: Sequence[Rule] = (),
        roll_back: Callable[[str, int, str], None] = lambda *_: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._rules = rules
        self._roll_back = roll_back  # takes task, version and reason; may block
        self._windows: dict[tuple[str, int | None], Window] = {}  # of versions with a rule
        self._rollbacks: deque[tuple[str, int, str]] = deque(maxlen=_WRITES_AT_ONCE)
        self._evidence = evidence
        self._replica = replica
        self._observer = observer
        self._clock = clock
        self._lock = threading.RLock()
        self._buffer = _Buffer()
        self._pairs: OrderedDict[str, OrderedDict[_Versions, Comparison]] = OrderedDict()  # by task
        self._meters: OrderedDict[tuple[str, int | None], DriftMeter] = OrderedDict()
        self._recent = RecentAnswers()
        self._unwritten: dict[str, None] = {}  # names of tasks
        self._stopping = threading.Event()
        self._wake = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        self._thread = threading.Thread(target=self._run, name="engram-evidence", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._stopping.set()
        self._wake.set()
        if self._thread is not None:
            self._thread.join(_STOP_SECONDS)

    # Counting

    def observe(self, observation: Observation) -> None:
        """Collect a batch, and count what was collected now and then."""
        now = self._clock()
        with self._lock:
            buffer = self._buffer
            if not buffer.observations:
                buffer.since = now
            buffer.observations.append(observation)
            buffer.images += len(observation.images)
            buffer.values += sum(answers.logits.size for answers in observation.answers)
            many = buffer.images >= _IMAGES_AT_ONCE or buffer.values >= _VALUES_AT_ONCE
            due = many or now - buffer.since > _OLDEST_SECONDS
        if due:
            self.count()

    def count(self) -> None:
        """Count all batches that were collected."""
        with self._lock:
            collected, self._buffer = self._buffer.observations, _Buffer()
            if not collected:
                return
            joined = _join(collected)
            digests = [image.digest for image in joined.images]
            self._recent.add(digests, (*joined.answers, *joined.shadows))
            by_task: dict[str, list[Answers]] = {}
            for answers in joined.answers:
                self._measure(answers, joined.features)
                by_task.setdefault(answers.by.name, []).append(answers)
            for shadow in joined.shadows:
                for answers in by_task.get(shadow.by.name, ()):
                    if answers.by.version != shadow.by.version:
                        self._compare(answers, shadow, joined.images)
            for answered, shadow_task in joined.dropped:
                self._pair(answered, shadow_task).dropped += 1
                self._record(metrics.SHADOWS_DROPPED, shadow_task)

    def _measure(self, answers: Answers, features: Floats | None) -> None:
        key = answers.by.name, answers.by.version
        meter = self._meters.setdefault(key, DriftMeter())
        self._meters.move_to_end(key)
        while len(self._meters) > MAX_METERS:
            self._meters.popitem(last=False)
        meter.add(answers, features)
        if self._rules:
            self._check_rules(answers)
        report = meter.report()
        for instrument, value in (
            (metrics.DRIFT_DISTANCE, report.distance),
            (metrics.DRIFT_LIMIT, report.limit),
            (metrics.OOD_SHARE, report.out_of_distribution),
            (metrics.CLASS_DIVERGENCE, report.class_divergence),
        ):
            if value is not None:
                self._observer.record_task(instrument, *key, value)

    def _check_rules(self, answers: Answers) -> None:
        broken = int(np.count_nonzero(~answers.finite))
        scores = answers.ood_scores
        unlike = 0 if scores is None else int(np.count_nonzero(scores > 1))
        counts: dict[Figure, int] = {"not_finite": broken, "errors": broken}
        self._note_window(
            answers.by, len(answers.images), {**counts, "out_of_distribution": unlike}
        )

    def note_failed(self, by: TaskVersion) -> None:
        """Note an image that a version could not answer because its pass failed."""
        with self._lock:
            if self._rules:
                self._note_window(by, 1, {"errors": 1})

    def _note_window(self, by: TaskVersion, images: int, counts: Mapping[Figure, int]) -> None:
        window = self._windows.setdefault((by.name, by.version), Window())
        window.add(images, counts)
        if len(self._windows) > MAX_METERS:
            self._windows.clear()
        if window.images >= WINDOW_IMAGES:
            del self._windows[by.name, by.version]
            if by.version is not None and (reason := window.broken(self._rules)):
                self._rollbacks.append((by.name, by.version, reason))
                self._wake.set()

    def drift(self, task: str, version: int) -> tuple[DriftReport, list[DriftPoint]]:
        """Return the figures of a version on this server, and their course."""
        with self._lock:
            self.count()
            meter = self._meters.get((task, version)) or DriftMeter()
            return meter.report(), meter.points

    def _compare(
        self, answers: Answers, shadow: Answers, observed: Sequence[ObservedImage]
    ) -> None:
        pair = self._pair(answers.by, shadow.by)
        images, agreed = pair.images, pair.agreed
        pair.add(answers, shadow, observed)
        self._record(metrics.SHADOW_IMAGES, shadow.by, pair.images - images)
        self._record(metrics.SHADOW_AGREEMENTS, shadow.by, pair.agreed - agreed)

    def _record(self, instrument: metrics.Instrument, served: TaskVersion, count: int = 1) -> None:
        self._observer.record_task(instrument, served.name, served.version, count)

    def _pair(self, baseline: TaskVersion, candidate: TaskVersion) -> Comparison:
        versions = baseline.version, candidate.version
        pairs = self._pairs.setdefault(baseline.name, OrderedDict())
        pair = pairs.get(versions)
        if pair is None:
            pair = pairs[versions] = Comparison(baseline, candidate)
        pairs.move_to_end(versions)
        self._pairs.move_to_end(baseline.name)
        if len(pairs) > MAX_PAIRS:
            pairs.popitem(last=False)
        if len(self._pairs) > MAX_TASKS:
            self._pairs.popitem(last=False)
        self._unwritten[baseline.name] = None
        return pair

    def _pairs_of(self, task: str) -> Mapping[_Versions, Comparison]:
        return self._pairs.get(task, OrderedDict())

    # Feedback

    def score(self, task: str, labels: Iterable[tuple[str, str]]) -> FeedbackOutcome:
        """Score every version that saw an image, by pairs of digest and true label."""
        scored = repeated = unknown = 0
        with self._lock:
            self.count()
            for digest, label in labels:
                answers = self._recent.answers(task, digest)
                if not answers:
                    unknown += 1
                elif not self._recent.mark_scored(task, digest):
                    repeated += 1
                else:
                    scored += 1
                    self._score(answers, label)
        return FeedbackOutcome(scored, repeated, unknown)

    def _score(self, answers: dict[TaskVersion, str], label: str) -> None:
        for served, answer in answers.items():
            self._record(metrics.FEEDBACK, served)
            self._record(metrics.FEEDBACK_RIGHT, served, int(answer == label))
        for baseline, candidate in itertools.permutations(answers, 2):
            if self._is_scored(baseline, candidate):
                self._pair(baseline, candidate).score(
                    baseline_right=answers[baseline] == label,
                    candidate_right=answers[candidate] == label,
                )

    def _is_scored(self, baseline: TaskVersion, candidate: TaskVersion) -> bool:
        """Whether feedback belongs to this pair; two versions never compared: older to newer."""
        pairs = self._pairs_of(baseline.name)
        if (baseline.version, candidate.version) in pairs:
            return True
        older = (baseline.version or 0) < (candidate.version or 0)
        return older and (candidate.version, baseline.version) not in pairs

    # Reading

    def evidence(self, task: str) -> list[PairEvidence]:
        """Return the evidence about a task of all replicas, by versions. Blocks."""
        merged = {pair.versions: pair for pair in self._own_evidence(task)}
        for pair in self._evidence.of_others(task, self._replica):
            known = merged.get(pair.versions)
            merged[pair.versions] = pair if known is None else known.plus(pair)
        return [merged[versions] for versions in sorted(merged)]

    def plan_promotion(
        self, catalog: Catalog, task: str, alias: str, criteria: Criteria
    ) -> tuple[MoveAlias, Condition]:
        """Decide on all evidence whether `default` may move to a version. Blocks."""
        return plan_promotion(catalog, task, alias, criteria, self.evidence(task))

    def disagreements(self, task: str, versions: tuple[int, int]) -> list[Disagreement]:
        """Return the images on which two versions differed on this server, newest first."""
        with self._lock:
            self.count()
            pair = self._pairs_of(task).get(versions)
            return [] if pair is None else list(pair.disagreements)[::-1]

    def _own_evidence(self, task: str) -> list[PairEvidence]:
        with self._lock:
            self.count()
            return [pair.evidence() for pair in self._pairs_of(task).values()]

    # Erasing

    def forget(self, task: str, digests: Collection[str] | None = None) -> None:
        """Forget single images of a task, or all that is known about it."""
        with self._lock:
            self.count()
            self._recent.forget(task, digests)
            if digests is None:
                for version in [key for key in self._meters if key[0] == task]:
                    del self._meters[version]
            for pair in self._pairs_of(task).values():
                pair.forget(None if digests is None else frozenset(digests))
            if digests is None and self._pairs.pop(task, None) is not None:
                self._unwritten[task] = None

    # Writing

    def _run(self) -> None:
        while not self._stopping.is_set():
            self._wake.wait(WRITE_SECONDS)
            self._wake.clear()
            try:
                while self._rollbacks:
                    self._roll_back(*self._rollbacks.popleft())
                self.write()
            except Exception:  # noqa: BLE001 - thread boundary: keep writing
                _log.exception("rolling back, or writing evidence failed")

    def write(self) -> None:
        """Write evidence that has changed to the store, some hundred tasks at a time. Blocks."""
        self.count()
        for task in list(self._unwritten)[:_WRITES_AT_ONCE]:
            with self._lock:
                self._unwritten.pop(task, None)
                pairs = tuple(self._own_evidence(task))
            try:
                if pairs:
                    self._evidence.write(self._replica, TaskEvidence(task=task, pairs=pairs))
                else:
                    self._evidence.remove(task, self._replica)
            except TaskStoreError as error:
                _log.warning("cannot write the evidence about task '%s': %s", task, error)
                self._unwritten[task] = None
                return


def _join(observations: Sequence[Observation]) -> Observation:
    """Join batches into one, so that each version is counted once for all of them."""
    if len(observations) == 1:
        return observations[0]
    images: list[ObservedImage] = []
    answers: dict[TaskVersion, list[Answers]] = {}
    shadows: dict[TaskVersion, list[Answers]] = {}
    for each in observations:
        for grouped, parts in ((answers, each.answers), (shadows, each.shadows)):
            for part in parts:
                moved = replace(part, images=part.images + len(images))
                grouped.setdefault(part.by, []).append(moved)
        images += each.images
    return Observation(
        images,
        [_joined(parts) for parts in answers.values()],
        [_joined(parts) for parts in shadows.values()],
        [pair for each in observations for pair in each.dropped],
        _joined_features(observations),
    )


def _joined_features(observations: Sequence[Observation]) -> Floats | None:
    found = [each.features for each in observations if each.features is not None]
    if not found:
        return None
    width = found[0].shape[1]
    return np.concatenate(
        [
            np.full((len(each.images), width), np.nan, np.float32)
            if each.features is None
            else each.features
            for each in observations
        ]
    )


def _joined(parts: Sequence[Answers]) -> Answers:
    scores = [part.ood_scores for part in parts if part.ood_scores is not None]
    return replace(
        parts[0],
        images=np.concatenate([part.images for part in parts]),
        logits=np.concatenate([part.logits for part in parts]),
        ood_scores=np.concatenate(scores) if len(scores) == len(parts) else None,
    )
