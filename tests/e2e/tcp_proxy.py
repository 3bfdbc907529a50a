"""A TCP proxy that a test can cut and slow down, and that notes which requests went by."""

import asyncio
import contextlib
import re
import threading
from collections.abc import Coroutine

from tests.e2e.server_process import free_port

_REQUEST = re.compile(rb"^([A-Z]+) (\S+) HTTP/1\.1\r$", re.MULTILINE)


class TcpProxy:
    """Forward connections on `port` to the upstream port, in its own thread."""

    def __init__(self, upstream: int) -> None:
        self.port = free_port()
        self.delay = 0.0  # seconds by which each piece is held back, in either direction
        self.requests: list[tuple[str, str]] = []  # method and path, as they went by
        self._upstream = upstream
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._server: asyncio.Server | None = None
        self._writers: set[asyncio.StreamWriter] = set()

    def __enter__(self) -> "TcpProxy":
        self._thread.start()
        self.restore()
        return self

    def __exit__(self, *about: object) -> None:
        self.cut()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def cut(self) -> None:
        """Close every connection, and refuse new ones."""
        self._do(self._cut())

    def restore(self) -> None:
        """Take connections again."""
        self._do(self._listen())

    def _do(self, work: Coroutine[object, object, None]) -> None:
        asyncio.run_coroutine_threadsafe(work, self._loop).result(timeout=30)

    async def _listen(self) -> None:
        self._server = await asyncio.start_server(self._connected, "127.0.0.1", self.port)

    async def _cut(self) -> None:
        assert self._server is not None
        self._server.close()
        for writer in list(self._writers):
            writer.transport.abort()
        # Wait until the forwarding tasks have ended.
        others = asyncio.all_tasks() - {asyncio.current_task()}
        if others:
            await asyncio.wait(others)

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.add(writer)
        with contextlib.suppress(OSError):
            theirs, ours = await asyncio.open_connection("127.0.0.1", self._upstream)
            self._writers.add(ours)
            await asyncio.gather(
                self._carry(reader, ours, noting=True), self._carry(theirs, writer, noting=False)
            )
            self._writers.discard(ours)
        writer.close()
        self._writers.discard(writer)

    async def _carry(
        self, source: asyncio.StreamReader, target: asyncio.StreamWriter, *, noting: bool
    ) -> None:
        with contextlib.suppress(OSError):
            while piece := await source.read(65536):
                if noting:
                    found = _REQUEST.findall(piece)
                    self.requests += [(verb.decode(), path.decode()) for verb, path in found]
                if self.delay:
                    await asyncio.sleep(self.delay)
                target.write(piece)
                await target.drain()
        target.close()
