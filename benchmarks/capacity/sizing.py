"""The questions a fleet is sized by, each answered by simulating it or by arithmetic on costs."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from benchmarks.capacity.costs import Costs, Load
from benchmarks.capacity.fleet import Lru, Model, Outcome, Routing, simulate
from benchmarks.capacity.traffic import Mix, Traffic, draw
from server.settings import Settings

GIB = 2**30
# A plan may refuse this share of its requests and no more.
REFUSED = 0.001
# A larger fleet is simulated by so many of its replicas and their part of the traffic: enough for
# a proxy to choose among.
CELL = 32
CURVE = (0.3, 0.5, 0.7, 0.8, 0.9, 1.0, 1.5)
HIT_RATES = (0.0, 0.5, 0.9)
CACHES = (GIB // 4, GIB, 4 * GIB, 16 * GIB)
RESIDENT_SHARES = (0.05, 0.1, 0.25, 0.5, 1.0)
# What Amazon S3 promises at least for the objects below one prefix, requests a second.
S3_GETS, S3_PUTS = 5500, 3500
# `wait=all` asks who is there this often (server/api/waiting.py), and a listing has pages.
WAIT_LOOKS = 10.0
LISTING_PAGE = 1000

_HALVINGS = 7
_EARLIER = 1_500_000


@dataclass(frozen=True, slots=True)
class Question:
    """What is to be sized."""

    rate: float  # requests a second
    mix: Mix
    p99: float  # seconds
    photo: str
    routing: Routing
    dead: int  # replicas that may be lost at once
    publishes: float  # an hour
    requests: int  # of one simulation
    seed: int


def model_of(costs: Costs, settings: Settings, photo: str) -> Model:
    """One replica of these costs and settings."""
    given = "decode_threads" in settings.model_fields_set
    return Model(
        passes=costs.passes,
        base_rows=costs.shape.tokens,
        cores=costs.cores,
        pass_cores=costs.pass_cores,
        decode=costs.decode[photo],
        look_up=costs.look_up,
        request=costs.request + costs.catalog.resolve,
        poll=costs.catalog.poll,
        poll_every=settings.poll_seconds,
        reload=costs.reload + costs.catalog.evict,
        context_bytes=costs.context.measured,
        task_bytes=costs.task.measured,
        budget_rows=settings.budget_rows,
        queue_images=settings.queue_images,
        decode_threads=settings.decode_threads if given else costs.cores,
        cache_bytes=settings.cache_bytes,
        resident_bytes=settings.resident_bytes,
    )


# --- one replica ----------------------------------------------------------------------------------


def traffic_for(model: Model, question: Question, replicas: int) -> Traffic:
    """Requests for a fleet, with enough before them to fill its caches."""
    fill = replicas * filling(model.cache_bytes // model.context_bytes, question.mix)
    return draw(question.mix, question.requests, question.seed, earlier=min(fill, _EARLIER))


def filling(contexts: int, mix: Mix) -> int:
    """Images after which a cache of so many contexts is about as full as it gets."""
    return 3 * min(contexts, mix.images)


def saturation(model: Model, traffic: Traffic) -> float:
    """Answers a second of one replica that always has work."""
    rate = 1.0 / model.passes.seconds(Load(model.base_rows, 1, 0, 1))
    while True:
        answered = simulate(model, traffic.at(rate), 1).rate
        if answered < 0.9 * rate:
            return answered
        rate *= 1.5


def load_curve(model: Model, traffic: Traffic, most: float) -> list[tuple[float, Outcome]]:
    """What one replica does at shares of what it can."""
    return [(share, simulate(model, traffic.at(share * most), 1)) for share in CURVE]


def best_rate(
    model: Model, traffic: Traffic, p99: float, most: float, replicas: int, routing: Routing
) -> float | None:
    """The most requests a second for each replica with p99 as wanted; None if it never is."""

    def good(rate: float) -> bool:
        outcome = simulate(model, traffic.at(rate * replicas), replicas, routing=routing)
        return is_good(outcome, p99)

    low, high = 0.02 * most, 1.05 * most
    if not good(low):
        return None
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        if good(middle):
            low = middle
        else:
            high = middle
    return low


def is_good(outcome: Outcome, p99: float) -> bool:
    return outcome.percentile(99) <= p99 and outcome.refused_share <= REFUSED


# --- the fleet ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Plan:
    """How many replicas, and what they do then."""

    each: float  # requests a second of one replica among several
    replicas: int  # without spare
    simulated: int  # of them, with their part of the traffic, in what follows
    steady: Outcome
    dead: int
    with_dead: Outcome  # so many more, and so many lost half-way
    died_at: float


def plan(model: Model, question: Question, most: float) -> Plan | None:
    """None where not even an idle fleet is quick enough."""
    cell = traffic_for(model, question, CELL)
    each = best_rate(model, cell, question.p99, most, CELL, question.routing)
    if each is None:
        return None
    replicas = math.ceil(question.rate / each)
    while True:
        # What holds for a cell need not hold for fewer replicas, among which a proxy chooses less.
        simulated = min(replicas, CELL)
        traffic = traffic_for(model, question, simulated)
        traffic = traffic.at(question.rate * simulated / replicas)
        steady = simulate(model, traffic, simulated, routing=question.routing)
        if is_good(steady, question.p99):
            break
        replicas += 1 + replicas // 50
    died_at = float(traffic.times[-1]) / 2
    lost = simulate(
        model,
        traffic,
        simulated + question.dead,
        routing=question.routing,
        deaths=[died_at] * question.dead,
    )
    return Plan(each, replicas, simulated, steady, question.dead, lost, died_at)


# --- memory ---------------------------------------------------------------------------------------


def context_hits(model: Model, mix: Mix, seed: int) -> list[tuple[int, int, float]]:
    """Capacity in bytes, contexts it holds, share of images whose context is there."""
    found = []
    for capacity in CACHES:
        contexts = capacity // model.context_bytes
        draws = min(2 * filling(contexts, mix), _EARLIER) + 20_000
        stream = draw(replace(mix, hit_rate=None, tasks=1), 1, seed, earlier=draws).earlier.tolist()
        before, counted = stream[: draws // 2], stream[draws // 2 :]
        hits = lru_hits(capacity, model.context_bytes, before, counted)
        found.append((capacity, contexts, hits))
    return found


def task_hits(model: Model, mix: Mix, requests: int, seed: int) -> list[tuple[int, int, float]]:
    """Capacity in bytes, tasks it holds, share of asked tasks that are resident."""
    tasks = draw(replace(mix, hit_rate=0.0), requests, seed).tasks
    stream = [task for asked in tasks for task in asked]
    found = []
    for share in RESIDENT_SHARES:
        kept = max(int(share * mix.tasks), 1)
        capacity = kept * model.task_bytes
        hits = lru_hits(capacity, model.task_bytes, range(mix.tasks)[::-1], stream)
        found.append((capacity, kept, hits))
    return found


def lru_hits(capacity: int, each: int, before: Iterable[int], counted: Sequence[int]) -> float:
    """Share of what is counted that a cache of the server has, after what was before."""
    cache = Lru(capacity, each)
    for number in before:
        cache.touch(str(number))
    return sum(cache.touch(str(number)) for number in counted) / max(len(counted), 1)


@dataclass(frozen=True, slots=True)
class Held:
    """Something a replica keeps in memory: the machine's, or that of its GPU."""

    what: str
    nbytes: float
    on_gpu: bool = False


def held(costs: Costs, settings: Settings, tasks: int) -> list[Held]:
    """What one replica keeps in memory, without the interpreter and what a batch needs."""
    gpu = costs.device != "cpu"
    every, limit = tasks * costs.task.measured, settings.resident_bytes
    found = [
        Held("backbone", costs.shape.weights, gpu),
        Held("tasks", every if limit is None else min(every, limit), gpu),
        Held("contexts", settings.cache_bytes, gpu and settings.cache_device == "device"),
        Held("catalog", tasks * costs.catalog.version_bytes),
    ]
    if limit is not None:
        found.append(Held("tasks, to be prepared again", tasks * costs.host_task_bytes))
    return found


@dataclass(frozen=True, slots=True)
class Start:
    """How long a replica takes until it is ready, from its tasks alone."""

    seconds: float
    filling: float  # more, the first time with a bucket: each bundle kept looks at all before it


def start_of(costs: Costs, tasks: int) -> Start:
    catalog = costs.catalog
    scale = tasks / catalog.tasks
    loading = scale * catalog.open_checkpoint + tasks * costs.load
    return Start(loading, tasks * scale * catalog.cache_put / 2)


# --- the store ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class StoreLoad:
    """Requests to the store, and how many replicas S3's least promise is good for."""

    what: str
    requests: float
    unit: str
    most_replicas: float | None  # None: it is no steady load
    setting: str = ""


def store_load(costs: Costs, settings: Settings, replicas: int) -> list[StoreLoad]:
    """What following the log, heartbeats, publishes and waiting for all ask of the store."""
    poll, beat = settings.poll_seconds, settings.heartbeat_seconds
    beats = 1 / beat if beat else 0.0
    looks = WAIT_LOOKS * (replicas - 1 + math.ceil(replicas / LISTING_PAGE))
    megabytes = replicas * costs.bundle_bytes / 1e6
    return [
        StoreLoad(
            "polls: GET log", replicas / poll, "a second", S3_GETS * poll, "ENGRAM_POLL_SECONDS"
        ),
        StoreLoad(
            "heartbeats: PUT replicas",
            replicas * beats,
            "a second",
            S3_PUTS / beats if beats else None,
            "ENGRAM_HEARTBEAT_SECONDS",
        ),
        StoreLoad(
            f"one publish: GET log and bundle ({megabytes:.0f} MB), PUT heartbeat",
            replicas * (3 if beat else 2),
            "each",
            None,
        ),
        StoreLoad(
            "one caller that waits for all: LIST and GET replicas",
            looks,
            "a second, until all serve it",
            S3_GETS / WAIT_LOOKS,
            "fewer callers that wait for all",
        ),
    ]


# --- what breaks first ----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Limit:
    """Something that ends, how much of it the plan uses, and where to see it."""

    what: str
    used: float  # share, at the plan
    metric: str
    setting: str


def limits(
    costs: Costs, settings: Settings, question: Question, model: Model, found: Plan
) -> list[Limit]:
    """What a growing fleet runs out of, the nearest first."""
    each = question.rate / found.replicas
    misses = 1 - found.steady.hit_rate
    decoding = each * (model.look_up + misses * model.decode)
    loop = each * model.request + model.poll / model.poll_every
    changes = question.publishes / 3600 * (costs.load + costs.catalog.change)
    rows = [
        Limit(
            "the device: rows a second",
            found.steady.busy,
            "engram_stage_seconds of queue, engram_queue_images",
            "more replicas",
        ),
        Limit(
            "cores: passes on a CPU, decoding, the event loop",
            found.steady.cores_busy,
            "process_cpu_seconds_total",
            "more cores",
        ),
        Limit(
            "decoding alone",
            decoding / min(model.decode_threads, model.cores),
            "engram_stage_seconds of decode",
            "smaller photos, ENGRAM_DECODE_THREADS, more cores",
        ),
        Limit("the event loop", loop, "engram_request_seconds over its stages", "more replicas"),
        Limit(
            "loading what is published",
            changes,
            "engram_task_load_seconds, engram_catalog_lag_seconds",
            "fewer publishes",
        ),
    ]
    things = held(costs, settings, question.mix.tasks)
    for on_gpu, room in ((False, costs.memory), (True, costs.gpu_memory)):
        used = sum(thing.nbytes for thing in things if thing.on_gpu == on_gpu)
        if room:
            rows.append(
                Limit(
                    "memory of the GPU" if on_gpu else "memory",
                    used / room,
                    "engram_device_memory_bytes" if on_gpu else "process_resident_memory_bytes",
                    "ENGRAM_CACHE_BYTES, ENGRAM_RESIDENT_BYTES",
                )
            )
    rows += [
        Limit(
            f"S3: {load.what}",
            found.replicas / load.most_replicas,
            "engram_store_failures_total",
            load.setting,
        )
        for load in store_load(costs, settings, found.replicas)
        if load.most_replicas is not None
    ]
    return sorted(rows, key=lambda row: -row.used)
