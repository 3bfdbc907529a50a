"""Every refusal as a problem document (RFC 9457), from one table: error class → status and name.

    {"type": "urn:engram:problem:unknown-task", "title": "Unknown task", "status": 404,
     "detail": "…", "request_id": "…", "names": ["cifr"], "suggestions": {"cifr": "cifar"}}

docs/reference/http-api.md lists the same table. Below `/v2` the statuses are the same, and the body
is the one of the protocol spoken there: `{"error": "…"}`.
"""

import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from http import HTTPStatus
from itertools import islice
from typing import Any

from anyio import to_thread
from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel, ConfigDict, Field
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.routing import Match, Route

from server import errors as server_errors
from server import logs
from server.errors import EngramError, Overloaded
from server.identity import Identity, Scope
from task_store import errors as store_errors
from task_store.errors import TaskStoreError
from task_store.names import MAX_SUGGESTIONS, closest_name

MEDIA_TYPE = "application/problem+json"
URN = "urn:engram:problem:"
PROTOCOL = "/v2"
CLIENT_CLOSED = 499


# What can be wrong with a request before the engine or the store see it


class RequestError(EngramError):
    """A request that is refused for what it is."""


class MalformedRequest(RequestError):
    """Not the JSON or the form it says it is."""


class InvalidRequest(RequestError):
    """A value that is not allowed."""


class TooManyImages(InvalidRequest):
    """More images than one request may have."""


class TooManyTasks(InvalidRequest):
    """More tasks than one request may ask."""


class BodyTooLarge(RequestError):
    """More bytes than allowed."""


class UnsupportedMedia(RequestError):
    """A content type or encoding that is not read here."""


class TooManyValues(InvalidRequest):
    """More values in a JSON body than are parsed while others wait."""


class AnswerTooLarge(InvalidRequest):
    """An answer of more bytes than may be asked for at once."""


class HeadersTooLarge(RequestError):
    """More bytes or more lines of headers than allowed."""


class RequestTooSlow(RequestError):
    """A header or a body that did not come in time."""


class TooManyConnections(RequestError):
    """More connections than there may be."""


class UploadNotKept(RequestError):
    """A bundle that this machine has no disk for."""


class KeyRequired(RequestError):
    """No key, or one that is not good (any more)."""


class NotPermitted(RequestError):
    """A good key that may not do this, or not with the tasks of these `names`."""

    def __init__(self, message: str, names: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.names = tuple(names)


class HostNotAllowed(RequestError):
    """A request to a server without keys, by a name that is not its own."""


class CrossOrigin(RequestError):
    """A change requested by a page of another site."""


@dataclass(frozen=True, slots=True)
class Kind:
    """What is the same for all problems of one kind."""

    status: int
    name: str
    title: str


KINDS: Mapping[type[Exception], Kind] = {
    # server.errors
    EngramError: Kind(500, "internal", "Internal error"),
    server_errors.BackboneError: Kind(500, "backbone", "The backbone cannot be used"),
    server_errors.KeysError: Kind(500, "keys", "The keys cannot be used"),
    server_errors.SettingsError: Kind(500, "settings", "The server is misconfigured"),
    server_errors.UnreadableImage: Kind(422, "unreadable-image", "Unreadable image"),
    server_errors.ImageTooLarge: Kind(413, "image-too-large", "Image too large"),
    server_errors.TaskMismatch: Kind(422, "task-mismatch", "The task does not fit the backbone"),
    server_errors.UnteachableExamples: Kind(
        422, "unteachable-examples", "No task can be made of these examples"
    ),
    server_errors.UnknownExample: Kind(404, "unknown-example", "Unknown example"),
    server_errors.NoTextTower: Kind(409, "no-text-tower", "The backbone reads no class names"),
    server_errors.NotTaught: Kind(409, "not-taught", "The task was not taught"),
    server_errors.IsTaught: Kind(409, "is-taught", "The task is taught by examples"),
    server_errors.UnknownTask: Kind(404, "unknown-task", "Unknown task"),
    server_errors.TaskUnavailable: Kind(503, "task-unavailable", "Task unavailable"),
    server_errors.ExtensionError: Kind(409, "extension", "The extension cannot be resolved"),
    server_errors.EngineError: Kind(500, "engine", "The engine failed"),
    server_errors.Overloaded: Kind(429, "overloaded", "Too many requests at once"),
    server_errors.QuotaExceeded: Kind(429, "quota-exceeded", "More than this key may use"),
    server_errors.DeadlineExceeded: Kind(504, "deadline-exceeded", "Deadline exceeded"),
    server_errors.ContextNotCached: Kind(404, "context-not-cached", "Image no longer cached"),
    server_errors.GenerationNotReached: Kind(
        412, "generation-not-reached", "The store has no such generation"
    ),
    server_errors.Draining: Kind(503, "draining", "The server takes no new requests"),
    server_errors.BatchFailed: Kind(500, "batch-failed", "The model failed on this image"),
    server_errors.DeviceFailed: Kind(503, "device-failed", "The device failed"),
    server_errors.AnswerNotFinite: Kind(422, "answer-not-finite", "A task has no finite answer"),
    server_errors.NotStarted: Kind(503, "not-started", "The server is not ready"),
    server_errors.AuditUnavailable: Kind(503, "audit-unavailable", "The audit log is not written"),
    server_errors.IssuerUnavailable: Kind(503, "issuer-unavailable", "Tokens cannot be checked"),
    # of this module
    MalformedRequest: Kind(400, "malformed-request", "Malformed request"),
    InvalidRequest: Kind(422, "invalid-request", "Invalid request"),
    TooManyImages: Kind(422, "too-many-images", "Too many images"),
    TooManyTasks: Kind(422, "too-many-tasks", "Too many tasks"),
    BodyTooLarge: Kind(413, "body-too-large", "Body too large"),
    UnsupportedMedia: Kind(415, "unsupported-media", "Unsupported content type"),
    TooManyValues: Kind(422, "too-many-values", "Too many values"),
    AnswerTooLarge: Kind(422, "answer-too-large", "The answer would be too large"),
    HeadersTooLarge: Kind(431, "headers-too-large", "Headers too large"),
    RequestTooSlow: Kind(408, "request-too-slow", "The request came too slowly"),
    TooManyConnections: Kind(503, "too-many-connections", "Too many connections"),
    UploadNotKept: Kind(503, "upload-not-kept", "No room for the upload"),
    KeyRequired: Kind(401, "key-required", "A key is required"),
    NotPermitted: Kind(403, "not-permitted", "Not permitted with this key"),
    CrossOrigin: Kind(403, "cross-origin", "Refused for another site"),
    HostNotAllowed: Kind(421, "host-not-allowed", "Addressed to another host"),
    # task_store.errors
    store_errors.UnreadableBundle: Kind(500, "unreadable-bundle", "Bundle cannot be read"),
    store_errors.MalformedBundle: Kind(422, "malformed-bundle", "Not a valid bundle"),
    store_errors.IncompatibleBundle: Kind(422, "incompatible-bundle", "Made for another backbone"),
    store_errors.InvalidName: Kind(422, "invalid-name", "Invalid name"),
    store_errors.NotFound: Kind(404, "not-found", "Not found"),
    store_errors.UnknownTask: Kind(404, "unknown-task", "Unknown task"),
    store_errors.UnknownVersion: Kind(404, "unknown-version", "Unknown version"),
    store_errors.UnknownLabel: Kind(404, "unknown-label", "Unknown label"),
    store_errors.Conflict: Kind(409, "conflict", "Conflict"),
    store_errors.AlreadyExists: Kind(412, "already-exists", "The task exists already"),
    store_errors.MissingParent: Kind(409, "missing-parent", "A parent is missing"),
    store_errors.StillExtended: Kind(409, "still-extended", "Still extended by another task"),
    store_errors.StillLabelled: Kind(409, "still-labelled", "A label still points to it"),
    store_errors.NothingToRollBack: Kind(409, "nothing-to-roll-back", "Nothing to roll back"),
    store_errors.NothingToRestore: Kind(409, "nothing-to-restore", "Nothing to restore"),
    store_errors.PreconditionFailed: Kind(412, "precondition-failed", "Changed in the meantime"),
    store_errors.StoreUnavailable: Kind(503, "store-unavailable", "Task store unavailable"),
    store_errors.CorruptStore: Kind(500, "corrupt-store", "The task store is damaged"),
    store_errors.UnsupportedFormat: Kind(503, "store-too-new", "The task store is too new"),
    TaskStoreError: Kind(500, "internal", "Internal error"),
}
# Those of one caller, whom the audit log should name.
REFUSALS = frozenset(
    KINDS[error].name
    for error in (
        KeyRequired,
        NotPermitted,
        CrossOrigin,
        HostNotAllowed,
        server_errors.QuotaExceeded,
    )
)
INTERNAL = KINDS[EngramError]
INVALID = KINDS[InvalidRequest]

_SUGGESTED_FOR = (server_errors.UnknownTask, store_errors.UnknownTask)
_ERRORS_SHOWN = 16
# Who may ask or read a task may know its name.
_SEEING: tuple[Scope, ...] = ("predict", "read")
_HINT = re.compile(r"[.:]? did you mean '[^']*'\?", re.IGNORECASE)
# Refusals that are counted, and by which reason.
_COUNTED: Mapping[type[Exception], str] = {
    TooManyValues: "json_values",
    AnswerTooLarge: "answer_bytes",
    KeyRequired: "key",
    NotPermitted: "permission",
    CrossOrigin: "origin",
    HostNotAllowed: "host",
}
# Seconds
_RETRY_AFTER: Mapping[type[Exception], int] = {
    server_errors.Draining: 2,
    server_errors.NotStarted: 2,
    server_errors.DeviceFailed: 5,
    server_errors.AuditUnavailable: 5,
    server_errors.IssuerUnavailable: 5,
    TooManyConnections: 1,
    UploadNotKept: 5,
    store_errors.StoreUnavailable: 5,
}


class ProblemDocument(BaseModel):
    """RFC 9457."""

    model_config = ConfigDict(extra="allow")

    type: str = Field(examples=["urn:engram:problem:unknown-task"])
    title: str = Field(examples=["Unknown task"])
    status: int = Field(examples=[404])
    detail: str = Field(examples=["There is no task 'pest'. Did you mean 'pets'?"])
    request_id: str | None
    names: list[str] | None = Field(None, description="The offending names.", examples=[["pest"]])
    suggestions: dict[str, str] | None = Field(
        None, description="What each may have meant.", examples=[{"pest": "pets"}]
    )
    errors: list[dict[str, str]] | None = Field(None, description="The parts that were wrong.")


_DESCRIPTIONS = {
    400: "The body cannot be parsed",
    401: "A key is required",
    403: "The key may not do this",
    404: "No such task, version, label or cached image",
    408: "The body did not come in time",
    409: "It does not fit the present state",
    412: "The condition of the request does not hold",
    413: "The body or the image is too large",
    415: "A content type that is not read here",
    421: "A server without keys, addressed by a name that is not its own",
    422: "Something in the request is not valid",
    429: "Too many requests, of all or of this key; Retry-After says when to come back",
    500: "The server failed",
    503: "Starting, shutting down, or the device or the task store is away",
    504: "The deadline passed",
}


# What any route that requires a key may answer besides 401.
_OF_KEYS = (403, 421, 429)


def responses(
    *statuses: int, model: type[BaseModel] = ProblemDocument, media: str = MEDIA_TYPE
) -> dict[int | str, dict[str, Any]]:
    """What the OpenAPI document says of a route that answers these problems."""
    schema = {"$ref": f"#/components/schemas/{model.__name__}"}
    every = {*statuses, *(_OF_KEYS if 401 in statuses else ())}
    return {
        status: {"description": _DESCRIPTIONS[status], "content": {media: {"schema": schema}}}
        for status in sorted(every)
    }


def kind_of(error: Exception) -> Kind:
    """The kind of an error, by its own class or the nearest base in the table."""
    return next((KINDS[cls] for cls in type(error).__mro__ if cls in KINDS), INTERNAL)


def install(app: FastAPI) -> None:
    """Make every refusal of this app a problem document."""
    app.add_exception_handler(EngramError, _on_known_error)
    app.add_exception_handler(TaskStoreError, _on_known_error)
    app.add_exception_handler(RequestValidationError, _on_invalid)
    app.add_exception_handler(HTTPException, _on_http)
    app.add_exception_handler(ClientDisconnect, _on_disconnect)


def refusal(
    path: str, kind: Kind, detail: str, headers: Mapping[str, str] | None = None, **members: object
) -> Response:
    """A problem in the form that clients of this path understand; empty members are left out."""
    if speaks_protocol(path):
        media, document = "application/json", dict[str, object](error=detail)
    else:
        media = MEDIA_TYPE
        document = {
            "type": f"{URN}{kind.name}",
            "title": kind.title,
            "status": kind.status,
            "detail": detail,
            "request_id": logs.request_id.get(),
            **{name: value for name, value in members.items() if value},
        }
    # Problems are about the moment: nobody should keep one.
    headers = {"Cache-Control": "no-store", **(headers or {})}
    # ASCII: a stranger's name may hold half a character, which no UTF-8 can carry.
    return Response(json.dumps(document, ensure_ascii=True), kind.status, headers, media)


def speaks_protocol(path: str) -> bool:
    """Whether the Open Inference Protocol is spoken at a path."""
    return path == PROTOCOL or path.startswith(f"{PROTOCOL}/")


def internal_problem(path: str) -> Response:
    """For what nobody expected: nothing of it leaves the server but the request's id."""
    detail = "Something unexpected went wrong; the log names it by request_id."
    return refusal(path, INTERNAL, detail)


def of_error(
    error: EngramError | TaskStoreError, known_tasks: Sequence[str] = (), path: str = ""
) -> Response:
    """The problem an error is."""
    names = tuple(map(str, getattr(error, "names", ())))
    suggestions: Mapping[str, str] = getattr(error, "suggestions", {})
    if isinstance(error, _SUGGESTED_FOR) and not suggestions:
        suggestions = suggest(names, known_tasks)
    return refusal(
        path,
        kind_of(error),
        _sentence(error),
        _headers(error),
        names=names,
        suggestions=suggestions,
    )


def suggest(names: Iterable[str], known: Sequence[str]) -> dict[str, str]:
    """For the first few names the known one closest to each, where one is close."""
    near = {name: closest_name(name, known) for name in islice(names, MAX_SUGGESTIONS)}
    return {name: match for name, match in near.items() if match is not None}


def _headers(error: Exception) -> dict[str, str]:
    if isinstance(error, Overloaded):
        return {"Retry-After": str(max(1, math.ceil(error.retry_after)))}
    if isinstance(error, KeyRequired):
        return {"WWW-Authenticate": 'Bearer realm="engram"'}
    seconds = _RETRY_AFTER.get(type(error))
    return {} if seconds is None else {"Retry-After": str(seconds)}


def _sentence(error: Exception) -> str:
    text = str(error).strip() or type(error).__name__
    return text[0].upper() + text[1:] + ("" if text[-1] in ".?!…" else ".")


def _remember(request: Request, kind: Kind, error: Exception) -> None:
    """For the audit log, which is written when the answer is known."""
    request.state.record.problem = kind.name
    request.state.record.reason = str(error)


async def _on_known_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, EngramError | TaskStoreError)  # what `install` registered it for
    _remember(request, kind_of(error), error)
    runtime, path = request.app.state.runtime, request.scope["path"]
    if isinstance(error, server_errors.QuotaExceeded):
        runtime.metrics.rejected(f"key_{error.limit}")
    elif reason := _COUNTED.get(type(error)):
        runtime.metrics.rejected(reason)
    known = runtime.known_tasks
    if isinstance(error, _SUGGESTED_FOR):
        # It looks at the names of all tasks, of which there may be thousands.
        identity: Identity | None = request.state.record.identity
        return await to_thread.run_sync(_unknown_task, error, known, path, identity)
    return of_error(error, known, path)


def _unknown_task(
    error: EngramError | TaskStoreError,
    known: Sequence[str],
    path: str,
    identity: Identity | None,
) -> Response:
    """Suggests no name that the caller may not see."""
    if identity is not None and not identity.may_all(_SEEING):
        known = [name for name in known if identity.may(_SEEING, name)]
        names: tuple[str, ...] = getattr(error, "names", ())
        error = server_errors.UnknownTask(_HINT.sub(".", str(error)), names)
    return of_error(error, known, path)


async def _on_invalid(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    _remember(request, INVALID, error)
    errors = [
        {"where": ".".join(map(str, each["loc"])), "message": _sentence_of(each)}
        for each in error.errors()[:_ERRORS_SHOWN]
    ]
    detail = " ".join(f"{each['where']}: {each['message']}" for each in errors[:5])
    return refusal(request.scope["path"], INVALID, detail, errors=errors)


def _sentence_of(each: Mapping[str, object]) -> str:
    return str(each["msg"]).removeprefix("Value error, ").rstrip(".") + "."


async def _on_http(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    status = HTTPStatus(error.status_code)
    headers = dict(error.headers or {})
    path: str = request.scope["path"]
    where = "docs/reference/open-inference.md" if speaks_protocol(path) else "/docs"
    if status is HTTPStatus.NOT_FOUND:
        detail = f"There is nothing at {request.url.path}; {where} lists what there is."
    elif status is HTTPStatus.METHOD_NOT_ALLOWED:
        headers["Allow"] = ", ".join(_allowed(request))
        detail = f"{request.method} is not possible at {request.url.path}; {where} lists what is."
    else:
        detail = str(error.detail)
    kind = Kind(status, status.phrase.lower().replace(" ", "-"), status.phrase)
    _remember(request, kind, error)
    return refusal(path, kind, detail, headers)


def _allowed(request: Request) -> list[str]:
    """All methods of a path; the router names those of the first route it tried."""
    routes: Sequence[Route] = request.app.state.routes
    matching = (route for route in routes if route.matches(request.scope)[0] is not Match.NONE)
    return sorted({method for route in matching for method in route.methods or ()})


async def _on_disconnect(request: Request, error: Exception) -> Response:
    # Nobody reads this; the access log and the metrics do.
    return Response(status_code=CLIENT_CLOSED)
