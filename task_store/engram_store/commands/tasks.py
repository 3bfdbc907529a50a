"""`engram tasks gc|purge|verify|backup|restore-backup`: commands that work on a store directly."""

import re
from collections.abc import Sequence
from datetime import timedelta
from typing import Annotated

import typer
from engram_bundle import parse_ref
from rich.console import Console
from rich.table import Table

from engram_store.catalog import Damage
from engram_store.changes import Purge
from engram_store.events import Purged
from engram_store.store import open_store

_UNITS = {"s": "seconds", "m": "minutes", "h": "hours", "d": "days"}

StoreOption = Annotated[
    str, typer.Option("--store", metavar="URL", help="Task store: a folder or a URL.")
]


def collect_garbage(
    store: StoreOption,
    grace: Annotated[
        str,
        typer.Option(
            "--grace", metavar="AGE", help="Keep younger objects: 90s, 30m, 24h, 7d or 1d12h."
        ),
    ] = "24h",
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show what would be deleted, and delete nothing.")
    ] = False,
    corrections: Annotated[
        str | None,
        typer.Option(
            "--corrections-older-than",
            metavar="AGE",
            help="Also delete corrections older than AGE.",
        ),
    ] = None,
) -> None:
    """Delete unpublished bundles and uploads, and files of interrupted writes."""
    age = parse_age(grace)
    correction_age = None if corrections is None else parse_age(corrections)
    opened = open_store(store, create=False)
    report = opened.collect_garbage(age, corrections_older_than=correction_age, dry_run=dry_run)
    console = Console()
    table = Table("object", "kind", title="Would delete" if report.dry_run else "Deleted")
    for kind, paths in (
        ("unpublished bundle", report.blobs),
        ("staging file", report.staged),
        ("old checkpoint", report.checkpoints),
        ("heartbeat of a stopped replica", report.heartbeats),
        ("corrections", report.corrections),
        ("unpublished upload", report.drafts),
    ):
        for path in paths:
            table.add_row(path, kind)
    if table.row_count:
        console.print(table)
    verb = "would be freed" if report.dry_run else "freed"
    waiting = f"; {len(report.waiting)} younger kept" if report.waiting else ""
    console.print(f"{table.row_count} objects, {report.freed_bytes:,} bytes {verb}{waiting}.")


def purge(
    task: Annotated[str, typer.Argument(metavar="TASK[@V]", help="Task, or one version of it.")],
    store: StoreOption,
) -> None:
    """Delete a task or a version for good, with its bundles. A task's corrections go with it.

    If it was interrupted, run it again, or `engram tasks gc`: both complete it.
    """
    ref = parse_ref(task)
    if ref.alias is not None:
        raise typer.BadParameter(f"'{task}' is an alias: name the task, or a version of it.")
    versions = None if ref.version is None else (ref.version,)
    event = open_store(store, create=False).commit(Purge(ref.task, versions)).event
    if not isinstance(event, Purged):
        Console().print(f"{task} was purged before; nothing of it is left.")
        return
    listed = ", ".join(map(str, event.versions))
    kept = "" if event.digests else " Other versions have the same bundle, so it is kept."
    Console().print(
        f"{ref.task}: purged version {listed}; {len(event.digests)} bundles deleted.{kept}",
        soft_wrap=True,
    )


def verify(store: StoreOption) -> None:
    """Read every byte of a store: the log, its hash chain, bundles, checkpoints, corrections."""
    report = open_store(store, create=False).verify()
    Console().print(
        f"generation {report.generation}: {report.bundles} bundles of {report.bundle_bytes:,} "
        f"bytes, {report.checkpoints} checkpoints, {report.corrections} records of corrections."
    )
    _exit_if_damaged(report.damages)


def back_up(
    target: Annotated[str, typer.Argument(metavar="DEST", help="Target: a folder or a URL.")],
    store: StoreOption,
) -> None:
    """Copy a store to a backup: only what is new since the last copy, consistently."""
    _copy(store, target)


def restore_backup(
    source: Annotated[str, typer.Argument(metavar="SOURCE", help="The backup: a folder or a URL.")],
    store: StoreOption,
) -> None:
    """Copy a backup into an empty store, or into an earlier state of the same store."""
    _copy(source, store)


def _copy(source_url: str, target_url: str) -> None:
    source = open_store(source_url, create=False)
    target = open_store(target_url)
    report = source.copy_to(target)
    Console().print(
        f"{target.url} is at generation {report.generation}: {report.entries} log entries and "
        f"{report.bundles} bundles of {report.bundle_bytes:,} bytes copied.",
        soft_wrap=True,
    )
    _exit_if_damaged(report.damages)


def _exit_if_damaged(damages: Sequence[Damage]) -> None:
    if not damages:
        return
    table = Table("object", "damage", title="Damaged")
    for damage in damages:
        table.add_row(damage.path, damage.reason)
    Console().print(table)
    raise typer.Exit(1)


def parse_age(text: str) -> timedelta:
    """Parse `90s`, `30m`, `24h`, `7d` or a combination such as `1d12h`."""
    parts = re.findall(r"(\d{1,6})([smhd])", text)
    if not parts or "".join(number + unit for number, unit in parts) != text:
        raise typer.BadParameter(f"'{text}' is not an age: write for example 90s, 30m, 24h or 7d.")
    return sum((timedelta(**{_UNITS[u]: int(n)}) for n, u in parts), timedelta())
