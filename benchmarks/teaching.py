"""What teaching disturbs: the slowest of many predictions while a task is taught and corrected.

    python -m benchmarks.teaching [--quick]

64 clients ask the embedded backbone's demo tasks over HTTP; phases with and without somebody who
teaches a task, a photo at a time with a correction of each, take turns. The figure is the ratio of
their 99th percentiles, beside how many lessons there were and how many requests failed.
"""

import argparse
import statistics
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
from engram_client import Client
from rich.console import Console

from benchmarks.measure import write_results
from benchmarks.serving import jpeg, served
from server.embedded import BACKBONE

CLIENTS = 64
CLASSES = ("a", "b", "c")


class Phase:
    """Predictions of all clients for some seconds, with or without lessons meanwhile."""

    def __init__(self, url: str, seconds: float) -> None:
        self._url = url
        self._ends = time.monotonic() + seconds
        self._lock = threading.Lock()
        self.latencies: list[float] = []
        self.failures = 0
        self.lessons = 0

    def run(self, photos: list[bytes], lessons: list[bytes] | None) -> "Phase":
        with ThreadPoolExecutor(CLIENTS + 1) as pool:
            asking = [pool.submit(self._ask, photos, number) for number in range(CLIENTS)]
            if lessons is not None:
                asking.append(pool.submit(self._teach, lessons))
            for one in asking:
                one.result()
        return self

    def _ask(self, photos: list[bytes], number: int) -> None:
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

    def _teach(self, lessons: list[bytes]) -> None:
        with Client(self._url) as client:
            for number, photo in enumerate(lessons):
                if time.monotonic() >= self._ends:
                    return
                client.teach("taught", [(photo, CLASSES[number % 3])])
                client.correct("taught", photo, CLASSES[(number + 1) % 3])
                self.lessons += 2

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
    failures = lessons = 0
    with tempfile.TemporaryDirectory() as folder, served(BACKBONE, Path(folder)) as url:
        with Client(url) as client:
            client.teach("taught", {label: [jpeg(900 + i)] for i, label in enumerate(CLASSES)})
        for number in range(rounds):
            new = [jpeg(10_000 + 1000 * number + each) for each in range(200)]
            alone = Phase(url, seconds).run(photos, None)
            taught = Phase(url, seconds).run(photos, new)
            ratios.append(taught.p99 / alone.p99)
            failures += alone.failures + taught.failures
            lessons += taught.lessons
    ratio = statistics.median(ratios)
    Console().print(
        f"p99 while teaching: {ratio:.2f}× of that without ({CLIENTS} clients, {lessons} lessons, "
        f"{failures} failed requests)"
    )
    about: dict[str, object] = {"clients": CLIENTS, "lessons": lessons, "failures": failures}
    write_results("teaching", [{**about, "p99_ratio": ratio, "p99_ratios": ratios}])


if __name__ == "__main__":
    main()
