"""`engram push` and `engram pull`: bundles to and from a server."""

from pathlib import Path
from typing import Annotated

import typer

from engram_client.answers import Published, Rollout
from engram_client.client import Client
from engram_client.commands.output import asks_server, write_json, write_line
from engram_client.core import WAIT_SECONDS, WaitOptions
from engram_client.errors import FAILED, LATER, ClientError, WrongUse
from engram_client.options import AdminKey, ApiKey, Wait, WaitSeconds


@asks_server(AdminKey)
def push(
    client: Client,
    in_json: bool,
    files: Annotated[
        list[Path], typer.Argument(metavar="FILE…", help="Bundles, parents before children.")
    ],
    name: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="The task's name. Unset: the file's, without suffix."),
    ] = None,
    label: Annotated[
        list[str] | None,
        typer.Option(metavar="LABEL", help="What shall point to it. Unset: default."),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Have it checked; publish nothing.")
    ] = False,
    wait: Wait = None,
    timeout: WaitSeconds = WAIT_SECONDS,
) -> None:
    """Publish bundles; each is being served when it is named."""
    if name is not None and len(files) > 1:
        raise WrongUse(f"--name names one task, and {len(files)} files are given.")
    if dry_run:
        _check(client, files, in_json)
        return
    late = False
    waiting: WaitOptions = {"wait": wait, "timeout": timeout}
    for file in files:
        done = client.push(file, name or file.stem, label or (), **waiting)
        _print_published(done, in_json)
        late = late or (done.replicas is not None and not done.replicas.complete)
    if late:
        raise typer.Exit(LATER)


@asks_server(ApiKey)
def pull(
    client: Client,
    in_json: bool,
    task: Annotated[
        str, typer.Argument(metavar="TASK[@V]", help="Such as birds, birds@3 or birds:canary.")
    ],
    out: Annotated[Path, typer.Option(metavar="FILE|DIR", help="Where to write it.")] = Path("."),
) -> None:
    """Download the bundle of a task; an existing file is never replaced by another."""
    bundle = client.pull(task)
    path = out / bundle.filename if out.is_dir() else out
    try:
        if path.exists() and path.read_bytes() != bundle.data:
            raise WrongUse(f"'{path}' exists and is another file: give another --out.")
        bundle.save(path)
    except OSError as error:
        raise ClientError(f"'{path}' cannot be written: {error.strerror or error}.") from None
    if in_json:
        about = {"task": bundle.task, "version": bundle.version, "digest": bundle.digest}
        write_json(about | {"path": str(path)}, indent=None)
    else:
        write_line(f"{bundle.task}@{bundle.version} → {path}")


def _print_published(done: Published, in_json: bool) -> None:
    if in_json:
        write_json(done, indent=None)
        return
    what = "published" if done.created else "there already"
    labels = ", ".join(done.labels) or "no label"
    line = f"{done.task}@{done.version} {what} · {labels} · {done.digest[:19]}"
    if done.replicas is not None:
        line += f" · {_served(done.replicas)}"
    write_line(line)


def _served(replicas: Rollout) -> str:
    if replicas.error is not None:
        return f"not known who serves it: {replicas.error}"
    if replicas.behind:
        return f"not yet served by {', '.join(replicas.behind)}"
    return f"served by all replicas ({len(replicas.serving)})"


def _check(client: Client, files: list[Path], in_json: bool) -> None:
    verdicts = {file: client.validate(file) for file in files}
    for file, verdict in verdicts.items():
        if in_json:
            write_json(
                {"file": str(file), "valid": verdict.valid, "problems": verdict.problems}, None
            )
        else:
            write_line(f"{file}: {' '.join(verdict.problems) or 'can be published'}")
    if not all(verdict.valid for verdict in verdicts.values()):
        raise typer.Exit(FAILED)
