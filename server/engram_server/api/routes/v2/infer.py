"""Inference over the Open Inference Protocol: inputs to images, answers to outputs."""

from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Annotated, Any, NamedTuple

import numpy as np
from fastapi import APIRouter, Request, Response
from pydantic import BaseModel, Field

from engram_server.api import bodies, inference
from engram_server.api.auth import requires
from engram_server.api.dependencies import BINARY, json_content, omit_if_none, request_body
from engram_server.api.direct import Json, PartedResponse
from engram_server.api.routes.v2 import models, tensors
from engram_server.engine import types
from engram_server.engine.tasks.snapshot import Plan, ResolvedTask
from engram_server.errors import AnswerNotFinite, InvalidRequest, UnsupportedMedia

router = APIRouter(prefix="/v2", tags=["open inference"], dependencies=requires(*inference.PREDICT))

# Times the largest normalised pixel value of a decoded image: allows for values beyond black and
# white, but not for pixels that were never normalised.
_PIXEL_MARGIN = 10

_EITHER = f"send either '{models.IMAGE}' (BYTES, image files) or '{models.PIXEL_VALUES}' (FP32)"


# Requests. Unknown members and parameters are ignored.


class OutputParameters(BaseModel):
    """`classification`: return this many labels as text instead of all numbers."""

    binary_data: bool | None = None
    classification: tensors.Size = 0
    shared_memory_region: Any = None


class RequestedOutput(BaseModel):
    """A requested output and its format."""

    name: tensors.Text
    parameters: tensors.OrNull[OutputParameters] = OutputParameters()


class InferParameters(BaseModel):
    """Parameters of the request. `timeout` is in microseconds; 0: none."""

    binary_data_output: bool = False
    timeout: Annotated[float, Field(strict=True, ge=0, allow_inf_nan=False)] = 0


class InferRequest(BaseModel):
    """An inference request to a model."""

    id: tensors.Text | None = None
    inputs: list[tensors.InputTensor] = Field(max_length=16, fail_fast=True)
    outputs: Annotated[list[RequestedOutput], Field(max_length=4096, fail_fast=True)] | None = None
    parameters: tensors.OrNull[InferParameters] = InferParameters()


# Responses. `write_body` writes them, because binary data may follow the JSON.


class OutputResult(BaseModel):
    """One output; with `binary_data_size` in its parameters, its data follows the JSON."""

    name: str
    datatype: str = Field(examples=["FP32"])
    shape: list[int] = Field(examples=[[1, 3]])
    parameters: Json | None = omit_if_none()
    data: list[float] | list[str] | None = omit_if_none()


class InferResult(BaseModel):
    """A model's outputs for all images of a request."""

    model_name: str
    model_version: str | None = omit_if_none("The version of a single task.")
    id: str | None = omit_if_none("The id of the request.")
    parameters: Json | None = omit_if_none("`errors`: tasks without an answer, and why.")
    outputs: list[OutputResult]


_INFER: dict[str, Any] = {
    "responses": {
        200: {"model": InferResult, "content": {"application/octet-stream": BINARY}},
        **models.errors(400, 401, 404, 408, 412, 413, 415, 422, 429, 500, 503, 504),
    },
    "openapi_extra": {
        **request_body(json_content(InferRequest)),
        "parameters": inference.HEADER_PARAMETERS,
    },
}


@router.post("/models/{name:path}/infer", name="model_infer", **_INFER)
@router.post(
    "/models/{name:path}/versions/{version}/infer",
    name="version_infer",
    **models.with_version(_INFER),
)
async def infer(request: Request, name: models.Name, version: models.VersionDep) -> Response:
    """Run a model, or one version of it."""
    call = inference.Inference(request)
    settings, ref = call.settings, models.reference(name, version)
    # Before the body is read: an unknown model fails at once.
    plan = None if ref is None else await call.resolve([ref])
    content = await _read(call)
    head, binary = tensors.split_body(content, request.headers.get(tensors.HEADER_LENGTH))
    model = call.engine.model

    def parse() -> ParsedRequest:
        parsed = bodies.parse_json(head, InferRequest, settings.json_values)
        raw = tensors.assign_binary(parsed.inputs, binary)
        images = read_images(parsed.inputs, raw, model, settings.max_images)
        return ParsedRequest(name, ref, parsed, images, check_outputs(parsed, ref))

    parsed = await bodies.off_loop(request, parse, size=len(content))
    answer = await predict(call, parsed, plan)
    render = partial(_render, parsed, answer)
    return await bodies.off_loop(request, render, size=answer.size)


class ParsedRequest(NamedTuple):
    """A request to the model `name`. `ref` is the task that it is, `tasks` those to run."""

    name: str
    ref: str | None  # None: `multitask`
    request: InferRequest
    images: list[types.Image]
    tasks: list[str] | None


class Answer(NamedTuple):
    plan: Plan
    answer: types.PredictAnswer
    size: int  # approximate bytes


async def predict(
    call: inference.InferenceCall, parsed: ParsedRequest, plan: Plan | None = None
) -> Answer:
    """Run a request; `plan` if its tasks are resolved already."""
    timeout = parsed.request.parameters.timeout
    if timeout:
        call.limit_deadline(timeout / 1000)
    if plan is None:
        plan = await call.resolve(parsed.tasks)
    size = _answer_bytes(parsed.request, plan.tasks) * len(parsed.images)
    call.check_answer_size(size)
    return Answer(plan, await call.predict(plan, parsed.images), size)


async def _read(call: inference.Inference) -> bytes:
    limit = call.settings.body_bytes
    content = await bodies.read_body(call.request, limit, call.deadline_ms)
    encoding = bodies.content_encoding(call.request)
    if encoding is None:
        return content
    if encoding not in ("gzip", "deflate"):
        raise UnsupportedMedia(f"Content-Encoding '{encoding}' is not supported: use gzip.")
    decompress = partial(tensors.decompress, content, limit)
    return await call.runtime.threads.json.run(call.identity.id, decompress)


def read_images(
    inputs: Sequence[tensors.InputTensor],
    binary: Mapping[str, memoryview],
    model: types.ModelInfo,
    max_images: int,
) -> list[types.Image]:
    """The images: files, or normalised pixel values (3, H, W)."""
    _check_names(inputs)
    tensor = inputs[0]
    raw = binary.get(tensor.name)
    if raw is not None and tensor.data is not None:
        raise InvalidRequest(f"Input '{tensor.name}' has both data and binary_data_size.")
    if tensor.name == models.IMAGE:
        _check_datatype(tensor, "BYTES")
        _check_shape(tensor, "[N] or [N, 1]", ([], [1]), max_images)
        files = tensors.read_elements(tensor, raw)
        if not all(files):
            raise InvalidRequest(
                f"Input '{models.IMAGE}' has an empty element: each must be an image file."
            )
        return list(files)
    _check_datatype(tensor, "FP32")
    height, width = model.image_size
    _check_shape(tensor, f"[N, 3, {height}, {width}]", ([3, height, width],), max_images)
    images = list(tensors.read_floats(tensor, raw))
    _check_scale(images, _PIXEL_MARGIN * model.largest_value)
    return list(images)


def _check_scale(images: Sequence[types.Floats], largest: float) -> None:
    for number, image in enumerate(images):
        found = float(image.flat[np.abs(image).argmax()])
        if abs(found) > largest:
            raise InvalidRequest(
                f"Image {number} of input '{models.PIXEL_VALUES}' has the value {found:.6g}, "
                f"outside ±{largest:.6g}: normalise the pixels like the backbone's preprocessing."
            )


def _check_names(inputs: Sequence[tensors.InputTensor]) -> None:
    for each in inputs:
        if each.name not in (models.IMAGE, models.PIXEL_VALUES):
            raise InvalidRequest(f"Unknown input '{each.name}': {_EITHER}.")
        if each.parameters.shared_memory_region is not None:
            raise InvalidRequest(
                f"Input '{each.name}' is in shared memory, which is not supported: send its data."
            )
    if len(inputs) != 1:
        raise InvalidRequest(f"The request has {len(inputs)} inputs: {_EITHER}.")


def _check_datatype(tensor: tensors.InputTensor, datatype: str) -> None:
    if tensor.datatype != datatype:
        raise InvalidRequest(
            f"Input '{tensor.name}' has the datatype '{tensor.datatype}', and must have {datatype}."
        )


def _check_shape(
    tensor: tensors.InputTensor, expected: str, tails: Sequence[list[int]], max_images: int
) -> None:
    if not tensor.shape or tensor.shape[1:] not in tails:
        raise InvalidRequest(
            f"Input '{tensor.name}' has the shape {tensor.shape}, and must have {expected}, where "
            f"N is the number of images."
        )
    if tensor.shape[0] == 0:
        raise InvalidRequest(f"Input '{tensor.name}' has no images.")
    bodies.check_image_count(tensor.shape[0], max_images)


def check_outputs(request: InferRequest, ref: str | None) -> list[str] | None:
    """The references of the requested tasks, None for every ready task.

    `ref` is the task that the model is; None for `multitask`, whose outputs are tasks.
    """
    outputs = request.outputs or []
    names = [each.name for each in outputs]
    for name, times in Counter(names).most_common(1):
        if times > 1:
            raise InvalidRequest(f"Output '{name}' is requested more than once.")
    for each in outputs:
        if each.parameters.shared_memory_region is not None:
            raise InvalidRequest(
                f"Output '{each.name}' requests shared memory, which is not supported."
            )
        if ref is not None and each.name != models.SCORES:
            raise InvalidRequest(
                f"Model '{ref}' has no output '{each.name}': its only output is '{models.SCORES}'."
            )
    if ref is not None:
        return [ref]
    return names or None


def write_outputs(
    request: InferRequest, answer: types.PredictAnswer, ref: str | None
) -> list[tensors.OutputTensor]:
    requested = {each.name: each.parameters for each in request.outputs or []}
    default = OutputParameters()
    written: list[tensors.OutputTensor] = []
    failed = failed_tasks(answer)
    for task in answer.images[0].tasks:
        if task in failed:
            continue
        name = task if ref is None else models.SCORES
        form = requested.get(name, default)
        binary = form.binary_data
        if binary is None:
            binary = request.parameters.binary_data_output
        answers = [image.tasks[task] for image in answer.images]
        written.append(_tensor(name, answers, binary=binary, classes=form.classification))
    return written


def _tensor(
    name: str, answers: Sequence[types.TaskAnswer], *, binary: bool, classes: int
) -> tensors.OutputTensor:
    served = answers[0].served
    parameters: Json = {} if served.version is None else {"version": str(served.version)}
    if answers[0].in_distribution is not None:
        parameters["in_distribution"] = [each.in_distribution for each in answers]
    if classes == 0:
        return tensors.OutputTensor(name, types.class_scores(answers), binary, parameters)
    if served.task_type not in inference.CLASSIFICATION:
        raise InvalidRequest(
            f"Output '{name}' is a {served.task_type} task, which has no labels: omit "
            f"'classification'."
        )
    texts = [
        [f"{score:.7g}:{index}:{label}" for label, index, score in predictions]
        for predictions in types.top_predictions(answers, classes)
    ]
    return tensors.OutputTensor(name, texts, binary, parameters)


def failed_tasks(answer: types.PredictAnswer) -> dict[str, str]:
    """By reference, why tasks have no answer for one of the images."""
    return {
        ref: f"image {number}: {task.error}"
        for number, image in enumerate(answer.images)
        for ref, task in image.tasks.items()
        if task.error is not None
    }


def _answer_bytes(request: InferRequest, tasks: Sequence[ResolvedTask]) -> int:
    """Approximate bytes of the answer for one image. Binary numbers count like JSON."""
    classes = max((each.parameters.classification for each in request.outputs or ()), default=0)
    return sum(inference.task_bytes(task, classes) for task in tasks)


def result_head(parsed: ParsedRequest, answer: types.PredictAnswer) -> Json:
    """The result without its outputs; AnswerNotFinite if a requested task has no answer."""
    ref, request, failed = parsed.ref, parsed.request, failed_tasks(answer)
    named = ref is not None or request.outputs  # the client requested these tasks
    if failed and (named or len(failed) == len(answer.images[0].tasks)):
        raise AnswerNotFinite(" ".join(f"'{task}', {why}." for task, why in failed.items()))
    body: Json = {"model_name": parsed.name}
    served = None if ref is None else answer.images[0].tasks[ref].served
    if served is not None and served.version is not None:
        body["model_version"] = str(served.version)
    if request.id is not None:
        body["id"] = request.id
    if failed:
        body["parameters"] = {"errors": failed}
    return body


def _render(parsed: ParsedRequest, answered: Answer) -> Response:
    answer = answered.answer
    head_of_result = result_head(parsed, answer)
    outputs = write_outputs(parsed.request, answer, parsed.ref)
    content, head = tensors.write_body(head_of_result, outputs)
    headers = inference.response_headers(answered.plan, inference.timings_ms(answer.timings))
    if head is None:
        return PartedResponse(content, headers=headers, media_type="application/json")
    headers[tensors.HEADER_LENGTH] = str(head)
    return PartedResponse(content, headers=headers, media_type="application/octet-stream")
