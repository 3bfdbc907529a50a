"""The `engram` command.

Here is what all commands share: versions, help, and how errors and interruptions look. The commands
themselves are plug-ins (see `engram_client.plugins`).

Exit codes: 0 success, 1 failure, 2 wrong usage or a part that is not installed, 130 interrupted;
docs/reference/cli.md lists those of the client's errors. An exception whose class, or a base of it,
is named in the entry-point group `engram.errors` has a message for people and is shown as one
`error: …` line, and its `exit_code`, if it has one, is the command's; with ENGRAM_DEBUG=1, as a
traceback. Any other exception is a bug and keeps its traceback.
"""

import os
import sys
from collections.abc import Sequence
from importlib import metadata
from typing import Annotated

import typer
from typer.core import TyperGroup

from engram_client import __version__
from engram_client.plugins import (
    COMMANDS_GROUP,
    CommandGroup,
    CommandRefused,
    add_plugins,
    add_server_hints,
)

ERRORS_GROUP = "engram.errors"
INTERRUPTED = 130

app = typer.Typer(
    name="engram",
    help="One frozen Vision Transformer, any number of tasks, one pass.",
    cls=CommandGroup,
    no_args_is_help=True,
    rich_markup_mode="markdown",
)


def _print_versions(requested: bool) -> None:
    if not requested:
        return
    typer.echo(f"engram-client {__version__}")
    server = _server_version()
    if server is not None:
        typer.echo(f"engram {server}")
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


def build_command() -> TyperGroup:
    """The whole tree of commands, as installed here."""
    command = typer.main.get_command(app)
    assert isinstance(command, TyperGroup)  # it has a callback, hence it is a group
    add_plugins(command, metadata.entry_points(group=COMMANDS_GROUP))
    if _server_version() is None:
        add_server_hints(command)
    return command


def main(args: Sequence[str] | None = None) -> None:
    """Run the command line. Ends in SystemExit, as every typer command does."""
    try:
        build_command().main(args, prog_name="engram")
    except SystemExit as stop:
        if stop.code == INTERRUPTED:
            typer.echo("interrupted", err=True)
        raise
    except KeyboardInterrupt:
        typer.echo("interrupted", err=True)
        sys.exit(INTERRUPTED)
    except Exception as error:
        debugging = os.environ.get("ENGRAM_DEBUG", "") not in ("", "0")
        if debugging or not _is_for_people(error):
            raise
        typer.secho(f"error: {error}", fg="red", err=True)
        sys.exit(getattr(error, "exit_code", 1))
    finally:
        _flush_output()


def _server_version() -> str | None:
    try:
        return metadata.version("engram")
    except metadata.PackageNotFoundError:
        return None


def _is_for_people(error: Exception) -> bool:
    """Whether the message is meant to be shown, by its name: nothing has to be imported for it."""
    if isinstance(error, CommandRefused):
        return True
    declared = {entry_point.value for entry_point in metadata.entry_points(group=ERRORS_GROUP)}
    return any(f"{cls.__module__}:{cls.__qualname__}" in declared for cls in type(error).__mro__)


def _flush_output() -> None:
    """Write what is left now: a reader that went away (`engram … | head`) is no error."""
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        # The interpreter flushes once more on its way out; let that go nowhere.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
