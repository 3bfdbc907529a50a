"""Traces for OpenTelemetry. Imported only when switched on: the extra `otel` has the SDK.

FastAPI makes a server span of each request, which continues the caller's trace. Here it gets the
attributes of the prediction and a child for each stage, made afterwards from the times that the
engine recorded. OpenTelemetry's own variables say where spans go and how many. Nothing is global:
each application has its own provider.
"""

import logging
import os
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from importlib import metadata
from urllib.parse import urlsplit

from fastapi.telemetry import TelemetryConfig
from opentelemetry import trace
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter
from opentelemetry.util.types import AttributeValue

from server.engine.types import Batch, PredictAnswer, PredictRequest, ServedTask, Stage, Timeline
from server.errors import SettingsError

Attributes = Mapping[str, AttributeValue]

# How long an application that ends waits for a collector that does not answer.
_FLUSH_SECONDS = 5.0

_PROTOCOL = "http/protobuf"

_log = logging.getLogger("engram.tracing")


class Tracing:
    """The spans of one application. Requests for `untraced` paths leave none."""

    def __init__(self, untraced: frozenset[str]) -> None:
        _check_environment(os.environ)
        version = metadata.version("engram")
        ours = Resource.create({"service.name": "engram", "service.version": version})
        self._exporter: SpanExporter = OTLPSpanExporter()
        # Ended by the application, not at exit: who leaves by force does not wait.
        self._provider = TracerProvider(
            resource=ours.merge(OTELResourceDetector().detect()), shutdown_on_exit=False
        )
        self._provider.add_span_processor(BatchSpanProcessor(self._exporter))
        self._tracer = self._provider.get_tracer("engram", version)
        self._untraced = untraced

    @property
    def telemetry(self) -> TelemetryConfig:
        """What FastAPI shall do: a span of each request, and nothing else."""
        return {
            "tracer_provider": self._provider,
            "operation_spans": False,
            "metrics": False,
            "logs": False,
            "auto_configure": False,
            "exclude": lambda scope: scope["path"] in self._untraced,
        }

    @property
    def trace_id(self) -> str | None:
        """The trace of the request that is being served, for its line in the log."""
        context = trace.get_current_span().get_span_context()
        return trace.format_trace_id(context.trace_id) if context.is_valid else None

    def predicted(self, request: PredictRequest, outcome: PredictAnswer | BaseException) -> None:
        """Add the request, its outcome and its stages to the span of the HTTP request."""
        span = trace.get_current_span()
        if not span.is_recording():
            return
        span.set_attributes(_attributes(request, outcome))
        error = outcome if isinstance(outcome, BaseException) else None
        clock = _Clock()
        for stage, parts, attributes in _stages(request.timelines):
            self._add_stage(stage, parts, attributes, error, clock)

    def _add_stage(
        self,
        name: str,
        parts: Sequence[Stage],
        attributes: Attributes,
        error: BaseException | None,
        clock: "_Clock",
    ) -> None:
        """One span from the first image that came there to the last that was through."""
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
        """Send what is left. Blocks, but not for long if the collector is away."""
        limit = threading.Timer(_FLUSH_SECONDS, self._give_up)
        limit.daemon = True
        limit.start()
        self._provider.shutdown()
        limit.cancel()

    def _give_up(self) -> None:
        _log.warning("the last traces are lost: no collector took them in time")
        self._exporter.shutdown()


def _check_environment(environment: Mapping[str, str]) -> None:
    """SettingsError if OpenTelemetry's variables ask for what is not done here."""
    for name in ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT"):
        endpoint = environment.get(name)
        if endpoint and urlsplit(endpoint).scheme not in ("http", "https"):
            raise SettingsError(f"{name} must be a URL, such as http://collector:4318.")
    protocol = (
        environment.get("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL")
        or environment.get("OTEL_EXPORTER_OTLP_PROTOCOL")
        or _PROTOCOL
    )
    if protocol != _PROTOCOL:
        raise SettingsError(
            f"Traces are sent with the OTLP protocol {_PROTOCOL}, not {protocol}: set "
            f"OTEL_EXPORTER_OTLP_TRACES_PROTOCOL={_PROTOCOL}, and the collector's port for it "
            f"(usually 4318)."
        )


class _Clock:
    """From the engine's clock, time.monotonic, to the nanoseconds since 1970 that spans want."""

    def __init__(self) -> None:
        self.now = time.monotonic()
        # The largest of three: a thread that is stopped between the two readings gets too little.
        self._epoch = max(time.time_ns() - time.monotonic_ns() for _ in range(3))

    def nanoseconds(self, seconds: float) -> int:
        return self._epoch + round(seconds * 1e9)


def _stages(timelines: Sequence[Timeline]) -> Iterator[tuple[str, Sequence[Stage], Attributes]]:
    """Each stage with its part of every image's time; the pass once for each batch."""
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


def _attributes(request: PredictRequest, outcome: PredictAnswer | BaseException) -> Attributes:
    images: Attributes = {"engram.images.count": len(request.images)}
    if isinstance(outcome, BaseException):
        # As the request has them: they may not exist.
        return images if request.tasks is None else {**images, "engram.tasks": list(request.tasks)}
    tasks = dict.fromkeys(_reference(each.served) for each in outcome.images[0].tasks.values())
    cached = sum(image.cache == "hit" for image in outcome.images)
    return {
        **images,
        "engram.images.cached": cached,
        "engram.images.cold": len(outcome.images) - cached,
        "engram.tasks": list(tasks),
        "engram.generation": outcome.generation,
    }


def _reference(task: ServedTask) -> str:
    return task.name if task.version is None else f"{task.name}@{task.version}"
