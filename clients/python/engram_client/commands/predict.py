"""`engram predict`: what tasks say about images."""

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Annotated, NoReturn

import typer

from engram_client.client import PATIENCE, Client
from engram_client.commands.output import (
    CsvRows,
    Printer,
    TableRows,
    progress_bar,
    wants_json,
    write_json_line,
)
from engram_client.errors import FAILED, WrongUse
from engram_client.images import walk
from engram_client.options import DEFAULT_SERVER, ApiKey, AsJson, AsTable, Patience, Server
from engram_client.predicting import PredictOptions

POLL_SECONDS = 0.5


def predict(
    images: Annotated[
        list[str],
        typer.Argument(metavar="IMG|DIR", help="Image files, folders of them, or digests."),
    ],
    tasks: Annotated[
        list[str] | None,
        typer.Option(
            "--tasks", metavar="T,…", help="Such as pets,scene@3,pets:canary. Unset: every task."
        ),
    ] = None,
    top_k: Annotated[
        int | None, typer.Option(min=1, help="Predictions of each task, best first.")
    ] = None,
    as_json: AsJson = False,
    as_csv: Annotated[bool, typer.Option("--csv", help="CSV, a row for each prediction.")] = False,
    as_table: AsTable = False,
    watch: Annotated[
        bool, typer.Option("--watch", help="Go on with what is put into the folder, until ^C.")
    ] = False,
    shrink: Annotated[
        bool, typer.Option("--shrink", help="Send less, with the same answer. Needs Pillow.")
    ] = False,
    server: Server = DEFAULT_SERVER,
    api_key: ApiKey = None,
    patience: Patience = PATIENCE,
) -> None:
    """Ask tasks about images, in one pass for all tasks of an image.

    In a terminal the answers are a table, elsewhere JSON, one line for each image. A folder is
    searched for images, hidden ones left out. An image that cannot be read is reported and the
    others go on; the exit code is 1 then.
    """
    options: PredictOptions = {"top_k": top_k, "shrink": shrink, "keep_going": True}
    names = [part.strip() for text in tasks or () for part in text.split(",") if part.strip()]
    # Files and digests as they are given, and the images in folders.
    found = (walk(name) if os.path.isdir(name) else [name] for name in images)
    paths = list(chain.from_iterable(found))
    printer = choose(paths, as_json=as_json, as_csv=as_csv, as_table=as_table)
    if watch and (len(images) != 1 or not os.path.isdir(images[0])):
        raise WrongUse(f"--watch watches one folder, and not {' '.join(images)}.")
    if not paths and not watch:
        raise WrongUse(f"There are no images in {' '.join(images)}.")
    with Client(server, api_key, patience=patience) as client:
        run = Run(client, names if tasks else None, options, printer)
        if watch:
            run.follow(images[0])
        run.show(paths)
    if run.failures:
        typer.echo(f"{run.failures} of {len(paths)} images could not be read", err=True)
        raise typer.Exit(FAILED)


@dataclass
class Run:
    """One question about any number of images."""

    client: Client
    tasks: Sequence[str] | None
    options: PredictOptions
    show_answer: Printer
    failures: int = 0

    def show(self, images: Sequence[str]) -> None:
        with progress_bar("predicting", len(images)) as on_progress:
            options: PredictOptions = {**self.options, "progress": on_progress}
            for answer in self.client.predict_iter(images, self.tasks, **options):
                self.failures += answer.error is not None
                self.show_answer(answer)

    def follow(self, folder: str) -> NoReturn:
        """What is in a folder, and then what comes, for ever."""
        watch = Watch(folder)
        while True:
            if settled := watch.settled():
                self.show(settled)
            time.sleep(POLL_SECONDS)


class Watch:
    """New and rewritten images of a folder, each once it no longer changes."""

    def __init__(self, folder: str) -> None:
        self._folder = folder
        self._seen: dict[str, tuple[int, int]] = {}
        self._shown: dict[str, tuple[int, int]] = {}

    def settled(self) -> list[str]:
        """What is unchanged since the last call, and was not returned yet."""
        now = {path: state for path in walk(self._folder) if (state := _state(path)) is not None}
        settled = [
            path
            for path, state in now.items()
            if self._seen.get(path) == state and self._shown.get(path) != state
        ]
        self._seen = now
        self._shown = {path: state for path, state in self._shown.items() if path in now}
        self._shown |= {path: now[path] for path in settled}
        return settled


def choose(names: Sequence[str], *, as_json: bool, as_csv: bool, as_table: bool) -> Printer:
    """The way to show answers that was asked for, or that suits where they go."""
    if as_csv and (as_json or as_table):
        raise WrongUse("--csv excludes --json and --table.")
    if as_csv:
        return CsvRows().show
    return write_json_line if wants_json(as_json, as_table) else TableRows(names).show


def _state(path: str) -> tuple[int, int] | None:
    try:
        about = os.stat(path)
    except OSError:
        return None  # gone while looking
    return about.st_mtime_ns, about.st_size
