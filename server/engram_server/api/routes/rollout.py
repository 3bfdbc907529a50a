"""`/tasks/{task}/comparison`, `/drift`, `/feedback`, `/promote`: watch versions, then move."""

from dataclasses import asdict
from typing import Annotated, Self

from engram_store import Condition, MoveAlias, PairEvidence
from fastapi import APIRouter, Depends, Query, Request
from pydantic import Field, model_validator

from engram_server.access.identity import Identity
from engram_server.api import dependencies as deps
from engram_server.api.auth import IdentityDep
from engram_server.api.bodies import Digest, read_json
from engram_server.api.problems import responses
from engram_server.api.routes import tasks
from engram_server.engine.engine import Engine
from engram_server.engine.rollout.promotion import Criteria, agreement_of, gain_of
from engram_server.errors import UnteachableExamples

reading = APIRouter(
    tags=["rollout"], dependencies=deps.requires_caught_up(*tasks.READ), route_class=deps.FairRoute
)
changing = APIRouter(
    tags=["rollout"],
    dependencies=deps.requires_audited("publish"),
    responses=responses(400, 401, 404, 408, 409, 412, 413, 422, 429, 503),
)

_MAX_FEEDBACK = 500  # images of one request
Share = Annotated[float, Field(ge=0, le=1)]


class FeedbackInput(deps.Strict):
    digest: Digest = Field(description="The image, as `/predict` identifies it.")
    label: str = Field(min_length=1, max_length=256, description="Its true label.")


class FeedbackBody(deps.Strict):
    """True labels of images that were sent to `/predict`."""

    feedback: list[FeedbackInput] = Field(min_length=1, max_length=_MAX_FEEDBACK, fail_fast=True)


class PromoteBody(deps.Strict):
    """What the evidence must show; at least one of `min_agreement` and `min_gain`."""

    source: str = Field("shadow", alias="from", description="The alias of the version to promote.")
    min_images: int = Field(
        1, ge=1, le=deps.LARGEST_NUMBER, description="Images on which both must have answered."
    )
    min_agreement: Share | None = Field(None, description="Share of images with the same label.")
    min_gain: float | None = Field(
        None,
        ge=-1,
        le=1,
        description="Lower end of the interval of the difference in accuracy, by feedback.",
    )
    confidence: float = Field(0.95, ge=0.5, le=0.9999, description="Of that interval.")

    @model_validator(mode="after")
    def _check_one_criterion(self) -> Self:
        if self.min_agreement is None and self.min_gain is None:
            raise ValueError("set min_agreement, min_gain or both")
        return self

    @property
    def criteria(self) -> Criteria:
        return Criteria(self.min_images, self.min_agreement, self.min_gain, self.confidence)


class ClassAgreement(deps.Strict):
    label: str
    images: int = Field(description="Images for which the baseline has this top label.")
    agreement: float


class GainResult(deps.Strict):
    """Accuracies by feedback on the same images, and their difference with its 95 % interval."""

    images: int
    baseline_accuracy: float
    candidate_accuracy: float
    gain: float
    low: float
    high: float


class DisagreementResult(deps.Strict):
    digest: str
    baseline: str = Field(description="The top label of the baseline.")
    candidate: str
    baseline_score: float
    candidate_score: float
    thumbnail: str | None = deps.omit_if_none(
        "A `data:image/webp` URL, if the server keeps thumbnails (`ENGRAM_SHADOW_THUMBNAILS`)."
    )


class PairResult(deps.Strict):
    """Two versions on the same images, counted by all replicas."""

    baseline: int = Field(description="The version that answered.")
    candidate: int = Field(description="The version that it is compared with.")
    images: int
    agreement: float | None = Field(
        description="Share of images with the same top label; for multi-label tasks, with the same "
        "labels. Null without images."
    )
    top_k_agreement: float | None = Field(
        description="Share of images whose label is among the first five of the candidate."
    )
    mean_score_difference: float | None = Field(description="Of the score of that label.")
    dropped: int = Field(description="Images on which the candidate was left out under load.")
    not_finite: int = Field(description="Answers of the candidate that were not finite.")
    classes: list[ClassAgreement] = Field(description="The lowest agreement first.")
    feedback: GainResult | None
    disagreements: list[DisagreementResult] | None = deps.omit_if_none(
        "The last images on which they differ, on this replica. For callers with `publish` only."
    )


class ComparisonResult(deps.Strict):
    task: str
    generation: int
    aliases: dict[str, int]
    pairs: list[PairResult] = Field(description="Live versions that answered the same images.")


class DriftFigures(deps.Strict):
    distance: float | None = Field(
        description="Distance of the mean of recent images from that of the training images, in "
        "standard deviations. Null for few images, or if the bundle has no reference."
    )
    limit: float | None = Field(description="The largest distance to expect without drift.")
    out_of_distribution: float | None = Field(description="Share of recent images.")


class DriftPointResult(DriftFigures):
    time: float = Field(description="Seconds since 1970.")


class DriftResult(DriftFigures):
    """How the recent images of a version differ from its training images, on this replica."""

    task: str
    version: int
    images: int = Field(description="Images answered since the server started.")
    drifting: bool = Field(description="Whether the distance is above its limit.")
    class_divergence: float | None = Field(
        description="Total variation distance of the class shares from those of the training."
    )
    points: list[DriftPointResult] = Field(description="The course of the figures, oldest first.")


class FeedbackResult(deps.Strict):
    task: str
    scored: int = Field(description="Images whose answers were scored.")
    repeated: int = Field(description="Images that had feedback before: the first counts.")
    unknown: int = Field(description="Images that this replica does not remember.")


@reading.get("/tasks/{task:path}/comparison", responses=responses(401, 404, 412, 422, 503))
def compare_versions(
    task: tasks.Name, engine: deps.EngineDep, identity: IdentityDep
) -> ComparisonResult:
    """Compare the versions of a task that answered the same images."""
    snapshot = engine.tasks.snapshot
    info = snapshot.catalog.task(task)
    live = {each.version for each in info.live}
    return ComparisonResult(
        task=task,
        generation=snapshot.generation,
        aliases=dict(sorted(info.aliases.items())),
        pairs=[
            _pair(engine, task, pair, identity)
            for pair in engine.rollouts.evidence(task)
            if live.issuperset(pair.versions)
        ],
    )


@reading.get("/tasks/{task:path}/drift", responses=responses(401, 404, 412, 422, 503))
def describe_drift(
    task: tasks.Name,
    engine: deps.EngineDep,
    version: Annotated[int | None, Query(ge=1, le=deps.LARGEST_NUMBER)] = None,
) -> DriftResult:
    """Compare the recent images of a version (default: the default one) with its training."""
    catalog = engine.tasks.snapshot.catalog
    number = catalog.task(task).aliases["default"] if version is None else version
    catalog.version(task, number)  # raises UnknownVersion
    report, points = engine.rollouts.drift(task, number)
    return DriftResult(
        task=task,
        version=number,
        drifting=report.drifting,
        points=[DriftPointResult(**asdict(point)) for point in points],
        **asdict(report),
    )


def _url_of(thumbnail: bytes) -> str | None:
    return deps.data_url(thumbnail) if thumbnail else None


def _pair(engine: Engine, task: str, pair: PairEvidence, identity: Identity) -> PairResult:
    gain, images = gain_of(pair), pair.images
    classes = [
        ClassAgreement(label=label, images=count, agreement=agreed / count)
        for label, (count, agreed) in pair.classes.items()
        if count
    ]
    disagreements = None
    # A digest reveals which images other callers have sent.
    if identity.allows(("publish",), task):
        found = engine.rollouts.disagreements(task, pair.versions)
        disagreements = [
            DisagreementResult(**asdict(one) | {"thumbnail": _url_of(one.thumbnail)})
            for one in found
        ]
    return PairResult(
        baseline=pair.baseline,
        candidate=pair.candidate,
        images=images,
        agreement=agreement_of(pair),
        top_k_agreement=pair.agreed_top_k / images if images else None,
        mean_score_difference=pair.score_difference / images if images else None,
        dropped=pair.dropped,
        not_finite=pair.not_finite,
        classes=sorted(classes, key=lambda each: (each.agreement, -each.images)),
        feedback=None if gain is None else GainResult(**asdict(gain)),
        disagreements=disagreements,
    )


@changing.post(
    "/tasks/{task:path}/feedback",
    dependencies=[Depends(deps.unconditional)],
    openapi_extra=deps.request_body(deps.json_content(FeedbackBody)),
)
async def give_feedback(
    request: Request, task: tasks.Name, changes: tasks.ChangesDep
) -> FeedbackResult:
    """Score every version that answered an image, by its true label."""
    body = await read_json(request, FeedbackBody)
    engine = changes.runtime.engine

    def score() -> FeedbackResult:
        _check_labels(engine, task, body)
        outcome = engine.rollouts.score(task, [(one.digest, one.label) for one in body.feedback])
        return FeedbackResult(task=task, **asdict(outcome))

    result = await changes.run(score)
    request.state.record.audit_details = {"scored": result.scored}
    return result


def _check_labels(engine: Engine, task: str, body: FeedbackBody) -> None:
    """Reject labels that no version under an alias has: they would count as wrong answers."""
    snapshot = engine.tasks.snapshot
    info = snapshot.catalog.task(task)
    task_type = info.current.facts.task_type
    if task_type != "single_label":
        raise UnteachableExamples(
            f"Task '{task}' is a {task_type} task; only single-label tasks accept feedback.",
            names=[task],
        )
    found = [tasks.class_labels(snapshot, f"{task}:{alias}") for alias in info.aliases]
    known = {label for labels in found for label in labels or ()}
    unknown = [one.label for one in body.feedback if one.label not in known]
    if unknown and known:
        raise UnteachableExamples(
            f"Task '{task}' has no class '{unknown[0]}'; its classes are "
            f"{', '.join(sorted(known)[:10])}{', …' if len(known) > 10 else ''}.",
            names=unknown[:10],
        )


@changing.post(
    "/tasks/{task:path}/promote",
    responses={202: {"model": tasks.ChangeResult, "description": "Not yet served by all replicas"}},
    openapi_extra=deps.request_body(
        deps.json_content(PromoteBody, example={"min_agreement": 0.97, "min_images": 2000})
    ),
)
async def promote(
    request: Request,
    task: tasks.Name,
    condition: tasks.ConditionDep,
    changes: tasks.ChangesDep,
) -> tasks.ChangeResult:
    """Move `default` to the version under an alias if the evidence about it holds.

    Otherwise 409 names the figure that is missing. The log entry has the evidence.
    """
    body = await read_json(request, PromoteBody)
    engine = changes.runtime.engine

    def plan() -> tuple[MoveAlias, Condition]:
        catalog = engine.tasks.sync().catalog
        if condition is not None:
            condition(catalog)  # before the evidence, which is about the present versions
        return engine.rollouts.plan_promotion(catalog, task, body.source, body.criteria)

    move, unchanged = await changes.run(plan)
    return await changes.make(move, tasks.all_of(condition, unchanged))
