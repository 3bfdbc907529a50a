"""The `engram` command: versions, help, errors and interrupts. `plugins` adds the commands.

Exit codes: 0 success, 1 failure, 2 wrong usage or a missing package, 130 interrupted;
docs/reference/cli.md lists those of the client's errors. An exception whose class or base class is
listed in the entry-point group `engram.errors` is shown as one `error: …` line, or as a traceback
with ENGRAM_DEBUG=1. Any other exception is a bug and keeps its traceback.
"""

import os
import sys
from collections.abc import Sequence
from importlib import metadata
from typing import Annotated

import typer
from typer.core import TyperGroup

from engram_vit import __version__
from engram_vit.commands import plugins

INTERRUPTED = 130

app = typer.Typer(
    name="engram",
    help="One frozen Vision Transformer, any number of tasks, one pass.",
    cls=plugins.CommandGroup,
    no_args_is_help=True,
    rich_markup_mode="markdown",
)


def _print_versions(requested: bool) -> None:
    if not requested:
        return
    typer.echo(f"engram-vit {__version__}")
    server = _server_version()
    if server is not None:
        typer.echo(f"engram-vit-server {server}")
    raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_versions, is_eager=True, help="Show versions and exit."
        ),
    ] = False,
) -> None:
    """Options of `engram` itself."""


def main(args: Sequence[str] | None = None) -> None:
    """Run the command line. Raises SystemExit, as every typer command does."""
    try:
        command = typer.main.get_command(app)
        assert isinstance(command, TyperGroup)  # an app with a callback is a group
        plugins.add_plugins(command, metadata.entry_points(group=plugins.COMMANDS_GROUP))
        if _server_version() is None:
            plugins.add_server_hints(command)
        command.main(args, prog_name="engram")
    except SystemExit as stop:
        if stop.code == INTERRUPTED:
            typer.echo("interrupted", err=True)
        raise
    except KeyboardInterrupt:
        typer.echo("interrupted", err=True)
        sys.exit(INTERRUPTED)
    except Exception as error:
        debugging = os.environ.get("ENGRAM_DEBUG", "") not in ("", "0")
        if debugging or not _is_user_error(error):
            raise
        typer.secho(f"error: {error}", fg="red", err=True)
        sys.exit(getattr(error, "exit_code", 1))
    finally:
        _flush_output()


def _server_version() -> str | None:
    try:
        return metadata.version("engram-vit-server")
    except metadata.PackageNotFoundError:
        return None


def _is_user_error(error: Exception) -> bool:
    """Whether to show only the message. Compares names, to import nothing."""
    if isinstance(error, plugins.CommandUnavailable):
        return True
    declared = {entry_point.value for entry_point in metadata.entry_points(group="engram.errors")}
    return any(f"{cls.__module__}:{cls.__qualname__}" in declared for cls in type(error).__mro__)


def _flush_output() -> None:
    """Flush stdout; ignore a closed pipe (`engram … | head`)."""
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        # The interpreter flushes again at exit: send that to /dev/null.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
