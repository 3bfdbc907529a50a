"""`engram zero-shot`: create a task from class names with the backbone's text tower."""

from pathlib import Path
from typing import Annotated, Literal

import typer
from engram_bundle import check_task_name
from rich.console import Console
from rich.text import Text

from engram_server.commands.options import BackboneOption, find_backbone_source, push_command
from engram_server.engine.taught_bundle import taught_bundle
from engram_server.model import load_backbone
from engram_server.model.families.text_tower import no_text_tower, open_text_tower
from engram_server.model.heads.examples import Examples


def zero_shot(
    name: Annotated[str, typer.Option("--name", metavar="NAME", help="Name of the task.")],
    classes: Annotated[
        list[str], typer.Option("--classes", metavar="CLASS…", help="Class names or prompts.")
    ],
    more: Annotated[
        list[str] | None,
        typer.Argument(metavar="CLASS…", help="More class names.", show_default=False),
    ] = None,
    template: Annotated[
        list[str] | None,
        typer.Option(
            metavar="TEXT",
            help="Prompt template with {} for the class name, such as 'a photo of a {}.' Several "
            "templates are averaged.",
        ),
    ] = None,
    backbone: BackboneOption = None,
    out: Annotated[
        Path | None,
        typer.Option(metavar="F.safetensors", help="Bundle to write (default: NAME.safetensors)."),
    ] = None,
    task_type: Annotated[
        Literal["auto", "single_label", "multi_label"],
        typer.Option(help="One class per image, or any number. auto: as the text tower."),
    ] = "auto",
    description: Annotated[str, typer.Option(metavar="TEXT", help="What the task is about.")] = "",
    license: Annotated[
        str | None, typer.Option(metavar="NAME", help="License of the bundle.")
    ] = None,
) -> None:
    """Create a task from class names, without images.

    The text tower of the backbone reads the names once. Serving the bundle does not need it.
    """
    check_task_name(name)
    target = Path(f"{name.rpartition('/')[2]}.safetensors") if out is None else out
    source = find_backbone_source(backbone)
    tower = open_text_tower(source)
    if tower is None:
        raise no_text_tower(Path(source).name)
    text = tower.read([*classes, *(more or [])], template or [])
    bundle, _ = taught_bundle(
        Examples.of(tower.task_type if task_type == "auto" else task_type, []),
        load_backbone(source),
        name=name,
        text=text,
        description=description,
        license=license,
    )
    bundle.save(target)
    console = Console(highlight=False)
    console.print(Text(f"{len(bundle.labels)} classes · bundle {target}"), soft_wrap=True)
    console.print(Text(f"Next:\n  {push_command(target)}"), soft_wrap=True)
