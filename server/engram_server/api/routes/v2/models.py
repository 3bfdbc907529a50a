"""Tasks as models of the Open Inference Protocol: metadata, configuration and state.

A model's name may contain one slash (`team/name`), hence `:path`; routes with a longer suffix come
first.
"""

from collections.abc import Iterable
from functools import partial
from importlib import metadata
from typing import Annotated, Any, Literal

from engram_bundle.names import BASE_TASK
from fastapi import APIRouter, Depends, Path, Request, Response
from pydantic import BaseModel

from engram_server.access.identity import Identity, Scope
from engram_server.api import bodies
from engram_server.api import dependencies as deps
from engram_server.api.auth import MULTITASK, IdentityDep, requires
from engram_server.api.direct import Json
from engram_server.api.problems import responses
from engram_server.api.routes.v2.tensors import OrNull
from engram_server.engine.engine import Engine
from engram_server.engine.tasks.snapshot import ResolvedTask, Snapshot, TaskState, unavailable
from engram_server.errors import DeviceFailed, InvalidRequest, NotStarted
from engram_server.runtime import Runtime

IMAGE = "image"
PIXEL_VALUES = "pixel_values"
SCORES = "scores"
PLATFORM = "engram"
EXTENSIONS = ["binary_tensor_data", "classification", "model_configuration", "model_repository"]

_USABLE = ("ready", "on_demand")

router = APIRouter(prefix="/v2", tags=["open inference"], route_class=deps.FairRoute)

Name = Annotated[str, Path(max_length=256, description="A task's name, or `multitask`.")]
_VERSION_PARAMETER = {
    "in": "path",
    "name": "version",
    "required": True,
    "description": "The number of a version.",
    "schema": {"type": "integer", "minimum": 1, "maximum": deps.LARGEST_NUMBER},
}


async def get_version(request: Request) -> int | None:
    text: str | None = request.path_params.get("version")
    return None if text is None else parse_version(text)


def parse_version(text: str) -> int:
    if not (text.isascii() and text.isdecimal() and len(text) <= 18 and int(text) > 0):
        raise InvalidRequest(f"'{text}' is not the number of a version.")
    return int(text)


VersionDep = Annotated[int | None, Depends(get_version)]


def with_version(options: dict[str, Any]) -> dict[str, Any]:
    """The options of a route for one version, whose path has `{version}`."""
    extra = options.get("openapi_extra", {})
    parameters = [_VERSION_PARAMETER, *extra.get("parameters", ())]
    return {**options, "openapi_extra": {**extra, "parameters": parameters}}


class ProtocolError(BaseModel):
    """The protocol's error response."""

    error: str


def errors(*statuses: int) -> dict[int | str, dict[str, Any]]:
    return responses(*statuses, model=ProtocolError, media="application/json")


# The server


class ServerMetadata(deps.Strict):
    name: str
    version: str
    extensions: list[str]


@router.get("", dependencies=requires("any"), responses=errors(401))
async def server_metadata() -> ServerMetadata:
    """Describe the server and its protocol extensions."""
    version = metadata.version("engram-vit-server")
    return ServerMetadata(name="engram", version=version, extensions=EXTENSIONS)


@router.get("/health/live", dependencies=requires("public"), responses=errors(503))
async def server_live(runtime: deps.RuntimeDep) -> dict[str, bool]:
    """Liveness, like `/livez`."""
    if broken := runtime.broken:
        raise DeviceFailed(f"The server must be restarted: {'; '.join(broken)}")
    return {"live": True}


@router.get("/health/ready", dependencies=requires("public"), responses=errors(503))
async def server_ready(runtime: deps.RuntimeDep) -> dict[str, bool]:
    """Readiness, like `/readyz`."""
    _check_server(runtime)
    return {"ready": True}


def _check_server(runtime: Runtime) -> None:
    if reasons := runtime.reasons:
        raise NotStarted(f"The server is not ready: {'; '.join(reasons)}")


# Models. Plain functions, which FastAPI runs in threads: `multitask` lists all tasks.


class ModelReady(deps.Strict):
    name: str
    ready: Literal[True]


class TensorMetadata(deps.Strict):
    name: str
    datatype: str
    shape: list[int]
    parameters: Json | None = deps.omit_if_none("For outputs: task type, version and labels.")


class ModelMetadata(deps.Strict):
    """Metadata of a model."""

    name: str
    versions: list[str]
    platform: str
    inputs: list[TensorMetadata]
    outputs: list[TensorMetadata]


class TensorConfig(deps.Strict):
    name: str
    data_type: str
    format: str | None = deps.omit_if_none()
    dims: list[int]
    optional: bool | None = deps.omit_if_none()


class ModelConfig(deps.Strict):
    """A model's configuration in Triton's format: shapes without the batch."""

    name: str
    platform: str
    backend: str
    max_batch_size: int
    input: list[TensorConfig]
    output: list[TensorConfig]


# Clients of the protocol read a model's metadata before they use it.
LOOK: tuple[Scope, Scope] = ("predict", "read")
_MODEL: dict[str, Any] = {
    "dependencies": deps.requires_caught_up(*LOOK),
    "responses": errors(401, 404, 412, 422, 503),
}
_VERSION = with_version(_MODEL)


@router.get("/models/{name:path}/ready", name="model_ready", **_MODEL)
@router.get("/models/{name:path}/versions/{version}/ready", name="version_ready", **_VERSION)
def model_ready(name: Name, version: VersionDep, runtime: deps.RuntimeDep) -> ModelReady:
    """Readiness of a model, or of one version."""
    _check_server(runtime)
    check_ready(runtime.engine, name, version)
    return ModelReady(name=name, ready=True)


@router.get("/models/{name:path}/config", name="model_config", **_MODEL)
@router.get("/models/{name:path}/versions/{version}/config", name="version_config", **_VERSION)
def model_config(
    name: Name, version: VersionDep, runtime: deps.RuntimeDep, identity: IdentityDep
) -> ModelConfig:
    """The configuration of a model, or of one version, in Triton's format."""
    engine = runtime.engine
    outputs = _outputs(engine.tasks.snapshot, identity, reference(name, version))
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
                dims=[3, *engine.model.image_size],
                optional=True,
            ),
        ],
        output=[
            TensorConfig(name=each.name, data_type="TYPE_FP32", dims=each.shape[1:])
            for each in outputs
        ],
    )


@router.get("/models/{name:path}", name="model_metadata", **_MODEL)
@router.get("/models/{name:path}/versions/{version}", name="version_metadata", **_VERSION)
def model_metadata(
    name: Name, version: VersionDep, engine: deps.EngineDep, identity: IdentityDep
) -> ModelMetadata:
    """The inputs and outputs of a model, or of one version."""
    snapshot, ref = engine.tasks.snapshot, reference(name, version)
    outputs = _outputs(snapshot, identity, ref)
    versions: list[str] = []
    if ref is not None:
        (resolved,) = snapshot.resolve([ref])
        if resolved.labels is not None:
            outputs[0].parameters = {
                **(outputs[0].parameters or {}),
                "labels": list(resolved.labels),
            }
        task = snapshot.catalog.tasks.get(resolved.name)
        versions = [] if task is None else [str(each.version) for each in task.live]
    pixels = [-1, 3, *engine.model.image_size]
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


def reference(name: str, version: int | None) -> str | None:
    """The task reference of a model; None for `multitask`, which runs several tasks."""
    if version is not None:
        return f"{name}@{version}"
    return None if name == MULTITASK else name


def check_ready(engine: Engine, name: str, version: int | None) -> None:
    """UnknownTask or TaskUnavailable unless the model can be used."""
    ref = reference(name, version)
    if ref is None:
        return
    snapshot = engine.tasks.snapshot
    (resolved,) = snapshot.resolve([ref])
    state = snapshot.state_of(resolved.name, resolved.version)
    if state.status == "failed":
        raise unavailable({ref: state.reason or ""})


def _outputs(snapshot: Snapshot, identity: Identity, ref: str | None) -> list[TensorMetadata]:
    """The output of a task; for `multitask`, one for each ready task that the caller may see."""
    if ref is not None:
        return [_output(task, SCORES) for task in snapshot.resolve([ref])]
    return [
        _output(task, task.reference)
        for task in snapshot.resolve(None)
        if identity.allows(LOOK, task.name)
    ]


def _output(task: ResolvedTask, name: str) -> TensorMetadata:
    parameters: Json = {"task_type": task.task_type}
    if task.version is not None:
        parameters["version"] = str(task.version)
    shape = [-1, task.classes]
    return TensorMetadata(name=name, datatype="FP32", shape=shape, parameters=parameters)


# The repository


class IndexRequest(BaseModel):
    """`ready`: list only models that can be used."""

    ready: bool = False


class ControlRequest(BaseModel):
    """The body of a `load` or `unload` request."""

    parameters: OrNull[dict[str, Any]] = {}


class ModelState(deps.Strict):
    """The state of one version of a model."""

    name: str
    version: str | None = deps.omit_if_none()
    state: Literal["READY", "UNAVAILABLE"] = "READY"
    reason: str = ""

    @classmethod
    def of(cls, state: TaskState) -> "ModelState":
        return cls(
            name=state.name,
            version=None if state.version is None else str(state.version),
            state="READY" if state.status in _USABLE else "UNAVAILABLE",
            reason=state.reason or "",
        )


async def read_index_request(request: Request) -> IndexRequest:
    return await bodies.read_json(request, IndexRequest, empty=b"{}")


async def load_model(
    runtime: Runtime, identity: Identity, name: str, parameters: Iterable[str]
) -> None:
    """Read the store, and load a model onto the device. `parameters`: names of the request's."""
    if any(key == "config" or key.startswith("file:") for key in parameters):
        raise InvalidRequest(
            "A model cannot be changed by loading it: publish a bundle (PUT /tasks/…) instead."
        )
    engine = runtime.engine
    if name in (BASE_TASK, MULTITASK):
        check_ready(engine, name, None)
    else:
        await runtime.threads.changes.run(identity.id, partial(engine.tasks.reload, name))


async def unload_model(runtime: Runtime, identity: Identity, name: str) -> None:
    """Unload a model on this server until it is loaded again."""
    if name in (BASE_TASK, MULTITASK):
        raise InvalidRequest(f"Model '{name}' belongs to the backbone and is always loaded.")
    await runtime.threads.changes.run(identity.id, partial(runtime.engine.tasks.unload, name))


@router.post(
    "/repository/index",
    dependencies=requires(*LOOK),
    responses=errors(400, 401, 408, 413, 422, 429, 503),
    openapi_extra=deps.request_body(deps.json_content(IndexRequest), required=False),
)
def repository_index(
    engine: deps.EngineDep,
    identity: IdentityDep,
    body: Annotated[IndexRequest, Depends(read_index_request)],
) -> list[ModelState]:
    """List the models that the caller may see, with their states."""
    states = [each for each in engine.tasks.snapshot.states() if identity.allows(LOOK, each.name)]
    listed = [ModelState(name=MULTITASK), *map(ModelState.of, states)]
    return [each for each in listed if each.state == "READY" or not body.ready]


@router.post(
    "/repository/models/{name:path}/load",
    dependencies=[*deps.requires_audited("admin"), Depends(deps.unconditional)],
    response_class=Response,
    responses=errors(400, 401, 403, 404, 408, 413, 422, 429, 503),
    openapi_extra=deps.request_body(deps.json_content(ControlRequest), required=False),
)
async def repository_model_load(
    request: Request, name: Name, runtime: deps.RuntimeDep, identity: IdentityDep
) -> Response:
    """Read the store, and load a model onto the device."""
    limit = runtime.settings.body_bytes
    body = await bodies.read_json(request, ControlRequest, limit, empty=b"{}")
    await load_model(runtime, identity, name, body.parameters)
    return Response()


@router.post(
    "/repository/models/{name:path}/unload",
    dependencies=[*deps.requires_audited("admin"), Depends(deps.unconditional)],
    response_class=Response,
    responses=errors(401, 403, 404, 422, 503),
)
async def repository_model_unload(
    name: Name, runtime: deps.RuntimeDep, identity: IdentityDep
) -> Response:
    """Unload a model on this server until it is loaded again."""
    await unload_model(runtime, identity, name)
    return Response()
