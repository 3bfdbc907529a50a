"""The state of one running server and of each request."""

from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import anyio

from engram_server.access.identity import Identity
from engram_server.access.keys import Keys
from engram_server.edge.proxies import TrustedProxies
from engram_server.engine.engine import Engine
from engram_server.errors import NotStarted
from engram_server.observability.audit import AuditLog
from engram_server.observability.metrics import Metrics
from engram_server.settings import Settings

if TYPE_CHECKING:  # the extras `openid` and `tracing` may not be installed
    from engram_server.access.oidc import OpenIdTokens
    from engram_server.api.problems import Kind
    from engram_server.observability.tracing import Tracing


@dataclass(eq=False, slots=True)
class BodiesInFlight:
    """Bytes of request bodies whose requests are not answered yet."""

    limit: int
    nbytes: int = 0


@dataclass(eq=False, kw_only=True)
class Runtime:
    """One running server. `create_app` builds it; the engine follows when it has started."""

    settings: Settings
    metrics: Metrics
    keys: Keys
    bodies: BodiesInFlight
    # Non-blocking: a caller that finds no slot gets 429.
    validations: anyio.CapacityLimiter
    downloads: anyio.CapacityLimiter
    audit: AuditLog | None
    proxies: TrustedProxies | None
    tracing: "Tracing | None"
    openid: "OpenIdTokens | None"
    # Has the engine as its result when it accepts requests, or the error that stopped it.
    starting: Future[Engine] = field(default_factory=Future)
    draining: bool = False
    # One change at a time: many uploads must not take the cores from predictions.
    changes: anyio.CapacityLimiter = field(default_factory=lambda: anyio.CapacityLimiter(1))
    checks: anyio.CapacityLimiter = field(default_factory=lambda: anyio.CapacityLimiter(1))
    _engine: Engine | None = None

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
    body_bytes: int = 0  # received so far, and counted as in flight
    identity: Identity | None = None  # once authenticated; None on public routes
    finished: bool = False  # logged and measured
    problem: "Kind | None" = None  # why it was rejected
    reason: str | None = None  # the message of that error
    address: str | None = None
    proxy: str | None = None  # the trusted proxy that reported the address
    audit_begun: bool = False  # the audit log has the begin, and not yet the end
    audit_details: dict[str, Any] | None = None
