"""What a caller notices of another one that takes all it can of one thing.

    python -m benchmarks.shares [--quick]

One server with two keys. One caller sends photos, one after another, beside each attack of
`benchmarks.hostile_caller`, and alone before each of them. Ratios are of the 99th percentile beside
an attack to that of all photos alone, within one run. The hostile process has the lowest priority:
on a machine with two cores it would otherwise compete with the server for them, which no server can
prevent.
"""

import argparse
import contextlib
import http.client
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from engram_bundle import TaskBundle
from engram_server import embedded
from engram_server.access.identity import Scope
from engram_server.access.keys import Key, KeysDocument, hash_of, token_of, utc_now
from engram_server.model import load_backbone
from engram_store import Publish, open_store
from rich.console import Console
from rich.table import Table

from benchmarks.hostile_caller import ATTACKS, picture
from benchmarks.measure import write_results
from benchmarks.serving import served

LARGE_CLASSES = 16_000
TASKS = "cifar10,cifar100,flowers,leaves,quality"
SCOPES: dict[Scope, tuple[str, ...]] = {"predict": ("*",), "read": ("*",), "publish": ("*",)}


@dataclass
class Experience:
    """What the caller that is not hostile sees."""

    seconds: list[float] = field(default_factory=list)
    livez: list[float] = field(default_factory=list)
    rejected: int = 0  # answers other than 200

    def add(self, more: "Experience") -> None:
        self.seconds += more.seconds
        self.livez += more.livez
        self.rejected += more.rejected

    @property
    def p50(self) -> float:
        return statistics.median(self.seconds)

    @property
    def p99(self) -> float:
        return sorted(self.seconds)[-1 - len(self.seconds) // 100]


@dataclass(frozen=True)
class Target:
    """A server with two keys, and a large task."""

    url: str
    bundle: Path  # for uploads
    keys: dict[str, str]

    @property
    def port(self) -> int:
        return int(self.url.rpartition(":")[2])

    @contextlib.contextmanager
    def attack(self, name: str) -> Iterator[None]:
        command = [sys.executable, "-m", "benchmarks.hostile_caller", name, str(self.port)]
        with subprocess.Popen(
            ["nice", "-n", "19", *command, self.keys["hostile"], "--file", str(self.bundle)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd=Path(__file__).resolve().parent.parent,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        ) as process:
            try:
                assert process.stdout is not None
                process.stdout.readline()  # it has begun
                time.sleep(1)  # and takes what it gets
                yield
            finally:
                process.kill()

    def experience(self, count: int) -> Experience:
        """Send photos that the server has not seen, and watch `/livez` beside them."""
        seen, stop = Experience(), threading.Event()

        def connect() -> contextlib.closing[http.client.HTTPConnection]:
            return contextlib.closing(
                http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
            )

        def watch() -> None:
            with connect() as connection:
                while not stop.is_set():
                    started = time.perf_counter()
                    connection.request("GET", "/livez")
                    connection.getresponse().read()
                    seen.livez.append(time.perf_counter() - started)
                    stop.wait(0.02)

        watching = threading.Thread(target=watch)
        watching.start()
        headers = {"X-API-Key": self.keys["other"], "Content-Type": "image/jpeg"}
        base = time.time_ns() % 10**9
        with connect() as connection:
            for number in range(count):
                body = picture(base + number, (320, 240))
                started = time.perf_counter()
                connection.request("POST", f"/predict?tasks={TASKS}", body, headers)
                answer = connection.getresponse()
                answer.read()
                seen.seconds.append(time.perf_counter() - started)
                seen.rejected += answer.status != 200
        stop.set()
        watching.join(60)
        return seen


@contextlib.contextmanager
def target() -> Iterator[Target]:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        store = open_store(folder / "store")
        embedded.publish_demo_tasks(store)
        store.commit(Publish("large", large_task()))
        upload = folder / "upload.safetensors"
        upload.write_bytes((embedded.TASKS / "cifar100.safetensors").read_bytes())
        keys, secrets = [], {}
        for who in ("hostile", "other"):
            secret = f"{who}-{os.urandom(16).hex()}"
            secrets[who] = token_of(who, secret)
            keys.append(
                Key(id=who, name=who, secret=hash_of(secret), scopes=SCOPES, created=utc_now())
            )
        file = folder / "keys.json"
        file.write_text(KeysDocument(keys=tuple(keys)).model_dump_json())
        settings = {"keys_file": file, "queue_images": 256}
        with served(embedded.BACKBONE, folder / "store", **settings) as url:
            yield Target(url, upload, secrets)


def large_task() -> TaskBundle:
    """A task with many classes, whose answers and bundle are large."""
    backbone = load_backbone(embedded.BACKBONE)
    demo = TaskBundle.load(embedded.TASKS / "cifar10.safetensors")
    repeat = -(-LARGE_CLASSES // len(demo.manifest.labels))
    labels = tuple(f"class {number}" for number in range(repeat * len(demo.manifest.labels)))
    tensors = {
        "head.weight": demo.tensors["head.weight"].repeat(repeat, axis=0),
        "head.bias": demo.tensors["head.bias"].repeat(repeat, axis=0),
    }
    manifest = demo.manifest.model_copy(
        update={"labels": labels, "ood": None, "metrics": {}, "training": {}, "layers": None}
    )
    assert manifest.backbone.fingerprint == backbone.fingerprint
    return TaskBundle(manifest, tensors)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="to see that all of it runs")
    parser.add_argument("--attacks", help="comma-separated (default: all)")
    args = parser.parse_args()
    count = 30 if args.quick else 200
    table = Table("attack", "p50, ms", "p99, ms", "p99 / alone", "/livez, most, ms", "rejected")
    results = []
    with target() as server:
        server.experience(20)
        alone, beside = Experience(), {}
        for name in args.attacks.split(",") if args.attacks else ATTACKS:
            alone.add(server.experience(count // 2))
            with server.attack(name):
                beside[name] = server.experience(count)
            print(f"{name}: {beside[name].p99 / alone.p99:.2f}", flush=True)
    for name, seen in {"alone": alone, **beside}.items():
        row = {
            "attack": name,
            "p50": seen.p50,
            "p99": seen.p99,
            "ratio": seen.p99 / alone.p99,
            "livez": max(seen.livez),
            "rejected": seen.rejected,
        }
        results.append(row)
        table.add_row(
            name,
            f"{1000 * seen.p50:.0f}",
            f"{1000 * seen.p99:.0f}",
            f"{row['ratio']:.2f}",
            f"{1000 * row['livez']:.0f}",
            str(seen.rejected),
        )
    Console().print(table)
    if not args.quick and not args.attacks:
        write_results("shares", results)


if __name__ == "__main__":
    main()
