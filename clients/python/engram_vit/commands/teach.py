"""`engram teach`, `engram examples`, `engram correct` and `engram corrections`."""

import base64
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from engram_vit.answers import (
    CorrectionsResult,
    Example,
    Examples,
    PublishResult,
    TeachResult,
    Unreadable,
)
from engram_vit.client import Client
from engram_vit.commands.options import AdminKey, ApiKey, Task, Wait, WaitSeconds
from engram_vit.commands.output import (
    printable,
    progress_bar,
    server_command,
    write_json,
    write_line,
    write_list,
)
from engram_vit.commands.plugins import load_extension
from engram_vit.core import WAIT_SECONDS
from engram_vit.errors import LATER, NotFound, UsageError
from engram_vit.images import walk
from engram_vit.teaching import TaskType, in_class_folders


@server_command(AdminKey)
def teach(
    client: Client,
    in_json: bool,
    photos: Annotated[
        list[str],
        typer.Argument(
            metavar="DIR|LABEL=PATH…",
            help="A folder of class folders, or LABEL=PATH for an image or a folder of images; "
            "with --kept, a CSV file with the columns path and label.",
        ),
    ],
    name: Annotated[str, typer.Option("--name", metavar="NAME", help="Task name.")],
    task_type: Annotated[
        TaskType | None,
        typer.Option(help="Type of a new task: one label per photo (default) or several."),
    ] = None,
    description: Annotated[
        str | None, typer.Option(metavar="TEXT", help="Description of the task.")
    ] = None,
    only_new: Annotated[bool, typer.Option("--new", help="Fail if the task exists.")] = False,
    no_pictures: Annotated[
        bool, typer.Option("--no-pictures", help="Keep no thumbnails and file names.")
    ] = False,
    strict: Annotated[
        bool, typer.Option("--strict", help="Publish nothing if a photo cannot be read.")
    ] = False,
    kept: Annotated[
        str | None,
        typer.Option(
            "--kept", metavar="DIR", help="Folder written by engram batch --keep; sends no photos."
        ),
    ] = None,
    wait: Wait = None,
    timeout: WaitSeconds = WAIT_SECONDS,
) -> None:
    """Create a task from photos, or add examples to it. It is served when this returns.

    Prints the leave-one-out accuracy, suspected label errors, and photos that cannot be read.
    """
    if kept is not None:
        if len(photos) != 1:
            raise UsageError("--kept needs exactly one CSV file with the columns path and label.")
        made = load_extension("teach-kept", "--kept")(
            kept,
            photos[0],
            name,
            task_type=task_type,
            description=description,
            names=not no_pictures,
            before=None if only_new else _bundle_of(client, name),
        )
        done = client.push(made, name, only_new=only_new, wait=wait, timeout=timeout)
        _print_taught(client.examples(name), in_json)
        _exit_if_late(done)
        return
    listed = list(_list_photos(photos))
    with progress_bar("teaching", len(listed)) as on_progress:
        taught = client.teach(
            name,
            listed,
            task_type=task_type,
            description=description,
            only_new=only_new,
            keep_pictures=not no_pictures,
            strict=strict,
            progress=on_progress,
            wait=wait,
            timeout=timeout,
        )
    _print_taught(taught, in_json)
    _report_unreadable(taught.unreadable, len(listed))
    _exit_if_late(taught)


def _exit_if_late(done: PublishResult) -> None:
    if done.replicas is not None and not done.replicas.complete:
        raise typer.Exit(LATER)


def _bundle_of(client: Client, name: str) -> bytes | None:
    """The bundle of a task; None if there is none."""
    try:
        return client.pull(name).data
    except NotFound:
        return None


@server_command(AdminKey)
def correct(
    client: Client,
    in_json: bool,
    task: Task,
    image: Annotated[str, typer.Argument(metavar="IMG", help="An image file, or its digest.")],
    labels: Annotated[list[str], typer.Argument(metavar="LABEL…", help="True labels.")],
) -> None:
    """Report the true labels of an image. A taught task is updated at once."""
    _print_taught(client.correct(task, image, labels), in_json)


@server_command(AdminKey)
def list_corrections(
    client: Client,
    in_json: bool,
    task: Task,
    remove: Annotated[
        list[str] | None,
        typer.Option(
            "--remove", metavar="IMG", help="Remove those of a file or digest. May be repeated."
        ),
    ] = None,
    remove_all: Annotated[
        bool, typer.Option("--remove-all", help="Remove all of the task.")
    ] = False,
) -> None:
    """List the corrections of a trained task, or remove them for good."""
    if remove and remove_all:
        raise UsageError("Specify either --remove or --remove-all.")
    if remove or remove_all:
        removed = client.remove_corrections(task, None if remove_all else remove)
        if in_json:
            write_json(removed)
        else:
            write_line(f"{removed.task}: {removed.removed} corrections removed")
        return
    write_list(
        client.corrections(task),
        in_json,
        "labels version time by digest",
        lambda one: (", ".join(one.labels), one.version, one.time, one.actor, one.digest),
    )


@server_command(ApiKey)
def list_examples(
    client: Client,
    in_json: bool,
    task: Task,
    thumbnails: Annotated[
        str | None,
        typer.Option("--save-thumbnails", metavar="DIR", help="Also write pictures to a folder."),
    ] = None,
) -> None:
    """List the examples of a task with their leave-one-out predictions."""
    found = client.examples(task, thumbnails=thumbnails is not None)
    if thumbnails is not None:
        _save_thumbnails(found.examples, thumbnails)
    if in_json:
        write_json(found)
        return
    write_list(
        found.examples,
        False,
        "name labels predicted probability digest",
        lambda one: (
            one.name,
            ", ".join(one.labels),
            None if one.predicted is None else ", ".join(one.predicted),
            _percent(one.probability),
            one.digest,
        ),
    )
    write_list(
        found.classes,
        False,
        "class examples accuracy",
        lambda one: (one.label, one.examples, _percent(one.accuracy)),
    )


def _save_thumbnails(examples: Iterable[Example], folder: str) -> None:
    """Write pictures as `<digest>.webp`: names of files may be equal, and not safe as paths."""
    os.makedirs(folder, exist_ok=True)
    for one in examples:
        if one.thumbnail is not None:
            data = base64.b64decode(one.thumbnail.partition(",")[2])
            name = os.path.basename(one.digest.removeprefix("sha256:"))  # the server chose it
            Path(folder, f"{name}.webp").write_bytes(data)


@server_command(AdminKey)
def remove_examples(
    client: Client,
    in_json: bool,
    task: Task,
    images: Annotated[list[str], typer.Argument(metavar="IMG…", help="Files, or digests.")],
    purge: Annotated[
        bool,
        typer.Option("--purge", help="Also delete the earlier versions that have them, for good."),
    ] = False,
) -> None:
    """Remove examples from a task."""
    _print_taught(client.remove_examples(task, images, purge=purge), in_json)


def _list_photos(arguments: list[str]) -> Iterator[tuple[str, str]]:
    for text in arguments:
        label, equals, path = text.partition("=")
        if os.path.isdir(text):
            yield from in_class_folders(text)
        elif not equals:
            raise UsageError(
                f"'{text}' is neither a folder of class folders nor LABEL=PATH. Example: "
                f"rust=photo.jpg."
            )
        elif not label or not path:
            raise UsageError(f"'{text}' lacks a label or a path. Example: rust=photo.jpg.")
        else:
            images = walk(path) if os.path.isdir(path) else [path]
            yield from ((image, label) for image in images)


def _report_unreadable(photos: Sequence[Unreadable], total: int) -> None:
    for each in photos:
        typer.echo(printable(f"{each.photo}: {each.reason}"), err=True)
    if photos:
        typer.echo(f"{len(photos)} of {total} photos could not be read.", err=True)


def _percent(share: float | None) -> str | None:
    return None if share is None else f"{share:.1%}"


def _print_taught(taught: TeachResult | Examples | CorrectionsResult, in_json: bool) -> None:
    if in_json:
        counted = {"examples": len(taught.examples)} if isinstance(taught, Examples) else {}
        write_json({**asdict(taught), **counted})
        return
    if isinstance(taught, CorrectionsResult):
        write_line(f"{taught.task} is a trained task: stored for `engram train --with-corrections`")
        return
    counts = ", ".join(f"{one.label} {one.examples}" for one in taught.classes)
    count = len(taught.examples) if isinstance(taught, Examples) else taught.examples
    write_line(printable(f"{taught.task}@{taught.version} · {count} examples: {counts}"))
    if (loo := taught.leave_one_out) is None:
        write_line("Accuracy unknown: no class has two photos.")
    else:
        interval = f"95 %: {loo.low:.1%} to {loo.high:.1%}"
        write_line(
            f"leave-one-out accuracy {loo.accuracy:.1%}: {loo.correct} of {loo.images} photos "
            f"({interval})"
        )
    if taught.label_issues:
        write_line("Suspected label errors:")
    for issue in taught.label_issues:
        labels = f"{', '.join(issue.labels) or 'nothing'} {issue.probability:.1%}"
        suggested = ", ".join(issue.suggested) or "nothing"
        photo = issue.photo or issue.name or issue.digest
        write_line(printable(f"  {photo}: {labels}, suggested: {suggested}"))
