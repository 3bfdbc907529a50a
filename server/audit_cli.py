"""`engram audit verify`: whether an audit log is what was written."""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from server.audit import BrokenChain, verify


def verify_log(
    files: Annotated[
        list[Path],
        typer.Argument(
            metavar="FILE...", help="The log, and before it what was rotated away, oldest first."
        ),
    ],
    after: Annotated[
        str | None,
        typer.Option(metavar="HASH", help="Of the last line before the first file, if known."),
    ] = None,
) -> None:
    """Check that no line of an audit log was changed, removed or put in.

    Lines cut off at the end leave no trace in the file: compare the number and the hash that this
    prints with what was noted elsewhere.
    """
    errors = Console(stderr=True)
    try:
        head = verify(files, after)
    except (BrokenChain, OSError) as error:
        errors.print(f"[red]error:[/] {error}", highlight=False, soft_wrap=True)
        raise typer.Exit(1) from None
    sentence = f"The chain is whole up to record {head.sequence}, whose hash is {head.hash}."
    Console().print(sentence, highlight=False, soft_wrap=True)
