"""`engram tasks gc`: the store's own command."""

import re
from datetime import timedelta
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from task_store.errors import TaskStoreError
from task_store.store import open_store

_UNITS = {"s": "seconds", "m": "minutes", "h": "hours", "d": "days"}


def collect_garbage(
    store: Annotated[
        str, typer.Option("--store", metavar="URL", help="The task store: a folder or a URL.")
    ],
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
    try:
        report = open_store(store, create=False).collect_garbage(age, dry_run=dry_run)
    except TaskStoreError as error:
        Console(stderr=True).print(f"[red]error:[/] {error}", highlight=False, soft_wrap=True)
        raise typer.Exit(1) from None
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


def parse_age(text: str) -> timedelta:
    """`90s`, `30m`, `24h`, `7d` or several of them, such as `1d12h`."""
    parts = re.findall(r"(\d{1,6})([smhd])", text)
    if not parts or "".join(number + unit for number, unit in parts) != text:
        raise typer.BadParameter(f"'{text}' is no age: write for example 90s, 30m, 24h or 7d.")
    return sum((timedelta(**{_UNITS[u]: int(n)}) for n, u in parts), timedelta())
