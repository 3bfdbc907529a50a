"""Measure how teaching affects tail latency: p99 of predictions during teaching and corrections.

    python -m benchmarks.teaching [--quick]

64 clients request predictions of the embedded backbone's demo tasks over HTTP. Phases with and
without an extra client take turns; that client teaches a task, one photo at a time, and corrects
each photo. The result is the ratio of the two 99th percentiles, with the number of updates and of
failed requests.
"""

import argparse
import statistics
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
from engram_server.embedded import BACKBONE
from engram_vit import Client
from rich.console import Console

from benchmarks.measure import write_results
from benchmarks.serving import jpeg, served

CLIENTS = 64
CLASSES = ("a", "b", "c")


class Phase:
    """Predictions of all clients for some seconds, with or without concurrent updates."""

    def __init__(self, url: str, seconds: float) -> None:
        self._url = url
        self._ends = time.monotonic() + seconds
        self._lock = threading.Lock()
        self.latencies: list[float] = []
        self.failures = 0
        self.updates = 0

    def run(self, photos: list[bytes], update_photos: list[bytes] | None) -> "Phase":
        with ThreadPoolExecutor(CLIENTS + 1) as pool:
            futures = [pool.submit(self._predict, photos, number) for number in range(CLIENTS)]
            if update_photos is not None:
                futures.append(pool.submit(self._teach, update_photos))
            for future in futures:
                future.result()
        return self

    def _predict(self, photos: list[bytes], number: int) -> None:
        with httpx.Client(base_url=self._url, timeout=60) as http:
            while time.monotonic() < self._ends:
                number += 1
                started = time.perf_counter()
                answer = http.post(
                    "/predict?tasks=cifar10,flowers", content=photos[number % len(photos)]
                )
                seconds = time.perf_counter() - started
                with self._lock:
                    self.latencies.append(seconds)
                    self.failures += answer.status_code != 200

    def _teach(self, photos: list[bytes]) -> None:
        with Client(self._url) as client:
            for number, photo in enumerate(photos):
                if time.monotonic() >= self._ends:
                    return
                client.teach("taught", [(photo, CLASSES[number % 3])])
                client.correct("taught", photo, CLASSES[(number + 1) % 3])
                self.updates += 2

    @property
    def p99(self) -> float:
        return statistics.quantiles(self.latencies, n=100)[98]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="fewer and shorter phases")
    quick = parser.parse_args().quick
    rounds, seconds = (2, 5.0) if quick else (6, 15.0)
    photos = [jpeg(seed) for seed in range(256)]
    ratios: list[float] = []
    failures = updates = 0
    with tempfile.TemporaryDirectory() as folder, served(BACKBONE, Path(folder)) as url:
        with Client(url) as client:
            client.teach("taught", {label: [jpeg(900 + i)] for i, label in enumerate(CLASSES)})
        for number in range(rounds):
            new = [jpeg(10_000 + 1000 * number + each) for each in range(200)]
            alone = Phase(url, seconds).run(photos, None)
            taught = Phase(url, seconds).run(photos, new)
            ratios.append(taught.p99 / alone.p99)
            failures += alone.failures + taught.failures
            updates += taught.updates
    ratio = statistics.median(ratios)
    Console().print(
        f"p99 while teaching: {ratio:.2f}× of that without ({CLIENTS} clients, {updates} updates, "
        f"{failures} failed requests)"
    )
    about: dict[str, object] = {"clients": CLIENTS, "updates": updates, "failures": failures}
    write_results("teaching", [{**about, "p99_ratio": ratio, "p99_ratios": ratios}])


if __name__ == "__main__":
    main()
