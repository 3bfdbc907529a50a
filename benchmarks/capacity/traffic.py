"""Who asks for what: requests of one image and a few tasks, some of both asked for far more often.

Drawn once by a seed, at one request a second on average; `at` plays the same requests at another
rate, so that two simulations differ in nothing but what is compared.
"""

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Numbers = npt.NDArray[np.int64]


class Zipf:
    """Numbers below `count`; number n is drawn in proportion to 1 / (n + 1) ** skew."""

    def __init__(self, count: int, skew: float) -> None:
        weights = np.arange(1, count + 1, dtype=np.float64) ** -skew
        self._cumulative = np.cumsum(weights) / weights.sum()
        self._cumulative[-1] = 1.0

    def draw(self, random: np.random.Generator, size: int) -> Numbers:
        return np.searchsorted(self._cumulative, random.random(size), side="right")


@dataclass(frozen=True, slots=True)
class Mix:
    """What callers ask for."""

    tasks: int = 10_000
    task_skew: float = 1.0
    tasks_per_request: float = 4.0  # at least one, and a Poisson number more
    images: int = 1_000_000
    image_skew: float = 0.8
    hit_rate: float | None = None  # instead of popular images: this share has a context


@dataclass(frozen=True, slots=True)
class Traffic:
    """Requests in order: when, about which image, which tasks."""

    times: Floats  # seconds
    images: Numbers
    tasks: list[tuple[int, ...]]
    warm: npt.NDArray[np.bool_] | None  # whose context is there; None: the cache decides
    earlier: Numbers  # images asked for before, so that caches are as full as they get

    def __len__(self) -> int:
        return len(self.times)

    def at(self, rate: float) -> "Traffic":
        """The same requests, `rate` a second."""
        mean = self.times[-1] / len(self.times)
        return replace(self, times=self.times / (mean * rate))


def draw(mix: Mix, requests: int, seed: int, *, earlier: int = 0) -> Traffic:
    random = np.random.default_rng(seed)
    times = np.cumsum(random.exponential(1.0, requests))
    tasks = _draw_tasks(mix, requests, random)
    warm = None
    if mix.hit_rate is not None:
        warm = random.random(requests) < mix.hit_rate
        images, before = np.arange(requests), np.empty(0, np.int64)
    else:
        popular = Zipf(mix.images, mix.image_skew)
        images, before = popular.draw(random, requests), popular.draw(random, earlier)
    return Traffic(times, images, tasks, warm, before)


def _draw_tasks(mix: Mix, requests: int, random: np.random.Generator) -> list[tuple[int, ...]]:
    """Distinct tasks for each request: twice as many are drawn, and repeats dropped."""
    counts = 1 + random.poisson(mix.tasks_per_request - 1, requests)
    drawn = Zipf(mix.tasks, mix.task_skew).draw(random, 2 * int(counts.sum())).tolist()
    ends = (2 * np.cumsum(counts)).tolist()
    tasks = []
    start = 0
    for count, end in zip(counts.tolist(), ends, strict=True):
        tasks.append(tuple(dict.fromkeys(drawn[start:end]))[:count])
        start = end
    return tasks
