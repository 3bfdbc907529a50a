"""Replicas under load, simulated event by event.

What a request goes through is what it goes through in the server: event loop, admission, decoding
threads, queue, batches, answers. The queue, the choosing of batches and the cache of contexts are
the server's own code, on a clock that is not the wall's; what takes time is told by a `Model`. One
image to a request, no task extends another. The same traffic always gives the same outcome.
"""

import functools
import heapq
import itertools
import math
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Literal

import numpy as np
import torch

from benchmarks.capacity.costs import Load, PassCost
from benchmarks.capacity.traffic import Floats, Traffic
from server.engine.context_cache import ContextCache
from server.engine.observer import EngineObserver
from server.engine.queue import Job, JobQueue
from server.engine.types import ResidentTask, ServedTask
from server.model.context import Context, ContextBatch
from server.model.tasks import Task

# least: to the replica with the fewest requests under way, as deploy/haproxy does.
# image: to the replica that the image belongs to, so that each context is kept once.
Routing = Literal["least", "image"]
Action = Callable[[], None]

# Counted from here on: the first requests meet empty queues.
_SETTLED = 0.2


@dataclass(frozen=True, slots=True)
class Model:
    """One replica in numbers: what things cost there (seconds, bytes) and how it is set up."""

    passes: PassCost
    base_rows: int
    cores: int
    pass_cores: int  # of a batch that runs
    decode: float
    look_up: float
    request: float  # of the event loop, for each request, refused ones too
    poll: float  # of the event loop, which a poll keeps from running
    poll_every: float
    reload: float  # a task that is not resident
    context_bytes: int
    task_bytes: int
    budget_rows: int
    queue_images: int
    decode_threads: int
    cache_bytes: int
    resident_bytes: int | None = None  # None: every task stays


class Clock:
    """What happens next."""

    def __init__(self) -> None:
        self.now = 0.0
        self._events: list[tuple[float, int, Action]] = []
        self._order = itertools.count()

    def at(self, time: float, action: Action) -> None:
        heapq.heappush(self._events, (time, next(self._order), action))

    def run(self, until: float = math.inf) -> None:
        while self._events and self._events[0][0] <= until:
            self.now, _, action = heapq.heappop(self._events)
            action()


class Processor:
    """Some cores. When more are wanted than there are, all that runs slows down alike.

    So one virtual clock, which slows down with them, tells when each is done.
    """

    def __init__(self, clock: Clock, cores: int) -> None:
        self._clock = clock
        self._cores = cores
        self._wanted = 0
        self._speed = 1.0
        self._virtual = 0.0
        self._since = 0.0
        self._running: list[tuple[float, int, int, Action]] = []
        self._order = itertools.count()
        self._plan = 0
        self.used = 0.0  # seconds of cores

    def run(self, seconds: float, cores: int, done: Action) -> None:
        """`done` is called when this many undisturbed seconds of work are done."""
        self._catch_up()
        end = self._virtual + seconds
        heapq.heappush(self._running, (end, next(self._order), cores, done))
        self._wanted += cores
        self._plan_next()

    def _catch_up(self) -> None:
        passed = self._clock.now - self._since
        self._virtual += passed * self._speed
        self.used += passed * min(self._wanted, self._cores)
        self._since = self._clock.now

    def _plan_next(self) -> None:
        self._speed = min(1.0, self._cores / max(self._wanted, 1))
        self._plan += 1
        if self._running:
            wait = max(0.0, self._running[0][0] - self._virtual) / self._speed
            self._clock.at(self._clock.now + wait, partial(self._finish, self._plan))

    def _finish(self, plan: int) -> None:
        if plan != self._plan:
            return  # something began or ended since, and the speed is another
        self._catch_up()
        _, _, cores, done = heapq.heappop(self._running)
        self._wanted -= cores
        self._plan_next()
        done()


class Station:
    """Threads that work one core each, and the line in front of them."""

    def __init__(self, processor: Processor, threads: int) -> None:
        self._processor = processor
        self._free = threads
        self._line: deque[tuple[Callable[[], float], Action]] = deque()

    def submit(self, begin: Callable[[], float], done: Action) -> None:
        """`begin` is called when a thread is free and tells how long it takes, then `done`."""
        self._line.append((begin, done))
        self._next()

    def _next(self) -> None:
        if self._free and self._line:
            self._free -= 1
            begin, done = self._line.popleft()
            self._processor.run(begin(), 1, partial(self._ended, done))

    def _ended(self, done: Action) -> None:
        self._free += 1
        done()
        self._next()


_NOTHING = torch.empty(0)
_CONTEXT = Context(_NOTHING, _NOTHING)


class _Sized(ContextBatch):
    """One context that has a size and no content."""

    def unstack(
        self, device: torch.device | None = None, dtype: torch.dtype | None = None
    ) -> list[Context]:
        return [Context(self.readout, _NOTHING)]


class Lru:
    """The server's cache of contexts, holding things of one size that are not there.

    `server.engine.residency` lets go of tasks in the same order, so this stands for it too.
    """

    def __init__(self, capacity_bytes: int, each_bytes: int) -> None:
        self._cache = ContextCache(
            capacity_bytes, dtype=None, device=None, observer=EngineObserver()
        )
        self._one = _Sized((), torch.empty(each_bytes, dtype=torch.uint8, device="meta"))

    def get(self, key: str) -> bool:
        return self._cache.get(key) is not None

    def keep(self, key: str) -> None:
        self._cache.keep([key], self._one)

    def touch(self, key: str) -> bool:
        """Whether it was there; it is now."""
        found = self.get(key)
        if not found:
            self.keep(key)
        return found


@functools.cache
def stand_in(number: int) -> ResidentTask:
    """A task of one row, with no more behind it."""
    task = Task(_NOTHING, None, token=_NOTHING)
    served = ServedTask(str(number), 1, None, "single_label", ())
    return ResidentTask(served, {torch.device("cpu"): task})


@dataclass(eq=False, slots=True)
class Request:
    arrived: float
    image: int
    tasks: tuple[int, ...]
    warm: bool | None  # None: the cache decides

    @property
    def key(self) -> str:
        return str(self.image)


@dataclass(slots=True)
class _Image:
    warm: bool
    tasks: set[ResidentTask] = field(default_factory=set)


@dataclass(slots=True)
class Tally:
    """What happened, as it happens."""

    arrived: int = 0
    lost: int = 0
    refusals: list[float] = field(default_factory=list)  # when
    # Of each answer: when its request came, when it was there, whether a context was.
    answers: list[tuple[float, float, bool]] = field(default_factory=list)
    # Of each batch: when it ended, how long it ran, images, rows.
    batches: list[tuple[float, float, int, int]] = field(default_factory=list)


class Replica:
    """One server."""

    def __init__(self, clock: Clock, model: Model, tally: Tally) -> None:
        self._clock = clock
        self._model = model
        self._tally = tally
        self.processor = Processor(clock, model.cores)
        self._loop = Station(self.processor, 1)
        self._decoders = Station(self.processor, model.decode_threads)
        self._loader = Station(self.processor, 1)
        self._queue = JobQueue(lambda depth: None)
        self._asking: dict[Job, Request] = {}
        self._admitted = 0
        self._running = False
        self.contexts = Lru(model.cache_bytes, model.context_bytes)
        self.tasks: Lru | None = None
        if model.resident_bytes is not None:
            self.tasks = Lru(model.resident_bytes, model.task_bytes)
        self.under_way = 0
        self.turn = 0  # when it was last chosen
        self.dead = False

    def arrive(self, request: Request) -> None:
        self.under_way += 1
        self._loop.submit(lambda: self._model.request, partial(self._admit, request))

    def poll(self) -> None:
        self._loop.submit(lambda: self._model.poll, lambda: None)

    def die(self) -> None:
        """What was under way is lost; whatever still happens here is noticed by nobody."""
        self.dead = True
        self._tally.lost += self.under_way
        self.under_way = 0

    def _admit(self, request: Request) -> None:
        if self._admitted >= self._model.queue_images:
            self._refuse()
            return
        self._admitted += 1
        missing = []
        if self.tasks is not None:
            missing = [str(task) for task in request.tasks if not self.tasks.get(str(task))]
        if missing:
            self._loader.submit(partial(self._load, missing), partial(self._decode, request))
        else:
            self._decode(request)

    def _load(self, missing: list[str]) -> float:
        assert self.tasks is not None
        return self._model.reload * sum(not self.tasks.touch(task) for task in missing)

    def _decode(self, request: Request) -> None:
        self._decoders.submit(partial(self._look_up, request), partial(self._enqueue, request))

    def _look_up(self, request: Request) -> float:
        if request.warm is None and self.contexts.get(request.key):
            request.warm = True
        return self._model.look_up + (0.0 if request.warm else self._model.decode)

    def _enqueue(self, request: Request) -> None:
        job = Job(
            key=request.key,
            tasks=tuple(stand_in(task) for task in request.tasks),
            pixels=None,
            context=_CONTEXT if request.warm else None,
        )
        self._asking[job] = request
        self._queue.put(job)
        self._run_batch()

    def _run_batch(self) -> None:
        """A free worker takes what waits."""
        if self._running or not len(self._queue):
            return
        taken = self._queue.take(
            budget_rows=self._model.budget_rows,
            base_rows=self._model.base_rows,
            clock=lambda: self._clock.now,
        )
        assert taken is not None
        images = self._images_of(taken.batch)
        cold = sum(not image.warm for image in images.values())
        load = Load(
            base_rows=cold * self._model.base_rows,
            task_rows=sum(len(image.tasks) for image in images.values()),
            warm_images=len(images) - cold,
            tasks=len({task for image in images.values() for task in image.tasks}),
        )
        self._running = True
        done = partial(self._end_batch, taken.batch, images, taken.rows, self._clock.now)
        self.processor.run(self._model.passes.seconds(load), self._model.pass_cores, done)

    def _images_of(self, jobs: Sequence[Job]) -> dict[str, _Image]:
        """As the worker does: jobs about one image share it, and a context may have come."""
        images: dict[str, _Image] = {}
        for job in jobs:
            image = images.get(job.key)
            if image is None:
                warm = job.context is not None or self.contexts.get(job.key)
                image = images[job.key] = _Image(warm)
            image.warm |= job.context is not None
            image.tasks.update(job.tasks)
        return images

    def _end_batch(
        self, jobs: Sequence[Job], images: dict[str, _Image], rows: int, started: float
    ) -> None:
        now = self._clock.now
        self._running = False
        for key, image in images.items():
            if not image.warm:
                self.contexts.keep(key)
        if not self.dead:
            self._tally.batches.append((now, now - started, len(images), rows))
        for job in jobs:
            self._admitted -= 1
            self._answer(self._asking.pop(job), images[job.key].warm)
        self._run_batch()

    def _answer(self, request: Request, hit: bool) -> None:
        if not self.dead:
            self.under_way -= 1
            self._tally.answers.append((request.arrived, self._clock.now, hit))

    def _refuse(self) -> None:
        if not self.dead:
            self.under_way -= 1
            self._tally.refusals.append(self._clock.now)


class Fleet:
    """Replicas behind a proxy that notices at once when one is gone."""

    def __init__(self, clock: Clock, model: Model, replicas: int, routing: Routing) -> None:
        self.tally = Tally()
        self.replicas = [Replica(clock, model, self.tally) for _ in range(replicas)]
        self._alive = list(self.replicas)
        self._routing = routing
        self._turns = itertools.count(1)

    def arrive(self, request: Request) -> None:
        self.tally.arrived += 1
        if not self._alive:
            self.tally.lost += 1
            return
        self.choose(request.image).arrive(request)

    def choose(self, image: int) -> Replica:
        if self._routing == "image":
            return self._alive[image % len(self._alive)]
        chosen = min(self._alive, key=lambda replica: (replica.under_way, replica.turn))
        chosen.turn = next(self._turns)
        return chosen

    def lose_one(self) -> None:
        if self._alive:
            self._alive.pop().die()

    def fill(self, model: Model, traffic: Traffic, tasks: int) -> None:
        """Caches as after a long time."""
        for turn, image in enumerate(traffic.earlier.tolist()):
            place = image if self._routing == "image" else turn
            self.replicas[place % len(self.replicas)].contexts.touch(str(image))
        if model.resident_bytes is None:
            return
        kept = min(tasks, model.resident_bytes // model.task_bytes)
        for replica in self.replicas:
            assert replica.tasks is not None
            for task in reversed(range(kept)):
                replica.tasks.keep(str(task))


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of the requests. Times and shares are of those after everything settled."""

    arrived: int
    answered: int
    refused: int
    lost: int
    in_flight: int
    times: Floats  # when each answered request came
    seconds: Floats  # how long each took
    rate: float  # answers a second
    refused_share: float
    hit_rate: float
    busy: float  # share of the time that a worker runs batches
    cores_busy: float  # share of the cores that anything uses
    batch_images: float
    batch_rows: float

    def percentile(self, which: float, since: float = 0.0) -> float:
        """Of the seconds a request took; NaN if there was none."""
        chosen = self.seconds[self.times >= since]
        return float(np.percentile(chosen, which)) if len(chosen) else math.nan


def simulate(
    model: Model,
    traffic: Traffic,
    replicas: int,
    *,
    routing: Routing = "least",
    deaths: Sequence[float] = (),
    until: float = math.inf,
) -> Outcome:
    """Play the traffic on replicas. At each time in `deaths` one of them is killed."""
    clock = Clock()
    fleet = Fleet(clock, model, replicas, routing)
    fleet.fill(model, traffic, 1 + max(max(tasks) for tasks in traffic.tasks))
    last = float(traffic.times[-1])
    requests = _requests_of(traffic)

    def next_arrival() -> None:
        request = next(requests, None)
        if request is not None:
            clock.at(request.arrived, partial(arrive, request))

    def arrive(request: Request) -> None:
        fleet.arrive(request)
        next_arrival()

    def poll(replica: Replica) -> None:
        if not replica.dead and clock.now <= last:
            replica.poll()
            clock.at(clock.now + model.poll_every, partial(poll, replica))

    next_arrival()
    for number, replica in enumerate(fleet.replicas):
        clock.at(model.poll_every * number / replicas, partial(poll, replica))
    for time in deaths:
        clock.at(time, fleet.lose_one)
    end = min(last, until)
    clock.run(end)
    used = sum(replica.processor.used for replica in fleet.replicas)
    clock.run(until)
    return replace(
        outcome_of(fleet.tally, replicas, end),
        in_flight=sum(replica.under_way for replica in fleet.replicas),
        cores_busy=used / (replicas * model.cores * end),
    )


def _requests_of(traffic: Traffic) -> Iterator[Request]:
    warm = [None] * len(traffic) if traffic.warm is None else traffic.warm.tolist()
    rows = zip(traffic.times.tolist(), traffic.images.tolist(), traffic.tasks, warm, strict=True)
    return itertools.starmap(Request, rows)


def outcome_of(tally: Tally, replicas: int, end: float) -> Outcome:
    """What a tally alone tells of the time from when things settled to `end`."""
    start = _SETTLED * end
    came, there, hits = np.array(tally.answers, dtype=np.float64).reshape(-1, 3).T
    ended, ran, images, rows = np.array(tally.batches, dtype=np.float64).reshape(-1, 4).T
    settled = came >= start
    answered = (there >= start) & (there <= end)
    batches = (ended >= start) & (ended <= end)
    refused = sum(start <= time <= end for time in tally.refusals)
    done = int(answered.sum())
    return Outcome(
        arrived=tally.arrived,
        answered=len(came),
        refused=len(tally.refusals),
        lost=tally.lost,
        in_flight=0,
        times=came[settled],
        seconds=(there - came)[settled],
        rate=done / (end - start),
        refused_share=refused / max(refused + done, 1),
        hit_rate=_mean(hits[answered]),
        busy=float(ran[batches].sum()) / ((end - start) * replicas),
        cores_busy=0.0,
        batch_images=_mean(images[batches]),
        batch_rows=_mean(rows[batches]),
    )


def _mean(values: Floats) -> float:
    return float(values.mean()) if len(values) else 0.0
