"""Commands that installed distributions add to `engram`.

A distribution registers a command in the entry-point group `engram.commands`: the name is the
command (`tasks.gc` is `engram tasks gc`), the value a function with typer annotations.

A plug-in is imported only when its command runs: help and completion read docstrings from source
files. A plug-in whose module or imports are missing is listed as unavailable, with the reason.
"""

import ast
import importlib.util
import inspect
import sys
from collections.abc import Callable, Iterable, Iterator
from importlib.abc import InspectLoader
from importlib.machinery import PathFinder
from importlib.metadata import EntryPoint, entry_points
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup

from engram_vit.errors import UsageError

COMMANDS_GROUP = "engram.commands"
EXTENSIONS_GROUP = "engram.extensions"  # functions that commands of the client use

GROUP_HELP = {
    "audit": "Check the audit log of a server.",
    "backbone": "Check a backbone before serving it.",
    "examples": "List and remove the examples of taught tasks.",
    "keys": "Manage the API keys of a server.",
    "tasks": "Manage the tasks of a server or a store.",
}

# Commands of the server distribution. Without it, they tell the user what to install.
SERVER_COMMANDS = (
    "audit", "backbone", "batch", "evaluate", "import", "keys", "search", "serve", "train",
    "zero-shot",
)  # fmt: skip


class CommandUnavailable(Exception):
    """A command that cannot run in this environment."""

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code


class CommandGroup(TyperGroup):
    """A group that reads the summaries of its plug-ins only when it is listed."""

    def list_commands(self, ctx: object) -> list[str]:
        for command in self.commands.values():
            if isinstance(command, PluginCommand):
                command.short_help = summarise(command.entry_point)
        return list(self.commands)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:  # noqa: ANN401
        """Find a command; `list` is another name of `ls`."""
        known = cmd_name in self.commands or cmd_name != "list"
        return super().get_command(ctx, cmd_name if known else "ls")


class PluginCommand(TyperCommand):
    """A placeholder that imports the plug-in when it is invoked."""

    def __init__(self, name: str, entry_point: EntryPoint) -> None:
        super().__init__(name)
        self.entry_point = entry_point

    # Running a command, its --help and its completion all start here.
    def make_context(self, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
        try:
            command = load_command(self.entry_point)
        except CommandUnavailable:
            if kwargs.get("resilient_parsing"):  # shell completion
                return super().make_context(*args, **kwargs)
            raise
        return command.make_context(*args, **kwargs)


class UnavailableCommand(TyperCommand):
    """A command that always fails with the reason why it cannot run."""

    def __init__(self, name: str, reason: str, *, exit_code: int, hidden: bool = False) -> None:
        super().__init__(name, short_help=f"unavailable: {reason}", hidden=hidden)
        self.error = CommandUnavailable(reason, exit_code)

    def make_context(self, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
        if kwargs.get("resilient_parsing"):
            return super().make_context(*args, **kwargs)
        raise self.error


def add_plugins(root: TyperGroup, entry_points: Iterable[EntryPoint]) -> None:
    for entry_point in sorted(entry_points, key=lambda each: each.name):
        *path, name = entry_point.name.split(".")
        group = root
        for part in path:
            group = _subgroup(group, part)
        if name in group.commands:
            reason = f"several installed distributions add `engram {_typed(entry_point)}`"
            group.add_command(UnavailableCommand(name, reason, exit_code=1))
        else:
            group.add_command(PluginCommand(name, entry_point))


def add_server_hints(root: TyperGroup) -> None:
    """Make the server's commands say what to install."""
    for name in SERVER_COMMANDS:
        if name not in root.commands:
            reason = f"`engram {name}` requires the server: pip install 'engram-vit[server]'"
            root.add_command(UnavailableCommand(name, reason, exit_code=2, hidden=True))


def load_extension(name: str, option: str) -> Callable[..., Any]:
    """Return a function of the server distribution, which `option` needs."""
    for entry_point in entry_points(group=EXTENSIONS_GROUP, name=name):
        function: Callable[..., Any] = entry_point.load()
        return function
    raise UsageError(f"{option} requires the server: pip install 'engram-vit[server]'.")


def load_command(entry_point: EntryPoint) -> TyperCommand:
    try:
        function = entry_point.load()
    except (ImportError, AttributeError, SyntaxError) as error:
        raise _broken(entry_point, str(error)) from error
    if not callable(function):
        raise _broken(entry_point, f"{entry_point.value} is not a function")
    single = typer.Typer(add_completion=False, rich_markup_mode="markdown")
    single.command(entry_point.name.rpartition(".")[2])(function)
    command = typer.main.get_command(single)
    assert isinstance(command, TyperCommand)  # one function is not a group
    return command


def summarise(entry_point: EntryPoint) -> str:
    """Read a command's one-line summary from its source, without importing it."""
    try:
        tree = ast.parse(_read_source(entry_point.module))
    except (ImportError, SyntaxError) as error:
        return f"unavailable: {error}"
    for name in _imported_packages(tree):
        if name not in sys.modules and importlib.util.find_spec(name) is None:
            return f"unavailable: No module named '{name}'"
    for node in tree.body:
        if isinstance(node, ast.FunctionDef) and node.name == entry_point.attr:
            paragraph = inspect.cleandoc(ast.get_docstring(node) or "").partition("\n\n")[0]
            return " ".join(paragraph.split())
    return ""


def _subgroup(group: TyperGroup, name: str) -> TyperGroup:
    child = group.commands.get(name)
    if not isinstance(child, TyperGroup):
        mode = group.rich_markup_mode
        text = GROUP_HELP.get(name)
        child = CommandGroup(name=name, help=text, no_args_is_help=True, rich_markup_mode=mode)
        group.add_command(child)
    return child


def _typed(entry_point: EntryPoint) -> str:
    return entry_point.name.replace(".", " ")


def _broken(entry_point: EntryPoint, reason: str) -> CommandUnavailable:
    owner = f" of {entry_point.dist.name}" if entry_point.dist else ""
    return CommandUnavailable(
        f"`engram {_typed(entry_point)}`{owner} is unavailable: {reason}", exit_code=1
    )


def _read_source(module: str) -> str:
    """Read a module's source without importing its parents, as `find_spec` would."""
    top, *rest = module.split(".")
    spec = importlib.util.find_spec(top)
    for part in rest:
        # Only the last name: a dotted one makes the finder import its parent.
        locations = spec.submodule_search_locations if spec else None
        spec = PathFinder.find_spec(part, list(locations)) if locations else None
    if spec is None:
        raise ModuleNotFoundError(f"No module named '{module}'")
    source = spec.loader.get_source(spec.name) if isinstance(spec.loader, InspectLoader) else None
    return source or ""


def _imported_packages(tree: ast.Module) -> Iterator[str]:
    for node in tree.body:
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            yield node.module.partition(".")[0]
