"""`engram evaluate`: how right bundles, or the tasks of a server, are on labelled images."""

import json
import math
from pathlib import Path
from typing import Annotated, Any

import typer
from engram_client import Client
from engram_client.options import ApiKey
from rich.console import Console
from rich.text import Text

from training.commands.options import (
    ProblemName,
    choose,
    find_backbone,
    new_table,
    print_note,
    show_progress,
)
from training.data.dataset import PROBLEMS, SPLITS
from training.errors import SettingsConflict
from training.judging.evaluation import BATCH, Evaluation, Judged, evaluate, evaluate_server
from training.judging.report import percent, shown_figure

WORST_SHOWN = 10


Data = Annotated[
    list[Path],
    typer.Argument(metavar="DATA…", help="Folders of class folders, or tables of paths."),
]
Tasks = Annotated[
    list[str],
    typer.Option(
        "--tasks",
        metavar="F.safetensors,…",
        help="The bundles to judge; with --server, its tasks: a,b@3.",
    ),
]
# Not from the environment: the same command line shall not mean a server on another day.
Server = Annotated[
    str | None,
    typer.Option("--server", metavar="URL", help="Judge the tasks of a running server."),
]
BackboneName = Annotated[
    str | None,
    typer.Option("--backbone", metavar="DIR", help="A folder, or a model's name on the hub."),
]
Split = Annotated[
    str, typer.Option(metavar="auto|train|val|test", help="Which images; auto: held out ones.")
]
Batch = Annotated[int | None, typer.Option(min=1, help=f"Images per pass: {BATCH}.")]
PerClass = Annotated[
    bool, typer.Option("--per-class", help="Show every class, not only the worst.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON and nothing else.")]


def evaluate_bundles(
    data: Data,
    tasks: Tasks,
    server: Server = None,
    api_key: ApiKey = None,
    backbone: BackboneName = None,
    split: Split = "auto",
    problem: ProblemName = "auto",
    batch: Batch = None,
    per_class: PerClass = False,
    as_json: AsJson = False,
) -> None:
    """Judge bundles on labelled images, all tasks in one pass over each data set.

    A bundle is judged on the data sets whose labels it knows. Of a data set that a task was
    trained on, only the images held out then are used. With `--server`, its tasks are judged.
    """
    console = Console(highlight=False, stderr=as_json)
    named = [part.strip() for text in tasks for part in text.split(",") if part.strip()]
    if server is not None and (backbone is not None or batch is not None):
        raise SettingsConflict("--server answers itself: leave out --backbone and --batch")
    which, meaning = choose(split, SPLITS, "split"), choose(problem, PROBLEMS, "problem")
    with show_progress(console) as watcher:
        asked: Any = {"tasks": named, "split": which, "problem": meaning, "watcher": watcher}
        if server is None:
            found, batch = find_backbone(backbone), batch or BATCH
            evaluation = evaluate(data, backbone=found, batch=batch, **asked)
        else:
            with Client(server, api_key) as client:
                evaluation = evaluate_server(data, client=client, **asked)
    if as_json:
        typer.echo(json.dumps(as_document(evaluation), indent=1))
    else:
        _print(console, evaluation, per_class)


def as_document(evaluation: Evaluation) -> dict[str, object]:
    """Everything as JSON values; what is undefined is null."""
    return {
        "results": [_result(one) for one in evaluation.judged],
        "skipped": [{"path": str(one.path), "reason": one.reason} for one in evaluation.skipped],
        "notes": evaluation.notes,
    }


def _result(one: Judged) -> dict[str, object]:
    figures = one.figures
    return {
        "task": one.task,
        "data": one.data,
        "problem": figures.problem,
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
        for place, (name, value) in enumerate(one.figures.values.items()):
            first = place == 0
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
    for bad in evaluation.skipped:
        print_note(console, f"skipped {bad.path}: {bad.reason}")


def _print_classes(console: Console, one: Judged, every: bool) -> None:
    classes = [each for each in one.figures.classes if each.images]
    if not classes:
        return
    classes.sort(key=lambda each: (each.recall, each.label))
    shown = classes if every else classes[:WORST_SHOWN]
    what = "every class" if len(shown) == len(classes) else f"the {len(shown)} worst classes"
    if one.by_order:
        what += ", matched by order: the bundle's classes have no names"
    table = new_table(["class"], ["images", "recall", "precision"], f"{one.task}: {what}")
    for each in shown:
        cells = (percent(each.recall), percent(each.precision))
        table.add_row(Text(each.label), str(each.images), *cells)
    console.print(table)
