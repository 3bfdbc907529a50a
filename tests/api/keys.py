"""Keys files for tests."""

from datetime import UTC, datetime, timedelta
from pathlib import Path

from engram_server.access.keys import Key, KeysDocument, hash_of, token_of
from engram_server.access.quotas import KeyLimits

NOW = datetime.now(UTC)
PAST, FUTURE = NOW - timedelta(hours=1), NOW + timedelta(hours=1)


def secret_of(key_id: str) -> str:
    return f"secret_of-{key_id}" * 3


def make_key(key_id: str, limits: KeyLimits | None = None, **members) -> Key:
    """A key whose secret follows from its id; `scopes` as a mapping to lists of patterns."""
    return Key(
        id=key_id,
        name=f"the key of {key_id}",
        secret=hash_of(secret_of(key_id)),
        limits=limits or KeyLimits(),
        created=PAST,
        **members,
    )


def write_keys(path: Path, *keys: Key) -> Path:
    path.write_text(KeysDocument(keys=keys).model_dump_json())
    return path


def sends(key_id: str) -> dict[str, str]:
    """The header of a request with a key."""
    return {"X-API-Key": token_of(key_id, secret_of(key_id))}
