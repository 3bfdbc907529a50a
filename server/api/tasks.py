"""`/tasks`: what is served, and changing it.

A task's name may have one slash in it (`team/name`), hence `:path`; routes with more behind the
name come before those with less.

The ETag of a task stands for its labels and live versions. A change may be made under a condition:
`If-Match` with that ETag (nobody has changed the task since), `If-None-Match: *` (there is no such
task yet).
"""

import hashlib
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path as FilePath
from typing import Annotated, Any, Final, Literal

from anyio import to_thread
from fastapi import APIRouter, Depends, Header, Path, Query, Request, Response
from fastapi.responses import StreamingResponse
from pydantic import BaseModel, ConfigDict, Field, JsonValue, RootModel

from server.api import http
from server.api.audited import begin_audit, requires_audited
from server.api.auth import IdentityDep, requires
from server.api.http import (
    LARGEST_NUMBER,
    EngineDep,
    RuntimeDep,
    Strict,
    left_out_if_none,
    requires_caught_up,
)
from server.api.middleware import RequestRecord
from server.api.predict import Digest
from server.api.problems import InvalidRequest, NotPermitted, responses
from server.api.replicas import Wait, WaitDep, WaitResult
from server.engine.engine import Engine
from server.engine.tasks.changes import ChangeOutcome
from server.engine.tasks.snapshot import BASE, Snapshot, Status
from server.identity import Identity, Scope
from server.runtime import Runtime
from task_store import (
    Catalog,
    Change,
    Condition,
    Entry,
    InvalidName,
    MoveLabel,
    PreconditionFailed,
    Publish,
    RemoveLabel,
    Restore,
    Retire,
    RollBack,
    TaskBundle,
    TaskInfo,
    VersionFacts,
    VersionInfo,
    check_task_name,
    only_if_absent,
)

# The last part of paths below a task: `team/history` could not be told from a task's history.
RESERVED = frozenset(
    {"corrections", "examples", "history", "labels", "restore", "rollback", "versions"}
)

READ: Final[tuple[Scope, ...]] = ("read",)
_PIECE_BYTES = 1024 * 1024
_FOREVER = "private, max-age=31536000, immutable"
_BINARY: dict[str, Any] = {"application/octet-stream": http.BINARY}
_READ = responses(401, 404, 412, 422, 503)
_BUNDLE_BODY = http.request_body(
    _BINARY, "A bundle: one .safetensors file as docs/reference/bundle-format.md describes it."
)
_LATE = "Made, and not served by all replicas in time: `replicas` says which are behind"

Name = Annotated[str, Path(description="A task's name, with at most one slash.", examples=["pets"])]
Number = Annotated[int, Path(ge=1, le=LARGEST_NUMBER, description="A version.")]
Label = Annotated[str, Path(description="A label.", examples=["canary"])]
IfNoneMatch = Annotated[str | None, Header()]

reading = APIRouter(tags=["tasks"], dependencies=requires_caught_up(*READ))
checking = APIRouter(tags=["tasks"], dependencies=requires("publish"))
changing = APIRouter(
    tags=["tasks"],
    dependencies=requires_audited("publish"),
    responses=responses(401, 404, 409, 412, 422, 503),
)

# What the audit log says of a change that was made.
_AUDITED = {"version", "digest", "generation", "labels"}
# The facts about the default version that the list shows.
_SUMMARISED = {"problem", "classes", "description"}


# Answers


class VersionResult(VersionFacts):
    """One published version of a task: its facts in the store, and how it stands here."""

    model_config = ConfigDict(extra="forbid", populate_by_name=True)

    version: int
    size: int = Field(alias="size_bytes")
    labels: list[str] = Field(description="The labels that point to it.", examples=[["default"]])
    status: Status = Field(description="`on_demand` is loaded when it is first asked for.")
    reason: str | None = Field(description="Why it cannot be asked.")
    resident: bool = Field(description="Whether it is on the device now.")
    generation: int
    published: str = Field(examples=["2026-01-31T12:00:00.000Z"])
    actor: str
    fingerprint: str = Field("", exclude=True)  # every task here is for the one backbone

    @classmethod
    def of_info(cls, snapshot: Snapshot, info: VersionInfo) -> "VersionResult":
        state = snapshot.state_of(info.task, info.version)
        return cls(
            **dict(info.facts),
            version=info.version,
            labels=list(snapshot.catalog.task(info.task).labels_of(info.version)),
            status=state.status,
            reason=state.reason,
            resident=state.resident,
            generation=info.generation,
            published=info.time,
            actor=info.actor,
        )


class TaskSummary(Strict):
    """A task as the list shows it: what its default version is."""

    task: str = Field(examples=["pets"])
    version: int | None = Field(description="The version `default` points to; null for `base`.")
    status: Status
    reason: str | None
    problem: str = Field(examples=["single_label"])
    classes: int
    description: str = Field(examples=["Which pet?"])
    labels: dict[str, int] = Field(examples=[{"default": 1}])
    versions: list[int] = Field(description="Live versions.")


class TaskList(Strict):
    generation: int
    backbone: str
    tasks: list[TaskSummary]


class TaskDetail(TaskSummary):
    """A task with its versions and the names of its classes, where they are loaded."""

    generation: int
    class_labels: list[str] | None = Field(examples=[["cat", "dog", "rabbit"]])
    version_details: list[VersionResult] = Field(description="Live versions, oldest first.")


class VersionList(Strict):
    task: str
    generation: int
    versions: list[VersionResult]


class ManifestResult(RootModel[dict[str, JsonValue]]):
    """The manifest in a bundle, as docs/reference/bundle-format.md describes it."""


class HistoryEntry(BaseModel):
    """One entry of the store's log about a task; `kind` says which further members it has."""

    model_config = ConfigDict(extra="allow")

    generation: int
    time: str
    actor: str
    kind: Literal["publish", "label", "retire", "restore"]
    task: str

    @classmethod
    def of(cls, entry: Entry) -> "HistoryEntry":
        """Without what only the store's protocol needs."""
        stamp = entry.stamp.model_dump(mode="json", include={"generation", "time", "actor"})
        return cls(**stamp, **entry.event.model_dump(mode="json"))


class History(Strict):
    task: str
    entries: list[HistoryEntry] = Field(description="Newest first.")


class Verdict(Strict):
    """What a bundle is, and whether this server could serve it."""

    valid: bool
    digest: Digest | None
    problems: list[str] = Field(description="One sentence per reason against it.")
    manifest: dict[str, JsonValue] | None
    classes: int | None
    memory_tokens: int | None


class LabelTarget(Strict):
    version: int = Field(ge=1, le=LARGEST_NUMBER)


class _Changed(Strict):
    task: str
    generation: int
    replicas: WaitResult | None = left_out_if_none("With `wait=all`.")


class PublishResult(_Changed):
    """A bundle that is being served now."""

    version: int
    digest: Digest
    created: bool = Field(description="False when the task had these bytes already.")
    labels: list[str] = Field(description="The labels that point to the version now.")


class ChangeResult(_Changed):
    """The state of a task after a change that is being served now."""

    labels: dict[str, int]
    versions: list[int] = Field(description="Live versions; none when the task is retired.")


# Reading. Plain functions, which FastAPI runs in threads: an unknown name is compared with those of
# all tasks, of which there may be thousands.


@reading.get("/tasks", responses=responses(401, 412, 422, 503))
def list_tasks(engine: EngineDep, identity: IdentityDep) -> TaskList:
    """The tasks that the caller may read, and whether they are ready."""
    snapshot = engine.snapshot
    names = [*([] if engine.backbone.base is None else [BASE]), *snapshot.catalog.tasks]
    return TaskList(
        generation=snapshot.generation,
        backbone=http.short_name(engine.backbone.name),
        tasks=[
            TaskSummary(**_summary(engine, snapshot, name))
            for name in names
            if identity.may(READ, name)
        ],
    )


async def hold_download_place(runtime: RuntimeDep) -> AsyncIterator[None]:
    """Until the answer is sent: a bundle is in memory as a whole."""
    async with http.place(runtime, runtime.downloads, "downloads"):
        yield


@reading.get(
    "/tasks/{task:path}/versions/{version}/bundle",
    response_class=Response,
    dependencies=[Depends(hold_download_place), Depends(begin_audit)],
    responses={
        200: {"content": _BINARY},
        304: {"description": "The caller has it already"},
        **_READ,
        **responses(429),
    },
)
def download_bundle(
    task: Name, version: Number, engine: EngineDep, if_none_match: IfNoneMatch = None
) -> Response:
    """The bundle of a version, as it was uploaded."""
    digest = engine.snapshot.catalog.version(task, version).digest
    headers = {"ETag": f'"{digest}"', "Cache-Control": _FOREVER}
    if http.has_already(if_none_match, headers["ETag"]):
        return Response(status_code=304, headers=headers)
    name = f"{task.replace('/', '-')}-{version}.safetensors"
    headers["Content-Disposition"] = f'attachment; filename="{name}"'
    content = engine.read_bytes(digest)
    headers["Content-Length"] = str(len(content))
    return StreamingResponse(_pieces(content), 200, headers, "application/octet-stream")


async def _pieces(content: bytes) -> AsyncIterator[memoryview]:
    """One after the other, as the client takes them."""
    for start in range(0, len(content), _PIECE_BYTES):
        yield memoryview(content)[start : start + _PIECE_BYTES]


@reading.get(
    "/tasks/{task:path}/versions/{version}/manifest",
    response_model=ManifestResult,
    responses={304: {"description": "The caller has it already"}, **_READ},
)
def read_manifest(
    task: Name,
    version: Number,
    engine: EngineDep,
    response: Response,
    if_none_match: IfNoneMatch = None,
) -> ManifestResult | Response:
    """What the bundle of a version says of itself: classes, metrics, training, licence."""
    digest = engine.snapshot.catalog.version(task, version).digest
    headers = {"ETag": f'"{digest}"', "Cache-Control": "private, no-cache"}
    if http.has_already(if_none_match, headers["ETag"]):
        return Response(status_code=304, headers=headers)
    response.headers.update(headers)
    return ManifestResult(engine.read_bundle(digest).manifest.model_dump(mode="json"))


@reading.get("/tasks/{task:path}/versions/{version}", responses=_READ)
def describe_version(task: Name, version: Number, engine: EngineDep) -> VersionResult:
    """One version of a task."""
    snapshot = engine.snapshot
    return VersionResult.of_info(snapshot, snapshot.catalog.version(task, version))


@reading.get("/tasks/{task:path}/versions", responses=_READ)
def list_versions(task: Name, engine: EngineDep) -> VersionList:
    """The live versions of a task."""
    snapshot = engine.snapshot
    versions = [VersionResult.of_info(snapshot, info) for info in snapshot.catalog.task(task).live]
    return VersionList(task=task, generation=snapshot.generation, versions=versions)


@reading.get("/tasks/{task:path}/history", responses=_READ)
def task_history(
    task: Name, engine: EngineDep, limit: Annotated[int, Query(ge=1, le=1000)] = 50
) -> History:
    """Who changed what about a task, newest first."""
    catalog = engine.snapshot.catalog
    if task not in catalog.all_tasks:
        catalog.task(task)  # raises UnknownTask
    entries = [HistoryEntry.of(entry) for entry in engine.history(task, limit)]
    return History(task=task, entries=entries)


@reading.get("/tasks/{task:path}", responses=_READ)
def describe_task(task: Name, engine: EngineDep, response: Response) -> TaskDetail:
    """A task, its labels and its versions. The ETag stands for its state after its last change."""
    snapshot = engine.snapshot
    summary = _summary(engine, snapshot, task)
    info = snapshot.catalog.tasks.get(task)
    labels = engine.class_labels(snapshot, task)
    response.headers.update(_etag_header(snapshot, task))
    return TaskDetail(
        **summary,
        generation=snapshot.generation,
        class_labels=None if labels is None else list(labels),
        version_details=[VersionResult.of_info(snapshot, each) for each in info.live]
        if info
        else [],
    )


@checking.post(
    "/tasks/validate",
    responses=responses(401, 408, 413, 415, 429, 503),
    openapi_extra=_BUNDLE_BODY,
)
async def validate_bundle(
    request: Request, runtime: RuntimeDep, engine: EngineDep, identity: IdentityDep
) -> Verdict:
    """What a bundle is and whether it could be served here. Nothing is stored."""
    async with (
        http.place(runtime, runtime.validations, "validations"),
        http.received_file(request, runtime.settings.bundle_bytes) as file,
    ):
        bundle, reason = await to_thread.run_sync(engine.validate, file, limiter=runtime.checks)
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


def _summary(engine: Engine, snapshot: Snapshot, name: str) -> dict[str, Any]:
    """The members of a TaskSummary; UnknownTask if there is no such task."""
    if name == BASE and (head := engine.backbone.base) is not None:
        summary: dict[str, Any] = {
            "version": None,
            "problem": head.problem,
            "classes": head.classes,
            "description": "The backbone's own head.",
            "labels": {},
            "versions": [],
        }
    else:
        task = snapshot.catalog.task(name)
        version = task.labels["default"]
        summary = {
            "version": version,
            **task.versions[version].facts.model_dump(include=_SUMMARISED),
            "labels": dict(sorted(task.labels.items())),
            "versions": [each.version for each in task.live],
        }
    state = snapshot.state_of(name, summary["version"])
    return {"task": name, "status": state.status, "reason": state.reason, **summary}


# Changing


def etag_of(task: TaskInfo | None) -> str | None:
    """A quoted name for the state of a task; None when there is none.

    With its last change, because labels and versions alone do not say where a rollback goes:
    after 2, 3, 2 it goes to 3.
    """
    if task is None or not task.is_live:
        return None
    versions = [(v.version, v.digest) for v in task.live]
    state = [sorted(task.labels.items()), versions, task.changes[-1]]
    return f'"{hashlib.sha256(json.dumps(state).encode()).hexdigest()[:32]}"'


def _etag_header(snapshot: Snapshot, task: str) -> dict[str, str]:
    etag = etag_of(snapshot.catalog.tasks.get(task))
    return {} if etag is None else {"ETag": etag}


def if_matching(task: str, header: str) -> Condition:
    """The condition that a task has one of the ETags of an If-Match header."""
    tags = http.read_etags(header)

    def check(catalog: Catalog) -> None:
        now = etag_of(catalog.tasks.get(task))
        if now is None:
            raise PreconditionFailed(f"There is no task '{task}' to match.", names=[task])
        if tags.isdisjoint({now, "*"}):
            raise PreconditionFailed(
                f"Task '{task}' has changed in the meantime, its ETag is {now} now: look at it and "
                f"try again.",
                names=[task],
            )

    return check


async def get_condition(
    task: Name,
    if_match: Annotated[
        str | None, Header(description="Change the task only if this is its ETag.")
    ] = None,
) -> Condition | None:
    return None if if_match is None else if_matching(task, if_match)


async def get_publish_condition(
    task: Name,
    matching: Annotated[Condition | None, Depends(get_condition)],
    if_none_match: Annotated[
        str | None, Header(description="`*`: publish only if there is no such task.")
    ] = None,
) -> Condition | None:
    if if_none_match is None:
        return matching
    if if_none_match.strip() != "*":
        raise InvalidRequest("If-None-Match is understood as '*' alone: only if there is none.")
    absent = only_if_absent(task)

    def check(catalog: Catalog) -> None:
        if matching is not None:
            matching(catalog)
        absent(catalog)

    return check


@dataclass(frozen=True, slots=True)
class Changes:
    """Makes changes on behalf of one request, one at a time on this server."""

    request: Request
    response: Response
    runtime: Runtime
    identity: Identity
    wait: Wait

    async def make(self, change: Change, condition: Condition | None = None) -> ChangeResult:
        outcome = await to_thread.run_sync(
            lambda: self.commit(change, condition), limiter=self.runtime.changes
        )
        catalog = outcome.snapshot.catalog
        task = catalog.tasks.get(change.task)
        result = ChangeResult(
            task=change.task,
            generation=catalog.generation,
            labels={} if task is None else dict(sorted(task.labels.items())),
            versions=[] if task is None else [info.version for info in task.live],
        )
        await self.finish(result, outcome.snapshot)
        return result

    def commit(self, change: Change, condition: Condition | None) -> ChangeOutcome:
        """Blocks until the change is served here."""
        return self.runtime.engine.change(change, actor=self.actor, condition=condition)

    @property
    def actor(self) -> str:
        """Who makes the changes, for the history."""
        return self.identity.id

    def published(self, change: Publish, outcome: ChangeOutcome) -> dict[str, Any]:
        """The members of a PublishResult; status and headers of the answer say the same."""
        task, version = change.task, outcome.version
        assert version is not None, "a publish has one"
        self.response.status_code = 201 if outcome.created else 200
        self.response.headers["Location"] = f"/tasks/{task}/versions/{version}"
        return {
            "task": task,
            "version": version,
            "digest": change.bundle.digest,
            "generation": outcome.snapshot.generation,
            "created": outcome.created,
            "labels": list(outcome.snapshot.catalog.all_tasks[task].labels_of(version)),
        }

    async def finish(self, result: ChangeResult | PublishResult, snapshot: Snapshot) -> None:
        """Wait for the other replicas if that was asked for; the answer then says who serves it."""
        self.response.headers.update(_etag_header(snapshot, result.task))
        record: RequestRecord = self.request.state.record
        record.details = result.model_dump(include=_AUDITED, exclude_none=True)
        waiting = self.wait.until_served(result.generation)
        result.replicas = await http.while_connected(self.request, waiting)
        if result.replicas is not None and not result.replicas.complete:
            self.response.status_code = 202


async def get_changes(
    request: Request,
    response: Response,
    runtime: RuntimeDep,
    identity: IdentityDep,
    wait: WaitDep,
) -> Changes:
    return Changes(request, response, runtime, identity, wait)


ConditionDep = Annotated[Condition | None, Depends(get_condition)]
PublishConditionDep = Annotated[Condition | None, Depends(get_publish_condition)]
ChangesDep = Annotated[Changes, Depends(get_changes)]

_CHANGED: dict[int | str, dict[str, Any]] = {202: {"model": ChangeResult, "description": _LATE}}


@changing.put(
    "/tasks/{task:path}/labels/{label}",
    responses={**_CHANGED, **responses(400, 408, 413, 429)},
    openapi_extra=http.request_body(http.json_content(LabelTarget, example={"version": 2})),
)
async def move_label(
    request: Request, task: Name, label: Label, condition: ConditionDep, changes: ChangesDep
) -> ChangeResult:
    """Point a label to a version."""
    target = http.parse_json(await http.read_body(request, http.SMALL_BODY_BYTES), LabelTarget)
    return await changes.make(MoveLabel(task, label, target.version), condition)


@changing.delete("/tasks/{task:path}/labels/{label}", responses=_CHANGED)
async def remove_label(
    task: Name, label: Label, condition: ConditionDep, changes: ChangesDep
) -> ChangeResult:
    """Take a label away. `default` cannot be."""
    return await changes.make(RemoveLabel(task, label), condition)


@changing.post("/tasks/{task:path}/rollback", responses=_CHANGED)
async def roll_back(
    task: Name,
    condition: ConditionDep,
    changes: ChangesDep,
    label: Annotated[str, Query(description="The label to move back.")] = "default",
) -> ChangeResult:
    """Undo the last move of a label; twice goes two back."""
    return await changes.make(RollBack(task, label), condition)


@changing.post("/tasks/{task:path}/restore", responses=_CHANGED)
async def restore_task(
    task: Name,
    changes: ChangesDep,
    version: Annotated[int | None, Query(ge=1, le=LARGEST_NUMBER)] = None,
) -> ChangeResult:
    """Bring back a version, or what the retirement of the whole task took."""
    return await changes.make(Restore(task, version))


@changing.delete("/tasks/{task:path}/versions/{version}", responses=_CHANGED)
async def retire_version(
    task: Name, version: Number, condition: ConditionDep, changes: ChangesDep
) -> ChangeResult:
    """Take a version out of service. Its bundle is kept."""
    return await changes.make(Retire(task, version), condition)


@changing.delete("/tasks/{task:path}", responses=_CHANGED)
async def retire_task(task: Name, condition: ConditionDep, changes: ChangesDep) -> ChangeResult:
    """Take a whole task out of service. Its bundles are kept; `restore` brings it back."""
    return await changes.make(Retire(task), condition)


@changing.put(
    "/tasks/{task:path}",
    status_code=201,
    responses={
        200: {"model": PublishResult, "description": "The task had these bytes already"},
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
    label: Annotated[
        tuple[str, ...],
        Query(description="Labels to point to it; others than `default` leave that alone."),
    ] = ("default",),
) -> PublishResult:
    """Upload a bundle as the next version of a task. It is being served when this answers."""
    runtime = changes.runtime

    def commit(file: FilePath) -> tuple[Publish, ChangeOutcome]:
        check_new_name(task)
        change = Publish(task, TaskBundle.load(file), label)
        check_parents(changes.identity, runtime.engine, change.bundle)
        return change, changes.commit(change, condition)

    async with http.received_file(request, runtime.settings.bundle_bytes) as file:
        change, outcome = await to_thread.run_sync(commit, file, limiter=runtime.changes)
    result = PublishResult(**changes.published(change, outcome))
    await changes.finish(result, outcome.snapshot)
    return result


def check_parents(identity: Identity, engine: Engine, bundle: TaskBundle) -> None:
    """NotPermitted for a bundle that extends what its publisher may not read.

    Or what is not there: the answer does not tell which.
    """
    if identity.may_all(READ):
        return
    by_digest = engine.snapshot.catalog.by_digest
    if not all(digest in by_digest for digest in bundle.extends):
        by_digest = engine.sync().catalog.by_digest
    for digest in bundle.extends:
        if not any(identity.may(READ, info.task) for info in by_digest.get(digest, ())):
            raise NotPermitted(
                f"The bundle extends {digest}, which is no version of a task that the key "
                f"'{identity.name}' may read.",
                names=[digest],
            )


def check_new_name(name: str) -> None:
    """InvalidName for what no task may be called here."""
    check_task_name(name)
    team, _, last = name.rpartition("/")
    if team and last in RESERVED:
        raise InvalidName(
            f"'{name}' cannot be told from the {last} of a task '{team}': choose another name.",
            names=[name],
        )
