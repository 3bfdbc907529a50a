"""The outermost layer: request ids, access log, request metrics, and unexpected errors.

Plain ASGI: it adds nothing between a route and its client, so streaming and disconnects work
unchanged.
"""

import logging
import random
import re
import time
from collections.abc import Iterable

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from engram_server.access.keys import redact
from engram_server.api.audit import audit_end, audit_finished
from engram_server.api.problems import INTERNAL, internal_problem
from engram_server.edge.connections import FIRST_BYTE
from engram_server.observability import logs
from engram_server.observability.metrics import REQUESTS
from engram_server.runtime import CURRENT, RequestRecord, Runtime

REQUEST_ID = "X-Request-Id"
UNMATCHED = "unmatched"
# Orchestrators and scrapers request these every few seconds.
QUIET = frozenset(
    {
        *("/livez", "/readyz", "/metrics", "/v2/health/live", "/v2/health/ready"),
        *("/grpc.health.v1.Health/Check", "/grpc.health.v1.Health/Watch"),
        "/inference.GRPCInferenceService/ServerLive",
        "/inference.GRPCInferenceService/ServerReady",
    }
)

_Header = tuple[bytes, bytes]
_ID_HEADER = REQUEST_ID.lower().encode()
_SNIFF_HEADER = b"x-content-type-options"
_CACHE_HEADER = b"cache-control"

_VALID_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")
_METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "DELETE", "PATCH", "OPTIONS", "gRPC"})

_access = logging.getLogger("engram.access")
_log = logging.getLogger("engram.http")


class RequestMiddleware:
    """Gives every request an id, a line in the access log, and a measurement."""

    def __init__(self, app: ASGIApp, runtime: Runtime) -> None:
        self._app = app
        self._runtime = runtime
        self._proxies = runtime.proxies
        self._audit = runtime.audit

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        # No route reads cookies, and parsing long ones, as FastAPI would, may take seconds.
        headers = scope["headers"] = [each for each in scope["headers"] if each[0] != b"cookie"]
        state = scope.setdefault("state", {})
        started = state.get(FIRST_BYTE) or time.monotonic()
        record = state["record"] = RequestRecord(_request_id(headers), started)
        self._set_address(scope, record)

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                record.status = message["status"]
                if record.audit_begun and self._audit is not None:
                    await audit_end(self._audit, scope, record, _route(scope))
                _add_headers(message, record)
            elif not message.get("more_body", False):
                # Before the last byte: a client with the response finds it in log and metrics.
                finish_request(self._runtime, scope, record)
            await send(message)

        token = logs.request_id.set(record.id)
        CURRENT.set((self._runtime, record))
        try:
            await self._app(scope, receive, send_with_id)
        except Exception:
            # The boundary: log the unexpected error, and reveal nothing of it.
            _log.exception("a request failed unexpectedly")
            record.problem = INTERNAL
            if record.status is not None:
                raise  # the response has started: the server must cut the connection
            await internal_problem(scope["path"])(scope, receive, send_with_id)
        finally:
            # If the client left before the last byte.
            finish_request(self._runtime, scope, record)
            logs.request_id.reset(token)

    def _set_address(self, scope: Scope, record: RequestRecord) -> None:
        """The TCP peer, or the client that a trusted proxy reports."""
        if (client := scope.get("client")) is None:
            return
        record.address = client[0]
        if self._proxies is not None:
            origin = self._proxies.origin(client[0], scope["headers"])
            record.address, record.proxy = origin.address, origin.proxy
            scope["client"] = (origin.address, client[1] if origin.proxy is None else 0)
            scope["scheme"] = origin.scheme or scope["scheme"]


def finish_request(runtime: Runtime, scope: Scope, record: RequestRecord) -> None:
    """Release what a request holds, and write it to the logs and the metrics, once."""
    if record.finished:
        return
    record.finished = True
    record.release()
    route = _route(scope)
    if runtime.audit is not None:
        predictions = runtime.settings.audit_predictions
        audit_finished(runtime.audit, scope, record, route, predictions=predictions)
    seconds = time.monotonic() - record.started
    status = record.status or 0
    method = scope["method"] if scope["method"] in _METHODS else "other"
    runtime.metrics.record(REQUESTS, seconds, route, method, str(status))
    level = logging.DEBUG if scope["path"] in QUIET and status == 200 else logging.INFO
    if not _access.isEnabledFor(level):
        return
    extra: dict[str, object] = {"status": status, "ms": round(seconds * 1000, 1)}
    if record.address is not None:
        extra["address"] = record.address
    if record.images is not None:
        extra |= {"images": record.images, "tasks": record.tasks}
    if runtime.tracing is not None and (trace_id := runtime.tracing.trace_id) is not None:
        extra["trace_id"] = trace_id
    path = redact(scope["path"])
    extra |= {"method": scope["method"], "path": path}
    _access.log(level, "%s %s %d", scope["method"], path, status, extra=extra)


def _request_id(headers: Iterable[_Header]) -> str:
    sent = next((value for name, value in headers if name == _ID_HEADER), b"")
    return request_id(sent.decode("latin-1"))


def request_id(sent: str) -> str:
    """The caller's id if it is safe to log, else a new one."""
    # Not a secret, so without the system call of a UUID: that took a fifth of a small request.
    return sent if _VALID_ID.fullmatch(sent) else f"{random.getrandbits(128):032x}"


def _add_headers(message: Message, record: RequestRecord) -> None:
    """Add our headers to a response. As bytes, which is faster than Starlette's MutableHeaders."""
    headers: list[_Header] = [*message.get("headers", ()), (_ID_HEADER, record.id.encode())]
    names = {name for name, _ in headers}
    if _SNIFF_HEADER not in names:
        headers.append((_SNIFF_HEADER, b"nosniff"))
    # A shared cache knows that Authorization makes a response private, but not X-API-Key.
    identity = record.identity
    if identity is not None:
        if _CACHE_HEADER not in names:
            headers.append((_CACHE_HEADER, b"private, no-store"))
        if identity.quota is not None:
            headers += identity.quota.headers()
    message["headers"] = headers


def _route(scope: Scope) -> str:
    """The pattern of the matched route, which unlike the path has few distinct values."""
    pattern = getattr(scope.get("route"), "path_format", None)
    return pattern if isinstance(pattern, str) else UNMATCHED
