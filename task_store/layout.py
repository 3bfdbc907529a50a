"""Where everything lies in a store: the one place that knows its paths.

blobs/sha256/<64 hex>           bundles, written once
log/<20-digit generation>.json  one entry per change, created only if absent
checkpoints/<20 digits>.json    the catalog at a generation, to open quickly
corrections/<task>/<20 digits>.json  what people said about a trained task's answers
replicas/<id>.json              who serves it, each written by its own server
<any of these>#<digits>         still being written, in a folder; listings do not show it
"""

import re
from dataclasses import dataclass

from task_store.errors import InvalidName


@dataclass(frozen=True, slots=True)
class Place:
    """The objects of one kind: `<folder>/<name><suffix>`."""

    folder: str
    names: str  # as a regular expression
    suffix: str = ".json"

    def path(self, name: str) -> str:
        return f"{self.folder}/{name}{self.suffix}"

    def name_at(self, path: str) -> str | None:
        """The name of the object at a path; None if it is of another kind."""
        match = re.fullmatch(rf"{self.folder}/({self.names}){re.escape(self.suffix)}", path)
        return None if match is None else match[1]


BLOBS = Place("blobs/sha256", r"[0-9a-f]{64}", suffix="")
LOG = Place("log", r"\d{20}")
CHECKPOINTS = Place("checkpoints", r"\d{20}")
CORRECTIONS = Place("corrections", r"[a-z0-9][a-z0-9._/-]*/\d{20}")
REPLICAS = Place("replicas", r"[A-Za-z0-9][A-Za-z0-9._-]{0,126}")


def blob_path(digest: str) -> str:
    """Where a bundle is kept, or InvalidName."""
    path = BLOBS.path(digest.removeprefix("sha256:"))
    if digest_at(path) != digest:
        raise InvalidName(
            f"'{digest[:80]}' is no digest: write 'sha256:' and 64 hexadecimal digits.",
            names=[digest],
        )
    return path


def digest_at(path: str) -> str | None:
    """The digest of the bundle that is kept at a path; None if none can be there."""
    name = BLOBS.name_at(path)
    return None if name is None else f"sha256:{name}"


def log_path(generation: int) -> str:
    return LOG.path(f"{generation:020d}")


def checkpoint_path(generation: int) -> str:
    return CHECKPOINTS.path(f"{generation:020d}")
