"""Heartbeats: each server that uses a store regularly writes one small object to it.

    replicas/<id>.json    {"format": 1, "id": "…", "generation": 118, "interval": 5.0, …}

A heartbeat that is no longer written belongs to a stopped server. Its age is measured by the
store's clock, because the clocks of the machines may differ.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Annotated, Literal

from pydantic import Field

from engram_store.events import Record
from engram_store.layout import REPLICAS
from engram_store.objects import Objects


class Heartbeat(Record):
    format: Literal[1] = 1
    id: str
    generation: int  # of the catalog that it serves
    interval: Annotated[float, Field(gt=0)]  # at most this many seconds until the next heartbeat
    hostname: str
    address: str | None
    process: int | None = None  # its number, if several servers share the address
    started: str
    version: str
    backbone: str
    fingerprint: str


@dataclass(frozen=True, slots=True)
class HeartbeatInfo:
    id: str
    modified: datetime  # by the store's clock


class Heartbeats:
    """The heartbeats in a store. Invalid ones are skipped."""

    def __init__(self, objects: Objects) -> None:
        self._objects = objects

    def write(self, beat: Heartbeat) -> None:
        self._objects.put(REPLICAS.path(beat.id), beat.model_dump_json().encode() + b"\n")

    def listing(self) -> list[HeartbeatInfo]:
        """List every heartbeat, without its content."""
        named = self._objects.named(REPLICAS)
        return [HeartbeatInfo(id, info.modified) for id, info in named.items()]

    def read(self, ids: Sequence[str]) -> list[Heartbeat]:
        """Return these heartbeats, without those that were removed meanwhile."""
        contents = self._objects.get_many([REPLICAS.path(id) for id in ids])
        beats = map(Heartbeat.read, contents)
        return [beat for id, beat in zip(ids, beats, strict=True) if beat and beat.id == id]

    def remove(self, id: str) -> None:
        self._objects.delete(REPLICAS.path(id))


def replica_id(hostname: str, unique: str) -> str:
    """Return a valid object name for one run of a server on a machine."""
    host = re.sub(r"[^A-Za-z0-9._-]+", "-", hostname).strip("-.")[:80]
    return f"{host or 'replica'}-{unique}"
