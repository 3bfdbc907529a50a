"""`engram keys`: edit a keys file. A running server reloads it within a second."""

from datetime import datetime
from pathlib import Path
from typing import Annotated

import typer
from engram_store.commands.tasks import parse_age
from pydantic import ValidationError
from rich.console import Console
from rich.markup import escape
from rich.table import Column, Table

from engram_server.access.identity import ANY_TASK, SCOPES, Scope
from engram_server.access.keys import (
    Key,
    Replaced,
    edit_keys,
    hash_of,
    new_id,
    new_secret,
    read_keys,
    token_of,
    utc_now,
)
from engram_server.access.quotas import KeyLimits
from engram_server.errors import KeysError

KeysFile = Annotated[
    Path,
    typer.Option(
        "--file",
        envvar="ENGRAM_KEYS_FILE",
        dir_okay=False,
        help="Keys file of the server (default: ENGRAM_KEYS_FILE).",
    ),
]
KeyId = Annotated[str, typer.Argument(metavar="ID", help="Id of the key, from `engram keys ls`.")]


def add_key(
    name: Annotated[str, typer.Argument(help="Name of the user or service.")],
    file: KeysFile,
    scope: Annotated[
        list[str],
        typer.Option(
            metavar="SCOPE[:TASKS]",
            help=f"Scope ({', '.join(SCOPES)}), optionally limited to tasks: "
            "'publish:team-a/*,pets' (default: all tasks). Repeatable.",
        ),
    ],
    expires: Annotated[
        str | None, typer.Option(metavar="AGE", help="Lifetime of the key: 12h, 90d.")
    ] = None,
    requests_per_second: Annotated[
        float | None, typer.Option(help="Maximum requests per second.")
    ] = None,
    rows_per_second: Annotated[
        float | None,
        typer.Option(
            help="Maximum token rows per second (the tokens of an image plus one per task)."
        ),
    ] = None,
    concurrent_images: Annotated[int | None, typer.Option(help="Maximum images in flight.")] = None,
    tasks: Annotated[int | None, typer.Option(help="Maximum tasks that the key creates.")] = None,
    versions: Annotated[
        int | None, typer.Option(help="Maximum live versions that the key publishes.")
    ] = None,
    store_bytes: Annotated[
        int | None,
        typer.Option(help="Maximum bytes of its bundles in the store, until they are purged."),
    ] = None,
) -> None:
    """Create a key and print it once."""
    secret = new_secret()
    try:
        key = Key(
            id=new_id(),
            name=name,
            secret=hash_of(secret),
            scopes=parse_scopes(scope),
            limits=KeyLimits(
                requests_per_second=requests_per_second,
                rows_per_second=rows_per_second,
                concurrent_images=concurrent_images,
                tasks=tasks,
                versions=versions,
                store_bytes=store_bytes,
            ),
            created=utc_now(),
            expires=None if expires is None else utc_now() + parse_age(expires),
        )
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(map(str, first["loc"]))
        raise typer.BadParameter(f"{where}: {first['msg']} (got {first['input']!r}).") from None
    with edit_keys(file) as keys:
        if any(other.name == name and other.revoked is None for other in keys.values()):
            raise KeysError(f"A key named '{name}' already exists. Revoke or rotate it.")
        keys[key.id] = key
    _show(key, secret)


def list_keys(file: KeysFile) -> None:
    """List the keys with scopes, limits and state."""
    heads = ("id", "name", "scopes", "limits", "created", "expires", "state")
    table = Table(*(Column(head, overflow="fold") for head in heads))  # never truncate
    now = utc_now()
    for key in read_keys(file):
        limits = key.limits.model_dump(exclude_none=True)
        table.add_row(
            key.id,
            escape(key.name),
            "\n".join(_scope_text(name, tasks) for name, tasks in key.scopes.items()),
            "\n".join(f"{name} {value:g}" for name, value in limits.items()),
            _day(key.created),
            _day(key.expires),
            _state(key, now),
        )
    Console().print(table)


def revoke_key(key_id: KeyId, file: KeysFile) -> None:
    """Revoke a key. It stays in the list for reference."""
    with edit_keys(file) as keys:
        key = _find(keys, key_id, file)
        if key.revoked is None:
            keys[key_id] = key.model_copy(update={"revoked": utc_now(), "replaced": None})
    Console(stderr=True).print(f"Revoked {key_id} ({escape(key.name)}).", highlight=False)


def rotate_key(
    key_id: KeyId,
    file: KeysFile,
    overlap: Annotated[
        str, typer.Option(metavar="AGE", help="How long the old secret stays valid: 30m, 7d.")
    ] = "0s",
) -> None:
    """Replace the secret of a key and print it once."""
    secret = new_secret()
    with edit_keys(file) as keys:
        key = _find(keys, key_id, file)
        if key.revoked is not None:
            raise KeysError(f"Key {key_id} is revoked. Create a new one with `engram keys add`.")
        old = Replaced(secret=key.secret, until=utc_now() + parse_age(overlap))
        replaced = old if old.until > utc_now() else None
        keys[key_id] = key.model_copy(update={"secret": hash_of(secret), "replaced": replaced})
    _show(key, secret)


def parse_scopes(texts: list[str]) -> dict[Scope, tuple[str, ...]]:
    """Parse scopes such as `predict` and `publish:team-a/*,pets`."""
    scopes: dict[Scope, tuple[str, ...]] = {}
    for text in texts:
        name, colon, tasks = text.partition(":")
        scope = next((each for each in SCOPES if each == name), None)
        if scope is None:
            raise typer.BadParameter(f"Unknown scope '{name}'. Valid scopes: {', '.join(SCOPES)}.")
        patterns = tuple(tasks.split(",")) if colon else (ANY_TASK,)
        scopes[scope] = scopes.get(scope, ()) + patterns
    return scopes


def _find(keys: dict[str, Key], key_id: str, file: Path) -> Key:
    if key_id not in keys:
        raise KeysError(f"There is no key {key_id} in {file}. List them with `engram keys ls`.")
    return keys[key_id]


def _show(key: Key, secret: str) -> None:
    """Print only the key on stdout, for `KEY=$(engram keys add …)`."""
    errors = Console(stderr=True, soft_wrap=True)
    errors.print(f"Key {key.id} ({escape(key.name)}). It is shown only once:", highlight=False)
    typer.echo(token_of(key.id, secret))


def _scope_text(name: str, tasks: tuple[str, ...]) -> str:
    return name if tasks == (ANY_TASK,) else f"{name}:{','.join(tasks)}"


def _day(moment: datetime | None) -> str:
    return "" if moment is None else moment.strftime("%Y-%m-%d %H:%M")


def _state(key: Key, now: datetime) -> str:
    if key.revoked is not None:
        return f"revoked {_day(key.revoked)}"
    if key.expires is not None and now >= key.expires:
        return "expired"
    if key.replaced is None:
        return "valid"
    return f"valid, old secret until {_day(key.replaced.until)}"
