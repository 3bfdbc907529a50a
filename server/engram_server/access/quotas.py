"""Limits per key: requests and token rows per second, concurrent images, and stored tasks."""

import itertools
import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Literal

from engram_store import Catalog
from pydantic import BaseModel, ConfigDict, Field

from engram_server.errors import QuotaExceeded, StorageQuotaExceeded

Clock = Callable[[], float]


class KeyLimits(BaseModel):
    """The limits of a key. None: no limit."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    requests_per_second: float | None = Field(default=None, gt=0, le=1e9)
    rows_per_second: float | None = Field(default=None, gt=0, le=1e12)
    concurrent_images: int | None = Field(default=None, ge=1, le=10**9)
    # Of what the key has published: live tasks and versions, and bytes including retired versions.
    tasks: int | None = Field(default=None, ge=1, le=10**9)
    versions: int | None = Field(default=None, ge=1, le=10**9)
    store_bytes: int | None = Field(default=None, ge=1, le=10**15)


class TokenBucket:
    """Token bucket with a burst of one second.

    A request that costs more than the capacity is accepted when the bucket is full and drives the
    level below zero, so the average rate holds.
    """

    def __init__(self, rate: float, what: Literal["requests", "rows"], clock: Clock) -> None:
        self._rate = rate
        self._what = what
        self._capacity = self._level = max(rate, 1.0)
        self._clock = clock
        self._at = clock()

    @property
    def policy(self) -> str:
        """An item of `RateLimit-Policy`: a whole number of units in a whole number of seconds."""
        window = math.ceil(max(1.0, 1 / self._rate))
        unit = "" if self._what == "requests" else f';qu="{self._what}"'
        return f'"{self._what}";q={int(self._capacity)}{unit};w={window}'

    def remaining(self) -> str:
        """An item of `RateLimit`: the units left, and the seconds until there is one more."""
        self._refill()
        left = max(0, math.floor(self._level))
        lacking = 0.0 if self._level >= self._capacity else left + 1 - self._level
        return f'"{self._what}";r={left};t={math.ceil(lacking / self._rate)}'

    def _refill(self) -> None:
        now = self._clock()
        self._level = min(self._capacity, self._level + (now - self._at) * self._rate)
        self._at = now

    def check(self, cost: float) -> None:
        """Raise QuotaExceeded if the level is too low."""
        self._refill()
        lacking = min(cost, self._capacity) - self._level
        if lacking > 1e-6:  # rounding
            raise QuotaExceeded(
                f"this key exceeds its limit of {self._rate:g} {self._what} per second",
                retry_after=lacking / self._rate,
                limit=self._what,
            )

    def take(self, cost: float) -> None:
        self.check(cost)
        self._level -= cost


class Quota:
    """The usage of one key. Not thread-safe; raises QuotaExceeded instead of waiting."""

    def __init__(self, limits: KeyLimits, clock: Clock = time.monotonic) -> None:
        self.limits = limits
        requests, rows = limits.requests_per_second, limits.rows_per_second
        self._requests = None if requests is None else TokenBucket(requests, "requests", clock)
        self._rows = None if rows is None else TokenBucket(rows, "rows", clock)
        self._images = 0
        self._buckets = [each for each in (self._requests, self._rows) if each is not None]
        self._policies = ", ".join(bucket.policy for bucket in self._buckets).encode()

    def headers(self) -> list[tuple[bytes, bytes]]:
        """`RateLimit-Policy` and `RateLimit` (draft-ietf-httpapi-ratelimit-headers)."""
        if not self._buckets:
            return []
        left = ", ".join(bucket.remaining() for bucket in self._buckets).encode()
        return [(b"ratelimit-policy", self._policies), (b"ratelimit", left)]

    def check_storage(self, catalog: Catalog, actor: str, task: str, size: int) -> None:
        """Raise StorageQuotaExceeded if the key may not publish a version of this size."""
        limits = self.limits
        if limits.tasks is limits.versions is limits.store_bytes is None:
            return  # most keys: do not count what all keys have published
        every = (info.versions.values() for info in catalog.all_tasks.values())
        versions = [v for v in itertools.chain.from_iterable(every) if v.actor == actor]
        live = [v for v in versions if not v.retired]
        tasks = {name for name, info in catalog.tasks.items() if info.first.actor == actor}
        stored = {version.digest: version.facts.size for version in versions}
        for what, used, limit in (
            ("tasks", len(tasks) + (task not in catalog.tasks), limits.tasks),
            ("versions", len(live) + 1, limits.versions),
            ("bytes of bundles", sum(stored.values()) + size, limits.store_bytes),
        ):
            if limit is not None and used > limit:
                raise StorageQuotaExceeded(
                    f"This key would have {used} {what}, and its limit is {limit}: retire or purge "
                    f"tasks or versions that it has published."
                )

    def take_request(self) -> None:
        if self._requests is not None:
            self._requests.take(1)

    def begin(self) -> Callable[[], None]:
        """Admit a prediction before its body is read, as one image; return what ends it."""
        self._check_images(1)
        if self._rows is not None:
            self._rows.check(1)
        self._images += 1

        def end() -> None:
            self._images -= 1

        return end

    @contextmanager
    def use(self, images: int, rows: int) -> Iterator[None]:
        """Charge the rows of a prediction that has begun, and its other images while it runs."""
        others = max(0, images - 1)
        self._check_images(others)
        if self._rows is not None:
            self._rows.take(rows)
        self._images += others
        try:
            yield
        finally:
            self._images -= others

    def _check_images(self, images: int) -> None:
        most = self.limits.concurrent_images
        if most is not None and self._images + images > most:
            raise QuotaExceeded(
                f"this key has {self._images} images in flight; its limit is {most}",
                retry_after=1,
                limit="images",
            )
