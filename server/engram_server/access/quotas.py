"""Rate limits per key: requests and token rows per second, and concurrent images."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from engram_server.errors import QuotaExceeded

Clock = Callable[[], float]


class RateLimits(BaseModel):
    """The limits of a key. None: no limit."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    requests_per_second: float | None = Field(default=None, gt=0, le=1e9)
    rows_per_second: float | None = Field(default=None, gt=0, le=1e12)
    concurrent_images: int | None = Field(default=None, ge=1, le=10**9)


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

    def check(self, cost: float) -> None:
        """Raise QuotaExceeded if the level is too low."""
        now = self._clock()
        self._level = min(self._capacity, self._level + (now - self._at) * self._rate)
        self._at = now
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

    def __init__(self, limits: RateLimits, clock: Clock = time.monotonic) -> None:
        self.limits = limits
        requests, rows = limits.requests_per_second, limits.rows_per_second
        self._requests = None if requests is None else TokenBucket(requests, "requests", clock)
        self._rows = None if rows is None else TokenBucket(rows, "rows", clock)
        self._images = 0

    def take_request(self) -> None:
        if self._requests is not None:
            self._requests.take(1)

    def check_capacity(self) -> None:
        """Reject a prediction that cannot be accepted now, before its body is read."""
        self._check_images(1)
        if self._rows is not None:
            self._rows.check(1)

    @contextmanager
    def use(self, images: int, rows: int) -> Iterator[None]:
        """Charge the rows of a prediction, and its images while it runs."""
        self._check_images(images)
        if self._rows is not None:
            self._rows.take(rows)
        self._images += images
        try:
            yield
        finally:
            self._images -= images

    def _check_images(self, images: int) -> None:
        most = self.limits.concurrent_images
        if most is not None and self._images + images > most:
            raise QuotaExceeded(
                f"this key has {self._images} images in flight; its limit is {most}",
                retry_after=1,
                limit="images",
            )
