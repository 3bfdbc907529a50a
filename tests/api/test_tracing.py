"""Traces: which spans a request leaves, what they say, and that nothing is there when it is off."""

import logging
import os
import subprocess
import sys
import threading
import time
from functools import partial

import grpc
import pytest
from engram_server.api.rpc.protocol import SERVICE
from engram_server.app import create_app
from engram_server.errors import SettingsError
from engram_server.observability import tracing
from engram_server.settings import Settings
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode, format_trace_id
from starlette.testclient import TestClient

from tests.api.conftest import running_world
from tests.api.rpc.service import infer_request
from tests.api.test_v2_infer import image_input, post
from tests.conftest import REPOSITORY
from tests.e2e.server_process import free_port
from tests.serving import photo

STAGES = ["decode", "queue", "forward"]
TRACE, CALLER = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


@pytest.fixture(autouse=True)
def clean(monkeypatch):
    """No variable of the machine the tests run on."""
    for name in os.environ:
        if name.startswith("OTEL_"):
            monkeypatch.delenv(name)


@pytest.fixture
def traced(world, monkeypatch):
    """`traced(call)`: what `call(client)` returns, and the spans it leaves."""

    def run(call, app=world.app, raising=True):
        exporter = InMemorySpanExporter()
        monkeypatch.setattr(tracing, "OTLPSpanExporter", lambda: exporter)
        with TestClient(app(tracing=True), raise_server_exceptions=raising) as client:
            result = call(client)
        # Ordered by their beginnings: the request comes first.
        return result, sorted(exporter.get_finished_spans(), key=lambda span: span.start_time)

    return run


def predict(images, tasks="pets", **headers):
    files = [("image", (f"{number}.png", image)) for number, image in enumerate(images)]
    return lambda client: client.post(f"/predict?tasks={tasks}", files=files, headers=headers)


def by_name(spans):
    assert len({span.name for span in spans}) == len(spans)
    return {span.name: span for span in spans}


# --- what is there --------------------------------------------------------------------------------


def test_a_prediction_is_a_server_span_with_a_child_for_each_stage(world, traced):
    response, spans = traced(predict([photo(900)], "pets,scene@1,base,pets@1"))
    request, *stages = spans
    assert [span.name for span in stages] == STAGES
    assert (request.name, request.kind, request.parent) == ("POST /predict", SpanKind.SERVER, None)
    assert request.status.status_code is StatusCode.UNSET
    expected = {
        "http.request.method": "POST",
        "http.route": "/predict",
        "http.response.status_code": 200,
        "engram.tasks": ("pets@1", "scene@1", "base"),
        "engram.generation": response.json()["generation"],
        "engram.images.count": 1,
        "engram.images.cached": 0,
        "engram.images.cold": 1,
    }
    assert expected.items() <= dict(request.attributes).items()
    decode, queue, forward = stages
    for span in stages:
        assert span.parent.span_id == request.context.span_id
        assert span.context.trace_id == request.context.trace_id
        assert request.start_time <= span.start_time <= span.end_time <= request.end_time
        assert span.status.status_code is StatusCode.UNSET
        milliseconds = (span.end_time - span.start_time) / 1e6
        assert milliseconds == pytest.approx(response.json()["timings_ms"][span.name], abs=0.01)
    assert decode.end_time <= queue.start_time
    assert queue.end_time == pytest.approx(forward.start_time, abs=1000)
    assert dict(forward.attributes) == {
        "engram.batch.images": 1,
        "engram.batch.rows": world.backbone.geometry.tokens + 2,  # base reads the image's own
        "engram.device": "cpu",
    }


def test_images_seen_before_are_counted_as_cached(traced):
    traced(predict([photo(901)]))
    _, (request, *_) = traced(predict([photo(901), photo(902)]))
    counts = [request.attributes[f"engram.images.{each}"] for each in ("count", "cached", "cold")]
    assert counts == [2, 1, 1]


def test_the_open_inference_protocol_is_traced_alike(traced):
    tensor_input = image_input(photo(903))
    _, spans = traced(lambda client: post(client, tensor_input, "/v2/models/pets/versions/1/infer"))
    request, *stages = spans
    assert request.name == "POST /v2/models/{name}/versions/{version}/infer"
    assert request.attributes["engram.tasks"] == ("pets@1",)
    assert [span.name for span in stages] == STAGES


def test_each_batch_of_a_request_is_a_span(settings, traced):
    with running_world(settings.model_copy(update={"budget_rows": 1})) as world:
        _, spans = traced(predict([photo(904), photo(905), photo(906)]), world.app)
    forwards = [span for span in spans if span.name == "forward"]
    others = by_name([span for span in spans if span.name != "forward"])
    assert [span.attributes["engram.batch.images"] for span in forwards] == [1, 1, 1]
    assert set(others) == {"POST /predict", "decode", "queue"}
    # The wait ends when a worker takes the last image.
    assert others["queue"].start_time <= forwards[0].start_time
    assert others["queue"].end_time == pytest.approx(forwards[-1].start_time, abs=1000)


def test_other_requests_are_plain_spans_and_probes_are_none(traced):
    def call(client):
        for path in ("/livez", "/readyz", "/metrics", "/v2/health/live", "/v2/health/ready"):
            assert client.get(path).status_code == 200
        client.get("/tasks/pets")

    _, (request,) = traced(call)
    assert request.name == "GET /tasks/{task}"
    assert request.attributes["http.response.status_code"] == 200


def test_the_log_names_the_trace(traced, world, caplog):
    caplog.set_level(logging.INFO, "engram.access")
    _, (request, *_) = traced(predict([photo(907)]))
    (line,) = caplog.records
    assert line.trace_id == format_trace_id(request.context.trace_id)
    caplog.clear()
    with TestClient(world.app()) as client:
        client.get("/tasks")
    (line,) = caplog.records
    assert not hasattr(line, "trace_id")


# --- whose trace it is ----------------------------------------------------------------------------


def test_the_callers_trace_is_continued(traced):
    _, (request, *stages) = traced(predict([photo(908)], traceparent=f"00-{TRACE}-{CALLER}-01"))
    assert request.parent.span_id == int(CALLER, 16)
    assert {span.context.trace_id for span in (request, *stages)} == {int(TRACE, 16)}


def test_what_the_caller_does_not_sample_leaves_no_span(traced):
    response, spans = traced(predict([photo(909)], traceparent=f"00-{TRACE}-{CALLER}-00"))
    assert response.status_code == 200
    assert spans == []


def test_opentelemetrys_own_variables_are_obeyed(traced, monkeypatch):
    _, (request, *_) = traced(predict([photo(910)]))
    assert request.resource.attributes["service.name"] == "engram"
    monkeypatch.setenv("OTEL_SERVICE_NAME", "pictures")
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "deployment.environment.name=staging")
    _, (request, *_) = traced(predict([photo(910)]))
    assert request.resource.attributes["service.name"] == "pictures"
    assert request.resource.attributes["deployment.environment.name"] == "staging"
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", "always_off")
    assert traced(predict([photo(910)]))[1] == []


# --- what went wrong ------------------------------------------------------------------------------


def test_a_failed_batch_is_an_error_of_the_request_and_of_its_pass(world, traced, monkeypatch):
    def broken(*args, **kwargs):
        raise RuntimeError("out of memory")

    monkeypatch.setattr(world.passes, "run", broken)
    response, spans = traced(predict([photo(911)], "pets,scene"))
    assert response.status_code == 500
    found = by_name(spans)
    request, forward = found["POST /predict"], found["forward"]
    assert request.status.status_code is StatusCode.ERROR
    assert request.attributes["http.response.status_code"] == 500
    assert request.attributes["error.type"] == "500"
    assert request.attributes["engram.tasks"] == ("pets@1", "scene@1")
    assert forward.status.status_code is StatusCode.ERROR
    assert forward.status.description.startswith("BatchFailed: ")
    assert forward.end_time <= request.end_time
    assert found["queue"].status.status_code is StatusCode.UNSET


def test_a_missed_deadline_shows_the_stage_it_was_missed_in(world, traced, monkeypatch):
    opened = threading.Event()

    def blocked(*args, **kwargs):
        assert opened.wait(60)
        raise RuntimeError("too late")

    monkeypatch.setattr(world.passes, "run", blocked)
    try:
        response, spans = traced(predict([photo(912)], **{"X-Deadline-Ms": "300"}))
    finally:
        opened.set()
    assert response.status_code == 504
    request, *stages = spans
    assert request.status.status_code is StatusCode.ERROR
    *finished, last = stages
    assert all(span.status.status_code is StatusCode.UNSET for span in finished)
    assert last.status.status_code is StatusCode.ERROR
    assert last.status.description.startswith("DeadlineExceeded: ")


def test_a_client_error_is_not_a_server_error(traced):
    response, spans = traced(predict([b"no picture"]))
    assert response.status_code == 422
    found = by_name(spans)
    assert set(found) == {"POST /predict", "decode"}
    assert found["POST /predict"].status.status_code is StatusCode.UNSET
    assert found["decode"].status.description.startswith("UnreadableImage: ")


def test_an_unexpected_error_is_one_of_the_request(world, traced, monkeypatch):
    async def broken(*args, **kwargs):
        raise ZeroDivisionError("oops")

    monkeypatch.setattr(world.engine.predictions, "predict", broken)
    response, (request,) = traced(predict([photo(913)]), raising=False)
    assert response.status_code == 500
    assert request.status.status_code is StatusCode.ERROR
    assert request.attributes["engram.images.count"] == 1


def test_a_collector_that_is_away_costs_neither_answers_nor_much_time(world, monkeypatch, caplog):
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{free_port()}")
    monkeypatch.setattr(tracing, "_FLUSH_SECONDS", 0.2)
    with TestClient(world.app(tracing=True)) as client:
        assert predict([photo(914)])(client).status_code == 200
        began = time.monotonic()
    assert time.monotonic() - began < 5
    assert "the last traces are lost" in caplog.text


# --- switching it on and off ----------------------------------------------------------------------


@pytest.mark.long
def test_switched_off_nothing_of_the_sdk_is_loaded():
    # FastAPI itself imports OpenTelemetry's interface, which does nothing without an SDK.
    program = """if True:
        import sys
        from engram_server.app import create_app
        from engram_server.settings import Settings
        create_app(Settings(backbone="b", devices="cpu"))
        print(*sys.modules)
    """
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=REPOSITORY, capture_output=True, text=True, check=True
    )
    loaded = done.stdout.split()
    assert "engram_server.app" in loaded
    assert not {
        "engram_server.observability.tracing",
        "opentelemetry.sdk",
        "opentelemetry.exporter",
    } & set(loaded)


def test_a_missing_extra_is_named_with_its_install_command(monkeypatch):
    monkeypatch.delitem(sys.modules, "engram_server.observability.tracing")
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    with pytest.raises(SettingsError, match=r"pip install 'engram-vit\[tracing\]'"):
        create_app(Settings(backbone="b", tracing=True))


@pytest.mark.parametrize(
    ("name", "value", "complaint"),
    [
        ("OTEL_EXPORTER_OTLP_ENDPOINT", "collector:4318", "OTEL_EXPORTER_OTLP_ENDPOINT"),
        ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "/v1/traces", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"),
        ("OTEL_EXPORTER_OTLP_PROTOCOL", "grpc", "protocol grpc"),
        ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "http/json", "protocol http/json"),
    ],
)
def test_what_cannot_be_exported_is_rejected_in_a_sentence(monkeypatch, name, value, complaint):
    monkeypatch.setenv(name, value)
    with pytest.raises(SettingsError, match=complaint):
        create_app(Settings(backbone="b", tracing=True))


def test_the_protocol_of_traces_goes_before_that_of_all_signals(monkeypatch):
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", "grpc")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "http/protobuf")
    create_app(Settings(backbone="b", tracing=True)).state.runtime.tracing.shutdown()


def test_a_grpc_call_continues_the_trace_of_its_client(traced, world):
    def call(client):
        address = f"127.0.0.1:{client.app.state.runtime.grpc_port}"
        metadata = [("traceparent", f"00-{TRACE}-{CALLER}-01")]
        with grpc.insecure_channel(address) as channel:
            request = infer_request(photo(71)).SerializeToString()
            channel.unary_unary(f"/{SERVICE}/ModelInfer")(request, metadata=metadata)
            channel.unary_unary(f"/{SERVICE}/ServerReady")(b"")  # has no span

    _, spans = traced(call, app=partial(world.app, grpc_port=0))
    root, *stages = spans
    assert (root.name, root.kind) == (f"{SERVICE}/ModelInfer", SpanKind.SERVER)
    assert format_trace_id(root.context.trace_id) == TRACE
    assert root.attributes["engram.tasks"] == ("pets@1",)
    assert [span.name for span in stages] == STAGES
