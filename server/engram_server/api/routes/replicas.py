"""`/replicas`: the servers that share the store, and waiting for them."""

import time
from dataclasses import dataclass
from typing import Annotated, Literal

import anyio
from anyio import to_thread
from engram_bundle import TaskStoreError
from fastapi import APIRouter, Depends, Query, Response
from pydantic import Field

from engram_server.api.auth import requires
from engram_server.api.dependencies import EngineDep, FairRoute, Strict
from engram_server.api.problems import responses
from engram_server.engine.engine import Engine
from engram_server.engine.replicas import Replica, Replicas
from engram_server.engine.types import short_name
from engram_server.errors import InvalidRequest

router = APIRouter(tags=["replicas"], dependencies=requires("read", "admin"), route_class=FairRoute)

LONGEST_WAIT_SECONDS = 600.0
DEFAULT_WAIT_SECONDS = 30.0
PAUSE_SECONDS = 0.1

_STORE_DOWN = "the heartbeats in the task store cannot be read; see the server log"


class ReplicaResult(Strict):
    """A server, as described by its last heartbeat."""

    id: str = Field(description="Changes with every restart.")
    this: bool = Field(description="Whether it is the server that responds.")
    generation: int = Field(description="The generation it serves.")
    age_seconds: float = Field(description="Age of the heartbeat.")
    hostname: str
    address: str | None = Field(examples=["http://10.0.0.7:8000"])
    process: int | None = Field(
        description="Its number, from 1, if several processes share the address."
    )
    started: str = Field(examples=["2026-01-31T12:00:00.000Z"])
    version: str
    backbone: str
    fingerprint: str

    @classmethod
    def of(cls, replica: Replica) -> "ReplicaResult":
        return cls(
            **replica.beat.model_dump(exclude={"format", "interval", "backbone"}),
            this=replica.me,
            age_seconds=round(replica.age_seconds, 3),
            backbone=short_name(replica.beat.backbone),
        )


class ReplicaList(Strict):
    generation: int = Field(description="Newest generation that this server has seen.")
    heartbeats: bool = Field(description="False: this server writes and reads no heartbeats.")
    error: str | None = Field(description="Why other replicas are unknown.")
    replicas: list[ReplicaResult] = Field(description="Live replicas, by id.")


@router.get("/replicas", responses=responses(401, 503))
def list_replicas(engine: EngineDep, response: Response) -> ReplicaList:
    """List the live servers of this store and the generation each serves."""
    response.headers["Cache-Control"] = "no-store"
    live, error = _live(engine)
    return ReplicaList(
        generation=engine.status.generation_seen,
        heartbeats=engine.replicas is not None,
        error=error,
        replicas=[ReplicaResult.of(each) for each in live],
    )


def _live(engine: Engine) -> tuple[list[Replica], str | None]:
    alone = [Replica(engine.heartbeat(), 0.0, me=True)]
    if engine.replicas is None:
        return alone, None
    try:
        return engine.replicas.live(), None
    except TaskStoreError:
        return alone, _STORE_DOWN


# Waiting until all replicas serve a change: `?wait=all&timeout=30`


class WaitResult(Strict):
    """The replicas that serve a change, after `wait=all`."""

    serving: list[str] = Field(description="Ids of the replicas that serve it.")
    behind: list[str] = Field(description="Ids of the replicas that do not yet.")
    error: str | None = Field(default=None, description="Why the replicas are unknown.")

    @property
    def complete(self) -> bool:
        return not self.behind and self.error is None


@dataclass(frozen=True, slots=True)
class Wait:
    """A wait for all replicas; without `replicas`, no wait."""

    replicas: Replicas | None
    seconds: float

    async def until_served(self, generation: int) -> WaitResult | None:
        """Wait until every live replica serves a generation, or until the timeout."""
        if self.replicas is None:
            return None
        deadline = time.monotonic() + self.seconds
        result = WaitResult(serving=[], behind=[])
        while True:
            result = await to_thread.run_sync(_check, self.replicas, generation, result)
            left = deadline - time.monotonic()
            if result.complete or left <= 0:
                return result
            await anyio.sleep(min(PAUSE_SECONDS, left))


def _check(replicas: Replicas, generation: int, before: WaitResult) -> WaitResult:
    try:
        live = replicas.live()
    except TaskStoreError:
        return before.model_copy(update={"error": _STORE_DOWN})
    return WaitResult(
        serving=[each.beat.id for each in live if each.beat.generation >= generation],
        behind=[each.beat.id for each in live if each.beat.generation < generation],
    )


async def get_wait(
    engine: EngineDep,
    wait: Annotated[
        Literal["all"] | None,
        Query(description="`all`: respond when every live replica serves the change."),
    ] = None,
    timeout: Annotated[
        float, Query(ge=0, le=LONGEST_WAIT_SECONDS, description="Seconds to wait before 202.")
    ] = DEFAULT_WAIT_SECONDS,
) -> Wait:
    if wait is None:
        return Wait(None, timeout)
    if engine.replicas is None:
        raise InvalidRequest(
            "This server writes no heartbeats (ENGRAM_HEARTBEAT_SECONDS is 0), so it does not know "
            "the other replicas: omit `wait`."
        )
    return Wait(engine.replicas, timeout)


WaitDep = Annotated[Wait, Depends(get_wait)]
