"""What passes cost on a GPU, and the page that says so.

    python -m benchmarks.gpu [--quick]

ViT-B shapes with random weights and five memory tokens a task, as the server runs them there: in
bfloat16, base passes as CUDA graphs, task rows by the Triton kernel. Beside them, in turns: one
plain forward of Hugging Face, the same as a CUDA graph, and ours without graphs and without the
kernel. Answers are compared with those of float32, so that what is fast is also seen to be right.
Then `engram serve` with 1, 2 and 4 processes on the GPU, as `benchmarks.processes` measures it.

Without a GPU it writes nothing.
"""

import argparse
import json
import sys
import tempfile
import textwrap
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

import torch
from engram_server.engine.cuda_graphs import Capture, CapturedEncoder, CudaGraphs
from engram_server.engine.staging import Staging
from engram_server.model import Backbone
from engram_server.model.context import ContextBatch
from engram_server.model.masked_pass import PassResult, encode, masked_pass
from engram_server.model.tasks import StackCache, Task, prepare
from rich.console import Console
from torch import Tensor
from transformers import ViTForImageClassification

from benchmarks import processes
from benchmarks.measure import medians, write_results
from benchmarks.one_pass import build, plain, random_tasks
from benchmarks.page import WIDTH, Row, machine_line, number, short, table
from benchmarks.scale import photos
from benchmarks.serving import random_vit

PAGE = Path(__file__).resolve().parent.parent / "docs" / "reference" / "performance-gpu.md"
PATCHES = (32, 16)
BATCHES = (1, 8, 32)
TASK_COUNTS = (1, 4, 16, 64)

_HEAD = (
    "GPU latency and throughput, measured and written by `make bench-gpu` on a machine with a GPU. "
    "If no table follows, it has not been run, and no GPU figure in this documentation is "
    "measured. [The CUDA path](../explanation/gpu.md) describes how it works."
)
_COLUMNS = {
    "plain_ms": "one HF forward, ms",
    "plain_graph": "the same as a graph",
    "eager": "ours, plain torch",
    "kernel": "ours, with the kernel",
    "graphs": "ours, as served",
    "warm": "warm images",
    "copy": "pixels to the GPU",
    "difference": "answers off by",
}
_MEANING = (
    "*Ours* answers all tasks for all images. All columns but the first time are multiples of one "
    "HF forward of the same images, in the same precision; N models would be N. *As served* has "
    "graphs of the base pass and the kernel, *warm* only task rows. *Answers off by* is the "
    "largest difference to our answers in float32, over the largest of them."
)
_PROCESSES = (
    "`engram serve --processes N` on this GPU: ViT-B/32, one head-only task, one 640 × 480 photo "
    "per request. *New* photos are decoded and computed; *cached* ones cost the GPU almost nothing."
)


class Bench:
    """One backbone on a device, its tasks, and the ways to run them. Weights are random."""

    def __init__(self, backbone: Backbone, device: torch.device, dtype: torch.dtype) -> None:
        self.exact = backbone.to(device)
        self.backbone = backbone.to(device, dtype)
        self.device = device
        self._stacks = StackCache()

    def tasks(self, backbone: Backbone, count: int) -> list[Task]:
        torch.manual_seed(count)
        return [prepare(backbone, weights) for weights in random_tasks(backbone, count)]

    def run(
        self,
        tasks: list[Task],
        images: int,
        pixels: Tensor | None = None,
        warm: ContextBatch | None = None,
        *,
        backbone: Backbone | None = None,
    ) -> PassResult:
        requested = [tasks] * images
        return masked_pass(backbone or self.backbone, pixels, warm, requested, self._stacks)

    def finished(self, run: Callable[[], object]) -> Callable[[], None]:
        """Until the device has done it."""

        def runs() -> None:
            run()
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)

        return runs


def measure(
    bench: Bench,
    huggingface: ViTForImageClassification,
    capture: Capture,
    plain_graph: Callable[[Tensor], object],
    pixels: Tensor,
    counts: Sequence[int],
    seconds: float,
) -> list[dict[str, object]]:
    """Rows for one batch of images, bytes on the host."""
    images = len(pixels)
    moved = pixels.to(bench.device)
    values = bench.backbone.preprocessing.normalise(moved, bench.backbone.dtype)
    encoder = CapturedEncoder(bench.backbone, images, capture)
    contexts = encode(bench.backbone, moved)
    staging, arrays = Staging(bench.device), list(pixels.numpy())
    runs: dict[str, Callable[[], object]] = {
        "plain": partial(plain, huggingface, values),
        "plain_graph": partial(plain_graph, values),
        "copy": lambda: staging.stack([staging.send(array) for array in arrays]),
    }
    differences = {}
    for count in counts:
        tasks = bench.tasks(bench.backbone, count)
        run = partial(bench.run, tasks, images)
        # With gradients on, which nothing here has, attention takes its plain form.
        runs[f"eager {count}"] = torch.enable_grad()(partial(run, moved))
        runs[f"kernel {count}"] = partial(run, moved)
        runs[f"graphs {count}"] = partial(served, run, encoder, moved)
        runs[f"warm {count}"] = partial(run, None, contexts)
        differences[count] = difference(bench, tasks, moved, served(run, encoder, moved))
    times = medians({name: bench.finished(run) for name, run in runs.items()}, seconds=seconds)
    one = times["plain"]
    rows: list[dict[str, object]] = []
    for count in counts:
        row: dict[str, object] = {"batch": images, "tasks": count, "plain_ms": 1e3 * one}
        row |= {name: times[name] / one for name in ("plain_graph", "copy")}
        ours = ("eager", "kernel", "graphs", "warm")
        row |= {name: times[f"{name} {count}"] / one for name in ours}
        rows.append(row | {"difference": differences[count]})
    return rows


def served(
    run: Callable[[None, ContextBatch], PassResult], encoder: CapturedEncoder, pixels: Tensor
) -> PassResult:
    return run(None, encoder(pixels))


def difference(bench: Bench, tasks: list[Task], pixels: Tensor, result: PassResult) -> float:
    """The largest between answers and those of float32, over the largest of these."""
    exact = bench.tasks(bench.exact, len(tasks))
    with torch.enable_grad():  # attention in its plain form
        reference = bench.run(exact, len(pixels), pixels, backbone=bench.exact)
    answers = {task: each.values for each in result.logits for task in [each.task]}
    expected = torch.stack([each.values for each in reference.logits])
    got = torch.stack([answers[task] for task in tasks])
    return float((got - expected).abs().max() / expected.abs().max())


def page(results: Mapping[str, object] | None) -> str:
    """The page of a run; without one it says that there was none."""
    parts = ["# Performance on a GPU", textwrap.fill(_HEAD, WIDTH)]
    if results is not None:
        machine, rows = results["machine"], results["rows"]
        assert isinstance(machine, Mapping)
        assert isinstance(rows, Sequence)
        cells = [_cells(row) for row in rows if "shape" in row]
        columns = ["shape", "batch", "tasks", *_COLUMNS.values()]
        parts += [
            "## Passes",
            textwrap.fill(machine_line(machine), WIDTH),
            textwrap.fill(_MEANING, WIDTH),
            table(columns, cells),
            "## Several processes",
            textwrap.fill(_PROCESSES, WIDTH),
            processes.table_of([row for row in rows if "processes" in row]),
        ]
    return "\n\n".join(parts) + "\n"


def _cells(row: Row) -> list[str]:
    figures = [f"{number(row[name]):.3f}" for name in list(_COLUMNS)[1:-1]]
    first, last = short(number(row["plain_ms"])), f"{number(row['difference']):.1e}"
    return [str(row["shape"]), str(row["batch"]), str(row["tasks"]), first, *figures, last]


@torch.no_grad()
def measure_all(device: torch.device, *, quick: bool, console: Console) -> list[dict[str, object]]:
    rows: list[dict[str, object]] = []
    seconds = 1.0 if quick else 20.0
    for patch in PATCHES:
        huggingface, backbone = build(patch)
        bench = Bench(backbone, device, torch.bfloat16)
        torch.nn.Module.to(huggingface, device, torch.bfloat16)  # in place
        for batch in BATCHES[:2] if quick else BATCHES:
            pixels = photos(backbone, batch)
            graphs = CudaGraphs()
            example = backbone.preprocessing.normalise(pixels.to(device), torch.bfloat16)
            plain_graph = graphs(partial(plain, huggingface), example)
            found = measure(bench, huggingface, graphs, plain_graph, pixels, TASK_COUNTS, seconds)
            rows += [{"shape": f"ViT-B/{patch}"} | row for row in found]
            console.print(f"ViT-B/{patch}, batch {batch}: measured")
    return rows


def measure_processes(device: str, *, quick: bool, console: Console) -> list[dict[str, object]]:
    """Rows for servers with several processes on a device."""
    seconds, turns = (1.0, 1) if quick else (5.0, processes.TURNS)
    with tempfile.TemporaryDirectory() as folder:
        backbone = random_vit(Path(folder))
        rows = processes.measure(backbone, device, seconds, turns=turns)
    console.print("several processes: measured")
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="to see that it runs; no page")
    quick: bool = parser.parse_args().quick
    if not torch.cuda.is_available():
        sys.exit("torch sees no GPU here, so there is nothing to measure and nothing was written.")
    device = torch.device("cuda", torch.cuda.current_device())
    console = Console()
    rows = measure_all(device, quick=quick, console=console)
    rows += measure_processes(str(device), quick=quick, console=console)
    name = f"{torch.cuda.get_device_name(device)} (CUDA {torch.version.cuda})"
    written = write_results("gpu", rows, device=name)
    text = page(json.loads(written.read_text()))
    console.print(text, markup=False)
    if not quick:  # figures of a trial are no figures
        PAGE.write_text(text)
        console.print(f"written to {PAGE.name}")


if __name__ == "__main__":
    main()
