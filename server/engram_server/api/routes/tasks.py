"""`/tasks`: list, describe, publish and change tasks.

A task's name may contain one slash (`team/name`), hence `:path`; routes with a longer suffix come
first.

The ETag of a task represents its aliases and live versions. A change may be conditional: `If-Match`
with that ETag (the task has not changed since), `If-None-Match: *` (there is no such task yet).
"""

import hashlib
import json
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path as FilePath
from typing import Annotated, Any, Final, Literal, TypeVar

import engram_store
from anyio import to_thread
from engram_bundle import InvalidName, TaskBundle, check_task_name
from engram_bundle.names import Digest
from fastapi import APIRouter, Depends, Header, Path, Query, Request, Response
from fastapi.responses import StreamingResponse
from pydantic import BaseModel, ConfigDict, Field, JsonValue, RootModel

from engram_server.access.identity import Identity, Scope
from engram_server.api import dependencies as deps
from engram_server.api.audit import begin_audit
from engram_server.api.auth import MULTITASK, IdentityDep, requires
from engram_server.api.bodies import read_json, received_file
from engram_server.api.inference import while_connected
from engram_server.api.problems import responses
from engram_server.api.routes.replicas import Wait, WaitDep, WaitResult
from engram_server.api.routes.task_list import (
    TaskList,
    TaskQuery,
    TaskSummary,
    list_page,
    summarise,
)
from engram_server.documentation import BUNDLE_FORMAT
from engram_server.engine.engine import Engine
from engram_server.engine.tasks.service import PublishOutcome
from engram_server.engine.tasks.snapshot import Snapshot, Status
from engram_server.errors import EngramError, InvalidRequest, NotPermitted
from engram_server.runtime import RequestRecord, Runtime

T = TypeVar("T")

# Suffixes of paths below a task: a task `team/history` would hide the history of a task `team`.
RESERVED = frozenset(
    {
        *("aliases", "comparison", "corrections", "drift", "examples", "feedback", "history"),
        *("promote", "restore", "rollback", "versions"),
    }
)

READ: Final[tuple[Scope, ...]] = ("read",)
_CHUNK_BYTES = 1024 * 1024
_IMMUTABLE = "private, max-age=31536000, immutable"
_BINARY: dict[str, Any] = {"application/octet-stream": deps.BINARY}
_READ = responses(401, 404, 412, 422, 503)
_BUNDLE_BODY = deps.request_body(
    _BINARY, f"A bundle: a .safetensors file as described in {BUNDLE_FORMAT}."
)
_LATE = "Committed, not served by all replicas in time: `replicas` lists those behind"

Name = Annotated[str, Path(description="The name of a task.", examples=["cifar10"])]
Number = Annotated[int, Path(ge=1, le=deps.LARGEST_NUMBER, description="The number of a version.")]
Alias = Annotated[str, Path(description="The name of an alias.", examples=["canary"])]
IfNoneMatch = Annotated[str | None, Header()]
PurgeFlag = Annotated[bool, Query(description="Delete it for good. This cannot be undone.")]

reading = APIRouter(
    tags=["tasks"], dependencies=deps.requires_caught_up(*READ), route_class=deps.FairRoute
)
checking = APIRouter(tags=["tasks"], dependencies=requires("publish"))
changing = APIRouter(
    tags=["tasks"],
    dependencies=deps.requires_audited("publish"),
    responses=responses(401, 404, 409, 412, 422, 503),
)

# Members of a result that the audit log records.
_AUDITED = {"version", "digest", "generation", "aliases", "purged"}


# Responses


class VersionResult(engram_store.VersionFacts):
    """One published version of a task, and its status on this server."""

    model_config = ConfigDict(extra="forbid", populate_by_name=True)

    version: int
    size: int = Field(alias="size_bytes")
    aliases: list[str] = Field(description="Aliases of this version.", examples=[["default"]])
    status: Status = Field(description="`on_demand`: loaded by the first request for it.")
    reason: str | None = Field(description="Why it cannot be used.")
    resident: bool = Field(description="Whether it is on the device now.")
    generation: int
    published: str = Field(examples=["2026-01-31T12:00:00.000Z"])
    actor: str
    fingerprint: str = Field("", exclude=True)  # the same for all tasks of a server

    @classmethod
    def of_info(cls, snapshot: Snapshot, info: engram_store.VersionInfo) -> "VersionResult":
        state = snapshot.state_of(info.task, info.version)
        return cls(
            **dict(info.facts),
            version=info.version,
            aliases=list(snapshot.catalog.task(info.task).aliases_of(info.version)),
            status=state.status,
            reason=state.reason,
            resident=state.resident,
            generation=info.generation,
            published=info.time,
            actor=info.actor,
        )


class CanaryResult(deps.Strict):
    version: int
    share: float


class TaskDetail(TaskSummary):
    """A task with its versions, and its class labels if it is loaded."""

    generation: int
    rollback_target: int | None = Field(
        description="The version that `POST rollback` moves `default` to; null if there is none."
    )
    canaries: dict[str, CanaryResult] = Field(
        description="By alias, the version that it sends a share of its images to."
    )
    class_labels: list[str] | None = Field(examples=[["cat", "dog", "rabbit"]])
    version_details: list[VersionResult] = Field(description="Live versions, oldest first.")


class VersionList(deps.Strict):
    task: str
    generation: int
    versions: list[VersionResult]


class ManifestResult(RootModel[dict[str, JsonValue]]):
    """The manifest of a bundle."""


class HistoryEntry(BaseModel):
    """One entry of the store's log about a task; further members depend on `kind`."""

    model_config = ConfigDict(extra="allow")

    generation: int
    time: str
    actor: str
    kind: Literal["publish", "alias", "canary", "retire", "restore", "purge"]
    task: str

    @classmethod
    def of(cls, entry: engram_store.Entry) -> "HistoryEntry":
        """Convert an entry, without the members that only the store needs."""
        stamp = entry.stamp.model_dump(mode="json", include={"generation", "time", "actor"})
        return cls(**stamp, **entry.event.model_dump(mode="json"))


class History(deps.Strict):
    task: str
    entries: list[HistoryEntry] = Field(description="Newest first.")


class Verdict(deps.Strict):
    """The content of a bundle, and whether this server could serve it."""

    valid: bool
    digest: Digest | None
    problems: list[str] = Field(description="Reasons why it cannot be served.")
    manifest: dict[str, JsonValue] | None
    classes: int | None
    memory_tokens: int | None


class AliasTarget(deps.Strict):
    version: int = Field(ge=1, le=deps.LARGEST_NUMBER)
    share: float | None = Field(
        None,
        ge=0,
        le=1,
        description="Do not move the alias: send this share of its images to the version, always "
        "the same images; 0 ends it.",
    )


class _Changed(deps.Strict):
    task: str
    generation: int
    replicas: WaitResult | None = deps.omit_if_none("With `wait=all`.")


class PublishResult(_Changed):
    """A published version, which this server serves now."""

    version: int
    digest: Digest
    created: bool = Field(description="False if the task had a version with the same bytes.")
    aliases: list[str] = Field(description="Aliases of this version.")

    @classmethod
    def members(cls, outcome: PublishOutcome) -> dict[str, Any]:
        task = outcome.snapshot.catalog.all_tasks[outcome.task]
        return {
            "task": outcome.task,
            "generation": outcome.snapshot.generation,
            "version": outcome.version,
            "digest": outcome.digest,
            "created": outcome.created,
            "aliases": list(task.aliases_of(outcome.version)),
        }


class ChangeResult(_Changed):
    """A task after a change, which this server serves now."""

    aliases: dict[str, int]
    versions: list[int] = Field(description="Live versions; empty for a retired task.")
    purged: list[int] | None = deps.omit_if_none("With `purge`: all purged versions of the task.")


# Reading. Plain functions, which FastAPI runs in threads: an unknown name is compared with the
# names of all tasks, and there may be thousands.


@reading.get("/tasks", responses=responses(401, 412, 422, 503))
def list_tasks(
    engine: deps.EngineDep, identity: IdentityDep, query: Annotated[TaskQuery, Query()]
) -> TaskList:
    """List the tasks that the caller may read, and their status, in pages."""
    return list_page(engine.tasks.snapshot, engine.model.name, identity, query)


async def limit_downloads(
    request: Request, task: Name, version: Number, runtime: deps.RuntimeDep, engine: deps.EngineDep
) -> None:
    """Limit concurrent downloads until the response is sent: each bundle is in memory."""
    size = engine.tasks.snapshot.catalog.version(task, version).facts.size
    deps.hold(request, runtime.pools.downloads, 1, "downloads")
    deps.hold(request, runtime.pools.answer_bytes, size, "bytes of responses")


@reading.get(
    "/tasks/{task:path}/versions/{version}/bundle",
    response_class=Response,
    dependencies=[Depends(limit_downloads), Depends(begin_audit)],
    responses={
        200: {"content": _BINARY},
        304: {"description": "Not modified"},
        **_READ,
        **responses(429),
    },
)
def download_bundle(
    task: Name, version: Number, engine: deps.EngineDep, if_none_match: IfNoneMatch = None
) -> Response:
    """Download the bundle of a version, as it was uploaded."""
    digest = engine.tasks.snapshot.catalog.version(task, version).digest
    headers = {"ETag": f'"{digest}"', "Cache-Control": _IMMUTABLE}
    if deps.etag_matches(if_none_match, headers["ETag"]):
        return Response(status_code=304, headers=headers)
    name = f"{task.replace('/', '-')}-{version}.safetensors"
    headers["Content-Disposition"] = f'attachment; filename="{name}"'
    content = engine.tasks.read_bytes(digest)
    headers["Content-Length"] = str(len(content))
    return StreamingResponse(_chunks(content), 200, headers, "application/octet-stream")


async def _chunks(content: bytes) -> AsyncIterator[memoryview]:
    for start in range(0, len(content), _CHUNK_BYTES):
        yield memoryview(content)[start : start + _CHUNK_BYTES]


@reading.get(
    "/tasks/{task:path}/versions/{version}/manifest",
    response_model=ManifestResult,
    responses={304: {"description": "Not modified"}, **_READ},
)
def read_manifest(
    task: Name,
    version: Number,
    engine: deps.EngineDep,
    response: Response,
    if_none_match: IfNoneMatch = None,
) -> ManifestResult | Response:
    """The manifest of a version: classes, metrics, training, licence."""
    digest = engine.tasks.snapshot.catalog.version(task, version).digest
    headers = {"ETag": f'"{digest}"', "Cache-Control": "private, no-cache"}
    if deps.etag_matches(if_none_match, headers["ETag"]):
        return Response(status_code=304, headers=headers)
    response.headers.update(headers)
    return ManifestResult(engine.tasks.read_bundle(digest).manifest.model_dump(mode="json"))


@reading.get("/tasks/{task:path}/versions/{version}", responses=_READ)
def describe_version(task: Name, version: Number, engine: deps.EngineDep) -> VersionResult:
    """Describe one version of a task."""
    snapshot = engine.tasks.snapshot
    return VersionResult.of_info(snapshot, snapshot.catalog.version(task, version))


@reading.get("/tasks/{task:path}/versions", responses=_READ)
def list_versions(task: Name, engine: deps.EngineDep) -> VersionList:
    """List the live versions of a task."""
    snapshot = engine.tasks.snapshot
    versions = [VersionResult.of_info(snapshot, info) for info in snapshot.catalog.task(task).live]
    return VersionList(task=task, generation=snapshot.generation, versions=versions)


@reading.get("/tasks/{task:path}/history", responses=_READ)
def task_history(
    task: Name, engine: deps.EngineDep, limit: Annotated[int, Query(ge=1, le=1000)] = 50
) -> History:
    """List the changes of a task, newest first."""
    catalog = engine.tasks.snapshot.catalog
    if task not in catalog.all_tasks:
        catalog.task(task)  # raises UnknownTask
    entries = [HistoryEntry.of(entry) for entry in engine.tasks.history(task, limit)]
    return History(task=task, entries=entries)


@reading.get("/tasks/{task:path}", responses=_READ)
def describe_task(task: Name, engine: deps.EngineDep, response: Response) -> TaskDetail:
    """Describe a task, its aliases and its versions. The ETag represents its state."""
    snapshot = engine.tasks.snapshot
    summary = summarise(snapshot, task)
    info = snapshot.catalog.tasks.get(task)
    labels = class_labels(snapshot, task)
    response.headers.update(_etag_header(snapshot, task))
    return TaskDetail(
        **summary,
        generation=snapshot.generation,
        rollback_target=info.rollback_target() if info else None,
        canaries={
            alias: CanaryResult(**canary._asdict())
            for alias, canary in (info.canaries if info else {}).items()
        },
        class_labels=None if labels is None else list(labels),
        version_details=[VersionResult.of_info(snapshot, each) for each in info.live]
        if info
        else [],
    )


@checking.post(
    "/tasks/validate", responses=responses(401, 408, 413, 415, 429, 503), openapi_extra=_BUNDLE_BODY
)
async def validate_bundle(
    request: Request, runtime: deps.RuntimeDep, engine: deps.EngineDep, identity: IdentityDep
) -> Verdict:
    """Check whether this server could serve a bundle. Nothing is stored."""
    async with received_file(request, runtime.settings.bundle_bytes) as file:
        # Only now: a slow upload must not keep others from validating.
        await deps.take_slot(request, runtime.pools.validations, "validations")
        validate = partial(engine.tasks.validate, file)
        bundle, reason = await runtime.threads.checks.run(identity.id, validate)
    if bundle is not None:
        await to_thread.run_sync(check_parents, identity, engine, bundle)
    return Verdict(
        valid=reason is None,
        digest=None if bundle is None else bundle.digest,
        problems=[] if reason is None else [reason],
        manifest=None if bundle is None else bundle.manifest.model_dump(mode="json"),
        classes=None if bundle is None else bundle.classes,
        memory_tokens=None if bundle is None else bundle.memory_tokens,
    )


def class_labels(snapshot: Snapshot, ref: str) -> tuple[str, ...] | None:
    """The class labels of a task; None while it is not loaded here."""
    try:
        (task,) = snapshot.resolve([ref])
    except EngramError:
        return None
    return task.labels


# Changing


def etag_of(task: engram_store.TaskInfo | None) -> str | None:
    """The ETag of a task's state, quoted; None if the task does not exist.

    It includes the last change, because aliases and versions alone do not determine where a
    rollback goes: after 2, 3, 2 it goes to 3.
    """
    if task is None or not task.is_live:
        return None
    versions = [(v.version, v.digest) for v in task.live]
    state = [sorted(task.aliases.items()), versions, task.changes[-1]]
    return f'"{hashlib.sha256(json.dumps(state).encode()).hexdigest()[:32]}"'


def _etag_header(snapshot: Snapshot, task: str) -> dict[str, str]:
    etag = etag_of(snapshot.catalog.tasks.get(task))
    return {} if etag is None else {"ETag": etag}


async def get_match(
    task: Name,
    if_match: Annotated[
        str | None, Header(description="Change the task only if this is its ETag.")
    ] = None,
) -> engram_store.Condition | None:
    """The condition that the task has one of the ETags in the header."""
    if if_match is None:
        return None
    tags = deps.read_etags(if_match)

    def check(catalog: engram_store.Catalog) -> None:
        now = etag_of(catalog.tasks.get(task))
        if now is None:
            raise engram_store.PreconditionFailed(
                f"There is no task '{task}' to match.", names=[task]
            )
        if tags.isdisjoint({now, "*"}):
            raise engram_store.PreconditionFailed(
                f"Task '{task}' has changed, and its ETag is now {now}: read it again and retry.",
                names=[task],
            )

    return check


MatchDep = Annotated[engram_store.Condition | None, Depends(get_match)]


async def get_condition(request: Request, matching: MatchDep) -> engram_store.Condition | None:
    deps.reject_conditions(request, deps.IF_NONE_MATCH)
    return matching


async def get_publish_condition(
    request: Request,
    task: Name,
    identity: IdentityDep,
    matching: MatchDep,
    if_none_match: Annotated[
        str | None, Header(description="`*`: publish only if there is no such task.")
    ] = None,
) -> engram_store.Condition | None:
    if if_none_match is not None and if_none_match.strip() != "*":
        raise InvalidRequest("If-None-Match must be '*': publish only if there is no such task.")
    conditional = all_of(
        matching, None if if_none_match is None else engram_store.only_if_absent(task)
    )
    declared = request.headers.get("Content-Length", "")
    size = int(declared[:20]) if declared.isdecimal() else 0

    def check(catalog: engram_store.Catalog) -> None:
        conditional(catalog)
        if identity.quota is not None:
            identity.quota.check_storage(catalog, identity.id, task, size)

    return check


def all_of(*conditions: engram_store.Condition | None) -> engram_store.Condition:
    def check(catalog: engram_store.Catalog) -> None:
        for condition in conditions:
            if condition is not None:
                condition(catalog)

    return check


@dataclass(frozen=True, slots=True)
class Changes:
    """Makes the changes of one request, one at a time on this server."""

    request: Request
    response: Response
    runtime: Runtime
    identity: Identity
    wait: Wait

    @property
    def actor(self) -> str:
        return self.identity.id

    async def run(self, work: Callable[[], T]) -> T:
        return await self.runtime.threads.changes.run(self.actor, work)

    async def make(
        self, change: engram_store.Change, condition: engram_store.Condition | None = None
    ) -> ChangeResult:
        """Commit a change and describe the task after it."""
        tasks = self.runtime.engine.tasks
        snapshot = await self.run(
            lambda: tasks.commit(change, actor=self.actor, condition=condition)
        )
        catalog = snapshot.catalog
        task = catalog.tasks.get(change.task)
        result = ChangeResult(
            task=change.task,
            generation=catalog.generation,
            aliases={} if task is None else dict(sorted(task.aliases.items())),
            versions=[] if task is None else [info.version for info in task.live],
        )
        if isinstance(change, engram_store.Purge):
            result.purged = sorted(catalog.all_tasks[change.task].purged)
        await self._finish(result, snapshot)
        return result

    async def finish_publish(self, result: PublishResult, outcome: PublishOutcome) -> None:
        """Set the status and headers of a response to a publish, and wait for replicas."""
        self.response.status_code = 201 if outcome.created else 200
        self.response.headers["Location"] = f"/tasks/{outcome.task}/versions/{outcome.version}"
        await self._finish(result, outcome.snapshot)

    async def _finish(self, result: ChangeResult | PublishResult, snapshot: Snapshot) -> None:
        """Set the ETag, and with `wait=all` wait until the other replicas serve the change."""
        self.response.headers.update(_etag_header(snapshot, result.task))
        record: RequestRecord = self.request.state.record
        record.audit_details = result.model_dump(include=_AUDITED, exclude_none=True)
        waiting = self.wait.until_served(result.generation)
        result.replicas = await while_connected(self.request, waiting)
        if result.replicas is not None and not result.replicas.complete:
            self.response.status_code = 202


async def get_changes(
    request: Request,
    response: Response,
    runtime: deps.RuntimeDep,
    identity: IdentityDep,
    wait: WaitDep,
) -> Changes:
    return Changes(request, response, runtime, identity, wait)


ConditionDep = Annotated[engram_store.Condition | None, Depends(get_condition)]
PublishConditionDep = Annotated[engram_store.Condition | None, Depends(get_publish_condition)]
ChangesDep = Annotated[Changes, Depends(get_changes)]

_CHANGED: dict[int | str, dict[str, Any]] = {202: {"model": ChangeResult, "description": _LATE}}


@changing.put(
    "/tasks/{task:path}/aliases/{alias}",
    responses={**_CHANGED, **responses(400, 408, 413, 429)},
    openapi_extra=deps.request_body(deps.json_content(AliasTarget, example={"version": 2})),
)
async def move_alias(
    request: Request, task: Name, alias: Alias, condition: ConditionDep, changes: ChangesDep
) -> ChangeResult:
    """Point an alias to a version, or send a share of its images to one (a canary)."""
    target = await read_json(request, AliasTarget)
    if target.share is not None:
        canary = engram_store.SetCanary(task, alias, target.version, target.share)
        return await changes.make(canary, condition)
    return await changes.make(engram_store.MoveAlias(task, alias, target.version), condition)


@changing.delete("/tasks/{task:path}/aliases/{alias}", responses=_CHANGED)
async def remove_alias(
    task: Name, alias: Alias, condition: ConditionDep, changes: ChangesDep
) -> ChangeResult:
    """Remove an alias. `default` cannot be removed."""
    return await changes.make(engram_store.RemoveAlias(task, alias), condition)


@changing.post("/tasks/{task:path}/rollback", responses=_CHANGED)
async def roll_back(
    task: Name,
    condition: ConditionDep,
    changes: ChangesDep,
    alias: Annotated[str, Query(description="The alias to move back.")] = "default",
) -> ChangeResult:
    """Undo the last move of an alias; repeat to undo earlier moves."""
    return await changes.make(engram_store.RollBack(task, alias), condition)


@changing.post("/tasks/{task:path}/restore", responses=_CHANGED)
async def restore_task(
    task: Name,
    condition: ConditionDep,
    changes: ChangesDep,
    version: Annotated[int | None, Query(ge=1, le=deps.LARGEST_NUMBER)] = None,
) -> ChangeResult:
    """Restore a version, or the versions that retiring the task retired.

    A retired task has no ETag: `If-Match` restores only versions of live tasks.
    """
    return await changes.make(engram_store.Restore(task, version), condition)


@changing.delete("/tasks/{task:path}/versions/{version}", responses=_CHANGED)
async def retire_version(
    task: Name,
    version: Number,
    condition: ConditionDep,
    changes: ChangesDep,
    purge: PurgeFlag = False,
) -> ChangeResult:
    """Retire a version: its bundle is kept. Or purge it, also if it is retired."""
    retire = engram_store.Retire(task, version)
    return await changes.make(engram_store.Purge(task, (version,)) if purge else retire, condition)


@changing.delete("/tasks/{task:path}", responses=_CHANGED)
async def retire_task(
    task: Name, condition: ConditionDep, changes: ChangesDep, purge: PurgeFlag = False
) -> ChangeResult:
    """Retire a task: its bundles are kept, and `restore` undoes it. Or purge it.

    A purge deletes all versions, also retired ones, and the corrections of the task.
    """
    retire = engram_store.Retire(task)
    return await changes.make(engram_store.Purge(task) if purge else retire, condition)


@changing.put(
    "/tasks/{task:path}",
    status_code=201,
    responses={
        200: {"model": PublishResult, "description": "The task has this bundle already"},
        202: {"model": PublishResult, "description": _LATE},
        **responses(408, 413, 415, 429),
    },
    openapi_extra=_BUNDLE_BODY,
)
async def publish(
    request: Request,
    task: Name,
    condition: PublishConditionDep,
    changes: ChangesDep,
    alias: Annotated[tuple[str, ...], Query(description="Aliases to move to the new version.")] = (
        "default",
    ),
) -> PublishResult:
    """Upload a bundle as the next version of a task. It is served when the response arrives."""
    engine = changes.runtime.engine

    def commit(file: FilePath) -> PublishOutcome:
        check_new_name(task)
        change = engram_store.Publish(task, TaskBundle.load(file), alias)
        check_parents(changes.identity, engine, change.bundle)
        return engine.tasks.publish(change, actor=changes.actor, condition=condition)

    async with received_file(request, changes.runtime.settings.bundle_bytes) as file:
        outcome = await changes.run(lambda: commit(file))
    result = PublishResult(**PublishResult.members(outcome))
    await changes.finish_publish(result, outcome)
    return result


def check_parents(identity: Identity, engine: Engine, bundle: TaskBundle) -> None:
    """NotPermitted for a bundle that extends a task which its publisher may not read.

    The error does not reveal whether that task exists.
    """
    if identity.allows_all_tasks(READ):
        return
    by_digest = engine.tasks.snapshot.catalog.by_digest
    if not all(digest in by_digest for digest in bundle.extends):
        by_digest = engine.tasks.sync().catalog.by_digest
    for digest in bundle.extends:
        if not any(identity.allows(READ, info.task) for info in by_digest.get(digest, ())):
            raise NotPermitted(
                f"The bundle extends {digest}, which is not a version of a task that the key "
                f"'{identity.name}' may read.",
                names=[digest],
            )


def check_new_name(name: str) -> None:
    """InvalidName for a malformed name, or one whose paths other routes would hide."""
    check_task_name(name)
    if name == MULTITASK:
        raise InvalidName(
            f"'{name}' is reserved for the model of all tasks under /v2: choose another task name.",
            names=[name],
        )
    team, _, last = name.rpartition("/")
    if team and last in RESERVED:
        raise InvalidName(
            f"The name '{name}' is reserved for the {last} of a task '{team}': choose another.",
            names=[name],
        )
