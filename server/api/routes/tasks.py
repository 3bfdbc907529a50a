"""`/tasks`: what is served, and changing it.

A task's name may have one slash in it (`team/name`), hence `:path`; routes with more behind the
name come before those with less.
"""

from collections.abc import Callable
from functools import partial
from typing import Annotated, Any

from anyio import to_thread
from fastapi import APIRouter, Depends, Header, Path, Query, Request, Response
from fastapi.responses import JSONResponse

from server.api import tasks_json
from server.api.answers import Json
from server.api.bodies import SMALL_BODY_BYTES, parse_json, read_body, received_file
from server.api.changes import Condition, TaskChanges, etag_of, read_etags
from server.api.deps import ADMIN, CAUGHT_UP, READER, EngineDep, Runtime, RuntimeDep
from server.api.disconnects import while_connected
from server.api.openapi import BUNDLE_BODY, LABEL_BODY, problems
from server.api.schemas import (
    ChangeResult,
    History,
    LabelTarget,
    ManifestResult,
    PublishResult,
    TaskDetail,
    TaskList,
    Verdict,
    VersionList,
    VersionResult,
)
from server.api.waiting import Wait, WaitDep
from server.engine.tasks.snapshot import Snapshot

router = APIRouter(tags=["tasks"])

_FOREVER = "private, max-age=31536000, immutable"
_READ = problems(401, 404, 412, 422, 503)
_CHANGE = problems(401, 403, 404, 409, 412, 422, 503)
_LATE = "Made, and not served by all replicas in time: `replicas` says which are behind"
_CHANGED: dict[int | str, dict[str, Any]] = {
    200: {"model": ChangeResult},
    202: {"model": ChangeResult, "description": _LATE},
}
_UPLOAD = problems(401, 403, 404, 409, 412, 413, 415, 422, 503)

Name = Annotated[str, Path(description="A task's name, with at most one slash.", examples=["pets"])]
Number = Annotated[int, Path(ge=1, le=10**18 - 1, description="A version.")]
Label = Annotated[str, Path(description="A label.")]


async def get_condition(
    if_match: Annotated[
        str | None, Header(description="Change the task only if this is its ETag.")
    ] = None,
) -> Condition:
    return Condition.from_headers(if_match, None)


async def get_upload_condition(
    if_match: Annotated[
        str | None, Header(description="Publish only if this is the task's ETag.")
    ] = None,
    if_none_match: Annotated[
        str | None, Header(description="`*`: publish only if there is no such task.")
    ] = None,
) -> Condition:
    return Condition.from_headers(if_match, if_none_match)


async def get_changes(request: Request, engine: EngineDep) -> TaskChanges:
    host = request.client.host if request.client else "unknown"
    return TaskChanges(engine, actor=f"http:{host}")


ConditionDep = Annotated[Condition, Depends(get_condition)]
UploadConditionDep = Annotated[Condition, Depends(get_upload_condition)]
ChangesDep = Annotated[TaskChanges, Depends(get_changes)]


# Reading


@router.get(
    "/tasks",
    operation_id="list_tasks",
    dependencies=CAUGHT_UP,
    responses={200: {"model": TaskList}, **problems(401, 412, 422, 503)},
)
async def list_tasks(engine: EngineDep) -> Response:
    """All tasks and whether they are ready."""
    return JSONResponse(await to_thread.run_sync(tasks_json.list_json, engine))


@router.get(
    "/tasks/{task:path}/versions/{version}/bundle",
    operation_id="download_bundle",
    dependencies=CAUGHT_UP,
    response_class=Response,
    responses={
        200: {
            "content": {
                "application/octet-stream": {"schema": {"type": "string", "format": "binary"}}
            }
        },
        304: {"description": "The caller has it already"},
        **_READ,
    },
)
async def download_bundle(
    task: Name,
    version: Number,
    engine: EngineDep,
    if_none_match: Annotated[str | None, Header()] = None,
) -> Response:
    """The bundle of a version, as it was uploaded."""
    digest = engine.snapshot.catalog.version(task, version).digest
    headers = {"ETag": f'"{digest}"', "Cache-Control": _FOREVER}
    if {headers["ETag"], "*"} & read_etags(if_none_match or ""):
        return Response(status_code=304, headers=headers)
    data = await to_thread.run_sync(engine.read_bytes, digest)
    name = f"{task.replace('/', '-')}-{version}.safetensors"
    headers["Content-Disposition"] = f'attachment; filename="{name}"'
    return Response(data, headers=headers, media_type="application/octet-stream")


@router.get(
    "/tasks/{task:path}/versions/{version}/manifest",
    operation_id="read_manifest",
    dependencies=CAUGHT_UP,
    responses={
        200: {"model": ManifestResult},
        304: {"description": "The caller has it already"},
        **_READ,
    },
)
async def read_manifest(
    task: Name,
    version: Number,
    engine: EngineDep,
    if_none_match: Annotated[str | None, Header()] = None,
) -> Response:
    """What the bundle of a version says of itself: classes, metrics, training, licence."""
    digest = engine.snapshot.catalog.version(task, version).digest
    headers = {"ETag": f'"{digest}"', "Cache-Control": "private, no-cache"}
    if {headers["ETag"], "*"} & read_etags(if_none_match or ""):
        return Response(status_code=304, headers=headers)
    bundle = await to_thread.run_sync(engine.read_bundle, digest)
    return JSONResponse(bundle.manifest.model_dump(mode="json"), headers=headers)


@router.get(
    "/tasks/{task:path}/versions/{version}",
    operation_id="describe_version",
    dependencies=CAUGHT_UP,
    responses={200: {"model": VersionResult}, **_READ},
)
async def describe_version(task: Name, version: Number, engine: EngineDep) -> Response:
    """One version of a task."""
    return JSONResponse(await to_thread.run_sync(tasks_json.version_json, engine, task, version))


@router.get(
    "/tasks/{task:path}/versions",
    operation_id="list_versions",
    dependencies=CAUGHT_UP,
    responses={200: {"model": VersionList}, **_READ},
)
async def list_versions(task: Name, engine: EngineDep) -> Response:
    """The live versions of a task."""
    return JSONResponse(await to_thread.run_sync(tasks_json.versions_json, engine, task))


@router.get(
    "/tasks/{task:path}/history",
    operation_id="task_history",
    dependencies=CAUGHT_UP,
    responses={200: {"model": History}, **_READ},
)
async def task_history(
    task: Name, engine: EngineDep, limit: Annotated[int, Query(ge=1, le=1000)] = 50
) -> Response:
    """Who changed what about a task, newest first."""
    if task not in engine.snapshot.catalog.all_tasks:
        engine.snapshot.catalog.task(task)
    entries = await to_thread.run_sync(engine.history, task, limit)
    return JSONResponse(
        {"task": task, "entries": [tasks_json.entry_json(entry) for entry in entries]}
    )


@router.get(
    "/tasks/{task:path}",
    operation_id="describe_task",
    dependencies=CAUGHT_UP,
    responses={200: {"model": TaskDetail}, **_READ},
)
async def describe_task(task: Name, engine: EngineDep) -> Response:
    """A task, its labels and its versions. The ETag stands for its labels and live versions."""
    snapshot = engine.snapshot
    body = await to_thread.run_sync(tasks_json.task_json, engine, snapshot, task)
    return JSONResponse(body, headers=_etag(task, snapshot))


@router.post(
    "/tasks/validate",
    operation_id="validate_bundle",
    dependencies=READER,
    responses={200: {"model": Verdict}, **problems(401, 413, 415, 503)},
    openapi_extra={"requestBody": BUNDLE_BODY},
)
async def validate_bundle(request: Request, runtime: RuntimeDep, engine: EngineDep) -> Response:
    """What a bundle is and whether it could be served here. Nothing is stored."""
    async with received_file(request, runtime.settings.bundle_bytes) as file:
        bundle, against = await to_thread.run_sync(engine.validate, file, limiter=runtime.checks)
    return JSONResponse(
        {
            "valid": against is None,
            "digest": None if bundle is None else bundle.digest,
            "problems": [] if against is None else [against],
            "manifest": None if bundle is None else bundle.manifest.model_dump(mode="json"),
            "classes": None if bundle is None else bundle.classes,
            "memory_tokens": None if bundle is None else bundle.memory_tokens,
        }
    )


# Changing


@router.put(
    "/tasks/{task:path}/labels/{label}",
    operation_id="move_label",
    dependencies=ADMIN,
    responses={**_CHANGED, **_CHANGE, **problems(400, 413)},
    openapi_extra={"requestBody": LABEL_BODY},
)
async def move_label(
    request: Request,
    task: Name,
    label: Label,
    runtime: RuntimeDep,
    changes: ChangesDep,
    condition: ConditionDep,
    wait: WaitDep,
) -> Response:
    """Point a label to a version."""
    target = parse_json(await read_body(request, SMALL_BODY_BYTES), LabelTarget)
    change = partial(changes.label, task, label, target.version, condition)
    return await _changed(request, runtime, task, change, wait)


@router.delete(
    "/tasks/{task:path}/labels/{label}",
    operation_id="remove_label",
    dependencies=ADMIN,
    responses={**_CHANGED, **_CHANGE},
)
async def remove_label(
    request: Request,
    task: Name,
    label: Label,
    runtime: RuntimeDep,
    changes: ChangesDep,
    condition: ConditionDep,
    wait: WaitDep,
) -> Response:
    """Take a label away. `default` cannot be."""
    change = partial(changes.remove_label, task, label, condition)
    return await _changed(request, runtime, task, change, wait)


@router.post(
    "/tasks/{task:path}/rollback",
    operation_id="roll_back",
    dependencies=ADMIN,
    responses={**_CHANGED, **_CHANGE},
)
async def roll_back(
    request: Request,
    task: Name,
    runtime: RuntimeDep,
    changes: ChangesDep,
    condition: ConditionDep,
    wait: WaitDep,
    label: Annotated[str, Query(description="The label to move back.")] = "default",
) -> Response:
    """Undo the last move of a label; twice goes two back."""
    change = partial(changes.rollback, task, label, condition)
    return await _changed(request, runtime, task, change, wait)


@router.post(
    "/tasks/{task:path}/restore",
    operation_id="restore_task",
    dependencies=ADMIN,
    responses={**_CHANGED, **_CHANGE},
)
async def restore_task(
    request: Request,
    task: Name,
    runtime: RuntimeDep,
    changes: ChangesDep,
    wait: WaitDep,
    version: Annotated[int | None, Query(ge=1, le=10**18 - 1)] = None,
) -> Response:
    """Bring back a version, or what the retirement of the whole task took."""
    change = partial(changes.restore, task, version)
    return await _changed(request, runtime, task, change, wait)


@router.delete(
    "/tasks/{task:path}/versions/{version}",
    operation_id="retire_version",
    dependencies=ADMIN,
    responses={**_CHANGED, **_CHANGE},
)
async def retire_version(
    request: Request,
    task: Name,
    version: Number,
    runtime: RuntimeDep,
    changes: ChangesDep,
    condition: ConditionDep,
    wait: WaitDep,
) -> Response:
    """Take a version out of service. Its bundle is kept."""
    change = partial(changes.retire, task, version, condition)
    return await _changed(request, runtime, task, change, wait)


@router.delete(
    "/tasks/{task:path}",
    operation_id="retire_task",
    dependencies=ADMIN,
    responses={**_CHANGED, **_CHANGE},
)
async def retire_task(
    request: Request,
    task: Name,
    runtime: RuntimeDep,
    changes: ChangesDep,
    condition: ConditionDep,
    wait: WaitDep,
) -> Response:
    """Take a whole task out of service. Its bundles are kept; `restore` brings it back."""
    change = partial(changes.retire, task, None, condition)
    return await _changed(request, runtime, task, change, wait)


@router.put(
    "/tasks/{task:path}",
    operation_id="publish",
    dependencies=ADMIN,
    status_code=201,
    responses={
        200: {"model": PublishResult, "description": "The task had these bytes already"},
        201: {"model": PublishResult},
        202: {"model": PublishResult, "description": _LATE},
        **_UPLOAD,
    },
    openapi_extra={"requestBody": BUNDLE_BODY},
)
async def publish(
    request: Request,
    task: Name,
    runtime: RuntimeDep,
    changes: ChangesDep,
    condition: UploadConditionDep,
    wait: WaitDep,
    label: Annotated[
        tuple[str, ...],
        Query(description="Labels to point to it; others than `default` leave that alone."),
    ] = ("default",),
) -> Response:
    """Upload a bundle as the next version of a task. It is being served when this answers."""
    async with received_file(request, runtime.settings.bundle_bytes) as file:
        done = await to_thread.run_sync(
            changes.publish, task, file, label, condition, limiter=runtime.changes
        )
    snapshot, version = done.snapshot, done.version
    assert version is not None
    info = snapshot.catalog.all_tasks[task]
    body = {
        "task": task,
        "version": version,
        "digest": info.versions[version].digest,
        "generation": snapshot.generation,
        "created": done.created,
        "labels": list(info.labels_of(version)),
    }
    headers = {"Location": f"/tasks/{task}/versions/{version}", **_etag(task, snapshot)}
    status = await _waited(request, wait, body, 201 if done.created else 200)
    return JSONResponse(body, status, headers)


async def _changed(
    request: Request, runtime: Runtime, task: str, change: Callable[[], Snapshot], wait: Wait
) -> Response:
    """Make a change in a thread, one at a time, and say what the task is now."""
    snapshot = await to_thread.run_sync(change, limiter=runtime.changes)
    body = tasks_json.change_json(task, snapshot.catalog)
    status = await _waited(request, wait, body, 200)
    return JSONResponse(body, status, _etag(task, snapshot))


async def _waited(request: Request, wait: Wait, body: Json, status: int) -> int:
    """Wait for the other replicas if that was asked for; the answer then says who serves it."""
    generation = body["generation"]
    assert isinstance(generation, int)
    waited = await while_connected(request, wait.until_served(generation))
    if waited is None:
        return status
    body["replicas"] = waited.to_json()
    return status if waited.complete else 202


def _etag(task: str, snapshot: Snapshot) -> dict[str, str]:
    etag = etag_of(snapshot.catalog.tasks.get(task))
    return {} if etag is None else {"ETag": etag}
