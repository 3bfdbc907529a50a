"""Waiting until all replicas serve a change: `?wait=all&timeout=30`."""

import time
from dataclasses import dataclass
from typing import Annotated, Literal

import anyio
from anyio import to_thread
from fastapi import Depends, Query

from server.api.answers import Json
from server.api.deps import EngineDep
from server.api.errors import InvalidRequest
from server.engine.replicas import Replicas
from task_store import TaskStoreError

LONGEST_SECONDS = 600.0
DEFAULT_SECONDS = 30.0
_PAUSE_SECONDS = 0.1


@dataclass(frozen=True, slots=True)
class Waited:
    """Who serves a change, and who does not yet."""

    serving: tuple[str, ...]
    behind: tuple[str, ...]
    error: str | None = None  # why that is not known better

    @property
    def complete(self) -> bool:
        return not self.behind and self.error is None

    def to_json(self) -> Json:
        return {"serving": list(self.serving), "behind": list(self.behind), "error": self.error}


@dataclass(frozen=True, slots=True)
class Wait:
    """What a caller wants to wait for; nothing without `replicas`."""

    replicas: Replicas | None
    seconds: float

    async def until_served(self, generation: int) -> Waited | None:
        """When every live replica serves a generation, or the time is over; None if not asked."""
        if self.replicas is None:
            return None
        deadline = time.monotonic() + self.seconds
        waited = Waited((), ())
        while True:
            waited = await to_thread.run_sync(_look, self.replicas, generation, waited)
            left = deadline - time.monotonic()
            if waited.complete or left <= 0:
                return waited
            await anyio.sleep(min(_PAUSE_SECONDS, left))


async def get_wait(
    engine: EngineDep,
    wait: Annotated[
        Literal["all"] | None,
        Query(description="`all`: answer when every live replica serves the change."),
    ] = None,
    timeout: Annotated[
        float, Query(ge=0, le=LONGEST_SECONDS, description="Seconds to wait; then 202.")
    ] = DEFAULT_SECONDS,
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


def _look(replicas: Replicas, generation: int, before: Waited) -> Waited:
    try:
        live = replicas.live()
    except TaskStoreError:
        error = "the task store cannot be asked who is there; the log says why"
        return Waited(before.serving, before.behind, error)
    serving = tuple(each.id for each in live if each.generation >= generation)
    return Waited(serving, tuple(each.id for each in live if each.generation < generation))
