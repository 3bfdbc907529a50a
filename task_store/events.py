"""The log's entries: one per generation, a stamp and an event, flat in JSON.

    {"format": 1, "generation": 7, "id": "…", "time": "2025-01-31T12:00:00.000Z",
     "actor": "ada@lab", "previous": "sha256:…", "kind": "label", "task": "cifar",
     "labels": ["default"], "version": 2, "rollback": false}

Each entry names the hash of the one before it, so that an entry that was altered, lost or put in
later is noticed. Entries of the first releases do not, and are read all the same.

Unknown keys are ignored, so that a later Engram may add some; whatever a reader must not ignore
gets a new `format` or `kind`, which this reader refuses.
"""

import json
from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    TypeAdapter,
    ValidationError,
    model_serializer,
    model_validator,
)

from task_store.bundle import TaskBundle
from task_store.errors import UnsupportedFormat
from task_store.manifest import Digest

LOG_FORMAT: Literal[1] = 1
KINDS = ("publish", "label", "retire", "restore", "collect", "accept")
Count = Annotated[int, Field(ge=1)]


class _Record(BaseModel):
    model_config = ConfigDict(extra="ignore", frozen=True)


class VersionFacts(_Record):
    """What a reader of the catalog knows of a version without its bundle, declared once.

    The event that publishes a version contains it, and so does the version in the catalog; the
    rows of checkpoints and the API's JSON are made from it. A new fact needs a default, so that
    the logs and checkpoints of earlier releases can still be read.
    """

    digest: Digest
    size: Count  # bytes
    extends: tuple[Digest, ...] = ()
    problem: str
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
            problem=bundle.problem,
            classes=bundle.classes,
            memory_tokens=bundle.memory_tokens,
            description=bundle.manifest.description,
            backbone=bundle.manifest.backbone.name,
            fingerprint=bundle.backbone_fingerprint,
        )


class Published(_Record):
    """A new version and the labels that move to it. In JSON its facts lie flat among the rest."""

    kind: Literal["publish"] = "publish"
    task: str
    version: Count
    labels: tuple[str, ...]
    facts: VersionFacts
    note: str = ""  # what is new about it, in the words of who made it

    @model_validator(mode="before")
    @classmethod
    def _read_flat(cls, values: object) -> object:
        if isinstance(values, dict) and "facts" not in values:
            return {**values, "facts": values}
        return values

    @model_serializer
    def _write_flat(self) -> dict[str, Any]:
        # In the order of the first release: the same entry has the same bytes in every release.
        facts = self.facts.model_dump(mode="json")
        return {
            "kind": self.kind,
            "task": self.task,
            "version": self.version,
            "digest": facts.pop("digest"),
            "size": facts.pop("size"),
            "labels": list(self.labels),
            **facts,
            **({"note": self.note} if self.note else {}),
        }


class Labelled(_Record):
    """Labels move to a version, or disappear (`version` is null)."""

    kind: Literal["label"] = "label"
    task: str
    labels: Annotated[tuple[str, ...], Field(min_length=1)]
    version: Count | None
    rollback: bool = False
    note: Annotated[str, Field(exclude_if=lambda note: not note)] = ""


class Retired(_Record):
    """Versions leave the catalog; `whole` when they were all the live ones."""

    kind: Literal["retire"] = "retire"
    task: str
    versions: Annotated[tuple[Count, ...], Field(min_length=1)]
    whole: bool = False


class Restored(_Record):
    """Retired versions come back."""

    kind: Literal["restore"] = "restore"
    task: str
    versions: Annotated[tuple[Count, ...], Field(min_length=1)]


class Collected(_Record):
    """Bundles that no version has are given up: from now on their bytes belong at a new path."""

    kind: Literal["collect"] = "collect"
    digests: Annotated[tuple[Digest, ...], Field(min_length=1)]


class Accepted(_Record):
    """Entries that name none before them, although earlier ones do, are taken as they are."""

    kind: Literal["accept"] = "accept"
    digests: Annotated[tuple[Digest, ...], Field(min_length=1)]  # of those entries' bytes


TaskEvent = Published | Labelled | Retired | Restored
Event = Annotated[TaskEvent | Collected | Accepted, Field(discriminator="kind")]
_EVENT: TypeAdapter[Event] = TypeAdapter(Event)


class Stamp(_Record):
    """When, by whom, and as which generation something happened."""

    format: Literal[1] = LOG_FORMAT
    generation: Count
    # Tells a writer whose answer was lost that the entry it finds in its way is its own.
    id: str
    time: str
    actor: str
    # The hash of the entry before, as its bytes were when this one was written; of nothing if
    # there was none. None in the entries of the first releases.
    previous: Digest | None = None


class Entry(_Record):
    """One entry of the log."""

    stamp: Stamp
    event: Event

    @property
    def generation(self) -> int:
        return self.stamp.generation

    def to_json(self) -> bytes:
        """The entry's bytes in the log."""
        stamp = self.stamp.model_dump(mode="json", exclude_none=True)
        flat = {**stamp, **self.event.model_dump(mode="json")}
        return json.dumps(flat, separators=(",", ":"), ensure_ascii=False).encode() + b"\n"

    @classmethod
    def from_json(cls, data: bytes, generation: int) -> "Entry":
        """Read the entry of a generation: ValueError if damaged, UnsupportedFormat if newer."""
        flat = json.loads(data)
        if not isinstance(flat, dict):
            raise ValueError("not a JSON object")
        written, kind = flat.get("format"), flat.get("kind")
        newer_format = isinstance(written, int) and written > LOG_FORMAT
        if newer_format or (written == LOG_FORMAT and isinstance(kind, str) and kind not in KINDS):
            # Skipping what we do not understand would show another state than newer readers see.
            raise UnsupportedFormat(
                f"Log entry {generation} of the task store has format {written} and kind {kind!r}, "
                f"written by a newer Engram: upgrade this one to read the store."
            )
        try:
            entry = cls(stamp=Stamp.model_validate(flat), event=_EVENT.validate_python(flat))
        except ValidationError as error:
            first = error.errors(include_url=False, include_input=False)[0]
            where = ".".join(str(part) for part in first["loc"] if part != "facts")
            raise ValueError(f"{where}: {first['msg']}") from None
        if entry.generation != generation:
            raise ValueError(f"it says it is generation {entry.generation}")
        return entry
