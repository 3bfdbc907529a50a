"""Traces as a collector gets them: a real server, OTLP over HTTP, and what happens without one."""

import contextlib
import json
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import httpx
import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from tests.e2e.server_process import ServerProcess, free_port, serving
from tests.serving import photo

TRACE, CALLER = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
HOUR_MS = "3600000"


class Collector:
    """Takes what is exported, and answers with a status."""

    def __init__(self, status: int = 200) -> None:
        self.requests: list[tuple[str, ExportTraceServiceRequest]] = []
        self.arrived = threading.Condition()
        collector = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                with collector.arrived:
                    exported = ExportTraceServiceRequest.FromString(body)
                    collector.requests.append((self.path, exported))
                    collector.arrived.notify_all()
                self.send_response(status)
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, *args: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"

    def await_more_than(self, requests: int) -> None:
        with self.arrived:
            assert self.arrived.wait_for(lambda: len(self.requests) > requests, timeout=60)

    @property
    def spans(self) -> list[Span]:
        return [
            span
            for _, request in self.requests
            for resource in request.resource_spans
            for scope in resource.scope_spans
            for span in scope.spans
        ]


@contextlib.contextmanager
def collecting(status: int = 200) -> Iterator[Collector]:
    collector = Collector(status)
    thread = threading.Thread(target=collector.server.serve_forever)
    thread.start()
    try:
        yield collector
    finally:
        collector.server.shutdown()
        collector.server.server_close()
        thread.join()


def tracing(folder, backbone, url: str, **variables: str):
    environment = {"OTEL_EXPORTER_OTLP_ENDPOINT": url, **variables}
    return serving(
        folder, backbone, tracing="true", drain_notice_seconds=0, environment=environment
    )


def predict(server: ServerProcess, seed: int, **headers: str) -> httpx.Response:
    url = f"{server.url}/predict?tasks=base"
    return httpx.post(url, content=photo(seed), headers=headers, timeout=60)


def attributes_of(span: Span) -> dict[str, object]:
    def value(any_value):
        kind = any_value.WhichOneof("value")
        found = getattr(any_value, kind)
        return [value(each) for each in found.values] if kind == "array_value" else found

    return {each.key: value(each.value) for each in span.attributes}


def test_spans_reach_the_collector_and_the_last_ones_before_the_server_ends(folder_of, tmp_path):
    # Nothing is sent by itself within an hour: all that arrives was sent on leaving.
    with (
        collecting() as collector,
        tracing(
            tmp_path, folder_of("vit"), collector.url, OTEL_BSP_SCHEDULE_DELAY=HOUR_MS
        ) as server,
    ):
        answer = predict(server, 1, traceparent=f"00-{TRACE}-{CALLER}-01")
        assert answer.status_code == 200, answer.text
        assert collector.requests == []
        assert server.stop() == 0
        spans = {span.name: span for span in collector.spans}
        assert {path for path, _ in collector.requests} == {"/v1/traces"}
    assert set(spans) == {"POST /predict", "decode", "queue", "forward"}
    request = spans.pop("POST /predict")
    assert {span.trace_id.hex() for span in (request, *spans.values())} == {TRACE}
    assert request.kind == Span.SPAN_KIND_SERVER
    assert request.parent_span_id.hex() == CALLER
    expected = {
        "http.route": "/predict",
        "http.response.status_code": 200,
        "engram.tasks": ["base"],
        "engram.images.count": 1,
    }
    assert expected.items() <= attributes_of(request).items()
    assert attributes_of(spans["forward"])["engram.device"] == "cpu"
    began, ended = request.start_time_unix_nano, request.end_time_unix_nano
    for span in spans.values():
        assert span.parent_span_id == request.span_id
        assert began <= span.start_time_unix_nano <= span.end_time_unix_nano <= ended
    (line,) = (line for line in log_lines(server) if line.get("path") == "/predict")
    assert line["trace_id"] == TRACE


def log_lines(server: ServerProcess) -> list[dict]:
    """The log, which is JSON as it goes to no terminal."""
    lines = server.log.read_text().splitlines()
    return [json.loads(line) for line in lines if line.startswith("{")]


def test_a_collector_that_refuses_everything_is_logged_once(folder_of, tmp_path):
    with (
        collecting(status=403) as collector,
        tracing(tmp_path, folder_of("vit"), collector.url, OTEL_BSP_SCHEDULE_DELAY="20") as server,
    ):
        for seed in range(3):
            before = len(collector.requests)
            assert predict(server, seed).status_code == 200
            collector.await_more_than(before)
        assert server.stop() == 0
    complaints = [line for line in log_lines(server) if line["logger"].startswith("opentelemetry.")]
    assert len(complaints) == 1
    assert "403" in complaints[0]["message"]


@pytest.mark.long
def test_without_a_collector_requests_are_answered_and_the_server_leaves(folder_of, tmp_path):
    nowhere = f"http://127.0.0.1:{free_port()}"
    with tracing(tmp_path, folder_of("vit"), nowhere, OTEL_BSP_SCHEDULE_DELAY="20") as server:
        for seed in range(5):
            assert predict(server, seed).status_code == 200
        began = time.monotonic()
        assert server.stop() == 0
        # Five seconds for the last traces, and what leaving takes anyway.
        assert time.monotonic() - began < 20
    repeated = [
        line["message"] for line in log_lines(server) if line["logger"].startswith("opentelemetry.")
    ]
    assert any("Transient error" in message for message in repeated)
    assert len(repeated) <= 4  # kinds of messages, each logged once
