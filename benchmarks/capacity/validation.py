"""The simulation beside the real engine: the same requests at the same moments, both told."""

import asyncio
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

from benchmarks.capacity.costs import Costs, PassCost
from benchmarks.capacity.fleet import Model, Outcome, Tally, outcome_of, simulate
from benchmarks.capacity.measuring import PHOTOS, USUAL, Running, photo
from benchmarks.capacity.passes import Bench
from benchmarks.capacity.sizing import saturation
from benchmarks.capacity.traffic import Mix, Traffic, draw
from server.engine.types import PredictRequest
from server.errors import Overloaded

SHARES = (0.4, 0.8, 1.5)  # of what the simulated engine can do
IMAGES = 200
_PROBES = 2000  # requests to find that by


@dataclass(frozen=True, slots=True)
class Compared:
    """One figure of a run, as it was measured and as it was simulated."""

    share: float
    rate: float  # requests a second offered
    figure: str
    measured: float
    simulated: float

    @property
    def deviation(self) -> float:
        """Of the simulation, as a share of the measured; of shares their difference."""
        if self.figure.endswith("share"):
            return self.simulated - self.measured
        return self.simulated / self.measured - 1 if self.measured else math.nan


def validate(
    running: Running, bench: Bench, model: Model, seconds: float, seed: int
) -> tuple[list[Compared], PassCost]:
    """Gives the engine each load for so many seconds; `model` is the engine without its batches.

    Machines that others share are not always as quick: batches are measured before and after each
    load, and it is simulated on those. Also what all of them cost, taken together.
    """
    mix = Mix(tasks=len(running.tasks), images=IMAGES)
    images = [photo(1 + number, *PHOTOS[USUAL]) for number in range(IMAGES)]
    batches = [bench.measure(seconds / 2)]
    first = replace(model, passes=bench.fit(batches))
    most = saturation(first, draw(mix, _PROBES, seed))
    found = []
    for share in SHARES:
        rate = share * most
        traffic = draw(mix, max(int(rate * seconds), 20), seed).at(rate)
        real = _figures(asyncio.run(_play(running, traffic, images)))
        batches.append(bench.measure(seconds / 2))
        told = _figures(simulate(replace(model, passes=bench.fit(batches[-2:])), traffic, 1))
        found += [
            Compared(share, rate, figure, value, told[figure]) for figure, value in real.items()
        ]
    return found, bench.fit(batches)


def model_of_engine(model: Model, costs: Costs, running: Running) -> Model:
    """The model of a replica, as the engine is that runs here: no HTTP, no polls, small limits."""
    config = running.engine.config
    return replace(
        model,
        request=costs.engine_request,
        poll=0.0,
        queue_images=config.queue_images,
        cache_bytes=config.cache_bytes,
        decode_threads=config.decode_threads,
        resident_bytes=None,
    )


def _figures(outcome: Outcome) -> dict[str, float]:
    return {
        "answers a second": outcome.rate,
        "p50, ms": 1000 * outcome.percentile(50),
        "p95, ms": 1000 * outcome.percentile(95),
        "refused share": outcome.refused_share,
        "hit share": outcome.hit_rate,
    }


async def _play(running: Running, traffic: Traffic, images: Sequence[bytes]) -> Outcome:
    """Open loop: requests come when they come, whatever became of those before."""
    tally = Tally()
    start = time.perf_counter()

    def now() -> float:
        return time.perf_counter() - start

    async def ask(came: float, image: int, tasks: Sequence[int]) -> None:
        asked = PredictRequest([images[image]], [running.tasks[task] for task in tasks])
        try:
            answer = await running.engine.predict(asked)
        except Overloaded:
            tally.refusals.append(now())
        else:
            tally.answers.append((came, now(), answer.images[0].cache == "hit"))

    async with asyncio.TaskGroup() as group:
        rows = zip(traffic.times.tolist(), traffic.images.tolist(), traffic.tasks, strict=True)
        for came, image, tasks in rows:
            await asyncio.sleep(max(0.0, came - now()))
            tally.arrived += 1
            group.create_task(ask(came, image, tasks))
    return outcome_of(tally, 1, float(traffic.times[-1]))
