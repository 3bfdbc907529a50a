"""`engram tasks …`: what a server serves, and changing it."""

from collections.abc import Mapping
from typing import Annotated

import typer

from engram_client.answers import Changed, TaskSummary, Version
from engram_client.client import Client
from engram_client.commands.output import asks_server, write_json, write_line, write_list
from engram_client.core import read_reference
from engram_client.errors import WrongUse
from engram_client.options import AdminKey, ApiKey

Task = Annotated[str, typer.Argument(metavar="TASK", help="The task's name.")]
TaskOrVersion = Annotated[
    str, typer.Argument(metavar="TASK[@V]", help="The task, or one version of it.")
]


@asks_server(ApiKey)
def list_tasks(client: Client, in_json: bool) -> None:
    """List the tasks of a server and whether they are ready."""
    write_list(
        client.tasks(),
        in_json,
        {
            "task": lambda one: one.task,
            "version": lambda one: one.version,
            "state": _state,
            "problem": lambda one: one.problem,
            "classes": lambda one: one.classes,
            "labels": lambda one: _labels(one.labels),
            "description": lambda one: one.description,
        },
    )


@asks_server(ApiKey)
def show_task(client: Client, in_json: bool, task: Task) -> None:
    """Show one task, its labels and its versions."""
    detail = client.task(task)
    if in_json:
        write_json(detail)
        return
    classes = f"{detail.classes} classes"
    head = [detail.task, detail.problem, classes, _state(detail), detail.description]
    write_line(" · ".join(part for part in head if part))
    write_list(
        detail.version_details,
        False,
        {
            "version": lambda one: one.version,
            "labels": lambda one: ", ".join(one.labels),
            "state": _state,
            "memory": lambda one: one.memory_tokens,
            "bytes": lambda one: f"{one.size_bytes:,}",
            "published": lambda one: one.published,
            "by": lambda one: one.actor,
            "digest": lambda one: one.digest.removeprefix("sha256:")[:12],
        },
    )


@asks_server(ApiKey)
def show_history(
    client: Client,
    in_json: bool,
    task: Task,
    limit: Annotated[int, typer.Option(min=1, max=1000, help="How many entries.")] = 50,
) -> None:
    """Show who changed what about a task, newest first."""
    write_list(
        client.history(task, limit),
        in_json,
        {
            "generation": lambda one: one.generation,
            "time": lambda one: one.time,
            "who": lambda one: one.actor,
            "what": lambda one: one.kind,
            "details": lambda one: ", ".join(
                f"{name} {value}" for name, value in one.details.items() if value
            ),
        },
    )


@asks_server(AdminKey)
def label_task(
    client: Client,
    in_json: bool,
    task: Task,
    label: Annotated[str, typer.Argument(metavar="LABEL", help="Such as default or canary.")],
    version: Annotated[
        int | None, typer.Argument(metavar="[V]", min=1, help="The version it shall point to.")
    ] = None,
    remove: Annotated[bool, typer.Option("--remove", help="Take the label away.")] = False,
) -> None:
    """Point a label of a task to a version, or take it away."""
    if remove == (version is not None):
        raise WrongUse("Give the version that the label shall point to, or --remove.")
    if version is None:
        changed = client.remove_label(task, label)
    else:
        changed = client.label(task, label, version)
    _print_change(changed, in_json)


@asks_server(AdminKey)
def roll_back(
    client: Client,
    in_json: bool,
    task: Task,
    label: Annotated[str, typer.Option(help="The label to move back.")] = "default",
) -> None:
    """Undo the last move of a label; twice goes two back."""
    _print_change(client.rollback(task, label), in_json)


@asks_server(AdminKey)
def retire(client: Client, in_json: bool, task: TaskOrVersion) -> None:
    """Take a task, or one version of it, out of service; `restore` brings it back."""
    _print_change(client.retire(*_task_or_version(task)), in_json)


@asks_server(AdminKey)
def restore(client: Client, in_json: bool, task: TaskOrVersion) -> None:
    """Bring back a retired version, or all that the task's retirement took."""
    _print_change(client.restore(*_task_or_version(task)), in_json)


def _task_or_version(text: str) -> tuple[str, int | None]:
    name, version, label = read_reference(text)
    if label is not None:
        raise WrongUse(f"'{text}' names a label: give the task, or a version such as {name}@3.")
    return name, version


def _labels(labels: Mapping[str, int]) -> str:
    return ", ".join(f"{label} → {version}" for label, version in labels.items())


def _state(one: TaskSummary | Version) -> str:
    return one.status if one.reason is None else f"{one.status}: {one.reason}"


def _print_change(changed: Changed, in_json: bool) -> None:
    if in_json:
        write_json(changed)
    elif not changed.versions:
        write_line(f"{changed.task} is retired; `engram tasks restore {changed.task}` undoes it")
    else:
        versions = ", ".join(map(str, changed.versions))
        write_line(f"{changed.task}: {_labels(changed.labels)} · versions {versions}")
