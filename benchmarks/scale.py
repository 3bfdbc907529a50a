"""How cost grows with all that can grow: tasks, batch, classes, memory, adapters, tasks loaded.

    python -m benchmarks.scale [--quick]

A ViT-B/32 shape with random weights on the CPU; 16 tasks of five memory tokens and 100 classes and
8 images, but for what a curve varies. The points of a curve take turns, and each is a multiple of
the curve's first. Tasks loaded are those of the embedded backbone: 10,000 of them fit into memory,
and 1,000 with adapters.
Then the bytes of tasks and contexts, and the time until an `engram serve` is ready.
"""

import argparse
import tempfile
import time
from collections.abc import Callable, Iterator
from copy import deepcopy
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import torch
from engram_server.embedded import BACKBONE
from engram_server.model import Backbone, MultiTaskViT, load_backbone
from engram_server.model.masked_pass import masked_pass
from engram_server.model.tasks import StackCache, prepare
from engram_store import open_store
from rich.console import Console
from rich.table import Table
from torch import Tensor

from benchmarks.capacity.costs import Size
from benchmarks.capacity.measuring import context_size, shape_of, task_size
from benchmarks.measure import medians, write_results
from benchmarks.one_pass import (
    CLASSES,
    MEMORY_TOKENS,
    RANK,
    build,
    named,
    plain,
    random_tasks,
    with_lora,
)
from benchmarks.serving import bundle, random_vit, served

TASKS, BATCH = 16, 8  # of every curve that does not vary them

TASK_COUNTS = (1, 4, 16, 64, 256)
BATCHES = (1, 2, 4, 8, 16, 32, 64)
CLASS_COUNTS = (10, 100, 1000, 5000, 20_000)
CELLS = (0, 1, 5, 10, 20, 50)
RANKS = (0, 4, 8, 16, 64)
LOADED = (1, 10, 100, 1000, 10_000)
ADAPTED = 4  # tasks of a request, of those with adapters
ADAPTED_LOADED = (4, 1000)
STORED = (1, 16, 128)

Runs = dict[int, Callable[[], object]]


@dataclass(frozen=True, slots=True)
class Point:
    """One point of a curve: the median time, and as a multiple of the curve's first point."""

    curve: str
    at: int
    seconds: float
    ratio: float


def points(curve: str, runs: Runs, seconds: float) -> list[Point]:
    times = medians({str(at): run for at, run in runs.items()}, seconds=seconds)
    measured = [(at, times[str(at)]) for at in runs]
    first = measured[0][1]
    return [Point(curve, at, each, each / first) for at, each in measured]


# --- curves of the pass ---------------------------------------------------------------------------


def pass_of(
    backbone: Backbone,
    *,
    tasks: int = TASKS,
    images: int = BATCH,
    classes: int = CLASSES,
    cells: int = MEMORY_TOKENS,
    rank: int = 0,
) -> Callable[[], object]:
    """One pass, ready to run."""
    model = MultiTaskViT(backbone)
    made = random_tasks(backbone, tasks, classes=classes, memory=cells)
    if rank:
        made = [with_lora(backbone, task, rank) for task in made]
    return partial(model, photos(backbone, images), named(model, made))


def photos(backbone: Backbone, count: int) -> Tensor:
    """As preprocessing gives them."""
    return torch.randint(0, 256, (count, *backbone.image_size, 3), dtype=torch.uint8)


def measure_curves(backbone: Backbone, ends: int | None, seconds: float) -> Iterator[list[Point]]:
    """Each curve; `ends` leaves out the last, dearest points of each."""
    of = partial(pass_of, backbone)
    yield points("batch", {at: of(images=at) for at in BATCHES[:ends]}, seconds)
    yield points("classes", {at: of(classes=at) for at in CLASS_COUNTS[:ends]}, seconds)
    yield points("memory tokens", {at: of(cells=at) for at in CELLS[:ends]}, seconds)
    yield points("adapter rank", {at: of(rank=at) for at in RANKS[:ends]}, seconds)


def measure_tasks(ends: int | None, seconds: float) -> tuple[Backbone, list[Point]]:
    """Its first point, no task, is one plain forward of Hugging Face."""
    huggingface, backbone = build(32)
    served = backbone.packed()  # as a server has it on a CPU
    pixels = backbone.preprocessing.normalise(photos(backbone, BATCH))
    runs: Runs = {0: partial(plain, huggingface, pixels)}
    runs |= {at: pass_of(served, tasks=at) for at in TASK_COUNTS[:ends]}
    return served, points("tasks", runs, seconds)


def pass_of_resident(
    backbone: Backbone, resident: int, *, tasks_per_image: int, rank: int = 0
) -> Callable[[], object]:
    """A pass for `tasks_per_image` of `resident` tasks, each prepared with separate tensors.

    All have the values of `tasks_per_image` random tasks: drawing new ones for every task would
    take most of the benchmark's time, and repeated values do not speed up a matrix product.
    """
    made = random_tasks(backbone, tasks_per_image)
    if rank:
        made = [with_lora(backbone, task, rank) for task in made]
    tasks = [
        prepare(backbone, deepcopy(made[number % tasks_per_image])) for number in range(resident)
    ]
    first = (resident - tasks_per_image) // 2
    pixels, stacks = photos(backbone, BATCH), StackCache()

    @torch.inference_mode()
    def run() -> object:
        requests = [tasks[first : first + tasks_per_image]] * BATCH
        return masked_pass(backbone, pixels, None, requests, stacks)

    return run


def measure_loaded(ends: int | None, seconds: float) -> Iterator[list[Point]]:
    """Passes for a few of many loaded tasks."""
    backbone = load_backbone(BACKBONE).packed()
    of = partial(pass_of_resident, backbone)
    yield points("tasks loaded", {at: of(at, tasks_per_image=1) for at in LOADED[:ends]}, seconds)
    runs = {at: of(at, tasks_per_image=ADAPTED, rank=RANK) for at in ADAPTED_LOADED}
    yield points("adapters loaded", runs, seconds)


# --- start-up and bytes ---------------------------------------------------------------------------


def measure_starts(ends: int | None) -> list[Point]:
    """Seconds from starting `engram serve` until it is ready, with so many tasks in its store."""
    found: list[Point] = []
    with tempfile.TemporaryDirectory() as place:
        folder = random_vit(Path(place) / "model")
        backbone = load_backbone(folder)
        store = open_store(Path(place) / "store")
        published = 0
        for at in STORED[:ends]:
            for number in range(published, at):
                store.publish(f"task{number}", bundle(backbone, number))
            published = at
            started = time.perf_counter()
            with served(folder, Path(place) / "store"):
                took = time.perf_counter() - started
            found.append(Point("start-up", at, took, took / (found[0].seconds if found else took)))
    return found


def sizes() -> list[Size]:
    _, backbone = build(32)
    shape = shape_of(backbone)
    tasks = [(0, 100), (5, 100), (20, 100), (5, 1000), (5, 20_000)]
    return [
        *(task_size(backbone, shape, memory, classes) for memory, classes in tasks),
        *(context_size(backbone, shape, precision) for precision in ("float16", "float32")),
    ]


def show(found: list[Point]) -> Table:
    table = Table(title=found[0].curve)
    for column in ("at", "ms", "over the first"):
        table.add_column(column, justify="right")
    for point in found:
        table.add_row(f"{point.at:,}", f"{1e3 * point.seconds:,.1f}", f"{point.ratio:.3f}")
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--quick", action="store_true", help="two points of each curve, little time"
    )
    parser.add_argument("--seconds", type=float, default=20.0, help="of each curve")
    args = parser.parse_args()
    ends, seconds = (2, 0.0) if args.quick else (None, args.seconds)
    console = Console()
    rows: list[dict[str, object]] = []

    def note(found: list[Point]) -> None:
        console.print(show(found))
        rows.extend(asdict(point) for point in found)
        write_results("scale", rows)  # after each: what was measured is not lost

    backbone, tasks = measure_tasks(ends, seconds)
    note(tasks)
    for found in measure_curves(backbone, ends, seconds):
        note(found)
    rows += [{"size": each.what, "bytes": each.measured} for each in sizes()]
    for found in measure_loaded(ends, seconds):
        note(found)
    note(measure_starts(ends))


if __name__ == "__main__":
    main()
