"""`engram import`: convert a checkpoint of the public reproduction to bundles."""

from pathlib import Path
from typing import Annotated

import typer
from engram_server.commands.options import push_command, resolve_source
from engram_server.model import load_backbone
from rich.console import Console
from rich.filesize import decimal
from rich.text import Text

from engram_training.commands.options import new_table
from engram_training.importing.checkpoint import read_checkpoint
from engram_training.importing.importer import Imported, make_bundles
from engram_training.importing.outputs import output_files, save_all, task_labels, task_names


def import_checkpoint(
    file: Annotated[
        Path,
        typer.Argument(
            metavar="FILE.pt", help="A checkpoint of necrashter/transformers-learnable-memory."
        ),
    ],
    backbone: Annotated[
        str,
        typer.Option(
            "--backbone",
            metavar="DIR",
            help="Backbone of the checkpoint: a model folder or a name on the hub.",
        ),
    ],
    name: Annotated[
        list[str],
        typer.Option(
            "--name",
            metavar="NAME",
            help="Name of the task. For several tasks: one each, in order, or one as a prefix.",
        ),
    ],
    out: Annotated[
        str,
        typer.Option(
            "--out",
            metavar="F.safetensors",
            help="Bundle to write. For several tasks: a folder, or a pattern with {name}.",
        ),
    ],
    labels: Annotated[
        list[Path] | None,
        typer.Option(
            "--labels",
            metavar="FILE",
            help="Class names: one per line, or JSON. For several tasks: one file each, in order. "
            "Default: class_0, class_1 …",
        ),
    ] = None,
) -> None:
    """Convert a checkpoint of the paper's public reproduction to bundles, one per task.

    The attention mask distinguishes single-task, concatenated and extended checkpoints. No code in
    the file is run, and either all bundles are written or none.
    """
    checkpoint = read_checkpoint(file)
    names = task_names(name, len(checkpoint.tasks))
    all_labels = task_labels(labels or [], checkpoint, names)
    paths = dict(zip(names, output_files(out, names), strict=True))
    made = make_bundles(checkpoint, load_backbone(resolve_source(backbone)), names, all_labels)
    save_all({paths[one.name]: one.bundle for one in made})
    _print(made, paths, checkpoint.kind)


def _print(made: list[Imported], paths: dict[str, Path], kind: str) -> None:
    console = Console(highlight=False)
    table = new_table(())
    table.add_column("task", no_wrap=True)
    table.add_column("kind", no_wrap=True)
    table.add_column("classes", justify="right")
    table.add_column("memory", justify="right")
    table.add_column("parents", overflow="fold")
    table.add_column("file", overflow="fold")
    table.add_column("digest", no_wrap=True)
    table.add_column("size", justify="right", no_wrap=True)
    for one in made:
        bundle = one.bundle
        table.add_row(
            one.name,
            kind,
            str(bundle.classes),
            str(bundle.memory_tokens),
            ", ".join(one.parents) or "–",
            Text(str(paths[one.name])),
            bundle.digest.removeprefix("sha256:")[:12],
            decimal(bundle.size_bytes),
        )
    console.print(table)
    console.print("Next, parents first:" if len(made) > 1 else "Next:")
    for one in made:
        console.print(Text(f"  {push_command(paths[one.name])}"), soft_wrap=True)
