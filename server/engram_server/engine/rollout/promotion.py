"""Promotion: move `default` to a version if the evidence about it holds.

Agreement needs no labels, and shows that little changes. Feedback shows that answers get better:
the gain is the difference of the accuracies of both versions on the same images.
"""

import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from statistics import NormalDist
from typing import Final

from engram_bundle import TaskRef
from engram_bundle.names import DEFAULT_ALIAS
from engram_store import Catalog, Condition, MoveAlias, PairEvidence, PreconditionFailed
from pydantic import JsonValue

from engram_server.errors import NotEnoughEvidence

CONFIDENCE: Final = 0.95


@dataclass(frozen=True, slots=True)
class Criteria:
    """What the evidence must show; None: not required."""

    min_images: int = 1
    min_agreement: float | None = None
    min_gain: float | None = None
    confidence: float = CONFIDENCE


@dataclass(frozen=True, slots=True)
class Gain:
    """How much more often the candidate is right than the baseline, on images with feedback."""

    images: int
    baseline_accuracy: float
    candidate_accuracy: float
    gain: float
    low: float  # the interval
    high: float


def agreement_of(pair: PairEvidence) -> float | None:
    return pair.agreed / pair.images if pair.images else None


def gain_of(pair: PairEvidence, confidence: float = CONFIDENCE) -> Gain | None:
    """Return the gain with its interval; None without feedback.

    The interval of Bonett and Price for paired shares: it also holds for few images.
    """
    better, worse = pair.only_candidate_right, pair.only_baseline_right
    images = pair.both_right + better + worse + pair.both_wrong
    if not images:
        return None
    up, down = (better + 1) / (images + 2), (worse + 1) / (images + 2)
    error = math.sqrt((up + down - (up - down) ** 2) / (images + 2))
    width = NormalDist().inv_cdf(0.5 + confidence / 2) * error
    return Gain(
        images,
        baseline_accuracy=(pair.both_right + worse) / images,
        candidate_accuracy=(pair.both_right + better) / images,
        gain=(better - worse) / images,
        low=max(-1.0, up - down - width),
        high=min(1.0, up - down + width),
    )


def plan_promotion(
    catalog: Catalog, task: str, alias: str, criteria: Criteria, evidence: Iterable[PairEvidence]
) -> tuple[MoveAlias, Condition]:
    """Return the move of `default`, with its condition; NotEnoughEvidence names what is missing."""
    baseline = catalog.resolve(TaskRef(task)).version
    candidate = catalog.resolve(TaskRef(task, alias=alias)).version
    if baseline == candidate:
        raise NotEnoughEvidence(
            f"Version {candidate} of task '{task}' has the alias '{alias}' and is the default "
            f"already.",
            names=[f"{task}:{alias}"],
        )
    versions = baseline, candidate
    pair = next((each for each in evidence if each.versions == versions), None)
    pair = pair or PairEvidence(baseline=baseline, candidate=candidate)
    if missing := _missing(pair, criteria):
        raise NotEnoughEvidence(
            f"Version {candidate} of task '{task}' is not promoted over version {baseline}: "
            f"{'; '.join(missing)}.",
            names=[f"{task}@{candidate}"],
        )

    def check(catalog: Catalog) -> None:
        now = catalog.task(task).aliases
        if (now.get(DEFAULT_ALIAS), now.get(alias)) != versions:
            raise PreconditionFailed(
                f"The evidence compares versions {baseline} and {candidate} of task '{task}', and "
                f"by now 'default' is version {now.get(DEFAULT_ALIAS)} and '{alias}' is version "
                f"{now.get(alias)}: read the comparison again.",
                names=[task],
            )

    found = _described(pair, alias, criteria)
    return MoveAlias(task, DEFAULT_ALIAS, candidate, evidence=found), check


def _missing(pair: PairEvidence, criteria: Criteria) -> list[str]:
    """Return what the evidence does not show, as parts of a sentence."""
    missing: list[str] = []
    agreement, required = agreement_of(pair), criteria.min_agreement
    if pair.images < criteria.min_images and (required is not None or criteria.min_images > 1):
        missing.append(
            f"it was compared on {pair.images:,} images, and {criteria.min_images:,} are required"
        )
    if required is not None and agreement is not None and agreement < required:
        missing.append(f"its agreement is {agreement:.4g}, and {required:g} is required")
    if criteria.min_gain is not None:
        missing += _missing_gain(gain_of(pair, criteria.confidence), criteria)
    return missing


def _missing_gain(gain: Gain | None, criteria: Criteria) -> list[str]:
    if gain is None:
        return [
            "there is no feedback about images that both versions answered, and a gain of "
            f"{criteria.min_gain:g} is required"
        ]
    if criteria.min_gain is not None and gain.low < criteria.min_gain:
        return [
            f"its gain on {gain.images:,} images with feedback is {gain.gain:.4g} "
            f"({criteria.confidence:.0%} interval {gain.low:.4g} to {gain.high:.4g}), and the "
            f"interval must start at {criteria.min_gain:g} or higher"
        ]
    return []


def _described(pair: PairEvidence, alias: str, criteria: Criteria) -> dict[str, JsonValue]:
    """The evidence for the log: figures only, because the log keeps it for good."""
    agreement, gain = agreement_of(pair), gain_of(pair, criteria.confidence)
    required = {name: value for name, value in asdict(criteria).items() if value is not None}
    found: dict[str, JsonValue] = {
        "from": alias,
        "baseline": pair.baseline,
        "images": pair.images,
        "agreement": None if agreement is None else round(agreement, 6),
        "required": required,
    }
    if gain is not None:
        found["feedback"] = {name: round(value, 6) for name, value in asdict(gain).items()}
    return found
