"""The limits of a connection, which uvicorn does not have: in front of, between and after requests.

| limit (setting)                          | enforced in                     | the client sees |
|------------------------------------------|---------------------------------|-----------------|
| `connections`, `connections_per_address` | `connection_made`               | 503             |
| `header_bytes`, `header_count`           | `on_url`, `on_header`, `_feed`  | 431             |
| `header_seconds`                         | `_watch`, while a header comes  | 408             |
| `idle_seconds`                           | `_watch`, between requests      | a close         |
| `send_seconds`                           | `pause_writing`                 | a close         |
| what is no HTTP/1.1, or ambiguous        | the parser, `on_header`         | 400             |
| requests sent before earlier answers     | `on_headers_complete`           | a close         |
| a body that goes on after the answer     | `_watch`                        | a close         |

Each of them counts in `engram_rejections_total`. Bodies have their limits (`body_seconds`,
`body_bytes`, `inflight_body_bytes`) where they are read: server/api/http.py.

A refusal is written where no other answer is under way; else the connection ends after those.
"""

import asyncio
import time
from collections import Counter
from typing import Any, Literal

import httptools
from starlette.responses import Response
from uvicorn.config import Config
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol
from uvicorn.server import ServerState

from server.addresses import network_of
from server.api.middleware import FIRST_BYTE
from server.api.problems import (
    HeadersTooLarge,
    MalformedRequest,
    RequestError,
    RequestTooSlow,
    TooManyConnections,
    of_error,
)
from server.metrics import Metrics
from server.settings import Settings

# What is read: nothing of the next request yet, its header, or its body.
Reading = Literal["request", "header", "body"]
# What a connection waits for: its own answer, or that.
Waiting = Literal["answer"] | Reading

# How long a client may take to see why its connection ends, before it is cut.
LINGER_SECONDS = 2.0
# Requests that wait for the answers of earlier ones on the same connection.
MAX_PIPELINED = 16
# So many connections beyond the limit are told why they are refused; more are only closed.
_REFUSED_AT_ONCE = 256


class Connections:
    """All connections of a server: how many there are, and from where."""

    def __init__(self, settings: Settings, metrics: Metrics) -> None:
        self.settings = settings
        self.metrics = metrics
        self._all = 0
        self._by_address: Counter[str] = Counter()
        metrics.connections.set_function(lambda: self._all)

    def protocol(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> "LimitedProtocol":
        """One connection's protocol: what uvicorn takes as `http=`."""
        return LimitedProtocol(self, config, server_state, app_state, _loop)

    def add(self, address: str) -> TooManyConnections | None:
        """Count a connection; the reason if it is one too many."""
        self._all += 1
        self._by_address[address] += 1
        if self._all > self.settings.connections:
            self.metrics.rejected("connections")
            return TooManyConnections(
                f"This server has the {self.settings.connections} connections it may have."
            )
        if self._by_address[address] > self.settings.connections_per_address:
            self.metrics.rejected("address_connections")
            return TooManyConnections(
                f"There are {self.settings.connections_per_address} connections from your "
                f"address already: use them again, or close some."
            )
        return None

    def remove(self, address: str) -> None:
        self._all -= 1
        self._by_address[address] -= 1
        if not self._by_address[address]:
            del self._by_address[address]

    @property
    def flooded(self) -> bool:
        """Whether there are too many even to tell each that there are too many."""
        return self._all > self.settings.connections + _REFUSED_AT_ONCE


class _Refused(Exception):
    """Raised within the parser's callbacks, to stop it."""

    def __init__(self, error: RequestError, reason: str) -> None:
        super().__init__(str(error))
        self.error = error
        self.reason = reason


class LimitedProtocol(HttpToolsProtocol):
    """uvicorn's connection, with the limits above."""

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
        self._deaf = False  # whatever else arrives is dropped
        # Of the header that is read now: its bytes, by its parsed parts and by what was received.
        self._header_bytes = self._header_count = self._header_received = 0
        self._has_host = False
        self._ended_message = False  # since the last read

    # Connections

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._address = network_of(self.client[0]) if self.client else ""
        refused = self._shared.add(self._address)
        if refused is None:
            self._watch()
        elif self._shared.flooded:
            self._deaf = True
            transport.abort()
        else:
            self._answer(refused)

    def connection_lost(self, exc: Exception | None) -> None:
        self._shared.remove(self._address)
        for timer in (self._timer, self._send_timer):
            if timer is not None:
                timer.cancel()
        super().connection_lost(exc)

    # Reading

    def data_received(self, data: bytes) -> None:
        if not self._deaf:
            self._feed(data)
        if not self._deaf:
            self._watch()

    def _feed(self, data: bytes) -> None:
        before, self._ended_message = self._reading, False
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            # Nothing else is spoken here: the request is answered as it is, and is the last.
            self._end_after_answers()
            return
        except httptools.HttpParserError as error:
            refused = error.__context__
            if isinstance(refused, _Refused):
                self._refuse(refused.error, refused.reason)
            else:
                self._refuse(MalformedRequest("This is not an HTTP/1.1 request."), "malformed")
            return
        # A header without end never comes to the callbacks.
        if self._reading == "header" and before != "body" and not self._ended_message:
            self._header_received += len(data)
            if self._header_received > self._settings.header_bytes:
                self._refuse(self._too_large(), "header_bytes")

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self.scope["state"][FIRST_BYTE] = time.monotonic()
        self._reading = "header"
        self._header_bytes = self._header_count = self._header_received = 0
        self._has_host = False

    def on_url(self, url: bytes) -> None:
        super().on_url(url)
        self._add_to_header(len(url))

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._reading == "header":  # and not a trailer, which says nothing here
            super().on_header(name, value)
        self._header_count += 1
        if self._header_count > self._settings.header_count:
            most = self._settings.header_count
            too_many = HeadersTooLarge(f"The request has more than the {most} headers it may have.")
            raise _Refused(too_many, "header_count")
        self._add_to_header(len(name) + len(value) + 4)
        name = name.lower()
        if name == b"host":
            if self._has_host:
                raise _Refused(MalformedRequest("The request has two Host headers."), "malformed")
            self._has_host = True
        elif name == b"transfer-encoding" and value.lower() != b"chunked":
            # The parser would take everything up to the end of the connection for its body.
            error = MalformedRequest("Transfer-Encoding is understood as 'chunked' alone.")
            raise _Refused(error, "malformed")

    def _add_to_header(self, size: int) -> None:
        self._header_bytes += size
        if self._header_bytes > self._settings.header_bytes:
            raise _Refused(self._too_large(), "header_bytes")

    def _too_large(self) -> HeadersTooLarge:
        most = self._settings.header_bytes
        return HeadersTooLarge(f"The address and the headers have more than {most} bytes.")

    def on_headers_complete(self) -> None:
        if len(self.pipeline) >= MAX_PIPELINED:
            error = TooManyConnections(f"More than {MAX_PIPELINED} requests wait on a connection.")
            raise _Refused(error, "pipelined")
        super().on_headers_complete()
        self._reading = "body"

    def on_message_complete(self) -> None:
        super().on_message_complete()
        self._reading = "request"
        self._ended_message = True

    # Waiting: at most one clock runs, and none while an answer is under way.

    def on_response_complete(self) -> None:
        # As the inherited one, but for its clock: ours is not stopped by a stray line break.
        self.server_state.total_requests += 1
        if self.transport.is_closing():
            self._timer = self.loop.call_later(self._settings.send_seconds, self.transport.abort)
            return
        self.flow.resume_reading()
        if self.pipeline:
            self._start_asgi_task(*self.pipeline.pop())
        self._watch()

    @property
    def _answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _watch(self) -> None:
        """Start the clock of what the connection waits for now."""
        waiting: Waiting = "answer" if self._answering else self._reading
        if waiting == self._waiting:
            return
        self._waiting = waiting
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if waiting == "request":
            self._timer = self.loop.call_later(self._settings.idle_seconds, self._too_late)
        elif waiting == "header":
            self._timer = self.loop.call_later(self._settings.header_seconds, self._too_late)
        elif waiting == "body":  # that was answered before it had come
            self._timer = self.loop.call_later(LINGER_SECONDS, self._too_late)

    def _too_late(self) -> None:
        if self._waiting == "header":
            seconds = self._settings.header_seconds
            error = RequestTooSlow(f"The header was not whole after {seconds:g} seconds.")
            self._refuse(error, "header_time")
        else:
            self._shared.metrics.rejected("idle" if self._waiting == "request" else "unread_body")
            self._end()

    # Sending

    def pause_writing(self) -> None:
        super().pause_writing()
        if self._send_timer is None:
            self._send_timer = self.loop.call_later(self._settings.send_seconds, self._not_taken)

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._send_timer is not None:
            self._send_timer.cancel()
            self._send_timer = None

    def _not_taken(self) -> None:
        """The client does not read its answer."""
        self._shared.metrics.rejected("send_time")
        self._deaf = True
        self.transport.abort()

    # Ending

    def _refuse(self, error: RequestError, reason: str) -> None:
        self._shared.metrics.rejected(reason)
        if not self._answering:
            self._answer(error)
        elif self._reading == "body" and not (self.pipeline or self.cycle.response_started):
            # Half a body: whoever reads it is told that the client has gone, and says nothing.
            self.cycle.disconnected = True
            self.cycle.waiting_for_100_continue = False
            self.cycle.message_event.set()
            self._answer(error)
        else:
            self._end_after_answers()

    def _answer(self, error: RequestError) -> None:
        self.transport.write(as_bytes(of_error(error)))
        self._end()

    def _end_after_answers(self) -> None:
        """Hear nothing more, and close when the requests so far are answered."""
        self._deaf = True
        self.cycle.keep_alive = False
        self._watch()  # the clock of what came before runs no more

    def _end(self) -> None:
        """Close, once what was written is sent and the client has had a moment to read it."""
        self._deaf = True
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self.loop.call_later(LINGER_SECONDS, self.transport.abort)
        self.flow.resume_reading()  # what is not read when a connection closes makes it a reset
        if self.transport.can_write_eof():
            self.transport.write_eof()
        else:
            self.transport.close()


def as_bytes(response: Response) -> bytes:
    """A whole answer on the wire, the last one of its connection."""
    lines = [name + b": " + value for name, value in response.raw_headers]
    head = STATUS_LINE[response.status_code] + b"\r\n".join([*lines, b"connection: close"])
    return head + b"\r\n\r\n" + bytes(response.body)
