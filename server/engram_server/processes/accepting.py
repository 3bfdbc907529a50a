"""Accept connections on a socket that several processes share, evenly.

The kernel wakes every process for a new connection, and the fastest would take most of them. So
each process notes how many connections it has in memory that all of them share. A process with more
than another one gives way for a moment, and then accepts if the connection still waits: the other
one may be busy, or hang.
"""

import asyncio
import logging
import mmap
import socket
import ssl
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Final

GIVE_WAY_SECONDS: Final = 0.002
# After an error other than that there is no connection: mostly, too many files are open.
_ERROR_SECONDS: Final = 1.0
_COUNT: Final = struct.Struct("=I")
_CLOSED: Final = 2**32 - 1  # of a process that accepts no connections

_log = logging.getLogger("engram.processes")


class ConnectionCounts:
    """The connections of each process, in memory that all of them share."""

    def __init__(self, path: Path) -> None:
        with path.open("r+b") as file:
            self._counts = mmap.mmap(file.fileno(), 0)

    @staticmethod
    def create(path: Path, count: int) -> None:
        path.write_bytes(_COUNT.pack(_CLOSED) * count)

    def write(self, number: int, connections: int) -> None:
        _COUNT.pack_into(self._counts, (number - 1) * _COUNT.size, connections)

    def close(self, number: int) -> None:
        """Note that a process accepts no connections."""
        self.write(number, _CLOSED)

    def least(self) -> int:
        return min(int(count) for (count,) in _COUNT.iter_unpack(self._counts[:]))


class Acceptor:
    """Accepts connections of a shared socket. Closes like an `asyncio.Server`."""

    def __init__(
        self,
        listener: socket.socket,
        counts: ConnectionCounts,
        number: int,
        *,
        make_protocol: Callable[[], asyncio.Protocol],
        connections: Callable[[], int],
        context: ssl.SSLContext | None,
    ) -> None:
        self._listener = listener
        self._counts = counts
        self._number = number
        self._make_protocol = make_protocol
        self._connections = connections
        self._context = context
        self._loop = asyncio.get_running_loop()
        self._opening: set[asyncio.Task[None]] = set()  # TLS handshakes
        self._closed = False
        listener.setblocking(False)
        self._watch()

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._loop.remove_reader(self._listener)
        self._counts.close(self._number)
        self._listener.close()

    async def wait_closed(self) -> None:
        """As of a server: there is nothing to wait for."""

    def _watch(self) -> None:
        if not self._closed:
            self._note()
            self._loop.add_reader(self._listener, self._on_connection)

    def _note(self) -> int:
        """Publish how many connections this process has."""
        connections = self._connections() + len(self._opening)
        self._counts.write(self._number, connections)
        return connections

    def _on_connection(self) -> None:
        if self._note() <= self._counts.least():
            self._accept()
        else:
            self._pause(GIVE_WAY_SECONDS, self._accept_late)

    def _pause(self, seconds: float, then: Callable[[], None]) -> None:
        self._loop.remove_reader(self._listener)
        self._loop.call_later(seconds, then)

    def _accept_late(self) -> None:
        if not self._closed:
            self._watch()
            self._accept()

    def _accept(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except (BlockingIOError, InterruptedError, ConnectionAbortedError):
            return  # another process was faster, or the client left
        except OSError as error:
            _log.error("cannot accept a connection: %s", error)
            self._pause(_ERROR_SECONDS, self._watch)
            return
        connection.setblocking(False)
        task = self._loop.create_task(self._open(connection))
        self._opening.add(task)
        task.add_done_callback(self._opening.discard)
        self._note()

    async def _open(self, connection: socket.socket) -> None:
        try:
            await self._loop.connect_accepted_socket(
                self._make_protocol, connection, ssl=self._context
            )
        except (OSError, TimeoutError) as error:  # includes ssl.SSLError
            _log.debug("a connection was not opened: %s", error)
            connection.close()
