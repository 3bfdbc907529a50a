"""The state of one running server and of each request."""

import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

from engram_server.access.identity import Identity
from engram_server.access.keys import Keys
from engram_server.edge.proxies import TrustedProxies
from engram_server.engine.engine import Engine
from engram_server.engine.shares import FairExecutor, Pool
from engram_server.errors import NotStarted
from engram_server.observability.audit import AuditLog
from engram_server.observability.metrics import Metrics
from engram_server.processes.process import Process
from engram_server.processes.siblings import Siblings
from engram_server.settings import Settings

if TYPE_CHECKING:  # the extras `openid` and `tracing` may not be installed
    from engram_server.access.oidc import OpenIdTokens
    from engram_server.api.problems import Kind
    from engram_server.observability.tracing import Tracing


T = TypeVar("T")

_LONGEST_PAUSE = 0.05  # seconds
_READS = 8  # that run or wait for a thread: reading competes with passes for the interpreter


class Pools:
    """What all callers share, and each has a share of; a caller that gets no more gets 429."""

    def __init__(self, settings: Settings) -> None:
        def pool(limit: int) -> Pool:
            return Pool(limit, shared=settings.several_callers)

        self.body_bytes = pool(settings.inflight_body_bytes)
        self.bundle_bytes = pool(settings.inflight_bundle_bytes)
        self.answer_bytes = pool(settings.inflight_answer_bytes)
        self.validations = pool(settings.max_validations)
        self.downloads = pool(settings.max_downloads)
        self.reads = pool(_READS)


class Threads:
    """Threads for work of requests, which callers with waiting work use in turn.

    While `predicting` returns True, other work than that of predictions starts later.
    """

    def __init__(self, predicting: Callable[[], bool]) -> None:
        self._predicting = predicting
        # One change at a time: many uploads must not take the cores from predictions.
        self.changes = FairExecutor(1, "engram-change", busy=predicting)
        self.checks = FairExecutor(2, "engram-check", per_caller=1, busy=predicting)
        self.solving = FairExecutor(2, "engram-solve", per_caller=1, busy=predicting)
        # Few: they compete with the pass for the interpreter lock.
        self.reads = FairExecutor(4, "engram-read", per_caller=2, busy=predicting)
        # Parsing and writing JSON holds the interpreter lock: more threads would not be faster.
        self.json = FairExecutor(2, "engram-json")

    def paced(self, parts: Iterator[T]) -> Iterator[T]:
        """Yield the parts of a large piece of work in a thread.

        While images are in flight, it pauses after each part for as long as the part took, so that
        a pass gets half of the interpreter's time at least.
        """
        started = time.monotonic()
        for part in parts:
            yield part
            if self._predicting():
                time.sleep(min(time.monotonic() - started, _LONGEST_PAUSE))
            started = time.monotonic()

    def shutdown(self) -> None:
        for executor in (self.changes, self.checks, self.solving, self.reads, self.json):
            executor.shutdown()


@dataclass(eq=False, kw_only=True)
class Runtime:
    """One running server. `create_app` builds it; the engine follows when it has started."""

    settings: Settings
    metrics: Metrics
    keys: Keys
    pools: Pools
    audit: AuditLog | None
    proxies: TrustedProxies | None
    tracing: "Tracing | None"
    openid: "OpenIdTokens | None"
    process: Process | None = None  # one of several
    # Has the engine as its result when it accepts requests, or the error that stopped it.
    starting: Future[Engine] = field(default_factory=Future)
    draining: bool = False
    grpc_port: int | None = None  # once it listens
    _engine: Engine | None = None

    def __post_init__(self) -> None:
        self.threads = Threads(self._is_predicting)
        self.siblings = None if self.process is None else Siblings(self.process, self.metrics)

    def _is_predicting(self) -> bool:
        return self._engine is not None and self._engine.predictions.pending_images > 0

    async def render_metrics(self, accept: str) -> tuple[bytes, str]:
        """The metrics of all processes in the format that a scraper accepts."""
        if self.siblings is None:
            return self.metrics.render(accept)
        return await self.siblings.render(accept)

    @property
    def anonymous(self) -> Identity | None:
        """The identity of callers without credentials; None if they are required."""
        return self.keys.anonymous if self.openid is None else None

    @property
    def engine(self) -> Engine:
        """The engine; raises NotStarted."""
        if self._engine is not None:
            return self._engine
        if not self.starting.done():
            raise NotStarted("The server is starting: the backbone is being loaded.")
        if not self.started:
            raise NotStarted("The server failed to start; see its log.")
        # Kept, because reading a future takes a lock.
        self._engine = self.starting.result()
        return self._engine

    @property
    def started(self) -> bool:
        starting = self.starting
        return starting.done() and not starting.cancelled() and starting.exception() is None

    @property
    def known_tasks(self) -> tuple[str, ...]:
        """Task names for suggestions; empty before the start."""
        return self.engine.tasks.snapshot.catalog.names if self.started else ()

    @property
    def broken(self) -> tuple[str, ...]:
        """Failures that need a new process."""
        return self.engine.broken if self.started else ()

    @property
    def reasons(self) -> tuple[str, ...]:
        """Why the server is not ready; empty if it is."""
        reasons = ["the server is shutting down"] if self.draining else []
        try:
            reasons += self.engine.status.reasons
        except NotStarted as error:
            reasons.append(str(error))
        return tuple(dict.fromkeys(reasons))


@dataclass(slots=True)
class RequestRecord:
    """Facts about one request for the access log, the metrics and the audit log."""

    id: str
    started: float  # arrival of the first byte, by time.monotonic
    status: int | None = None
    images: int | None = None
    tasks: int | None = None
    identity: Identity | None = None  # once authenticated; None on public routes
    finished: bool = False  # logged and measured
    problem: "Kind | None" = None  # why it was rejected
    reason: str | None = None  # the message of that error
    address: str | None = None
    proxy: str | None = None  # the trusted proxy that reported the address
    audit_begun: bool = False  # the audit log has the begin, and not yet the end
    audit_details: dict[str, Any] | None = None
    # What the request holds until it ends: amounts of pools, and other shares.
    held: dict[Pool, int] = field(default_factory=dict)
    releases: list[Callable[[], None]] = field(default_factory=list)

    @property
    def caller(self) -> str:
        """Whose shares the request uses."""
        return "" if self.identity is None else self.identity.id

    def hold(self, pool: Pool, amount: int) -> bool:
        """Take an amount of a pool until the request ends; False if the caller gets no more."""
        if not pool.take(self.caller, amount):
            return False
        self.held[pool] = self.held.get(pool, 0) + amount
        return True

    async def wait_for(self, pool: Pool, amount: int, seconds: float) -> bool:
        """As `hold`, but wait for the amount."""
        if not await pool.wait(self.caller, amount, seconds):
            return False
        self.held[pool] = self.held.get(pool, 0) + amount
        return True

    def give_back(self, pool: Pool, amount: int) -> None:
        """Return a part of what the request holds."""
        self.held[pool] -= amount
        pool.give_back(self.caller, amount)

    def release(self) -> None:
        for pool, amount in self.held.items():
            pool.give_back(self.caller, amount)
        for release in self.releases:
            release()
        self.held, self.releases = {}, []


# The server and the request that a task works for.
CURRENT: ContextVar[tuple[Runtime, RequestRecord]] = ContextVar("current")
