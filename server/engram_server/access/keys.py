"""API keys from the settings and from a keys file, which is reloaded while the server runs.

A key is `engram_<id>_<secret>`. The file stores the SHA-256 of the secret. A slow password hash
would add nothing: a secret has 256 random bits, and every request checks one.
"""

import asyncio
import fcntl
import hashlib
import hmac
import logging
import re
import secrets
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Literal

from engram_bundle.files import write_whole
from engram_bundle.names import Digest, digest_of
from pydantic import AwareDatetime, BaseModel, ConfigDict, Field, SecretStr, ValidationError

from engram_server.access.identity import EVERYTHING, LOCAL, Identity, Scope
from engram_server.access.quotas import Clock, KeyLimits, Quota
from engram_server.errors import KeysError

PREFIX = "engram"
CHECK_SECONDS = 0.5
LARGEST_FILE = 4 * 1024**2

_SECRET_BYTES = 32
_TOKEN = re.compile(rf"({PREFIX}_[a-z0-9-]{{1,32}}_)[A-Za-z0-9_-]{{16,}}")

Pattern = Annotated[str, Field(pattern=r"^[a-z0-9._/*-]{1,127}$")]

_log = logging.getLogger("engram.keys")


# The file


class Replaced(BaseModel):
    """The previous secret during a rotation, while both are valid."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    secret: Digest
    until: AwareDatetime


class Key(BaseModel):
    """One key, with the hash of its secret."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    id: str = Field(pattern=r"^[a-z0-9-]{1,32}$")
    name: str = Field(min_length=1, max_length=128)
    secret: Digest
    scopes: dict[Scope, Annotated[tuple[Pattern, ...], Field(min_length=1, max_length=256)]]
    limits: KeyLimits = KeyLimits()
    created: AwareDatetime
    expires: AwareDatetime | None = None
    revoked: AwareDatetime | None = None
    replaced: Replaced | None = None


class KeysDocument(BaseModel):
    """The content of a keys file."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    format: Literal[1] = 1
    keys: tuple[Key, ...] = ()


def read_keys(path: Path) -> tuple[Key, ...]:
    """Read a keys file, or raise KeysError."""
    try:
        with path.open("rb") as file:
            content = file.read(LARGEST_FILE + 1)
    except OSError as error:
        raise KeysError(f"Cannot read the keys file {path}: {error.strerror}.") from None
    if len(content) > LARGEST_FILE:
        raise KeysError(f"The keys file {path} is larger than {LARGEST_FILE} bytes.")
    try:
        keys = KeysDocument.model_validate_json(content).keys
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(map(str, first["loc"])) or "document"
        raise KeysError(f"The keys file {path} is invalid: {where}: {first['msg']}.") from None
    ids = [key.id for key in keys]
    if len(set(ids)) < len(ids):
        raise KeysError(f"The keys file {path} is invalid: duplicate id.")
    return keys


@contextmanager
def edit_keys(path: Path) -> Iterator[dict[str, Key]]:
    """Edit the keys of a file under an exclusive lock; written when the block ends."""
    try:
        with path.with_name(f"{path.name}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            keys = {key.id: key for key in read_keys(path)} if path.exists() else {}
            yield keys
            document = KeysDocument(keys=tuple(keys.values()))
            write_whole(path, document.model_dump_json(indent=2).encode() + b"\n")
    except OSError as error:
        raise KeysError(f"Cannot write the keys file {path}: {error.strerror}.") from None


def new_secret() -> str:
    return secrets.token_urlsafe(_SECRET_BYTES)


def new_id() -> str:
    return secrets.token_hex(4)


def token_of(key_id: str, secret: str) -> str:
    """The token that a client sends."""
    return f"{PREFIX}_{key_id}_{secret}"


def redact(text: str) -> str:
    """Remove the secret of each token in a text, for logs."""
    return _TOKEN.sub(r"\1…", text)


def hash_of(secret: str) -> str:
    return digest_of(secret.encode())


# Authentication


@dataclass(frozen=True, slots=True)
class RejectedKey:
    """Why a key is rejected. `key_id` is set only if the secret was right."""

    reason: Literal["unknown", "expired", "revoked"]
    key_id: str | None = None


class Keys:
    """The valid keys: those of the settings and those of the keys file, reloaded on change."""

    def __init__(
        self,
        api_key: SecretStr | None = None,
        admin_key: SecretStr | None = None,
        file: Path | None = None,
        *,
        clock: Clock = time.monotonic,
        now: Callable[[], float] = time.time,
    ) -> None:
        """Read the file, or raise KeysError."""
        self._builtin = builtin_identities(api_key, admin_key)
        self._path = file
        self._clock = clock
        self._now = now
        self._keys: Mapping[str, tuple[Key, Identity]] = {}
        self._stamp: tuple[int, ...] | None = None
        self._checked = clock()
        self._reading: asyncio.Task[None] | None = None
        # Its own thread: threads for other work may all be busy, and a revoked key must not wait.
        self._reader = ThreadPoolExecutor(1, "engram-keys")
        self.error: str | None = None  # why the current file is not in use
        # Called with the ids of keys that a new file added, removed or changed.
        self.on_change: Callable[[list[str]], None] = lambda ids: None
        if file is not None:
            self._stamp = _stamp(file)
            self._keys = self._identities(read_keys(file))

    @property
    def anonymous(self) -> Identity | None:
        """The identity of callers without a key; None if the server has keys."""
        return LOCAL if not self._builtin and self._path is None else None

    async def identify(self, token: str) -> Identity | RejectedKey:
        """Find the identity of a key, in constant time with respect to the secret."""
        if self._path is not None and self._clock() - self._checked >= CHECK_SECONDS:
            # All requests wait for a read in progress, so none is judged by an older file.
            if self._reading is None or self._reading.done():
                self._reading = asyncio.create_task(self._reload(self._path))
            await asyncio.shield(self._reading)
        sent = hashlib.sha256(token.encode()).digest()
        found = [who for secret, who in self._builtin if hmac.compare_digest(sent, secret)]
        if found:
            return found[0]
        prefix, _, rest = token.partition("_")
        key_id, _, secret = rest.partition("_")
        entry = self._keys.get(key_id) if prefix == PREFIX else None
        return RejectedKey("unknown") if entry is None else self._check(*entry, hash_of(secret))

    def _check(self, key: Key, identity: Identity, sent: str) -> Identity | RejectedKey:
        now = self._now()
        good = hmac.compare_digest(sent, key.secret)
        if key.replaced is not None and now < key.replaced.until.timestamp():
            good |= hmac.compare_digest(sent, key.replaced.secret)
        if not good:
            return RejectedKey("unknown")
        if key.revoked is not None:
            return RejectedKey("revoked", key.id)
        if key.expires is not None and now >= key.expires.timestamp():
            return RejectedKey("expired", key.id)
        return identity

    async def _reload(self, path: Path) -> None:
        """Reload the file if it changed. An invalid or missing file changes nothing."""
        started = self._clock()
        stamp = _stamp(path)
        if stamp == self._stamp and self.error is None:
            self._checked = started
            return
        self._stamp = stamp
        try:
            # In a thread: parsing thousands of keys takes time.
            loop = asyncio.get_running_loop()
            keys = await loop.run_in_executor(self._reader, read_keys, path)
        except KeysError as error:
            if self.error != str(error):
                self.error = str(error)
                _log.error("%s The previous keys stay valid.", error)
        else:
            before, self._keys = self._keys, self._identities(keys)
            self.error = None
            self.on_change(_changed(before, self._keys))
            _log.info("reloaded the keys file: %d keys", len(self._keys))
        finally:
            self._checked = started

    def stop(self) -> None:
        self._reader.shutdown(wait=False, cancel_futures=True)

    def _identities(self, keys: tuple[Key, ...]) -> dict[str, tuple[Key, Identity]]:
        return {key.id: (key, self._identity(key)) for key in keys}

    def _identity(self, key: Key) -> Identity:
        quota = None if key.limits == KeyLimits() else Quota(key.limits, self._clock)
        if before := self._keys.get(key.id):
            previous = before[1].quota
            if previous is not None and previous.limits == key.limits:
                quota = previous  # keep what is used up
        return Identity(f"key:{key.id}", key.name, key.scopes, quota)


def builtin_identities(
    api_key: SecretStr | None, admin_key: SecretStr | None
) -> list[tuple[bytes, Identity]]:
    """The hashed keys of the settings. A single key has every scope."""
    reader: dict[Scope, tuple[str, ...]] = {
        scope: EVERYTHING[scope] for scope in ("predict", "read", "metrics")
    }
    configured = (
        (admin_key, Identity("admin-key", "ENGRAM_ADMIN_KEY", EVERYTHING)),
        (
            api_key,
            Identity("api-key", "ENGRAM_API_KEY", EVERYTHING if admin_key is None else reader),
        ),
    )
    return [
        (hashlib.sha256(key.get_secret_value().encode()).digest(), who)
        for key, who in configured
        if key is not None
    ]


def _changed(
    before: Mapping[str, tuple[Key, Identity]], after: Mapping[str, tuple[Key, Identity]]
) -> list[str]:
    old, new = ({id_: key for id_, (key, _) in each.items()} for each in (before, after))
    return sorted(id_ for id_ in old.keys() | new.keys() if old.get(id_) != new.get(id_))


def _stamp(path: Path) -> tuple[int, ...] | None:
    """File metadata that changes with its content; None if the file is missing."""
    try:
        stat = path.stat()
    except OSError:
        return None
    return stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino, stat.st_size


def utc_now() -> datetime:
    return datetime.now(UTC).replace(microsecond=0)
