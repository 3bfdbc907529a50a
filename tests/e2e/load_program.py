"""A light load on a server, in a process of its own: `python -m tests.e2e.load_program <plan>`.

The plan and the figures are JSON. Without a client library: at ten times what a server can do, the
load must cost little of the cores they share.
"""

import asyncio
import contextlib
import itertools
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field

from tests.conftest import REPOSITORY
from tests.serving import photo

PATIENCE_SECONDS = 60.0
HEAD = b"POST /predict?tasks=load HTTP/1.1\r\nHost: 127.0.0.1\r\n"
EDGE = b"--edge\r\nContent-Disposition: form-data; name=image; filename=a\r\n\r\n"


@dataclass
class Plan:
    """What to do to which server, for how long."""

    port: int
    seconds: float
    # So many clients, each of which asks again when it is answered …
    clients: int = 0
    # … or so many requests a second, answered or not.
    rate: float = 0.0
    images: int = 1  # in one request
    slow: int = 0  # clients that send a byte a second


@dataclass
class Figures:
    """Seconds that each answer took, by status; what else became of requests."""

    seconds: dict[str, list[float]] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)
    ended: float = 0.0  # by time.monotonic, which is the machine's

    def of(self, status: int) -> list[float]:
        return sorted(self.seconds.get(str(status), []))

    @property
    def count(self) -> int:
        return sum(map(len, self.seconds.values()))


def percentile(ordered: list[float], share: float) -> float:
    return ordered[min(int(len(ordered) * share), len(ordered) - 1)]


@contextlib.contextmanager
def load(plan: Plan) -> Iterator["Load"]:
    """The plan under way."""
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.e2e.load_program", json.dumps(asdict(plan))],
        stdout=subprocess.PIPE,
        text=True,
        cwd=REPOSITORY,
    )
    try:
        yield Load(process)
    finally:
        process.kill()
        process.wait(timeout=30)
        assert process.stdout is not None
        process.stdout.close()


@dataclass
class Load:
    process: subprocess.Popen[str]

    def figures(self) -> Figures:
        """What it came to, when it has ended."""
        output, _ = self.process.communicate(timeout=1800)
        assert self.process.returncode == 0
        return Figures(**json.loads(output))


class Requests:
    """Requests with distinct images: decoders ignore the bytes after a PNG's end."""

    def __init__(self, images: int) -> None:
        self._picture = photo(1, size=(8, 8))
        self._images = images
        self._numbers = itertools.count()

    def __next__(self) -> bytes:
        parts = b"".join(
            EDGE + self._picture + next(self._numbers).to_bytes(8, "big") + b"\r\n"
            for _ in range(self._images)
        )
        body = parts + b"--edge--\r\n"
        kind = b"Content-Type: multipart/form-data; boundary=edge\r\n"
        return HEAD + kind + b"Content-Length: %d\r\n\r\n" % len(body) + body


class Client:
    """One connection, opened when it is first used."""

    def __init__(self, port: int, figures: Figures) -> None:
        self._port = port
        self._figures = figures
        self._reader: asyncio.StreamReader | None = None
        self._writer: asyncio.StreamWriter | None = None

    async def ask(self, request: bytes) -> None:
        started = time.monotonic()
        try:
            status = await asyncio.wait_for(self._ask(request), PATIENCE_SECONDS)
        except (OSError, EOFError, TimeoutError) as error:
            self._figures.failures.append(repr(error))
            self.close()
        else:
            self._figures.seconds.setdefault(str(status), []).append(time.monotonic() - started)

    async def _ask(self, request: bytes) -> int:
        if self._writer is None:
            address = ("127.0.0.1", self._port)
            self._reader, self._writer = await asyncio.open_connection(*address)
        assert self._reader is not None
        self._writer.write(request)
        head = (await self._reader.readuntil(b"\r\n\r\n")).lower()
        length = int(head.partition(b"content-length:")[2].partition(b"\r\n")[0])
        await self._reader.readexactly(length)
        if b"connection: close" in head:
            self.close()
        return int(head.split()[1])

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()
        self._reader = self._writer = None


async def ask_again(plan: Plan, figures: Figures, requests: Requests) -> None:
    until = time.monotonic() + plan.seconds

    async def one() -> None:
        client = Client(plan.port, figures)
        while time.monotonic() < until:
            await client.ask(next(requests))
        client.close()

    await asyncio.gather(*(one() for _ in range(plan.clients)))


async def ask_at_a_rate(plan: Plan, figures: Figures, requests: Requests) -> None:
    idle: list[Client] = []
    asking: set[asyncio.Task[None]] = set()

    async def one() -> None:
        client = idle.pop() if idle else Client(plan.port, figures)
        await client.ask(next(requests))
        idle.append(client)

    started = time.monotonic()
    for number in range(int(plan.rate * plan.seconds)):
        await asyncio.sleep(max(0.0, started + number / plan.rate - time.monotonic()))
        task = asyncio.create_task(one())
        asking.add(task)
        task.add_done_callback(asking.discard)
    figures.ended = time.monotonic()
    await asyncio.gather(*asking)
    for client in idle:
        client.close()


async def be_slow(plan: Plan) -> None:
    """Headers that never end, bodies that hardly come, and connections that say nothing."""
    length = b"Content-Length: 1000000\r\n\r\n"
    kinds = itertools.cycle((HEAD + b"X-Slow: ", HEAD + length, b""))

    async def one(number: int, first: bytes) -> None:
        await asyncio.sleep(number / plan.slow)
        while True:
            with contextlib.suppress(OSError):
                _, writer = await asyncio.open_connection("127.0.0.1", plan.port)
                writer.write(first)
                while not writer.is_closing():
                    await asyncio.sleep(1)
                    if first:
                        writer.write(b"a")
                    await writer.drain()
            await asyncio.sleep(0.1)

    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(plan.seconds):
            await asyncio.gather(*(one(n, next(kinds)) for n in range(plan.slow)))


async def run(plan: Plan) -> Figures:
    figures, requests = Figures(), Requests(plan.images)
    if plan.slow:
        await be_slow(plan)
    elif plan.rate:
        await ask_at_a_rate(plan, figures, requests)
    else:
        await ask_again(plan, figures, requests)
    figures.ended = figures.ended or time.monotonic()
    return figures


if __name__ == "__main__":
    print(json.dumps(asdict(asyncio.run(run(Plan(**json.loads(sys.argv[1])))))))
