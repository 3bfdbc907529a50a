"""`engram predict`."""

import os
import time
from collections.abc import Iterator
from itertools import chain
from typing import Annotated

import typer

from engram_vit.client import PATIENCE, Client
from engram_vit.commands.options import (
    DEFAULT_SERVER,
    ApiKey,
    AsJson,
    AsTable,
    Patience,
    Server,
    Strict,
)
from engram_vit.commands.output import choose_printer, progress_bar
from engram_vit.errors import FAILED, UsageError
from engram_vit.images import walk
from engram_vit.predicting import PredictOptions, Unknown

POLL_SECONDS = 0.5


def predict(
    images: Annotated[
        list[str],
        typer.Argument(metavar="IMG|DIR", help="Image files, folders of them, or digests."),
    ],
    tasks: Annotated[
        list[str] | None,
        typer.Option(
            "--tasks",
            metavar="T,…",
            help="For example pets,scene@3,pets:canary (default: every task).",
        ),
    ] = None,
    top_k: Annotated[
        int | None, typer.Option(min=1, help="Predictions per task, best first.")
    ] = None,
    unknown: Annotated[
        Unknown,
        typer.Option(help="Mark or hide predictions for images out of distribution."),
    ] = "mark",
    as_json: AsJson = False,
    as_csv: Annotated[
        bool, typer.Option("--csv", help="Print CSV, one row per prediction.")
    ] = False,
    as_table: AsTable = False,
    watch: Annotated[
        bool, typer.Option("--watch", help="Keep watching the folder for new images, until ^C.")
    ] = False,
    shrink: Annotated[
        bool,
        typer.Option("--shrink", help="Send smaller files with the same answer. Requires Pillow."),
    ] = False,
    strict: Strict = False,
    server: Server = DEFAULT_SERVER,
    api_key: ApiKey = None,
    patience: Patience = PATIENCE,
) -> None:
    """Predict with several tasks for images, in one pass per image.

    Prints a table in a terminal and JSON lines elsewhere. Folders are searched for images, without
    hidden files. An image that cannot be read is reported with the reason, and the others are
    answered; the exit code is 1 if none can be read, or with `--strict` if one cannot.
    """
    options: PredictOptions = {"top_k": top_k, "shrink": shrink, "keep_going": True}
    options["unknown"] = unknown
    names = [part.strip() for text in tasks or () for part in text.split(",") if part.strip()]
    # Files and digests unchanged, folders expanded to their images.
    found = (walk(name) if os.path.isdir(name) else [name] for name in images)
    paths = list(chain.from_iterable(found))
    printer = choose_printer(paths, as_json=as_json, as_csv=as_csv, as_table=as_table)
    if watch and (len(images) != 1 or not os.path.isdir(images[0])):
        raise UsageError(f"--watch needs exactly one folder; got {' '.join(images)}.")
    if not paths and not watch:
        raise UsageError(f"No images found in {' '.join(images)}.")
    total, failures = 0, 0
    with Client(server, api_key, patience=patience) as client:
        # With --watch, until interrupted.
        for batch in Watch(images[0]).batches() if watch else [paths]:
            with progress_bar("predicting", len(batch)) as on_progress:
                options["progress"] = on_progress
                for answer in client.predict_iter(batch, names if tasks else None, **options):
                    total += 1
                    failures += answer.error is not None
                    printer(answer)
    if failures:
        typer.echo(f"{failures} of {total} images could not be read", err=True)
    if failures and (strict or failures == total):
        raise typer.Exit(FAILED)


class Watch:
    """New and changed images of a folder, each reported once it is stable."""

    def __init__(self, folder: str) -> None:
        self._folder = folder
        self._seen: dict[str, tuple[int, int]] = {}
        self._shown: dict[str, tuple[int, int]] = {}

    def batches(self) -> Iterator[list[str]]:
        """Yield the images of the folder, and then new ones as they appear, without end."""
        while True:
            if settled := self.settled():
                yield settled
            time.sleep(POLL_SECONDS)

    def settled(self) -> list[str]:
        """Images that have not changed since the last call and were not returned yet."""
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


def _state(path: str) -> tuple[int, int] | None:
    try:
        about = os.stat(path)
    except OSError:
        return None  # removed in the meantime
    return about.st_mtime_ns, about.st_size
