"""`/tasks/{task}/examples`: teach a task from photos, and correct tasks.

Photos go through the same queue as those of predictions. The features that a head reads are kept
with the labels in the next version of the task, and unless that is turned off, so are the name of
the file and a thumbnail; the photos are not. Corrections of a trained task go to
`/tasks/{task}/corrections` and are kept for its next training.
"""

import threading
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from typing import Annotated, Any, Literal, Self, TypeVar

from engram_store import Condition, Draft, newest_of
from fastapi import APIRouter, Query, Request, Response
from pydantic import Field, model_validator

from engram_server.api import bodies
from engram_server.api import dependencies as deps
from engram_server.api.auth import IdentityDep
from engram_server.api.bodies import Digest, ImageInput
from engram_server.api.inference import Inference, while_connected
from engram_server.api.problems import responses
from engram_server.api.routes import tasks
from engram_server.engine.tasks.upload_parts import UploadPart
from engram_server.engine.teaching import (
    Evaluation,
    ExampleUpdate,
    LabelledPhoto,
    ReadPhotos,
    TeachOutcome,
)
from engram_server.engine.types import Unreadable
from engram_server.errors import InvalidRequest, UnsupportedMedia

Body = TypeVar("Body", "CorrectBody", "TeachBody")
T = TypeVar("T")

reading = APIRouter(
    tags=["teaching"],
    dependencies=deps.requires_caught_up(*tasks.READ),
    route_class=deps.FairRoute,
)
teaching = APIRouter(
    tags=["teaching"],
    dependencies=deps.requires_audited("publish"),
    responses=responses(401, 403, 404, 409, 412, 422, 503),
)

_MAX_LABEL_CHARS = 256
_MAX_LABELS = 16  # of one photo
_MAX_CORRECT_LABELS = 8  # of one photo
_MAX_NAME_CHARS = 255  # of a file; longer names are cut
_MAX_DIGESTS = 256
_MAX_THUMBNAILS = 200  # in one response
_MAX_CLASSES = 256  # in one request: encoding their names delays other requests
_MAX_TEMPLATES = 16

LabelText = Annotated[str, Field(min_length=1, max_length=_MAX_LABEL_CHARS)]
TaskType = Literal["single_label", "multi_label"]
Description = Annotated[str, Field(max_length=4096)]

UploadId = Annotated[str, Field(pattern="^[0-9a-f]{32}$", examples=["5f0c…"])]

_UPLOAD = "Keep the photos of this part: a random id of 32 hex digits, the same for all parts."
_PUBLISH = "Publish all parts of the upload, and the photos of this request, as one version."
_KEEP_PICTURES = "Keep a thumbnail and the file name of each photo. The server may forbid it."
_SKIP_UNREADABLE = "Teach the other photos if some cannot be read, and list those."
_TASK_TYPE = "For a new task: one label per photo (default), or any number of labels."
_DESCRIPTION = "A description of the task. Default: unchanged."


# Requests


class ExampleInput(ImageInput):
    """A photo, or the digest of one, with its label or labels."""

    label: LabelText | None = None
    labels: Annotated[list[LabelText], Field(max_length=_MAX_LABELS)] | None = Field(
        None, description="Instead of `label`, for multi-label tasks: all labels of the photo."
    )
    name: str = Field("", max_length=4096, description="The name of the photo's file.")

    @model_validator(mode="after")
    def _check_one_label_field(self) -> Self:
        if (self.label is None) == (self.labels is None):
            raise ValueError("an example has either label or labels")
        return self

    def to_photo(self, place: str) -> LabelledPhoto:
        labels = [self.label] if self.label is not None else self.labels or ()
        return LabelledPhoto(self.read(), frozenset(labels), file_name(self.name), place)


class CorrectionInput(ExampleInput):
    """A photo, or the digest of one, with its correct label or labels."""

    labels: Annotated[list[LabelText], Field(max_length=_MAX_CORRECT_LABELS)] | None = Field(
        None, description="Instead of `label`, for multi-label tasks: all labels of the photo."
    )


class CorrectBody(deps.Strict):
    """Photos with their correct labels."""

    examples: list[CorrectionInput] = Field(min_length=1, fail_fast=True)


class TeachBody(deps.Strict):
    """Examples, class names, or both."""

    examples: list[ExampleInput] = Field(default=[], fail_fast=True)
    classes: list[LabelText] = Field(
        default=[],
        max_length=_MAX_CLASSES,
        description="Class names for the backbone's text tower; they need no photos.",
    )
    templates: list[LabelText] = Field(
        default=[],
        max_length=_MAX_TEMPLATES,
        description="Texts in which {} stands for a class name; their embeddings are averaged.",
        examples=[["a photo of a {}."]],
    )
    task_type: TaskType | None = Field(None, description=_TASK_TYPE)
    description: Description | None = Field(None, description=_DESCRIPTION)

    @model_validator(mode="after")
    def _check_not_empty(self) -> Self:
        if not self.examples and not self.classes:
            raise ValueError("send examples, classes or both")
        return self


# Responses


class ClassResult(deps.Strict):
    label: str = Field(examples=["rust"])
    examples: int = Field(description="Number of photos with this label.")
    accuracy: float | None = Field(
        description="Share of them whose leave-one-out prediction has this label; null if unknown."
    )


class LeaveOneOutResult(deps.Strict):
    """Leave-one-out accuracy with its 95 % confidence interval."""

    accuracy: float = Field(examples=[0.93])
    low: float = Field(examples=[0.7])
    high: float = Field(examples=[0.99])
    images: int = Field(
        description="Photos it was measured on: those whose class has another.", examples=[14]
    )
    correct: int = Field(description="Those of them that were predicted right.", examples=[13])


FileName = Annotated[str | None, Field(description="Of the photo's file; null if not kept.")]


class LabelIssueResult(deps.Strict):
    """A photo whose label is probably wrong, judging by the others."""

    digest: Digest
    name: FileName
    labels: tuple[str, ...]
    suggested: tuple[str, ...]
    probability: float = Field(description="Leave-one-out probability of its labels.")


class _Evaluation(deps.Strict):
    task_type: TaskType
    classes: list[ClassResult]
    leave_one_out: LeaveOneOutResult | None = Field(
        description="Null while no class has two examples."
    )
    label_issues: list[LabelIssueResult] = Field(
        description="Suspected label errors, the most probable first."
    )


class UnreadableResult(deps.Strict):
    """A photo that cannot be read."""

    index: int = Field(description="Its place in the request, from 0.")
    name: FileName
    reason: str = Field(examples=["The file looks like text."])


class TeachResult(tasks.PublishResult, _Evaluation):
    """The published version of a taught task."""

    examples: int = Field(description="Number of examples of the task.")
    added: int
    moved: int = Field(description="Examples whose labels changed.")
    removed: int
    unreadable: list[UnreadableResult] = Field(
        default=[], description="With `skip_unreadable`: the photos that were not taught."
    )
    purged: list[int] | None = deps.omit_if_none("With `purge`: the versions that were purged.")


class UploadResult(deps.Strict):
    """A part of an upload, which is kept until it is published."""

    task: str
    upload: str
    parts: int = Field(description="Number of parts so far.")
    examples: int = Field(description="Number of photos of this part that can be taught.")
    unreadable: list[UnreadableResult] = Field(description="Those that cannot be read.")


class ExampleResult(deps.Strict):
    digest: Digest
    name: FileName
    labels: list[str]
    predicted: list[str] | None = Field(
        description="Leave-one-out prediction; null for the only example of a class."
    )
    probability: float | None = Field(
        description="Leave-one-out probability of its labels; null for a class with one example."
    )
    thumbnail: str | None = deps.omit_if_none(
        "With `thumbnails`: a `data:image/webp` URL. Absent if none was kept."
    )


class ExampleList(_Evaluation):
    task: str
    version: int
    total: int
    examples: list[ExampleResult] = Field(description="In the order of their digests.")


class CorrectionsKept(deps.Strict):
    task: str
    corrections: int = Field(description="Number of photos in this request.")


class CorrectionResult(deps.Strict):
    digest: Digest
    labels: list[str]
    version: int = Field(description="The version that was served at the time.")
    time: str = Field(examples=["2026-01-31T12:00:00.000Z"])
    actor: str


class CorrectionList(deps.Strict):
    task: str
    records: int = Field(description="Stored requests of the task; the largest useful `offset`.")
    unreadable: int = Field(description="Records of this page that are damaged.")
    corrections: list[CorrectionResult] = Field(
        description="The latest for each photo of this page, newest first."
    )


class CorrectionsRemoved(deps.Strict):
    task: str
    removed: int


# Routes

_TEACH_BODY = deps.request_body(
    {
        **deps.json_content(
            TeachBody,
            example={"examples": [{"digest": f"sha256:{'4f53cda18c2baa0c' * 4}", "label": "rust"}]},
        ),
        "multipart/form-data": {
            "schema": {
                "type": "object",
                "additionalProperties": {"type": "array", "items": deps.BINARY["schema"]},
            }
        },
    },
    "A form whose field names are the labels of its files, or JSON.",
)


@teaching.post(
    "/tasks/{task:path}/examples",
    status_code=201,
    responses={
        200: {"model": TeachResult, "description": "The task had these examples already"},
        202: {
            "model": TeachResult | UploadResult,
            "description": "Published, not served by all replicas in time; or a part is kept",
        },
        **responses(400, 408, 413, 415, 429, 500, 504),
    },
    openapi_extra=_TEACH_BODY,
)
async def teach(
    request: Request,
    task: tasks.Name,
    condition: tasks.PublishConditionDep,
    changes: tasks.ChangesDep,
    task_type: Annotated[TaskType | None, Query(description=_TASK_TYPE)] = None,
    description: Annotated[Description | None, Query(description=_DESCRIPTION)] = None,
    keep_pictures: Annotated[bool, Query(description=_KEEP_PICTURES)] = True,
    skip_unreadable: Annotated[bool, Query(description=_SKIP_UNREADABLE)] = False,
    upload: Annotated[UploadId | None, Query(description=_UPLOAD)] = None,
    publish: Annotated[bool, Query(description=_PUBLISH)] = False,
) -> TeachResult | UploadResult:
    """Create a task from examples, or add examples to its default version.

    A photo that is already an example takes its new labels. If the backbone has a text tower,
    class names can be sent with or without photos. To teach more photos than fit into a request as
    one version, send them in parts with the same `upload`, then `publish`.
    """
    tasks.check_new_name(task)
    draft = None if upload is None else Draft(changes.actor, upload, task)
    if publish and draft is None:
        raise InvalidRequest("publish needs the id of an upload.")
    inference = Inference(request)
    photos, body = await _read_examples(inference, may_be_empty=publish)
    read = await _read_photos(inference, photos, keep_pictures)
    if draft is not None and not publish:
        if task_type or description or body.model_fields_set - {"examples"}:
            raise InvalidRequest("A part of an upload has examples only: send the rest to publish.")
        return await _add_part(changes, draft, read, condition)
    if not (skip_unreadable and (read.added or read.relabelled or draft or body.classes)):
        read.check()
    update = ExampleUpdate(
        task,
        read.added,
        read.relabelled,
        task_type=body.task_type or task_type,
        description=body.description or description,
        classes=body.classes,
        templates=body.templates,
    )
    return await _teach(changes, update, condition, draft=draft, unreadable=read.unreadable)


async def _add_part(
    changes: tasks.Changes, draft: Draft, read: ReadPhotos, condition: Condition | None
) -> UploadResult:
    runtime, part = changes.runtime, UploadPart(read.added, read.relabelled)
    add = partial(runtime.engine.teaching.add_part, draft, part, condition)
    parts = await runtime.threads.solving.run(changes.actor, add)
    changes.response.status_code = 202
    return UploadResult(
        task=draft.task,
        upload=draft.upload,
        parts=parts,
        examples=len(read.added) + len(read.relabelled),
        unreadable=_unreadable(read.unreadable),
    )


async def _read_photos(
    inference: Inference, photos: Sequence[LabelledPhoto], keep_pictures: bool
) -> ReadPhotos:
    if not photos:
        return ReadPhotos()
    return await inference.read(
        [photo.image for photo in photos],
        lambda options: inference.engine.teaching.read_photos(photos, options),
        features=True,
        thumbnails=keep_pictures and inference.settings.keep_pictures,
    )


@teaching.post(
    "/tasks/{task:path}/corrections",
    status_code=201,
    responses=responses(400, 408, 413, 415, 429, 500, 504),
    openapi_extra=deps.request_body(deps.json_content(CorrectBody)),
)
async def correct(
    request: Request, task: tasks.Name, condition: tasks.ConditionDep, changes: tasks.ChangesDep
) -> CorrectionsKept:
    """Keep the correct labels of photos for the next training of a trained task.

    For a taught task, send corrections as examples to `/tasks/{task}/examples`.
    """
    inference = Inference(request)
    if bodies.media_type(request) != "application/json":
        raise UnsupportedMedia("Send corrections as application/json.")
    photos, _ = await _read_json(inference, CorrectBody)
    read = await inference.read(
        [photo.image for photo in photos],
        lambda options: inference.engine.teaching.read_photos(photos, options),
        features=False,
    )
    read.check()
    corrections = [(f"sha256:{digest.hex()}", labels) for digest, labels in read.relabelled]
    count = await changes.run(
        lambda: inference.engine.teaching.correct(
            task, corrections, actor=changes.actor, condition=condition
        )
    )
    return CorrectionsKept(task=task, corrections=count)


@reading.get("/tasks/{task:path}/corrections", responses=responses(401, 404, 412, 422, 503))
def list_corrections(
    task: tasks.Name,
    engine: deps.EngineDep,
    limit: Annotated[int, Query(ge=1, le=100, description="Records to read.")] = 100,
    offset: Annotated[
        int, Query(ge=0, le=deps.LARGEST_NUMBER, description="Newest records to skip.")
    ] = 0,
) -> CorrectionList:
    """List the corrections of a trained task, newest first. A record is that of one request."""
    engine.tasks.snapshot.catalog.task(task)  # raises UnknownTask
    page = engine.teaching.corrections(task, offset, limit)
    return CorrectionList(
        task=task,
        records=page.total,
        unreadable=page.unreadable,
        corrections=[
            CorrectionResult(
                digest=correction.digest,
                labels=list(correction.labels),
                version=record.version,
                time=record.time,
                actor=record.actor,
            )
            for record, correction in newest_of(page.records).values()
        ],
    )


@teaching.delete("/tasks/{task:path}/corrections")
async def remove_corrections(
    task: tasks.Name,
    condition: tasks.ConditionDep,
    changes: tasks.ChangesDep,
    digest: Annotated[
        list[Digest] | None,
        Query(max_length=_MAX_DIGESTS, description="May be repeated. Default: all of the task."),
    ] = None,
) -> CorrectionsRemoved:
    """Remove corrections from the store for good. Works for retired tasks too."""
    engine = changes.runtime.engine

    def remove() -> int:
        removed = engine.teaching.remove_corrections(task, digest, condition)
        engine.rollouts.forget(task, digest)
        return removed

    removed = await changes.run(remove)
    changes.request.state.record.audit_details = {"removed": removed}
    return CorrectionsRemoved(task=task, removed=removed)


@teaching.delete(
    "/tasks/{task:path}/examples",
    response_model=TeachResult,
    responses={
        202: {"model": TeachResult, "description": "Published, not yet served by all"},
        204: {"description": "The upload is aborted"},
    },
)
async def remove_examples(
    task: tasks.Name,
    condition: tasks.ConditionDep,
    changes: tasks.ChangesDep,
    digest: Annotated[
        list[Digest], Query(max_length=_MAX_DIGESTS, description="May be repeated.")
    ] = [],  # noqa: B006 - FastAPI copies it
    purge: Annotated[
        bool, Query(description="Also purge the earlier versions that have one of them.")
    ] = False,
    upload: Annotated[
        UploadId | None, Query(description="Instead of `digest`: abort this upload.")
    ] = None,
) -> TeachResult | Response:
    """Remove examples from the default version of a task, or abort an upload.

    Earlier versions keep them, unless `purge` is set. It is rejected if an alias other than
    `default` points to such a version, or a version of another task extends it.
    """
    if (upload is None) != bool(digest):
        raise InvalidRequest("Send either the digests of examples, or the id of an upload.")
    if upload is not None:
        deps.reject_conditions(changes.request, deps.IF_MATCH)
        draft = Draft(changes.actor, upload, task)
        await changes.run(lambda: changes.runtime.engine.teaching.abort_draft(draft))
        return Response(status_code=204)
    update = ExampleUpdate(task, removed=frozenset(digest))
    return await _teach(changes, update, condition, purge=purge)


@reading.get("/tasks/{task:path}/examples", responses=responses(401, 404, 409, 412, 422, 503))
async def list_examples(
    request: Request,
    task: tasks.Name,
    identity: IdentityDep,
    runtime: deps.RuntimeDep,
    engine: deps.EngineDep,
    version: Annotated[int | None, Query(ge=1, le=deps.LARGEST_NUMBER)] = None,
    limit: Annotated[
        int | None, Query(ge=1, le=1000, description="Default: 1,000, or 200 with thumbnails.")
    ] = None,
    offset: Annotated[int, Query(ge=0, le=deps.LARGEST_NUMBER)] = 0,
    thumbnails: Annotated[bool, Query(description="Also return pictures, of at most 200.")] = False,
    digest: Annotated[
        list[Digest] | None,
        Query(max_length=_MAX_DIGESTS, description="Only these examples. May be repeated."),
    ] = None,
) -> ExampleList:
    """List the examples of a taught task with their leave-one-out predictions."""
    limit = limit or (_MAX_THUMBNAILS if thumbnails else 1000)
    if thumbnails and limit > _MAX_THUMBNAILS:
        raise InvalidRequest(
            f"limit is {limit}, and with thumbnails it can be at most {_MAX_THUMBNAILS}."
        )
    catalog = engine.tasks.snapshot.catalog
    number = catalog.task(task).aliases["default"] if version is None else version
    stop = threading.Event()
    evaluate = partial(engine.teaching.examples, catalog.version(task, number).digest, stop)
    checking = runtime.threads.checks.run(identity.id, evaluate, stop)
    taught = await while_connected(request, checking)
    found = range(len(taught)) if digest is None else taught.indices_of(digest)
    page = found[offset : offset + limit]
    if thumbnails:
        size = sum(len(taught.media_at(index).thumbnail) for index in page)
        deps.hold(request, runtime.pools.answer_bytes, 2 * size, "bytes of responses")
    return ExampleList(
        task=task,
        version=number,
        total=len(taught),
        examples=[_example(taught, index, thumbnail=thumbnails) for index in page],
        **_evaluation(taught),
    )


def _example(taught: Evaluation, index: int, *, thumbnail: bool) -> ExampleResult:
    media, predicted = taught.media_at(index), taught.predicted_at(index)
    return ExampleResult(
        digest=taught.digest_at(index),
        name=media.name or None,
        labels=list(taught.labels_at(index)),
        predicted=None if predicted is None else list(predicted),
        probability=taught.probability_at(index),
        thumbnail=deps.data_url(media.thumbnail) if thumbnail and media.thumbnail else None,
    )


async def _teach(
    changes: tasks.Changes,
    update: ExampleUpdate,
    condition: Condition | None,
    *,
    purge: bool = False,
    draft: Draft | None = None,
    unreadable: Sequence[Unreadable] = (),
) -> TeachResult:
    runtime, actor, stop = changes.runtime, changes.actor, threading.Event()

    def commit(work: Callable[[], T]) -> T:
        return runtime.threads.changes.submit(actor, work).result()

    def teach() -> TeachOutcome:
        teaching = runtime.engine.teaching
        work = teaching.purge_examples if purge else teaching.teach
        if draft is not None:
            work = partial(teaching.publish_draft, draft)
        return work(update, actor=actor, condition=condition, commit=commit, stop=stop)

    solving = runtime.threads.solving.run(actor, teach, stop)
    outcome = await while_connected(changes.request, solving)
    result = TeachResult(
        **tasks.PublishResult.members(outcome.published),
        **_evaluation(outcome.version),
        examples=len(outcome.version),
        added=outcome.difference.photos_added,
        moved=outcome.difference.photos_moved,
        removed=outcome.difference.photos_removed,
        unreadable=_unreadable(unreadable),
        purged=None if outcome.purged is None else list(outcome.purged),
    )
    await changes.finish_publish(result, outcome.published)
    return result


def _unreadable(photos: Sequence[Unreadable]) -> list[UnreadableResult]:
    return [UnreadableResult(**asdict(each)) for each in photos]


def _evaluation(taught: Evaluation) -> dict[str, Any]:
    leave_one_out = taught.leave_one_out
    result = None
    if leave_one_out.accuracy is not None:
        low, high = leave_one_out.interval
        result = LeaveOneOutResult(
            accuracy=leave_one_out.accuracy,
            low=low,
            high=high,
            images=leave_one_out.images,
            correct=leave_one_out.correct,
        )
    return {
        "task_type": taught.task_type,
        "classes": [ClassResult(**asdict(each)) for each in taught.classes],
        "leave_one_out": result,
        "label_issues": [LabelIssueResult(**asdict(issue)) for issue in taught.label_issues],
    }


async def _read_examples(
    inference: Inference, *, may_be_empty: bool
) -> tuple[list[LabelledPhoto], TeachBody]:
    """The photos of a request with their labels, and its JSON body; empty for a form."""
    request = inference.request
    kind = bodies.media_type(request)
    if not kind and may_be_empty:
        return [], TeachBody.model_construct()
    if kind == "application/json":
        return await _read_json(inference, TeachBody)
    if kind != "multipart/form-data":
        raise UnsupportedMedia(
            f"Content type '{kind}' is not supported: send a form whose field names are labels "
            f"(curl -F rust=@photo.jpg), or application/json."
        )
    bodies.reject_encoded(request)
    files = await bodies.read_form(request, inference.settings, inference.deadline_ms)
    return [_to_photo(file) for file in files], TeachBody.model_construct()


def _to_photo(file: bodies.FormFile) -> LabelledPhoto:
    if not 1 <= len(file.field) <= _MAX_LABEL_CHARS:
        raise InvalidRequest(
            f"A form field is the label of its file and has 1 to {_MAX_LABEL_CHARS} characters; "
            f"this one has {len(file.field)}."
        )
    return LabelledPhoto(
        file.content,
        frozenset([file.field]),
        file_name(file.name),
        place=f"a photo of '{file.field}'",
    )


def file_name(path: str) -> str:
    """The last part of a path, which may be one of Windows, as text that can be stored."""
    name = path.replace("\\", "/").rpartition("/")[2][:_MAX_NAME_CHARS]
    return name.encode(errors="replace").decode()


async def _read_json(inference: Inference, model: type[Body]) -> tuple[list[LabelledPhoto], Body]:
    request, settings = inference.request, inference.settings
    bodies.reject_encoded(request)
    content = await bodies.read_body(request, settings.body_bytes, inference.deadline_ms)
    limit = bodies.SMALL_JSON_VALUES + 40 * settings.max_images

    def parse() -> tuple[list[LabelledPhoto], Body]:
        body = bodies.parse_json(content, model, limit)
        photos = [each.to_photo(f"examples.{index}") for index, each in enumerate(body.examples)]
        return photos, body

    photos, body = await bodies.off_loop(request, parse, size=len(content))
    bodies.check_image_count(len(photos), settings.max_images)
    return photos, body
