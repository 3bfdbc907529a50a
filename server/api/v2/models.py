"""Tasks as models of the protocol: which there are, what they take and give, and their state.

A model's name may have one slash in it (`team/name`), hence `:path`; routes with more behind the
name come before those with less.
"""

from importlib import metadata
from typing import Annotated, Any, Literal

from anyio import to_thread
from fastapi import APIRouter, Depends, Path, Request, Response
from pydantic import BaseModel

from server.api import http
from server.api.audited import requires_audited
from server.api.auth import MULTITASK, IdentityDep, requires
from server.api.http import (
    LARGEST_NUMBER,
    EngineDep,
    RuntimeDep,
    Strict,
    left_out_if_none,
    requires_caught_up,
)
from server.api.predict import Json
from server.api.problems import InvalidRequest, responses
from server.api.v2.tensors import OrNull
from server.engine.engine import Engine
from server.engine.tasks.snapshot import BASE, Match, Snapshot, TaskState, unavailable
from server.errors import DeviceFailed, NotStarted
from server.identity import Identity, Scope
from server.runtime import Runtime

IMAGE = "image"
PIXEL_VALUES = "pixel_values"
SCORES = "scores"
PLATFORM = "engram"
EXTENSIONS = ["binary_tensor_data", "classification", "model_configuration", "model_repository"]

_ANSWERING = ("ready", "on_demand")

router = APIRouter(prefix="/v2", tags=["open inference"])

Name = Annotated[str, Path(max_length=256, description="A task's name, or `multitask`.")]
Number = Annotated[int, Path(ge=1, le=LARGEST_NUMBER, description="A version.")]


class ProtocolError(BaseModel):
    """What the protocol says of a refusal."""

    error: str


def errors(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """What the OpenAPI document says of a route that answers these errors."""
    return responses(*statuses, model=ProtocolError, media="application/json")


# The server


class ServerMetadata(Strict):
    name: str
    version: str
    extensions: list[str]


@router.get("", dependencies=requires("any"), responses=errors(401))
async def server_metadata() -> ServerMetadata:
    """Which server this is, and what it can do beyond the protocol."""
    version = metadata.version("engram")
    return ServerMetadata(name="engram", version=version, extensions=EXTENSIONS)


@router.get("/health/live", dependencies=requires("public"), responses=errors(503))
async def server_live(runtime: RuntimeDep) -> dict[str, bool]:
    """Whether the process is worth keeping, as `/livez` tells it."""
    if broken := runtime.broken:
        raise DeviceFailed(f"The server must be restarted: {'; '.join(broken)}")
    return {"live": True}


@router.get("/health/ready", dependencies=requires("public"), responses=errors(503))
async def server_ready(runtime: RuntimeDep) -> dict[str, bool]:
    """Whether traffic may be sent here, as `/readyz` tells it."""
    _check_server(runtime)
    return {"ready": True}


def _check_server(runtime: Runtime) -> None:
    if reasons := runtime.reasons:
        raise NotStarted(f"The server is not ready: {'; '.join(reasons)}")


# Models. Plain functions, which FastAPI runs in threads: `multitask` has all tasks.


class ModelReady(Strict):
    name: str
    ready: Literal[True]


class TensorMetadata(Strict):
    name: str
    datatype: str
    shape: list[int]
    parameters: Json | None = left_out_if_none("Of an output: its problem, version and labels.")


class ModelMetadata(Strict):
    """A model as every client of the protocol reads it."""

    name: str
    versions: list[str]
    platform: str
    inputs: list[TensorMetadata]
    outputs: list[TensorMetadata]


class TensorConfig(Strict):
    name: str
    data_type: str
    format: str | None = left_out_if_none()
    dims: list[int]
    optional: bool | None = left_out_if_none()


class ModelConfig(Strict):
    """A model as Triton's tools read it: shapes without the batch."""

    name: str
    platform: str
    backend: str
    max_batch_size: int
    input: list[TensorConfig]
    output: list[TensorConfig]


# Who asks a model may look at it: the protocol's clients do, before they ask.
_LOOK: tuple[Scope, Scope] = ("predict", "read")
_MODEL: dict[str, Any] = {
    "dependencies": requires(*_LOOK),
    "responses": errors(401, 404, 422, 503),
}
_VERSION: dict[str, Any] = {
    "dependencies": requires_caught_up(*_LOOK),
    "responses": errors(401, 404, 412, 422, 503),
}


@router.get("/models/{name:path}/versions/{version}/ready", **_VERSION)
def version_ready(name: Name, version: Number, runtime: RuntimeDep) -> ModelReady:
    """Whether a version of a model answers."""
    return _ready(runtime, name, version)


@router.get("/models/{name:path}/ready", **_MODEL)
def model_ready(name: Name, runtime: RuntimeDep) -> ModelReady:
    """Whether a model answers."""
    return _ready(runtime, name, None)


@router.get("/models/{name:path}/versions/{version}/config", **_VERSION)
def version_config(
    name: Name, version: Number, runtime: RuntimeDep, identity: IdentityDep
) -> ModelConfig:
    """A version of a model as Triton's tools read it."""
    return _config(runtime, identity, name, version)


@router.get("/models/{name:path}/config", **_MODEL)
def model_config(name: Name, runtime: RuntimeDep, identity: IdentityDep) -> ModelConfig:
    """A model as Triton's tools read it."""
    return _config(runtime, identity, name, None)


@router.get("/models/{name:path}/versions/{version}", **_VERSION)
def version_metadata(
    name: Name, version: Number, engine: EngineDep, identity: IdentityDep
) -> ModelMetadata:
    """What a version of a model takes and gives."""
    return _metadata(engine, identity, name, version)


@router.get("/models/{name:path}", **_MODEL)
def model_metadata(name: Name, engine: EngineDep, identity: IdentityDep) -> ModelMetadata:
    """What a model takes and gives."""
    return _metadata(engine, identity, name, None)


def reference(name: str, version: int | None) -> str | None:
    """The task reference that a model is; None for `multitask`, which is all of them."""
    if version is not None:
        return f"{name}@{version}"
    return None if name == MULTITASK else name


def _ready(runtime: Runtime, name: str, version: int | None) -> ModelReady:
    _check_server(runtime)
    check_ready(runtime.engine, name, version)
    return ModelReady(name=name, ready=True)


def check_ready(engine: Engine, name: str, version: int | None) -> None:
    """UnknownTask, or TaskUnavailable with the reason, unless the model answers."""
    ref = reference(name, version)
    if ref is None:
        return
    snapshot = engine.snapshot
    (match,) = snapshot.find([ref])
    state = snapshot.state_of(match.name, match.version)
    if state.status == "failed":
        raise unavailable({ref: state.reason or ""})


def _metadata(engine: Engine, identity: Identity, name: str, version: int | None) -> ModelMetadata:
    snapshot, ref = engine.snapshot, reference(name, version)
    outputs = _outputs(engine, identity, snapshot, ref)
    versions: list[str] = []
    if ref is not None:
        (match,) = snapshot.find([ref])
        labels = engine.class_labels(snapshot, ref)
        if labels is not None:
            outputs[0].parameters = {**(outputs[0].parameters or {}), "labels": list(labels)}
        task = snapshot.catalog.tasks.get(match.name)
        versions = [] if task is None else [str(each.version) for each in task.live]
    pixels = [-1, 3, *engine.backbone.image_size]
    return ModelMetadata(
        name=name,
        versions=versions,
        platform=PLATFORM,
        inputs=[
            TensorMetadata(name=IMAGE, datatype="BYTES", shape=[-1, 1]),
            TensorMetadata(name=PIXEL_VALUES, datatype="FP32", shape=pixels),
        ],
        outputs=outputs,
    )


def _config(runtime: Runtime, identity: Identity, name: str, version: int | None) -> ModelConfig:
    engine = runtime.engine
    outputs = _outputs(engine, identity, engine.snapshot, reference(name, version))
    return ModelConfig(
        name=name,
        platform=PLATFORM,
        backend=PLATFORM,
        max_batch_size=runtime.settings.max_images,
        # Optional, because one of them is enough.
        input=[
            TensorConfig(name=IMAGE, data_type="TYPE_STRING", dims=[1], optional=True),
            TensorConfig(
                name=PIXEL_VALUES,
                data_type="TYPE_FP32",
                format="FORMAT_NCHW",
                dims=[3, *engine.backbone.image_size],
                optional=True,
            ),
        ],
        output=[
            TensorConfig(name=each.name, data_type="TYPE_FP32", dims=each.shape[1:])
            for each in outputs
        ],
    )


def _outputs(
    engine: Engine, identity: Identity, snapshot: Snapshot, ref: str | None
) -> list[TensorMetadata]:
    """One for a task; for `multitask` one for each ready task that the caller may see."""
    if ref is None:
        return [
            _output(engine, snapshot, match, match.ref)
            for match in snapshot.find(None)
            if identity.may(_LOOK, match.name)
        ]
    return [_output(engine, snapshot, match, SCORES) for match in snapshot.find([ref])]


def _output(engine: Engine, snapshot: Snapshot, match: Match, name: str) -> TensorMetadata:
    if match.version is None:
        head = engine.backbone.base
        assert head is not None  # nothing else is without a version
        classes, parameters = head.classes, dict[str, object](problem=head.problem)
    else:
        facts = snapshot.catalog.version(match.name, match.version).facts
        classes = facts.classes
        parameters = {"problem": facts.problem, "version": str(match.version)}
    return TensorMetadata(name=name, datatype="FP32", shape=[-1, classes], parameters=parameters)


# The repository


class IndexRequest(BaseModel):
    """`ready`: list only what can be asked."""

    ready: bool = False


class ControlRequest(BaseModel):
    """What a `load` or `unload` says beside the name."""

    parameters: OrNull[dict[str, Any]] = {}


class ModelState(Strict):
    """One version of a model, and whether it answers."""

    name: str
    version: str | None = left_out_if_none()
    state: Literal["READY", "UNAVAILABLE"] = "READY"
    reason: str = ""

    @classmethod
    def of(cls, state: TaskState) -> "ModelState":
        return cls(
            name=state.name,
            version=None if state.version is None else str(state.version),
            state="READY" if state.status in _ANSWERING else "UNAVAILABLE",
            reason=state.reason or "",
        )


async def read_index_request(request: Request) -> IndexRequest:
    return http.parse_json(
        await http.read_body(request, http.SMALL_BODY_BYTES) or b"{}", IndexRequest
    )


@router.post(
    "/repository/index",
    dependencies=requires(*_LOOK),
    responses=errors(400, 401, 408, 413, 422, 429, 503),
    openapi_extra=http.request_body(http.json_content(IndexRequest), required=False),
)
def repository_index(
    engine: EngineDep,
    identity: IdentityDep,
    body: Annotated[IndexRequest, Depends(read_index_request)],
) -> list[ModelState]:
    """The models that the caller may see, and their states."""
    states = [each for each in engine.snapshot.states() if identity.may(_LOOK, each.name)]
    listed = [ModelState(name=MULTITASK), *map(ModelState.of, states)]
    return [each for each in listed if each.state == "READY" or not body.ready]


@router.post(
    "/repository/models/{name:path}/load",
    dependencies=requires_audited("admin"),
    response_class=Response,
    responses=errors(400, 401, 403, 404, 408, 413, 422, 429, 503),
    openapi_extra=http.request_body(http.json_content(ControlRequest), required=False),
)
async def repository_model_load(
    request: Request, name: Name, runtime: RuntimeDep, engine: EngineDep
) -> Response:
    """Read the store, and have a model on the device when this answers."""
    body = await http.read_body(request, runtime.settings.body_bytes) or b"{}"
    asked = await http.off_loop(lambda: http.parse_json(body, ControlRequest), size=len(body))
    parameters = asked.parameters
    if any(key == "config" or key.startswith("file:") for key in parameters):
        raise InvalidRequest(
            "A model is loaded as it was published: to change it, publish a bundle (PUT /tasks/…)."
        )
    if name in (BASE, MULTITASK):
        check_ready(engine, name, None)
    else:
        await to_thread.run_sync(engine.reload, name, limiter=runtime.changes)
    return Response()


@router.post(
    "/repository/models/{name:path}/unload",
    dependencies=requires_audited("admin"),
    response_class=Response,
    responses=errors(401, 403, 404, 422, 503),
)
async def repository_model_unload(name: Name, runtime: RuntimeDep, engine: EngineDep) -> Response:
    """Stop answering for a model on this server, until it is loaded again."""
    if name in (BASE, MULTITASK):
        raise InvalidRequest(f"Model '{name}' belongs to the backbone and is always loaded.")
    await to_thread.run_sync(engine.unload, name, limiter=runtime.changes)
    return Response()
