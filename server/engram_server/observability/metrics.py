"""Export metrics to Prometheus.

Each app has its own registry, so that two of them can live in one process. Task name and version
are labels; only the first `max_tasks` versions get their own, the rest are labelled `other`.
"""

import threading
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Final

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

from engram_server.engine.observer import (
    GENERATION_SEEN,
    GENERATION_SERVED,
    INSTRUMENTS,
    TASK_LABELS,
    EngineObserver,
    Instrument,
    declare,
)

DeviceMemory = Callable[[], Mapping[str, int]]
Series = Counter | Gauge | Histogram
Writer = Callable[[float], None]

OTHER = "other"
_OPENMETRICS = "application/openmetrics-text"

REQUESTS: Final = declare(
    "histogram",
    "request_seconds",
    "Time from a request's first byte to the end of its response.",
    *("route", "method", "status"),
)
CONNECTIONS: Final = declare("gauge", "connections", "Open connections.")
KEYS_FILE_BROKEN: Final = declare(
    "gauge", "keys_file_broken", "1 while the keys file is invalid and the previous keys are used."
)
INFLIGHT_BODY_BYTES: Final = declare(
    "gauge", "inflight_body_bytes", "Bytes of request bodies in flight."
)
CATALOG_LAG: Final = declare(
    "gauge", "catalog_lag_seconds", "Time since a newer generation was read that is not served yet."
)
# Read when it is scraped, so it is not in INSTRUMENTS.
DEVICE_MEMORY: Final = Instrument(
    "gauge", "engram_device_memory_bytes", "Bytes allocated on each device.", ("device",)
)
# Of a server with several processes only, so it is not in INSTRUMENTS.
PROCESS_UP: Final = Instrument(
    "gauge",
    "engram_process_up",
    "1 for each of several processes that answers, 0 for one that does not.",
    ("process",),
)
AUDIT_SEQUENCE: Final = declare(
    "gauge", "audit_sequence", "Number of the last record of the audit log."
)
AUDIT_DROPPED: Final = declare(
    "counter", "audit_left_out", "Audit records that were not written: too many, or a full disk."
)
AUDIT_FAILURES: Final = declare("counter", "audit_failures", "Failed writes of the audit log.")


class Metrics(EngineObserver):
    """Records the metrics of the engine and of HTTP."""

    def __init__(self, *, max_tasks: int, device_memory: DeviceMemory | None = None) -> None:
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)
        self.registry.register(_DeviceMemoryCollector(device_memory or dict))
        self._max_tasks = max_tasks
        self._tasks: set[tuple[str, ...]] = set()
        self._lock = threading.Lock()
        self._metrics = {each: self._create(each) for each in INSTRUMENTS}
        # Looked up without the locks of prometheus_client's `labels`, and its slow type checks.
        self._writers: dict[tuple[Instrument, tuple[str, ...]], Writer] = {}
        self._recorded_at: dict[Instrument, float] = {}
        self._generations = {GENERATION_SERVED: 0.0, GENERATION_SEEN: 0.0}
        self._behind_since: float | None = None
        self.watch(CATALOG_LAG, lambda: _since(self._behind_since))

    def _create(self, instrument: Instrument) -> Series:
        name, doc, labels = instrument.name, instrument.doc, instrument.labels
        if instrument.kind == "counter":
            return Counter(name, doc, labels, registry=self.registry)
        if instrument.kind == "histogram":
            return Histogram(name, doc, labels, buckets=instrument.buckets, registry=self.registry)
        gauge = Gauge(name, doc, labels, registry=self.registry)
        if instrument.kind == "age":
            gauge.set_function(lambda: _since(self._recorded_at.get(instrument)))
        return gauge

    def watch(self, instrument: Instrument, read: Callable[[], float]) -> None:
        """Let a function supply the value of a gauge."""
        gauge = self._metrics[instrument]
        assert isinstance(gauge, Gauge)
        gauge.set_function(read)

    def record(self, instrument: Instrument, value: float = 1, *labels: str) -> None:
        if instrument.kind == "age":
            self._recorded_at[instrument] = time.monotonic()
            return
        write = self._writers.get((instrument, labels)) or self._find(instrument, labels)
        write(value)
        if instrument in self._generations:
            self._note_generation(instrument, value)

    def _find(self, instrument: Instrument, labels: tuple[str, ...]) -> Writer:
        metric = self._metrics[instrument]
        if not labels:
            write = _writer(metric)
        elif instrument.labels == TASK_LABELS and not self._has_own_labels(labels):
            return _writer(metric.labels(OTHER, ""))  # not kept: there may be any number of tasks
        else:
            write = _writer(metric.labels(*labels))
        self._writers[instrument, labels] = write
        return write

    def _has_own_labels(self, task: tuple[str, ...]) -> bool:
        with self._lock:
            if task not in self._tasks and len(self._tasks) < self._max_tasks:
                self._tasks.add(task)
            return task in self._tasks

    def _note_generation(self, instrument: Instrument, generation: float) -> None:
        with self._lock:
            self._generations[instrument] = generation
            if self._generations[GENERATION_SERVED] >= self._generations[GENERATION_SEEN]:
                self._behind_since = None
            elif self._behind_since is None:
                self._behind_since = time.monotonic()

    def render(self, accept: str) -> tuple[bytes, str]:
        """The metrics in the format that a scraper accepts, and its content type."""
        return encode(self.collect(), accept)

    def collect(self) -> Iterable[Metric]:
        return self.registry.collect()


def _writer(series: Series) -> Writer:
    if isinstance(series, Counter):
        return series.inc
    return series.observe if isinstance(series, Histogram) else series.set


class _Families(Collector):
    """Metrics that were collected before."""

    def __init__(self, families: Iterable[Metric]) -> None:
        self._families = families

    def collect(self) -> Iterable[Metric]:
        return self._families


def encode(families: Iterable[Metric], accept: str) -> tuple[bytes, str]:
    """Write metrics in the format that a scraper accepts; also returns its content type."""
    # Only whether it accepts OpenMetrics: the encoder fails on unusual versions.
    encoder, content_type = choose_encoder(_OPENMETRICS if _OPENMETRICS in accept else "")
    return encoder(_Families(families)), content_type


def _since(moment: float | None) -> float:
    return 0.0 if moment is None else time.monotonic() - moment


class _DeviceMemoryCollector(Collector):
    """Reads the memory of each device when it is scraped."""

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
        return GaugeMetricFamily(DEVICE_MEMORY.name, DEVICE_MEMORY.doc, labels=DEVICE_MEMORY.labels)
