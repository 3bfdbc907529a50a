"""`engram zero-shot`: a task from the names of its classes, by the backbone's text tower."""

import os
import shlex
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.text import Text

from server import embedded
from server.engine.teaching import taught_bundle
from server.errors import SettingsError
from server.model import load_backbone
from server.model.examples import Examples, TaughtProblem
from server.model.text import no_text_tower, open_text_tower
from task_store import TaskBundle, check_task_name

BACKBONE_VARIABLE = "ENGRAM_BACKBONE"
PROBLEMS: tuple[TaughtProblem, ...] = ("single_label", "multi_label")


def zero_shot(
    name: Annotated[str, typer.Option("--name", metavar="NAME", help="The task's name.")],
    classes: Annotated[
        list[str], typer.Option("--classes", metavar="CLASS…", help="The classes, or texts.")
    ],
    more: Annotated[
        list[str] | None, typer.Argument(metavar="CLASS…", help="More classes.", show_default=False)
    ] = None,
    template: Annotated[
        list[str] | None,
        typer.Option(
            metavar="TEXT",
            help="Each class is read in it, in place of {}: 'a photo of a {}.' May be repeated: "
            "what the texts give is averaged.",
        ),
    ] = None,
    backbone: Annotated[
        str | None,
        typer.Option(
            metavar="DIR",
            help=f"A folder, or a model's name on the hub; without it {BACKBONE_VARIABLE}.",
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(metavar="F.safetensors", help="The bundle to write; NAME.safetensors."),
    ] = None,
    problem: Annotated[
        str,
        typer.Option(
            metavar="auto|single_label|multi_label",
            help="Whether an image has one of the classes, or any number; auto: as the text tower "
            "was trained.",
        ),
    ] = "auto",
    description: Annotated[str, typer.Option(metavar="TEXT", help="What the task is about.")] = "",
    license: Annotated[
        str | None, typer.Option(metavar="NAME", help="Under which the bundle may be used.")
    ] = None,
) -> None:
    """Make a task of class names, without photos: the backbone's text tower reads them, once.

    The bundle is an ordinary one: serving it needs no text tower.
    """
    check_task_name(name)
    target = Path(f"{name.rpartition('/')[2]}.safetensors") if out is None else out
    source = _source(backbone)
    tower = open_text_tower(source)
    if tower is None:
        raise no_text_tower(Path(source).name)
    text = tower.read([*classes, *(more or [])], template or [])
    bundle, _ = taught_bundle(
        Examples.of(_problem(problem) or tower.problem, []),
        load_backbone(source),
        text=text,
        description=description,
        license=license,
    )
    bundle.save(target)
    _say_next(bundle, target, name)


def _say_next(bundle: TaskBundle, target: Path, name: str) -> None:
    named = [] if target.stem == name else ["--name", name]
    console = Console(highlight=False)
    console.print(Text(f"{len(bundle.labels)} classes · bundle {target}"), soft_wrap=True)
    next_step = shlex.join(["engram", "push", str(target), *named])
    console.print(Text(f"Next:\n  {next_step}"), soft_wrap=True)


def _source(backbone: str | None) -> str:
    source = backbone or os.environ.get(BACKBONE_VARIABLE) or str(embedded.BACKBONE)
    folder = Path(source).expanduser()
    return str(folder.resolve()) if folder.is_dir() else source


def _problem(text: str) -> TaughtProblem | None:
    for problem in PROBLEMS:
        if text == problem:
            return problem
    if text != "auto":
        raise SettingsError(f"'{text}' is no problem; use auto, {', '.join(PROBLEMS)}")
    return None
