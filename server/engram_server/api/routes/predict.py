"""`/predict`: the answers of tasks for images."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Annotated, Literal

import numpy as np
from fastapi import APIRouter, Request, Response
from pydantic import ConfigDict, Field, field_validator, model_validator

from engram_server.api import bodies, inference
from engram_server.api.auth import requires
from engram_server.api.bodies import Digest, ImageInput
from engram_server.api.dependencies import (
    BINARY,
    Strict,
    json_content,
    omit_if_none,
    request_body,
)
from engram_server.api.direct import (
    DirectRoute,
    Json,
    PartedResponse,
    encode,
    encode_in_parts,
    read_query,
)
from engram_server.api.problems import responses
from engram_server.engine import types
from engram_server.engine.tasks.snapshot import Plan
from engram_server.errors import InvalidRequest, UnsupportedMedia

router = APIRouter(
    tags=["predict"], dependencies=requires(*inference.PREDICT), route_class=DirectRoute
)

# `curl --data-binary` sends every body as a form; `curl -T` sends no content type.
_CURL_DEFAULT = "application/x-www-form-urlencoded"
_RAW = ("", "application/octet-stream", _CURL_DEFAULT)
_ACCEPTED = "an image, multipart/form-data with 'image' files, or application/json"
_RENDERED_TOGETHER = 512  # answers
_TASK_BYTES = 64  # of JSON, approximately, for an answer without its numbers or labels


# Requests

# As long as the longest reference in the store's grammar.
Reference = Annotated[str, Field(min_length=1, max_length=256)]


class PredictOptions(Strict):
    """Options in the query; those in a JSON body take precedence."""

    model_config = ConfigDict(extra="forbid", frozen=True)  # requests share cached options

    tasks: Annotated[list[Reference], Field(fail_fast=True)] | None = Field(
        None,
        description="Task references: `cifar`, `places@3`, `cifar:canary`; in the query separated "
        "by commas or repeated. Default: every ready task, the oldest ones if there are more than "
        "the limit; `X-Tasks-Omitted` is then the number of the others.",
        examples=[["cifar10", "flowers"]],
    )
    top_k: int = Field(
        5, ge=1, le=65536, description="Number of predictions per task, highest score first."
    )
    threshold: float = Field(
        0.5, ge=0, le=1, description="For multi-label tasks: omit labels with a lower score."
    )
    output: Literal["scores", "logits", "embedding"] = Field(
        "scores",
        alias="return",
        description="`scores`, the raw `logits`, or the `embedding` that each head reads.",
    )
    explain: Literal["attention"] | None = Field(
        None, description="`attention`: also return the attention map of each task."
    )
    unknown: Literal["show", "hide"] = Field(
        "show",
        description="`hide`: omit the predictions of tasks for which the image is out of "
        "distribution (`in_distribution: false`).",
    )

    @field_validator("tasks")
    @classmethod
    def _check_tasks(cls, tasks: list[str] | None) -> list[str] | None:
        if tasks is None:
            return None
        if not tasks:
            raise ValueError("name at least one task, or omit it for every ready task")
        return list(dict.fromkeys(tasks))


class PredictBody(PredictOptions):
    """A prediction request as JSON."""

    images: list[ImageInput] = Field(min_length=1, fail_fast=True)

    @model_validator(mode="before")
    @classmethod
    def _drop_nulls(cls, values: object) -> object:
        """Treat null like a missing member."""
        if not isinstance(values, dict):
            return values
        return {name: value for name, value in values.items() if value is not None}

    def over(self, options: PredictOptions) -> PredictOptions:
        """The options of the query, replaced by those that this body sets."""
        names = self.model_fields_set - {"images"}
        if not names:
            return options
        return options.model_copy(update={name: getattr(self, name) for name in names})


# Responses: the schemas of the OpenAPI document. The answer is written as plain dictionaries (see
# `direct`), and tests compare it with these models.


class Prediction(Strict):
    label: str
    index: int
    score: float


class Attention(Strict):
    """The attention of a task's class token to each patch in the last layer.

    Softmax weights, averaged over heads.
    """

    on_patches: float = Field(
        description="Their sum. The rest is attention to class tokens, register tokens and memory."
    )
    grid: list[list[float]] = Field(description="Rows of patches, from the top; see `view`.")


class TaskResult(Strict):
    """The answer of one task. Its members depend on the task type and on `return`."""

    version: int | None = Field(description="Null for `base`, the backbone's classifier.")
    in_distribution: bool | None = omit_if_none(
        "Whether the image looks like the task's training data. Absent for tasks without an "
        "out-of-distribution detector."
    )
    predictions: list[Prediction] | None = omit_if_none("For classification tasks.")
    values: list[float] | None = omit_if_none("For regression tasks.")
    logits: list[float] | None = omit_if_none("With `return=logits`.")
    embedding: list[float] | None = omit_if_none(
        "For embedding tasks, and for every task with `return=embedding`."
    )
    attention: Attention | None = omit_if_none("With `explain=attention`.")
    error: str | None = omit_if_none(
        "Why this task has no answer for this image; other members are absent."
    )


class ImageResult(Strict):
    digest: Digest = Field(description="Identifies the image in later requests.")
    cache: Literal["hit", "miss", "off"] = Field(description="Whether its context was cached.")
    tasks: dict[str, TaskResult] = Field(description="By the reference in the request.")


class TimingsMs(Strict):
    queue: float
    decode: float
    forward: float
    total: float


class View(Strict):
    """How an upright image is cut into the patches of a grid."""

    resize: int | list[int] | None = Field(
        description="First, its shortest edge, or its height and width, are resized to this."
    )
    crop: list[int] | None = Field(
        description="Then this height and width are cut from the centre."
    )
    patch: list[int] = Field(
        description="Height and width of a patch, from the top left; a margin may remain."
    )


class PredictResult(Strict):
    generation: int = Field(description="The generation of the catalog for all answers.")
    backbone: str
    images: list[ImageResult] = Field(description="In the order of the request.")
    view: View | None = omit_if_none("With `explain=attention`.")
    timings_ms: TimingsMs


# Works on a fresh server: Swagger UI sends it at the first "Try it out".
EXAMPLE_REQUEST: Json = {
    "images": [{"b64": bodies.EXAMPLE_IMAGE}],
    "tasks": ["cifar10"],
    "top_k": 1,
}
_CIFAR10: Json = {
    "version": 1,
    "in_distribution": False,
    "predictions": [{"label": "airplane", "index": 0, "score": 0.981}],
}
EXAMPLE_ANSWER: Json = {
    "generation": 5,
    "backbone": "engram-mini",
    "images": [
        {
            "digest": f"sha256:{'4f53cda18c2baa0c' * 4}",
            "cache": "miss",
            "tasks": {"cifar10": _CIFAR10},
        }
    ],
    "timings_ms": {"queue": 0.4, "decode": 3.1, "forward": 11.8, "total": 16.0},
}

_FORM = {
    "type": "object",
    "required": ["image"],
    "properties": {"image": {"type": "array", "items": BINARY["schema"]}},
}
_BODY = request_body(
    {
        **json_content(PredictBody, example=EXAMPLE_REQUEST),
        "multipart/form-data": {"schema": _FORM},
        "image/*": BINARY,
        "application/octet-stream": BINARY,
    },
    "An image file, a form with files called `image`, or JSON.",
)


def _parameters() -> list[Json]:
    """The query and the headers, which the route reads itself."""
    query = PredictOptions.model_json_schema()["properties"]
    described = [
        {"in": "query", "name": name, "description": schema.pop("description"), "schema": schema}
        for name, schema in query.items()
    ]
    return [*described, *inference.HEADER_PARAMETERS]


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
    """Run tasks on images.

    The body is an image, a form with files called `image`, or JSON. `PUT` works like `POST`, so
    that `curl -T cat.jpg` works.
    """
    call = inference.Inference(request)
    options = read_query(request, PredictOptions)
    images, body = await read_images(call)
    options = options if body is None else body.over(options)
    plan = await call.resolve(options.tasks)
    model = call.engine.model
    size = _answer_bytes(model, plan, options) * len(images)
    call.check_answer_size(size)
    answer = await call.predict(
        plan,
        images,
        features=options.output == "embedding",
        attention=options.explain == "attention",
        canaries=True,
    )
    pace = call.runtime.threads.paced
    timings = inference.timings_ms(answer.timings)
    content = await bodies.off_loop(
        request, lambda: write(answer, timings, options, model, size, pace), size=size
    )
    headers = inference.response_headers(plan, timings)
    return PartedResponse(content, 200, headers, "application/json")


async def read_images(call: inference.Inference) -> tuple[list[bytes | str], PredictBody | None]:
    """The images of a request, as bytes or digests, and its JSON body if it has one."""
    request, settings = call.request, call.settings
    deadline_ms = call.deadline_ms
    kind = bodies.media_type(request)
    bodies.reject_encoded(request)
    if kind == "multipart/form-data":
        files = await bodies.read_form(request, settings, deadline_ms)
        for file in files:
            if file.field != "image":
                raise InvalidRequest(
                    f"Unknown form field {file.field!r}: send the files as 'image'."
                )
        return [file.content for file in files], None
    if kind == "application/json":
        content = await bodies.read_body(request, settings.body_bytes, deadline_ms)
        limit = bodies.SMALL_JSON_VALUES + 20 * (settings.max_images + settings.max_tasks)
        body, images = await bodies.off_loop(
            request, lambda: _parse(content, limit), size=len(content)
        )
        bodies.check_image_count(len(images), settings.max_images)
        return images, body
    if kind in _RAW or kind.startswith("image/"):
        content = await bodies.read_body(request, settings.body_bytes, deadline_ms)
        return [_check_raw(content, kind)], None
    raise UnsupportedMedia(f"Content type '{kind}' is not supported: send {_ACCEPTED}.")


def _parse(content: bytes, max_values: int) -> tuple[PredictBody, list[bytes | str]]:
    body = bodies.parse_json(content, PredictBody, max_values)
    return body, [image.read() for image in body.images]


def _check_raw(content: bytes, kind: str) -> bytes:
    if not content:
        raise InvalidRequest(f"The body is empty: send {_ACCEPTED}.")
    if kind == _CURL_DEFAULT and content.lstrip()[:1] == b"{":
        raise UnsupportedMedia(
            "The body looks like JSON: send it with Content-Type: application/json."
        )
    return content


def _answer_bytes(model: types.ModelInfo, plan: Plan, options: PredictOptions) -> int:
    """Approximate bytes of the answer for one image."""
    tasks = plan.tasks
    size = _TASK_BYTES * (len(tasks) + 1)
    if options.explain == "attention":
        size += inference.NUMBER_BYTES * model.tokens * len(tasks)
    if options.output == "embedding":
        return size + inference.NUMBER_BYTES * model.width * len(tasks)
    top_k = options.top_k if options.output == "scores" else 0
    return size + sum(inference.task_bytes(task, top_k) for task in tasks)


def write(
    answer: types.PredictAnswer,
    timings: Mapping[str, float],
    options: PredictOptions,
    model: types.ModelInfo,
    size: int,
    pace: Callable[[Iterator[bytes]], Iterator[bytes]],
) -> bytes:
    """The JSON of an answer of about this size, as `PredictResult` describes it.

    `pace` makes pauses between the images of a large answer.
    """
    head: Json = {"generation": answer.generation, "backbone": model.name}
    tail: Json = {"timings_ms": timings}
    if options.explain == "attention":
        tail["view"] = {"resize": model.resize, "crop": model.crop, "patch": model.patch_size}
    rendered = zip(answer.images, _tasks(answer.images, options), strict=True)
    if size <= bodies.INLINE_BYTES:
        images = [_image(image, tasks) for image, tasks in rendered]
        return encode({**head, "images": images, **tail})
    parts = (_encode_by_task(image, tasks) for image, tasks in rendered)
    return encode_in_parts(head, "images", pace(parts), tail)


def _image(image: types.ImageAnswer, tasks: Json) -> Json:
    return {"digest": image.digest, "cache": image.cache, "tasks": tasks}


def _encode_by_task(image: types.ImageAnswer, tasks: Json) -> bytes:
    members = b",".join(b"%b:%b" % (encode(ref), encode(task)) for ref, task in tasks.items())
    return b"%b%b}}" % (encode(_image(image, {}))[:-2], members)


def _tasks(images: Sequence[types.ImageAnswer], options: PredictOptions) -> Iterator[Json]:
    """The answers of each image by reference; those of one version are computed together."""
    step = max(1, _RENDERED_TOGETHER // max(1, len(images[0].tasks)))
    for start in range(0, len(images), step):
        chunk = images[start : start + step]
        rendered: list[Json] = [dict.fromkeys(image.tasks) for image in chunk]  # keeps the order
        # A canary answers some images in place of its task.
        versions: dict[tuple[str, types.ServedTask], list[int]] = {}
        for index, image in enumerate(chunk):
            for ref, answer in image.tasks.items():
                versions.setdefault((ref, answer.served), []).append(index)
        for (ref, _), indices in versions.items():
            results = _results([chunk[index].tasks[ref] for index in indices], options)
            for index, result in zip(indices, results, strict=True):
                rendered[index][ref] = result
        yield from rendered


def _results(answers: Sequence[types.TaskAnswer], options: PredictOptions) -> Iterator[Json]:
    """The results of answers of one version."""
    usable = [answer for answer in answers if answer.error is None]
    outputs = iter(_outputs(usable, options) if usable else ())
    for answer in answers:
        result: Json = {"version": answer.served.version}
        if answer.error is not None:
            yield result | {"error": answer.error}
            continue
        if answer.in_distribution is not None:
            result["in_distribution"] = answer.in_distribution
        result |= next(outputs)
        if answer.attention is not None:
            result["attention"] = _attention(answer.attention)
        yield result


def _outputs(answers: Sequence[types.TaskAnswer], options: PredictOptions) -> list[Json]:
    task_type = answers[0].served.task_type
    if options.output == "logits":
        return [{"logits": _numbers(answer.logits)} for answer in answers]
    if options.output == "embedding":
        return [{"embedding": _features(answer)} for answer in answers]
    if task_type == "embedding":
        return [{"embedding": _numbers(answer.logits)} for answer in answers]
    if task_type == "regression":
        return [{"values": _numbers(answer.logits)} for answer in answers]
    threshold = options.threshold if task_type == "multi_label" else None
    found = types.top_predictions(answers, options.top_k, threshold)
    return [
        {
            "predictions": []
            if _is_hidden(answer, options)
            else [
                {"label": label, "index": index, "score": inference.rounded(score)}
                for label, index, score in predictions
            ]
        }
        for answer, predictions in zip(answers, found, strict=True)
    ]


def _is_hidden(answer: types.TaskAnswer, options: PredictOptions) -> bool:
    return options.unknown == "hide" and answer.in_distribution is False


def _features(answer: types.TaskAnswer) -> list[float]:
    assert answer.features is not None, "the request has features=True"
    return _numbers(answer.features)


def _attention(grid: types.Floats) -> Json:
    # Rounded at once: there are hundreds of values for each task.
    weights = np.round(grid.astype(np.float64), 6)
    return {"on_patches": round(float(weights.sum()), 6), "grid": weights.tolist()}


def _numbers(values: types.Floats) -> list[float]:
    floats: list[float] = values.tolist()
    return [inference.rounded(value) for value in floats]
