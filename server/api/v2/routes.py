"""The routes of the Open Inference Protocol.

They are left out of the OpenAPI document: the protocol has its own description, and its clients
read that. A model's name may have one slash in it (`team/name`), hence `:path`; routes with more
behind the name come before those with less.
"""

from importlib import metadata
from typing import Annotated

from anyio import to_thread
from fastapi import APIRouter, Path, Request, Response
from fastapi.responses import JSONResponse

from server.api.answers import Json, server_timing
from server.api.bodies import SMALL_BODY_BYTES, off_loop, parse_json, read_body
from server.api.deps import ADMIN, CAUGHT_UP, READER, EngineDep, RecordDep, Runtime, RuntimeDep
from server.api.errors import InvalidRequest, NotStarted, UnsupportedMedia
from server.api.middleware import RequestRecord
from server.api.options import (
    check_task_count,
    deadline_of,
    read_deadline_ms,
    read_min_generation,
)
from server.api.predicting import ask_engine
from server.api.tasks_json import BASE
from server.api.v2 import models
from server.api.v2.inputs import PIXEL_VALUES, read_images
from server.api.v2.outputs import check_finite, check_outputs, write_outputs
from server.api.v2.schemas import ControlRequest, IndexRequest, InferRequest
from server.api.v2.tensors import HEADER_LENGTH, decompress, split_body, write_body
from server.engine.types import Floats, PredictAnswer, PredictRequest

router = APIRouter(prefix="/v2", include_in_schema=False)

EXTENSIONS = ["binary_tensor_data", "classification", "model_configuration", "model_repository"]

Name = Annotated[str, Path(max_length=256)]
Number = Annotated[int, Path(ge=1, le=10**18 - 1)]


# The server


@router.get("", dependencies=READER)
async def server_metadata() -> Response:
    """Which server this is, and what it can do beyond the protocol."""
    version = metadata.version("engram")
    return JSONResponse({"name": "engram", "version": version, "extensions": EXTENSIONS})


@router.get("/health/live")
async def live() -> Response:
    """The process answers."""
    return JSONResponse({"live": True})


@router.get("/health/ready")
async def ready(runtime: RuntimeDep) -> Response:
    """Whether traffic may be sent here, as `/readyz` tells it."""
    _check_server(runtime)
    return JSONResponse({"ready": True})


# Models


@router.get("/models/{name:path}/versions/{version}/ready", dependencies=CAUGHT_UP)
async def version_ready(name: Name, version: Number, runtime: RuntimeDep) -> Response:
    """Whether a version of a model answers."""
    return _model_ready(runtime, name, version)


@router.get("/models/{name:path}/ready", dependencies=READER)
async def model_ready(name: Name, runtime: RuntimeDep) -> Response:
    """Whether a model answers."""
    return _model_ready(runtime, name, None)


@router.get("/models/{name:path}/versions/{version}/config", dependencies=CAUGHT_UP)
async def version_config(
    name: Name, version: Number, runtime: RuntimeDep, engine: EngineDep
) -> Response:
    """A version of a model as Triton's tools want it described."""
    model = await to_thread.run_sync(models.describe, engine, name, version)
    return JSONResponse(model.config(runtime.settings.max_images))


@router.get("/models/{name:path}/config", dependencies=READER)
async def model_config(name: Name, runtime: RuntimeDep, engine: EngineDep) -> Response:
    """A model as Triton's tools want it described."""
    model = await to_thread.run_sync(models.describe, engine, name, None)
    return JSONResponse(model.config(runtime.settings.max_images))


@router.post("/models/{name:path}/versions/{version}/infer", dependencies=READER)
async def version_infer(
    request: Request, name: Name, version: Number, runtime: RuntimeDep, record: RecordDep
) -> Response:
    """Ask a version of a model."""
    return await _infer(request, runtime, record, name, version)


@router.post("/models/{name:path}/infer", dependencies=READER)
async def model_infer(
    request: Request, name: Name, runtime: RuntimeDep, record: RecordDep
) -> Response:
    """Ask a model."""
    return await _infer(request, runtime, record, name, None)


@router.get("/models/{name:path}/versions/{version}", dependencies=CAUGHT_UP)
async def version_metadata(name: Name, version: Number, engine: EngineDep) -> Response:
    """What a version of a model takes and gives."""
    model = await to_thread.run_sync(models.describe, engine, name, version)
    return JSONResponse(model.metadata())


@router.get("/models/{name:path}", dependencies=READER)
async def model_metadata(name: Name, engine: EngineDep) -> Response:
    """What a model takes and gives."""
    model = await to_thread.run_sync(models.describe, engine, name, None)
    return JSONResponse(model.metadata())


# The repository


@router.post("/repository/index", dependencies=READER)
async def repository_index(request: Request, engine: EngineDep) -> Response:
    """All models and their states."""
    body = await read_body(request, SMALL_BODY_BYTES)
    asked = parse_json(body or b"{}", IndexRequest)
    listed = await to_thread.run_sync(lambda: models.index(engine, only_ready=asked.ready))
    return JSONResponse(listed)


@router.post("/repository/models/{name:path}/load", dependencies=ADMIN)
async def load(request: Request, name: Name, runtime: RuntimeDep, engine: EngineDep) -> Response:
    """Read the store, and have a model on the device when this answers."""
    body = await read_body(request, runtime.settings.body_bytes)
    asked = parse_json(body or b"{}", ControlRequest)
    if any(key == "config" or key.startswith("file:") for key in asked.parameters):
        raise InvalidRequest(
            "A model is loaded as it was published: to change it, publish a bundle (PUT /tasks/…)."
        )
    if name not in (BASE, models.MULTITASK):
        await to_thread.run_sync(engine.reload, name, limiter=runtime.changes)
    else:
        models.check_ready(engine, name, None)
    return Response()


@router.post("/repository/models/{name:path}/unload", dependencies=ADMIN)
async def unload(name: Name, runtime: RuntimeDep, engine: EngineDep) -> Response:
    """Stop answering for a model on this server, until it is loaded again."""
    if name in (BASE, models.MULTITASK):
        raise InvalidRequest(f"Model '{name}' belongs to the backbone and is always loaded.")
    await to_thread.run_sync(engine.unload, name, limiter=runtime.changes)
    return Response()


def _check_server(runtime: Runtime) -> None:
    if reasons := runtime.reasons:
        raise NotStarted(f"The server is not ready: {'; '.join(reasons)}")


def _model_ready(runtime: Runtime, name: str, version: int | None) -> Response:
    _check_server(runtime)
    models.check_ready(runtime.engine, name, version)
    return JSONResponse({"name": name, "ready": True})


# Inference


async def _infer(
    request: Request, runtime: Runtime, record: RequestRecord, name: str, version: int | None
) -> Response:
    engine, settings = runtime.engine, runtime.settings
    engine.check_room()  # before the body is read: a full server answers at once
    ref = models.reference(name, version)
    at_least = read_min_generation(request)
    if ref is not None:
        (await engine.snapshot_for([ref], at_least)).find([ref])
    deadline_ms = read_deadline_ms(request)
    body = await _read(request, settings.body_bytes)
    head, binary = split_body(body, request.headers.get(HEADER_LENGTH))

    def parse() -> tuple[InferRequest, list[bytes | Floats], list[str] | None]:
        asked = parse_json(head, InferRequest)
        size = engine.backbone.image_size
        images = read_images(asked.inputs, binary, size, settings.max_images)
        return asked, images, check_outputs(asked, ref)

    asked, images, tasks = await off_loop(parse, size=len(body))
    check_task_count(engine, tasks, settings.max_tasks)
    question = PredictRequest(
        images=images,
        tasks=tasks,
        at_least=at_least,
        deadline=deadline_of(record, _shortest(deadline_ms, asked), settings),
    )
    answer = await ask_engine(request, runtime, record, question)
    return await off_loop(lambda: _answer(name, ref, asked, answer), size=_size(answer))


async def _read(request: Request, limit: int) -> bytes:
    """The body, unpacked if it is compressed."""
    body = await read_body(request, limit)
    encoding = request.headers.get("Content-Encoding", "identity").strip().lower()
    if encoding in ("", "identity"):
        return body
    if encoding not in ("gzip", "deflate"):
        raise UnsupportedMedia(f"Content-Encoding '{encoding}' is not read here: use gzip.")
    return await to_thread.run_sync(decompress, body, limit)


def _shortest(deadline_ms: float | None, asked: InferRequest) -> float | None:
    """The header's deadline or the protocol's own timeout, whichever is sooner."""
    timeout_ms = asked.parameters.timeout / 1000
    if timeout_ms == 0:
        return deadline_ms
    return timeout_ms if deadline_ms is None else min(deadline_ms, timeout_ms)


def _size(answer: PredictAnswer) -> int:
    """Bytes of the answer's numbers, about."""
    first = answer.images[0].tasks.values()
    return 10 * len(answer.images) * sum(len(each.logits) for each in first)


def _answer(name: str, ref: str | None, asked: InferRequest, answer: PredictAnswer) -> Response:
    if asked.inputs[0].name == PIXEL_VALUES:
        check_finite(answer)
    body: Json = {"model_name": name}
    served = None if ref is None else answer.images[0].tasks[ref].served
    if served is not None and served.version is not None:
        body["model_version"] = str(served.version)
    if asked.id is not None:
        body["id"] = asked.id
    content, head = write_body(body, write_outputs(asked, answer, ref))
    headers = {"Server-Timing": server_timing(answer.timings), "Cache-Control": "no-store"}
    if head is None:
        return Response(content, headers=headers, media_type="application/json")
    headers[HEADER_LENGTH] = str(head)
    return Response(content, headers=headers, media_type="application/octet-stream")
