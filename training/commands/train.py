"""`engram train`: from a folder of images to a bundle."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Final, TypeVar

import typer
from engram_client import DEFAULT_SERVER, Client
from engram_client.options import ApiKey, Server
from rich.console import Console
from rich.text import Text

from server.model import Backbone
from task_store import TaskBundle
from training.bundles import push_command
from training.commands.options import (
    BACKBONE_VARIABLE,
    ProblemName,
    choose,
    find_backbone,
    new_table,
    show_progress,
)
from training.data.augment import AUGMENTATIONS
from training.data.corrections import Corrections
from training.data.dataset import PROBLEMS, Fractions, read_data, split_data
from training.errors import SettingsConflict
from training.fitting.loop import smoothed_scores
from training.fitting.losses import SCORE_NAMES
from training.fitting.variants import REGIMES, STARTS, Regime, Start
from training.judging.pairs import Contender, Pairs, compare
from training.judging.report import Fitted, percent, shown_figure
from training.moving import check_backbone, check_can_move, check_same_data, options_like
from training.run import DEFAULT_EPOCHS, Options, fit

VARIANTS_SHOWN = 12
# Where an option and the field of Options that it sets are not called alike.
FIELDS_OF_OPTIONS: Final = {
    "rank": "ranks",
    "lr": "rates",
    "regime": "regimes",
    "start": "starts",
}
T = TypeVar("T")


Data = Annotated[
    Path,
    typer.Argument(
        metavar="DATA",
        help="A folder of class folders (with or without train/ val/ test/ above them), or a CSV "
        "or JSONL of path and label.",
    ),
]
Name = Annotated[str, typer.Option("--name", metavar="NAME", help="The task's name.")]
Out = Annotated[Path, typer.Option("--out", metavar="F.safetensors", help="The bundle to write.")]
BackboneName = Annotated[
    str | None,
    typer.Option(
        "--backbone",
        metavar="DIR",
        help=f"A folder, or a model's name on the hub; without it {BACKBONE_VARIABLE}.",
    ),
]
Memory = Annotated[str, typer.Option(metavar="M,…", help="Memory tokens per layer to try.")]
Ranks = Annotated[str, typer.Option(metavar="R,…", help="Ranks of the adapter to try.")]
Rates = Annotated[
    str,
    typer.Option(metavar="auto|R,…", help="Learning rates to try; auto: two for each regime."),
]
RegimeNames = Annotated[
    list[str] | None,
    typer.Option(
        metavar="R",
        help="What to learn: head, class, memory, adapter or memory+adapter; several are "
        "compared. Unless told all but class.",
    ),
]
StartNames = Annotated[
    str,
    typer.Option(
        "--start",
        metavar="auto|S,…",
        help="Where heads start: zero, or solved, from the closed form, which is then tried, too; "
        "auto: both for a head alone, zero for all else.",
    ),
]
Seeds = Annotated[int, typer.Option(min=1, help="How many starts of memory and adapter to try.")]
Epochs = Annotated[
    int | None, typer.Option(min=1, help=f"How long to train; {DEFAULT_EPOCHS} unless told.")
]
Minutes = Annotated[
    float | None, typer.Option(help="How long to train, reading and judging included.")
]
Batch = Annotated[int, typer.Option(min=1, help="Images per step.")]
Augment = Annotated[
    str, typer.Option(metavar="auto|inception|clip|none", help="How images are varied.")
]
Extends = Annotated[
    list[Path] | None,
    typer.Option(metavar="F.safetensors", help="A bundle whose task this one extends."),
]
Split = Annotated[
    str, typer.Option(metavar="T,V,T", help="Shares of train, val and test, where not given.")
]
Seed = Annotated[int, typer.Option(min=0, help="Of the split, the order and the starts.")]
AnyImage = Annotated[
    bool,
    typer.Option(
        "--any-image", help="The task is about any image: answers never say it is unknown."
    ),
]
KeepGb = Annotated[
    float, typer.Option(min=0.0, help="Disk for decoded images and contexts during the run.")
]
Description = Annotated[
    str, typer.Option(metavar="TEXT", help="What the task is about, for those who list tasks.")
]
License = Annotated[
    str | None, typer.Option(metavar="NAME", help="Under which the bundle may be used.")
]
WithCorrections = Annotated[
    bool,
    typer.Option(
        "--with-corrections",
        help="Photos that people have corrected at the server get the corrected labels.",
    ),
]
Like = Annotated[
    Path | None,
    typer.Option(
        metavar="F.safetensors",
        help="A bundle to train again, on the same data and with its split and options; what is "
        "given here is changed. Then both are compared.",
    ),
]
OldBackbone = Annotated[
    str | None,
    typer.Option(
        metavar="DIR",
        help=f"The backbone of the --like bundle; without it {BACKBONE_VARIABLE}.",
    ),
]
Resume = Annotated[bool, typer.Option("--resume", help="Go on where this run stopped.")]


def train(
    context: typer.Context,
    data: Data,
    name: Name,
    out: Out,
    backbone: BackboneName = None,
    memory: Memory = "10",
    rank: Ranks = "8",
    lr: Rates = "auto",
    regime: RegimeNames = None,
    start: StartNames = "auto",
    seeds: Seeds = 1,
    epochs: Epochs = None,
    minutes: Minutes = None,
    batch: Batch = 32,
    augment: Augment = "none",
    extends: Extends = None,
    split: Split = "80,10,10",
    problem: ProblemName = "auto",
    seed: Seed = 0,
    any_image: AnyImage = False,
    keep_gb: KeepGb = 8.0,
    description: Description = "",
    license: License = None,
    with_corrections: WithCorrections = False,
    server: Server = DEFAULT_SERVER,
    api_key: ApiKey = None,
    like: Like = None,
    old_backbone: OldBackbone = None,
    resume: Resume = False,
) -> None:
    """Train a task on your images: many variants in one pass, the best becomes the bundle.

    A report is written next to the bundle. Ctrl-C keeps the best so far; `--resume` goes on.
    """
    options = Options(
        memory=_listed(memory, int, "--memory"),
        ranks=_listed(rank, int, "--rank"),
        rates=None if lr == "auto" else _listed(lr, float, "--lr"),
        regimes=_regimes(regime) if regime else None,
        starts=None if start == "auto" else _starts(start),
        seeds=seeds,
        seed=seed,
        epochs=epochs,
        minutes=minutes,
        batch=batch,
        augment=choose(augment, AUGMENTATIONS, "augmentation"),
        split=_fractions(split),
        problem=choose(problem, PROBLEMS, "problem"),
        any_image=any_image,
        keep_bytes=round(keep_gb * 2**30),
        description=description,
        license=license,
        corrections=_corrections(name, server, api_key) if with_corrections else None,
    )
    run = _Command(data, name, out, backbone, extends or [], resume)
    if like is None:
        run.fit(options)
    else:
        run.fit_like(like, old_backbone, options, _given(context))


@dataclass(frozen=True, slots=True)
class _Command:
    """What to train, and where to."""

    data: Path
    name: str
    out: Path
    backbone: str | None
    extends: list[Path]
    resume: bool

    def fit(self, options: Options) -> Backbone:
        console = Console(highlight=False)
        backbone = find_backbone(self.backbone)
        with show_progress(console) as watcher:
            fitted = fit(
                self.data,
                name=self.name,
                backbone=backbone,
                out=self.out,
                extends=self.extends,
                resume=self.resume,
                watcher=watcher,
                options=options,
            )
        _print(console, self.name, fitted)
        return backbone

    def fit_like(
        self, like: Path, old_backbone: str | None, options: Options, given: frozenset[str]
    ) -> None:
        """With the options of a bundle, but for those given; then compared with it, in pairs."""
        old = TaskBundle.load(like)
        check_can_move(old, like)
        options = replace(options_like(old, options, given), like=old.digest)
        data = read_data(self.data, options.problem)
        check_same_data(data, old)
        before = Contender([like], find_backbone(old_backbone))
        check_backbone(old, before.backbone)
        after = Contender([self.out, *self.extends], self.fit(options))
        console = Console(highlight=False)
        with show_progress(console) as watcher:
            data = split_data(data, options.split, options.seed)
            split, pairs = compare(data, before, after, watcher)
        _print_pairs(console, split, before.backbone.name, after.backbone.name, pairs)


def _given(context: typer.Context) -> frozenset[str]:
    """The fields of Options that the command line sets."""
    return frozenset(
        FIELDS_OF_OPTIONS.get(name, name)
        for name in context.params
        if (source := context.get_parameter_source(name)) and source.name == "COMMANDLINE"
    )


def _corrections(name: str, server: str, api_key: str | None) -> Corrections:
    with Client(server, api_key) as client:
        return {one.digest: one.labels for one in client.corrections(name)}


def _listed(text: str, kind: Callable[[str], T], option: str) -> tuple[T, ...]:
    try:
        return tuple(kind(part) for part in text.split(",") if part.strip())
    except ValueError as error:
        raise SettingsConflict(f"{option} is '{text}'; give numbers with commas between") from error


def _regimes(given: list[str]) -> tuple[Regime, ...]:
    names = [name.strip() for text in given for name in text.split(",")]
    for name in names:
        if name not in REGIMES:
            raise SettingsConflict(f"'{name}' is no regime; use {', '.join(REGIMES)}")
    return tuple(regime for regime in REGIMES if regime in names)


def _starts(text: str) -> tuple[Start, ...]:
    names = [name.strip() for name in text.split(",")]
    for name in names:
        if name not in STARTS:
            raise SettingsConflict(f"'{name}' is no start of a head; use {', '.join(STARTS)}")
    return tuple(start for start in STARTS if start in names)


def _fractions(text: str) -> Fractions:
    shares = _listed(text, float, "--split")
    total = sum(shares)
    if len(shares) != 3 or min(shares) < 0 or total <= 0:
        raise SettingsConflict(f"--split is '{text}'; give the shares of train, val and test")
    return shares[0] / total, shares[1] / total, shares[2] / total


def _print_pairs(console: Console, split: str, old: str, new: str, pairs: Pairs) -> None:
    share = pairs.figure == "accuracy"

    def shown(value: float) -> str:
        return percent(value) if share else f"{value:.4g}"

    low, high = pairs.interval
    table = new_table(["task"], [pairs.figure])
    table.add_row(f"old, on {old}", shown(pairs.old))
    table.add_row(f"new, on {new}", shown(pairs.new))
    table.add_row("difference", f"{shown(pairs.difference)} ({shown(low)} to {shown(high)})")
    console.print(table)
    better, worse = ("new", "old") if share else ("old", "new")
    console.print(
        f"the same {pairs.images} {split} images: better by the {better} task on {pairs.only_new}, "
        f"by the {worse} task on {pairs.only_old}, alike on the others"
    )


def _print(console: Console, name: str, fitted: Fitted) -> None:
    last = fitted.epochs[-1]
    scores, losses = smoothed_scores(fitted.epochs), last.val_loss or last.train_loss
    on = "validation" if last.val_score else "training"
    score = f"{on} {SCORE_NAMES[fitted.bundle.problem]}"
    table = new_table(["variant"], [score, f"{on} loss"])
    order = sorted(range(len(scores)), key=lambda i: (-scores[i], losses[i]))
    for place in order[:VARIANTS_SHOWN]:
        variant = fitted.variants[place]
        style = "bold" if variant == fitted.variant else ""
        table.add_row(variant.name, f"{scores[place]:.4f}", f"{losses[place]:.4f}", style=style)
    console.print(table)
    for split, one in fitted.figures.items():
        figure, value = one.headline
        text = f"{split}: {figure.replace('_', ' ')} {shown_figure(figure, value)}"
        if one.interval is not None:
            text += f" ({percent(one.interval[0])} to {percent(one.interval[1])})"
        console.print(f"{text} on {one.images} images")
    console.print(f"best: {fitted.variant.name} · {fitted.seconds:.0f} s")
    console.print(Text(f"bundle {fitted.path} · report {fitted.report}"), soft_wrap=True)
    assert fitted.path is not None  # `--out` is not optional here
    console.print(Text(f"Next:\n  {push_command(fitted.path, name)}"), soft_wrap=True)
