"""What shadow versions cost callers.

    python -m benchmarks.shadows [--quick]

One engine in this process (ViT-B/32 shape, random weights), with four tasks that callers request,
and three more of the same kind as shadows of them. Clients send images in a closed loop, so the
worker is always busy. Rounds with and without shadows alternate, and ratios are of their medians.
Every image is new, so its context is not cached. Then ten times as many clients as one batch takes:
shadows must be dropped, and the 99th percentile of the callers must be as without.
"""

import argparse
import asyncio
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

import numpy as np
import torch
from engram_bundle import BackboneRef, Manifest, TaskBundle
from engram_server.engine.engine import Engine
from engram_server.engine.observer import EngineObserver
from engram_server.engine.types import EngineConfig, Floats, RunOptions
from engram_server.model import Backbone, TaskWeights
from engram_server.model.tasks import LayerWeights
from engram_store import Publish, open_store
from rich.console import Console
from rich.table import Table

from benchmarks.measure import write_results
from benchmarks.one_pass import build, random_tasks

CALLED: Final = 4
SHADOWS: Final = 3
CLASSES: Final = 10
IMAGES_AT_ONCE: Final = 16  # clients of a full load
OVERLOAD: Final = 10


@dataclass
class Round:
    """What the clients of one round saw."""

    seconds: float = 0.0
    latencies: list[float] = field(default_factory=list)
    answers: dict[int, list[Floats]] = field(default_factory=dict)

    @property
    def images_per_second(self) -> float:
        return len(self.latencies) / self.seconds

    @property
    def p99(self) -> float:
        return sorted(self.latencies)[-1 - len(self.latencies) // 100]


def bundles(backbone: Backbone, *, layers: bool) -> list[TaskBundle]:
    """Seven tasks: with rows and memory, or without rows and reading layers."""
    made = []
    for weights in random_tasks(backbone, CALLED + SHADOWS, classes=CLASSES):
        if layers:
            parts, width = backbone.summary_shape[1:]
            read = tuple(backbone.summary_layers[-2:])
            weight = torch.randn(CLASSES, len(read), parts, width) * 0.01
            weights = TaskWeights(
                weights.head_weight, layers=LayerWeights(read, weight.half().float())
            )
        manifest = Manifest(
            task_type="single_label",
            labels=tuple(f"label{index}" for index in range(CLASSES)),
            placement=weights.placement,
            layers=None if weights.layers is None else weights.layers.layers,
            backbone=BackboneRef(name=backbone.name, fingerprint=backbone.fingerprint),
            preprocessing=backbone.preprocessing,
        )
        made.append(TaskBundle(manifest, weights.arrays()))
    return made


def engine_with(backbone: Backbone, tasks: list[TaskBundle], *, shadows: bool) -> Engine:
    store = open_store("memory://")
    for number in range(CALLED):
        store.commit(Publish(f"task{number}", tasks[number]))
    for number in range(SHADOWS if shadows else 0):
        store.commit(Publish(f"task{number}", tasks[CALLED + number], aliases=("shadow",)))
    config = EngineConfig(queue_images=4096, cache_bytes=256 << 20)
    engine = Engine(backbone, store, config, EngineObserver())
    engine.start()
    return engine


async def run(engine: Engine, pixels: Callable[[int], Floats], count: int, clients: int) -> Round:
    """Let clients send `count` images in turn, each one after the answer to its last."""
    found, numbers = Round(), iter(range(count))
    plan = await engine.predictions.resolve([f"task{number}" for number in range(CALLED)])

    async def client() -> None:
        for number in numbers:
            started = time.monotonic()
            answer = await engine.predictions.predict(plan, [pixels(number)], RunOptions())
            found.latencies.append(time.monotonic() - started)
            answered = answer.images[0].tasks.values()
            found.answers[number] = [each.logits for each in answered]

    started = time.monotonic()
    await asyncio.gather(*(client() for _ in range(clients)))
    found.seconds = time.monotonic() - started
    return found


def images_of(backbone: Backbone, round_number: int) -> Callable[[int], Floats]:
    """Images as normalised pixel values, so that decoding is not measured."""
    base = np.random.default_rng(0).normal(size=(3, *backbone.image_size)).astype(np.float32)
    return lambda number: base + np.float32(1e-3) * (1 + round_number * 10_000 + number)


def measure(backbone: Backbone, *, layers: bool, rounds: int, images: int) -> dict[str, object]:
    tasks = bundles(backbone, layers=layers)
    engines = {
        with_shadows: engine_with(backbone, tasks, shadows=with_shadows)
        for with_shadows in (False, True)
    }
    speeds: dict[bool, list[float]] = {False: [], True: []}
    overloaded: dict[bool, list[float]] = {False: [], True: []}
    equal = True
    for number in range(rounds):
        for with_shadows, engine in engines.items():
            found = asyncio.run(run(engine, images_of(backbone, number), images, IMAGES_AT_ONCE))
            speeds[with_shadows].append(found.images_per_second)
        # One image at a time makes batches of the same size with and without shadows.
        alone = [
            asyncio.run(run(engine, images_of(backbone, 100 + number), 4, 1)).answers
            for engine in engines.values()
        ]
        equal &= all(
            np.array_equal(first, second)
            for key in alone[0]
            for first, second in zip(alone[0][key], alone[1][key], strict=True)
        )
    compared, dropped = counted(engines[True])
    for number in range(rounds):
        for with_shadows, engine in engines.items():
            pixels = images_of(backbone, 200 + number)
            clients = OVERLOAD * (engine.config.budget_rows // backbone.geometry.tokens)
            found = asyncio.run(run(engine, pixels, min(clients, 2 * images), clients))
            overloaded[with_shadows].append(found.p99)
    _, dropped_later = counted(engines[True])
    for engine in engines.values():
        engine.stop()
    ratio = {
        k: statistics.median(v[True]) / statistics.median(v[False])
        for k, v in (("throughput", speeds), ("p99", overloaded))
    }
    return {
        "tasks": "layers" if layers else "rows",
        "throughput": ratio["throughput"],
        "compared": compared,
        "dropped": dropped,
        "overload_p99": ratio["p99"],
        "overload_dropped": dropped_later - dropped,
        "bit_equal": equal,
    }


def counted(engine: Engine) -> tuple[int, int]:
    pairs = [
        pair for number in range(SHADOWS) for pair in engine.rollouts.evidence(f"task{number}")
    ]
    return sum(pair.images for pair in pairs), sum(pair.dropped for pair in pairs)


def show(rows: list[dict[str, object]]) -> Table:
    table = Table(title="with three shadows, divided by without")
    for name in rows[0]:
        table.add_column(name.replace("_", " "))
    for row in rows:
        table.add_row(*(f"{x:.3f}" if isinstance(x, float) else str(x) for x in row.values()))
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="two short rounds")
    args = parser.parse_args()
    _, backbone = build(32)
    rounds, images = (2, 32) if args.quick else (7, 400)
    rows = [
        measure(backbone, layers=layers, rounds=rounds, images=images) for layers in (False, True)
    ]
    Console().print(show(rows))
    if not args.quick:
        print(write_results("shadows", rows))


if __name__ == "__main__":
    main()
