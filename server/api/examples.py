"""`/tasks/{task}/examples`: teaching a task from photos, and correcting it.

Photos go through the ordinary queue, as those of predictions do. What a head reads of them is kept
with their labels in the next version of the task; the photos are not. A trained task has
`/tasks/{task}/corrections` instead, which wait beside it for its next training.
"""

from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal, Self, TypeVar

from anyio import to_thread
from fastapi import APIRouter, Query, Request
from pydantic import Field, model_validator

from server.api import http
from server.api.audited import requires_audited
from server.api.http import (
    LARGEST_NUMBER,
    EngineDep,
    RecordDep,
    RuntimeDep,
    Strict,
    requires_caught_up,
)
from server.api.middleware import RequestRecord
from server.api.predict import (
    Digest,
    ImageInput,
    caller_options,
    check_image_count,
    check_room,
    counted,
    read_form_files,
)
from server.api.problems import InvalidRequest, UnsupportedMedia, responses
from server.api.tasks import (
    READ,
    Changes,
    ChangesDep,
    ConditionDep,
    Name,
    PublishConditionDep,
    PublishResult,
    check_new_name,
)
from server.engine.lessons import Lesson, Photo, TaughtVersion
from server.engine.types import PredictRequest
from server.runtime import Runtime
from server.settings import Settings
from task_store import Condition, newest_of

Body = TypeVar("Body", bound="CorrectBody")

reading = APIRouter(tags=["teaching"], dependencies=requires_caught_up(*READ))
teaching = APIRouter(
    tags=["teaching"],
    dependencies=requires_audited("publish"),
    responses=responses(401, 403, 404, 409, 412, 422, 503),
)

_MOST_LABEL_CHARS = 256
_MOST_LABELS = 64  # of one photo
_MOST_DIGESTS = 256
_MOST_CLASSES = 256  # named in one request: their texts are read while others wait
_MOST_TEMPLATES = 16

LabelText = Annotated[str, Field(min_length=1, max_length=_MOST_LABEL_CHARS)]
Problem = Literal["single_label", "multi_label"]
Description = Annotated[str, Field(max_length=4096)]

_PROBLEM = "Of a new task: whether a photo has one label (as usual), or any number of them."
_DESCRIPTION = "What the task is about; without it, it stays as it is."


# What a request says


class ExampleInput(ImageInput):
    """One photo, or the digest of one, with its label or labels."""

    label: LabelText | None = None
    labels: Annotated[list[LabelText], Field(max_length=_MOST_LABELS)] | None = Field(
        None, description="Instead of `label`: all labels of a photo of a multi-label task."
    )

    @model_validator(mode="after")
    def _one_way_to_label(self) -> Self:
        if (self.label is None) == (self.labels is None):
            raise ValueError("an example has either label or labels")
        return self

    @property
    def given(self) -> frozenset[str]:
        return frozenset([self.label] if self.label is not None else self.labels or ())


class CorrectBody(Strict):
    """What photos show, as JSON."""

    examples: list[ExampleInput] = Field(min_length=1, fail_fast=True)


class TeachBody(CorrectBody):
    """Examples as JSON, or names of classes, or both."""

    examples: list[ExampleInput] = Field(default=[], fail_fast=True)
    classes: list[LabelText] = Field(
        default=[],
        max_length=_MOST_CLASSES,
        description="Read by the text tower, where the backbone has one: these need no photos.",
    )
    templates: list[LabelText] = Field(
        default=[],
        max_length=_MOST_TEMPLATES,
        description="Texts in which the names are read, in place of {}; averaged.",
        examples=[["a photo of a {}."]],
    )
    problem: Problem | None = Field(None, description=_PROBLEM)
    description: Description | None = Field(None, description=_DESCRIPTION)

    @model_validator(mode="after")
    def _something_to_learn_from(self) -> Self:
        if not self.examples and not self.classes:
            raise ValueError("there are neither examples nor classes")
        return self


@dataclass(frozen=True, slots=True)
class Given:
    """One photo of a request: its bytes or its digest, and what to call it in an error."""

    image: bytes | str
    labels: frozenset[str]
    name: str


# What an answer says


class ClassResult(Strict):
    label: str = Field(examples=["rust"])
    examples: int = Field(description="How many photos have it.")


class LeaveOneOutResult(Strict):
    """How many examples are answered right by a head made without them; 95 % interval."""

    accuracy: float = Field(examples=[0.93])
    low: float = Field(examples=[0.7])
    high: float = Field(examples=[0.99])


class DoubtResult(Strict):
    """A photo that looks mislabelled, by all others."""

    digest: Digest
    labels: list[str]
    suggested: list[str]
    probability: float = Field(description="Of its labels, by a head made without it.")


class _Judged(Strict):
    problem: Problem
    classes: list[ClassResult]
    leave_one_out: LeaveOneOutResult | None = Field(
        description="Null while no class has two examples."
    )
    doubtful: list[DoubtResult] = Field(description="The most doubtful ones, worst first.")


class LessonResult(PublishResult, _Judged):
    """A task that was taught, and is being served now."""

    examples: int = Field(description="How many the task has now.")
    added: int
    moved: int = Field(description="Photos that were there with other labels.")
    removed: int


class ExampleResult(Strict):
    digest: Digest
    labels: list[str]
    probability: float | None = Field(
        description="Of its labels, by a head made without it; null for the only one of a class."
    )


class ExampleList(_Judged):
    task: str
    version: int
    total: int
    examples: list[ExampleResult] = Field(description="In the order of their digests.")


class CorrectionsKept(Strict):
    """Corrections that are kept now."""

    task: str
    corrections: int = Field(description="How many photos of this request were corrected.")


class CorrectionResult(Strict):
    digest: Digest
    labels: list[str]
    version: int = Field(description="Of the task that was served then.")
    time: str = Field(examples=["2026-01-31T12:00:00.000Z"])
    actor: str
    fingerprint: str = Field(description="Of the backbone that made `feature`.")
    feature: str | None = Field(
        description="What a head reads of the photo: float16 in base64; null where the photo was "
        "given by a digest alone that was not cached."
    )


class CorrectionList(Strict):
    task: str
    total: int
    corrections: list[CorrectionResult] = Field(description="The last one of each photo.")


# Routes

_TEACH_BODY = http.request_body(
    {
        **http.json_content(
            TeachBody,
            example={"examples": [{"digest": f"sha256:{'4f53cda18c2baa0c' * 4}", "label": "rust"}]},
        ),
        "multipart/form-data": {
            "schema": {
                "type": "object",
                "additionalProperties": {"type": "array", "items": http.BINARY["schema"]},
            }
        },
    },
    "A form whose fields are called as the labels of the files in them, or JSON.",
)


@teaching.post(
    "/tasks/{task:path}/examples",
    status_code=201,
    responses={
        200: {"model": LessonResult, "description": "The task had these examples already"},
        202: {"model": LessonResult, "description": "Made, and not served by all replicas in time"},
        **responses(400, 408, 413, 415, 429, 500, 504),
    },
    openapi_extra=_TEACH_BODY,
)
async def teach(
    request: Request,
    task: Name,
    condition: PublishConditionDep,
    changes: ChangesDep,
    record: RecordDep,
    problem: Annotated[Problem | None, Query(description=_PROBLEM)] = None,
    description: Annotated[Description | None, Query(description=_DESCRIPTION)] = None,
) -> LessonResult:
    """Teach a task by examples: it is made, or they are added to its default version.

    A photo that is an example already takes the labels that this request gives it. Where the
    backbone has a text tower, names of classes teach it, too, with photos or without.
    """
    check_new_name(task)
    runtime = changes.runtime
    check_room(runtime.engine, record)
    given, body = await _read_examples(request, runtime.settings)
    if body is not None:
        problem, description = body.problem or problem, body.description or description
    photos = await _read_photos(request, runtime, record, given) if given else []
    lesson = Lesson(task, photos, problem=problem, description=description)
    if body is not None:
        lesson = replace(lesson, classes=body.classes, templates=body.templates)
    return await _teach(changes, lesson, condition)


@teaching.post(
    "/tasks/{task:path}/corrections",
    status_code=201,
    responses=responses(400, 408, 413, 415, 429, 500, 504),
    openapi_extra=http.request_body(http.json_content(CorrectBody)),
)
async def correct(
    request: Request, task: Name, changes: ChangesDep, record: RecordDep
) -> CorrectionsKept:
    """Say what photos show that a trained task may have got wrong: its next training takes it in.

    Corrections of a task that was taught are examples: they go to `/tasks/{task}/examples`.
    """
    runtime = changes.runtime
    given = await _read_corrections(request, runtime.settings)
    photos = await _read_photos(request, runtime, record, given)
    await to_thread.run_sync(
        lambda: runtime.engine.correct(task, photos, actor=changes.actor), limiter=runtime.changes
    )
    return CorrectionsKept(task=task, corrections=len({photo.digest for photo in photos}))


@reading.get("/tasks/{task:path}/corrections", responses=responses(401, 404, 412, 422, 503))
def list_corrections(
    task: Name,
    engine: EngineDep,
    limit: Annotated[int, Query(ge=1, le=1000)] = 1000,
    offset: Annotated[int, Query(ge=0, le=LARGEST_NUMBER)] = 0,
) -> CorrectionList:
    """What people said that photos show, which a trained task may have got wrong."""
    engine.snapshot.catalog.task(task)  # raises UnknownTask
    kept = list(newest_of(engine.corrections(task)).values())
    return CorrectionList(
        task=task,
        total=len(kept),
        corrections=[
            CorrectionResult(
                **correction.model_dump(),
                **record.model_dump(include={"version", "time", "actor", "fingerprint"}),
            )
            for record, correction in kept[offset : offset + limit]
        ],
    )


@teaching.delete(
    "/tasks/{task:path}/examples",
    responses={202: {"model": LessonResult, "description": "Made, and not yet served by all"}},
)
async def forget(
    task: Name,
    condition: ConditionDep,
    changes: ChangesDep,
    digest: Annotated[
        list[Digest], Query(min_length=1, max_length=_MOST_DIGESTS, description="May be repeated.")
    ],
) -> LessonResult:
    """Take examples away from the default version of a task."""
    return await _teach(changes, Lesson(task, taken_away=frozenset(digest)), condition)


@reading.get("/tasks/{task:path}/examples", responses=responses(401, 404, 409, 412, 422, 503))
async def list_examples(
    task: Name,
    runtime: RuntimeDep,
    engine: EngineDep,
    version: Annotated[int | None, Query(ge=1, le=LARGEST_NUMBER)] = None,
    limit: Annotated[int, Query(ge=1, le=1000)] = 1000,
    offset: Annotated[int, Query(ge=0, le=LARGEST_NUMBER)] = 0,
) -> ExampleList:
    """What a task was taught from, and how sure each example is by all others."""
    catalog = engine.snapshot.catalog
    number = catalog.task(task).labels["default"] if version is None else version
    digest = catalog.version(task, number).digest
    taught = await to_thread.run_sync(engine.examples, digest, limiter=runtime.checks)
    total = len(taught.examples)
    return ExampleList(
        task=task,
        version=number,
        total=total,
        examples=[
            ExampleResult(
                digest=taught.digest_at(place),
                labels=list(taught.labels_at(place)),
                probability=taught.probability_at(place),
            )
            for place in range(offset, min(offset + limit, total))
        ],
        **_judged(taught),
    )


async def _teach(changes: Changes, lesson: Lesson, condition: Condition | None) -> LessonResult:
    """One lesson at a time, as all changes: solved and published in their thread."""
    engine = changes.runtime.engine
    outcome = await to_thread.run_sync(
        lambda: engine.teach(lesson, changes.commit, condition), limiter=changes.runtime.changes
    )
    result = LessonResult(
        **changes.published(outcome.publish, outcome.change),
        **_judged(outcome.version),
        examples=len(outcome.version.examples),
        added=outcome.difference.photos_added,
        moved=outcome.difference.photos_moved,
        removed=outcome.difference.photos_taken,
    )
    await changes.finish(result, outcome.change.snapshot)
    return result


def _judged(taught: TaughtVersion) -> dict[str, Any]:
    """The members of _Judged."""
    judged = taught.solved.leave_one_out
    result = None
    if judged.accuracy is not None:
        low, high = judged.interval
        result = LeaveOneOutResult(accuracy=judged.accuracy, low=low, high=high)
    return {
        "problem": taught.examples.problem,
        "classes": [ClassResult(label=label, examples=n) for label, n in taught.classes],
        "leave_one_out": result,
        "doubtful": [
            DoubtResult(
                digest=doubt.digest,
                labels=list(doubt.labels),
                suggested=list(doubt.suggested),
                probability=doubt.probability,
            )
            for doubt in taught.doubts()
        ],
    }


# Reading


async def _read_examples(
    request: Request, settings: Settings
) -> tuple[list[Given], TeachBody | None]:
    """The photos of a request with their labels, and its JSON if it has one."""
    kind = http.media_type(request)
    if kind == "application/json":
        return await _read_json(request, settings, TeachBody)
    if kind != "multipart/form-data":
        raise UnsupportedMedia(
            f"'{kind}' is not read here: send a form whose fields are labels (curl -F "
            f"rust=@photo.jpg), or application/json."
        )
    http.refuse_encoded(request)
    in_form = _read_form(request, settings)
    given = await http.in_time(request, in_form, deadline_ms=_deadline_ms(request, settings))
    check_image_count(len(given), settings.max_images)
    return given, None


async def _read_corrections(request: Request, settings: Settings) -> list[Given]:
    if http.media_type(request) != "application/json":
        raise UnsupportedMedia("Corrections are read as application/json alone.")
    given, _ = await _read_json(request, settings, CorrectBody)
    return given


async def _read_json(
    request: Request, settings: Settings, model: type[Body]
) -> tuple[list[Given], Body]:
    http.refuse_encoded(request)
    body = await http.read_body(request, settings.body_bytes, _deadline_ms(request, settings))
    most = http.SMALL_JSON_VALUES + 40 * settings.max_images

    def parse() -> tuple[list[Given], Body]:
        parsed = http.parse_json(body, model, most)
        given = [
            Given(each.read(), each.given, f"examples.{place}")
            for place, each in enumerate(parsed.examples)
        ]
        return given, parsed

    given, parsed = await http.off_loop(parse, size=len(body))
    check_image_count(len(given), settings.max_images)
    return given, parsed


def _deadline_ms(request: Request, settings: Settings) -> float | None:
    given = http.read_deadline_ms(request)
    return settings.default_deadline_ms if given is None else given


async def _read_form(request: Request, settings: Settings) -> list[Given]:
    given = []
    for file in await read_form_files(request, settings):
        if not 1 <= len(file.field) <= _MOST_LABEL_CHARS:
            raise InvalidRequest(
                f"A field of the form is the label of its file, and has 1 to {_MOST_LABEL_CHARS} "
                f"characters: this one has {len(file.field)}."
            )
        name = f"'{file.name}'" if file.name else f"a photo of '{file.field}'"
        given.append(Given(file.content, frozenset([file.field]), name))
    return given


async def _read_photos(
    request: Request, runtime: Runtime, record: RequestRecord, given: list[Given]
) -> list[Photo]:
    """The photos as heads see them, by the queue that all images go through."""
    record.images = len(given)
    question = PredictRequest(
        images=[each.image for each in given],
        features=True,
        **caller_options(record, runtime.settings),
        deadline=http.deadline_of(record, http.read_deadline_ms(request), runtime.settings),
    )
    working = runtime.engine.read_features(question, [each.name for each in given])
    with counted(runtime.engine, record, question, tasks=1):
        features = await http.while_connected(request, working)
    return [
        Photo(digest, feature, each.labels)
        for each, (digest, feature) in zip(given, features, strict=True)
    ]
