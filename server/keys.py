"""The keys of a server: of its settings, and of a keys file, which changes while it runs.

A key is `engram_<id>_<secret>`. The file has the sha256 of the secret and not the secret: whoever
reads the file can use no key. A slow hash, as passwords need, would add nothing: a secret is 256
random bits, which nobody guesses at any speed, and every request has to be checked.
"""

import fcntl
import hashlib
import hmac
import logging
import secrets
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Literal

from anyio import to_thread
from pydantic import AwareDatetime, BaseModel, ConfigDict, Field, SecretStr, ValidationError

from server.errors import KeysError
from server.identity import EVERYTHING, LOCAL, Identity, Scope
from server.quota import Clock, Limits, Quota
from task_store.files import write_whole

PREFIX = "engram"
CHECK_SECONDS = 0.5
LARGEST_FILE = 4 * 1024**2

_SECRET_BYTES = 32

Hash = Annotated[str, Field(pattern=r"^sha256:[0-9a-f]{64}$")]
Pattern = Annotated[str, Field(pattern=r"^[a-z0-9._/*-]{1,127}$")]

_log = logging.getLogger("engram.keys")


# The file


class Replaced(BaseModel):
    """The secret before the present one, for the time that both are good."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    secret: Hash
    until: AwareDatetime


class Key(BaseModel):
    """One key, without its secret."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    id: str = Field(pattern=r"^[a-z0-9-]{1,32}$")
    name: str = Field(min_length=1, max_length=128)
    secret: Hash
    scopes: dict[Scope, Annotated[tuple[Pattern, ...], Field(min_length=1, max_length=256)]]
    limits: Limits = Limits()
    created: AwareDatetime
    expires: AwareDatetime | None = None
    revoked: AwareDatetime | None = None
    replaced: Replaced | None = None


class KeysDocument(BaseModel):
    """All of a keys file."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    format: Literal[1] = 1
    keys: tuple[Key, ...] = ()


def read_keys(path: Path) -> tuple[Key, ...]:
    """The keys of a file, or KeysError."""
    try:
        with path.open("rb") as file:
            content = file.read(LARGEST_FILE + 1)
    except OSError as error:
        raise KeysError(f"The keys file {path} cannot be read: {error.strerror}.") from None
    if len(content) > LARGEST_FILE:
        raise KeysError(f"The keys file {path} has more than {LARGEST_FILE} bytes.")
    try:
        keys = KeysDocument.model_validate_json(content).keys
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(map(str, first["loc"])) or "the whole"
        raise KeysError(f"The keys file {path} is damaged: {where}: {first['msg']}.") from None
    ids = [key.id for key in keys]
    if len(set(ids)) < len(ids):
        raise KeysError(f"The keys file {path} is damaged: an id is there twice.")
    return keys


@contextmanager
def changing(path: Path) -> Iterator[dict[str, Key]]:
    """The keys of a file by id, to be changed; written at the end. One writer at a time."""
    try:
        with path.with_name(f"{path.name}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            keys = {key.id: key for key in read_keys(path)} if path.exists() else {}
            yield keys
            document = KeysDocument(keys=tuple(keys.values()))
            write_whole(path, document.model_dump_json(indent=2).encode() + b"\n")
    except OSError as error:
        raise KeysError(f"The keys file {path} cannot be written: {error.strerror}.") from None


def new_secret() -> str:
    return secrets.token_urlsafe(_SECRET_BYTES)


def new_id() -> str:
    return secrets.token_hex(4)


def token_of(key_id: str, secret: str) -> str:
    """What a client sends."""
    return f"{PREFIX}_{key_id}_{secret}"


def hash_of(secret: str) -> str:
    return f"sha256:{hashlib.sha256(secret.encode()).hexdigest()}"


# In force


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a key is not good. Its id is known where its secret was right."""

    reason: Literal["unknown", "expired", "revoked"]
    key_id: str | None = None


class Keys:
    """The keys in force: those of the settings and, as it changes, those of the file."""

    def __init__(
        self,
        api_key: SecretStr | None = None,
        admin_key: SecretStr | None = None,
        file: Path | None = None,
        *,
        clock: Clock = time.monotonic,
        now: Callable[[], float] = time.time,
    ) -> None:
        """Reads the file: KeysError if it cannot be used."""
        self._builtin = builtin_identities(api_key, admin_key)
        self._path = file
        self._clock = clock
        self._now = now
        self._keys: Mapping[str, tuple[Key, Identity]] = {}
        self._stamp: tuple[int, ...] | None = None
        self._checked = clock()
        self.error: str | None = None  # why the file as it is now is not in force
        # Told the ids of keys that a new file added, took away or changed.
        self.on_change: Callable[[list[str]], None] = lambda ids: None
        if file is not None:
            self._stamp = _stamp(file)
            self._keys = self._identities(read_keys(file))

    @property
    def anonymous(self) -> Identity | None:
        """Who a caller without a key is; None where there are keys."""
        return LOCAL if not self._builtin and self._path is None else None

    async def identify(self, token: str) -> Identity | Refusal:
        """Whose key this is. How long it takes says nothing about a secret."""
        if self._path is not None and self._clock() - self._checked >= CHECK_SECONDS:
            await self._follow(self._path)
        sent = hashlib.sha256(token.encode()).digest()
        found = [who for secret, who in self._builtin if hmac.compare_digest(sent, secret)]
        if found:
            return found[0]
        prefix, _, rest = token.partition("_")
        key_id, _, secret = rest.partition("_")
        entry = self._keys.get(key_id) if prefix == PREFIX else None
        return Refusal("unknown") if entry is None else self._check(*entry, hash_of(secret))

    def _check(self, key: Key, identity: Identity, sent: str) -> Identity | Refusal:
        now = self._now()
        good = hmac.compare_digest(sent, key.secret)
        if key.replaced is not None and now < key.replaced.until.timestamp():
            good |= hmac.compare_digest(sent, key.replaced.secret)
        if not good:
            return Refusal("unknown")
        if key.revoked is not None:
            return Refusal("revoked", key.id)
        if key.expires is not None and now >= key.expires.timestamp():
            return Refusal("expired", key.id)
        return identity

    async def _follow(self, path: Path) -> None:
        """Read the file again if it is another. One that is damaged or gone changes nothing."""
        self._checked = self._clock()
        stamp = _stamp(path)
        if stamp == self._stamp and self.error is None:
            return
        self._stamp = stamp
        try:
            # In a thread: thousands of keys take a while to parse.
            keys = await to_thread.run_sync(read_keys, path)
        except KeysError as error:
            if self.error != str(error):
                self.error = str(error)
                _log.error("%s The keys in force stay as they were.", error)
        else:
            before, self._keys = self._keys, self._identities(keys)
            self.error = None
            self.on_change(_changed(before, self._keys))
            _log.info("the keys file was read again: %d keys", len(self._keys))

    def _identities(self, keys: tuple[Key, ...]) -> dict[str, tuple[Key, Identity]]:
        return {key.id: (key, self._identity(key)) for key in keys}

    def _identity(self, key: Key) -> Identity:
        quota = None if key.limits == Limits() else Quota(key.limits, self._clock)
        if before := self._keys.get(key.id):
            known = before[1].quota
            if known is not None and known.limits == key.limits:
                quota = known  # what is used up stays so
        return Identity(f"key:{key.id}", key.name, key.scopes, quota)


def builtin_identities(
    api_key: SecretStr | None, admin_key: SecretStr | None
) -> list[tuple[bytes, Identity]]:
    """The keys of the settings, hashed, and whose they are. One that is alone may do all."""
    reader: dict[Scope, tuple[str, ...]] = {
        scope: EVERYTHING[scope] for scope in ("predict", "read", "metrics")
    }
    given = (
        (admin_key, Identity("admin-key", "ENGRAM_ADMIN_KEY", EVERYTHING)),
        (
            api_key,
            Identity("api-key", "ENGRAM_API_KEY", EVERYTHING if admin_key is None else reader),
        ),
    )
    return [
        (hashlib.sha256(key.get_secret_value().encode()).digest(), who)
        for key, who in given
        if key is not None
    ]


def _changed(
    before: Mapping[str, tuple[Key, Identity]], after: Mapping[str, tuple[Key, Identity]]
) -> list[str]:
    old, new = ({id_: key for id_, (key, _) in each.items()} for each in (before, after))
    return sorted(id_ for id_ in old.keys() | new.keys() if old.get(id_) != new.get(id_))


def _stamp(path: Path) -> tuple[int, ...] | None:
    """What changes with a file; None if there is none."""
    try:
        stat = path.stat()
    except OSError:
        return None
    return stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino, stat.st_size


def utc_now() -> datetime:
    return datetime.now(UTC).replace(microsecond=0)
