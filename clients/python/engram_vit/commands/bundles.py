"""`engram push` and `engram pull`: bundles to and from a server."""

import hashlib
import json
import re
import shlex
from contextlib import suppress
from pathlib import Path
from typing import Annotated

import typer

from engram_vit.answers import PublishResult
from engram_vit.client import Client
from engram_vit.commands.options import AdminKey, ApiKey, Wait, WaitSeconds
from engram_vit.commands.output import server_command, write_json, write_line
from engram_vit.core import WAIT_SECONDS, WaitOptions, read_file
from engram_vit.errors import FAILED, LATER, ClientError, RequestRejected, UsageError

_PULLED = re.compile(r"(.+)-([1-9][0-9]*)")  # the name of a file that `pull` wrote


@server_command(AdminKey)
def push(
    client: Client,
    in_json: bool,
    files: Annotated[
        list[Path], typer.Argument(metavar="FILE…", help="Bundles, parents before children.")
    ],
    name: Annotated[
        str | None,
        typer.Option(
            metavar="NAME", help="Task name (default: the name in the bundle, or the file name)."
        ),
    ] = None,
    alias: Annotated[
        list[str] | None,
        typer.Option(
            metavar="ALIAS", help="Alias to move to the new version (default: `default`)."
        ),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Validate only; publish nothing.")
    ] = False,
    wait: Wait = None,
    timeout: WaitSeconds = WAIT_SECONDS,
) -> None:
    """Publish bundles. Each is served when its line is printed."""
    if name is not None and len(files) > 1:
        raise UsageError(f"--name needs exactly one file; got {len(files)}.")
    if dry_run:
        _check(client, files, in_json)
        return
    late = False
    waiting: WaitOptions = {"wait": wait, "timeout": timeout}
    for file in files:
        done = client.push(file, name or _task_name(client, file), alias or (), **waiting)
        _print_published(done, in_json)
        late = late or (done.replicas is not None and not done.replicas.complete)
    if late:
        raise typer.Exit(LATER)


@server_command(ApiKey)
def pull(
    client: Client,
    in_json: bool,
    task: Annotated[
        str, typer.Argument(metavar="TASK[@V]", help="For example birds, birds@3 or birds:canary.")
    ],
    out: Annotated[Path, typer.Option(metavar="FILE|DIR", help="Output file or folder.")] = Path(),
) -> None:
    """Download the bundle of a task. Never overwrites a different file."""
    bundle = client.pull(task)
    path = out / bundle.filename if out.is_dir() else out
    try:
        if path.exists() and path.read_bytes() != bundle.data:
            raise UsageError(f"'{path}' exists with other content. Choose another --out.")
        bundle.save(path)
    except OSError as error:
        raise ClientError(f"Cannot write '{path}': {error.strerror or error}.") from None
    named = name_in(bundle.data)
    if named not in (None, bundle.task):
        again = shlex.join(["engram", "push", str(path), "--name", bundle.task])
        typer.echo(f"The name in the bundle is {named}. To publish it again: {again}", err=True)
    if in_json:
        about = {"task": bundle.task, "version": bundle.version, "digest": bundle.digest}
        write_json(about | {"path": str(path)}, indent=None)
    else:
        write_line(f"{bundle.task}@{bundle.version} → {path}")


def _print_published(done: PublishResult, in_json: bool) -> None:
    if in_json:
        write_json(done, indent=None)
        return
    what = "published" if done.created else "already published"
    aliases = ", ".join(done.aliases) or "no alias"
    line = f"{done.task}@{done.version} {what} · {aliases} · {done.digest[:19]}"
    if (replicas := done.replicas) is not None:
        served = f"served by all replicas ({len(replicas.serving)})"
        if replicas.error is not None:
            served = f"replicas unknown: {replicas.error}"
        elif replicas.behind:
            served = f"not yet served by {', '.join(replicas.behind)}"
        line += f" · {served}"
    write_line(line)


def _check(client: Client, files: list[Path], in_json: bool) -> None:
    verdicts = {str(file): client.validate(file) for file in files}
    for file, verdict in verdicts.items():
        if in_json:
            document = {"file": file, "valid": verdict.valid, "problems": verdict.problems}
            write_json(document, indent=None)
        else:
            write_line(f"{file}: {' '.join(verdict.problems) or 'valid'}")
    if not all(verdict.valid for verdict in verdicts.values()):
        raise typer.Exit(FAILED)


def _task_name(client: Client, file: Path) -> str:
    """The name in the bundle, that of the task it was pulled from, or that of the file."""
    data = read_file(file)
    return name_in(data) or _pulled_from(client, file.stem, data) or file.stem


def name_in(bundle: bytes) -> str | None:
    """The task name in the manifest of a bundle; None if there is none, or no bundle."""
    size = int.from_bytes(bundle[:8], "little")
    try:
        manifest = json.loads(json.loads(bundle[8 : 8 + size])["__metadata__"]["engram"])
        name = manifest.get("name")
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return None  # the server says what is wrong with it
    return name if isinstance(name, str) else None


def _pulled_from(client: Client, stem: str, data: bytes) -> str | None:
    """The task whose version has the number in the file name, and exactly these bytes."""
    found = _PULLED.fullmatch(stem)
    if found is None:
        return None
    digest = f"sha256:{hashlib.sha256(data).hexdigest()}"
    # `pull` writes the slash after a team as a hyphen.
    for name in (found[1], found[1].replace("-", "/", 1)):
        with suppress(RequestRejected):
            versions = client.task(name).version_details
            if any((one.version, one.digest) == (int(found[2]), digest) for one in versions):
                return name
    return None
