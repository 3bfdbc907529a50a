"""`engram tasks`: list and change the tasks of a server."""

from collections.abc import Mapping
from typing import Annotated

import typer

from engram_vit.answers import ChangeResult, TaskSummary, Version
from engram_vit.client import Client
from engram_vit.commands.options import AdminKey, ApiKey, Task
from engram_vit.commands.output import server_command, write_json, write_line, write_list
from engram_vit.core import read_reference
from engram_vit.errors import UsageError

TaskOrVersion = Annotated[
    str, typer.Argument(metavar="TASK[@V]", help="Task, or one version of it.")
]


@server_command(ApiKey)
def list_tasks(
    client: Client,
    in_json: bool,
    search: Annotated[
        str | None, typer.Option(metavar="TEXT", help="Part of the name or description.")
    ] = None,
    team: Annotated[
        str | None, typer.Option(metavar="TEAM", help="Only tasks of this team (team/name).")
    ] = None,
    retired: Annotated[
        bool, typer.Option("--retired", help="List retired tasks; `restore` brings one back.")
    ] = False,
) -> None:
    """List the tasks of a server and their status."""
    write_list(
        client.tasks(search=search, team=team, retired=retired),
        in_json,
        "task version state task_type classes aliases description",
        lambda one: (
            one.task,
            one.version,
            _state(one),
            one.task_type,
            one.classes,
            _aliases(one.aliases),
            one.description,
        ),
    )


@server_command(ApiKey)
def show_task(client: Client, in_json: bool, task: Task) -> None:
    """Show one task, its aliases and its versions."""
    detail = client.task(task)
    if in_json:
        write_json(detail)
        return
    head = f"{detail.task} · {detail.task_type} · {detail.classes} classes · {_state(detail)}"
    write_line(f"{head} · {detail.description}" if detail.description else head)
    write_list(
        detail.version_details,
        False,
        "version aliases state memory bytes published by digest",
        lambda one: (
            one.version,
            ", ".join(one.aliases),
            _state(one),
            one.memory_tokens,
            f"{one.size_bytes:,}",
            one.published,
            one.actor,
            one.digest.removeprefix("sha256:")[:12],
        ),
    )


@server_command(ApiKey)
def show_history(
    client: Client,
    in_json: bool,
    task: Task,
    limit: Annotated[int, typer.Option(min=1, max=1000, help="Maximum number of entries.")] = 50,
) -> None:
    """Show the changes of a task, newest first."""
    write_list(
        client.history(task, limit),
        in_json,
        "generation time actor change details",
        lambda one: (one.generation, one.time, one.actor, one.kind, _details(one.details)),
    )


@server_command(AdminKey)
def set_alias(
    client: Client,
    in_json: bool,
    task: Task,
    alias: Annotated[str, typer.Argument(metavar="ALIAS", help="For example default or canary.")],
    version: Annotated[
        int | None, typer.Argument(metavar="[V]", min=1, help="Version to point to.")
    ] = None,
    share: Annotated[
        float | None,
        typer.Option(
            min=0, max=1, help="Send only this share of the alias's images to V; 0 ends it."
        ),
    ] = None,
    remove: Annotated[bool, typer.Option("--remove", help="Remove the alias.")] = False,
) -> None:
    """Point an alias to a version, send a share of its images to one, or remove it."""
    if remove == (version is not None):
        raise UsageError("Specify either a version or --remove.")
    if version is None:
        changed = client.remove_alias(task, alias)
    else:
        changed = client.set_alias(task, alias, version, share=share)
    _print_change(changed, in_json)


@server_command(AdminKey)
def roll_back(
    client: Client,
    in_json: bool,
    task: Task,
    alias: Annotated[str, typer.Option(help="Alias to move back.")] = "default",
) -> None:
    """Undo the last move of an alias. Repeat to go further back."""
    _print_change(client.rollback(task, alias), in_json)


@server_command(ApiKey)
def compare(client: Client, in_json: bool, task: Task) -> None:
    """Compare the versions of a task that answered the same images."""
    found = client.comparison(task)
    if in_json:
        write_json(found)
        return
    write_line(f"{found.task}: {_aliases(found.aliases)}")
    write_list(
        found.pairs,
        False,
        "answered compared images agreement top-5 difference dropped feedback gain",
        lambda one: (
            one.baseline,
            one.candidate,
            one.images,
            _share(one.agreement),
            _share(one.top_k_agreement),
            _share(one.mean_score_difference),
            one.dropped,
            0 if one.feedback is None else one.feedback.images,
            ""
            if (gain := one.feedback) is None
            else f"{gain.gain:+.3f} ({gain.low:+.3f} to {gain.high:+.3f})",
        ),
    )


@server_command(AdminKey)
def promote(
    client: Client,
    in_json: bool,
    task: Task,
    source: Annotated[
        str, typer.Option("--from", metavar="ALIAS", help="Alias of the version to promote.")
    ] = "shadow",
    min_agreement: Annotated[
        float | None, typer.Option(min=0, max=1, help="Share of images with the same label.")
    ] = None,
    min_images: Annotated[int, typer.Option(min=1, help="Images that both answered.")] = 1,
    min_gain: Annotated[
        float | None,
        typer.Option(min=-1, max=1, help="Gain in accuracy by feedback: the interval's lower end."),
    ] = None,
    confidence: Annotated[
        float, typer.Option(min=0.5, max=0.9999, help="Of that interval.")
    ] = 0.95,
) -> None:
    """Move `default` to the version under an alias, if the evidence about it holds."""
    if min_agreement is None and min_gain is None:
        raise UsageError("Specify --min-agreement, --min-gain or both.")
    changed = client.promote(
        task,
        source,
        min_agreement=min_agreement,
        min_images=min_images,
        min_gain=min_gain,
        confidence=confidence,
    )
    _print_change(changed, in_json)


@server_command(AdminKey)
def retire(
    client: Client,
    in_json: bool,
    task: TaskOrVersion,
    purge: Annotated[
        bool, typer.Option("--purge", help="Delete it for good, with its bundles.")
    ] = False,
) -> None:
    """Retire a task or one version; `restore` undoes it, unless `--purge` deletes it."""
    changed = client.retire(*_task_or_version(task), purge=purge)
    if purge and not in_json:
        write_line(f"{task} is purged")
        return
    _print_change(changed, in_json)


@server_command(AdminKey)
def restore(client: Client, in_json: bool, task: TaskOrVersion) -> None:
    """Restore a retired version, or everything that retiring the task removed."""
    _print_change(client.restore(*_task_or_version(task)), in_json)


def _task_or_version(text: str) -> tuple[str, int | None]:
    name, version, alias = read_reference(text)
    if alias is not None:
        raise UsageError(f"'{text}' is an alias. Specify the task, or a version such as {name}@3.")
    return name, version


def _aliases(aliases: Mapping[str, int]) -> str:
    return ", ".join(f"{alias} → {version}" for alias, version in aliases.items())


def _share(value: float | None) -> str:
    return "" if value is None else f"{value:.4f}"


def _details(details: Mapping[str, object]) -> str:
    return ", ".join(f"{name} {value}" for name, value in details.items() if value)


def _state(one: TaskSummary | Version) -> str:
    return one.status if one.reason is None else f"{one.status}: {one.reason}"


def _print_change(changed: ChangeResult, in_json: bool) -> None:
    if in_json:
        write_json(changed)
    elif not changed.versions:
        write_line(f"{changed.task} is retired; `engram tasks restore {changed.task}` undoes it")
    else:
        versions = ", ".join(map(str, changed.versions))
        write_line(f"{changed.task}: {_aliases(changed.aliases)} · versions {versions}")
