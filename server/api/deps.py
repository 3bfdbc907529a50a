"""What routes depend on: the running server, the engine, and who is asking."""

import hmac
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated
from urllib.parse import urlsplit

import anyio
from fastapi import Depends, Header, Request
from pydantic import SecretStr

from server.api.errors import CrossOrigin, KeyRequired, NotPermitted, NotStarted
from server.api.middleware import RequestRecord
from server.engine.engine import Engine
from server.metrics import Metrics
from server.settings import Settings

if TYPE_CHECKING:  # of an extra, which need not be installed
    from server.tracing import Tracing


@dataclass(eq=False)
class Runtime:
    """One running server: what its routes share."""

    settings: Settings
    metrics: Metrics
    tracing: "Tracing | None" = None
    # Done when the engine takes requests, or with what stopped it.
    starting: Future[Engine] = field(default_factory=Future)
    draining: bool = False
    # One change at a time, so that a condition (If-Match) still holds when the change is made, and
    # a hundred uploads do not take the cores from the traffic.
    changes: anyio.CapacityLimiter = field(default_factory=lambda: anyio.CapacityLimiter(1))
    checks: anyio.CapacityLimiter = field(default_factory=lambda: anyio.CapacityLimiter(1))

    @property
    def engine(self) -> Engine:
        """The engine, or NotStarted."""
        if not self.starting.done():
            raise NotStarted("The server is starting: the backbone is being loaded.")
        if self.starting.cancelled() or self.starting.exception() is not None:
            raise NotStarted("The server could not start; its log says why.")
        return self.starting.result()

    @property
    def started(self) -> bool:
        return (
            self.starting.done()
            and not self.starting.cancelled()
            and self.starting.exception() is None
        )

    @property
    def known_tasks(self) -> tuple[str, ...]:
        """Names to suggest; none before the start."""
        return self.engine.snapshot.catalog.names if self.started else ()

    @property
    def reasons(self) -> tuple[str, ...]:
        """Why no traffic should be sent here; empty when it may."""
        found = ["the server is shutting down"] if self.draining else []
        try:
            found += self.engine.status.reasons
        except NotStarted as error:
            found.append(str(error))
        return tuple(dict.fromkeys(found))


# All asynchronous, though none waits: FastAPI sends plain functions through its thread pool.


async def get_runtime(request: Request) -> Runtime:
    return _runtime(request)


async def get_engine(request: Request) -> Engine:
    return _runtime(request).engine


async def get_record(request: Request) -> RequestRecord:
    record: RequestRecord = request.state.record
    return record


RuntimeDep = Annotated[Runtime, Depends(get_runtime)]
EngineDep = Annotated[Engine, Depends(get_engine)]
RecordDep = Annotated[RequestRecord, Depends(get_record)]


async def require_reader(request: Request) -> None:
    """The key for predicting and reading, if one is set. The admin key does too."""
    settings = _runtime(request).settings
    if settings.api_key is None:
        return
    if not _matches(request, settings.api_key, settings.admin_key):
        raise KeyRequired(_how("predicting and reading"))


async def require_admin(request: Request) -> None:
    """The key for changing tasks; where only one key is set, that one."""
    _refuse_other_sites(request)
    settings = _runtime(request).settings
    key = settings.admin_key or settings.api_key
    if key is None or _matches(request, key):
        return
    if _matches(request, settings.api_key):
        raise NotPermitted("This key predicts and reads; changing tasks needs the admin key.")
    raise KeyRequired(_how("changing tasks"))


async def catch_up(
    request: Request,
    engine: EngineDep,
    x_min_generation: Annotated[
        int | None,
        Header(
            ge=0,
            le=10**18 - 1,
            description="Answer from this generation of the catalog or a later one.",
        ),
    ] = None,
) -> None:
    """Reach the generation the caller knows of, and the version in the path, if there is one."""
    asked = request.path_params
    name, version = asked.get("task") or asked.get("name"), asked.get("version")
    await engine.snapshot_for(None if version is None else [f"{name}@{version}"], x_min_generation)


READER = [Depends(require_reader)]
# In this order: who may not read makes nobody look at the store.
CAUGHT_UP = [*READER, Depends(catch_up)]
ADMIN = [Depends(require_admin)]


def _runtime(request: Request) -> Runtime:
    runtime: Runtime = request.app.state.runtime
    return runtime


def _how(what: str) -> str:
    return f"For {what} send the key as 'Authorization: Bearer …' or 'X-API-Key: …'."


def _matches(request: Request, *keys: SecretStr | None) -> bool:
    """Whether the key presented is one of these, in a time that does not tell how nearly."""
    presented = _presented(request)
    secrets = (key.get_secret_value().encode() for key in keys if key is not None)
    same = [hmac.compare_digest(presented, secret) for secret in secrets]
    return any(same)


def _presented(request: Request) -> bytes:
    scheme, _, token = request.headers.get("Authorization", "").partition(" ")
    key = token.strip() if scheme.lower() == "bearer" else request.headers.get("X-API-Key", "")
    return key.encode()


def _refuse_other_sites(request: Request) -> None:
    """A page elsewhere may make a browser post here; what it may not is change tasks."""
    origin = request.headers.get("Origin")
    if origin is not None and urlsplit(origin).netloc != request.headers.get("Host"):
        raise CrossOrigin("Tasks are not changed on behalf of pages from other sites.")
