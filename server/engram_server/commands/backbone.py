"""`engram backbone check`."""

import statistics
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Annotated, Final

import torch
import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from engram_server.errors import BrokenCheckpoint
from engram_server.model import Backbone, TaskWeights, load_backbone
from engram_server.model.families.checking import TOLERANCE, compare_with_transformers, features
from engram_server.model.families.text_tower import open_text_tower
from engram_server.model.lora import LoraWeight, target_sizes
from engram_server.model.masked_pass import encode
from engram_server.model.tasks import prepare

CLASSES: Final = 100  # of the sample tasks
MEMORY: Final = 10
RANK: Final = 8
BATCHES: Final = (1, 8)
RUNS: Final = 5
MIB: Final = 2**20


def check_backbone(
    folder: Annotated[
        str, typer.Argument(metavar="FOLDER", help="Folder or Hugging Face model name.")
    ],
    image_size: Annotated[
        int | None, typer.Option(help="Image size in pixels (default: the model's own).")
    ] = None,
) -> None:
    """Load a backbone, compare it with transformers on random images, and print its costs.

    The exit code is 1 if they differ.
    """
    path = Path(folder).expanduser()
    source = str(path.resolve()) if path.is_dir() else folder
    started = time.perf_counter()
    backbone = load_backbone(source, image_size=image_size)
    seconds = time.perf_counter() - started
    table = Table(box=SIMPLE_HEAD, show_header=False)
    for what, value in _facts(source, backbone, seconds):
        table.add_row(what, Text(value))
    agreement = compare_with_transformers(source, backbone)
    table.add_row(
        "transformers",
        f"{'agrees' if agreement.holds else 'DIFFERS'}: {agreement.difference:.1e} at most, values "
        f"up to {agreement.largest:.3g}",
    )
    Console(highlight=False).print(table)
    if not agreement.holds:
        raise BrokenCheckpoint(
            f"{folder}: features differ from those of transformers by {agreement.difference:.1e}, "
            f"more than {TOLERANCE:g} of the largest value {agreement.largest:.3g}; please report "
            f"the model"
        )


def _facts(source: str, backbone: Backbone, seconds: float) -> Iterator[tuple[str, str]]:
    geometry = backbone.geometry
    weights = sum(tensor.nbytes for _, tensor in backbone.named_tensors())
    height, width = backbone.image_size
    pixels = torch.zeros(1, 3, height, width)
    context = encode(backbone, pixels).unstack(dtype=torch.float16)[0].nbytes
    yield "backbone", backbone.name
    yield "fingerprint", backbone.fingerprint
    yield "image", f"{height}×{width} pixels, {geometry.tokens} tokens"
    yield "layers", f"{geometry.layers} of width {geometry.width}, {geometry.heads} heads"
    yield "weights", f"{weights / MIB:.1f} MiB in float32, read in {seconds:.1f} s"
    yield "base", "none" if backbone.base is None else f"{backbone.base.classes} outputs"
    yield "class names", "supported" if open_text_tower(source) else "not supported: no text tower"
    yield "a context", f"{context:,} bytes in float16"
    for what, task in _tasks(backbone):
        yield f"a task, {what}", f"{prepare(backbone, task).nbytes:,} bytes, {CLASSES} classes"
    for batch in BATCHES:
        images = pixels.expand(batch, -1, -1, -1)
        each = _median_seconds(partial(features, backbone, images)) / batch
        yield f"an image, {batch} at once", f"{each * 1000:.1f} ms"


def _tasks(backbone: Backbone) -> Iterator[tuple[str, TaskWeights]]:
    head, token = torch.zeros(CLASSES, backbone.width), torch.zeros(backbone.width)
    yield "head alone", TaskWeights(head)
    memory = torch.zeros(backbone.layers, MEMORY, backbone.width)
    yield f"memory {MEMORY}", TaskWeights(head, class_token=token, memory=memory)
    lora = {
        name: LoraWeight(
            torch.zeros(backbone.layers, inner, RANK), torch.zeros(backbone.layers, RANK, outer)
        )
        for name, (inner, outer) in target_sizes(backbone).items()
    }
    yield f"LoRA rank {RANK}", TaskWeights(head, class_token=token, lora=lora)


def _median_seconds(run: Callable[[], object]) -> float:
    run()
    times = []
    for _ in range(RUNS):
        started = time.perf_counter()
        run()
        times.append(time.perf_counter() - started)
    return statistics.median(times)
