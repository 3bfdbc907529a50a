"""`engram batch`: predict a whole corpus in this process, without a server."""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Annotated, Literal

import torch
import typer
from engram_bundle.names import BASE_TASK
from engram_store import BundleCache, TaskStore, open_store
from engram_vit.commands.options import AsJson, AsTable, Strict
from engram_vit.commands.output import printable, wants_json, write_json
from engram_vit.errors import FAILED
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar
from rich.table import Table
from rich.text import Text

from engram_server.app import engine_config
from engram_server.batch.pipeline import Progress
from engram_server.batch.rows import THRESHOLD
from engram_server.batch.run import run_batch
from engram_server.batch.setup import (
    PART_CONTEXTS,
    PART_IMAGES,
    BatchOptions,
    Keep,
    RayCluster,
)
from engram_server.batch.summary import Summary
from engram_server.commands.options import BackboneOption, resolve_source
from engram_server.errors import SettingsError
from engram_server.model import load_backbone
from engram_server.parts.kept import LEVELS
from engram_server.parts.output import Format
from engram_server.settings import Settings, load_settings

CLASSES_SHOWN = 10

SourceArgument = Annotated[
    str,
    typer.Argument(
        metavar="SOURCE",
        help="Folder, glob, s3://, gs:// or az:// prefix, .csv, .jsonl, .parquet or .tar file, - "
        "for a list of paths, or a folder written with --keep.",
    ),
]
Out = Annotated[
    Path | None, typer.Option("--out", metavar="DEST", help="Folder for the part files.")
]
Tasks = Annotated[
    list[str] | None,
    typer.Option("--tasks", metavar="T,…", help="Tasks of the store: pets,scene@3,pets:canary."),
]
Bundles = Annotated[
    list[Path] | None,
    typer.Option("--bundle", metavar="F.safetensors", help="Bundle file; repeatable."),
]
Store = Annotated[
    str | None,
    typer.Option("--store", metavar="URL", help="Task store (default: ENGRAM_STORE)."),
]
Device = Annotated[
    str | None,
    typer.Option("--device", help="Devices: cpu, or cuda:0,cuda:1 (default: ENGRAM_DEVICES)."),
]
ColumnOption = Annotated[
    str | None,
    typer.Option("--column", metavar="NAME", help="Column of a table with paths or bytes."),
]
FormatOption = Annotated[
    Literal["parquet", "csv"] | None,
    typer.Option("--format", help="Format of the parts (default: parquet; csv for DEST.csv)."),
]
OutputOption = Annotated[
    Literal["scores", "logits", "embedding"],
    typer.Option("--output", help="Also write logits, or the embedding that each head reads."),
]
Threshold = Annotated[
    float, typer.Option(min=0, max=1, help="Lowest score of a label of a multi-label task.")
]
PartImages = Annotated[
    int | None,
    typer.Option(
        min=1,
        metavar="N",
        help=f"Images of one part file (default: {PART_IMAGES}; {PART_CONTEXTS} with contexts).",
    ),
]
KeepOption = Annotated[
    tuple[str, Path] | None,
    typer.Option(
        "--keep",
        metavar="WHAT DIR",
        help=f"Also keep {', '.join(LEVELS[:-1])} or {LEVELS[-1]} in a folder: a source for new "
        "tasks, without photos.",
    ),
]
Ray = Annotated[
    str | None,
    typer.Option(
        "--ray",
        metavar="ADDRESS",
        help="Run on a Ray cluster: local, auto or host:port.",
    ),
]
Actors = Annotated[
    int | None,
    typer.Option(
        min=1, help="Ray actors that run passes (default: one per GPU, or half of the CPUs)."
    ),
]
Restart = Annotated[
    bool, typer.Option("--restart", help="Delete the parts of an earlier run and begin again.")
]


def batch(
    source: SourceArgument,
    out: Out = None,
    tasks: Tasks = None,
    bundle: Bundles = None,
    store: Store = None,
    backbone: BackboneOption = None,
    device: Device = None,
    column: ColumnOption = None,
    file_format: FormatOption = None,
    output: OutputOption = "scores",
    threshold: Threshold = THRESHOLD,
    part_images: PartImages = None,
    keep: KeepOption = None,
    ray: Ray = None,
    actors: Actors = None,
    restart: Restart = False,
    strict: Strict = False,
    as_json: AsJson = False,
    as_table: AsTable = False,
) -> None:
    """Predict all images of a source with several tasks, in one pass, without a server.

    Writes part files with one row per image, and `_manifest.json`. The same command continues a run
    that was stopped. An image that cannot be read has the reason in the column `error`; the exit
    code is 1 if none can be read, or with `--strict` if one cannot.
    """
    in_json = wants_json(as_json, as_table)
    folder = None if backbone is None else resolve_source(backbone)
    settings = load_settings(backbone=folder, store=store, devices=device)
    if settings.torch_threads is not None:
        torch.set_num_threads(settings.torch_threads)
    options = BatchOptions(
        source=source,
        out=out,
        tasks=[part.strip() for text in tasks or () for part in text.split(",") if part.strip()],
        bundles=bundle or (),
        column=column,
        file_format=file_format or _format_of(out),
        output=output,
        threshold=threshold,
        part_images=part_images,
        keep=_keep(keep),
        ray=None if ray is None else RayCluster(ray, actors),
        restart=restart,
    )
    started = time.monotonic()
    with show_progress() as progress:
        summary = run_batch(
            options,
            engine_config(settings),
            partial(load_backbone, settings.backbone, image_size=settings.image_size),
            _open_store(settings) if store or set(options.tasks) - {BASE_TASK} else None,
            sys.stdin,
            progress,
        )
    seconds = time.monotonic() - started
    if in_json:
        write_json(
            {
                "out": None if out is None else str(out),
                "kept": None if keep is None else str(keep[1]),
                "seconds": round(seconds, 3),
                **summary.as_json(),
            }
        )
    else:
        folders = " and ".join(str(each) for each in (out, keep and keep[1]) if each is not None)
        _print(Console(highlight=False), folders, summary, seconds)
    if summary.errors and (strict or summary.errors == summary.images):
        raise typer.Exit(FAILED)


def _format_of(out: Path | None) -> Format:
    return "csv" if out is not None and out.suffix == ".csv" else "parquet"


def _keep(option: tuple[str, Path] | None) -> Keep | None:
    if option is None:
        return None
    name, folder = option
    level = next((each for each in LEVELS if each == name), None)
    if level is None:
        raise SettingsError(f"Cannot keep '{name}'. Valid values of --keep: {', '.join(LEVELS)}.")
    return Keep(level, folder)


def _open_store(settings: Settings) -> TaskStore:
    keep = settings.bundle_cache_bytes
    cache = BundleCache(settings.bundle_cache, keep) if keep else None
    return open_store(settings.store, create=False, cache=cache)


class _BarProgress(Progress):
    def __init__(self, bar: Bar) -> None:
        self._bar = bar

    def begin(self, images: int, finished: int) -> Callable[[int], None]:
        line = self._bar.add_task("predicting", total=images, completed=finished, speed="")
        started, done = time.monotonic(), 0

        def on_batch(count: int) -> None:
            nonlocal done
            done += count
            speed = done / max(time.monotonic() - started, 1e-3)
            self._bar.update(line, advance=count, speed=f"{speed:.0f} images/s")

        return on_batch


@contextmanager
def show_progress() -> Iterator[Progress]:
    """Show a progress bar on stderr, if it is a terminal."""
    console = Console(stderr=True)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(bar_width=16),
        MofNCompleteColumn(),
        TextColumn("{task.fields[speed]}"),
        TimeRemainingColumn(),
    )
    with Bar(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        yield _BarProgress(bar)


def _print(console: Console, folders: str, summary: Summary, seconds: float) -> None:
    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for name in ("task", "class"):
        table.add_column(name, overflow="fold")
    for name in ("images", "share"):
        table.add_column(name, justify="right", no_wrap=True)
    for reference, task in summary.tasks.items():
        rows = [*task.classes.most_common(CLASSES_SHOWN)]
        rest = task.classes.total() - sum(count for _, count in rows)
        if rest:
            rows.append((f"{len(task.classes) - len(rows)} more classes", rest))
        if task.checked:
            rows.append(("(out of distribution)", task.out_of_distribution))
        for index, (label, count) in enumerate(rows):
            head = Text(reference if index == 0 else "")
            share = count / max(1, summary.images - summary.errors)
            table.add_row(head, Text(printable(label)), f"{count:,}", f"{share:.1%}")
    if table.row_count:
        console.print(table)
    for path, reason in summary.first_errors:
        line = f"skipped {printable(path)}: {printable(reason)}"
        console.print(Text(line, style="yellow"), soft_wrap=True)
    errors = ""
    if summary.errors:
        errors = f", {summary.errors:,} with an error (see the column `error`)"
    console.print(
        f"{summary.images:,} images in {folders}{errors}, {seconds:.1f} s", soft_wrap=True
    )
