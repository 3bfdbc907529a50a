"""Who serves a store: each replica keeps one small object in it, and writes it anew all the time.

    replicas/<id>.json    {"format": 1, "id": "…", "generation": 118, "interval": 5.0, …}

An object that is no longer written belongs to a replica that is gone. Its age is
counted by the times the store gave, never by the clocks of the machines, which need not agree.
"""

import contextlib
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from task_store.layout import REPLICAS
from task_store.objects import Objects

_FOREIGN_IN_A_NAME = re.compile(r"[^A-Za-z0-9._-]+")


class Heartbeat(BaseModel):
    """What a replica says of itself. Unknown keys are ignored: a later Engram may add some."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    format: Literal[1] = 1
    id: str
    generation: int  # of the catalog it serves
    interval: Annotated[float, Field(gt=0)]  # seconds until it writes again, at the latest
    hostname: str
    address: str | None
    started: str
    version: str
    backbone: str
    fingerprint: str


@dataclass(frozen=True, slots=True)
class Sighting:
    """A heartbeat in the store, and when it was written by the store's own clock."""

    id: str
    modified: datetime


class Heartbeats:
    """The heartbeats in a store. All that is wrong with one is ignored, as if it were not there."""

    def __init__(self, objects: Objects) -> None:
        self._objects = objects

    def write(self, beat: Heartbeat) -> None:
        """Say that this replica is there. StoreUnavailable if the store is not."""
        text = json.dumps(beat.model_dump(mode="json"), separators=(",", ":"))
        self._objects.put(REPLICAS.path(beat.id), text.encode() + b"\n")

    def listing(self) -> list[Sighting]:
        """Every heartbeat, without its content."""
        return [Sighting(id, info.modified) for id, info in self._objects.named(REPLICAS).items()]

    def read(self, ids: Sequence[str]) -> list[Heartbeat]:
        """What these replicas say; those that left meanwhile are left out."""
        beats: list[Heartbeat] = []
        contents = self._objects.get_many([REPLICAS.path(id) for id in ids])
        for id, data in zip(ids, contents, strict=True):
            with contextlib.suppress(ValidationError):
                beat = None if data is None else Heartbeat.model_validate_json(data)
                if beat is not None and beat.id == id:
                    beats.append(beat)
        return beats

    def remove(self, id: str) -> None:
        """This replica leaves."""
        self._objects.delete(REPLICAS.path(id))


def replica_id(hostname: str, unique: str) -> str:
    """A name for one run of a server on a machine, fit for a path."""
    host = _FOREIGN_IN_A_NAME.sub("-", hostname).strip("-.")[:80]
    return f"{host or 'replica'}-{unique}"
