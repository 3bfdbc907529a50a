"""`engram train`: from a folder of images to a bundle."""

from collections.abc import Collection
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import typer
from engram_bundle import TaskBundle
from engram_server.commands.options import BACKBONE_VARIABLE, BackboneOption, push_command
from engram_server.model import Backbone
from engram_vit import DEFAULT_SERVER, Client
from engram_vit.commands.options import ApiKey, Server
from pydantic import TypeAdapter, ValidationError
from rich.console import Console
from rich.text import Text

from engram_training.commands.options import (
    fields_set,
    find_backbone,
    new_table,
    print_skipped,
    show_progress,
    with_train_options,
)
from engram_training.data.dataset import DataSet, read_data, split_data
from engram_training.errors import DataError, SettingsConflict
from engram_training.fitting.losses import SCORE_NAMES
from engram_training.fitting.stopping import last_figures
from engram_training.judging.pairs import Contender, Pairs, compare
from engram_training.judging.report import Fitted, percent, shown_figure
from engram_training.options import TrainOptions, recorded_options
from engram_training.run import fit

VARIANTS_SHOWN = 12

Data = Annotated[
    Path,
    typer.Argument(
        metavar="DATA",
        help="A folder of class folders, with or without train/ val/ test/ above them, or a CSV or "
        "JSONL file of paths and labels.",
    ),
]
Name = Annotated[str, typer.Option("--name", metavar="NAME", help="Name of the task.")]
Out = Annotated[Path, typer.Option("--out", metavar="F.safetensors", help="Bundle to write.")]
Extends = Annotated[
    list[Path] | None,
    typer.Option(metavar="F.safetensors", help="Bundle of a task that this task extends."),
]
WithCorrections = Annotated[
    bool, typer.Option("--with-corrections", help="Apply the corrections collected by the server.")
]
Like = Annotated[
    Path | None,
    typer.Option(
        metavar="F.safetensors",
        help="Bundle whose training to repeat on the same data, with its split and options. "
        "Options on the command line take precedence. Both bundles are then compared.",
    ),
]
OldBackbone = Annotated[
    str | None,
    typer.Option(
        metavar="DIR", help=f"Backbone of the --like bundle (default: {BACKBONE_VARIABLE})."
    ),
]
Kept = Annotated[
    Path | None,
    typer.Option(
        "--kept",
        metavar="DIR",
        help="Folder written by engram batch --keep: DATA is a table of paths in it, and the "
        "photos are not needed.",
    ),
]
Resume = Annotated[bool, typer.Option("--resume", help="Continue an interrupted run.")]


@with_train_options
def train(
    context: typer.Context,
    data: Data,
    name: Name,
    out: Out,
    options: TrainOptions,
    backbone: BackboneOption = None,
    extends: Extends = None,
    with_corrections: WithCorrections = False,
    server: Server = DEFAULT_SERVER,
    api_key: ApiKey = None,
    like: Like = None,
    old_backbone: OldBackbone = None,
    kept: Kept = None,
    resume: Resume = False,
) -> None:
    """Train a task on your images: many variants in one pass, the best becomes the bundle.

    A report is written next to the bundle. Ctrl-C keeps the best so far; `--resume` continues.
    """
    if with_corrections:
        with Client(server, api_key) as client:
            corrections = {one.digest: one.labels for one in client.corrections(name)}
        options = replace(options, corrections=corrections)
    if kept is not None and like is not None:
        raise SettingsConflict("--like compares two bundles on photos. Omit --kept or --like.")
    run = _Command(data, name, out, backbone, extends or [], kept, resume)
    if like is None:
        run.fit(options)
    else:
        run.fit_like(like, old_backbone, options, fields_set(context))


@dataclass(frozen=True, slots=True)
class _Command:
    data: Path
    name: str
    out: Path
    backbone: str | None
    extends: list[Path]
    kept: Path | None
    resume: bool

    def fit(self, options: TrainOptions) -> Backbone:
        console = Console(highlight=False)
        backbone = find_backbone(self.backbone)
        with show_progress(console) as watcher:
            fitted = fit(
                self.data,
                name=self.name,
                backbone=backbone,
                out=self.out,
                extends=self.extends,
                kept=self.kept,
                resume=self.resume,
                watcher=watcher,
                options=options,
            )
        _print(console, fitted)
        return backbone

    def fit_like(
        self, like: Path, old_backbone: str | None, options: TrainOptions, explicit: frozenset[str]
    ) -> None:
        """Train with the options of a bundle, except `explicit` ones, and compare both in pairs."""
        old = TaskBundle.load(like)
        if old.extends:
            raise SettingsConflict(
                f"'{like}' extends tasks of the old backbone. Retrain those first, then train this "
                f"task with --extends and without --like."
            )
        options = replace(options_like(old, options, explicit), like=old.digest)
        data = read_data(self.data, options.task_type)
        check_same_data(data, old)
        before = Contender([like], find_backbone(old_backbone))
        expected = old.manifest.backbone
        if expected.fingerprint != before.backbone.fingerprint:
            raise SettingsConflict(
                f"The --like bundle belongs to backbone '{expected.name}', not to "
                f"'{before.backbone.name}'. Pass its folder with --old-backbone."
            )
        after = Contender([self.out, *self.extends], self.fit(options))
        data = split_data(data, options.split, options.seed)
        console = Console(highlight=False)
        with show_progress(console) as watcher:
            split, pairs = compare(data, before, after, watcher)
        _print_pairs(console, split, before.backbone.name, after.backbone.name, pairs)


def options_like(
    bundle: TaskBundle, options: TrainOptions, explicit: Collection[str] = ()
) -> TrainOptions:
    """Replace the recorded options, except `explicit` ones, by those of a bundle.

    Raises SettingsConflict if the bundle does not record its options.
    """
    stored = bundle.manifest.training.get("options")
    if not isinstance(stored, dict):
        raise SettingsConflict(
            "The --like bundle does not record its training options: it was imported or created "
            "from examples. Train without --like."
        )
    try:
        recorded = TypeAdapter(TrainOptions).validate_python(
            {name: stored[name] for name in recorded_options() if name in stored}
        )
    except ValidationError as error:
        where = ".".join(map(str, error.errors()[0]["loc"]))
        raise SettingsConflict(
            f"The --like bundle has an invalid value for the training option '{where}'."
        ) from error
    kept = {*explicit, "epochs"} if "minutes" in explicit else set(explicit)
    changes = {name: getattr(recorded, name) for name in recorded_options() if name not in kept}
    return replace(options, **changes)


def check_same_data(data: DataSet, bundle: TaskBundle) -> None:
    about = bundle.manifest.training.get("data")
    trained_on = about if isinstance(about, dict) else {}
    if trained_on.get("digest") != data.digest:
        raise DataError(
            f"'{data.name}' is not the data of the --like bundle ('{trained_on.get('name')}'): "
            f"images or labels differ, so the bundles cannot be compared."
        )


def _print_pairs(console: Console, split: str, old: str, new: str, pairs: Pairs) -> None:
    is_share = pairs.figure == "accuracy"

    def printable(value: float) -> str:
        return percent(value) if is_share else f"{value:.4g}"

    low, high = pairs.interval
    table = new_table(["task"], [pairs.figure])
    table.add_row(f"old, on {old}", printable(pairs.old))
    table.add_row(f"new, on {new}", printable(pairs.new))
    table.add_row(
        "difference", f"{printable(pairs.difference)} ({printable(low)} to {printable(high)})"
    )
    console.print(table)
    better, worse = ("new", "old") if is_share else ("old", "new")
    console.print(
        f"on the same {pairs.images} {split} images: the {better} task is better on "
        f"{pairs.only_new}, the {worse} task on {pairs.only_old}; equal on the others"
    )


def _print(console: Console, fitted: Fitted) -> None:
    last = fitted.epochs[-1]
    figures = last_figures(fitted.epochs)
    on = "validation" if last.val_score else "training"
    score = f"{on} {SCORE_NAMES[fitted.bundle.task_type]}"
    table = new_table(["variant"], [score, f"{on} loss"])
    order = sorted(
        zip(fitted.variants, figures, strict=True), key=lambda one: (-one[1][0], one[1][1])
    )
    for variant, (value, loss) in order[:VARIANTS_SHOWN]:
        style = "bold" if variant == fitted.variant else ""
        table.add_row(variant.name, f"{value:.4f}", f"{loss:.4f}", style=style)
    console.print(table)
    for split, one in fitted.figures.items():
        figure, value = one.headline
        text = f"{split}: {figure.replace('_', ' ')} {shown_figure(figure, value)}"
        if one.interval is not None:
            text += f" ({percent(one.interval[0])} to {percent(one.interval[1])})"
        console.print(f"{text} on {one.images} images")
    print_skipped(console, fitted.skipped)
    console.print(f"best: {fitted.variant.name} · {fitted.seconds:.0f} s")
    console.print(Text(f"bundle {fitted.path} · report {fitted.report}"), soft_wrap=True)
    assert fitted.path is not None  # `--out` is required
    console.print(Text(f"Next:\n  {push_command(fitted.path)}"), soft_wrap=True)
