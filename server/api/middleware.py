"""The outermost layer: request ids, the access log, request metrics, and the last resort.

Plain ASGI. It adds nothing between a route and its client, so that streaming and disconnects stay
what they are.
"""

import asyncio
import logging
import re
import time
import uuid
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Literal

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from server import logs
from server.addresses import network_of
from server.api.problems import INTERNAL, REFUSALS, internal_problem
from server.audit import AuditLog, Record
from server.errors import AuditUnavailable
from server.identity import Identity
from server.runtime import Runtime

REQUEST_ID = "X-Request-Id"
# In the scope's state, where the server knows it: when a request's first byte came.
FIRST_BYTE = "first_byte"
UNMATCHED = "unmatched"
# Asked every few seconds by orchestrators and scrapers.
QUIET = frozenset({"/livez", "/readyz", "/metrics", "/v2/health/live", "/v2/health/ready"})

# A disk that takes longer for a line is as good as away.
_AUDIT_SECONDS = 10.0

_Header = tuple[bytes, bytes]
_ID_HEADER = REQUEST_ID.lower().encode()
_SNIFF_HEADER = b"x-content-type-options"

_VALID_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")
_METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "DELETE", "PATCH", "OPTIONS"})

_access = logging.getLogger("engram.access")
_log = logging.getLogger("engram.http")


@dataclass(slots=True)
class RequestRecord:
    """What is known of a request while it is served; routes add what they learn."""

    id: str
    started: float  # with its first byte, on the clock of time.monotonic
    status: int | None = None
    images: int | None = None
    tasks: int | None = None
    body_bytes: int = 0  # received so far, and counted among those in flight
    identity: Identity | None = None  # once it is known; nobody's on public routes
    finished: bool = False  # its line and its measurement are out
    # For the audit log
    address: str | None = None
    proxy: str | None = None  # the trusted one whose word the address is
    begun: bool = False  # the log says so; it will say how it ended
    problem: str | None = None  # the name of what it was refused for
    reason: str | None = None
    details: dict[str, Any] | None = None


class RequestMiddleware:
    """Gives every request an id, and leaves a line and a measurement behind."""

    def __init__(self, app: ASGIApp, runtime: Runtime) -> None:
        self._app = app
        self._metrics = runtime.metrics
        self._bodies = runtime.bodies
        self._tracing = runtime.tracing
        self._proxies = runtime.proxies
        self._audit = runtime.audit
        self._audits_predictions = runtime.settings.audit_predictions

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        # Nothing here reads cookies, and FastAPI would parse them, which may take seconds.
        headers = scope["headers"] = [each for each in scope["headers"] if each[0] != b"cookie"]
        state = scope.setdefault("state", {})
        started = state.get(FIRST_BYTE) or time.monotonic()
        record = state["record"] = RequestRecord(_request_id(headers), started)
        self._locate(scope, record)

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                record.status = message["status"]
                if record.begun and self._audit is not None:
                    await _tell_end(self._audit, scope, record)
                _add_headers(message, record.id)
            elif not message.get("more_body", False):
                # Before the last byte: who has the answer finds it in the log and in the metrics.
                self._finish(scope, record)
            await send(message)

        token = logs.request_id.set(record.id)
        try:
            await self._app(scope, receive, send_with_id)
        except Exception:
            # The boundary: whatever a route did not expect is logged here and told to nobody.
            _log.exception("a request failed unexpectedly")
            record.problem = INTERNAL.name
            if record.status is not None:
                raise  # too late for another answer: the server must cut the connection
            await internal_problem(scope["path"])(scope, receive, send_with_id)
        finally:
            self._finish(scope, record)  # whoever left before the last byte
            logs.request_id.reset(token)

    def _locate(self, scope: Scope, record: RequestRecord) -> None:
        """Where the request comes from: its peer, unless that is a proxy that we trust."""
        if (client := scope.get("client")) is None:
            return
        record.address = client[0]
        if self._proxies is not None:
            origin = self._proxies.origin(client[0], scope["headers"])
            record.address, record.proxy = origin.address, origin.proxy
            scope["client"] = (origin.address, client[1] if origin.proxy is None else 0)
            scope["scheme"] = origin.scheme or scope["scheme"]

    def _finish(self, scope: Scope, record: RequestRecord) -> None:
        if record.finished:
            return
        record.finished = True
        self._bodies.nbytes -= record.body_bytes
        if self._audit is not None:
            self._tell_rest(self._audit, scope, record)
        seconds = time.monotonic() - record.started
        status = record.status or 0
        method = scope["method"] if scope["method"] in _METHODS else "other"
        self._metrics.request(_route(scope), method, status, seconds)
        level = logging.DEBUG if scope["path"] in QUIET and status == 200 else logging.INFO
        if not _access.isEnabledFor(level):
            return
        extra: dict[str, object] = {"status": status, "ms": round(seconds * 1000, 1)}
        if record.address is not None:
            extra["address"] = record.address
        if record.images is not None:
            extra |= {"images": record.images, "tasks": record.tasks}
        if self._tracing is not None and (trace_id := self._tracing.trace_id) is not None:
            extra["trace_id"] = trace_id
        extra |= {"method": scope["method"], "path": scope["path"]}
        _access.log(level, "%s %s %d", scope["method"], scope["path"], status, extra=extra)

    def _tell_rest(self, audit: AuditLog, scope: Scope, record: RequestRecord) -> None:
        """What is in the audit log of requests that nobody waited for."""
        if record.begun:  # and the answer was never begun
            audit.note(audit_entry(scope, record, "ended"))
        elif record.problem in REFUSALS:
            who = record.identity.id if record.identity is not None else None
            source = who or network_of(record.address or "")
            audit.refused(source, audit_entry(scope, record, "refused"))
        elif self._audits_predictions and record.images is not None:
            audit.note(audit_entry(scope, record, "ended"))


async def _tell_end(audit: AuditLog, scope: Scope, record: RequestRecord) -> None:
    """On the disk before the answer is sent. Should that fail now, the log still has the begin."""
    record.begun = False
    with suppress(AuditUnavailable):
        await put_on_record(audit, audit_entry(scope, record, "ended"))


async def put_on_record(audit: AuditLog, entry: Record) -> None:
    """Return when the disk has it, or AuditUnavailable."""
    try:
        await asyncio.wait_for(asyncio.wrap_future(audit.write(entry)), _AUDIT_SECONDS)
    except TimeoutError:
        raise AuditUnavailable("The audit log could not be written in time.") from None


def audit_entry(
    scope: Scope, record: RequestRecord, outcome: Literal["begun", "ended", "refused"]
) -> Record:
    """A request in the words of the audit log; what is None is left out."""
    path = scope.get("path_params", {})
    identity = record.identity
    return {
        "action": getattr(scope.get("route"), "name", UNMATCHED),
        "outcome": outcome,
        "who": None if identity is None else identity.id,
        "name": None if identity is None else identity.name,
        "address": record.address,
        "proxy": record.proxy,
        "task": path.get("task", path.get("name")),
        "version": path.get("version"),
        "label": path.get("label"),
        **(record.details or {}),
        "images": record.images,
        "method": scope["method"],
        "path": _route(scope),
        "status": record.status,
        "problem": record.problem,
        "reason": record.reason,
        "request_id": record.id,
    }


def _request_id(headers: Iterable[_Header]) -> str:
    """The caller's id if it is harmless in a log, else a new one."""
    given = next((value for name, value in headers if name == _ID_HEADER), b"").decode("latin-1")
    return given if _VALID_ID.fullmatch(given) else uuid.uuid4().hex


def _add_headers(message: Message, request_id: str) -> None:
    """To the start of an answer. As bytes: Starlette's headers are looked through for each."""
    headers: list[_Header] = [*message.get("headers", ()), (_ID_HEADER, request_id.encode())]
    if all(name != _SNIFF_HEADER for name, _ in headers):
        headers.append((_SNIFF_HEADER, b"nosniff"))
    message["headers"] = headers


def _route(scope: Scope) -> str:
    """The pattern of the route, never the path itself: that would be a metric per task."""
    pattern = getattr(scope.get("route"), "path_format", None)
    return pattern if isinstance(pattern, str) else UNMATCHED
