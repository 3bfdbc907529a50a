"""`engram teach`: a task from photos; `engram examples` and `engram correct`: what it knows."""

import os
from collections.abc import Iterator
from typing import Annotated

import typer

from engram_client.answers import CorrectionsKept, Doubt, Taught
from engram_client.client import Client
from engram_client.commands.output import (
    asks_server,
    printable,
    progress_bar,
    write_json,
    write_line,
    write_list,
)
from engram_client.core import WAIT_SECONDS
from engram_client.errors import LATER, WrongUse
from engram_client.images import walk
from engram_client.options import AdminKey, ApiKey, Wait, WaitSeconds
from engram_client.teaching import Problem, in_class_folders

Task = Annotated[str, typer.Argument(metavar="TASK", help="The task's name.")]


@asks_server(AdminKey)
def teach(
    client: Client,
    in_json: bool,
    photos: Annotated[
        list[str],
        typer.Argument(
            metavar="DIR|LABEL=PATH…",
            help="A folder of class folders, or labels with an image or a folder of images each.",
        ),
    ],
    name: Annotated[str, typer.Option("--name", metavar="NAME", help="The task's name.")],
    problem: Annotated[
        Problem | None,
        typer.Option(help="Of a new task: one label for each photo (as usual), or several."),
    ] = None,
    description: Annotated[
        str | None, typer.Option(metavar="TEXT", help="What the task is about.")
    ] = None,
    only_new: Annotated[bool, typer.Option("--new", help="Refuse a task that exists.")] = False,
    wait: Wait = None,
    timeout: WaitSeconds = WAIT_SECONDS,
) -> None:
    """Make a task from photos, or add them to it; it is being served when this returns.

    Prints how many photos it answers right when they are left out, and which look mislabelled.
    """
    listed = list(_listed(photos))
    with progress_bar("teaching", len(listed)) as on_progress:
        taught = client.teach(
            name,
            listed,
            problem=problem,
            description=description,
            only_new=only_new,
            progress=on_progress,
            wait=wait,
            timeout=timeout,
        )
    _print_taught(taught, in_json)
    if taught.replicas is not None and not taught.replicas.complete:
        raise typer.Exit(LATER)


@asks_server(AdminKey)
def correct(
    client: Client,
    in_json: bool,
    task: Task,
    image: Annotated[str, typer.Argument(metavar="IMG", help="An image file, or its digest.")],
    labels: Annotated[list[str], typer.Argument(metavar="LABEL…", help="What it shows.")],
) -> None:
    """Say what an image shows; a task that was taught is served with it at once."""
    done = client.correct(task, image, labels)
    if isinstance(done, Taught):
        _print_taught(done, in_json)
    else:
        _print_kept(done, in_json)


@asks_server(ApiKey)
def list_corrections(client: Client, in_json: bool, task: Task) -> None:
    """List the corrections of a trained task, which its next training takes in."""
    write_list(
        client.corrections(task),
        in_json,
        {
            "labels": lambda one: ", ".join(one.labels),
            "version": lambda one: one.version,
            "time": lambda one: one.time,
            "by": lambda one: one.actor,
            "digest": lambda one: one.digest,
        },
    )


@asks_server(ApiKey)
def list_examples(client: Client, in_json: bool, task: Task) -> None:
    """List what a task was taught from, and how sure each example is by all others."""
    known = client.examples(task)
    if in_json:
        write_json(known)
        return
    write_list(
        known.examples,
        False,
        {
            "labels": lambda one: ", ".join(one.labels),
            "probability": lambda one: (
                None if one.probability is None else f"{one.probability:.1%}"
            ),
            "digest": lambda one: one.digest,
        },
    )


@asks_server(AdminKey)
def remove_examples(
    client: Client,
    in_json: bool,
    task: Task,
    images: Annotated[list[str], typer.Argument(metavar="IMG…", help="Files, or digests.")],
) -> None:
    """Take examples away from a task."""
    _print_taught(client.remove_examples(task, images), in_json)


def _listed(given: list[str]) -> Iterator[tuple[str, str]]:
    for text in given:
        label, equals, path = text.partition("=")
        if os.path.isdir(text):
            yield from in_class_folders(text)
        elif not equals:
            raise WrongUse(
                f"'{text}' is neither a folder of class folders nor LABEL=PATH, such as "
                f"rust=photo.jpg."
            )
        elif not label or not path:
            raise WrongUse(f"'{text}' lacks a label or a path: write for example rust=photo.jpg.")
        else:
            images = walk(path) if os.path.isdir(path) else [path]
            yield from ((image, label) for image in images)


def _print_taught(taught: Taught, in_json: bool) -> None:
    if in_json:
        write_json(taught)
        return
    counts = ", ".join(f"{one.label} {one.examples}" for one in taught.classes)
    write_line(printable(f"{taught.task}@{taught.version} · {taught.examples} examples: {counts}"))
    right = taught.leave_one_out
    if right is None:
        write_line("No class has two photos: how good it is cannot be told.")
    else:
        write_line(
            f"{right.accuracy:.1%} right when left out (95 %: {right.low:.1%} to {right.high:.1%})"
        )
    if taught.doubtful:
        write_line("Look at these again:")
    for doubt in taught.doubtful:
        write_line(printable(f"  {_doubt(doubt)}"))


def _doubt(doubt: Doubt) -> str:
    labels, suggested = (", ".join(each) or "nothing" for each in (doubt.labels, doubt.suggested))
    return f"{doubt.photo or doubt.digest}: {labels} {doubt.probability:.1%}, rather {suggested}"


def _print_kept(kept: CorrectionsKept, in_json: bool) -> None:
    if in_json:
        write_json(kept)
        return
    write_line(
        f"{kept.task} was trained: the correction is kept for `engram train --with-corrections`"
    )
