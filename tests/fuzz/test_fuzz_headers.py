"""Mutated headers, as bytes on a real connection: an answer, or a close, and soon."""

import contextlib
import re
from concurrent.futures import ThreadPoolExecutor

import pytest
from engram_server.edge import connections

from tests.api.raw_http import listening
from tests.fuzz.conftest import CASES, run_cases
from tests.fuzz.mutator import VALUES, Mutator
from tests.serving import photo

pytestmark = [pytest.mark.long, pytest.mark.timeout(3600)]
AT_ONCE = 64
SECONDS = 0.1  # for whatever is no whole request, and for a body that goes on after its answer
NEVER_CLOSED = 599
IMAGE = photo(1, size=(16, 16))
PATHS = (
    "GET /", "GET /tasks", "GET /tasks/pets", "GET /tasks/pets/versions/1/bundle", "GET /metrics",
    "GET /livez", "GET /docs", "GET /openapi.json", "GET /v2", "GET /v2/models/pets", "HEAD /",
    "GET /console/app.js", "OPTIONS /predict", "GET /tasks/pets/history", "GET /replicas",
    "POST /predict?tasks=age", "POST /v2/models/pets/infer", "PUT /tasks/x", "POST /tasks/validate",
)  # fmt: skip
# A deadline that cannot be met is correctly a 504, so these have none.
HEADERS = {
    "Host": "127.0.0.1",
    "Origin": "http://127.0.0.1:8000",
    "Accept": "text/html, application/openmetrics-text; version=1.0.0;q=0.5, */*;q=0.1",
    "Accept-Encoding": "gzip;q=0.5, br",
    "Authorization": "Bearer abcdefgh",
    "X-API-Key": "abcdefgh",
    "If-None-Match": '"abc", W/"def", *',
    "If-Match": '"abc"',
    "If-Modified-Since": "Sat, 01 Jan 2025 00:00:00 GMT",
    "Range": "bytes=0-10, 20-",
    "Content-Type": "application/json; charset=utf-8",
    "Content-Encoding": "identity",
    "Content-Length": str(len(IMAGE)),
    "Transfer-Encoding": "chunked",
    "Inference-Header-Content-Length": "10",
    "Cookie": 'a="b\\"; c=d',
    "X-Min-Generation": "1",
    "X-Request-Id": "abc",
    "X-Forwarded-For": "10.0.0.1, 10.0.0.2",
    "X-Forwarded-Proto": "https",
    "traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
    "Expect": "100-continue",
    "Connection": "keep-alive, Upgrade",
    "Upgrade": "h2c",
    "Sec-Fetch-Site": "cross-site",
}
BODIES = frozenset({"Content-Length", "Transfer-Encoding"})


def header_value(mutator: Mutator, value: str) -> bytes:
    how = mutator.dice.randrange(5)
    if how == 0:
        return value.encode()
    if how == 1:
        return mutator.dice.choice(VALUES).encode()
    if how == 2:
        return value.encode() * mutator.dice.choice((2, 50, 400))
    if how == 3:
        return mutator.dice.choice((b" ", b",", b'"', b"\t", b"\\", b";", b"=")) * 5000
    return mutator.damaged(value.encode())


def request(mutator: Mutator) -> bytes:
    first = mutator.dice.choice(PATHS)
    chosen = mutator.dice.sample(sorted(HEADERS), mutator.dice.randint(1, 6))
    lines = [f"{first} HTTP/1.1".encode()]
    lines += [f"{name}: ".encode() + header_value(mutator, HEADERS[name]) for name in chosen]
    body = IMAGE if BODIES.intersection(chosen) or first.startswith("P") else b""
    if body and not BODIES.intersection(chosen):
        lines.append(b"Content-Length: %d" % len(body))
    whole = b"\r\n".join([*lines, b"", body])
    return mutator.damaged(whole) if mutator.dice.random() < 0.3 else whole


def test_mutated_headers_are_answered_or_refused(world, monkeypatch):
    kinds = ("header", "idle", "body", "bundle")
    times = {f"{kind}_seconds": SECONDS for kind in kinds}
    monkeypatch.setattr(connections, "LINGER_SECONDS", SECONDS)
    with listening(world, **times) as server, ThreadPoolExecutor(AT_ONCE) as pool:

        def ask(number: int) -> tuple[int, bytes]:
            sent = request(Mutator(f"header {number}"))
            with server.wire() as wire:
                with contextlib.suppress(ConnectionError):
                    wire.send(sent)
                try:
                    received = wire.wait_for_close()
                except TimeoutError:
                    return NEVER_CLOSED, sent
            statuses = re.findall(rb"HTTP/1\.1 (\d{3}) ", received)
            return max(map(int, statuses), default=0), sent

        def run_one(number: int) -> tuple[int, object]:
            first = number * AT_ONCE
            return max(pool.map(ask, range(first, first + AT_ONCE)))

        # A case is a crowd of connections here, which share a core with the server.
        run_cases(f"headers, {AT_ONCE} at once", run_one, count=CASES // AT_ONCE, longest=6.0)
