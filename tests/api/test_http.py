"""A client that goes away takes its work with it."""

import asyncio

import pytest
from engram_server.runtime import RequestRecord

from tests.serving import photo

pytestmark = pytest.mark.timeout(60)


class Connection:
    """One request as a server hands it to the application; the client disconnects on request."""

    def __init__(self, body: bytes, *, complete: bool = True):
        self.messages = [{"type": "http.request", "body": body, "more_body": not complete}]
        self.leaves = asyncio.Event()
        self.sent = []
        self.scope = {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": "POST",
            "path": "/predict",
            "raw_path": b"/predict",
            "root_path": "",
            "query_string": b"tasks=pets",
            "headers": [(b"host", b"testserver")],
            "client": ("127.0.0.1", 1),
            "server": ("127.0.0.1", 2),
            "scheme": "http",
        }

    async def receive(self):
        if self.messages:
            return self.messages.pop(0)
        await self.leaves.wait()
        return {"type": "http.disconnect"}

    async def send(self, message):
        self.sent.append(message)

    @property
    def record(self) -> RequestRecord:
        return self.scope["state"]["record"]


class Endless:
    """An engine's predict that never ends by itself."""

    def __init__(self):
        self.begun = asyncio.Event()
        self.cancelled = asyncio.Event()

    async def __call__(self, *args, **kwargs):
        self.begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            self.cancelled.set()


def test_disconnect_cancels_the_work(world, monkeypatch):
    async def scenario():
        endless, connection = Endless(), Connection(photo(1))
        monkeypatch.setattr(world.engine.predictions, "predict", endless)
        app = world.app()
        serving = asyncio.ensure_future(app(connection.scope, connection.receive, connection.send))
        await endless.begun.wait()
        connection.leaves.set()
        await serving
        assert endless.cancelled.is_set()
        assert connection.record.status == 499

    asyncio.run(scenario())


def test_server_that_cancels_the_request_cancels_the_work(world, monkeypatch):
    async def scenario():
        endless, connection = Endless(), Connection(photo(1))
        monkeypatch.setattr(world.engine.predictions, "predict", endless)
        app = world.app()
        serving = asyncio.ensure_future(app(connection.scope, connection.receive, connection.send))
        await endless.begun.wait()
        serving.cancel()
        with pytest.raises(asyncio.CancelledError):
            await serving
        assert endless.cancelled.is_set()

    asyncio.run(scenario())


def test_disconnect_while_sending_reaches_no_engine(world, monkeypatch):
    async def scenario():
        endless, connection = Endless(), Connection(b"half an image", complete=False)
        monkeypatch.setattr(world.engine.predictions, "predict", endless)
        connection.leaves.set()
        await world.app()(connection.scope, connection.receive, connection.send)
        assert not endless.begun.is_set()
        assert connection.record.status == 499

    asyncio.run(scenario())


def test_many_disconnects_leave_nothing_behind_in_the_engine(world):
    async def scenario():
        app = world.app()
        connections = [Connection(photo(seed)) for seed in range(100)]
        serving = [
            asyncio.ensure_future(app(each.scope, each.receive, each.send)) for each in connections
        ]
        await asyncio.sleep(0)
        for each in connections:
            each.leaves.set()
        await asyncio.gather(*serving)
        assert {each.record.status for each in connections} <= {200, 499}
        assert world.engine.predictions.pending_images == 0
        assert world.engine.queued_images == 0

    asyncio.run(scenario())
