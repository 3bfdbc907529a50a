"""OpenTelemetry traces. Imported only if enabled; requires the extra `tracing`.

FastAPI creates a server span per HTTP request, and `Tracing.call` one per gRPC call. This module
adds the attributes of the prediction and a child span per stage, from the times that the engine
recorded. OpenTelemetry's variables configure the export. Each application has its own provider.
"""

import logging
import os
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import metadata
from urllib.parse import urlsplit

from fastapi.telemetry import TelemetryConfig
from opentelemetry import trace
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.propagate import extract
from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter
from opentelemetry.util.types import AttributeValue

from engram_server.engine.tasks.snapshot import Plan
from engram_server.engine.types import Batch, PredictAnswer, Stage, Timeline
from engram_server.errors import SettingsError

Attributes = Mapping[str, AttributeValue]

# Time to flush spans at shutdown.
_FLUSH_SECONDS = 5.0

_PROTOCOL = "http/protobuf"

_log = logging.getLogger("engram.tracing")


class Tracing:
    """The spans of one application; requests to `untraced` paths have none."""

    def __init__(self, untraced: frozenset[str]) -> None:
        _check_environment(os.environ)
        version = metadata.version("engram-vit-server")
        ours = Resource.create({"service.name": "engram", "service.version": version})
        self._exporter: SpanExporter = OTLPSpanExporter()
        # Shut down by the application, not at exit: a forced exit must not wait.
        self._provider = TracerProvider(
            resource=ours.merge(OTELResourceDetector().detect()), shutdown_on_exit=False
        )
        self._provider.add_span_processor(BatchSpanProcessor(self._exporter))
        self._tracer = self._provider.get_tracer("engram", version)
        self._untraced = untraced

    @property
    def telemetry(self) -> TelemetryConfig:
        """FastAPI's configuration: one span per request."""
        return {
            "tracer_provider": self._provider,
            "operation_spans": False,
            "metrics": False,
            "logs": False,
            "auto_configure": False,
            "exclude": lambda scope: scope["path"] in self._untraced,
        }

    @contextmanager
    def call(self, path: str, headers: Mapping[str, str]) -> Iterator[None]:
        """The span of a gRPC call, which continues the trace of its client."""
        if path in self._untraced:
            yield
            return
        with self._tracer.start_as_current_span(
            path.removeprefix("/"), extract(headers), trace.SpanKind.SERVER, {"rpc.system": "grpc"}
        ):
            yield

    @property
    def trace_id(self) -> str | None:
        """The trace id of the current request, for the access log."""
        context = trace.get_current_span().get_span_context()
        return trace.format_trace_id(context.trace_id) if context.is_valid else None

    def predicted(
        self,
        plan: Plan,
        timelines: Sequence[Timeline],
        outcome: PredictAnswer | BaseException,
    ) -> None:
        """Add a prediction, its outcome and its stages to the span of the request."""
        span = trace.get_current_span()
        if not span.is_recording():
            return
        span.set_attributes(_attributes(plan, len(timelines), outcome))
        error = outcome if isinstance(outcome, BaseException) else None
        clock = _Clock()
        for stage, parts, attributes in _stages(timelines):
            self._add_stage(stage, parts, attributes, error, clock)

    def _add_stage(
        self,
        name: str,
        parts: Sequence[Stage],
        attributes: Attributes,
        error: BaseException | None,
        clock: "_Clock",
    ) -> None:
        """Add one span from the first image that entered a stage to the last that left it."""
        # Read once: a worker may still be writing.
        times = [(part.started, part.ended) for part in parts]
        begun = [(start, end) for start, end in times if start is not None]
        if not begun:
            return
        started = min(start for start, _ in begun)
        ended = max(max(start, clock.now) if end is None else end for start, end in begun)
        span = self._tracer.start_span(
            name, attributes=attributes, start_time=clock.nanoseconds(started)
        )
        if error is not None and any(end is None for _, end in begun):
            span.set_status(trace.StatusCode.ERROR, f"{type(error).__name__}: {error}")
        span.end(clock.nanoseconds(ended))

    def shutdown(self) -> None:
        """Flush the spans, for at most _FLUSH_SECONDS."""
        limit = threading.Timer(_FLUSH_SECONDS, self._give_up)
        limit.daemon = True
        limit.start()
        self._provider.shutdown()
        limit.cancel()

    def _give_up(self) -> None:
        _log.warning("the last traces are lost: the collector did not answer in time")
        self._exporter.shutdown()


def _check_environment(environment: Mapping[str, str]) -> None:
    """Raise SettingsError for unsupported OpenTelemetry variables."""
    for name in ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT"):
        endpoint = environment.get(name)
        if endpoint and urlsplit(endpoint).scheme not in ("http", "https"):
            raise SettingsError(f"{name} must be a URL. Example: http://collector:4318.")
    protocol = (
        environment.get("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL")
        or environment.get("OTEL_EXPORTER_OTLP_PROTOCOL")
        or _PROTOCOL
    )
    if protocol != _PROTOCOL:
        raise SettingsError(
            f"Unsupported OTLP protocol {protocol}. Set "
            f"OTEL_EXPORTER_OTLP_TRACES_PROTOCOL={_PROTOCOL} and the matching port (usually 4318)."
        )


class _Clock:
    """Converts time.monotonic to nanoseconds since the epoch."""

    def __init__(self) -> None:
        self.now = time.monotonic()
        # The largest of three: a pause between the two readings makes the difference smaller.
        self._epoch = max(time.time_ns() - time.monotonic_ns() for _ in range(3))

    def nanoseconds(self, seconds: float) -> int:
        return self._epoch + round(seconds * 1e9)


def _stages(timelines: Sequence[Timeline]) -> Iterator[tuple[str, Sequence[Stage], Attributes]]:
    """Each stage with the times of all images; the pass once per batch."""
    yield "decode", [each.decode for each in timelines], {}
    yield "queue", [each.queue for each in timelines], {}
    batches: dict[Batch, list[Stage]] = {}
    for each in timelines:
        if each.batch is not None:
            batches.setdefault(each.batch, []).append(each.forward)
    for batch, parts in batches.items():
        attributes: Attributes = {
            "engram.batch.images": batch.images,
            "engram.batch.rows": batch.rows,
            "engram.device": batch.device,
        }
        yield "forward", parts, attributes


def _attributes(plan: Plan, images: int, outcome: PredictAnswer | BaseException) -> Attributes:
    tasks = [
        task.name if task.version is None else f"{task.name}@{task.version}" for task in plan.tasks
    ]
    attributes: dict[str, AttributeValue] = {
        "engram.images.count": images,
        "engram.tasks": list(dict.fromkeys(tasks)),
        "engram.generation": plan.generation,
    }
    if isinstance(outcome, PredictAnswer):
        cached = sum(image.cache == "hit" for image in outcome.images)
        attributes |= {"engram.images.cached": cached, "engram.images.cold": images - cached}
    return attributes
