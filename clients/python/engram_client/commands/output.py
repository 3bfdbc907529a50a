"""What commands share: asking a server, and showing what they know.

Tables in a terminal, JSON in a pipe, progress on stderr.
"""

import csv
import inspect
import json
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from functools import wraps
from inspect import Parameter
from typing import Any, TypeVar

from rich.box import SIMPLE_HEAD
from rich.cells import cell_len, set_cell_size
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
)
from rich.table import Table
from rich.text import Text

from engram_client.answers import COLUMNS, ImageAnswer, TaskAnswer
from engram_client.client import Client
from engram_client.errors import WrongUse
from engram_client.options import DEFAULT_SERVER, AsJson, AsTable, Server

T = TypeVar("T")
Command = Callable[..., None]
Printer = Callable[[ImageAnswer], None]  # shows answers as they come

# Fewer are there before a bar could be read.
BAR_FROM = 32
WIDEST_NAME = 48


def asks_server(key: object) -> Callable[[Command], Command]:
    """A command about a server: with its address, a key (`ApiKey` or `AdminKey`), --json, --table.

    The function decorated gets a client, and whether the answer shall be JSON.
    """
    shared = [
        Parameter("server", Parameter.KEYWORD_ONLY, default=DEFAULT_SERVER, annotation=Server),
        Parameter("api_key", Parameter.KEYWORD_ONLY, default=None, annotation=key),
        Parameter("as_json", Parameter.KEYWORD_ONLY, default=False, annotation=AsJson),
        Parameter("as_table", Parameter.KEYWORD_ONLY, default=False, annotation=AsTable),
    ]

    def decorate(command: Command) -> Command:
        @wraps(command)
        def run(
            *, server: str, api_key: str | None, as_json: bool, as_table: bool, **given: object
        ) -> None:
            in_json = wants_json(as_json, as_table)
            with Client(server, api_key) as client:
                command(client, in_json, **given)

        # What typer reads: the command's own parameters, then the shared ones.
        _, _, *own = inspect.signature(command).parameters.values()
        parameters = [*own, *shared]
        run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        run.__annotations__ = {each.name: each.annotation for each in parameters}
        return run

    return decorate


def printable(text: str) -> str:
    """Names and labels come from strangers: nothing of them may steer a terminal."""
    return "".join(letter if letter.isprintable() else "\ufffd" for letter in text)


def wants_json(as_json: bool, as_table: bool) -> bool:
    """What was asked for, or what suits where the output goes."""
    if as_json and as_table:
        raise WrongUse("--json and --table exclude each other.")
    return as_json or (not as_table and not sys.stdout.isatty())


def write_json(value: object, indent: int | None = 1) -> None:
    """JSON in ASCII: file names may hold what no other encoding can carry."""
    write_line(json.dumps(value, indent=indent, default=asdict))


def write_line(text: str) -> None:
    # At once: a reader in a pipe may be waiting, and an interruption should lose nothing.
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def write_list(
    things: Iterable[T], in_json: bool, columns: Mapping[str, Callable[[T], object]]
) -> None:
    """JSON, or one row a thing: a column's header and what of the thing stands below it."""
    if in_json:
        write_json(things)
        return
    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for header in columns:
        table.add_column(header, overflow="fold")
    for thing in things:
        cells = (read(thing) for read in columns.values())
        table.add_row(*(Text("" if cell is None else printable(str(cell))) for cell in cells))
    Console(highlight=False).print(table)


@contextmanager
def progress_bar(what: str, total: int) -> Iterator[Callable[[int, int | None], None] | None]:
    """A bar on stderr while something long goes on, in a terminal."""
    console = Console(stderr=True)
    if total < BAR_FROM or not console.is_terminal:
        yield None
        return
    # What goes to the same terminal has to pass by the bar; what goes to a pipe must not.
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


# --- answers, one after the other -----------------------------------------------------------------


def write_json_line(answer: ImageAnswer) -> None:
    """One line of JSON for each image."""
    tasks = {name: _present(asdict(task)) for name, task in answer.tasks.items()}
    about = {"image": answer.image, "digest": answer.digest, "error": answer.error}
    document = {**_present(about), "generation": answer.generation, "tasks": tasks}
    write_json(document if answer.error is None else _present(about), indent=None)


class CsvRows:
    """One row for each prediction, below a header."""

    def __init__(self) -> None:
        self._begun = False

    def show(self, answer: ImageAnswer) -> None:
        # Found anew each time: a progress bar may stand in for it meanwhile.
        table = csv.DictWriter(sys.stdout, COLUMNS, lineterminator="\n")
        if not self._begun:
            table.writeheader()
            self._begun = True
        for row in answer.rows():
            name = answer.image.encode(errors="replace").decode()
            table.writerow({**row, "image": name})
        sys.stdout.flush()


class TableRows:
    """One line for each image and task, in columns that are known before the last answer."""

    def __init__(self, names: Sequence[str]) -> None:
        self._names = min(max(map(cell_len, names), default=0), WIDEST_NAME)
        self._tasks = 0

    def show(self, answer: ImageAnswer) -> None:
        name = printable(answer.image)
        if cell_len(name) > self._names:  # its end tells files of one folder apart
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


def _summary(task: TaskAnswer) -> str:
    if task.error is not None:
        return f"error: {task.error}"
    if task.values is not None:
        return "  ".join(f"{value:.6g}" for value in task.values)
    if task.predictions is None:
        return f"{len(task.logits or task.embedding or ())} numbers"
    if not task.predictions:
        return "–"
    return "  ".join(f"{one.label} {one.score:.1%}" for one in task.predictions)


def _present(document: dict[str, Any]) -> dict[str, Any]:
    """Without what is not there; the version stays, which is null for `base`."""
    return {key: value for key, value in document.items() if value is not None or key == "version"}
