"""Commands that installed distributions add to `engram`.

A distribution joins through the entry-point group `engram.commands`. The value is a plain function
with typer annotations; the name is the command, and a dot in it makes a sub-group: `tasks.gc` is
`engram tasks gc`.

A plug-in is imported only when its command is invoked. Listings (help, shell completion) read the
first paragraph of the function's docstring from its source instead, so they stay fast however heavy
the plug-in is. What is known without importing is shown: a module that does not exist, does not
parse, or imports a package that is not installed is listed as unavailable, with the reason.
"""

import ast
import importlib.util
import inspect
import sys
from collections.abc import Iterable, Iterator
from importlib.abc import InspectLoader
from importlib.machinery import PathFinder
from importlib.metadata import EntryPoint
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup

COMMANDS_GROUP = "engram.commands"

GROUP_HELP = {
    "audit": "Read the audit log of a server.",
    "tasks": "Look after the tasks of a server, or of a store.",
}

# Commands that come with the server package. A client installed alone knows their names, so that
# typing one is answered with what to install instead of "no such command".
SERVER_COMMANDS = ("evaluate", "import", "serve", "train")


class CommandRefused(Exception):
    """A known command that cannot run here. The message is for people."""

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code


class CommandGroup(TyperGroup):
    """A group whose plug-in commands are described only when somebody asks for the list."""

    def list_commands(self, ctx: object) -> list[str]:
        for command in self.commands.values():
            if isinstance(command, PluginCommand):
                command.short_help = summarise(command.entry_point)
        return list(self.commands)


class PluginCommand(TyperCommand):
    """Stands in for a plug-in's command; invoking it imports the plug-in and hands over."""

    def __init__(self, name: str, entry_point: EntryPoint) -> None:
        super().__init__(name)
        self.entry_point = entry_point

    # Every way into a command starts here: running it, its --help, completing its options.
    def make_context(self, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
        try:
            command = load_command(self.entry_point)
        except CommandRefused:
            if kwargs.get(
                "resilient_parsing"
            ):  # shell completion: nothing to offer, nothing to say
                return super().make_context(*args, **kwargs)
            raise
        return command.make_context(*args, **kwargs)


class RefusingCommand(TyperCommand):
    """A name that is known and whose answer, whatever the arguments, is why it cannot run."""

    def __init__(self, name: str, reason: str, *, exit_code: int, hidden: bool = False) -> None:
        super().__init__(name, short_help=f"unavailable: {reason}", hidden=hidden)
        self.refusal = CommandRefused(reason, exit_code)

    def make_context(self, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
        if kwargs.get("resilient_parsing"):
            return super().make_context(*args, **kwargs)
        raise self.refusal


def add_plugins(root: TyperGroup, entry_points: Iterable[EntryPoint]) -> None:
    """Put a stand-in for every entry point into the tree; a sub-group beats a command."""
    for entry_point in sorted(entry_points, key=lambda each: each.name):
        *path, name = entry_point.name.split(".")
        group = root
        for part in path:
            group = _subgroup(group, part)
        if name in group.commands:
            reason = f"more than one installed distribution adds `engram {_typed(entry_point)}`"
            group.add_command(RefusingCommand(name, reason, exit_code=1))
        else:
            group.add_command(PluginCommand(name, entry_point))


def add_server_hints(root: TyperGroup) -> None:
    """For a client installed alone: answer the server's commands with what to install."""
    for name in SERVER_COMMANDS:
        if name not in root.commands:
            reason = f"`engram {name}` needs the server package: pip install engram"
            root.add_command(RefusingCommand(name, reason, exit_code=2, hidden=True))


def load_command(entry_point: EntryPoint) -> TyperCommand:
    """Import a plug-in's function and turn it into a command."""
    try:
        function = entry_point.load()
    except (ImportError, AttributeError, SyntaxError) as error:
        raise _broken(entry_point, str(error)) from error
    if not callable(function):
        raise _broken(entry_point, f"{entry_point.value} is not a function")
    single = typer.Typer(add_completion=False, rich_markup_mode="markdown")
    single.command(entry_point.name.rpartition(".")[2])(function)
    command = typer.main.get_command(single)
    assert isinstance(command, TyperCommand)  # one function, hence no group
    return command


def summarise(entry_point: EntryPoint) -> str:
    """One line about a command, read from its source without importing anything."""
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
    if isinstance(child, TyperGroup):
        return child
    new = CommandGroup(
        name=name,
        help=GROUP_HELP.get(name),
        no_args_is_help=True,
        rich_markup_mode=group.rich_markup_mode,
    )
    group.add_command(new)
    return new


def _typed(entry_point: EntryPoint) -> str:
    return entry_point.name.replace(".", " ")


def _broken(entry_point: EntryPoint, reason: str) -> CommandRefused:
    owner = f" of {entry_point.dist.name}" if entry_point.dist else ""
    return CommandRefused(
        f"`engram {_typed(entry_point)}`{owner} is unavailable: {reason}", exit_code=1
    )


def _read_source(module: str) -> str:
    """The source of a module, found without the import of its parents that `find_spec` does."""
    top, *rest = module.split(".")
    spec = importlib.util.find_spec(top)
    for part in rest:
        # By its last name alone, as if at top level: a dotted one makes the finder want its parent.
        locations = spec.submodule_search_locations if spec else None
        spec = PathFinder.find_spec(part, list(locations)) if locations else None
    if spec is None:
        raise ModuleNotFoundError(f"No module named '{module}'")
    source = spec.loader.get_source(spec.name) if isinstance(spec.loader, InspectLoader) else None
    return source or ""


def _imported_packages(tree: ast.Module) -> Iterator[str]:
    """Top-level packages that a module cannot be imported without."""
    for node in tree.body:
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            yield node.module.partition(".")[0]
