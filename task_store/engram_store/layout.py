"""Paths in a store.

blobs/sha256/<64 hex>                bundles, written once
blobs/sha256/<64 hex>-<20 digits>    bundles written after a collection released the path above
log/<20-digit generation>.json       one entry per change, created only if absent
checkpoints/<20 digits>.json         the catalog at a generation, to open quickly
corrections/<task>/<20 digits>.json  corrections of a trained task's predictions
corrections/<task>/<20 digits>-<6 digits>.json   the same after a removal: a later revision
drafts/<32 hex>/<32 hex>-<32 hex>-<6 digits>-<64 hex>   parts of uploads that are not published yet
evidence/<task>/<replica id>.json    how versions of a task compare, as counted by one server
replicas/<id>.json                   heartbeats of the servers that use the store
clock/<32 hex>.json                  written to read the store's clock, then deleted
<any of these>#<digits>              a file being written, in a local folder; never listed
"""

import re
from dataclasses import dataclass

from engram_bundle.names import format_digest, parse_digest


@dataclass(frozen=True, slots=True)
class ObjectKind:
    """The objects with paths `<folder>/<name><suffix>`."""

    folder: str
    names: str  # a regular expression
    suffix: str = ".json"

    def path(self, name: str) -> str:
        return f"{self.folder}/{name}{self.suffix}"

    def in_folder(self, path: str) -> bool:
        """Whether a path is in the folder, whatever its name."""
        return path.startswith(f"{self.folder}/")

    def name_at(self, path: str) -> str | None:
        """Return the name in a path, or None if the path is of another kind."""
        match = re.fullmatch(rf"{self.folder}/({self.names}){re.escape(self.suffix)}", path)
        return None if match is None else match[1]


BLOBS = ObjectKind("blobs/sha256", r"[0-9a-f]{64}(?:-\d{20})?", suffix="")
LOG = ObjectKind("log", r"\d{20}")
CHECKPOINTS = ObjectKind("checkpoints", r"\d{20}")
CORRECTIONS = ObjectKind("corrections", r"[a-z0-9][a-z0-9._/-]*/\d{20}(?:-\d{6})?")
_DRAFT = r"[0-9a-f]{32}/[0-9a-f]{32}-[0-9a-f]{32}-\d{6}-(?:[0-9a-f]{64}|published)"
DRAFTS = ObjectKind("drafts", _DRAFT, suffix="")
REPLICAS = ObjectKind("replicas", r"[A-Za-z0-9][A-Za-z0-9._-]{0,126}")
EVIDENCE = ObjectKind("evidence", r"[a-z0-9][a-z0-9._/-]*/[A-Za-z0-9][A-Za-z0-9._-]{0,126}")
CLOCK = ObjectKind("clock", r"[0-9a-f]{32}")


def blob_path(digest: str, collected: int = 0) -> str:
    """Return the path of a bundle last collected at a generation (0: never), or InvalidName."""
    name = parse_digest(digest).hex()
    return BLOBS.path(f"{name}-{collected:020d}" if collected else name)


def blob_at(path: str) -> tuple[str, int] | None:
    """Return the arguments with which `blob_path` gives this path, or None."""
    name = BLOBS.name_at(path)
    if name is None:
        return None
    digest, _, collected = name.partition("-")
    blob = format_digest(bytes.fromhex(digest)), int(collected or 0)
    return blob if blob_path(*blob) == path else None


def correction_path(task: str, number: int, revision: int = 0) -> str:
    """Return the path of a record of corrections; revision 0 is the record as it was created."""
    return CORRECTIONS.path(f"{task}/{number:020d}" + (f"-{revision:06d}" if revision else ""))


def correction_at(path: str) -> tuple[str, int, int] | None:
    """Return the arguments with which `correction_path` gives this path, or None."""
    name = CORRECTIONS.name_at(path)
    if name is None:
        return None
    task, _, last = name.rpartition("/")
    number, _, revision = last.partition("-")
    record = task, int(number), int(revision or 0)
    return record if correction_path(*record) == path else None


def evidence_at(path: str) -> str | None:
    """Return the task whose evidence is at a path, or None."""
    name = EVIDENCE.name_at(path)
    return None if name is None else name.rpartition("/")[0]


def log_path(generation: int) -> str:
    return LOG.path(f"{generation:020d}")


def checkpoint_path(generation: int) -> str:
    return CHECKPOINTS.path(f"{generation:020d}")
