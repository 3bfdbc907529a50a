"""Shared by commands: connecting to a server and printing results.

Tables in a terminal, JSON in a pipe, progress on stderr.
"""

import csv
import inspect
import json
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from functools import wraps
from inspect import Parameter
from typing import Any, TypeVar

from rich.box import SIMPLE_HEAD
from rich.cells import cell_len, set_cell_size
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from engram_vit.answers import COLUMNS, ImageAnswer, TaskAnswer
from engram_vit.client import Client
from engram_vit.commands.options import DEFAULT_SERVER, AsJson, AsTable, Server
from engram_vit.errors import UsageError

T = TypeVar("T")
Command = Callable[..., None]
Printer = Callable[[ImageAnswer], None]

BAR_FROM = 32  # fewer images finish before a progress bar is readable
WIDEST_NAME = 48


def server_command(key: object) -> Callable[[Command], Command]:
    """Decorate `command(client, in_json, …)`: adds --server, the key, --json and --table."""
    shared = [
        Parameter("server", Parameter.KEYWORD_ONLY, default=DEFAULT_SERVER, annotation=Server),
        Parameter("api_key", Parameter.KEYWORD_ONLY, default=None, annotation=key),
        Parameter("as_json", Parameter.KEYWORD_ONLY, default=False, annotation=AsJson),
        Parameter("as_table", Parameter.KEYWORD_ONLY, default=False, annotation=AsTable),
    ]

    def decorate(command: Command) -> Command:
        @wraps(command)
        def run(
            *, server: str, api_key: str | None, as_json: bool, as_table: bool, **arguments: object
        ) -> None:
            in_json = wants_json(as_json, as_table)
            with Client(server, api_key) as client:
                command(client, in_json, **arguments)

        # Typer reads the signature: the command's own parameters, then the shared ones.
        _, _, *own = inspect.signature(command).parameters.values()
        parameters = [*own, *shared]
        run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        run.__annotations__ = {each.name: each.annotation for each in parameters}
        return run

    return decorate


def printable(text: str) -> str:
    """Replace control characters: names and labels come from other users."""
    return "".join(letter if letter.isprintable() else "\ufffd" for letter in text)


def wants_json(as_json: bool, as_table: bool) -> bool:
    """Whether to print JSON: as requested, or if stdout is not a terminal."""
    if as_json and as_table:
        raise UsageError("--json and --table are mutually exclusive.")
    return as_json or (not as_table and not sys.stdout.isatty())


def write_json(value: object, indent: int | None = 1) -> None:
    """Write ASCII JSON, because file names may contain undecodable bytes."""
    write_line(json.dumps(value, indent=indent, default=asdict))


def write_line(text: str) -> None:
    # Flush: a pipe's reader may be waiting, and an interrupt must lose nothing.
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def write_list(
    things: Iterable[T], in_json: bool, headers: str, row: Callable[[T], Sequence[object]]
) -> None:
    """Write JSON or a table; `row` returns the cells of one line."""
    if in_json:
        write_json(things)
        return
    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for header in headers.split():
        table.add_column(header, overflow="fold")
    for thing in things:
        cells = ("" if cell is None else printable(str(cell)) for cell in row(thing))
        table.add_row(*map(Text, cells))
    Console(highlight=False).print(table)


@contextmanager
def progress_bar(what: str, total: int) -> Iterator[Callable[[int, int | None], None] | None]:
    """Show a progress bar on stderr, if it is a terminal."""
    console = Console(stderr=True)
    if total < BAR_FROM or not console.is_terminal:
        yield None
        return
    # Redirect stdout only if it shares the terminal with the bar.
    with Progress(
        TextColumn("{task.description}"),
        BarColumn(bar_width=30),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        console=console,
        transient=True,
        redirect_stdout=sys.stdout.isatty(),
    ) as progress:
        line = progress.add_task(what, total=total)
        yield lambda done, _: progress.update(line, completed=done)


def write_json_line(answer: ImageAnswer) -> None:
    tasks = {name: _present(asdict(task)) for name, task in answer.tasks.items()}
    about = {"image": answer.image, "digest": answer.digest, "error": answer.error}
    document = {**_present(about), "generation": answer.generation, "tasks": tasks}
    write_json(document if answer.error is None else _present(about), indent=None)


class CsvRows:
    """CSV with a header and one row per prediction."""

    def __init__(self) -> None:
        self._started = False

    def show(self, answer: ImageAnswer) -> None:
        # Not kept: a progress bar may replace sys.stdout.
        table = csv.DictWriter(sys.stdout, COLUMNS, lineterminator="\n")
        if not self._started:
            table.writeheader()
            self._started = True
        for row in answer.rows():
            name = answer.image.encode(errors="replace").decode()
            near = row["in_distribution"]
            text = None if near is None else str(near).lower()  # as in JSON
            table.writerow({**row, "image": name, "in_distribution": text})
        sys.stdout.flush()


class TableRows:
    """A table that is printed while answers arrive: one line per image and task."""

    def __init__(self, names: Sequence[str]) -> None:
        self._names = min(max(map(cell_len, names), default=0), WIDEST_NAME)
        self._tasks = 0

    def show(self, answer: ImageAnswer) -> None:
        name = printable(answer.image)
        if cell_len(name) > self._names:  # keep the end, which differs within a folder
            name = f"…{name[-(self._names - 1) :]}"
        if answer.error is not None:
            self._line(name, "", f"error: {printable(answer.error)}")
        self._tasks = max(self._tasks, *map(cell_len, answer.tasks), 0)
        for task, task_answer in answer.tasks.items():
            self._line(name, task, printable(_summary(task_answer)))
            name = ""

    def _line(self, name: str, task: str, text: str) -> None:
        head = f"{set_cell_size(name, self._names)}  {set_cell_size(task, self._tasks)}  "
        write_line(f"{head}{text}".rstrip())


def choose_printer(names: Sequence[str], *, as_json: bool, as_csv: bool, as_table: bool) -> Printer:
    if as_csv and (as_json or as_table):
        raise UsageError("--csv cannot be combined with --json or --table.")
    if as_csv:
        return CsvRows().show
    return write_json_line if wants_json(as_json, as_table) else TableRows(names).show


def _summary(task: TaskAnswer) -> str:
    if task.error is not None:
        return f"error: {task.error}"
    text = _figures(task)
    return text if task.in_distribution is not False else f"(out of distribution) {text}"


def _figures(task: TaskAnswer) -> str:
    if task.values is not None:
        return "  ".join(f"{value:.6g}" for value in task.values)
    if task.predictions is None:
        return f"{len(task.logits or task.embedding or ())} numbers"
    if not task.predictions:
        return "–"
    return "  ".join(f"{one.label} {one.score:.1%}" for one in task.predictions)


def _present(document: dict[str, Any]) -> dict[str, Any]:
    """Drop absent members; keeps `version`, which is null for `base`."""
    return {key: value for key, value in document.items() if value is not None or key == "version"}
