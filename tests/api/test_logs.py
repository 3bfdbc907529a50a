"""Logs: one line per request, JSON for machines and text for people."""

import io
import json
import logging

import pytest
from engram_server.observability import logs
from starlette.testclient import TestClient


@pytest.fixture
def configured():
    """`configured(format)`: the stream that logs go to; everything as it was afterwards."""
    names = (
        None,
        "uvicorn",
        "uvicorn.error",
        "uvicorn.access",
        "httpx",
        "httpx2",
        "httpcore",
        "urllib3",
        "asyncio",
    )
    loggers = [logging.getLogger(name) for name in names]
    before = [
        (each, each.handlers[:], each.level, each.propagate, each.disabled) for each in loggers
    ]

    def configure(log_format, level="info", **options):
        stream = io.StringIO()
        logs.configure(log_format, level, stream, **options)
        return stream

    yield configure
    for each, handlers, level, propagate, disabled in before:
        each.handlers[:], each.propagate, each.disabled = handlers, propagate, disabled
        each.setLevel(level)


def lines(stream):
    return [json.loads(line) for line in stream.getvalue().splitlines()]


def test_each_request_leaves_one_json_line(world, cat, configured):
    stream = configured("json")
    with TestClient(world.app()) as client:
        client.post("/predict?tasks=pets,scene", content=cat, headers={"X-Request-Id": "id-1"})
        client.get("/tasks/missing")
    predicted, described = lines(stream)
    assert predicted["request_id"] == "id-1"
    assert predicted["logger"] == "engram.access"
    assert (predicted["method"], predicted["path"]) == ("POST", "/predict")
    assert (predicted["status"], predicted["images"], predicted["tasks"]) == (200, 1, 2)
    assert predicted["ms"] > 0
    assert predicted["time"].endswith("Z")
    assert described["status"] == 404
    assert "images" not in described


def test_the_line_is_there_before_the_last_byte_of_the_answer(world, configured):
    stream = configured("json")
    app = world.app()
    seen = []

    async def looking(scope, receive, send):
        async def send_and_look(message):
            if message["type"] == "http.response.body":
                seen.append((message.get("more_body", False), len(lines(stream))))
            await send(message)

        await app(scope, receive, send_and_look if scope["type"] == "http" else send)

    with TestClient(looking) as client:
        client.get("/tasks")
    assert seen[-1] == (False, 1)
    assert len(lines(stream)) == 1


def test_the_line_has_the_address_of_the_peer_or_from_a_trusted_proxy(world, configured):
    stream = configured("json")
    for trusted in ((), ("10.0.0.0/8",)):
        with TestClient(world.app(trusted_proxies=trusted), client=("10.0.0.1", 4711)) as client:
            client.get("/tasks", headers={"X-Forwarded-For": "8.8.8.8, 203.0.113.9"})
    assert [line["address"] for line in lines(stream)] == ["10.0.0.1", "203.0.113.9"]


def test_probes_are_quiet_until_they_fail(world, configured):
    stream = configured("json")
    app = world.app()
    with TestClient(app) as client:
        client.get("/livez")
        client.get("/readyz")
        client.get("/metrics")
        assert lines(stream) == []
        app.state.runtime.draining = True
        client.get("/readyz")
    assert [line["status"] for line in lines(stream)] == [503]


def test_unexpected_errors_are_logged_with_their_traceback_and_id(world, monkeypatch, configured):
    async def broken(*args, **kwargs):
        raise ZeroDivisionError("oops")

    monkeypatch.setattr(world.engine.predictions, "predict", broken)
    stream = configured("json")
    with TestClient(world.app()) as client:
        client.post("/predict", content=b"x", headers={"X-Request-Id": "id-2"})
    error, access = lines(stream)
    assert (error["level"], error["request_id"]) == ("error", "id-2")
    assert "ZeroDivisionError: oops" in error["exception"]
    assert access["status"] == 500


def test_what_a_library_hides_in_every_record_is_not_logged(configured):
    stream = configured("json")
    logging.getLogger("engram.test").info("hello", extra={"_hidden": 1, "seen": 2})
    (line,) = lines(stream)
    assert line["seen"] == 2
    assert not [name for name in line if name.startswith("_")]


def test_text_is_one_readable_line_without_control_characters(world, configured):
    stream = configured("text")
    with TestClient(world.app()) as client:
        client.get("/tasks/%1b%5b31mred%0aline")
    (line,) = stream.getvalue().splitlines()
    assert " info    GET /tasks/\\x1b[31mred\\nline 404 ms=" in line


def test_format_follows_the_terminal_by_default(configured):
    stream = configured("auto")
    logging.getLogger("engram.test").warning("hello %s", "there", extra={"answer": 42})
    (line,) = lines(stream)
    assert (line["message"], line["answer"], line["level"]) == ("hello there", 42, "warning")


def test_uvicorn_logs_in_the_same_format(configured):
    stream = configured("json")
    logging.getLogger("uvicorn.error").error("broken", extra={"color_message": "x"})
    logging.getLogger("uvicorn.access").info("never")
    (line,) = lines(stream)
    assert line["message"] == "broken"
    assert "color_message" not in line


def test_repeated_opentelemetry_messages_are_logged_once_in_ten_minutes():
    limit = logs.RateLimit()

    def passes(name, seconds):
        message = {"msg": "retrying in %.2fs", "args": (seconds,)}
        return limit.filter(logging.makeLogRecord({"name": name, "created": seconds, **message}))

    moments = (0, 1, 599, 601, 602)
    assert [passes("opentelemetry.exporter", each) for each in moments] == [1, 0, 0, 1, 0]
    assert all(passes("engram.worker", each) for each in moments)


def test_records_name_their_process_if_there_are_several(configured):
    for log_format, part in (("json", '"process": 2'), ("text", "hello process=2")):
        stream = configured(log_format, process=2)
        logging.getLogger("engram.test").info("hello")
        assert part in stream.getvalue()
    stream = configured("json")
    logging.getLogger("engram.test").info("hello")
    assert "process" not in stream.getvalue()
