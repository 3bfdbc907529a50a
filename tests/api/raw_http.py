"""A real server in a thread of this process, and requests to it written byte by byte."""

import contextlib
import json
import select
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass

from engram_server.app import create_app
from engram_server.commands.serve import DrainingServer, listen, uvicorn_config
from engram_server.runtime import Runtime

from tests.api.conftest import World

PREDICT = b"POST /predict HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: image/png\r\n"


@dataclass
class Answer:
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def problem(self) -> str:
        return json.loads(self.body)["type"].rpartition(":")[2]


class Wire:
    """One connection, without a client library's good manners."""

    def __init__(self, port: int, timeout: float = 20):
        self.socket = socket.create_connection(("127.0.0.1", port), timeout=timeout)
        self.received = bytearray()

    def send(self, data: bytes) -> None:
        self.socket.sendall(data)

    def send_until_answered(self, data: bytes, most: int) -> int:
        """Send the same, twenty times a second, until an answer begins; how much that was."""
        sent = 0
        while sent < most and not select.select([self.socket], [], [], 0.05)[0]:
            self.socket.sendall(data)
            sent += len(data)
        return sent

    def answer(self) -> Answer:
        """The next answer, which has a Content-Length."""
        while b"\r\n\r\n" not in self.received:
            self._receive()
        head, _, self.received = self.received.partition(b"\r\n\r\n")
        first, *lines = head.decode("latin-1").split("\r\n")
        pairs = (line.partition(":") for line in lines)
        headers = {name.lower(): value.strip() for name, _, value in pairs}
        length = int(headers.get("content-length", 0))
        while len(self.received) < length:
            self._receive()
        body, self.received = bytes(self.received[:length]), self.received[length:]
        return Answer(int(first.split()[1]), headers, body)

    def _receive(self) -> None:
        data = self.socket.recv(65536)
        if not data:
            raise ConnectionResetError(f"closed after {bytes(self.received[:200])!r}")
        self.received += data

    def wait_for_close(self) -> bytes:
        """What still came until the server closed the connection."""
        rest, self.received = bytes(self.received), bytearray()
        with contextlib.suppress(ConnectionError):
            while data := self.socket.recv(65536):
                rest += data
        return rest

    def close(self) -> None:
        self.socket.close()


@dataclass
class RawServer:
    port: int
    runtime: Runtime

    @contextlib.contextmanager
    def wire(self, **options) -> Iterator[Wire]:
        wire = Wire(self.port, **options)
        try:
            yield wire
        finally:
            wire.close()

    def ask(self, request: bytes) -> Answer:
        with self.wire() as wire:
            wire.send(request)
            return wire.answer()

    def rejected(self, reason: str) -> float:
        """How many were, for this reason."""
        name, labels = "engram_rejections_total", {"reason": reason}
        return self.runtime.metrics.registry.get_sample_value(name, labels) or 0.0

    @contextlib.contextmanager
    def counts(self, reason: str) -> Iterator[None]:
        """Check that a request within is rejected for this reason and counted."""
        before = self.rejected(reason)
        yield
        self.await_value(lambda: self.rejected(reason) > before, True)

    def await_value(self, read, expected, seconds: float = 10) -> None:
        deadline = time.monotonic() + seconds
        while read() != expected:
            assert time.monotonic() < deadline, f"{read()} is not {expected}"
            time.sleep(0.01)


@contextlib.contextmanager
def listening(world: World, **settings) -> Iterator[RawServer]:
    """The world's engine, served on a free port as `engram serve` would."""
    chosen = world.settings.model_copy(update=settings)
    app = create_app(chosen, world.engine, metrics=world.metrics)
    listener = listen("127.0.0.1", 0)
    server = DrainingServer(uvicorn_config(app, chosen), app.state.runtime)
    running = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    running.start()
    try:
        yield RawServer(listener.getsockname()[1], app.state.runtime)
    finally:
        server.should_exit = True
        server.force_exit = True
        running.join(30)
