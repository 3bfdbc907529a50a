"""`engram evaluate`: evaluate bundles, or the tasks of a server, on labelled images."""

import json
import math
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from engram_server.commands.options import BackboneOption
from engram_vit import Client
from engram_vit.commands.options import ApiKey, AsJson, AsTable, Strict
from engram_vit.commands.output import wants_json
from engram_vit.errors import FAILED
from rich.console import Console
from rich.text import Text

from engram_training.commands.options import (
    find_backbone,
    new_table,
    print_note,
    print_skipped,
    show_progress,
)
from engram_training.errors import SettingsConflict
from engram_training.judging.evaluation import BATCH, Evaluation, Judged, evaluate, evaluate_server
from engram_training.judging.report import percent, shown_figure

WORST_SHOWN = 10


Data = Annotated[
    list[Path],
    typer.Argument(metavar="DATA…", help="Folders of class folders, or tables of labels."),
]
Tasks = Annotated[
    list[str],
    typer.Option(
        "--tasks",
        metavar="F.safetensors,…",
        help="Bundles to evaluate; with --server, tasks such as a,b@3.",
    ),
]
# Not from the environment, so that the same command line always means the same.
Server = Annotated[
    str | None,
    typer.Option("--server", metavar="URL", help="Evaluate the tasks of a running server."),
]
Split = Annotated[
    Literal["auto", "train", "val", "test"],
    typer.Option(help="Which images to use. auto: held-out images."),
]
TaskTypeName = Annotated[
    Literal["auto", "single_label", "multi_label", "regression"],
    typer.Option(help="What the labels mean. auto: by the labels."),
]
Batch = Annotated[int | None, typer.Option(min=1, help=f"Images per pass (default: {BATCH}).")]
PerClass = Annotated[
    bool, typer.Option("--per-class", help="Show every class, not only the worst.")
]


def evaluate_bundles(
    data: Data,
    tasks: Tasks,
    server: Server = None,
    api_key: ApiKey = None,
    backbone: BackboneOption = None,
    split: Split = "auto",
    task_type: TaskTypeName = "auto",
    batch: Batch = None,
    per_class: PerClass = False,
    strict: Strict = False,
    as_json: AsJson = False,
    as_table: AsTable = False,
) -> None:
    """Evaluate bundles on labelled images, all tasks in one pass over each data set.

    A bundle is evaluated on the data sets whose labels it has. Of a data set that a task was
    trained on, only held-out images are used. With `--server`, the tasks of a server are evaluated.
    A task that cannot be evaluated does not stop the others; the exit code is then 1.
    """
    in_json = wants_json(as_json, as_table)
    console = Console(highlight=False, stderr=in_json)
    named = [part.strip() for text in tasks for part in text.split(",") if part.strip()]
    if server is not None and (backbone is not None or batch is not None):
        raise SettingsConflict("--server cannot be combined with --backbone or --batch.")
    with show_progress(console) as watcher:
        arguments: Any = {
            "tasks": named,
            "split": None if split == "auto" else split,
            "task_type": None if task_type == "auto" else task_type,
            "watcher": watcher,
        }
        if server is None:
            found, batch = find_backbone(backbone), batch or BATCH
            evaluation = evaluate(data, backbone=found, batch=batch, **arguments)
        else:
            with Client(server, api_key) as client:
                evaluation = evaluate_server(data, client=client, **arguments)
    if in_json:
        typer.echo(json.dumps(as_document(evaluation), indent=1))
    else:
        _print(console, evaluation, per_class)
    if evaluation.failed or (strict and evaluation.skipped):
        raise typer.Exit(FAILED)


def as_document(evaluation: Evaluation) -> dict[str, object]:
    """Convert to JSON values; undefined figures are null."""
    return {
        "results": [_result(one) for one in evaluation.judged],
        "failed": [{"name": one.name, "reason": one.reason} for one in evaluation.failed],
        "skipped": [{"path": str(one.path), "reason": one.reason} for one in evaluation.skipped],
        "notes": evaluation.notes,
    }


def _result(one: Judged) -> dict[str, object]:
    figures = one.figures
    return {
        "task": one.task,
        "data": one.data,
        "task_type": figures.task_type,
        "images": figures.images,
        "metrics": figures.values,
        "interval": figures.interval,
        "classes_matched_by_order": one.by_order,
        "classes": [
            {
                "label": each.label,
                "images": each.images,
                "recall": None if math.isnan(each.recall) else each.recall,
                "precision": None if math.isnan(each.precision) else each.precision,
            }
            for each in figures.classes
        ],
    }


def _print(console: Console, evaluation: Evaluation, per_class: bool) -> None:
    table = new_table(["task", "data", "figure"], ["value", "95 % interval", "images"])
    for one in evaluation.judged:
        for index, (name, value) in enumerate(one.figures.values.items()):
            first = index == 0
            interval = one.figures.interval if first else None
            low_high = f"{percent(interval[0])} – {percent(interval[1])}" if interval else ""
            head = (one.task, one.data) if first else ("", "")
            images = str(one.figures.images) if first else ""
            shown = shown_figure(name, value)
            table.add_row(*head, name.replace("_", " "), shown, low_high, images)
    console.print(table)
    for one in evaluation.judged:
        _print_classes(console, one, per_class)
    for note in evaluation.notes:
        print_note(console, f"note: {note}")
    print_skipped(console, evaluation.skipped)
    for failure in evaluation.failed:
        print_note(console, f"failed: {failure.name}: {failure.reason}")


def _print_classes(console: Console, one: Judged, every: bool) -> None:
    classes = [each for each in one.figures.classes if each.images]
    if not classes:
        return
    classes.sort(key=lambda each: (each.recall, each.label))
    shown = classes if every else classes[:WORST_SHOWN]
    what = "every class" if len(shown) == len(classes) else f"the {len(shown)} worst classes"
    if one.by_order:
        what += ", matched by order because the bundle has no class names"
    table = new_table(["class"], ["images", "recall", "precision"], f"{one.task}: {what}")
    for each in shown:
        cells = (percent(each.recall), percent(each.precision))
        table.add_row(Text(each.label), str(each.images), *cells)
    console.print(table)
