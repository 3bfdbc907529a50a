"""`engram audit verify`."""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from engram_server.observability.audit import BrokenChain, verify


def verify_log(
    files: Annotated[
        list[Path],
        typer.Argument(metavar="FILE...", help="Log files, oldest first, including rotated ones."),
    ],
    after: Annotated[
        str | None,
        typer.Option(metavar="HASH", help="Hash of the last line before the first file."),
    ] = None,
) -> None:
    """Check the hash chain of an audit log.

    Truncation at the end cannot be detected from the file alone: compare the printed record number
    and hash with a copy kept elsewhere.
    """
    errors = Console(stderr=True)
    try:
        head = verify(files, after)
    except (BrokenChain, OSError) as error:
        errors.print(f"[red]error:[/] {error}", highlight=False, soft_wrap=True)
        raise typer.Exit(1) from None
    sentence = f"The chain is intact up to record {head.sequence} with hash {head.hash}."
    Console().print(sentence, highlight=False, soft_wrap=True)
