"""Where everything lies in a store: the one place that knows its paths.

blobs/sha256/<64 hex>           bundles, written once
log/<20-digit generation>.json  one entry per change, created only if absent
checkpoints/<20 digits>.json    the catalog at a generation, to open quickly
replicas/<id>.json              who serves it, each written by its own server
<any of these>#<digits>         being written to a folder; listings do not show it
"""

import re
import secrets

from task_store.errors import InvalidName

BLOBS = "blobs"
LOG = "log"
CHECKPOINTS = "checkpoints"
REPLICAS = "replicas"

_DIGEST = re.compile(r"sha256:([0-9a-f]{64})")
_BLOB = re.compile(rf"{BLOBS}/sha256/([0-9a-f]{{64}})")
_LOG_ENTRY = re.compile(rf"{LOG}/(\d{{20}})\.json")
_CHECKPOINT = re.compile(rf"{CHECKPOINTS}/(\d{{20}})\.json")
_HEARTBEAT = re.compile(rf"{REPLICAS}/([A-Za-z0-9][A-Za-z0-9._-]{{0,126}})\.json")
_STAGED = re.compile(r".+#\d+")


def blob_path(digest: str) -> str:
    """Where a bundle is kept, or InvalidName."""
    match = _DIGEST.fullmatch(digest)
    if match is None:
        raise InvalidName(
            f"'{digest[:80]}' is no digest: write 'sha256:' and 64 hexadecimal digits.",
            names=[digest],
        )
    return f"{BLOBS}/sha256/{match[1]}"


def digest_at(path: str) -> str | None:
    """The digest of the bundle that is kept at a path; None if it is no bundle's."""
    match = _BLOB.fullmatch(path)
    return None if match is None else f"sha256:{match[1]}"


def log_path(generation: int) -> str:
    """Where the entry of a generation is kept."""
    return f"{LOG}/{generation:020d}.json"


def log_generation(path: str) -> int | None:
    """The generation of the log entry at a path; None if it is no log entry's."""
    match = _LOG_ENTRY.fullmatch(path)
    return None if match is None else int(match[1])


def checkpoint_path(generation: int) -> str:
    """Where the catalog at a generation is kept."""
    return f"{CHECKPOINTS}/{generation:020d}.json"


def checkpoint_generation(path: str) -> int | None:
    """The generation of the checkpoint at a path; None if it is no checkpoint's."""
    match = _CHECKPOINT.fullmatch(path)
    return None if match is None else int(match[1])


def heartbeat_path(replica: str) -> str:
    """Where a replica says that it is there."""
    return f"{REPLICAS}/{replica}.json"


def replica_at(path: str) -> str | None:
    """The id of the replica whose heartbeat is at a path; None if it is no heartbeat's."""
    match = _HEARTBEAT.fullmatch(path)
    return None if match is None else match[1]


def staging_name(name: str) -> str:
    """A new name for a file while it is written, as object_store forms them."""
    return f"{name}#{secrets.randbelow(10**18)}"


def is_staging_name(name: str) -> bool:
    return _STAGED.fullmatch(name) is not None
