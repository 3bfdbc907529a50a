"""One tiny server for all fuzzers, and what must be true of each of its answers.

`FUZZ_CASES` says how many cases each fuzzer makes: a tenth in `make test-long`, all in `make fuzz`.
"""

import asyncio
import ctypes
import dataclasses
import gc
import json
import os
import re
import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import engram_server.engine.engine
import httpx
import pytest

from tests.api.conftest import World, running_world, settings  # noqa: F401 - a fixture

CASES = int(os.environ.get("FUZZ_CASES", "2000"))
# On one core, beside whatever else runs there.
LONGEST_SECONDS = 2.0
MIB = 2**20
# What the settings below allow at once: an image of a million pixels, a bundle, their copies.
MOST_MEMORY = 48 * MIB
# Over the last three quarters of a run.
MOST_GROWTH = 24 * MIB
DOCUMENTED = frozenset({503})


@pytest.fixture(scope="package")
def world(settings) -> Iterator[World]:  # noqa: F811
    """With next to no caches: they would grow, as they should, and hide what should not.

    The pictures of bundles have a cache of their own, of 64 MiB. Damaged ones filled it by 16 kB
    each, every ninth bundle, which looked like a leak.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engram_server.engine.engine, "GOLDEN_CACHE_BYTES", MIB)
        with running_world(settings.model_copy(update={"cache_bytes": MIB})) as world:
            yield world


@dataclass
class Case:
    """One request, as a client of HTTP would write it."""

    method: str
    url: str
    content: bytes = b""
    headers: dict[str, str] = dataclasses.field(default_factory=dict)


@dataclass
class Figures:
    """What a run of cases came to."""

    name: str
    statuses: dict[int, int] = dataclasses.field(default_factory=dict)
    worst_seconds: float = 0.0
    worst_case: object = None
    quarter: int = 0

    def note(self, status: int, seconds: float, case: object) -> None:
        self.statuses[status] = self.statuses.get(status, 0) + 1
        if seconds > self.worst_seconds:
            self.worst_seconds, self.worst_case = seconds, case


def memory(field: str = "VmRSS") -> int:
    """Bytes of this process, now (`VmRSS`) or at most since `forget_peak` (`VmHWM`)."""
    lines = Path("/proc/self/status").read_text()
    found = re.search(rf"^{field}:\s+(\d+) kB$", lines, re.MULTILINE)
    assert found is not None
    return int(found[1]) * 1024


def memory_in_use() -> int:
    """Without what the allocator keeps: it gave 57 of 67 MiB back after 20,000 connections."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    return memory()


def forget_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")


def run_cases(
    name: str,
    run_one: Callable[[int], tuple[int, object]],
    *,
    count: int = CASES,
    longest: float = LONGEST_SECONDS,
    most_memory: int = MOST_MEMORY,
) -> None:
    """Run every case, and look at status, time and memory."""
    figures, started = Figures(name), time.monotonic()
    between = max(count // 40, 1)
    settled = 10 * between
    for number in range(count):
        if number % between == 0:
            in_use = memory_in_use()
        if number == settled:
            figures.quarter = in_use
            forget_peak()
        began = time.monotonic()
        status, case = run_one(number)
        figures.note(status, time.monotonic() - began, case)
        assert status < 500 or status in DOCUMENTED, (number, status, case)
    seconds, peak = time.monotonic() - started, memory("VmHWM") - figures.quarter
    growth = memory_in_use() - figures.quarter
    statuses = ", ".join(f"{each}: {n}" for each, n in sorted(figures.statuses.items()))
    print(
        f"\n{name}: {count} cases in {seconds:.0f} s; {statuses}; the slowest "
        f"{figures.worst_seconds * 1000:.0f} ms; memory {growth / MIB:+.1f} MiB, "
        f"at most {peak / MIB:+.1f} MiB"
    )
    assert figures.worst_seconds < longest, figures.worst_case
    assert growth < MOST_GROWTH, f"{growth / MIB:.0f} MiB more than after {settled} cases"
    assert peak < most_memory, f"{peak / MIB:.0f} MiB more at one time"


@pytest.fixture(scope="package")
def send(world) -> Iterator[Callable[[Case], httpx.Response]]:
    """Send a case to the application, in its own loop and without a socket."""
    app = world.app()
    with asyncio.Runner() as runner:
        client = httpx.AsyncClient(
            transport=httpx.ASGITransport(app), base_url="http://127.0.0.1", timeout=30
        )
        lifespan = app.router.lifespan_context(app)
        runner.run(lifespan.__aenter__())

        async def ask(case: Case) -> httpx.Response:
            return await client.request(
                case.method, case.url, content=case.content, headers=case.headers
            )

        def send(case: Case) -> httpx.Response:
            response = runner.run(ask(case))
            check_body(response)
            return response

        yield send
        runner.run(_end(client.aclose, lambda: lifespan.__aexit__(None, None, None)))


async def _end(*steps: Callable[[], Awaitable[Any]]) -> None:
    for step in steps:
        await step()


def check_body(response: httpx.Response) -> None:
    """JSON is JSON, without numbers that it has not; a refusal says what was wrong."""
    kind = response.headers.get("content-type", "")
    if "json" in kind:
        length = response.headers.get("inference-header-content-length")
        text = response.content[: int(length)] if length else response.content
        document = json.loads(text, parse_constant=_no_such_number)
        if response.status_code >= 400:
            assert document.get("detail") or document.get("error"), response.text


def _no_such_number(name: str) -> float:
    raise AssertionError(f"{name} is no JSON")
