"""One call: its identity, its messages within the limits, its errors, and its line in the logs."""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, Protocol
from urllib.parse import unquote

import grpc
from engram_bundle.errors import TaskStoreError
from engram_bundle.limits import readable_size
from starlette.datastructures import Headers

from engram_server.access.identity import Identity
from engram_server.api.audit import audit_begin, audit_end
from engram_server.api.auth import Requires, identity_of, token_of
from engram_server.api.bodies import SMALL_BODY_BYTES
from engram_server.api.dependencies import SLOT_SECONDS
from engram_server.api.middleware import REQUEST_ID, finish_request, request_id
from engram_server.api.problems import (
    CLIENT_CLOSED,
    INTERNAL,
    INTERNAL_MESSAGE,
    detail_of,
    note_error,
    retry_seconds,
    without_hint,
)
from engram_server.api.routes.v2.tensors import decompress
from engram_server.edge.proxies import network_of
from engram_server.engine.shares import Pool
from engram_server.errors import (
    BodyTooLarge,
    EngramError,
    Overloaded,
    RequestTooSlow,
    TooManyConnections,
)
from engram_server.observability import logs
from engram_server.runtime import CURRENT, RequestRecord, Runtime

# The gRPC status of an HTTP status. Other 4xx are about the request itself.
CODES: Final[Mapping[int, grpc.StatusCode]] = {
    401: grpc.StatusCode.UNAUTHENTICATED,
    403: grpc.StatusCode.PERMISSION_DENIED,
    404: grpc.StatusCode.NOT_FOUND,
    408: grpc.StatusCode.DEADLINE_EXCEEDED,
    409: grpc.StatusCode.FAILED_PRECONDITION,
    412: grpc.StatusCode.FAILED_PRECONDITION,
    429: grpc.StatusCode.RESOURCE_EXHAUSTED,
    500: grpc.StatusCode.INTERNAL,
    503: grpc.StatusCode.UNAVAILABLE,
    504: grpc.StatusCode.DEADLINE_EXCEEDED,
}
# Standard metadata: a client that retries waits this long.
RETRY: Final = "grpc-retry-pushback-ms"
METHOD: Final = "gRPC"  # in place of the HTTP method, in logs and metrics

# Of the message of an error: it is sent as a header, and clients reject long ones.
_DETAIL_CHARS: Final = 2000
_GZIP, _ZLIB = b"\x1f\x8b", b"\x78"

_log = logging.getLogger("engram.grpc")


class Context(Protocol):
    """What we use of grpc.aio's context of a call."""

    def peer(self) -> str: ...
    def time_remaining(self) -> float | None: ...
    def invocation_metadata(self) -> list[tuple[str, str | bytes]] | None: ...
    def set_trailing_metadata(self, metadata: tuple[tuple[str, str], ...]) -> None: ...
    async def read(self) -> Any: ...  # noqa: ANN401
    async def write(self, message: bytes) -> None: ...
    async def abort(self, code: grpc.StatusCode, details: str) -> None: ...


@dataclass(frozen=True)
class Method:
    """One method of a service. The audit log has its `name`, as it has that of a route."""

    path: str  # `/package.Service/Method`
    name: str
    requires: Requires
    run: Callable[["Call"], Awaitable[None]]

    @property
    def path_format(self) -> str:
        """As of a route, for logs and metrics."""
        return self.path


class Call:
    """One call of a method."""

    def __init__(self, runtime: Runtime, method: Method, context: Context) -> None:
        pairs = context.invocation_metadata() or ()
        # Keys are ASCII and in lower case; those that end with -bin have bytes.
        raw = [
            (key.encode(), each.encode("latin-1", "replace"))
            for key, each in pairs
            if isinstance(each, str)
        ]
        self.headers = Headers(raw=raw)
        self.runtime = runtime
        self.method = method
        self.record = RequestRecord(request_id(self.headers.get(REQUEST_ID, "")), time.monotonic())
        self.trailing = {REQUEST_ID.lower(): self.record.id}
        self._context = context
        self._path_params: dict[str, str] = {}
        self.record.address = _address(context.peer())
        if runtime.proxies is not None and self.record.address:
            origin = runtime.proxies.origin(self.record.address, raw)
            self.record.address, self.record.proxy = origin.address, origin.proxy

    @property
    def identity(self) -> Identity:
        return identity_of(self.record)

    @property
    def deadline_ms(self) -> float | None:
        """What remains of the client's deadline."""
        seconds = self._context.time_remaining()
        return None if seconds is None else max(seconds, 0.001) * 1000

    def name_model(self, name: str, version: str = "") -> None:
        """Note the model for the audit log."""
        self._path_params = {"name": name} | ({"version": version} if version else {})

    async def handle(self, calls: Pool) -> None:
        """Run the method, and end the call with its status."""
        tracing = self.runtime.tracing
        with nullcontext() if tracing is None else tracing.call(self.method.path, self.headers):
            failure = await self._finish(calls)
        self._context.set_trailing_metadata(tuple(self.trailing.items()))
        if failure is not None:
            await self._context.abort(*failure)

    async def _finish(self, calls: Pool) -> tuple[grpc.StatusCode, str] | None:
        """Run the method to its end, and log it; returns the status if it failed."""
        token = logs.request_id.set(self.record.id)
        CURRENT.set((self.runtime, self.record))
        try:
            await self._run(calls)
            self.record.status = 200
        except (EngramError, TaskStoreError) as error:
            return self._fail(error)
        except (asyncio.CancelledError, grpc.aio.BaseError):  # the client is gone
            self.record.status = CLIENT_CLOSED
            raise
        except Exception:  # noqa: BLE001 - the boundary: log it, and reveal nothing of it
            _log.exception("a call failed unexpectedly")
            self.record.problem, self.record.status = INTERNAL, INTERNAL.status
            return grpc.StatusCode.INTERNAL, INTERNAL_MESSAGE
        finally:
            # Before the status is sent: a client that has it finds the call in log and metrics.
            finish_request(self.runtime, self._scope(), self.record)
            logs.request_id.reset(token)
        return None

    async def _run(self, calls: Pool) -> None:
        network = network_of(self.record.address or "")
        if not calls.take(network, 1):
            self.runtime.metrics.rejected("calls")
            raise TooManyConnections(f"{calls.describe('calls', network)}; try again later")
        self.record.releases.append(partial(calls.give_back, network, 1))
        if not self.method.requires.public:
            await self.method.requires.admit(self.runtime, self.record, token_of(self.headers))
        await self.method.run(self)

    def _fail(self, error: EngramError | TaskStoreError) -> tuple[grpc.StatusCode, str]:
        kind = note_error(self.runtime, self.record, error)
        self.record.status = kind.status
        if (seconds := retry_seconds(error)) is not None:
            self.trailing[RETRY] = str(1000 * seconds)
        code = CODES.get(kind.status, grpc.StatusCode.INVALID_ARGUMENT)
        return code, detail_of(without_hint(error, self.record.identity))[:_DETAIL_CHARS]

    def _scope(self) -> dict[str, Any]:
        """As of an HTTP request, for logs and metrics."""
        return {
            "method": METHOD,
            "path": self.method.path,
            "route": self.method,
            "path_params": self._path_params,
        }

    @asynccontextmanager
    async def audited(self) -> AsyncIterator[None]:
        """Record a change before it is made, and when it was made."""
        audit, path = self.runtime.audit, self.method.path
        await audit_begin(audit, self._scope(), self.record, path)
        yield
        if audit is not None:
            self.record.status = 200
            await audit_end(audit, self._scope(), self.record, path)

    async def receive(self, limit: int = SMALL_BODY_BYTES) -> bytes:
        """The next message, decompressed; empty if there is none.

        The size of a message is unknown until it is complete, so that it holds the largest until
        then.
        """
        settings, pool = self.runtime.settings, self.runtime.pools.body_bytes
        if not await self.record.wait_for(pool, settings.body_bytes, SLOT_SECONDS):
            self.runtime.metrics.rejected("inflight_body_bytes")
            text = pool.describe("bytes of request bodies", self.record.caller)
            raise Overloaded(f"{text}; try again later", retry_after=1)
        message = await self._read()
        self.record.give_back(pool, settings.body_bytes - len(message))
        if message.startswith((_GZIP, _ZLIB)):  # no message of ours starts like this
            work = partial(decompress, message, limit)
            return await self.runtime.threads.json.run(self.record.caller, work)
        if len(message) > limit:
            raise BodyTooLarge(f"The message exceeds the limit of {readable_size(limit)}.")
        return message

    async def _read(self) -> bytes:
        seconds = self.runtime.settings.body_seconds
        try:
            async with asyncio.timeout(seconds):
                message = await self._context.read()
        except TimeoutError:
            self.runtime.metrics.rejected("body_time")
            raise RequestTooSlow(
                f"The message was not complete after {seconds:g} seconds."
            ) from None
        return b"" if message is grpc.aio.EOF else message

    async def send(self, message: Any) -> None:  # noqa: ANN401 - any protobuf message
        await self.send_bytes(message.SerializeToString())

    async def send_bytes(self, message: bytes) -> None:
        """Send a message. Until the client has taken it, the call keeps its share of answers."""
        await self._context.write(message)


def _address(peer: str) -> str | None:
    """The address in grpc's name of a peer: `ipv4:127.0.0.1:9000` or `ipv6:%5B::1%5D:9000`."""
    kind, _, rest = peer.partition(":")
    if kind not in ("ipv4", "ipv6"):
        return None
    return unquote(rest).rpartition(":")[0].strip("[]")
