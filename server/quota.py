"""What one key may use: requests and rows a second, and images at once."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from server.errors import QuotaExceeded

Clock = Callable[[], float]


class Limits(BaseModel):
    """As a keys file has them. None: no limit."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    requests_per_second: float | None = Field(default=None, gt=0, le=1e9)
    rows_per_second: float | None = Field(default=None, gt=0, le=1e12)
    concurrent_images: int | None = Field(default=None, ge=1, le=10**9)


class TokenBucket:
    """So many a second, and at most a second's worth at once.

    What costs more than that is let in when the bucket is full, and leaves a debt: the rate holds
    in the long run, and nothing is impossible.
    """

    def __init__(self, rate: float, what: Literal["requests", "rows"], clock: Clock) -> None:
        self._rate = rate
        self._what = what
        self._capacity = self._level = max(rate, 1.0)
        self._clock = clock
        self._at = clock()

    def check(self, cost: float) -> None:
        """QuotaExceeded unless there is room."""
        now = self._clock()
        self._level = min(self._capacity, self._level + (now - self._at) * self._rate)
        self._at = now
        lacking = min(cost, self._capacity) - self._level
        if lacking > 1e-6:  # rounding
            raise QuotaExceeded(
                f"this key may use {self._rate:g} {self._what} a second, and has used them",
                retry_after=lacking / self._rate,
                limit=self._what,
            )

    def take(self, cost: float) -> None:
        self.check(cost)
        self._level -= cost


class Quota:
    """What a key has used of its limits. Of one event loop; nobody waits: QuotaExceeded."""

    def __init__(self, limits: Limits, clock: Clock = time.monotonic) -> None:
        self.limits = limits
        requests, rows = limits.requests_per_second, limits.rows_per_second
        self._requests = None if requests is None else TokenBucket(requests, "requests", clock)
        self._rows = None if rows is None else TokenBucket(rows, "rows", clock)
        self._images = 0

    def take_request(self) -> None:
        if self._requests is not None:
            self._requests.take(1)

    def check_room(self) -> None:
        """Refuse what could not be let in now, before anybody takes the trouble to read it."""
        self._check_images(1)
        if self._rows is not None:
            self._rows.check(1)

    @contextmanager
    def use(self, images: int, rows: int) -> Iterator[None]:
        """Count the rows of a prediction, and its images until it has its answer."""
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
                f"this key has {self._images} images being worked on, and may have {most} at once",
                retry_after=1,
                limit="images",
            )
