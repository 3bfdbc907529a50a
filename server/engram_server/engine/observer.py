"""The metrics of the engine: their declarations, and the interface that records them.

To add a metric, declare it here and call `observer.record`. `engram_server.observability.metrics`
declares those of HTTP and exports all of them to Prometheus.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal

# A counter adds, a gauge sets, a histogram observes, an age shows the time since the last record.
Kind = Literal["counter", "gauge", "histogram", "age"]

SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
TASK_LABELS = ("task", "version")


@dataclass(frozen=True, slots=True, eq=False)
class Instrument:
    """One metric, named as in Prometheus; the exporter adds `_total` to counters."""

    kind: Kind
    name: str
    doc: str
    labels: tuple[str, ...] = ()
    buckets: Sequence[float] = SECONDS


INSTRUMENTS: list[Instrument] = []  # in order of declaration


def declare(
    kind: Kind, name: str, doc: str, *labels: str, buckets: Sequence[float] = SECONDS
) -> Instrument:
    instrument = Instrument(kind, f"engram_{name}", doc, labels, buckets)
    INSTRUMENTS.append(instrument)
    return instrument


class EngineObserver:
    """Ignores all measurements; subclasses record them. Called from any thread."""

    def record(self, instrument: Instrument, value: float = 1, *labels: str) -> None: ...

    def rejected(self, reason: str) -> None:
        self.record(REJECTIONS, 1, reason)

    def record_task(
        self, instrument: Instrument, task: str, version: int | None, value: float = 1
    ) -> None:
        """Record a metric with TASK_LABELS."""
        self.record(instrument, value, task, "" if version is None else str(version))


IMAGES_ADMITTED: Final = declare("counter", "images_admitted", "Images admitted.")
REJECTIONS: Final = declare("counter", "rejections", "Requests rejected.", "reason")
STAGES: Final = declare("histogram", "stage_seconds", "Time of a request in each stage.", "stage")
BATCH_SECONDS: Final = declare("histogram", "batch_seconds", "Time per batch.")
BATCH_IMAGES: Final = declare(
    "histogram", "batch_images", "Images per batch.", buckets=[2**n for n in range(9)]
)
BATCH_ROWS: Final = declare(
    "histogram", "batch_rows", "Token rows per batch.", buckets=[2**n for n in range(6, 16)]
)
BATCH_FAILURES: Final = declare(
    "counter", "batch_failures", "Failed batches, including each half that is retried."
)
WORKERS: Final = declare("gauge", "workers", "Workers that serve their device.")
WORKER_RESTARTS: Final = declare("counter", "worker_restarts", "Attempts to restart a worker.")
DECODING_BYTES: Final = declare("gauge", "decoding_bytes", "Memory reserved for decoding images.")
QUEUE_IMAGES: Final = declare("gauge", "queue_images", "Images waiting for the device.")
CACHE_HITS: Final = declare("counter", "cache_hits", "Images with a cached context.")
CACHE_MISSES: Final = declare("counter", "cache_misses", "Images without a cached context.")
CACHE_EVICTIONS: Final = declare("counter", "cache_evictions", "Contexts evicted from the cache.")
CACHE_CONTEXTS: Final = declare("gauge", "cache_contexts", "Cached contexts.")
CACHE_BYTES: Final = declare("gauge", "cache_bytes", "Size of the cached contexts.")

PREDICTIONS: Final = declare(
    "counter", "predictions", "Requests answered by a version of a task.", *TASK_LABELS
)
NOT_FINITE: Final = declare(
    "counter", "answers_not_finite", "Answers that were not finite, per image.", *TASK_LABELS
)
SHADOW_IMAGES: Final = declare(
    "counter", "shadow_images", "Images that a shadow version was compared on.", *TASK_LABELS
)
SHADOW_AGREEMENTS: Final = declare(
    "counter", "shadow_agreements", "Those on which it agreed with the answer.", *TASK_LABELS
)
SHADOWS_DROPPED: Final = declare(
    "counter", "shadows_dropped", "Images that a shadow left out because of load.", *TASK_LABELS
)
DRIFT_DISTANCE: Final = declare(
    "gauge", "drift_distance", "Distance of recent images from the training.", *TASK_LABELS
)
DRIFT_LIMIT: Final = declare(
    "gauge", "drift_limit", "The largest distance to expect without drift.", *TASK_LABELS
)
OOD_SHARE: Final = declare(
    "gauge", "out_of_distribution_share", "Share of recent images.", *TASK_LABELS
)
CLASS_DIVERGENCE: Final = declare(
    "gauge",
    "class_share_divergence",
    "Total variation distance of recent class shares from those of the training.",
    *TASK_LABELS,
)
FEEDBACK: Final = declare(
    "counter", "feedback", "Answers of a version that feedback scored.", *TASK_LABELS
)
FEEDBACK_RIGHT: Final = declare("counter", "feedback_right", "Those that were right.", *TASK_LABELS)
TASK_LOAD_SECONDS: Final = declare(
    "histogram", "task_load_seconds", "Time to read, check and prepare a version."
)
TASK_LOAD_FAILURES: Final = declare(
    "counter", "task_load_failures", "Versions that could not be loaded.", *TASK_LABELS
)
TASK_EVICTIONS: Final = declare("counter", "task_evictions", "Tasks moved off the device.")
TASKS_RESIDENT: Final = declare("gauge", "tasks_resident", "Versions on the device.")
TASKS_RESIDENT_BYTES: Final = declare(
    "gauge", "tasks_resident_bytes", "Device memory of these versions."
)

GENERATION_SERVED: Final = declare(
    "gauge", "catalog_generation_served", "Generation that requests are answered from."
)
GENERATION_SEEN: Final = declare(
    "gauge", "catalog_generation_seen", "Newest generation read from the store."
)
STORE_STALENESS: Final = declare(
    "age", "store_staleness_seconds", "Time since the store was last read; 0 before."
)
STORE_FAILURES: Final = declare("counter", "store_failures", "Failed reads of the store.")
HEARTBEAT_AGE: Final = declare(
    "age", "heartbeat_age_seconds", "Time since this replica's last heartbeat; 0 before."
)
