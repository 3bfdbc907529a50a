"""`engram keys`: the commands that change a keys file. A running server follows within a second."""

from datetime import datetime
from pathlib import Path
from typing import Annotated

import typer
from pydantic import ValidationError
from rich.console import Console
from rich.markup import escape
from rich.table import Column, Table

from server.errors import KeysError
from server.identity import ANY_TASK, SCOPES, Scope
from server.keys import (
    Key,
    Replaced,
    changing,
    hash_of,
    new_id,
    new_secret,
    read_keys,
    token_of,
    utc_now,
)
from server.quota import Limits
from task_store.cli import parse_age

KeysFile = Annotated[
    Path,
    typer.Option(
        "--file",
        envvar="ENGRAM_KEYS_FILE",
        dir_okay=False,
        help="The keys file of the server. Default: ENGRAM_KEYS_FILE.",
    ),
]
KeyId = Annotated[str, typer.Argument(metavar="ID", help="The key's id: see engram keys ls.")]


def add_key(
    name: Annotated[str, typer.Argument(help="Who or what the key is for.")],
    file: KeysFile,
    scope: Annotated[
        list[str],
        typer.Option(
            metavar="SCOPE[:TASKS]",
            help=f"What the key may do ({', '.join(SCOPES)}), and for which tasks: "
            "'publish:team-a/*,pets'. Default: for all. May be repeated.",
        ),
    ],
    expires: Annotated[
        str | None, typer.Option(metavar="AGE", help="The key ends after this: 12h, 90d.")
    ] = None,
    requests_per_second: Annotated[float | None, typer.Option(help="Limit of requests.")] = None,
    rows_per_second: Annotated[
        float | None,
        typer.Option(help="Limit of token rows: those of an image, and one for each of its tasks."),
    ] = None,
    concurrent_images: Annotated[
        int | None, typer.Option(help="Limit of images being worked on at once.")
    ] = None,
) -> None:
    """Make a key for a server, and show it, once."""
    secret = new_secret()
    try:
        key = Key(
            id=new_id(),
            name=name,
            secret=hash_of(secret),
            scopes=parse_scopes(scope),
            limits=Limits(
                requests_per_second=requests_per_second,
                rows_per_second=rows_per_second,
                concurrent_images=concurrent_images,
            ),
            created=utc_now(),
            expires=None if expires is None else utc_now() + parse_age(expires),
        )
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(map(str, first["loc"]))
        raise typer.BadParameter(f"{where}: {first['msg']} (got {first['input']!r}).") from None
    with changing(file) as keys:
        if any(other.name == name and other.revoked is None for other in keys.values()):
            raise KeysError(f"There is a key called '{name}' already: revoke it, or rotate it.")
        keys[key.id] = key
    _show(key, secret)


def list_keys(file: KeysFile) -> None:
    """List the keys of a server: what each may do, and whether it is good."""
    heads = ("id", "name", "scopes", "limits", "created", "expires", "state")
    table = Table(*(Column(head, overflow="fold") for head in heads))  # never cut short
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
    """End a key. It stays in the list, so that its id still says whose it was."""
    with changing(file) as keys:
        key = _find(keys, key_id, file)
        if key.revoked is None:
            keys[key_id] = key.model_copy(update={"revoked": utc_now(), "replaced": None})
    Console(stderr=True).print(f"Revoked {key_id} ({escape(key.name)}).", highlight=False)


def rotate_key(
    key_id: KeyId,
    file: KeysFile,
    overlap: Annotated[
        str, typer.Option(metavar="AGE", help="How long the old secret stays good, too: 30m, 7d.")
    ] = "0s",
) -> None:
    """Give a key another secret, and show it, once. All else of the key stays."""
    secret = new_secret()
    with changing(file) as keys:
        key = _find(keys, key_id, file)
        if key.revoked is not None:
            raise KeysError(f"The key {key_id} is revoked: make another with engram keys add.")
        old = Replaced(secret=key.secret, until=utc_now() + parse_age(overlap))
        replaced = old if old.until > utc_now() else None
        keys[key_id] = key.model_copy(update={"secret": hash_of(secret), "replaced": replaced})
    _show(key, secret)


def parse_scopes(given: list[str]) -> dict[Scope, tuple[str, ...]]:
    """`predict` and `publish:team-a/*,pets` as a key has them."""
    scopes: dict[Scope, tuple[str, ...]] = {}
    for text in given:
        name, colon, tasks = text.partition(":")
        scope = next((each for each in SCOPES if each == name), None)
        if scope is None:
            raise typer.BadParameter(f"'{name}' is no scope: {', '.join(SCOPES)} are.")
        patterns = tuple(tasks.split(",")) if colon else (ANY_TASK,)
        scopes[scope] = scopes.get(scope, ()) + patterns
    return scopes


def _find(keys: dict[str, Key], key_id: str, file: Path) -> Key:
    if key_id not in keys:
        raise KeysError(f"There is no key {key_id} in {file}: engram keys ls shows them.")
    return keys[key_id]


def _show(key: Key, secret: str) -> None:
    """The key alone on standard output, for `KEY=$(engram keys add …)`."""
    errors = Console(stderr=True, soft_wrap=True)
    errors.print(f"Key {key.id} ({escape(key.name)}). It is shown this once:", highlight=False)
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
    return "good" if key.replaced is None else f"good, old secret until {_day(key.replaced.until)}"
