"""Connections of a socket that several processes share."""

import asyncio
import socket
import ssl
from collections import Counter

import pytest
from engram_server.processes import accepting
from engram_server.processes.accepting import Acceptor, ConnectionCounts

from tests.api.certificates import Authority

SECONDS = 30


class Named(asyncio.Protocol):
    """Answers with the number of its process."""

    def __init__(self, number: int, opened: Counter) -> None:
        self._number = number
        self._opened = opened

    def connection_made(self, transport) -> None:
        self._opened[self._number] += 1
        transport.write(b"%d" % self._number)

    def connection_lost(self, exc) -> None:
        self._opened[self._number] -= 1


class Rig:
    """Acceptors of one socket, as if each were in a process of its own."""

    def __init__(self, folder, count: int, context: ssl.SSLContext | None = None) -> None:
        listener = socket.create_server(("127.0.0.1", 0))
        self.address = listener.getsockname()
        self.opened: Counter[int] = Counter()
        ConnectionCounts.create(folder / "connections", count)
        self.counts = ConnectionCounts(folder / "connections")
        self._context = context
        self._sockets = [socket.socket(fileno=listener.dup().detach()) for _ in range(count)]
        listener.close()
        self.acceptors: dict[int, Acceptor] = {}

    def start(self, number: int) -> None:
        self.acceptors[number] = Acceptor(
            self._sockets[number - 1],
            self.counts,
            number,
            make_protocol=lambda: Named(number, self.opened),
            connections=lambda: self.opened[number],
            context=self._context,
        )

    async def connect(self, **options) -> asyncio.StreamWriter:
        async with asyncio.timeout(SECONDS):
            reader, writer = await asyncio.open_connection(*self.address, **options)
            assert await reader.read(1)
            return writer

    def close(self) -> None:
        for acceptor in self.acceptors.values():
            acceptor.close()
        for each in self._sockets:
            each.close()


@pytest.fixture
def make(tmp_path):
    made = []

    def make_rig(count: int, context: ssl.SSLContext | None = None) -> Rig:
        made.append(Rig(tmp_path, count, context))
        return made[-1]

    yield make_rig
    for rig in made:
        for each in rig._sockets:
            each.close()


def run(rig: Rig, scenario) -> None:
    async def whole() -> None:
        try:
            await scenario()
        finally:
            rig.close()

    asyncio.run(whole())


def test_connections_opened_at_once_are_spread_evenly(make):
    rig = make(3)

    async def scenario():
        for number in (1, 2, 3):
            rig.start(number)
        writers = await asyncio.gather(*(rig.connect() for _ in range(30)))
        assert rig.opened == {1: 10, 2: 10, 3: 10}
        for writer in writers:
            writer.close()

    run(rig, scenario)


def test_a_process_without_connections_gets_the_next_ones(make):
    rig = make(2)

    async def scenario():
        rig.start(1)
        writers = [await rig.connect() for _ in range(6)]
        rig.start(2)
        writers += [await rig.connect() for _ in range(6)]
        assert rig.opened == {1: 6, 2: 6}
        for writer in writers:
            writer.close()

    run(rig, scenario)


def test_a_process_with_fewer_connections_that_hangs_stops_nobody(make):
    rig = make(2)

    async def scenario():
        rig.counts.write(2, 0)  # and it never accepts
        rig.start(1)
        writers = [await rig.connect() for _ in range(6)]
        assert rig.opened == {1: 6}
        for writer in writers:
            writer.close()

    run(rig, scenario)


def test_a_closed_process_leaves_connections_to_the_others(make):
    rig = make(2)

    async def scenario():
        rig.start(1)
        rig.start(2)
        rig.acceptors[1].close()
        writers = [await rig.connect() for _ in range(4)]
        assert rig.opened == {2: 4}
        for writer in writers:
            writer.close()

    run(rig, scenario)


def test_tls_handshakes_count_and_a_failed_one_harms_nothing(make, tmp_path):
    authority = Authority(tmp_path)
    certificate, key = authority.certificate("127.0.0.1")
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(certificate, key)
    trusted = ssl.create_default_context(cafile=str(authority.file))
    rig = make(2, context)

    async def scenario():
        rig.start(1)
        rig.start(2)
        _, plain = await asyncio.open_connection(*rig.address)
        plain.write(b"GET / HTTP/1.1\r\n\r\n")
        plain.close()
        writers = await asyncio.gather(*(rig.connect(ssl=trusted) for _ in range(8)))
        assert sum(rig.opened.values()) == 8
        assert min(rig.opened.values()) >= 3
        for writer in writers:
            writer.close()
            await writer.wait_closed()

    run(rig, scenario)


def test_without_free_descriptors_it_tries_again_later(make, monkeypatch, caplog):
    monkeypatch.setattr(accepting, "_ERROR_SECONDS", 0.01)
    rig = make(1)
    failures = [OSError(24, "Too many open files")] * 2

    class Failing(socket.socket):
        def accept(self):
            if failures:
                raise failures.pop()
            return super().accept()

    rig._sockets[0] = Failing(fileno=rig._sockets[0].detach())

    async def scenario():
        rig.start(1)
        (await rig.connect()).close()

    run(rig, scenario)
    assert caplog.text.count("Too many open files") == 2
