"""What the training commands share: generated options, the backbone, progress and tables."""

import functools
import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields
from typing import Annotated, Any, Literal, NamedTuple, get_args, get_type_hints

import typer
from engram_server.commands.options import find_backbone_source
from engram_server.model import Backbone, load_backbone
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
from typer.models import OptionInfo

from engram_training.data.images import Unreadable
from engram_training.data.workspace import OnProgress, Tick, Watcher
from engram_training.errors import SettingsConflict
from engram_training.options import AUTO, Flag, TrainOptions, flags


def with_train_options(command: Callable[..., None]) -> Callable[..., None]:
    """Replace the parameter `options` of a command by one command-line option per field."""

    @functools.wraps(command)
    def wrapper(**arguments: Any) -> None:  # noqa: ANN401 - as typer parsed them
        values = {
            name: _convert(flag, _option_name(name), arguments.pop(_parameter_name(name)))
            for name, flag in flags().items()
        }
        command(**arguments, options=TrainOptions(**values))

    parameters: list[inspect.Parameter] = []
    for parameter in inspect.signature(command, eval_str=True).parameters.values():
        generated = _parameters() if parameter.name == "options" else [parameter]
        parameters += [one.replace(kind=inspect.Parameter.KEYWORD_ONLY) for one in generated]
    wrapper.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    wrapper.__annotations__ = {one.name: one.annotation for one in parameters}
    return wrapper


def fields_set(context: typer.Context) -> frozenset[str]:
    return frozenset(
        name
        for name in flags()
        if (source := context.get_parameter_source(_parameter_name(name)))
        and source.name == "COMMANDLINE"
    )


def _parameters() -> list[inspect.Parameter]:
    types, found = get_type_hints(TrainOptions), []
    for one in fields(TrainOptions):
        flag = flags().get(one.name)
        if flag is None:
            continue
        kind, default = types[one.name], one.default
        if flag.choices is not None:
            kind, default = Literal[(AUTO, *flag.choices)], default or AUTO
        elif flag.parse is not None:
            kind = list[str] if flag.repeated else str
            default = [flag.text] if flag.repeated else flag.text
        info = typer.Option(
            _option_name(one.name), metavar=flag.metavar, help=flag.help, min=flag.minimum
        )
        annotation = Annotated[kind, info]  # type: ignore[valid-type]
        name, keyword = _parameter_name(one.name), inspect.Parameter.KEYWORD_ONLY
        found.append(inspect.Parameter(name, keyword, default=default, annotation=annotation))
    return found


def _parameter_name(field: str) -> str:
    return flags()[field].name or field


def _option_name(field: str) -> str:
    return "--" + _parameter_name(field).replace("_", "-")


def _convert(flag: Flag, option: str, value: Any) -> Any:  # noqa: ANN401 - of any type
    if flag.choices is not None:
        return None if value == AUTO else value
    if flag.parse is None:
        return value
    text = ",".join(value) if flag.repeated else value
    try:
        return flag.parse(text)
    except ValueError as error:
        raise SettingsConflict(f"Invalid value '{text}' for {option}. {error}") from error


class OptionRow(NamedTuple):
    option: str
    value: str  # metavar or choices, and the default
    help: str


def option_rows(command: Callable[..., None]) -> list[OptionRow]:
    """Describe all options of a command, for the reference documentation."""
    rows = []
    for name, parameter in inspect.signature(command, eval_str=True).parameters.items():
        kind, *infos = get_args(parameter.annotation) or (None,)
        info = next((one for one in infos if isinstance(one, OptionInfo)), None)
        if info is None:
            continue
        # In an annotation, typer stores the first name of an option as its default.
        declared = [info.default] if isinstance(info.default, str) else []
        option = next(iter([*declared, *(info.param_decls or ())]), f"--{name.replace('_', '-')}")
        rows.append(OptionRow(option, _value(kind, info, parameter.default), info.help or ""))
    return rows


def _value(kind: Any, info: OptionInfo, default: object) -> str:  # noqa: ANN401 - a type
    words = [one for one in get_args(kind) if isinstance(one, str)]
    kinds = [one.__name__ for one in (kind, *get_args(kind)) if one in (int, float, str)]
    value = "" if kind is bool else info.metavar or "|".join(words) or "".join(kinds[:1])
    if default is False or default in (None, "", inspect.Parameter.empty):
        return value
    shown = ",".join(default) if isinstance(default, list) else default
    return f"{value} (default: {shown})"


def find_backbone(name: str | None) -> Backbone:
    """Load the backbone of the command line, the environment, or the embedded one."""
    return load_backbone(find_backbone_source(name))


WIDE = 110  # columns of a terminal in which everything fits beside a long bar


@contextmanager
def show_progress(console: Console) -> Iterator[Watcher]:
    columns = (
        TextColumn("{task.description}"),
        BarColumn(bar_width=30 if console.width >= WIDE else 8),
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
            info = f"loss {tick.loss:.3f} · {score} {tick.score:.3f}"
            if self._progress.console.width >= WIDE:
                info += f" · {tick.images_per_second:.0f} images/s"
            self._progress.update(line, completed=tick.step, info=info)

        return on_step

    def note(self, text: str) -> None:
        print_note(self._progress.console, f"note: {text}")


def new_table(left: Sequence[str], right: Sequence[str] = (), title: str | None = None) -> Table:
    """Create a table with text columns, which may wrap, and right-aligned number columns."""
    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0), title=title)
    for column in left:
        table.add_column(column, overflow="fold")
    for column in right:
        table.add_column(column, justify="right", no_wrap=True)
    return table


def print_skipped(console: Console, skipped: Sequence[Unreadable]) -> None:
    """Name each image that could not be read with the reason, then count them."""
    for bad in skipped:
        print_note(console, f"skipped {bad.path}: {bad.reason}")
    if skipped:
        print_note(console, f"{len(skipped)} images could not be read")


def print_note(console: Console, text: str) -> None:
    console.print(Text(text, style="yellow"), soft_wrap=True)
