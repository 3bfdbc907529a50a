"""`/v1/embeddings`: embeddings of images in the shape of OpenAI's API.

The model is the backbone, or a task, whose embedding is the feature that its head reads. Embeddings
have unit length, as those of OpenAI do, so their dot product is the cosine.
"""

import base64
import binascii
from typing import Annotated, Literal

import numpy as np
from fastapi import APIRouter, Request, Response
from pydantic import BaseModel, ConfigDict, Field

from engram_server.api import bodies, inference
from engram_server.api.auth import requires
from engram_server.api.dependencies import Strict, json_content, request_body
from engram_server.api.direct import DirectRoute, Json, encode
from engram_server.api.problems import responses
from engram_server.engine.types import Floats
from engram_server.errors import AnswerNotFinite, InvalidRequest, UnsupportedMedia

router = APIRouter(
    tags=["predict"], dependencies=requires(*inference.PREDICT), route_class=DirectRoute
)

_TINY = 1e-12
_EXAMPLE = f"data:image/png;base64,{bodies.EXAMPLE_IMAGE}"


class EmbeddingsBody(BaseModel):
    """Images, and the model that embeds them."""

    # OpenAI's clients may send members of other models, such as `user`.
    model_config = ConfigDict(extra="ignore")

    input: str | Annotated[list[str], Field(min_length=1, fail_fast=True)] = Field(
        description="An image or a list of images, each in base64 or as a data URL."
    )
    model: str = Field(
        min_length=1,
        max_length=256,
        description="The name of the backbone, or a task reference.",
        examples=["engram-mini"],
    )
    encoding_format: Literal["float", "base64"] = Field(
        "float", description="`base64`: float32 numbers, little-endian."
    )
    dimensions: int | None = Field(
        None, description="Must be the width of the backbone: embeddings are not truncated."
    )


class EmbeddingResult(Strict):
    object: Literal["embedding"]
    index: int
    embedding: list[float] | str


class Usage(Strict):
    prompt_tokens: int = Field(description="Tokens of the images: patches and class tokens.")
    total_tokens: int


class EmbeddingList(Strict):
    object: Literal["list"]
    data: list[EmbeddingResult] = Field(description="In the order of the request.")
    model: str
    usage: Usage


@router.post(
    "/v1/embeddings",
    responses={
        200: {"model": EmbeddingList},
        **responses(400, 401, 404, 408, 412, 413, 415, 422, 429, 500, 503, 504),
    },
    openapi_extra={
        **request_body(
            json_content(EmbeddingsBody, example={"model": "engram-mini", "input": [_EXAMPLE]})
        ),
        "parameters": inference.HEADER_PARAMETERS,
    },
)
async def embed(request: Request) -> Response:
    """Embed images, in the shape of OpenAI's API. Embeddings have unit length."""
    call = inference.Inference(request)
    images, body = await _read(call)
    model = call.engine.model
    if body.dimensions not in (None, model.width):
        raise InvalidRequest(
            f"This model has embeddings of {model.width} dimensions and does not support "
            f"{body.dimensions}: leave out dimensions."
        )
    size = len(images) * model.width * inference.NUMBER_BYTES
    call.check_answer_size(size)
    if body.model == model.name:
        rows = await _backbone_features(call, images)
    else:
        rows = await _task_embeddings(call, body.model, images)
    tokens = len(images) * model.tokens
    content = await bodies.off_loop(request, lambda: _write(rows, body, tokens), size=size)
    return Response(content, 200, {"Cache-Control": "no-store"}, "application/json")


async def _task_embeddings(
    call: inference.Inference, reference: str, images: list[bytes]
) -> list[Floats | None]:
    """The features that a task's head reads, or its outputs if they are embeddings."""
    plan = await call.resolve([reference])
    answer = await call.predict(plan, images, features=True)
    answers = [one for image in answer.images for one in image.tasks.values()]
    for one in answers:
        if one.error is not None:
            raise AnswerNotFinite(f"Task '{reference}': {one.error}.")
    return [one.logits if one.served.task_type == "embedding" else one.features for one in answers]


async def _backbone_features(call: inference.Inference, images: list[bytes]) -> list[Floats | None]:
    read = await call.read(
        images,
        lambda options: call.engine.predictions.read_images(images, options),
        features=True,
    )
    rows = []
    for index, image in enumerate(read):
        if image.error is not None:
            raise type(image.error)(f"Input {index}: {image.error}")
        rows.append(None if image.features is None else image.features[: call.engine.model.width])
    return rows


async def _read(call: inference.Inference) -> tuple[list[bytes], EmbeddingsBody]:
    request, settings = call.request, call.settings
    if bodies.media_type(request) != "application/json":
        raise UnsupportedMedia("Send images as application/json.")
    bodies.reject_encoded(request)
    content = await bodies.read_body(request, settings.body_bytes, call.deadline_ms)
    limit = bodies.SMALL_JSON_VALUES + 2 * settings.max_images

    def parse() -> tuple[list[bytes], EmbeddingsBody]:
        body = bodies.parse_json(content, EmbeddingsBody, limit)
        listed = [body.input] if isinstance(body.input, str) else body.input
        bodies.check_image_count(len(listed), settings.max_images)
        return [_decode(text, index) for index, text in enumerate(listed)], body

    return await bodies.off_loop(request, parse, size=len(content))


def _decode(text: str, index: int) -> bytes:
    if text.startswith("data:"):
        head, _, text = text.partition(",")
        if not head.endswith(";base64"):
            raise InvalidRequest(f"Input {index}: a data URL must be in base64.")
    try:
        data = bodies.decode_base64(text)
    except (binascii.Error, UnicodeEncodeError):
        raise InvalidRequest(
            f"Input {index} is neither a data URL nor base64. Inputs are images; this model does "
            f"not embed text."
        ) from None
    if not data:
        raise InvalidRequest(f"Input {index} is empty.")
    return data


def _write(rows: list[Floats | None], body: EmbeddingsBody, tokens: int) -> bytes:
    data: list[Json] = []
    for index, row in enumerate(rows):
        assert row is not None, "they were requested"
        values = row.astype("<f4")
        values /= max(float(np.linalg.norm(values)), _TINY)
        embedding: list[float] | str
        if body.encoding_format == "base64":
            embedding = base64.b64encode(values.tobytes()).decode()
        else:
            embedding = [inference.rounded(value) for value in values.tolist()]
        data.append({"object": "embedding", "index": index, "embedding": embedding})
    usage = {"prompt_tokens": tokens, "total_tokens": tokens}
    return encode({"object": "list", "data": data, "model": body.model, "usage": usage})
