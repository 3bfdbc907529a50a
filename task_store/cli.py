"""`engram tasks gc|verify|backup|restore-backup`: the commands that work on a store itself."""

import contextlib
import re
from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from task_store.catalog import Damage
from task_store.errors import TaskStoreError
from task_store.store import TaskStore, open_store

_UNITS = {"s": "seconds", "m": "minutes", "h": "hours", "d": "days"}

StoreOption = Annotated[
    str, typer.Option("--store", metavar="URL", help="The task store: a folder or a URL.")
]


def collect_garbage(
    store: StoreOption,
    grace: Annotated[
        str,
        typer.Option(
            "--grace", metavar="AGE", help="Keep what is younger: 90s, 30m, 24h, 7d, or 1d12h."
        ),
    ] = "24h",
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show what would go and delete nothing.")
    ] = False,
) -> None:
    """Delete bundles that were never published, and what killed writers left behind."""
    age = parse_age(grace)
    with _errors_in_one_line():
        report = open_store(store, create=False).collect_garbage(age, dry_run=dry_run)
    console = Console()
    table = Table("object", "kind", title="Would delete" if report.dry_run else "Deleted")
    for kind, paths in (
        ("unpublished bundle", report.blobs),
        ("staging file", report.staged),
        ("old checkpoint", report.checkpoints),
        ("heartbeat of a replica that is gone", report.heartbeats),
    ):
        for path in paths:
            table.add_row(path, kind)
    if table.row_count:
        console.print(table)
    verb = "would be freed" if report.dry_run else "freed"
    waiting = f"; {len(report.waiting)} younger left alone" if report.waiting else ""
    console.print(f"{table.row_count} objects, {report.freed_bytes:,} bytes {verb}{waiting}.")


def verify(
    store: StoreOption,
    accept: Annotated[
        bool,
        typer.Option(
            "--accept",
            help="Vouch for the log entries that an Engram before the chain wrote into it.",
        ),
    ] = False,
) -> None:
    """Read every byte of a store: the log and its chain of hashes, bundles, checkpoints."""
    with _errors_in_one_line():
        opened = open_store(store, create=False)
        report = opened.verify()
        left = opened.accept(report.damages) if accept else report.damages
    console = Console()
    console.print(
        f"generation {report.generation}: {report.bundles} bundles of {report.bundle_bytes:,} "
        f"bytes, {report.checkpoints} checkpoints."
    )
    for damage in report.damages:
        if damage not in left:
            console.print(f"accepted: {damage.path}", soft_wrap=True)
    _end_with(left)


def back_up(
    target: Annotated[str, typer.Argument(metavar="DEST", help="Where to: a folder or a URL.")],
    store: StoreOption,
) -> None:
    """Copy a store to another place: what is new since the last time, consistently."""
    with _errors_in_one_line():
        source = open_store(store, create=False)
        _copy(source, open_store(target))


def restore_backup(
    source: Annotated[str, typer.Argument(metavar="SOURCE", help="The backup: a folder or a URL.")],
    store: StoreOption,
) -> None:
    """Copy a backup into a store that is empty, or that is the backup's own beginning."""
    with _errors_in_one_line():
        backup = open_store(source, create=False)
        _copy(backup, open_store(store))


def _copy(source: TaskStore, target: TaskStore) -> None:
    report = source.copy_to(target)
    Console().print(
        f"{target.url} is at generation {report.generation}: {report.entries} log entries and "
        f"{report.bundles} bundles of {report.bundle_bytes:,} bytes copied.",
        soft_wrap=True,
    )
    _end_with(report.damages)


def _end_with(damages: Sequence[Damage]) -> None:
    """Show what is damaged, with the exit code 1; nothing if all is well."""
    if not damages:
        return
    table = Table("object", "damage", title="Damaged")
    for damage in damages:
        table.add_row(damage.path, damage.reason)
    Console().print(table)
    raise typer.Exit(1)


@contextlib.contextmanager
def _errors_in_one_line() -> Iterator[None]:
    try:
        yield
    except TaskStoreError as error:
        Console(stderr=True).print(f"[red]error:[/] {error}", highlight=False, soft_wrap=True)
        raise typer.Exit(1) from None


def parse_age(text: str) -> timedelta:
    """`90s`, `30m`, `24h`, `7d` or several of them, such as `1d12h`."""
    parts = re.findall(r"(\d{1,6})([smhd])", text)
    if not parts or "".join(number + unit for number, unit in parts) != text:
        raise typer.BadParameter(f"'{text}' is no age: write for example 90s, 30m, 24h or 7d.")
    return sum((timedelta(**{_UNITS[u]: int(n)}) for n, u in parts), timedelta())
