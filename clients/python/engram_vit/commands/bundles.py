"""`engram push` and `engram pull`: bundles to and from a server or a model hub."""

import hashlib
import re
import shlex
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Annotated

import typer

from engram_vit.answers import PublishResult, write_file
from engram_vit.client import Client
from engram_vit.commands import hub
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
        list[str],
        typer.Argument(
            metavar="[hf://ORG/NAME] FILE…",
            help="Bundles, parents before children. To a repository of the Hugging Face hub: one "
            "bundle, or a task of the server.",
        ),
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
    public: Annotated[
        bool, typer.Option("--public", help="Make a new repository of the hub public.")
    ] = False,
) -> None:
    """Publish bundles. Each is served when its line is printed."""
    if files[0].startswith(hub.SCHEME):
        if name is not None or alias or dry_run or wait is not None:
            raise UsageError(
                "--name, --alias, --dry-run and --wait are for servers, not for hf://."
            )
        _push_to_hub(client, files, in_json, public=public)
        return
    if public:
        raise UsageError("--public is for hf:// only.")
    _push_to_server(
        client,
        list(map(Path, files)),
        in_json,
        name,
        alias or (),
        dry_run,
        {"wait": wait, "timeout": timeout},
    )


def _push_to_server(
    client: Client,
    files: list[Path],
    in_json: bool,
    name: str | None,
    alias: Sequence[str],
    dry_run: bool,
    waiting: WaitOptions,
) -> None:
    if name is not None and len(files) > 1:
        raise UsageError(f"--name needs exactly one file; got {len(files)}.")
    if dry_run:
        _check(client, files, in_json)
        return
    late = False
    for file in files:
        done = client.push(file, name or _task_name(client, file), alias, **waiting)
        _print_published(done, in_json)
        late = late or (done.replicas is not None and not done.replicas.complete)
    if late:
        raise typer.Exit(LATER)


@server_command(ApiKey)
def pull(
    client: Client,
    in_json: bool,
    task: Annotated[
        str,
        typer.Argument(
            metavar="TASK[@V]",
            help="For example birds, birds@3 or birds:canary; or hf://ORG/NAME[@REVISION].",
        ),
    ],
    out: Annotated[Path, typer.Option(metavar="FILE|DIR", help="Output file or folder.")] = Path(),
) -> None:
    """Download the bundle of a task. Never overwrites a different file."""
    if task.startswith(hub.SCHEME):
        _pull_from_hub(task, out, in_json)
        return
    bundle = client.pull(task)
    path = _save(bundle.data, out, bundle.filename)
    named = name_in(bundle.data)
    if named not in (None, bundle.task):
        again = shlex.join(["engram", "push", str(path), "--name", bundle.task])
        typer.echo(f"The name in the bundle is {named}. To publish it again: {again}", err=True)
    if in_json:
        about = {"task": bundle.task, "version": bundle.version, "digest": bundle.digest}
        write_json(about | {"path": str(path)}, indent=None)
    else:
        write_line(f"{bundle.task}@{bundle.version} → {path}")


def _push_to_hub(client: Client, arguments: list[str], in_json: bool, *, public: bool) -> None:
    if len(arguments) != 2:
        raise UsageError("Name one bundle file or one task: engram push hf://ORG/NAME FILE|TASK.")
    address, source = hub.HubAddress.parse(arguments[0]), arguments[1]
    is_file = Path(source).is_file()
    data = read_file(Path(source)) if is_file else client.pull(source).data
    commit = hub.upload(address, data, public=public)
    if in_json:
        write_json({"repository": address.repository, "commit": commit}, indent=None)
    else:
        write_line(f"{source} → {hub.SCHEME}{address.repository}@{commit[:12]}")


def _pull_from_hub(text: str, out: Path, in_json: bool) -> None:
    address = hub.HubAddress.parse(text)
    data, commit = hub.download(address)
    path = _save(data, out, f"{address.name}.safetensors")
    if in_json:
        about = {"repository": address.repository, "commit": commit, "path": str(path)}
        write_json(about, indent=None)
    else:
        write_line(f"{hub.SCHEME}{address.repository}@{commit[:12]} → {path}")


def _save(data: bytes, out: Path, filename: str) -> Path:
    """Write a bundle to a file or into a folder, unless another file is there."""
    path = out / filename if out.is_dir() else out
    try:
        if path.exists() and path.read_bytes() != data:
            raise UsageError(f"'{path}' exists with other content. Choose another --out.")
        write_file(path, data)
    except OSError as error:
        raise ClientError(f"Cannot write '{path}': {error.strerror or error}.") from None
    return path


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
    name = (hub.manifest_in(bundle) or {}).get("name")  # the server says what is wrong with it
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
