"""Connection limits that uvicorn does not have.

The only module that uses uvicorn's private `HttpToolsProtocol`; pyproject.toml bounds its version.

| limit (setting)                          | enforced in                     | response        |
|------------------------------------------|---------------------------------|-----------------|
| `connections`, `connections_per_address` | `connection_made`               | 503             |
| `header_bytes`, `header_count`           | `on_url`, `on_header`, `_feed`  | 431             |
| `header_seconds`                         | `_watch`, while reading headers | 408             |
| `idle_seconds`                           | `_watch`, between requests      | close           |
| `send_seconds`, `min_bytes_per_second`   | `pause_writing`                 | close           |
| invalid or ambiguous HTTP/1.0 or 1.1     | the parser, `on_header`,        | 400             |
|                                          | `on_headers_complete`           |                 |
| pipelined requests (16)                  | `on_headers_complete`           | close           |
| a body that continues after the response | `on_response_complete`          | close           |

Each rejection counts in `engram_rejections_total`. The limits of bodies are in
`engram_server.api.bodies`. An error response is written only if no other response is in progress;
otherwise the connection closes after those.

Trailers of a chunked body count as headers: bytes, lines, and time, which is that of the body. A
response that is sent before the end of the body closes the connection, and the rest of the body is
not parsed. It is read at a limited rate, because reading takes time from other connections.
"""

import asyncio
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable
from itertools import chain
from typing import Any, Literal

import httptools
from starlette.responses import Response
from uvicorn._types import (
    ASGI3Application,
    ASGIReceiveCallable,
    ASGISendCallable,
    ASGISendEvent,
    HTTPResponseStartEvent,
    Scope,
)
from uvicorn.config import Config
from uvicorn.protocols.http.httptools_impl import (
    HEADER_VALUE_RE,
    STATUS_LINE,
    HttpToolsProtocol,
    RequestResponseCycle,
)
from uvicorn.server import ServerState

from engram_server.edge.proxies import network_of
from engram_server.errors import (
    EngramError,
    HeadersTooLarge,
    MalformedRequest,
    RequestTooSlow,
    TooManyConnections,
)
from engram_server.observability.metrics import CONNECTIONS, Metrics
from engram_server.settings import Settings

# Key in the ASGI state: when the first byte of the request arrived, by time.monotonic.
FIRST_BYTE = "first_byte"
# The same: whether the whole body had arrived when the application was called.
BODY_ARRIVED = "body_arrived"
RenderError = Callable[[EngramError], Response]

# What is being read: nothing yet, the headers or the body of the next request.
Reading = Literal["request", "header", "body"]
# What the connection waits for: our response, or input.
Waiting = Literal["answer"] | Reading

# Time for the client to read the error before the connection is aborted.
LINGER_SECONDS = 2.0
# At which input of such a connection is read: the default limit of a body in that time.
DISCARDED_BYTES_PER_SECOND = 16 * 2**20
VERSIONS = ("1.0", "1.1")
# Maximum number of pipelined requests per connection.
MAX_PIPELINED = 16
# Connections above the limit that get an error response; further ones are aborted.
_REJECTED_AT_ONCE = 256


class Connections:
    """Counts the connections of a server, in total and per address."""

    def __init__(self, settings: Settings, metrics: Metrics, render: RenderError) -> None:
        self.settings = settings
        self.render = render
        self.metrics = metrics
        self._all = 0
        self._by_address: Counter[str] = Counter()
        metrics.watch(CONNECTIONS, lambda: self._all)

    def protocol(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> "LimitedProtocol":
        """Create the protocol of one connection; passed to uvicorn as `http=`."""
        return LimitedProtocol(self, config, server_state, app_state, _loop)

    def add(self, address: str) -> TooManyConnections | None:
        """Count a connection; returns the error if it exceeds a limit."""
        self._all += 1
        self._by_address[address] += 1
        if self._all > self.settings.connections:
            self.metrics.rejected("connections")
            return TooManyConnections(
                f"Too many open connections (limit {self.settings.connections}). Retry later."
            )
        if self._by_address[address] > self.settings.connections_per_address:
            self.metrics.rejected("address_connections")
            return TooManyConnections(
                f"Too many connections from your address (limit "
                f"{self.settings.connections_per_address}). Reuse or close some."
            )
        return None

    def remove(self, address: str) -> None:
        self._all -= 1
        self._by_address[address] -= 1
        if not self._by_address[address]:
            del self._by_address[address]

    @property
    def flooded(self) -> bool:
        """Whether to abort new connections without a response."""
        return self._all > self.settings.connections + _REJECTED_AT_ONCE


class _Rejected(Exception):
    """Raised in a parser callback to stop parsing."""

    def __init__(self, error: EngramError, reason: str) -> None:
        super().__init__(str(error))
        self.error = error
        self.reason = reason


class LimitedProtocol(HttpToolsProtocol):
    """uvicorn's connection with the limits above."""

    def __init__(
        self,
        shared: Connections,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self._shared = shared
        self._settings = shared.settings
        self._address = ""
        self._reading: Reading = "request"
        self._waiting: Waiting = "answer"
        self._timer: asyncio.TimerHandle | None = None
        self._send_timer: asyncio.TimerHandle | None = None
        # While the client does not keep up: unsent bytes at the last look, and taken since then.
        self._unsent = self._taken = 0
        self._ignoring_input = False
        # Of the current headers and trailers: parsed bytes, and count.
        self._header_bytes = self._header_count = 0
        # Bytes received since headers, a piece of a body, or a message were complete.
        self._incomplete_bytes = 0
        self._completed = False  # any of those, in the last read
        self._has_host = False
        self._answered_early = False  # before the end of the request body

    # Connections

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._address = network_of(self.client[0]) if self.client else ""
        error = self._shared.add(self._address)
        if error is None:
            self._watch()
        elif self._shared.flooded:
            self._ignoring_input = True
            transport.abort()
        else:
            self._respond(error)

    def connection_lost(self, exc: Exception | None) -> None:
        self._shared.remove(self._address)
        for timer in (self._timer, self._send_timer):
            if timer is not None:
                timer.cancel()
        super().connection_lost(exc)

    # Reading

    def data_received(self, data: bytes) -> None:
        if not self._ignoring_input:
            self._feed(data)
        if self._ignoring_input:
            self._discard(len(data))
        else:
            self._watch()

    def _discard(self, size: int) -> None:
        """Continue to read after the time that this many bytes may take."""
        self.flow.pause_reading()
        self.loop.call_later(size / DISCARDED_BYTES_PER_SECOND, self._read_on)

    def _read_on(self) -> None:
        if not self.transport.is_closing():
            self.flow.resume_reading()

    def _feed(self, data: bytes) -> None:
        self._completed = False
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            rest = data[upgrade.args[0] :]
        except httptools.HttpParserError as error:
            rejected = error.__context__
            if isinstance(rejected, _Rejected):
                self._reject(rejected.error, rejected.reason)
            else:
                self._reject(MalformedRequest("Not a valid HTTP/1.1 request."), "malformed")
            return
        else:
            self._check_incomplete(len(data))
            return
        # No upgrades: answer this request and close.
        framing = self._body_framing()
        if framing is None or self._ignoring_input:
            self._close_after_responses()
        else:
            self._parse_body(framing)
            self._feed(rest)

    def _check_incomplete(self, received: int) -> None:
        # A header or trailer line that never ends does not reach the callbacks.
        self._incomplete_bytes = 0 if self._completed else self._incomplete_bytes + received
        if self._reading != "request" and self._incomplete_bytes > self._settings.header_bytes:
            self._reject(self._too_large(), "header_bytes")

    def _body_framing(self) -> bytes | None:
        """The header that says where the body of the request ends; None if it has no body."""
        for name, value in self.headers:
            if name == b"transfer-encoding" or (name == b"content-length" and value.strip(b"0")):
                return name + b": " + value
        return None

    def _parse_body(self, framing: bytes) -> None:
        """Parse the body of a request with `Upgrade`, whose parser stops after the headers.

        Java's client sends such requests by default.
        """
        self.parser = httptools.HttpRequestParser(_BodyCallbacks(self))
        self.parser.feed_data(b"POST / HTTP/1.1\r\n" + framing + b"\r\n\r\n")

    def end_upgraded(self) -> None:
        self.on_message_complete()
        self._close_after_responses()

    @property
    def ignoring_input(self) -> bool:
        return self._ignoring_input

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self.scope["state"][FIRST_BYTE] = time.monotonic()
        if self._send_timer is not None and not self.transport.get_write_buffer_size():
            # The client has read all earlier responses.
            self._send_timer.cancel()
            self._send_timer = None
        self._reading = "header"
        self._header_bytes = self._header_count = 0
        self._has_host = False

    def on_url(self, url: bytes) -> None:
        super().on_url(url)
        self._add_to_header(len(url))

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._reading == "header":  # trailers are ignored
            super().on_header(name, value)
        self._header_count += 1
        if self._header_count > self._settings.header_count:
            most = self._settings.header_count
            too_many = HeadersTooLarge(f"The request has more than {most} headers.")
            raise _Rejected(too_many, "header_count")
        self._add_to_header(len(name) + len(value) + 4)
        name = name.lower()
        if name == b"host":
            if self._has_host:
                raise _Rejected(MalformedRequest("The request has two Host headers."), "malformed")
            self._has_host = True
        elif name == b"transfer-encoding" and value.lower() != b"chunked":
            # Otherwise the parser reads the body until the connection closes.
            error = MalformedRequest("Unsupported Transfer-Encoding. Only 'chunked' is supported.")
            raise _Rejected(error, "malformed")

    def _add_to_header(self, size: int) -> None:
        self._header_bytes += size
        if self._header_bytes > self._settings.header_bytes:
            raise _Rejected(self._too_large(), "header_bytes")

    def _too_large(self) -> HeadersTooLarge:
        most = self._settings.header_bytes
        return HeadersTooLarge(f"The request line, headers and trailers exceed {most} bytes.")

    def on_headers_complete(self) -> None:
        if len(self.pipeline) >= MAX_PIPELINED:
            error = TooManyConnections(f"More than {MAX_PIPELINED} pipelined requests.")
            raise _Rejected(error, "pipelined")
        self._check_version()
        super().on_headers_complete()
        if self.parser.should_upgrade():
            self.cycle.keep_alive = False
        self._reading = "body"
        self._completed = True

    def _check_version(self) -> None:
        version = self.parser.get_http_version()
        if version not in VERSIONS:
            error = MalformedRequest(f"HTTP/{version} is not supported. Use HTTP/1.1.")
            raise _Rejected(error, "malformed")
        if version == "1.1" and not self._has_host:
            raise _Rejected(MalformedRequest("The request has no Host header."), "malformed")

    def on_body(self, body: bytes) -> None:
        super().on_body(body)
        self._completed = True

    def on_message_complete(self) -> None:
        if self.parser.should_upgrade() and self._body_framing() is not None:
            return  # the body follows
        super().on_message_complete()
        self._reading = "request"
        self._completed = True

    # Timeouts: at most one timer runs, and none while a response is in progress.

    def on_response_complete(self) -> None:
        # As inherited, except for its timer: a stray line break does not stop ours.
        self.server_state.total_requests += 1
        if self.transport.is_closing():
            self._timer = self.loop.call_later(self._settings.send_seconds, self.transport.abort)
            return
        if self._answered_early:
            self._close(self._on_unread_body)
            return
        self.flow.resume_reading()
        if self.pipeline:
            self._start_asgi_task(*self.pipeline.pop())
        self._watch()

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: ASGI3Application) -> None:
        """Run the application; a response before the end of the request's body closes."""
        start: HTTPResponseStartEvent | None = None

        async def send(message: ASGISendEvent) -> None:
            nonlocal start
            if message["type"] == "http.response.start":
                self._answered_early = self._answered_early or cycle.more_body
                start = message
                return
            if start is None:
                await cycle.send(message)
                return
            begun, start = start, None
            if cycle.flow.write_paused and not cycle.disconnected:
                await cycle.flow.drain()
            if not self._write_whole(cycle, begun, message):
                if self._answered_early:
                    begun["headers"] = [*begun["headers"], (b"connection", b"close")]
                await cycle.send(begun)
                # uvicorn would close at once, and unread input turn that into a reset.
                cycle.keep_alive = cycle.keep_alive or self._answered_early
                await cycle.send(message)

        def run(
            scope: Scope, receive: ASGIReceiveCallable, _send: ASGISendCallable
        ) -> Awaitable[None]:
            scope["state"][BODY_ARRIVED] = not cycle.more_body
            return app(scope, receive, send)

        super()._start_asgi_task(cycle, run)

    def _write_whole(
        self, cycle: RequestResponseCycle, start: HTTPResponseStartEvent, message: ASGISendEvent
    ) -> bool:
        """Write an ordinary response at once, which is much faster than head and body apart.

        Returns False for all others, for which uvicorn's code is the reference.
        """
        if message["type"] != "http.response.body":
            return False
        body, headers = message.get("body", b""), [*cycle.default_headers, *start["headers"]]
        fields = dict(headers)
        if (
            message.get("more_body", False)
            or cycle.scope["method"] == "HEAD"
            or cycle.disconnected
            or fields.get(b"content-length") != b"%d" % len(body)
            or b"connection" in fields
            or b"transfer-encoding" in fields
        ):
            return False
        if HEADER_VALUE_RE.search(b"".join(chain.from_iterable(headers))):
            raise RuntimeError("a response header has a control character")
        close = not cycle.keep_alive or self._answered_early
        self.transport.write(_head(start["status"], headers, close=close) + body)
        cycle.response_started = cycle.response_complete = True
        cycle.waiting_for_100_continue = False
        cycle.message_event.set()
        if not cycle.keep_alive:
            self.transport.close()
        cycle.on_response()
        return True

    @property
    def _responding(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _watch(self) -> None:
        """Start the timer of what the connection waits for."""
        waiting: Waiting = "answer" if self._responding else self._reading
        if waiting == self._waiting:
            return
        self._waiting = waiting
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if waiting == "request":
            self._timer = self.loop.call_later(self._settings.idle_seconds, self._on_timeout)
        elif waiting == "header":
            self._timer = self.loop.call_later(self._settings.header_seconds, self._on_timeout)

    def _on_timeout(self) -> None:
        if self._waiting == "header":
            seconds = self._settings.header_seconds
            error = RequestTooSlow(f"The headers were not complete after {seconds:g} seconds.")
            self._reject(error, "header_time")
        else:
            self._shared.metrics.rejected("idle")
            self._close()

    def _on_unread_body(self) -> None:
        """The client still sends a body that was answered."""
        self._shared.metrics.rejected("unread_body")
        self.transport.abort()

    # Sending

    def pause_writing(self) -> None:
        super().pause_writing()
        self._unsent = self.transport.get_write_buffer_size()
        if self._send_timer is None:
            self._taken = 0
            self._start_send_timer()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._count_taken()
        # The timer goes on: a client that reads a little at a time must keep up over its period.

    def _start_send_timer(self) -> None:
        seconds = self._settings.send_seconds
        self._send_timer = self.loop.call_later(seconds, self._on_send_timer)

    def _count_taken(self) -> None:
        unsent = self.transport.get_write_buffer_size()
        self._taken += max(0, self._unsent - unsent)
        self._unsent = unsent

    def _on_send_timer(self) -> None:
        """Abort the connection if the client read too little of its responses in the period."""
        self._send_timer = None
        settings = self._settings
        if not self.transport.get_write_buffer_size():
            return
        self._count_taken()
        if self._taken < settings.min_bytes_per_second * settings.send_seconds:
            self._shared.metrics.rejected("send_time")
            self._ignoring_input = True
            self.transport.abort()
            return
        self._taken = 0
        self._start_send_timer()

    # Ending

    def _reject(self, error: EngramError, reason: str) -> None:
        self._shared.metrics.rejected(reason)
        if not self._responding:
            self._respond(error)
        elif self._reading == "body" and not (self.pipeline or self.cycle.response_started):
            # Half a body: the application sees a disconnect and writes nothing.
            self.cycle.disconnected = True
            self.cycle.waiting_for_100_continue = False
            self.cycle.message_event.set()
            self._respond(error)
        else:
            self._close_after_responses()

    def _respond(self, error: EngramError) -> None:
        self.transport.write(as_bytes(self._shared.render(error)))
        self._close()

    def _close_after_responses(self) -> None:
        """Ignore further input and close after the pending responses."""
        self._ignoring_input = True
        self.cycle.keep_alive = False
        self._watch()  # stops the timer

    def _close(self, then: Callable[[], None] | None = None) -> None:
        """Ignore further input, and close when the client had time to read the response.

        `then` is called instead of aborting the connection at that time.
        """
        self._ignoring_input = True
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self.loop.call_later(LINGER_SECONDS, then or self.transport.abort)
        self.flow.resume_reading()  # unread input would turn the close into a reset
        if self.transport.can_write_eof():
            self.transport.write_eof()
        else:
            self.transport.close()


class _BodyCallbacks:
    """Pass the body of one request to its connection, and ignore what follows."""

    def __init__(self, protocol: LimitedProtocol) -> None:
        self._protocol = protocol

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self._protocol.ignoring_input:
            self._protocol.on_header(name, value)

    def on_body(self, body: bytes) -> None:
        if not self._protocol.ignoring_input:
            self._protocol.on_body(body)

    def on_message_complete(self) -> None:
        if not self._protocol.ignoring_input:
            self._protocol.end_upgraded()


def as_bytes(response: Response) -> bytes:
    """Serialise a response that closes the connection."""
    return _head(response.status_code, response.raw_headers, close=True) + bytes(response.body)


def _head(status: int, headers: Iterable[tuple[bytes, bytes]], *, close: bool) -> bytes:
    lines = [b"%b: %b\r\n" % field for field in headers]
    if close:
        lines.append(b"connection: close\r\n")
    return b"%b%b\r\n" % (STATUS_LINE[status], b"".join(lines))
