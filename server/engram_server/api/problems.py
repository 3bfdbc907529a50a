"""Errors as problem documents (RFC 9457).

    {"type": "urn:engram:problem:unknown-task", "title": "Unknown task", "status": 404,
     "detail": "…", "request_id": "…", "names": ["cifr"], "suggestions": {"cifr": "cifar"}}

The type and title of a problem come from the name of its error class, the status from the table
below. Under `/v2` the status is the same, and the body is that of the Open Inference Protocol:
`{"error": "…"}`.
"""

import json
import logging
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from http import HTTPStatus
from itertools import islice
from typing import Any

from anyio import to_thread
from engram_bundle import errors as bundle_errors
from engram_bundle.errors import TaskStoreError
from engram_bundle.names import MAX_SUGGESTIONS, closest_name
from engram_store import errors as store_errors
from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel, ConfigDict, Field, JsonValue
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.routing import Match, Route

from engram_server import errors as server_errors
from engram_server.access.identity import Identity, Scope
from engram_server.documentation import OPEN_INFERENCE
from engram_server.errors import EngramError
from engram_server.observability import logs
from engram_server.runtime import RequestRecord, Runtime

MEDIA_TYPE = "application/problem+json"
URN = "urn:engram:problem:"
PROTOCOL = "/v2"
CLIENT_CLOSED = 499

# The status of an error is that of its nearest base class here.
STATUSES: Mapping[type[Exception], int] = {
    server_errors.EngramError: 500,
    server_errors.ImageError: 422,
    server_errors.ImageTooLarge: 413,
    server_errors.TaskError: 422,
    server_errors.NotFoundError: 404,
    server_errors.ConflictError: 409,
    server_errors.UnavailableError: 503,
    server_errors.Overloaded: 429,
    server_errors.DeadlineExceeded: 504,
    server_errors.GenerationNotReached: 412,
    server_errors.RequestError: 400,
    server_errors.InvalidRequest: 422,
    server_errors.BodyTooLarge: 413,
    server_errors.HeadersTooLarge: 431,
    server_errors.UnsupportedMedia: 415,
    server_errors.RequestTooSlow: 408,
    server_errors.AccessError: 403,
    server_errors.KeyRequired: 401,
    server_errors.HostNotAllowed: 421,
    bundle_errors.TaskStoreError: 500,
    bundle_errors.InvalidName: 422,
    bundle_errors.BundleError: 422,
    bundle_errors.UnreadableBundle: 500,
    store_errors.NotFound: 404,
    store_errors.Conflict: 409,
    store_errors.AlreadyExists: 412,
    store_errors.PreconditionFailed: 412,
    store_errors.StoreUnavailable: 503,
    store_errors.UnsupportedFormat: 503,
}
_MODULES = frozenset(module.__name__ for module in (server_errors, bundle_errors, store_errors))
# Types that are not the name of their class.
_TYPES: Mapping[type[Exception], str] = {
    EngramError: "internal",
    TaskStoreError: "internal",
    store_errors.UnsupportedFormat: "store-too-new",
}
_STORE_RETRY_SECONDS = 5
# Errors about what the caller may do, which the audit log records as refused.
_REFUSALS = (
    server_errors.AccessError,
    server_errors.QuotaExceeded,
    server_errors.StorageQuotaExceeded,
)
_UNKNOWN_TASK = (server_errors.UnknownTask, store_errors.UnknownTask)
_MAX_ERRORS = 16
_log = logging.getLogger("engram.http")
# A caller with one of these scopes for a task may see its name.
_MAY_SEE: tuple[Scope, ...] = ("predict", "read")
_HINT = re.compile(r"[.:]? did you mean '[^']*'\?", re.IGNORECASE)
_WORD_START = re.compile(r"(?<!^)(?=[A-Z])")

_DESCRIPTIONS = {
    400: "The body cannot be parsed",
    401: "A valid key is required",
    403: "The key does not permit this",
    404: "Unknown task, version, alias or cached image",
    408: "The body did not arrive in time",
    409: "The request does not fit the present state",
    412: "A condition of the request does not hold",
    413: "The body or the image is too large",
    415: "Unsupported content type",
    421: "A server without keys was addressed by another host name",
    422: "A value in the request is not valid",
    429: "Too many requests, in total or for this key; see Retry-After",
    500: "The server failed",
    503: "Starting, shutting down, or the device or the task store is unavailable",
    504: "The deadline passed",
}
# Any route that requires a key may also return these.
_KEY_STATUSES = (403, 421, 429)


@dataclass(frozen=True, slots=True)
class Kind:
    """What all problems of one type have in common."""

    status: int
    name: str  # the last part of the type
    title: str
    meaning: str
    refusal: bool = False  # the audit log records it


def kind_of(error: type[Exception]) -> Kind:
    """The kind of problem for an error class, or its base class in the modules of errors."""
    error = next(base for base in error.__mro__ if base.__module__ in _MODULES)
    status = next(STATUSES[base] for base in error.__mro__ if base in STATUSES)
    name = _TYPES.get(error)
    if name is None:
        name = _WORD_START.sub("-", error.__name__.removesuffix("Error")).lower()
    meaning = (error.__doc__ or "").partition("\n")[0]
    title = name.replace("-", " ").capitalize()
    return Kind(status, name, title, meaning, issubclass(error, _REFUSALS))


INTERNAL = kind_of(EngramError)
INTERNAL_MESSAGE = "Unexpected error; search the server log for request_id."
INVALID = kind_of(server_errors.InvalidRequest)


def error_rows() -> list[tuple[int, str, str, str]]:
    """All kinds as (status, type, title, meaning), for the reference documentation."""
    classes = [
        error
        for module in (server_errors, bundle_errors, store_errors)
        for error in vars(module).values()
        if isinstance(error, type) and issubclass(error, Exception)
        if error is EngramError or not _is_category(error)
    ]
    kinds = {kind.name: kind for kind in map(kind_of, classes)}
    return sorted((each.status, each.name, each.title, each.meaning) for each in kinds.values())


def _is_category(error: type[Exception]) -> bool:
    """Whether a class only groups others: its name ends in Error, and it has subclasses."""
    return error.__name__.endswith("Error") and bool(error.__subclasses__())


class ProblemDocument(BaseModel):
    """RFC 9457."""

    model_config = ConfigDict(extra="allow")

    type: str = Field(examples=["urn:engram:problem:unknown-task"])
    title: str = Field(examples=["Unknown task"])
    status: int = Field(examples=[404])
    detail: str = Field(examples=["There is no task 'pest'. Did you mean 'pets'?"])
    request_id: str | None
    names: list[str] | None = Field(None, description="The affected names.", examples=[["pest"]])
    suggestions: dict[str, str] | None = Field(
        None, description="Similar existing names.", examples=[{"pest": "pets"}]
    )
    errors: list[dict[str, str]] | None = Field(None, description="The invalid parts.")
    unreadable: list[dict[str, JsonValue]] | None = Field(
        None, description="All images that cannot be read, with `index`, `name` and `reason`."
    )


def responses(
    *statuses: int, model: type[BaseModel] = ProblemDocument, media: str = MEDIA_TYPE
) -> dict[int | str, dict[str, Any]]:
    """The OpenAPI responses of a route that returns problems with these statuses."""
    schema = {"$ref": f"#/components/schemas/{model.__name__}"}
    every = {*statuses, *(_KEY_STATUSES if 401 in statuses else ())}
    return {
        status: {"description": _DESCRIPTIONS[status], "content": {media: {"schema": schema}}}
        for status in sorted(every)
    }


def install(app: FastAPI) -> None:
    """Make the app return every error as a problem document."""
    app.add_exception_handler(EngramError, _on_known_error)
    app.add_exception_handler(TaskStoreError, _on_known_error)
    app.add_exception_handler(RequestValidationError, _on_invalid)
    app.add_exception_handler(HTTPException, _on_http)
    app.add_exception_handler(ClientDisconnect, _on_disconnect)


# Writing problems


def write_problem(
    path: str, kind: Kind, detail: str, headers: Mapping[str, str] | None = None, **members: object
) -> Response:
    """A problem in the format that clients of this path expect; empty members are omitted."""
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
    headers = {"Cache-Control": "no-store", **(headers or {})}
    # ASCII: a name from the request may contain a lone surrogate, which UTF-8 cannot encode.
    return Response(json.dumps(document, ensure_ascii=True), kind.status, headers, media)


def speaks_protocol(path: str) -> bool:
    return path == PROTOCOL or path.startswith(f"{PROTOCOL}/")


def internal_problem(path: str) -> Response:
    """The problem for an unexpected exception, which reveals nothing but the request id."""
    return write_problem(path, INTERNAL, INTERNAL_MESSAGE)


def problem_response(
    error: EngramError | TaskStoreError, known_tasks: Sequence[str] = (), path: str = ""
) -> Response:
    names = tuple(map(str, error.names))
    if _public_message(error) != str(error):
        names = ()  # they may be paths
    suggestions: Mapping[str, str] = getattr(error, "suggestions", {})
    if isinstance(error, _UNKNOWN_TASK) and not suggestions:
        suggestions = suggest(names, known_tasks)
    return write_problem(
        path,
        kind_of(type(error)),
        detail_of(error),
        _headers(error),
        names=names,
        suggestions=suggestions,
        unreadable=getattr(error, "unreadable", ()),
    )


def detail_of(error: EngramError | TaskStoreError) -> str:
    """What an answer says about an error, as a sentence."""
    return _sentence(_public_message(error).strip() or type(error).__name__)


def _public_message(error: EngramError | TaskStoreError) -> str:
    return error.public_message if isinstance(error, TaskStoreError) else str(error)


def suggest(names: Iterable[str], known: Sequence[str]) -> dict[str, str]:
    """The most similar known name for each of the first few names."""
    near = {name: closest_name(name, known) for name in islice(names, MAX_SUGGESTIONS)}
    return {name: match for name, match in near.items() if match is not None}


def _headers(error: EngramError | TaskStoreError) -> dict[str, str]:
    if isinstance(error, server_errors.KeyRequired):
        return {"WWW-Authenticate": 'Bearer realm="engram"'}
    seconds = retry_seconds(error)
    return {} if seconds is None else {"Retry-After": str(seconds)}


def retry_seconds(error: EngramError | TaskStoreError) -> int | None:
    """After how many seconds the client may try again."""
    seconds = getattr(error, "retry_after", None)
    if isinstance(error, store_errors.StoreUnavailable):
        seconds = _STORE_RETRY_SECONDS
    return None if seconds is None else max(1, math.ceil(seconds))


def _sentence(text: str) -> str:
    return text[0].upper() + text[1:] + ("" if text[-1] in ".?!…" else ".")


# Exception handlers


def _note(record: RequestRecord, kind: Kind, error: Exception) -> None:
    record.problem = kind
    record.reason = str(error)


def note_error(
    runtime: Runtime, record: RequestRecord, error: EngramError | TaskStoreError
) -> Kind:
    """Note an error for the logs and the metrics."""
    kind = kind_of(type(error))
    _note(record, kind, error)
    if _public_message(error) != str(error):
        _log.warning("a request failed: %s", error)
    if isinstance(error, EngramError) and error.rejection is not None:
        runtime.metrics.rejected(error.rejection)
    return kind


async def _on_known_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, EngramError | TaskStoreError)  # as `install` registers it
    runtime, path = request.app.state.runtime, request.scope["path"]
    note_error(runtime, request.state.record, error)
    known = runtime.known_tasks
    if isinstance(error, _UNKNOWN_TASK):
        # In a thread, because it compares the names of all tasks: there may be thousands.
        identity: Identity | None = request.state.record.identity
        return await to_thread.run_sync(_unknown_task, error, known, path, identity)
    return problem_response(error, known, path)


def _unknown_task(
    error: EngramError | TaskStoreError, known: Sequence[str], path: str, identity: Identity | None
) -> Response:
    """Suggest only names that the caller may see."""
    if identity is not None and not identity.allows_all_tasks(_MAY_SEE):
        known = [name for name in known if identity.allows(_MAY_SEE, name)]
    return problem_response(without_hint(error, identity), known, path)


def without_hint(
    error: EngramError | TaskStoreError, identity: Identity | None
) -> EngramError | TaskStoreError:
    """Remove the similar name from the message, if the caller may not see every name."""
    if identity is None or identity.allows_all_tasks(_MAY_SEE):
        return error
    if not isinstance(error, _UNKNOWN_TASK) or isinstance(error, store_errors.RetiredTask):
        return error  # has no hint
    return server_errors.UnknownTask(_HINT.sub(".", str(error)), error.names)


async def _on_invalid(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    _note(request.state.record, INVALID, error)
    errors = [
        {"where": ".".join(map(str, each["loc"])), "message": describe_invalid(each)}
        for each in error.errors()[:_MAX_ERRORS]
    ]
    detail = " ".join(f"{each['where']}: {each['message']}" for each in errors[:5])
    return write_problem(request.scope["path"], INVALID, detail, errors=errors)


def describe_invalid(error: Mapping[str, object]) -> str:
    """The message of a pydantic error as a sentence."""
    return str(error["msg"]).removeprefix("Value error, ").rstrip(".") + "."


async def _on_http(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    status = HTTPStatus(error.status_code)
    headers = dict(error.headers or {})
    path: str = request.scope["path"]
    where = OPEN_INFERENCE if speaks_protocol(path) else "/docs"
    if status is HTTPStatus.NOT_FOUND:
        detail = f"There is nothing at {request.url.path}; see {where} for all paths."
    elif status is HTTPStatus.METHOD_NOT_ALLOWED:
        headers["Allow"] = ", ".join(_allowed(request))
        detail = f"{request.method} is not supported at {request.url.path}; see {where}."
    else:
        detail = str(error.detail)
    kind = Kind(status, status.phrase.lower().replace(" ", "-"), status.phrase, detail)
    _note(request.state.record, kind, error)
    return write_problem(path, kind, detail, headers)


def _allowed(request: Request) -> list[str]:
    """All methods of a path; the router reports only those of the first matching route."""
    routes: Sequence[Route] = request.app.state.routes
    matching = (route for route in routes if route.matches(request.scope)[0] is not Match.NONE)
    return sorted({method for route in matching for method in route.methods or ()})


async def _on_disconnect(request: Request, error: Exception) -> Response:
    # The client is gone; the status is for the access log and the metrics.
    return Response(status_code=CLIENT_CLOSED)
