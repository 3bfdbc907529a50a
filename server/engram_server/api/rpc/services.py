"""The methods of the inference service, of health checks and of reflection."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager
from functools import partial
from typing import Any, Final, Literal, TypeVar

from engram_bundle.errors import TaskStoreError
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection, reflection_pb2

from engram_server.access.identity import Scope
from engram_server.api.auth import MULTITASK, Requires, check_permitted
from engram_server.api.bodies import run_sized
from engram_server.api.dependencies import wait_for_slot
from engram_server.api.inference import (
    PREDICT,
    InferenceCall,
    read_min_generation,
    response_headers,
    timings_ms,
)
from engram_server.api.problems import kind_of
from engram_server.api.routes.v2 import infer, models
from engram_server.api.rpc import messages
from engram_server.api.rpc.calls import Call, Method
from engram_server.api.rpc.protocol import (
    HEALTH,
    REFLECTION,
    REFLECTION_V1,
    SERVICE,
    message,
    parse,
    pool,
)
from engram_server.errors import EngramError, NotFoundError

T = TypeVar("T")
Scopes = Scope | Literal["public", "any"]

_WATCH_SECONDS: Final = 1.0
_MAX_REFLECTIONS: Final = 256  # in one call
_ServingStatus: Final = health_pb2.HealthCheckResponse.ServingStatus


# The server


async def _server_live(call: Call) -> None:
    await call.send(message("ServerLiveResponse")(live=not call.runtime.broken))


async def _server_ready(call: Call) -> None:
    await call.send(message("ServerReadyResponse")(ready=not call.runtime.reasons))


async def _server_metadata(call: Call) -> None:
    metadata = await models.server_metadata()
    await call.send(message("ServerMetadataResponse")(**metadata.model_dump()))


# Models


async def _model_ready(call: Call) -> None:
    runtime = call.runtime
    try:
        await _read_model(
            call,
            "ModelReadyRequest",
            lambda name, version: models.model_ready(name, version, runtime),
        )
        ready = True
    except (EngramError, TaskStoreError) as error:
        if kind_of(type(error)).status not in (404, 503):
            raise
        ready = False
    await call.send(message("ModelReadyResponse")(ready=ready))


async def _model_metadata(call: Call) -> None:
    engine, identity = call.runtime.engine, call.identity
    metadata = await _read_model(
        call,
        "ModelMetadataRequest",
        lambda name, version: models.model_metadata(name, version, engine, identity),
    )
    await call.send(messages.write_metadata(metadata))


async def _model_config(call: Call) -> None:
    runtime, identity = call.runtime, call.identity
    config = await _read_model(
        call,
        "ModelConfigRequest",
        lambda name, version: models.model_config(name, version, runtime, identity),
    )
    await call.send(messages.write_config(config))


async def _read_model(call: Call, schema: str, read: Callable[[str, int | None], T]) -> T:
    """Read something about the model and version of a message, as `/v2` does."""
    request = parse(message(schema), await call.receive())
    name, version = request.name, messages.parse_version(request.version)
    call.name_model(name, request.version)
    _check_task(call, name if version is None else f"{name}@{version}", models.LOOK)
    await wait_for_slot(call.runtime, call.record, call.runtime.pools.reads, "reads")
    refs = None if version is None else [f"{name}@{version}"]
    await call.runtime.engine.tasks.snapshot_for(refs, read_min_generation(call.headers))
    return await call.runtime.threads.reads.run(call.identity.id, partial(read, name, version))


def _check_task(call: Call, ref: str, scopes: Sequence[Scope]) -> None:
    if ref != MULTITASK:
        check_permitted(call.identity, scopes, [ref])


async def _model_infer(call: Call) -> None:
    runtime, record = call.runtime, call.record
    running = InferenceCall(runtime, record, call.headers)
    if (remaining := call.deadline_ms) is not None:
        running.limit_deadline(remaining)
    data = await call.receive(runtime.settings.body_bytes)
    read = partial(messages.read_request, data, running.engine.model, runtime.settings.max_images)
    parsed, raw = await run_sized(runtime, record, read, len(data))
    call.name_model(parsed.name)
    answered = await infer.predict(running, parsed)
    write = partial(messages.write_result, parsed, answered.answer, raw=raw)
    content = await run_sized(runtime, record, write, answered.size)
    headers = response_headers(answered.plan, timings_ms(answered.answer.timings))
    del headers["Cache-Control"]
    call.trailing |= {name.lower(): value for name, value in headers.items()}
    await call.send_bytes(content)


# The repository


async def _repository_index(call: Call) -> None:
    request = parse(message("RepositoryIndexRequest"), await call.receive())
    index = partial(
        models.repository_index,
        call.runtime.engine,
        call.identity,
        models.IndexRequest(ready=request.ready),
    )
    listed = await call.runtime.threads.reads.run(call.identity.id, index)
    states = [each.model_dump(exclude_none=True) for each in listed]
    await call.send(message("RepositoryIndexResponse")(models=states))


async def _load_model(call: Call) -> None:
    limit = call.runtime.settings.body_bytes
    request = parse(message("RepositoryModelLoadRequest"), await call.receive(limit))
    name, parameters = request.model_name, list(request.parameters)
    async with _changing(call, name):
        await models.load_model(call.runtime, call.identity, name, parameters)
    await call.send(message("RepositoryModelLoadResponse")())


async def _unload_model(call: Call) -> None:
    request = parse(message("RepositoryModelUnloadRequest"), await call.receive())
    name = request.model_name
    async with _changing(call, name):
        await models.unload_model(call.runtime, call.identity, name)
    await call.send(message("RepositoryModelUnloadResponse")())


def _changing(call: Call, name: str) -> AbstractAsyncContextManager[None]:
    """Check the permission for a model, and record the change of it."""
    call.name_model(name)
    _check_task(call, name, ("admin",))
    return call.audited()


# Health


async def _check_health(call: Call) -> None:
    status = await _watched_status(call)
    if status is None:
        raise NotFoundError(f"Unknown service. Services: {SERVICE}, or an empty name.")
    await call.send(health_pb2.HealthCheckResponse(status=status()))


async def _watch_health(call: Call) -> None:
    read = await _watched_status(call) or (lambda: _ServingStatus.SERVICE_UNKNOWN)
    sent = None
    while True:
        if (status := read()) != sent:
            await call.send(health_pb2.HealthCheckResponse(status=status))
            sent = status
        await asyncio.sleep(_WATCH_SECONDS)


async def _watched_status(call: Call) -> Callable[[], int] | None:
    """Read the status of the requested service; None if there is no such service."""
    request = parse(health_pb2.HealthCheckRequest, await call.receive())
    if request.service not in ("", SERVICE):
        return None
    runtime = call.runtime
    return lambda: _ServingStatus.NOT_SERVING if runtime.reasons else _ServingStatus.SERVING


# Reflection


async def _reflect(call: Call) -> None:
    servicer = reflection.aio.ReflectionServicer((SERVICE, HEALTH, REFLECTION), pool())
    async for response in servicer.ServerReflectionInfo(_reflection_requests(call), None):
        await call.send(response)


async def _reflection_requests(call: Call) -> AsyncIterator[Any]:
    for _ in range(_MAX_REFLECTIONS):
        if not (data := await call.receive()):
            return
        yield parse(reflection_pb2.ServerReflectionRequest, data)


def _method(
    service: str, method: str, run: Callable[[Call], Awaitable[None]], name: str, *scopes: Scopes
) -> Method:
    return Method(f"/{service}/{method}", name, Requires(*scopes), run)


# Name, scopes and audit of each method are those of the route at `/v2`.
_METHODS: Final = (
    _method(SERVICE, "ServerLive", _server_live, "server_live", "public"),
    _method(SERVICE, "ServerReady", _server_ready, "server_ready", "public"),
    _method(SERVICE, "ServerMetadata", _server_metadata, "server_metadata", "any"),
    _method(SERVICE, "ModelReady", _model_ready, "model_ready", *models.LOOK),
    _method(SERVICE, "ModelMetadata", _model_metadata, "model_metadata", *models.LOOK),
    _method(SERVICE, "ModelConfig", _model_config, "model_config", *models.LOOK),
    _method(SERVICE, "ModelInfer", _model_infer, "model_infer", *PREDICT),
    _method(SERVICE, "RepositoryIndex", _repository_index, "repository_index", *models.LOOK),
    _method(SERVICE, "RepositoryModelLoad", _load_model, "repository_model_load", "admin"),
    _method(SERVICE, "RepositoryModelUnload", _unload_model, "repository_model_unload", "admin"),
    _method(HEALTH, "Check", _check_health, "health_check", "public"),
    _method(HEALTH, "Watch", _watch_health, "health_watch", "public"),
    _method(REFLECTION, "ServerReflectionInfo", _reflect, "reflection", "any"),
    # The same messages under their newer name.
    _method(REFLECTION_V1, "ServerReflectionInfo", _reflect, "reflection", "any"),
)


def methods() -> dict[str, Method]:
    """All methods by path."""
    return {method.path: method for method in _METHODS}
