"""What the server counts, for Prometheus. docs/reference/metrics.md describes every metric.

Each app has a registry of its own, so that two of them can live in one process. Seconds and bytes
throughout. A task's name and version are two labels, and only so many versions get labels of their
own: the rest are counted together as `other`.
"""

import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

from server.engine.observer import EngineObserver

DeviceMemory = Callable[[], Mapping[str, int]]

OTHER = "other"

_OPENMETRICS = "application/openmetrics-text"
_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
_IMAGES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
_ROWS = (64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768)


class Metrics(EngineObserver):
    """Listens to the engine and to HTTP."""

    def __init__(self, *, max_tasks: int, device_memory: DeviceMemory | None = None) -> None:
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)
        self.registry.register(_DeviceMemoryCollector(device_memory or dict))
        self._max_tasks = max_tasks
        self._known_tasks: set[tuple[str, str]] = set()
        # Of what every request counts, found without the locks of `labels`.
        self._of_stage: dict[str, Histogram] = {}
        self._of_task: dict[tuple[str, int | None], Counter] = {}
        self._lock = threading.Lock()
        self._served = self._seen = 0
        self._behind_since: float | None = None
        self._store_read_at: float | None = None
        self._heartbeat_at: float | None = None
        self._declare_requests()
        self._declare_engine()
        self._declare_tasks()
        self._declare_replica()
        self._declare_audit()

    def _declare_requests(self) -> None:
        self._requests = self._histogram(
            "engram_request_seconds",
            "Time from a request's first byte to the end of its answer.",
            _SECONDS,
            ["route", "method", "status"],
        )
        self._admitted = self._counter("engram_images_admitted", "Images let in.")
        self._rejected = self._counter("engram_rejections", "Requests turned away.", ["reason"])
        # Whoever has the numbers sets the functions.
        self.connections = self._gauge("engram_connections", "Connections that are open.")
        self.keys_broken = self._gauge(
            "engram_keys_file_broken", "1 while the keys file cannot be used and older keys hold."
        )
        self.bodies = self._gauge(
            "engram_inflight_body_bytes", "Bytes of bodies whose requests have no answer yet."
        )

    def _declare_engine(self) -> None:
        histogram = self._histogram
        self._stages = histogram(
            "engram_stage_seconds", "Time a request spends in each stage.", _SECONDS, ["stage"]
        )
        self._batch_seconds = histogram("engram_batch_seconds", "Time of one batch.", _SECONDS)
        self._batch_images = histogram("engram_batch_images", "Images of one batch.", _IMAGES)
        self._batch_rows = histogram("engram_batch_rows", "Token rows of one batch.", _ROWS)
        self._batch_failures = self._counter(
            "engram_batch_failures", "Batches that failed; each half that is tried again counts."
        )
        self._workers = self._gauge("engram_workers", "Workers that serve their device.")
        self._restarts = self._counter("engram_worker_restarts", "Attempts to restart a worker.")
        self._decoding = self._gauge(
            "engram_decoding_bytes", "Memory reserved for images that are being decoded."
        )
        self._queue = self._gauge("engram_queue_images", "Images waiting for the device.")
        self._hits = self._counter("engram_cache_hits", "Images whose context was there.")
        self._misses = self._counter("engram_cache_misses", "Images whose context was not there.")
        self._cache_evictions = self._counter("engram_cache_evictions", "Contexts dropped.")
        self._contexts = self._gauge("engram_cache_contexts", "Contexts held.")
        self._cache_bytes = self._gauge("engram_cache_bytes", "Bytes of the contexts held.")

    def _declare_tasks(self) -> None:
        labels = ["task", "version"]
        self._predictions = self._counter(
            "engram_predictions", "Requests answered by a version of a task.", labels
        )
        self._not_finite = self._counter(
            "engram_answers_not_finite",
            "Answers about an image that were no finite numbers, by version of a task.",
            labels,
        )
        self._loads = self._histogram(
            "engram_task_load_seconds",
            "Time to read, check and prepare a version of a task.",
            _SECONDS,
        )
        self._load_failures = self._counter(
            "engram_task_load_failures", "Versions that could not be loaded.", labels
        )
        self._evictions = self._counter("engram_task_evictions", "Tasks moved off the device.")
        self._resident = self._gauge("engram_tasks_resident", "Versions on the device.")
        self._resident_bytes = self._gauge(
            "engram_tasks_resident_bytes", "Device bytes of the versions there."
        )

    def _declare_replica(self) -> None:
        self._gauge(
            "engram_catalog_generation_served", "Generation requests are answered from."
        ).set_function(lambda: self._served)
        self._gauge(
            "engram_catalog_generation_seen", "Newest generation known in the store."
        ).set_function(lambda: self._seen)
        self._gauge(
            "engram_catalog_lag_seconds", "How long a newer generation has been known, not served."
        ).set_function(lambda: _since(self._behind_since))
        self._gauge(
            "engram_store_staleness_seconds", "Since the task store was last read; 0 before."
        ).set_function(lambda: _since(self._store_read_at))
        self._store_failures = self._counter(
            "engram_store_failures", "Times the task store could not be read."
        )
        self._gauge(
            "engram_heartbeat_age_seconds", "Since this replica last said it is there; 0 before."
        ).set_function(lambda: _since(self._heartbeat_at))

    def _declare_audit(self) -> None:
        self._audit_sequence = self._gauge(
            "engram_audit_sequence", "Number of the last record of the audit log."
        )
        self._audit_left_out = self._counter(
            "engram_audit_left_out", "Records that were not written: too many, or no disk."
        )
        self._audit_failures = self._counter(
            "engram_audit_failures", "Times the audit log could not be written."
        )

    def _counter(self, name: str, text: str, labels: Iterable[str] = ()) -> Counter:
        return Counter(name, text, tuple(labels), registry=self.registry)

    def _histogram(
        self, name: str, text: str, buckets: Sequence[float], labels: Iterable[str] = ()
    ) -> Histogram:
        return Histogram(name, text, tuple(labels), buckets=buckets, registry=self.registry)

    def _gauge(self, name: str, text: str) -> Gauge:
        return Gauge(name, text, registry=self.registry)

    def render(self, accept: str) -> tuple[bytes, str]:
        """The metrics in the exposition format a scraper accepts, and its content type."""
        # Only whether it wants OpenMetrics: the encoder trips over odd versions.
        encoder, content_type = choose_encoder(_OPENMETRICS if _OPENMETRICS in accept else "")
        return encoder(self.registry), content_type

    # HTTP

    def request(self, route: str, method: str, status: int, seconds: float) -> None:
        self._requests.labels(route, method, str(status)).observe(seconds)

    # The engine

    def admitted(self, images: int) -> None:
        self._admitted.inc(images)

    def rejected(self, reason: str) -> None:
        self._rejected.labels(reason).inc()

    def stage(self, name: str, seconds: float) -> None:
        stage = self._of_stage.get(name)
        if stage is None:
            stage = self._of_stage[name] = self._stages.labels(name)
        stage.observe(seconds)

    def decoding_bytes(self, nbytes: int) -> None:
        self._decoding.set(nbytes)

    def batch(self, images: int, rows: int, seconds: float) -> None:
        self._batch_images.observe(images)
        self._batch_rows.observe(rows)
        self._batch_seconds.observe(seconds)

    def batch_failed(self) -> None:
        self._batch_failures.inc()

    def workers(self, serving: int) -> None:
        self._workers.set(serving)

    def worker_restarted(self) -> None:
        self._restarts.inc()

    def queue_depth(self, images: int) -> None:
        self._queue.set(images)

    def predicted(self, task: str, version: int | None) -> None:
        counter = self._of_task.get((task, version))
        if counter is None:
            labels = self._task_labels(task, version)
            counter = self._predictions.labels(*labels)
            if labels[0] == task:
                self._of_task[task, version] = counter
        counter.inc()

    def not_finite(self, task: str, version: int | None) -> None:
        self._not_finite.labels(*self._task_labels(task, version)).inc()

    def cache_hit(self) -> None:
        self._hits.inc()

    def cache_miss(self) -> None:
        self._misses.inc()

    def cache_evicted(self, contexts: int) -> None:
        self._cache_evictions.inc(contexts)

    def cache_size(self, contexts: int, nbytes: int) -> None:
        self._contexts.set(contexts)
        self._cache_bytes.set(nbytes)

    # Tasks and the store

    def task_loaded(self, name: str, version: int, seconds: float) -> None:
        self._loads.observe(seconds)

    def task_failed(self, name: str, version: int) -> None:
        self._load_failures.labels(*self._task_labels(name, version)).inc()

    def task_evicted(self, name: str, version: int) -> None:
        self._evictions.inc()

    def tasks_resident(self, tasks: int, nbytes: int) -> None:
        self._resident.set(tasks)
        self._resident_bytes.set(nbytes)

    def catalog_served(self, generation: int) -> None:
        with self._lock:
            self._served = generation
            self._note_lag()

    def catalog_seen(self, generation: int) -> None:
        with self._lock:
            self._seen = generation
            self._note_lag()

    def store_read(self) -> None:
        self._store_read_at = time.monotonic()

    def store_failed(self) -> None:
        self._store_failures.inc()

    def heartbeat_sent(self) -> None:
        self._heartbeat_at = time.monotonic()

    # The audit log

    def audited(self, sequence: int) -> None:
        self._audit_sequence.set(sequence)

    def audit_left_out(self, records: int) -> None:
        self._audit_left_out.inc(records)

    def audit_failed(self) -> None:
        self._audit_failures.inc()

    def _note_lag(self) -> None:
        if self._served >= self._seen:
            self._behind_since = None
        elif self._behind_since is None:
            self._behind_since = time.monotonic()

    def _task_labels(self, task: str, version: int | None) -> tuple[str, str]:
        pair = (task, "" if version is None else str(version))
        with self._lock:
            if pair in self._known_tasks:
                return pair
            if len(self._known_tasks) >= self._max_tasks:
                return (OTHER, "")
            self._known_tasks.add(pair)
        return pair


def _since(moment: float | None) -> float:
    return 0.0 if moment is None else time.monotonic() - moment


class _DeviceMemoryCollector(Collector):
    """Asks for the memory of each device when somebody scrapes."""

    def __init__(self, read: DeviceMemory) -> None:
        self._read = read

    def describe(self) -> Iterable[Metric]:
        return [self._family()]

    def collect(self) -> Iterable[Metric]:
        family = self._family()
        for device, nbytes in self._read().items():
            family.add_metric([device], nbytes)
        yield family

    @staticmethod
    def _family() -> GaugeMetricFamily:
        return GaugeMetricFamily(
            "engram_device_memory_bytes", "Bytes allocated on each device.", labels=["device"]
        )
