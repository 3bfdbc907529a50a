"""Options and helpers that several commands share, here and in `engram_training`."""

import os
import shlex
from pathlib import Path
from typing import Annotated, Final

import typer

from engram_server import embedded

BACKBONE_VARIABLE: Final = "ENGRAM_BACKBONE"
BackboneOption = Annotated[
    str | None,
    typer.Option(
        "--backbone",
        metavar="DIR",
        help="A model folder or a name on the Hugging Face hub, org/name[@revision] (default: "
        f"{BACKBONE_VARIABLE}).",
    ),
]


def find_backbone_source(name: str | None) -> str:
    """Return the backbone of the command line, the environment, or the embedded one."""
    return resolve_source(name or os.environ.get(BACKBONE_VARIABLE) or str(embedded.BACKBONE))


def resolve_source(name: str) -> str:
    """Resolve a folder, so that `.` has a name; a name on the hub stays as it is."""
    folder = Path(name).expanduser()
    return str(folder.resolve()) if folder.is_dir() else name


def push_command(bundle: Path) -> str:
    """Return the command that publishes a bundle under the name in its manifest."""
    return shlex.join(["engram", "push", str(bundle)])
