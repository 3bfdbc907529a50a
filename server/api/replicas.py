"""`/replicas`: which servers share the store, what each serves, and waiting for all of them."""

import time
from dataclasses import dataclass
from typing import Annotated, Literal

import anyio
from anyio import to_thread
from fastapi import APIRouter, Depends, Query, Response
from pydantic import Field

from server.api.auth import requires
from server.api.http import EngineDep, Strict, short_name
from server.api.problems import InvalidRequest, responses
from server.engine.engine import Engine
from server.engine.replicas import Replica, Replicas
from task_store import TaskStoreError

router = APIRouter(tags=["replicas"], dependencies=requires("read", "admin"))

LONGEST_WAIT_SECONDS = 600.0
DEFAULT_WAIT_SECONDS = 30.0
PAUSE_SECONDS = 0.1

_STORE_AWAY = "the task store cannot be asked who is there; the log says why"


class ReplicaResult(Strict):
    """One server of the store, as its last heartbeat tells it."""

    id: str = Field(description="Of this run of the server; another after a restart.")
    this: bool = Field(description="Whether it is the one that answers.")
    generation: int = Field(description="Of the catalog it serves.")
    age_seconds: float = Field(description="Since it last said so.")
    hostname: str
    address: str | None = Field(examples=["http://10.0.0.7:8000"])
    started: str = Field(examples=["2026-01-31T12:00:00.000Z"])
    version: str
    backbone: str
    fingerprint: str

    @classmethod
    def of(cls, replica: Replica) -> "ReplicaResult":
        beat = replica.beat
        return cls(
            id=beat.id,
            this=replica.me,
            generation=beat.generation,
            age_seconds=round(replica.age_seconds, 3),
            hostname=beat.hostname,
            address=beat.address,
            started=beat.started,
            version=beat.version,
            backbone=short_name(beat.backbone),
            fingerprint=beat.fingerprint,
        )


class ReplicaList(Strict):
    generation: int = Field(description="Newest generation that this server has seen.")
    heartbeats: bool = Field(description="False: this server does not look for others.")
    error: str | None = Field(description="Why the others are not known: the store is away.")
    replicas: list[ReplicaResult] = Field(description="The live ones, by id.")


@router.get("/replicas", responses=responses(401, 503))
def list_replicas(engine: EngineDep, response: Response) -> ReplicaList:
    """The live servers of this store and the generation each serves."""
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
        return alone, _STORE_AWAY


# Waiting until all replicas serve a change: `?wait=all&timeout=30`


class WaitResult(Strict):
    """Who serves a change, after `wait=all`."""

    serving: list[str] = Field(description="Ids of the live replicas that do.")
    behind: list[str] = Field(description="Of those that did not when the time was over.")
    error: str | None = Field(
        default=None, description="Why that is not known: the store was away."
    )

    @property
    def complete(self) -> bool:
        return not self.behind and self.error is None


@dataclass(frozen=True, slots=True)
class Wait:
    """How long to wait for all replicas; without `replicas` nobody is waited for."""

    replicas: Replicas | None
    seconds: float

    async def until_served(self, generation: int) -> WaitResult | None:
        """When every live replica serves a generation, or the time is over; None: no waiting."""
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
        return before.model_copy(update={"error": _STORE_AWAY})
    return WaitResult(
        serving=[each.beat.id for each in live if each.beat.generation >= generation],
        behind=[each.beat.id for each in live if each.beat.generation < generation],
    )


async def get_wait(
    engine: EngineDep,
    wait: Annotated[
        Literal["all"] | None,
        Query(description="`all`: answer when every live replica serves the change."),
    ] = None,
    timeout: Annotated[
        float, Query(ge=0, le=LONGEST_WAIT_SECONDS, description="Seconds to wait; then 202.")
    ] = DEFAULT_WAIT_SECONDS,
) -> Wait:
    if wait is None:
        return Wait(None, timeout)
    if engine.replicas is None:
        raise InvalidRequest(
            "This server sends no heartbeats (ENGRAM_HEARTBEAT_SECONDS is 0), so it does not know "
            "the other replicas and cannot wait for them: leave `wait` out."
        )
    return Wait(engine.replicas, timeout)


WaitDep = Annotated[Wait, Depends(get_wait)]
