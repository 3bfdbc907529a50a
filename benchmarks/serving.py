"""What serving adds to the bare engine, what a cached image saves, and what uploads disturb.

    python -m benchmarks.serving [--quick]

Real HTTP to an `engram serve` of its own, keep-alive clients, JPEG bodies, on a ViT-B/32 shape with
random weights and, where it lies beside the repository, the ViT-Ti of `../shared`. Every figure is
a ratio within one run: phases of the contenders take turns.
"""

import argparse
import asyncio
import contextlib
import http.client
import io
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import numpy as np
import torch
from engram_bundle import Manifest, TaskBundle
from engram_bundle.manifest import BackboneRef
from engram_server.engine.engine import Engine
from engram_server.engine.observer import EngineObserver
from engram_server.engine.types import EngineConfig
from engram_server.model import Backbone, MultiTaskViT, TaskWeights, load_backbone
from engram_server.model.preprocessing.pipeline import golden_pixels
from engram_store import open_store
from PIL import Image
from rich.console import Console
from rich.table import Table
from transformers import ViTConfig, ViTForImageClassification

from benchmarks.measure import write_results

TASKS = 4
CLIENTS = 8
SHARED = Path(__file__).resolve().parent.parent.parent / "shared"
# Admission must not decide a throughput run, and a cached context must not answer for a cold image.
SETTINGS = {"queue_images": 1024, "cache_bytes": 0, "log_level": "warning"}


def jpeg(seed: int) -> bytes:
    """A 640×480 picture of random colour patches: compresses about as a photo does."""
    patches = np.random.default_rng(seed).integers(0, 256, (30, 40, 3), dtype=np.uint8)
    out = io.BytesIO()
    Image.fromarray(patches).resize((640, 480), Image.Resampling.BICUBIC).save(out, "JPEG")
    return out.getvalue()


def bundle(backbone: Backbone, seed: int, *, memory: bool = True) -> TaskBundle:
    """A task of random weights: with five memory tokens and a class token, or a head alone."""
    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator) * 0.02

    weights = TaskWeights(
        head_weight=random(100, backbone.width),
        class_token=random(backbone.width) if memory else None,
        memory=random(backbone.layers, 5, backbone.width) if memory else None,
    )
    model = MultiTaskViT(backbone)
    model.add("task", weights)
    pixels = golden_pixels(backbone.image_size)
    golden = model(torch.from_numpy(pixels), ["task"])["task"]
    return TaskBundle(
        manifest=Manifest(
            task_type="single_label",
            labels=tuple(f"class {number}" for number in range(100)),
            backbone=BackboneRef(name=backbone.name, fingerprint=backbone.fingerprint),
            preprocessing=backbone.preprocessing,
        ),
        tensors={
            **weights.arrays(),
            "golden.pixels": pixels,
            "golden.logits": golden.numpy(),
        },
    )


@contextlib.contextmanager
def served(backbone: Path, store: Path, **settings: object) -> Iterator[str]:
    """An `engram serve` process, ready, and its address."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    settings = {**SETTINGS, **settings, "backbone": backbone, "store": store, "port": port}
    environment = {f"ENGRAM_{name.upper()}": str(value) for name, value in settings.items()}
    process = subprocess.Popen(
        [str(Path(sys.executable).with_name("engram")), "serve"],
        env={**os.environ, **environment},
        stdout=subprocess.DEVNULL,
    )
    try:
        url = f"http://127.0.0.1:{port}"
        while True:
            if process.poll() is not None:
                raise SystemExit("the server did not start; its message is above")
            with contextlib.suppress(httpx.TransportError):
                if httpx.get(f"{url}/readyz", timeout=5).status_code == 200:
                    break
            time.sleep(0.1)
        yield url
    finally:
        process.terminate()
        process.wait(timeout=60)


def ask(url: str, images: Sequence[bytes], query: str) -> list[float]:
    """One keep-alive client: sends every image in turn, and how long each took."""
    connection = http.client.HTTPConnection(url.removeprefix("http://"), timeout=120)
    seconds = []
    for image in images:
        started = time.perf_counter()
        connection.request("POST", f"/predict?{query}", image, {"Content-Type": "image/jpeg"})
        answer = connection.getresponse()
        body = answer.read()
        if answer.status != 200:
            raise RuntimeError(body.decode())
        seconds.append(time.perf_counter() - started)
    connection.close()
    return seconds


def over_http(url: str, images: Sequence[bytes], query: str) -> float:
    """Images a second with all clients at work."""
    started = time.perf_counter()
    with ThreadPoolExecutor(CLIENTS) as pool:
        list(
            pool.map(
                lambda part: ask(url, part, query), [images[i::CLIENTS] for i in range(CLIENTS)]
            )
        )
    return len(images) / (time.perf_counter() - started)


def bare(engine: Engine, images: Sequence[bytes], tasks: Sequence[str]) -> float:
    """Images a second of the engine alone, with as many requests under way."""

    async def client(part: Sequence[bytes]) -> None:
        for image in part:
            plan = await engine.predictions.resolve(tasks)
            await engine.predictions.predict(plan, [image])

    async def run() -> None:
        await asyncio.gather(*(client(images[i::CLIENTS]) for i in range(CLIENTS)))

    started = time.perf_counter()
    asyncio.run(run())
    return len(images) / (time.perf_counter() - started)


def measure_throughput(folder: Path, backbone: Backbone, rounds: int, count: int) -> float:
    """Images a second over HTTP, as a multiple of the bare engine's."""
    images = [jpeg(seed) for seed in range(count)]
    tasks = [f"task{number}" for number in range(TASKS)]
    with tempfile.TemporaryDirectory() as place:
        store = open_store(place)
        for number, task in enumerate(tasks):
            store.publish(task, bundle(backbone, number))
        config = EngineConfig(cache_bytes=0, queue_images=1024)
        engine = Engine(backbone, store, config, EngineObserver())
        engine.start()
        speeds: dict[str, list[float]] = {"http": [], "bare": []}
        with served(folder, Path(place)) as url:
            query = f"tasks={','.join(tasks)}"
            over_http(url, images[:CLIENTS], query)
            bare(engine, images[:CLIENTS], tasks)
            for _ in range(rounds):
                speeds["bare"].append(bare(engine, images, tasks))
                speeds["http"].append(over_http(url, images, query))
        engine.stop()
    return statistics.median(speeds["http"]) / statistics.median(speeds["bare"])


def measure_cached(folder: Path, backbone: Backbone, count: int, images: int) -> float:
    """How many times quicker `forward` is for other tasks of images sent before."""
    with tempfile.TemporaryDirectory() as place:
        store = open_store(place)
        for number in range(2 * TASKS):
            store.publish(f"task{number}", bundle(backbone, number))
        first = ",".join(f"task{number}" for number in range(TASKS))
        other = ",".join(f"task{number}" for number in range(TASKS, 2 * TASKS))
        cold: list[float] = []
        warm: list[float] = []
        with served(folder, Path(place), cache_bytes=2**30) as url, httpx.Client() as client:
            for turn in range(count + 2):
                files = [
                    ("image", (f"{number}.jpg", jpeg(turn * images + number), "image/jpeg"))
                    for number in range(images)
                ]
                for tasks, times in ((first, cold), (other, warm)):
                    answer = client.post(
                        f"{url}/predict", params={"tasks": tasks}, files=files, timeout=60
                    ).json()
                    times.append(answer["timings_ms"]["forward"])
        return statistics.median(cold[2:]) / statistics.median(warm[2:])


def measure_uploads(folder: Path, backbone: Backbone, rounds: int, uploads: int) -> float:
    """p99 of predictions while bundles are uploaded, as a multiple of p99 without."""
    images = [jpeg(seed) for seed in range(8)]
    fresh = [bundle(backbone, 1000 + number).to_bytes() for number in range(uploads)]
    quiet: list[float] = []
    busy: list[float] = []
    with tempfile.TemporaryDirectory() as place:
        open_store(place).publish("task0", bundle(backbone, 0))
        with served(folder, Path(place)) as url:
            ask(url, images, "tasks=task0")
            for number in range(rounds):
                share = fresh[number::rounds]
                quiet += under_load(url, images, None)
                busy += under_load(url, images, share)
    return float(np.percentile(busy, 99) / np.percentile(quiet, 99))


def under_load(url: str, images: Sequence[bytes], uploads: Sequence[bytes] | None) -> list[float]:
    """Latencies of two clients for some seconds, or while all bundles are uploaded."""
    done = threading.Event()
    seconds: list[float] = []

    def client() -> None:
        while not done.is_set():
            seconds.extend(ask(url, images, "tasks=task0"))

    clients = [threading.Thread(target=client) for _ in range(2)]
    for each in clients:
        each.start()
    with httpx.Client(base_url=url, timeout=60) as http:
        if uploads is None:
            time.sleep(12)  # the window itself
        for number, data in enumerate(uploads or ()):
            answer = http.put(f"/tasks/uploaded{number % 20}", content=data)
            if answer.status_code not in (200, 201):
                raise RuntimeError(answer.text)
            time.sleep(0.2)  # five uploads a second
    done.set()
    for each in clients:
        each.join()
    return seconds


def random_vit(folder: Path) -> Path:
    torch.manual_seed(0)
    config = ViTConfig(patch_size=32)
    config.num_labels = 1000
    ViTForImageClassification(config).save_pretrained(folder)
    return folder


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="fewer images and rounds")
    quick = parser.parse_args().quick
    rounds, count = (2, 64) if quick else (3, 96)
    table = Table(title="Serving")
    for column in ("backbone", "measure", "ratio", "target"):
        table.add_column(column)
    rows: list[dict[str, object]] = []

    def note(shape: str, measure: str, ratio: float, target: str) -> None:
        rows.append({"backbone": shape, "measure": measure, "ratio": ratio, "target": target})
        table.add_row(shape, measure, f"{ratio:.3f}", target)

    with tempfile.TemporaryDirectory() as place:
        shapes = {"ViT-B/32": random_vit(Path(place))}
        tiny = SHARED / "backbones" / "vit-tiny-patch16-224"
        if tiny.is_dir():
            shapes["ViT-Ti/16"] = tiny
        for shape, folder in shapes.items():
            backbone = load_backbone(folder)
            speed = measure_throughput(folder, backbone, rounds, count)
            note(shape, "throughput over the bare engine's", speed, "≥ 0.90")
            if shape == "ViT-B/32":
                for images, named in ((1, "one image"), (8, "eight images")):
                    saved = measure_cached(folder, backbone, 8 if quick else 24, images)
                    note(shape, f"cold forward over cached, {named}", saved, "≥ 5")
            ratio = measure_uploads(folder, backbone, rounds, 20 if quick else 60)
            note(shape, "p99 during uploads over p99 without", ratio, "≤ 1.2")
    Console().print(table)
    Console().print(f"written to {write_results('serving', rows).name}")


if __name__ == "__main__":
    main()
