"""The state of one running server, shared by its routes."""

from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import anyio

from server.addresses import TrustedProxies
from server.audit import AuditLog
from server.engine.engine import Engine
from server.errors import NotStarted
from server.identity import Identity
from server.keys import Keys
from server.metrics import Metrics
from server.settings import Settings

if TYPE_CHECKING:  # need the extras `oidc` and `otel`, which may not be installed
    from server.oidc import OpenIdTokens
    from server.tracing import Tracing


@dataclass(eq=False, slots=True)
class BodiesInFlight:
    """Bytes of bodies that were received and belong to requests without an answer yet."""

    limit: int
    nbytes: int = 0


@dataclass(eq=False)
class Runtime:
    """What a server has from its first moment on, and the engine as soon as it is there."""

    settings: Settings
    metrics: Metrics
    tracing: "Tracing | None" = None
    openid: "OpenIdTokens | None" = None
    # Done when the engine takes requests, or with what stopped it.
    starting: Future[Engine] = field(default_factory=Future)
    draining: bool = False
    # One change at a time: a hundred uploads must not take the cores from the traffic.
    changes: anyio.CapacityLimiter = field(default_factory=lambda: anyio.CapacityLimiter(1))
    checks: anyio.CapacityLimiter = field(default_factory=lambda: anyio.CapacityLimiter(1))
    _engine: Engine | None = None

    def __post_init__(self) -> None:
        settings = self.settings
        file = None if settings.keys_file is None else Path(settings.keys_file)
        self.keys = Keys(settings.api_key, settings.admin_key, file)
        self.metrics.keys_broken.set_function(lambda: self.keys.error is not None)
        log = settings.audit_log
        self.audit = None if log is None else AuditLog(log, self.metrics)
        trusted = settings.trusted_proxies
        self.proxies = TrustedProxies(trusted) if trusted else None
        self.bodies = BodiesInFlight(settings.inflight_body_bytes)
        self.metrics.bodies.set_function(lambda: self.bodies.nbytes)
        # How many there may be at once, from the first byte of the request to the last of the
        # answer. Nobody waits for a place: who finds none is told so.
        self.validations = anyio.CapacityLimiter(settings.max_validations)
        self.downloads = anyio.CapacityLimiter(settings.max_downloads)

    @property
    def anonymous(self) -> Identity | None:
        """Who a caller without a key or token is; None where it has to have one."""
        return self.keys.anonymous if self.openid is None else None

    @property
    def engine(self) -> Engine:
        """The engine, or NotStarted."""
        if self._engine is not None:
            return self._engine
        if not self.starting.done():
            raise NotStarted("The server is starting: the backbone is being loaded.")
        if not self.started:
            raise NotStarted("The server could not start; its log says why.")
        # Kept: every request asks several times, and a future has a lock.
        self._engine = self.starting.result()
        return self._engine

    @property
    def started(self) -> bool:
        starting = self.starting
        return starting.done() and not starting.cancelled() and starting.exception() is None

    @property
    def known_tasks(self) -> tuple[str, ...]:
        """Names to suggest; none before the start."""
        return self.engine.snapshot.catalog.names if self.started else ()

    @property
    def broken(self) -> tuple[str, ...]:
        """What only a new process repairs; nothing before the start, which ends by itself."""
        return self.engine.broken if self.started else ()

    @property
    def reasons(self) -> tuple[str, ...]:
        """Why no traffic should be sent here; empty when it may."""
        reasons = ["the server is shutting down"] if self.draining else []
        try:
            reasons += self.engine.status.reasons
        except NotStarted as error:
            reasons.append(str(error))
        return tuple(dict.fromkeys(reasons))
