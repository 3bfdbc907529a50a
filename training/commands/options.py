"""What the training commands share: options, the backbone, and progress on the terminal."""

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, TypeVar

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
)
from rich.table import Table
from rich.text import Text

from server import embedded
from server.model import Backbone, load_backbone
from training.errors import SettingsConflict
from training.progress import OnProgress, Tick, Watcher

BACKBONE_VARIABLE = "ENGRAM_BACKBONE"
T = TypeVar("T", bound=str)

ProblemName = Annotated[
    str,
    typer.Option(metavar="auto|single_label|multi_label|regression", help="What the labels mean."),
]


def choose(text: str, words: Sequence[T], what: str) -> T | None:
    """One of some words, or None for `auto`."""
    if text == "auto":
        return None
    for word in words:
        if word == text:
            return word
    raise SettingsConflict(f"'{text}' is no {what}; use auto, {', '.join(words)}")


def find_backbone(name: str | None) -> Backbone:
    """The backbone named on the command line, or by the environment, or else the embedded one."""
    return open_backbone(name or os.environ.get(BACKBONE_VARIABLE) or str(embedded.BACKBONE))


def open_backbone(name: str) -> Backbone:
    # A folder is named by its own name, also when given as `.`; a name on the hub stays as it is.
    folder = Path(name).expanduser()
    return load_backbone(folder.resolve() if folder.is_dir() else name)


@contextmanager
def show_progress(console: Console) -> Iterator[Watcher]:
    """A watcher that draws one line per stage, with what is left of it."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(bar_width=30),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[info]}"),
    )
    with Progress(*columns, console=console) as progress:
        yield _ProgressWatcher(progress)


class _ProgressWatcher(Watcher):
    def __init__(self, progress: Progress) -> None:
        self._progress = progress

    def stage(self, name: str) -> OnProgress:
        line: list[TaskID] = []

        def on_progress(done: int, total: int) -> None:
            if not line:
                line.append(self._progress.add_task(name, total=total, info=""))
            self._progress.update(line[0], completed=done)

        return on_progress

    def training(self, steps: int, score: str) -> Callable[[Tick], None]:
        line = self._progress.add_task("training", total=steps, info="")

        def on_step(tick: Tick) -> None:
            info = (
                f"loss {tick.loss:.3f} · {score} {tick.score:.3f} · "
                f"{tick.images_per_second:.0f} images/s"
            )
            self._progress.update(line, completed=tick.step, info=info)

        return on_step

    def note(self, text: str) -> None:
        print_note(self._progress.console, f"note: {text}")


def new_table(left: Sequence[str], right: Sequence[str] = (), title: str | None = None) -> Table:
    """Columns of words, which may fold, and of figures."""
    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0), title=title)
    for column in left:
        table.add_column(column, overflow="fold")
    for column in right:
        table.add_column(column, justify="right", no_wrap=True)
    return table


def print_note(console: Console, text: str) -> None:
    console.print(Text(text, style="yellow"), soft_wrap=True)
