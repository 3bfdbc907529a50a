"""`engram tasks …`: what a server serves, and changing it."""

from collections.abc import Mapping
from typing import Annotated

import typer

from engram_client.answers import Change, Changed, TaskDetail
from engram_client.commands.options import (
    DEFAULT_SERVER,
    AdminKey,
    ApiKey,
    AsJson,
    AsTable,
    Server,
    connect,
)
from engram_client.commands.output import wants_json, write_json, write_line, write_table
from engram_client.core import read_reference
from engram_client.errors import WrongUse

Task = Annotated[str, typer.Argument(metavar="TASK", help="The task's name.")]
TaskOrVersion = Annotated[
    str, typer.Argument(metavar="TASK[@V]", help="The task, or one version of it.")
]


def list_tasks(
    server: Server = DEFAULT_SERVER,
    api_key: ApiKey = None,
    as_json: AsJson = False,
    as_table: AsTable = False,
) -> None:
    """List the tasks of a server and whether they are ready."""
    in_json = wants_json(as_json, as_table)
    with connect(server, api_key) as client:
        found = client.tasks()
    if in_json:
        write_json(found)
        return
    rows = [
        (
            one.task,
            one.version,
            one.status if one.reason is None else f"{one.status}: {one.reason}",
            one.problem,
            one.classes,
            _labels(one.labels),
            one.description,
        )
        for one in found
    ]
    columns = ("task", "version", "state", "problem", "classes", "labels", "description")
    write_table(columns, rows)


def show_task(
    task: Task,
    server: Server = DEFAULT_SERVER,
    api_key: ApiKey = None,
    as_json: AsJson = False,
    as_table: AsTable = False,
) -> None:
    """Show one task, its labels and its versions."""
    in_json = wants_json(as_json, as_table)
    with connect(server, api_key) as client:
        found = client.task(task)
    if in_json:
        write_json(found)
    else:
        _print_task(found)


def show_history(
    task: Task,
    limit: Annotated[int, typer.Option(min=1, max=1000, help="How many entries.")] = 50,
    server: Server = DEFAULT_SERVER,
    api_key: ApiKey = None,
    as_json: AsJson = False,
    as_table: AsTable = False,
) -> None:
    """Show who changed what about a task, newest first."""
    in_json = wants_json(as_json, as_table)
    with connect(server, api_key) as client:
        found = client.history(task, limit)
    if in_json:
        write_json(found)
        return
    rows = [(one.generation, one.time, one.actor, one.kind, _details(one)) for one in found]
    write_table(("generation", "time", "who", "what", "details"), rows)


def label_task(
    task: Task,
    label: Annotated[str, typer.Argument(metavar="LABEL", help="Such as default or canary.")],
    version: Annotated[
        int | None, typer.Argument(metavar="[V]", min=1, help="The version it shall point to.")
    ] = None,
    remove: Annotated[bool, typer.Option("--remove", help="Take the label away.")] = False,
    server: Server = DEFAULT_SERVER,
    api_key: AdminKey = None,
    as_json: AsJson = False,
    as_table: AsTable = False,
) -> None:
    """Point a label of a task to a version, or take it away."""
    in_json = wants_json(as_json, as_table)
    if remove == (version is not None):
        raise WrongUse("Give the version that the label shall point to, or --remove.")
    with connect(server, api_key) as client:
        if version is None:
            changed = client.remove_label(task, label)
        else:
            changed = client.label(task, label, version)
    _print_change(changed, in_json)


def roll_back(
    task: Task,
    label: Annotated[str, typer.Option(help="The label to move back.")] = "default",
    server: Server = DEFAULT_SERVER,
    api_key: AdminKey = None,
    as_json: AsJson = False,
    as_table: AsTable = False,
) -> None:
    """Undo the last move of a label; twice goes two back."""
    in_json = wants_json(as_json, as_table)
    with connect(server, api_key) as client:
        changed = client.rollback(task, label)
    _print_change(changed, in_json)


def retire(
    task: TaskOrVersion,
    server: Server = DEFAULT_SERVER,
    api_key: AdminKey = None,
    as_json: AsJson = False,
    as_table: AsTable = False,
) -> None:
    """Take a task, or one version of it, out of service; `restore` brings it back."""
    in_json = wants_json(as_json, as_table)
    name, version = _task_or_version(task)
    with connect(server, api_key) as client:
        changed = client.retire(name, version)
    _print_change(changed, in_json)


def restore(
    task: TaskOrVersion,
    server: Server = DEFAULT_SERVER,
    api_key: AdminKey = None,
    as_json: AsJson = False,
    as_table: AsTable = False,
) -> None:
    """Bring back a retired version, or all that the task's retirement took."""
    in_json = wants_json(as_json, as_table)
    name, version = _task_or_version(task)
    with connect(server, api_key) as client:
        changed = client.restore(name, version)
    _print_change(changed, in_json)


def _task_or_version(text: str) -> tuple[str, int | None]:
    name, version, label = read_reference(text)
    if label is not None:
        raise WrongUse(f"'{text}' names a label: give the task, or a version such as {name}@3.")
    return name, version


def _labels(labels: Mapping[str, int]) -> str:
    return ", ".join(f"{label} → {version}" for label, version in labels.items())


def _print_task(found: TaskDetail) -> None:
    state = found.status if found.reason is None else f"{found.status}: {found.reason}"
    head = [found.task, found.problem, f"{found.classes} classes", state, found.description]
    write_line(" · ".join(part for part in head if part))
    rows = [
        (
            one.version,
            ", ".join(one.labels),
            one.status if one.reason is None else f"{one.status}: {one.reason}",
            one.memory_tokens,
            f"{one.size_bytes:,}",
            one.published,
            one.actor,
            one.digest.removeprefix("sha256:")[:12],
        )
        for one in found.version_details
    ]
    columns = ("version", "labels", "state", "memory", "bytes", "published", "by", "digest")
    write_table(columns, rows)


def _details(one: Change) -> str:
    return ", ".join(f"{name} {value}" for name, value in one.details.items() if value)


def _print_change(changed: Changed, in_json: bool) -> None:
    if in_json:
        write_json(changed)
    elif not changed.versions:
        write_line(f"{changed.task} is retired; `engram tasks restore {changed.task}` undoes it")
    else:
        versions = ", ".join(map(str, changed.versions))
        write_line(f"{changed.task}: {_labels(changed.labels)} · versions {versions}")
