"""Inference: from the inputs of a request to images, and from the engine's answers to outputs."""

from collections import Counter
from collections.abc import Sequence
from typing import Annotated, Any

import numpy as np
from anyio import to_thread
from fastapi import APIRouter, Request, Response
from pydantic import BaseModel, Field

from server.api import http
from server.api.auth import requires
from server.api.http import RecordDep, RuntimeDep, left_out_if_none
from server.api.middleware import RequestRecord
from server.api.predict import (
    LABELLED,
    NUMBER_BYTES,
    PREDICT,
    AskedTask,
    Json,
    ask_engine,
    caller_options,
    check_answer_size,
    check_image_count,
    check_room,
    find_tasks,
    server_timing,
)
from server.api.problems import InvalidRequest, UnsupportedMedia
from server.api.v2.models import (
    IMAGE,
    PIXEL_VALUES,
    SCORES,
    Name,
    Number,
    errors,
    reference,
)
from server.api.v2.tensors import (
    HEADER_LENGTH,
    InputTensor,
    OrNull,
    OutputTensor,
    Size,
    Text,
    assign_binary,
    decompress,
    read_elements,
    read_floats,
    split_body,
    write_body,
)
from server.engine.engine import Engine
from server.engine.types import (
    Floats,
    PredictAnswer,
    PredictRequest,
    TaskAnswer,
    best,
    scores,
)
from server.errors import AnswerNotFinite
from server.runtime import Runtime

router = APIRouter(prefix="/v2", tags=["open inference"], dependencies=requires(*PREDICT))

# Times the largest value of a decoded image's pixels: room for pictures with values beyond black
# and white, none for pixels that were never normalised.
_ROOM = 10

_EITHER = f"give either '{IMAGE}' (BYTES, image files) or '{PIXEL_VALUES}' (FP32)"


# What a request says. Members and parameters that are not known here are ignored.


class OutputParameters(BaseModel):
    """`classification`: the best so many labels as text, not all numbers."""

    binary_data: bool | None = None
    classification: Size = 0
    shared_memory_region: Any = None


class RequestedOutput(BaseModel):
    """One output, and the form it is requested in."""

    name: Text
    parameters: OrNull[OutputParameters] = OutputParameters()


class InferParameters(BaseModel):
    """Of the whole request. `timeout` is in microseconds; 0: none."""

    binary_data_output: bool = False
    timeout: Annotated[float, Field(strict=True, ge=0, allow_inf_nan=False)] = 0


class InferRequest(BaseModel):
    """A question to a model."""

    id: Text | None = None
    inputs: list[InputTensor] = Field(max_length=16, fail_fast=True)
    outputs: Annotated[list[RequestedOutput], Field(max_length=4096, fail_fast=True)] | None = None
    parameters: OrNull[InferParameters] = InferParameters()


# What an answer says; `write_body` writes it, for its data may follow the JSON in bytes.


class OutputResult(BaseModel):
    """One output; with `binary_data_size` among its parameters its data follows the JSON."""

    name: str
    datatype: str = Field(examples=["FP32"])
    shape: list[int] = Field(examples=[[1, 3]])
    parameters: Json | None = left_out_if_none()
    data: list[float] | list[str] | None = left_out_if_none()


class InferResult(BaseModel):
    """A model's outputs for all images of a request."""

    model_name: str
    model_version: str | None = left_out_if_none("Of one version's answer.")
    id: str | None = left_out_if_none("As the request has it.")
    parameters: Json | None = left_out_if_none("`errors`: tasks without an answer, and why.")
    outputs: list[OutputResult]


_INFER: dict[str, Any] = {
    "responses": {
        200: {
            "model": InferResult,
            "content": {"application/octet-stream": http.BINARY},
        },
        **errors(400, 401, 404, 408, 412, 413, 415, 422, 429, 500, 503, 504),
    },
    "openapi_extra": {
        **http.request_body(http.json_content(InferRequest)),
        "parameters": http.HEADER_PARAMETERS,
    },
}


@router.post("/models/{name:path}/versions/{version}/infer", **_INFER)
async def version_infer(
    request: Request, name: Name, version: Number, runtime: RuntimeDep, record: RecordDep
) -> Response:
    """Ask a version of a model."""
    return await infer(request, runtime, record, name, version)


@router.post("/models/{name:path}/infer", **_INFER)
async def model_infer(
    request: Request, name: Name, runtime: RuntimeDep, record: RecordDep
) -> Response:
    """Ask a model."""
    return await infer(request, runtime, record, name, None)


async def infer(
    request: Request, runtime: Runtime, record: RequestRecord, name: str, version: int | None
) -> Response:
    engine, settings = runtime.engine, runtime.settings
    check_room(engine, record)  # before the body is read: a full server answers at once
    ref = reference(name, version)
    at_least = http.read_min_generation(request)
    if ref is not None:
        (await engine.snapshot_for([ref], at_least)).find([ref])
    deadline_ms = http.read_deadline_ms(request)
    default_ms = settings.default_deadline_ms
    body = await _read(
        request, settings.body_bytes, default_ms if deadline_ms is None else deadline_ms
    )
    head, binary = split_body(body, request.headers.get(HEADER_LENGTH))

    def parse() -> tuple[InferRequest, list[bytes | Floats], list[str] | None]:
        parsed = http.parse_json(head, InferRequest, settings.json_values)
        images = read_images(parsed.inputs, binary, engine, settings.max_images)
        return parsed, images, check_outputs(parsed, ref)

    parsed, images, tasks = await http.off_loop(parse, size=len(body))
    question = PredictRequest(
        images=images,
        tasks=tasks,
        at_least=at_least,
        deadline=http.deadline_of(record, _shortest(deadline_ms, parsed), settings),
        **caller_options(record, settings),
    )
    found = await find_tasks(engine, record, question, settings.max_tasks)
    size = _answer_bytes(parsed, found) * len(images)
    check_answer_size(size, settings.answer_bytes)
    answer = await ask_engine(request, runtime, record, question, found)
    return await http.off_loop(lambda: _render(name, ref, parsed, answer), size=size)


# Inputs


async def _read(request: Request, limit: int, deadline_ms: float | None) -> bytes:
    """The body, unpacked if it is compressed."""
    body = await http.read_body(request, limit, deadline_ms)
    encoding = http.content_encoding(request)
    if encoding is None:
        return body
    if encoding not in ("gzip", "deflate"):
        raise UnsupportedMedia(f"Content-Encoding '{encoding}' is not read here: use gzip.")
    return await to_thread.run_sync(decompress, body, limit)


def _shortest(deadline_ms: float | None, request: InferRequest) -> float | None:
    """The header's deadline or the protocol's own timeout, whichever is sooner."""
    timeout_ms = request.parameters.timeout / 1000
    if timeout_ms == 0:
        return deadline_ms
    return timeout_ms if deadline_ms is None else min(deadline_ms, timeout_ms)


def read_images(
    inputs: Sequence[InputTensor],
    binary: memoryview,
    engine: Engine,
    max_images: int,
) -> list[bytes | Floats]:
    """The images: files, or pixel values (3, H, W) that go to the backbone as they are."""
    _check_names(inputs)
    given = inputs[0]
    raw = assign_binary(inputs, binary).get(given.name)
    if raw is not None and given.data is not None:
        raise InvalidRequest(f"Input '{given.name}' has both data and binary_data_size.")
    if given.name == IMAGE:
        _check_datatype(given, "BYTES")
        _check_shape(given, "[N] or [N, 1]", ([], [1]), max_images)
        files = read_elements(given, raw)
        if not all(files):
            raise InvalidRequest(f"Input '{IMAGE}' has an empty element: each is an image file.")
        return list(files)
    _check_datatype(given, "FP32")
    height, width = engine.backbone.image_size
    _check_shape(given, f"[N, 3, {height}, {width}]", ([3, height, width],), max_images)
    images = list(read_floats(given, raw))
    _check_scale(images, _ROOM * engine.backbone.preprocessing.largest_value)
    return images


def _check_scale(images: Sequence[Floats], largest: float) -> None:
    for number, image in enumerate(images):
        found = float(image.flat[np.abs(image).argmax()])
        if abs(found) > largest:
            raise InvalidRequest(
                f"Image {number} of input '{PIXEL_VALUES}' has the value {found:.6g}, and none may "
                f"be beyond ±{largest:.6g}: normalise the pixels as the backbone's preprocessing "
                f"does."
            )


def _check_names(inputs: Sequence[InputTensor]) -> None:
    for each in inputs:
        if each.name not in (IMAGE, PIXEL_VALUES):
            raise InvalidRequest(f"There is no input '{each.name}': {_EITHER}.")
        if each.parameters.shared_memory_region is not None:
            raise InvalidRequest(
                f"Input '{each.name}' is in shared memory, which is not read here: send its data."
            )
    if len(inputs) != 1:
        raise InvalidRequest(f"The request has {len(inputs)} inputs: {_EITHER}.")


def _check_datatype(given: InputTensor, datatype: str) -> None:
    if given.datatype != datatype:
        raise InvalidRequest(
            f"Input '{given.name}' is of datatype '{given.datatype}', and must be {datatype}."
        )


def _check_shape(
    given: InputTensor, expected: str, tails: Sequence[list[int]], max_images: int
) -> None:
    if not given.shape or given.shape[1:] not in tails:
        raise InvalidRequest(
            f"Input '{given.name}' has the shape {given.shape}, and must have {expected}, where N "
            f"is the number of images."
        )
    if given.shape[0] == 0:
        raise InvalidRequest(f"Input '{given.name}' has no image.")
    check_image_count(given.shape[0], max_images)


# Outputs


def check_outputs(request: InferRequest, ref: str | None) -> list[str] | None:
    """The task references to ask, None for every ready task; InvalidRequest for a wrong output.

    `ref` is the task that is asked as a model, None where the outputs are the tasks.
    """
    outputs = request.outputs or []
    names = [each.name for each in outputs]
    for name, times in Counter(names).most_common(1):
        if times > 1:
            raise InvalidRequest(f"Output '{name}' is requested more than once.")
    for each in outputs:
        if each.parameters.shared_memory_region is not None:
            raise InvalidRequest(
                f"Output '{each.name}' is wanted in shared memory, which is not written here."
            )
        if ref is not None and each.name != SCORES:
            raise InvalidRequest(
                f"Model '{ref}' has no output '{each.name}': its only one is '{SCORES}'."
            )
    if ref is not None:
        return [ref]
    return names or None


def write_outputs(
    request: InferRequest, answer: PredictAnswer, ref: str | None
) -> list[OutputTensor]:
    """The outputs, in the order of the request."""
    requested = {each.name: each.parameters for each in request.outputs or []}
    default = OutputParameters()
    tensors: list[OutputTensor] = []
    failed = failed_tasks(answer)
    for task in answer.images[0].tasks:
        if task in failed:
            continue
        name = task if ref is None else SCORES
        form = requested.get(name, default)
        binary = form.binary_data
        if binary is None:
            binary = request.parameters.binary_data_output
        answers = [image.tasks[task] for image in answer.images]
        tensors.append(_tensor(name, answers, binary=binary, classes=form.classification))
    return tensors


def _tensor(
    name: str, answers: Sequence[TaskAnswer], *, binary: bool, classes: int
) -> OutputTensor:
    served = answers[0].served
    parameters = {} if served.version is None else {"version": str(served.version)}
    if classes == 0:
        values = np.stack([scores(each) for each in answers])
        return OutputTensor(name, values, binary, parameters)
    if served.problem not in LABELLED:
        raise InvalidRequest(
            f"Output '{name}' is of a {served.problem} task, which has no labels to classify by: "
            f"leave 'classification' out."
        )
    texts = [
        [f"{each.score:.7g}:{each.index}:{each.label}" for each in best(answer, classes)]
        for answer in answers
    ]
    return OutputTensor(name, texts, binary, parameters)


def failed_tasks(answer: PredictAnswer) -> dict[str, str]:
    """By reference, the tasks that have no answer for one of the images, and why."""
    return {
        ref: f"image {number}: {task.error}"
        for number, image in enumerate(answer.images)
        for ref, task in image.tasks.items()
        if task.error is not None
    }


def _answer_bytes(request: InferRequest, tasks: Sequence[AskedTask]) -> int:
    """Bytes of the answer for one image, about. Numbers count as JSON, though some are binary."""
    classes = max((each.parameters.classification for each in request.outputs or ()), default=0)
    return sum(
        task.bytes_of_labels(min(classes, task.classes))
        if classes and task.problem in LABELLED
        else NUMBER_BYTES * task.classes
        for task in tasks
    )


def _render(name: str, ref: str | None, request: InferRequest, answer: PredictAnswer) -> Response:
    failed = failed_tasks(answer)
    named = ref is not None or request.outputs  # somebody waits for just these
    if failed and (named or len(failed) == len(answer.images[0].tasks)):
        raise AnswerNotFinite(" ".join(f"'{task}', {why}." for task, why in failed.items()))
    body: Json = {"model_name": name}
    served = None if ref is None else answer.images[0].tasks[ref].served
    if served is not None and served.version is not None:
        body["model_version"] = str(served.version)
    if request.id is not None:
        body["id"] = request.id
    if failed:
        body["parameters"] = {"errors": failed}
    content, head = write_body(body, write_outputs(request, answer, ref))
    headers = {"Server-Timing": server_timing(answer.timings), "Cache-Control": "no-store"}
    if head is None:
        return Response(content, headers=headers, media_type="application/json")
    headers[HEADER_LENGTH] = str(head)
    return Response(content, headers=headers, media_type="application/octet-stream")
