"""What several processes on one device give: `engram serve --processes N`, beside one.

    python -m benchmarks.processes [--device cpu] [--quick]

ViT-B/32 of random weights with one head-only task. Photos of 640 × 480, one per request, are either
all new (no cache), or all in the cache, so that the pass costs almost nothing. Clients run in
processes of their own. CPU time is that of all server processes, per request; unlike the rate it
hardly depends on what else the machine does. `make bench-gpu` runs this on the GPU.
"""

import argparse
import contextlib
import json
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

import httpx
import torch
from engram_server.model import load_backbone
from engram_store import open_store
from rich.console import Console

from benchmarks.measure import write_results
from benchmarks.page import Row, number, short, table
from benchmarks.peers.load import Outcome, Phase
from benchmarks.serving import bundle, jpeg, random_vit, served

COUNTS = (1, 2, 4)
PHOTOS = 16
CLIENTS = 8  # of each load generator
GENERATORS = 2
TURNS = 5
KINDS = {"new": 0, "cached": 2**30}  # bytes of the cache

COLUMNS = ["photos", "processes", "requests/s", "over one process", "CPU ms per request"]


def table_of(rows: Sequence[Row]) -> str:
    cells = [
        [
            str(row["photos"]),
            str(row["processes"]),
            short(number(row["rate"])),
            f"{number(row['over_one']):.2f}",
            f"{number(row['cpu_ms']):.2f}",
        ]
        for row in rows
    ]
    return table(COLUMNS, cells)


def measure(
    backbone: Path, device: str, seconds: float, counts: Sequence[int] = COUNTS, turns: int = TURNS
) -> list[dict[str, object]]:
    """Medians of several turns for each kind of photo and number of processes."""
    found: dict[tuple[str, int], list[tuple[float, float]]] = {}
    with tempfile.TemporaryDirectory() as place:
        store = Path(place) / "store"
        open_store(str(store)).publish("task", bundle(load_backbone(backbone), 0, memory=False))
        photos = write_photos(Path(place))
        for kind, cache in KINDS.items():
            for count in counts:
                settings = {"devices": device, "processes": count, "cache_bytes": cache}
                with (
                    served(backbone, store, **settings) as url,
                    generators(photos) as loads,
                ):
                    await_replicas(url, count)
                    warm_up(url, loads, seconds, cached=cache > 0)
                    found[kind, count] = [run_phase(url, loads, seconds) for _ in range(turns)]
    return [_row(kind, count, found) for kind in KINDS for count in counts]


def _row(
    kind: str, count: int, found: dict[tuple[str, int], list[tuple[float, float]]]
) -> dict[str, object]:
    rates = {key: statistics.median(rate for rate, _ in turns) for key, turns in found.items()}
    first = min(each for of, each in found if of == kind)
    return {
        "photos": kind,
        "processes": count,
        "rate": rates[kind, count],
        "over_one": rates[kind, count] / rates[kind, first],
        "cpu_ms": 1e3 * statistics.median(cpu for _, cpu in found[kind, count]),
    }


def write_photos(folder: Path) -> list[Path]:
    paths = [folder / f"{number}.jpg" for number in range(PHOTOS)]
    for seed, path in enumerate(paths):
        path.write_bytes(jpeg(seed))
    return paths


@contextlib.contextmanager
def generators(photos: Sequence[Path]) -> Iterator[list["subprocess.Popen[str]"]]:
    """Load generators, each with its own interpreter."""
    command = [sys.executable, "-m", "benchmarks.peers.load", *map(str, photos)]
    made = [
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for _ in range(GENERATORS)
    ]
    try:
        yield made
    finally:
        for each in made:
            each.kill()
            each.communicate()


def run_phase(
    url: str, loads: Sequence["subprocess.Popen[str]"], seconds: float
) -> tuple[float, float]:
    """Requests per second, and CPU seconds of the server per request."""
    port = httpx.URL(url).port
    assert port is not None
    phase = Phase(port, "/predict?tasks=task", "raw", 1, CLIENTS, seconds)
    before = total(url, "process_cpu_seconds_total")
    for load in loads:
        assert load.stdin is not None
        print(json.dumps(asdict(phase)), file=load.stdin, flush=True)
    outcomes = [_outcome(load) for load in loads]
    requests = sum(len(each.latencies) for each in outcomes)
    cpu_seconds = total(url, "process_cpu_seconds_total") - before
    return sum(each.rate for each in outcomes), cpu_seconds / requests


def warm_up(
    url: str, loads: Sequence["subprocess.Popen[str]"], seconds: float, *, cached: bool
) -> None:
    """Run phases until every process has every photo in its cache."""
    before = -1.0
    while before < (misses := total(url, "engram_cache_misses_total")):
        before = misses
        run_phase(url, loads, seconds)
        if not cached:
            return


def _outcome(load: "subprocess.Popen[str]") -> Outcome:
    assert load.stdout is not None
    answer = json.loads(load.stdout.readline())
    if "error" in answer:
        raise SystemExit(f"a request failed: {answer['error']}")
    return Outcome(**answer)


def total(url: str, metric: str) -> float:
    """Of all processes of a server."""
    text = httpx.get(f"{url}/metrics", timeout=30).text
    found = re.findall(rf"^{metric}(?:{{.*}})? (\S+)$", text, re.MULTILINE)
    return sum(map(float, found))


def await_replicas(url: str, count: int) -> None:
    while len(httpx.get(f"{url}/replicas", timeout=30).json()["replicas"]) < count:
        time.sleep(0.1)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", default="cuda:0" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--quick", action="store_true", help="to see that it runs")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        backbone = random_vit(Path(place))
        seconds, turns = (1.0, 1) if options.quick else (5.0, TURNS)
        rows = measure(backbone, options.device, seconds, turns=turns)
    console = Console()
    console.print(table_of(rows), markup=False)
    console.print(f"written to {write_results('processes', rows, device=options.device).name}")


if __name__ == "__main__":
    main()
