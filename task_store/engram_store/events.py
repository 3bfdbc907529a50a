"""Log entries: one per generation, a stamp and an event as one flat JSON object.

    {"format": 1, "generation": 7, "id": "…", "time": "2025-01-31T12:00:00.000Z",
     "actor": "ada@lab", "previous": "sha256:…", "kind": "alias", "task": "cifar",
     "aliases": ["default"], "version": 2, "rollback": false}

Each entry has the hash of the one before it, which reveals altered, lost and inserted entries.
Readers ignore unknown keys; a change that they must not ignore needs a new `format` or `kind`,
which they reject.
"""

import json
from datetime import UTC, datetime
from typing import Annotated, Any, Literal, Self

import pydantic
from engram_bundle import Digest, TaskBundle
from engram_bundle.untrusted import first_error
from pydantic import Field, JsonValue, TypeAdapter, ValidationError

from engram_store.errors import UnsupportedFormat

LOG_FORMAT: Literal[1] = 1
KINDS = ("publish", "alias", "canary", "retire", "restore", "purge", "collect")
Count = Annotated[int, Field(ge=1)]


def format_time(time: datetime) -> str:
    """Write a time as RFC 3339 in UTC with milliseconds, so that texts sort as times do."""
    return time.astimezone(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


class Record(pydantic.BaseModel):
    """A JSON object in the store. Unknown keys are ignored: a later release may add some."""

    model_config = pydantic.ConfigDict(extra="ignore", frozen=True)

    @classmethod
    def read(cls, data: bytes | None) -> Self | None:
        """Parse a stored object; None if it is missing or invalid."""
        try:
            return None if data is None else cls.model_validate_json(data)
        except ValidationError:
            return None


class VersionFacts(Record):
    """Facts about a version in log entries, the catalog, checkpoints and the API's JSON."""

    digest: Digest
    size: Count  # bytes
    extends: tuple[Digest, ...] = ()
    task_type: str
    classes: Count
    memory_tokens: int = 0
    description: str = ""
    backbone: str
    fingerprint: Digest  # of the backbone

    @classmethod
    def of(cls, bundle: TaskBundle) -> "VersionFacts":
        return cls(
            digest=bundle.digest,
            size=bundle.size_bytes,
            extends=bundle.extends,
            task_type=bundle.task_type,
            classes=bundle.classes,
            memory_tokens=bundle.memory_tokens,
            description=bundle.manifest.description,
            backbone=bundle.manifest.backbone.name,
            fingerprint=bundle.manifest.backbone.fingerprint,
        )


class Published(Record):
    """A new version, and the aliases that move to it. The facts are flat in JSON."""

    kind: Literal["publish"] = "publish"
    task: str
    version: Count
    aliases: tuple[str, ...]
    facts: VersionFacts
    note: str = ""  # what is new, for the history

    @pydantic.model_validator(mode="before")
    @classmethod
    def _read_flat(cls, values: object) -> object:
        if isinstance(values, dict) and "facts" not in values:
            return {**values, "facts": values}
        return values

    @pydantic.model_serializer
    def _write_flat(self) -> dict[str, Any]:
        facts = self.facts.model_dump(mode="json")
        return {
            "kind": self.kind,
            "task": self.task,
            "version": self.version,
            "digest": facts.pop("digest"),
            "size": facts.pop("size"),
            "aliases": list(self.aliases),
            **facts,
            **({"note": self.note} if self.note else {}),
        }


class AliasMoved(Record):
    """Aliases move to a version, or are removed (`version` is null)."""

    kind: Literal["alias"] = "alias"
    task: str
    aliases: Annotated[tuple[str, ...], Field(min_length=1)]
    version: Count | None
    rollback: bool = False
    note: Annotated[str, Field(exclude_if=lambda note: not note)] = ""
    # What a promotion was decided on.
    evidence: Annotated[dict[str, JsonValue], Field(exclude_if=lambda evidence: not evidence)] = {}


class CanarySet(Record):
    """An alias sends a share of its images to another version, or no longer (`version` is null)."""

    kind: Literal["canary"] = "canary"
    task: str
    alias: str
    version: Count | None
    share: Annotated[float, Field(ge=0, le=1)] = 0.0


class Retired(Record):
    """Versions leave the catalog; `whole` if they were all live versions of the task."""

    kind: Literal["retire"] = "retire"
    task: str
    versions: Annotated[tuple[Count, ...], Field(min_length=1)]
    whole: bool = False


class Restored(Record):
    kind: Literal["restore"] = "restore"
    task: str
    versions: Annotated[tuple[Count, ...], Field(min_length=1)]


class Purged(Record):
    """Versions leave the catalog for good; `whole` if no version of the task is left.

    `digests` are the bundles that no other version has. They are released, as by a collection.
    """

    kind: Literal["purge"] = "purge"
    task: str
    versions: Annotated[tuple[Count, ...], Field(min_length=1)]
    digests: tuple[Digest, ...] = ()
    whole: bool = False


class Collected(Record):
    """Unpublished bundles are released: a later publish of them writes to a new path."""

    kind: Literal["collect"] = "collect"
    digests: Annotated[tuple[Digest, ...], Field(min_length=1)]


TaskEvent = Published | AliasMoved | CanarySet | Retired | Restored | Purged
Event = Annotated[TaskEvent | Collected, Field(discriminator="kind")]
_EVENT: TypeAdapter[Event] = TypeAdapter(Event)


class Stamp(Record):
    format: Literal[1] = LOG_FORMAT
    generation: Count
    id: str  # random, so that a writer whose response was lost recognises its own entry
    time: str
    actor: str
    # The digest of the previous entry as the writer read it; of no bytes if there was none.
    previous: Digest


class Entry(Record):
    stamp: Stamp
    event: Event

    @property
    def generation(self) -> int:
        return self.stamp.generation

    def to_json(self) -> bytes:
        flat = {**self.stamp.model_dump(mode="json"), **self.event.model_dump(mode="json")}
        return json.dumps(flat, separators=(",", ":"), ensure_ascii=False).encode() + b"\n"

    @classmethod
    def from_json(cls, data: bytes | None, generation: int) -> "Entry":
        """Read an entry; raise ValueError if missing or damaged, UnsupportedFormat if newer."""
        if data is None:
            raise ValueError("it is missing or cannot be read")
        flat = json.loads(data)
        if not isinstance(flat, dict):
            raise ValueError("not a JSON object")
        written, kind = flat.get("format"), flat.get("kind")
        newer_format = isinstance(written, int) and written > LOG_FORMAT
        if newer_format or (written == LOG_FORMAT and isinstance(kind, str) and kind not in KINDS):
            # Skipping the entry would show another state than newer readers see.
            raise UnsupportedFormat(
                f"Log entry {generation} of the task store has format {written} and kind {kind!r}, "
                f"written by a newer Engram: upgrade this one to read the store."
            )
        try:
            entry = cls(stamp=Stamp.model_validate(flat), event=_EVENT.validate_python(flat))
        except ValidationError as error:
            raise ValueError(": ".join(first_error(error))) from None
        if entry.generation != generation:
            raise ValueError(f"its generation is {entry.generation}, not {generation}")
        return entry
