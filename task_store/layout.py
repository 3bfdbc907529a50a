"""Where everything lies in a store: the one place that knows its paths.

blobs/sha256/<64 hex>              bundles, written once
blobs/sha256/<64 hex>-<20 digits>  those written after a collection gave up what was there before
log/<20-digit generation>.json     one entry per change, created only if absent
checkpoints/<20 digits>.json       the catalog at a generation, to open quickly
corrections/<task>/<20 digits>.json  what people said about a trained task's answers
replicas/<id>.json                 who serves it, each written by its own server
clock/<32 hex>.json                written to learn the store's time, and removed at once
<any of these>#<digits>            still being written, in a folder; listings do not show it
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

    def holds(self, path: str) -> bool:
        """Whether a path is in the folder, whatever its name."""
        return path.startswith(f"{self.folder}/")

    def name_at(self, path: str) -> str | None:
        """The name of the object at a path; None if it is of another kind."""
        match = re.fullmatch(rf"{self.folder}/({self.names}){re.escape(self.suffix)}", path)
        return None if match is None else match[1]


BLOBS = Place("blobs/sha256", r"[0-9a-f]{64}(?:-\d{20})?", suffix="")
LOG = Place("log", r"\d{20}")
CHECKPOINTS = Place("checkpoints", r"\d{20}")
CORRECTIONS = Place("corrections", r"[a-z0-9][a-z0-9._/-]*/\d{20}")
REPLICAS = Place("replicas", r"[A-Za-z0-9][A-Za-z0-9._-]{0,126}")
CLOCK = Place("clock", r"[0-9a-f]{32}")


def blob_path(digest: str, collected: int = 0) -> str:
    """Where a bundle is kept that was last given up at a generation (0: never), or InvalidName."""
    if re.fullmatch(r"sha256:[0-9a-f]{64}", digest) is None:
        raise InvalidName(
            f"'{digest[:80]}' is no digest: write 'sha256:' and 64 hexadecimal digits.",
            names=[digest],
        )
    name = digest.removeprefix("sha256:")
    return BLOBS.path(f"{name}-{collected:020d}" if collected else name)


def blob_at(path: str) -> tuple[str, int] | None:
    """The digest and generation of which `blob_path` makes this path; None if of none."""
    name = BLOBS.name_at(path)
    if name is None:
        return None
    digest, _, collected = name.partition("-")
    blob = f"sha256:{digest}", int(collected or 0)
    return blob if blob_path(*blob) == path else None


def log_path(generation: int) -> str:
    return LOG.path(f"{generation:020d}")


def checkpoint_path(generation: int) -> str:
    return CHECKPOINTS.path(f"{generation:020d}")
