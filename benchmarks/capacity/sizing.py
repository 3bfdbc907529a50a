"""How many replicas, what they hold and what they ask of the store: arithmetic on costs."""

import math
from dataclasses import dataclass

from engram_server.settings import Settings

from benchmarks.capacity.costs import Costs

# How much of what it can do at most a replica is planned to do. Waiting grows without bound towards
# the limit; half of it leaves room for uneven arrivals and for a machine that others share.
PLANNED_LOAD = 0.5
HIT_RATES = (0.0, 0.5, 0.9)
# What Amazon S3 promises at least for the objects below one prefix, requests a second.
S3_GETS, S3_PUTS = 5500, 3500
# `wait=all` polls the heartbeats this often; listings are paged.
WAIT_LOOKS = 10.0
LISTING_PAGE = 1000


@dataclass(frozen=True, slots=True)
class Workload:
    """The load to size a fleet for: requests of one image and a few tasks."""

    rate: float  # requests a second
    tasks: int  # in the store
    tasks_per_request: float
    hit_rate: float  # share of images whose context is cached
    photo: str
    dead: int  # replicas that may be lost at once
    publishes: float  # an hour


# --- one replica ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class RequestCost:
    """Seconds that one request keeps each part of a replica busy, when batches are full."""

    device: float
    cores: float
    decoding: float
    loop: float

    @property
    def most(self) -> float:
        """Requests a second at most: what the busiest part allows."""
        return 1 / max(self.device, self.cores, self.decoding, self.loop)


def request_cost(costs: Costs, settings: Settings, workload: Workload) -> RequestCost:
    """What a request costs on average; all its tasks differ from those of the others."""
    passes, tasks = costs.passes, workload.tasks_per_request
    misses = 1 - workload.hit_rate
    rows = misses * costs.shape.tokens + tasks
    images = max(1.0, min(settings.budget_rows / rows, settings.queue_images))
    device = (
        (passes.batch + passes.cold * (misses > 0)) / images
        + misses * costs.shape.tokens * passes.base_row
        + workload.hit_rate * passes.warm_image
        + tasks * (passes.task_row + passes.task)
    )
    decoding = costs.look_up + misses * costs.decode[workload.photo]
    loop = costs.request + costs.catalog.resolve
    is_set = "decode_threads" in settings.model_fields_set
    threads = min(settings.decode_threads if is_set else costs.cores, costs.cores)
    cores = (costs.pass_cores * device + decoding + loop) / costs.cores
    return RequestCost(device, cores, decoding / threads, loop)


@dataclass(frozen=True, slots=True)
class Plan:
    """How many replicas, those included that may be lost."""

    most: float  # requests a second of one replica, at most
    each: float  # planned
    replicas: int


def plan(cost: RequestCost, workload: Workload) -> Plan:
    each = PLANNED_LOAD * cost.most
    return Plan(cost.most, each, math.ceil(workload.rate / each) + workload.dead)


# --- memory and the start -------------------------------------------------------------------------


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
    costs: Costs, settings: Settings, workload: Workload, cost: RequestCost, replicas: int
) -> list[Limit]:
    """What a growing fleet runs out of, the nearest first."""
    each = workload.rate / replicas
    loop = each * cost.loop + costs.catalog.poll / settings.poll_seconds
    changes = workload.publishes / 3600 * (costs.load + costs.catalog.change)
    rows = [
        Limit(
            "the device: rows a second",
            each * cost.device,
            "engram_stage_seconds of queue, engram_queue_images",
            "more replicas",
        ),
        Limit(
            "cores: passes on a CPU, decoding, the event loop",
            each * cost.cores,
            "process_cpu_seconds_total",
            "more cores",
        ),
        Limit(
            "decoding alone",
            each * cost.decoding,
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
    things = held(costs, settings, workload.tasks)
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
            replicas / load.most_replicas,
            "engram_store_failures_total",
            load.setting,
        )
        for load in store_load(costs, settings, replicas)
        if load.most_replicas is not None
    ]
    return sorted(rows, key=lambda row: -row.used)
