"""What the log says: one entry per generation, a stamp and a change, flat in JSON.

    {"format": 1, "generation": 7, "id": "…", "time": "2025-01-31T12:00:00.000Z",
     "actor": "ada@lab", "kind": "label", "task": "cifar", "labels": ["default"], "version": 2,
     "rollback": false}

Unknown keys are ignored, so that a later Engram may add some; whatever a reader must not ignore
gets a new `format` or `kind`, which this reader refuses.
"""

import json
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from task_store.errors import UnsupportedFormat
from task_store.manifest import Digest

LOG_FORMAT: Literal[1] = 1
KINDS = ("publish", "label", "retire", "restore")

Count = Annotated[int, Field(ge=1)]


class _Record(BaseModel):
    model_config = ConfigDict(extra="ignore", frozen=True)


class Publish(_Record):
    """A new version, with the facts about it that a catalog reader wants without the bundle."""

    kind: Literal["publish"] = "publish"
    task: str
    version: Count
    digest: Digest
    size: Count
    labels: tuple[str, ...]
    extends: tuple[Digest, ...] = ()
    problem: str
    classes: Count
    memory_tokens: int = 0
    description: str = ""
    backbone: str
    fingerprint: Digest


class Label(_Record):
    """Labels move to a version, or disappear (`version` is null)."""

    kind: Literal["label"] = "label"
    task: str
    labels: Annotated[tuple[str, ...], Field(min_length=1)]
    version: Count | None
    rollback: bool = False


class Retire(_Record):
    """Versions leave the catalog; `whole` when they were all the live ones."""

    kind: Literal["retire"] = "retire"
    task: str
    versions: Annotated[tuple[Count, ...], Field(min_length=1)]
    whole: bool = False


class Restore(_Record):
    """Retired versions come back."""

    kind: Literal["restore"] = "restore"
    task: str
    versions: Annotated[tuple[Count, ...], Field(min_length=1)]


Change = Publish | Label | Retire | Restore
_CHANGE: TypeAdapter[Change] = TypeAdapter(Annotated[Change, Field(discriminator="kind")])


class Stamp(_Record):
    """When, by whom, and as which generation a change was made."""

    format: Literal[1] = LOG_FORMAT
    generation: Count
    # Tells a writer whose answer was lost that the entry it finds in its way is its own.
    id: str
    time: str
    actor: str


class Entry(_Record):
    """One entry of the log."""

    stamp: Stamp
    change: Change

    @property
    def generation(self) -> int:
        return self.stamp.generation

    def to_json(self) -> bytes:
        """The entry's bytes in the log."""
        flat = {**self.stamp.model_dump(mode="json"), **self.change.model_dump(mode="json")}
        return json.dumps(flat, separators=(",", ":"), ensure_ascii=False).encode() + b"\n"

    @classmethod
    def from_json(cls, data: bytes, generation: int) -> "Entry":
        """Read the entry of a generation: ValueError if damaged, UnsupportedFormat if newer."""
        flat = json.loads(data)
        if not isinstance(flat, dict):
            raise ValueError("not a JSON object")
        _refuse_newer(flat, generation)
        try:
            entry = cls(stamp=Stamp.model_validate(flat), change=_CHANGE.validate_python(flat))
        except ValidationError as error:
            first = error.errors(include_url=False, include_input=False)[0]
            where = ".".join(str(part) for part in first["loc"])
            raise ValueError(f"{where}: {first['msg']}") from None
        if entry.generation != generation:
            raise ValueError(f"it says it is generation {entry.generation}")
        return entry


def _refuse_newer(flat: dict[str, object], generation: int) -> None:
    """Skipping what we do not understand would show another state than newer readers see."""
    written, kind = flat.get("format"), flat.get("kind")
    newer_format = isinstance(written, int) and written > LOG_FORMAT
    if newer_format or (written == LOG_FORMAT and isinstance(kind, str) and kind not in KINDS):
        raise UnsupportedFormat(
            f"Log entry {generation} of the task store has format {written} and kind {kind!r}, "
            f"written by a newer Engram: upgrade this one to read the store."
        )
