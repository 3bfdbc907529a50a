"""The outermost layer: request ids, the access log, request metrics, and the last resort.

Plain ASGI. It adds nothing between a route and its client, so that streaming and disconnects stay
what they are.
"""

import logging
import re
import time
import uuid
from dataclasses import dataclass
from typing import TYPE_CHECKING

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from server import logs
from server.api.problems import internal_problem
from server.identity import Identity
from server.metrics import Metrics
from server.runtime import BodiesInFlight

if TYPE_CHECKING:  # needs the extra `otel`, which may not be installed
    from server.tracing import Tracing

REQUEST_ID = "X-Request-Id"
# In the scope's state, where the server knows it: when a request's first byte came.
FIRST_BYTE = "first_byte"
UNMATCHED = "unmatched"
# Asked every few seconds by orchestrators and scrapers.
QUIET = frozenset({"/livez", "/readyz", "/metrics", "/v2/health/live", "/v2/health/ready"})

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


class RequestMiddleware:
    """Gives every request an id, and leaves a line and a measurement behind."""

    def __init__(
        self,
        app: ASGIApp,
        metrics: Metrics,
        bodies: BodiesInFlight,
        tracing: "Tracing | None" = None,
    ) -> None:
        self._app = app
        self._metrics = metrics
        self._bodies = bodies
        self._tracing = tracing

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        # Nothing here reads cookies, and FastAPI would parse them, which may take seconds.
        scope["headers"] = [each for each in scope["headers"] if each[0] != b"cookie"]
        state = scope.setdefault("state", {})
        started = state.get(FIRST_BYTE) or time.monotonic()
        record = state["record"] = RequestRecord(_request_id(Headers(scope=scope)), started)

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                record.status = message["status"]
                headers = MutableHeaders(scope=message)
                headers[REQUEST_ID] = record.id
                headers.setdefault("X-Content-Type-Options", "nosniff")
            await send(message)

        token = logs.request_id.set(record.id)
        try:
            await self._app(scope, receive, send_with_id)
        except Exception:
            # The boundary: whatever a route did not expect is logged here and told to nobody.
            _log.exception("a request failed unexpectedly")
            if record.status is not None:
                raise  # too late for another answer: the server must cut the connection
            await internal_problem(scope["path"])(scope, receive, send_with_id)
        finally:
            self._finish(scope, record)
            logs.request_id.reset(token)

    def _finish(self, scope: Scope, record: RequestRecord) -> None:
        self._bodies.nbytes -= record.body_bytes
        seconds = time.monotonic() - record.started
        status = record.status or 0
        method = scope["method"] if scope["method"] in _METHODS else "other"
        self._metrics.request(_route(scope), method, status, seconds)
        level = logging.DEBUG if scope["path"] in QUIET and status == 200 else logging.INFO
        if not _access.isEnabledFor(level):
            return
        extra: dict[str, object] = {"status": status, "ms": round(seconds * 1000, 1)}
        if record.images is not None:
            extra |= {"images": record.images, "tasks": record.tasks}
        if self._tracing is not None and (trace_id := self._tracing.trace_id) is not None:
            extra["trace_id"] = trace_id
        extra |= {"method": scope["method"], "path": scope["path"]}
        _access.log(level, "%s %s %d", scope["method"], scope["path"], status, extra=extra)


def _request_id(headers: Headers) -> str:
    """The caller's id if it is harmless in a log, else a new one."""
    given = headers.get(REQUEST_ID, "")
    return given if _VALID_ID.fullmatch(given) else uuid.uuid4().hex


def _route(scope: Scope) -> str:
    """The pattern of the route, never the path itself: that would be a metric per task."""
    pattern = getattr(scope.get("route"), "path_format", None)
    return pattern if isinstance(pattern, str) else UNMATCHED
