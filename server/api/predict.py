"""`/predict`: every requested task's answer for every image."""

import asyncio
import binascii
import json
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import AbstractContextManager, aclosing, nullcontext
from functools import lru_cache, partial
from typing import Annotated, Final, Literal, NamedTuple, Self, TypedDict
from urllib.parse import parse_qsl

import numpy as np
from fastapi import APIRouter, Request, Response
from fastapi.exceptions import RequestValidationError
from pydantic import ConfigDict, Field, ValidationError, field_validator, model_validator
from starlette.datastructures import FormData, UploadFile
from starlette.formparsers import MultiPartException, MultiPartParser

from server.api import http
from server.api.auth import identity_of, permit, requires
from server.api.http import Strict
from server.api.middleware import RequestRecord
from server.api.problems import (
    AnswerTooLarge,
    InvalidRequest,
    MalformedRequest,
    TooManyImages,
    TooManyTasks,
    UnsupportedMedia,
    responses,
)
from server.engine.engine import Engine
from server.engine.tasks.snapshot import Match
from server.engine.types import (
    Floats,
    ImageAnswer,
    PredictAnswer,
    PredictRequest,
    TaskAnswer,
    Timings,
    best,
)
from server.identity import LOCAL, Scope
from server.runtime import Runtime
from server.settings import Settings

Json = dict[str, object]

PREDICT: Final[tuple[Scope, ...]] = ("predict",)

router = APIRouter(tags=["predict"], dependencies=requires(*PREDICT), route_class=http.DirectRoute)

# `curl --data-binary` calls everything a form; `curl -T` says nothing at all.
_CURL_DEFAULT = "application/x-www-form-urlencoded"
_RAW = ("", "application/octet-stream", _CURL_DEFAULT)
_ACCEPTED = "an image, multipart/form-data with 'image' files, or application/json"


_FORM_PIECE = 32 * 1024
_SHORT_QUERY = 1024  # bytes
# Bytes of JSON, about: a number; a prediction, and the label in it; an answer without those.
NUMBER_BYTES, _PREDICTION_BYTES, _LABEL_BYTES, _TASK_BYTES = 13, 48, 24, 64
_FEW = 32  # predictions, whose labels need no exact account
# Problems whose answers are labels, not numbers.
LABELLED = ("single_label", "multi_label")

_encode = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode


# What a request says

Returned = Literal["scores", "logits", "embedding"]
Explanation = Literal["attention"]
Unknown = Literal["show", "hide"]
TopK = Annotated[int, Field(ge=1, le=65536)]
Threshold = Annotated[float, Field(ge=0, le=1)]
Digest = Annotated[str, Field(pattern=r"^sha256:[0-9a-f]{64}$")]
# As wide as the store's own grammar: a longer reference is no reference to anything.
Reference = Annotated[str, Field(min_length=1, max_length=256)]

_TOP_K = "How many predictions of each task to give, best first."
_THRESHOLD = "For multi-label tasks: give only labels with at least this score."
_RETURN = "`scores`, the raw `logits`, or the `embedding` that each head reads."
_UNKNOWN = "`hide`: give no predictions of tasks that do not know the image (`known: false`)."
_EXPLAIN = "`attention`: also tell where in the image each task looked."


class Options(Strict):
    """What is asked of the images: in the query, and over it in a JSON body."""

    model_config = ConfigDict(extra="forbid", frozen=True)  # requests share them

    tasks: list[str] | None = Field(
        None,
        description="Task references, separated by commas or repeated: `cifar,places@3`, "
        "`cifar:canary`. Without it every ready task answers.",
        examples=[["pets,scene"]],
    )
    top_k: TopK = Field(5, description=_TOP_K)
    threshold: Threshold = Field(0.5, description=_THRESHOLD)
    returned: Returned = Field("scores", alias="return", description=_RETURN)
    explain: Explanation | None = Field(None, description=_EXPLAIN)
    unknown: Unknown = Field("show", description=_UNKNOWN)

    @field_validator("tasks")
    @classmethod
    def _split(cls, given: list[str] | None) -> list[str] | None:
        if given is None:
            return None
        parts = [part.strip() for each in given for part in each.split(",")]
        names = [part for part in parts if part]
        if not names:
            raise ValueError("names no task: leave it out to ask every ready task")
        if any(len(name) > 256 for name in names):
            raise ValueError("a task reference has at most 256 characters")
        return names


class ImageInput(Strict):
    """One image of a JSON request: its bytes in base64, or the digest of one sent before."""

    model_config = ConfigDict(
        extra="forbid",
        json_schema_extra={"oneOf": [{"required": ["b64"]}, {"required": ["digest"]}]},
    )

    b64: str = Field("", description="The image's bytes in base64.")
    digest: Digest | None = Field(
        None, description="`digest` of an image in an earlier answer, while it is cached."
    )

    @model_validator(mode="after")
    def _one_of_both(self) -> Self:
        if len(self.model_fields_set & {"b64", "digest"}) != 1:
            raise ValueError("an image has either b64 or digest")
        if self.digest is None and "digest" in self.model_fields_set:
            raise ValueError("a digest is 'sha256:' and 64 hexadecimal digits")
        return self

    def read(self) -> bytes | str:
        """The bytes, or the digest."""
        if self.digest is not None:
            return self.digest
        try:
            data = http.decode_base64(self.b64)
        except (binascii.Error, UnicodeEncodeError) as error:
            raise InvalidRequest(f"An image's b64 is not valid base64: {error}.") from None
        if not data:
            raise InvalidRequest("An image's b64 is empty.")
        return data


class PredictBody(Strict):
    """A prediction request as JSON. What it says goes before what the query says."""

    images: list[ImageInput] = Field(min_length=1, fail_fast=True)
    tasks: Annotated[list[Reference], Field(min_length=1, fail_fast=True)] | None = Field(
        None, description="Task references; without it every ready task answers."
    )
    top_k: TopK | None = Field(None, description=_TOP_K)
    threshold: Threshold | None = Field(None, description=_THRESHOLD)
    returned: Returned | None = Field(None, alias="return", description=_RETURN)
    explain: Explanation | None = Field(None, description=_EXPLAIN)
    unknown: Unknown | None = Field(None, description=_UNKNOWN)

    def over(self, options: Options) -> Options:
        """The options, with what this body says in their place."""
        update = {
            name: value
            for name in Options.model_fields
            if (value := getattr(self, name)) is not None
        }
        return options.model_copy(update=update)


# What an answer says: the schemas that the document shows. `render` below writes the same as plain
# dictionaries, and tests hold it to these models.


class Prediction(Strict):
    label: str
    index: int
    score: float


class Attention(Strict):
    """Where a task looked: what its class token gives each patch, in the last layer.

    Softmax weights, mean over heads, as they are.
    """

    on_patches: float = Field(
        description="Their sum. The rest lies on class tokens, register tokens and memory."
    )
    grid: list[list[float]] = Field(description="Rows of patches, from the top; see `view`.")


class TaskResult(Strict):
    """The answer of one task. Which member it has depends on the task and on `return`."""

    version: int | None = Field(description="Null for `base`, the backbone's own head.")
    known: bool | None = Field(
        None,
        description="Whether the image looks like those the task was made of. Absent where its "
        "bundle does not tell.",
    )
    predictions: list[Prediction] | None = Field(None, description="Of classification tasks.")
    values: list[float] | None = Field(None, description="Of regression tasks.")
    logits: list[float] | None = Field(None, description="With `return=logits`.")
    embedding: list[float] | None = Field(
        None, description="Of embedding tasks, and of every task with `return=embedding`."
    )
    attention: Attention | None = Field(None, description="With `explain=attention`.")
    error: str | None = Field(
        None, description="Why this task has no answer for this image; then nothing else is there."
    )


class ImageResult(Strict):
    digest: Digest = Field(description="Names the image in later requests.")
    cache: Literal["hit", "miss", "off"] = Field(description="Whether its context was cached.")
    tasks: dict[str, TaskResult] = Field(description="By the reference that was requested.")


class TimingsMs(Strict):
    queue: float
    decode: float
    forward: float
    total: float


_TIMINGS: Final = tuple(TimingsMs.model_fields)


class View(Strict):
    """How an upright image becomes the patches of a grid."""

    resize: int | list[int] | None = Field(
        description="Its shortest edge, or height and width, are first brought to this."
    )
    crop: list[int] | None = Field(description="Height and width then cut out of the middle.")
    patch: list[int] = Field(
        description="Height and width of a patch, from the top left; a rim may be left over."
    )


class PredictResult(Strict):
    generation: int = Field(description="Of the catalog that all answers come from.")
    backbone: str
    images: list[ImageResult] = Field(description="In the order they were sent.")
    view: View | None = Field(None, description="With `explain=attention`.")
    timings_ms: TimingsMs


# The document

_DIGEST = f"sha256:{'4f53cda18c2baa0c' * 4}"
EXAMPLE_REQUEST: Json = {"images": [{"digest": _DIGEST}], "tasks": ["pets"], "top_k": 1}
_PETS: Json = {"version": 7, "predictions": [{"label": "cat", "index": 3, "score": 0.981}]}
EXAMPLE_ANSWER: Json = {
    "generation": 118,
    "backbone": "vit-base-patch32-224-in21k",
    "images": [{"digest": _DIGEST, "cache": "hit", "tasks": {"pets": _PETS}}],
    "timings_ms": {"queue": 0.4, "decode": 0.0, "forward": 11.8, "total": 13.0},
}

_FORM = {
    "type": "object",
    "required": ["image"],
    "properties": {"image": {"type": "array", "items": http.BINARY["schema"]}},
}
_BODY = http.request_body(
    {
        **http.json_content(PredictBody, example=EXAMPLE_REQUEST),
        "multipart/form-data": {"schema": _FORM},
        "image/*": http.BINARY,
        "application/octet-stream": http.BINARY,
    },
    "An image as it is, a form with any number of files called `image`, or JSON.",
)


def _parameters() -> list[Json]:
    """The query and the headers, which the route reads by itself."""
    query = Options.model_json_schema()["properties"]
    described = [
        {"in": "query", "name": name, "description": schema.pop("description"), "schema": schema}
        for name, schema in query.items()
    ]
    return [*described, *http.HEADER_PARAMETERS]


# The route


@router.put("/predict", include_in_schema=False)  # what `curl -T` sends
@router.post(  # the last decorator is the first route that is tried
    "/predict",
    responses={
        200: {"model": PredictResult, "content": {"application/json": {"example": EXAMPLE_ANSWER}}},
        **responses(400, 401, 404, 408, 412, 413, 415, 422, 429, 500, 503, 504),
    },
    openapi_extra={**_BODY, "parameters": _parameters()},
)
async def predict(request: Request) -> Response:
    """Ask tasks about images.

    The body is an image, a form with files called `image`, or JSON. `PUT` does the same, so that
    `curl -T cat.jpg` works.
    """
    runtime: Runtime = request.app.state.runtime
    record: RequestRecord = request.state.record
    engine, settings = runtime.engine, runtime.settings
    check_room(engine, record)  # before the body is read: a full server answers at once
    options, deadline_ms = read_query(request), http.read_deadline_ms(request)
    at_least = http.read_min_generation(request)
    images, body = await read_images(request, settings, deadline_ms)
    options = options if body is None else body.over(options)
    tasks = None if options.tasks is None else list(dict.fromkeys(options.tasks))
    question = PredictRequest(
        images=images,
        tasks=tasks,
        at_least=at_least,
        features=options.returned == "embedding",
        attention=options.explain == "attention",
        deadline=http.deadline_of(record, deadline_ms, settings),
        **caller_options(record, settings),
    )
    found = await find_tasks(engine, record, question, settings.max_tasks)
    size = _answer_bytes(engine, found, options) * len(images)
    check_answer_size(size, settings.answer_bytes)
    answer = await ask_engine(request, runtime, record, question, found)
    headers = {"Server-Timing": server_timing(answer.timings), "Cache-Control": "no-store"}
    content = await http.off_loop(lambda: write(answer, options, engine, size), size=size)
    return Response(content, headers=headers, media_type="application/json")


# Reading


def read_query(request: Request) -> Options:
    """The options in the query, or RequestValidationError.

    Not read by FastAPI, whose work for these parameters was a quarter of all that HTTP adds to a
    prediction. A client asks the same of every image, so short queries are kept.
    """
    query: bytes = request.scope["query_string"]
    return _kept_options(query) if len(query) <= _SHORT_QUERY else _parse_options(query)


def _parse_options(query: bytes) -> Options:
    given: dict[str, object] = {}
    tasks: list[str] = []
    for name, value in parse_qsl(query.decode("latin-1"), keep_blank_values=True):
        if name == "tasks":
            tasks.append(value)
        given[name] = tasks if name == "tasks" else value
    try:
        return Options.model_validate(given)
    except ValidationError as error:
        errors = error.errors(include_url=False, include_input=False, include_context=False)
        raise RequestValidationError(
            [{**each, "loc": ("query", *each["loc"])} for each in errors]
        ) from None


_kept_options = lru_cache(maxsize=256)(_parse_options)


async def read_images(
    request: Request, settings: Settings, deadline_ms: float | None
) -> tuple[list[bytes | str], PredictBody | None]:
    """The images of a request, in whichever of the three forms it came, and its JSON if it has one.

    Each is a file, or the digest of one that was sent before.
    """
    kind = http.media_type(request)
    http.refuse_encoded(request)
    deadline_ms = settings.default_deadline_ms if deadline_ms is None else deadline_ms
    images: list[bytes | str]
    parsed: PredictBody | None = None
    if kind == "multipart/form-data":
        reading = _read_form(request, settings)
        images = [*await http.in_time(request, reading, deadline_ms=deadline_ms)]
    elif kind == "application/json":
        body = await http.read_body(request, settings.body_bytes, deadline_ms)
        most = http.SMALL_JSON_VALUES + 20 * (settings.max_images + settings.max_tasks)
        parsed, images = await http.off_loop(lambda: _parse(body, most), size=len(body))
    elif kind in _RAW or kind.startswith("image/"):
        body = await http.read_body(request, settings.body_bytes, deadline_ms)
        images = [_check_raw(body, kind)]
    else:
        raise UnsupportedMedia(f"'{kind}' is not read here: send {_ACCEPTED}.")
    check_image_count(len(images), settings.max_images)
    return images, parsed


def _parse(body: bytes, most_values: int) -> tuple[PredictBody, list[bytes | str]]:
    parsed = http.parse_json(body, PredictBody, most_values)
    return parsed, [image.read() for image in parsed.images]


def _check_raw(body: bytes, kind: str) -> bytes:
    if not body:
        raise InvalidRequest(f"The body is empty: send {_ACCEPTED}.")
    if kind == _CURL_DEFAULT and body.lstrip()[:1] == b"{":
        raise UnsupportedMedia("This looks like JSON: send it with Content-Type: application/json.")
    return body


class _FormParser(MultiPartParser):
    """Keeps files in memory, since the whole body is bounded already, and wants the whole form."""

    spool_max_size = 2**31
    _ended = False

    def on_end(self) -> None:
        self._ended = True

    async def parse(self) -> FormData:
        """All parts: Starlette would leave out the one in which a form breaks off."""
        form = await super().parse()
        if not self._ended:
            for file in self._files_to_close_on_error:
                file.close()
            raise MultiPartException("It breaks off before its last boundary.")
        return form


async def _in_pieces(request: Request, limit: int) -> AsyncGenerator[bytes, None]:
    """The body in pieces that are parsed in milliseconds, whatever is in them."""
    async with aclosing(http.bounded_stream(request, limit)) as stream:
        async for chunk in stream:
            for start in range(0, len(chunk), _FORM_PIECE):
                yield chunk[start : start + _FORM_PIECE]
                await asyncio.sleep(0)


class FormFile(NamedTuple):
    """A file of a form: the name of its field, its own name, and what is in it."""

    field: str
    name: str
    content: bytes


async def read_form_files(request: Request, settings: Settings) -> list[FormFile]:
    """The files of a form, of which there is at least one; InvalidRequest for what is no file."""
    try:
        async with aclosing(_in_pieces(request, settings.body_bytes)) as stream:
            most = settings.max_images + 1  # one more, to be told how many there may be
            parser = _FormParser(request.headers, stream, max_fields=16, max_files=most)
            form = await parser.parse()
    except MultiPartException as error:
        raise MalformedRequest(f"The form cannot be read: {error.message}") from None
    try:
        files: list[FormFile] = []
        for field, value in form.multi_items():
            if not isinstance(value, UploadFile):
                raise InvalidRequest(
                    f"The field {field!r} is text, not a file: curl -F {field}=@…."
                )
            files.append(FormFile(field, value.filename or "", await value.read()))
    finally:
        await form.close()
    if not files:
        raise InvalidRequest("The form has no file: send at least one.")
    return files


async def _read_form(request: Request, settings: Settings) -> list[bytes]:
    files = await read_form_files(request, settings)
    for file in files:
        if file.field != "image":
            raise InvalidRequest(f"The form has a field {file.field!r}: send the files as 'image'.")
    return [file.content for file in files]


# Asking the engine: the same for every protocol


def check_image_count(count: int, most: int) -> None:
    if count > most:
        raise TooManyImages(
            f"The request has {count} images, and at most {most} may be sent at once."
        )


def check_room(engine: Engine, record: RequestRecord) -> None:
    """Overloaded or QuotaExceeded for what could not be admitted now."""
    engine.check_room()
    quota = identity_of(record).quota
    if quota is not None:
        quota.check_room()


class CallerOptions(TypedDict):
    """What a question to the engine has from its caller."""

    owner: str | None
    permitted: Callable[[tuple[str, ...]], tuple[str, ...]] | None


def caller_options(record: RequestRecord, settings: Settings) -> CallerOptions:
    """Everybody's images are their own, unless all are shared; and so are the tasks."""
    identity = identity_of(record)
    permitted = None
    if not identity.may_all(PREDICT):
        permitted = partial(identity.permitted, "predict")
    shared = settings.share_contexts or identity is LOCAL
    return {"owner": None if shared else identity.id, "permitted": permitted}


class AskedTask(NamedTuple):
    """What the size of a task's answer depends on."""

    problem: str
    classes: int
    match: Match

    def bytes_of_labels(self, count: int) -> int:
        """Bytes of so many predictions, about."""
        label = _LABEL_BYTES
        if count > _FEW and (known := self.match.slot.labels):
            label = sum(map(len, known)) // len(known)
        return count * (_PREDICTION_BYTES + label)


async def find_tasks(
    engine: Engine, record: RequestRecord, question: PredictRequest, most: int
) -> list[AskedTask]:
    """The tasks of a question, before it is asked; raises what asking would.

    NotPermitted for those that the caller may not ask, TooManyTasks for more than `most`.
    """
    permit(identity_of(record), PREDICT, question.tasks or ())
    references = question.references(engine.snapshot.ready_names)
    if len(references) > most:
        hint = "" if question.tasks else " There are that many ready tasks: name some of them."
        raise TooManyTasks(
            f"The request asks {len(references)} tasks, and at most {most} may be asked at "
            f"once.{hint}"
        )
    snapshot = await engine.snapshot_for(question.tasks, question.at_least)
    published = snapshot.catalog.all_tasks
    found = []
    for match in snapshot.find(question.references(snapshot.ready_names)):
        if match.version is None:
            base = engine.backbone.base
            assert base is not None  # nothing else is without a version
            found.append(AskedTask(base.problem, base.classes, match))
        else:
            facts = published[match.name].versions[match.version].facts
            found.append(AskedTask(facts.problem, facts.classes, match))
    return found


def check_answer_size(size: int, most: int) -> None:
    if size > most:
        raise AnswerTooLarge(
            f"The answer would have about {size} bytes, and at most {most} may be asked for at "
            f"once: send fewer images, ask fewer tasks, or for fewer predictions (top_k)."
        )


async def ask_engine(
    request: Request,
    runtime: Runtime,
    record: RequestRecord,
    question: PredictRequest,
    tasks: Sequence[AskedTask],
) -> PredictAnswer:
    """The engine's answer, as long as the client waits for it. Access log and trace learn of it.

    QuotaExceeded for what is more than the caller may use.
    """
    record.images = len(question.images)
    try:
        with counted(runtime.engine, record, question, len(tasks)):
            answer = await http.while_connected(request, runtime.engine.predict(question))
    except BaseException as error:
        if runtime.tracing is not None:
            runtime.tracing.predicted(question, error)
        raise
    record.tasks = len(answer.images[0].tasks)
    if runtime.tracing is not None:
        runtime.tracing.predicted(question, answer)
    return answer


def counted(
    engine: Engine, record: RequestRecord, question: PredictRequest, tasks: int
) -> AbstractContextManager[None]:
    """What a question takes of its caller's quota: token rows, as the worker counts them.

    An image that is named by its digest has only the rows of its tasks.
    """
    quota = identity_of(record).quota
    if quota is None:
        return nullcontext()
    images = question.images
    most = quota.limits.concurrent_images
    if most is not None:
        check_image_count(len(images), most)
    new = sum(not isinstance(image, str) for image in images)
    return quota.use(len(images), new * engine.backbone.geometry.tokens + len(images) * tasks)


def server_timing(timings: Timings) -> str:
    """The value of the Server-Timing header, which browsers draw."""
    return ", ".join(f"{name};dur={value}" for name, value in _timings_ms(timings).items())


def rounded(value: float) -> float:
    """All a float32 holds; the digits beyond are of its conversion, not of the answer."""
    return float(f"{value:.7g}")


def _answer_bytes(engine: Engine, tasks: Sequence[AskedTask], options: Options) -> int:
    """Bytes of the answer for one image, about."""
    geometry = engine.backbone.geometry
    size = _TASK_BYTES * (len(tasks) + 1)
    if options.explain == "attention":
        size += NUMBER_BYTES * geometry.tokens * len(tasks)
    if options.returned == "embedding":
        return size + NUMBER_BYTES * geometry.width * len(tasks)
    for task in tasks:
        if options.returned == "scores" and task.problem in LABELLED:
            size += task.bytes_of_labels(min(options.top_k, task.classes))
        else:
            size += NUMBER_BYTES * task.classes
    return size


# Writing. Plain dictionaries and not the models above: those took two to three times as long,
# which is 0.2 ms of a request of four tasks.


def write(answer: PredictAnswer, options: Options, engine: Engine, size: int) -> bytes:
    """The JSON of an answer of about this size, as PredictResult describes it."""
    head: Json = {"generation": answer.generation, "backbone": http.short_name(answer.backbone)}
    tail: Json = {"timings_ms": _timings_ms(answer.timings)}
    if options.explain == "attention":
        tail["view"] = _view(engine)
    if size <= http.INLINE_BYTES:
        images = [_image(image, _tasks(image, options)) for image in answer.images]
        return _encode({**head, "images": images, **tail}).encode()
    # Task by task: the encoder lets nothing else run, in whatever thread.
    listed = ",".join(_image_by_task(image, options) for image in answer.images)
    return f'{_encode(head)[:-1]},"images":[{listed}],{_encode(tail)[1:]}'.encode()


def _view(engine: Engine) -> Json:
    preprocessing = engine.backbone.preprocessing.to_json()
    patch = list(engine.backbone.geometry.patch_size)
    return {"resize": preprocessing["resize"], "crop": preprocessing["crop"], "patch": patch}


def _timings_ms(timings: Timings) -> dict[str, float]:
    return {name: round(getattr(timings, name) * 1000, 3) for name in _TIMINGS}


def _image(image: ImageAnswer, tasks: Json) -> Json:
    return {"digest": image.digest, "cache": image.cache, "tasks": tasks}


def _tasks(image: ImageAnswer, options: Options) -> Json:
    return {ref: _task(answer, options) for ref, answer in image.tasks.items()}


def _image_by_task(image: ImageAnswer, options: Options) -> str:
    tasks = ",".join(
        f"{_encode(ref)}:{_encode(_task(answer, options))}" for ref, answer in image.tasks.items()
    )
    return f"{_encode(_image(image, {}))[:-2]}{tasks}}}}}"


def _task(answer: TaskAnswer, options: Options) -> Json:
    if answer.error is not None:
        return {"version": answer.served.version, "error": answer.error}
    result: Json = {"version": answer.served.version}
    if answer.known is not None:
        result["known"] = answer.known
    result |= _output(answer, options)
    if answer.attention is not None:
        result["attention"] = _attention(answer.attention)
    return result


def _output(answer: TaskAnswer, options: Options) -> Json:
    problem = answer.served.problem
    if options.returned == "logits":
        return {"logits": _numbers(answer.logits)}
    if options.returned == "embedding":
        assert answer.features is not None, "features were asked for"
        return {"embedding": _numbers(answer.features)}
    if problem == "embedding":
        return {"embedding": _numbers(answer.logits)}
    if problem == "regression":
        return {"values": _numbers(answer.logits)}
    if answer.known is False and options.unknown == "hide":
        return {"predictions": []}
    threshold = options.threshold if problem == "multi_label" else None
    predictions = [
        {"label": each.label, "index": each.index, "score": rounded(each.score)}
        for each in best(answer, options.top_k, threshold)
    ]
    return {"predictions": predictions}


def _attention(grid: Floats) -> Json:
    # Rounded all at once: there are hundreds of them for each task.
    weights = np.round(grid.astype(np.float64), 6)
    return {"on_patches": round(float(weights.sum()), 6), "grid": weights.tolist()}


def _numbers(values: Floats) -> list[float]:
    floats: list[float] = values.tolist()
    return [rounded(value) for value in floats]
