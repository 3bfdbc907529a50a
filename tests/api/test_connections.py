"""What a connection may take before, between and after its requests, over real sockets."""

import contextlib
import json
import threading
import time

import pytest
from engram_server.edge.connections import (
    DISCARDED_BYTES_PER_SECOND,
    LINGER_SECONDS,
    MAX_PIPELINED,
    LimitedProtocol,
)
from engram_server.edge.proxies import network_of

from tests.api.raw_http import PREDICT, listening
from tests.serving import photo

GET = b"GET /livez HTTP/1.1\r\nHost: 127.0.0.1\r\n"
LIVEZ = GET + b"\r\n"


@pytest.fixture(scope="module")
def server(world):
    with listening(
        world,
        header_bytes=8192,
        header_count=20,
        header_seconds=0.5,
        body_seconds=0.6,
        bundle_seconds=0.7,
        idle_seconds=0.8,
    ) as server:
        yield server


def test_ordinary_requests_are_answered_one_after_another(server):
    with server.wire() as wire:
        for _ in range(3):
            wire.send(LIVEZ)
            assert wire.answer().status == 200


# The header


@pytest.mark.parametrize(
    ("request_", "reason"),
    [
        (GET + b"X-Long: " + b"a" * 9000 + b"\r\n\r\n", "header_bytes"),
        (GET + b"".join(b"X-%d: %s\r\n" % (n, b"b" * 900) for n in range(10)), "header_bytes"),
        (b"GET /livez?" + b"q" * 9000 + b" HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n", "header_bytes"),
        (GET + b"".join(b"X-%d: 1\r\n" % n for n in range(20)) + b"\r\n", "header_count"),
    ],
    ids=["one long header", "many long headers", "a long address", "many headers"],
)
def test_headers_beyond_the_limit_are_431(server, request_, reason):
    before = server.rejected(reason)
    answer = server.ask(request_)
    assert (answer.status, answer.problem) == (431, "headers-too-large")
    assert answer.headers["connection"] == "close"
    assert server.rejected(reason) == before + 1


def test_a_header_without_end_is_not_read_to_the_end(server):
    with server.wire() as wire:
        wire.send(GET + b"X-Endless: ")
        sent = wire.send_until_answered(b"a" * 4096, most=2**20)
        assert sent < 2**20
        assert wire.answer().status == 431
        assert wire.wait_for_close() == b""


def test_half_a_header_is_408_after_its_time(server):
    with server.counts("header_time"), server.wire() as wire:
        started = time.monotonic()
        wire.send(GET)
        answer = wire.answer()
        assert (answer.status, answer.problem) == (408, "request-too-slow")
        assert 0.4 < time.monotonic() - started < 5
        assert wire.wait_for_close() == b""


def test_a_header_that_comes_in_drops_has_no_more_time_than_others(server):
    with server.wire() as wire:
        wire.send(GET + b"X: ")
        sent = wire.send_until_answered(b"1", most=100)
        assert 1 < sent < 100
        assert wire.answer().status == 408


# The time between requests


@pytest.mark.parametrize("first", [b"", LIVEZ], ids=["no request", "one request"])
def test_an_idle_connection_is_closed(server, first):
    with server.counts("idle"), server.wire() as wire:
        if first:
            wire.send(first)
            wire.answer()
        started = time.monotonic()
        assert wire.wait_for_close() == b""
        assert 0.6 < time.monotonic() - started < 5


def test_line_breaks_do_not_keep_a_connection_alive(server):
    with server.wire() as wire:
        started = time.monotonic()
        try:
            while time.monotonic() - started < 10:
                wire.send(b"\r\n")
                time.sleep(0.05)
        except ConnectionError:
            pass
        assert time.monotonic() - started < 5


# The body


def test_a_slow_body_is_408_and_the_deadline_is_sooner_if_it_is(server):
    before = server.rejected("body_time"), server.rejected("deadline")
    for header, status, kind in (
        (b"", 408, "request-too-slow"),
        (b"X-Deadline-Ms: 200\r\n", 504, "deadline-exceeded"),
        (b"X-Deadline-Ms: 60000\r\n", 408, "request-too-slow"),
    ):
        with server.wire() as wire:
            wire.send(PREDICT + header + b"Content-Length: 1000\r\n\r\n" + b"half")
            answer = wire.answer()
            assert (answer.status, answer.problem) == (status, kind)
    assert server.rejected("body_time") == before[0] + 2
    assert server.rejected("deadline") == before[1] + 1


@pytest.mark.parametrize("kind", [b"application/json", b"multipart/form-data; boundary=x"])
def test_bodies_of_every_form_have_their_time(server, kind):
    head = b"POST /predict HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: " + kind + b"\r\n"
    assert server.ask(head + b"Content-Length: 1000\r\n\r\n--x").status == 408


def test_a_wrong_body_after_100_continue_is_a_client_error(server, caplog):
    head = PREDICT + b"Expect: 100-continue\r\nTransfer-Encoding: chunked\r\n\r\n"
    with server.wire() as wire:
        wire.send(head + b"no length\r\n")  # before the server sends 100 Continue
        assert wire.answer().status == 400
        assert wire.wait_for_close() == b""
    assert "failed unexpectedly" not in caplog.text


def test_a_slow_bundle_is_408_too(server):
    head = b"POST /tasks/validate HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 1000\r\n\r\n"
    assert server.ask(head + b"half").status == 408


def test_the_deadline_counts_from_the_first_byte_of_the_header(server):
    with server.wire() as wire:
        wire.send(PREDICT)
        time.sleep(0.3)
        body = photo(1)
        wire.send(b"X-Deadline-Ms: 250\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
        assert (answer := wire.answer()).status == 504
        assert "while the request was being read" in json.loads(answer.body)["detail"]


def test_a_body_that_goes_on_after_its_answer_is_cut_off(server):
    with server.counts("unread_body"), server.wire() as wire:
        wire.send(b"GET /livez HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 1000000\r\n\r\n")
        assert wire.answer().status == 200
        started = time.monotonic()
        try:
            while time.monotonic() - started < 15:
                wire.send(b"x")
                time.sleep(0.05)
        except ConnectionError:
            pass
        assert time.monotonic() - started < 10


@pytest.mark.parametrize(
    ("line", "name"),
    [(b"POST /predict", "body_bytes"), (b"POST /tasks/validate", "bundle_bytes")],
)
def test_body_bytes_in_flight_are_limited_and_released(world, line, name):
    head = line + b" HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 150000\r\n\r\n"
    limits = {"inflight_body_bytes": 250_000, "inflight_bundle_bytes": 250_000}
    with listening(world, **limits) as server:
        pool = getattr(server.runtime.pools, name)
        with server.wire() as first:
            first.send(head + bytes(149_999))
            server.await_value(lambda: pool.used, 149_999)
            answer = server.ask(head + bytes(140_000))
            assert (answer.status, answer.problem) == (429, "overloaded")
            assert answer.headers["retry-after"] == "1"
            assert server.rejected("inflight_body_bytes") >= 1
        server.await_value(lambda: pool.used, 0)


def test_validations_at_once_are_limited(world, monkeypatch):
    head = b"POST /tasks/validate HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 8\r\n\r\n"
    go_on = threading.Event()
    monkeypatch.setattr(world.engine.tasks, "validate", lambda file: (None, str(go_on.wait(60))))
    with listening(world, max_validations=1) as server, server.wire() as first:
        first.send(head + b"a bundle")
        server.await_value(lambda: server.runtime.pools.validations.used, 1)
        with server.counts("validations"):
            answer = server.ask(head + b"a bundle")
        assert (answer.status, answer.problem) == (429, "overloaded")
        assert int(answer.headers["retry-after"]) >= 1
        go_on.set()
        assert first.answer().status == 200
        server.await_value(lambda: server.runtime.pools.validations.used, 0)


def test_a_validation_takes_its_slot_after_the_upload(world):
    head = b"POST /tasks/validate HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 8\r\n\r\n"
    with listening(world, max_validations=1) as server, server.wire() as slow:
        slow.send(head + b"half")
        server.await_value(lambda: server.runtime.pools.bundle_bytes.used, 4)
        assert server.ask(head + b"a bundle").status == 200


def test_a_slow_upload_is_408(world):
    head = b"PUT /tasks/slow HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 1000\r\n\r\n"
    with listening(world, body_seconds=0.3, bundle_seconds=60) as server, server.wire() as wire:
        wire.send(head + b"half")
        answer = wire.answer()
    assert (answer.status, answer.problem) == (408, "request-too-slow")
    assert "bytes per second" in json.loads(answer.body)["detail"]


# Answers that clients do not read


def test_concurrent_downloads_are_limited_until_they_are_sent(world, fresh, monkeypatch):
    large = bytes(16 * 2**20)
    monkeypatch.setattr(world.engine.tasks, "read_bytes", lambda digest: large)
    get = b"GET /tasks/pets/versions/1/bundle HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"
    with listening(world, max_downloads=1, send_seconds=1) as server, server.wire() as first:
        first.send(get)
        server.await_value(lambda: server.runtime.pools.downloads.used, 1)
        with server.counts("downloads"):
            answer = server.ask(get)
        assert (answer.status, answer.problem) == (429, "overloaded")
        # It never reads: its connection is cut, and its place is free.
        server.await_value(lambda: server.runtime.pools.downloads.used, 0)
        assert server.rejected("send_time") >= 1
        with server.wire() as second:
            second.send(get)
            assert len(second.answer().body) == len(large)


def test_a_client_that_reads_slowly_is_cut_off(world, monkeypatch):
    """Two MiB in each fifth of the period are not enough, and do not begin another period."""
    large = bytes(64 * 2**20)
    monkeypatch.setattr(world.engine.tasks, "read_bytes", lambda digest: large)
    get = b"GET /tasks/pets/versions/1/bundle HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"
    limits = {"send_seconds": 1, "min_bytes_per_second": 64 * 2**20}
    with listening(world, **limits) as server, server.wire() as slow, server.counts("send_time"):
        downloads, freed = server.runtime.pools.downloads, threading.Event()
        give_back = downloads.give_back
        monkeypatch.setattr(downloads, "give_back", lambda *args: (give_back(*args), freed.set()))
        slow.send(get)
        taken = 0
        with contextlib.suppress(OSError):
            while not freed.wait(0.2):
                part = 0
                while part < 2 * 2**20 and (data := slow.socket.recv(65536)):
                    part += len(data)
                taken += part
        assert taken < len(large) / 2  # cut off while it read, and not at the end


# Connections


def test_connections_beyond_the_limits_are_503(world):
    with (
        listening(world, connections=2) as server,
        server.wire() as first,
        server.wire() as second,
    ):
        for wire in (first, second):
            wire.send(LIVEZ)
            assert wire.answer().status == 200
        answer = server.ask(LIVEZ)
        assert (answer.status, answer.problem) == (503, "too-many-connections")
        assert answer.headers["retry-after"] == "1"
        assert server.rejected("connections") >= 1
        first.close()
        metrics = server.runtime.metrics.registry
        server.await_value(lambda: metrics.get_sample_value("engram_connections"), 1)
        assert server.ask(LIVEZ).status == 200


def test_connections_of_one_address_are_limited(world):
    with listening(world, connections_per_address=1) as server, server.wire() as first:
        first.send(LIVEZ)
        assert first.answer().status == 200
        answer = server.ask(LIVEZ)
        assert (answer.status, answer.problem) == (503, "too-many-connections")
        assert server.rejected("address_connections") >= 1


def test_an_ipv6_network_is_one_address():
    assert network_of("2001:db8::1") == network_of("2001:db8::ffff:1")
    assert network_of("2001:db8::1") != network_of("2001:db8:0:1::1")
    assert network_of("::ffff:192.0.2.1") == "192.0.2.1"
    assert network_of("fe80::1%eth0") == network_of("fe80::2%eth0")


# Requests that two readers would read differently


@pytest.mark.parametrize(
    "lines",
    [
        b"Content-Length: 4\r\nTransfer-Encoding: chunked\r\n",
        b"Transfer-Encoding: chunked\r\nContent-Length: 4\r\n",
        b"Content-Length: 4\r\nContent-Length: 5\r\n",
        b"Content-Length: 4\r\nContent-Length: 4\r\n",
        b"Content-Length: +4\r\n",
        b"Content-Length: 4, 4\r\n",
        b"Content-Length: -1\r\n",
        b"Transfer-Encoding: gzip\r\n",
        b"Transfer-Encoding: chunked, identity\r\n",
        b"Transfer-Encoding : chunked\r\n",
        b"Host: y\r\n",
        b"X: a\nY: b\x00\r\n",
        b" folded: yes\r\n",
    ],
    ids=repr,
)
def test_ambiguous_requests_are_400_and_the_last_of_their_connection(server, lines):
    with server.counts("malformed"), server.wire() as wire:
        wire.send(PREDICT + lines + b"\r\n4\r\nGET \r\n0\r\n\r\n" + LIVEZ)
        answer = wire.answer()
        assert (answer.status, answer.problem) == (400, "malformed-request")
        assert wire.wait_for_close() == b""


@pytest.mark.parametrize(
    "data",
    [
        b"\x16\x03\x01\x02\x00\x01\x00",
        b"hello\r\n\r\n",
        b"GET / HTTP/9.9\r\n\r\n",
        b"GET /livez\r\n\r\n",
        b"GET /livez HTTP/0.9\r\nHost: 127.0.0.1\r\n\r\n",
        b"GET /livez HTTP/2.0\r\nHost: 127.0.0.1\r\n\r\n",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"GET /livez HTTP/1.1\r\n\r\n",
    ],
    ids=repr,
)
def test_invalid_http_is_400(server, data):
    with server.counts("malformed"), server.wire() as wire:
        wire.send(data)
        answer = wire.answer()
        assert (answer.status, answer.problem) == (400, "malformed-request")
        assert wire.wait_for_close() == b""


def test_http_1_0_needs_no_host(server):
    assert server.ask(b"GET /livez HTTP/1.0\r\n\r\n").status == 200


def test_a_bad_chunk_ends_the_request_that_is_under_way(server):
    with server.wire() as wire:
        wire.send(PREDICT + b"Transfer-Encoding: chunked\r\n\r\n4\r\nabcd\r\nzz\r\n")
        assert wire.answer().status == 400
        assert wire.wait_for_close() == b""


def test_trailers_do_not_become_headers(server):
    body = photo(3)
    with server.wire() as wire:
        wire.send(
            b"POST /predict?tasks=pets HTTP/1.1\r\nHost: 127.0.0.1\r\n"
            b"Transfer-Encoding: chunked\r\n\r\n"
            + b"%x\r\n" % len(body)
            + body
            + b"\r\n0\r\nX-Deadline-Ms: nonsense\r\nX-Min-Generation: nonsense\r\n\r\n"
        )
        assert wire.answer().status == 200


CHUNKED = PREDICT + b"Transfer-Encoding: chunked\r\n\r\n4\r\nabcd\r\n0\r\n"


def test_a_trailer_without_end_is_not_read_to_the_end(server):
    with server.counts("header_bytes"), server.wire() as wire:
        wire.send(CHUNKED + b"X-Endless: ")
        sent = wire.send_until_answered(b"a" * 2048, most=2**20)
        assert sent <= 3 * 8192  # the limit, and what was sent before the answer arrived
        answer = wire.answer()
        assert (answer.status, answer.problem) == (431, "headers-too-large")
        assert wire.wait_for_close() == b""


def test_a_chunk_extension_without_end_is_not_read_to_the_end(server):
    with server.counts("header_bytes"), server.wire() as wire:
        wire.send(PREDICT + b"Transfer-Encoding: chunked\r\n\r\n4;")
        assert wire.send_until_answered(b"a" * 2048, most=2**20) <= 3 * 8192
        assert wire.answer().status == 431


@pytest.mark.parametrize(
    ("line", "reason"),
    [(b"X: 1\r\n", "header_count"), (b"X: " + b"a" * 900 + b"\r\n", "header_bytes")],
)
def test_lines_of_trailers_count_as_headers(server, line, reason):
    with server.counts(reason), server.wire() as wire:
        wire.send(CHUNKED + line * 20)
        answer = wire.answer()
        assert (answer.status, answer.problem) == (431, "headers-too-large")


def test_slow_trailers_have_the_time_of_the_body(server):
    with server.counts("body_time"), server.wire() as wire:
        wire.send(CHUNKED + b"X: ")
        assert wire.send_until_answered(b"1", most=100) < 100
        answer = wire.answer()
        assert (answer.status, answer.problem) == (408, "request-too-slow")


@pytest.mark.parametrize("rest", [b"a" * 65536, b"\r\nX-Endless: " + b"a" * 65536])
def test_input_after_an_early_answer_is_not_parsed(server, rest, monkeypatch):
    """An answer that needs no body, to a request whose body never ends."""
    with server.counts("unread_body"), server.wire() as wire:
        wire.send(GET + b"Transfer-Encoding: chunked\r\n\r\n" + b"100000\r\n")
        answer = wire.answer()
        assert (answer.status, answer.headers["connection"]) == (200, "close")
        parsed = []
        monkeypatch.setattr(LimitedProtocol, "_feed", lambda self, data: parsed.append(data))
        sent = 0
        with contextlib.suppress(ConnectionError):
            while True:  # until the server closes
                wire.send(rest)
                sent += len(rest)
        assert parsed == []
        # Reading it takes time from others: no faster than this, and what the system keeps.
        assert sent < 1.5 * DISCARDED_BYTES_PER_SECOND * LINGER_SECONDS + 16 * 2**20


def test_an_early_answer_to_a_client_that_stops_is_closed_and_read(server):
    with server.wire() as wire:
        wire.send(GET + b"Content-Length: 1000\r\n\r\n")
        assert wire.answer().status == 200
        wire.send(b"x" * 1000 + LIVEZ)
        assert wire.wait_for_close() == b"", "the connection is not used again"


# Upgrades and pipelines


@pytest.mark.parametrize("protocol", [b"websocket", b"h2c"])
def test_an_upgrade_is_answered_as_what_it_is_and_nothing_follows(server, protocol):
    with server.wire() as wire:
        wire.send(
            GET
            + b"Connection: Upgrade\r\nUpgrade: "
            + protocol
            + b"\r\nSec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\n\r\n"
            + LIVEZ
        )
        answer = wire.answer()
        assert (answer.status, answer.headers["connection"]) == (200, "close")
        assert wire.wait_for_close() == b""


UPGRADE = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAEAAEAA\r\n"
POST = b"POST /predict?tasks=pets HTTP/1.1\r\nHost: 127.0.0.1\r\n" + UPGRADE


@pytest.mark.parametrize("at_once", [True, False])
@pytest.mark.parametrize("chunked", [True, False])
def test_the_body_of_an_upgrade_is_read_and_nothing_follows(server, at_once, chunked):
    """What Java's client sends by default."""
    body = photo(3)
    head = POST + b"Content-Length: %d\r\n\r\n" % len(body)
    if chunked:
        head = POST + b"Transfer-Encoding: chunked\r\n\r\n"
        body = b"%x\r\n%s\r\n0\r\nX-Trailer: x\r\n\r\n" % (len(body), body)
    with server.wire() as wire:
        parts = [head + body + LIVEZ] if at_once else [head, body[:10], body[10:] + LIVEZ]
        for part in parts:
            wire.send(part)
        answer = wire.answer()
        assert (answer.status, answer.headers["connection"]) == (200, "close"), answer.body
        assert wire.wait_for_close() == b""


def test_the_body_of_an_upgrade_has_the_limits_of_others(server):
    with server.counts("body_time"), server.wire() as wire:
        wire.send(POST + b"Content-Length: 1000\r\n\r\nx")
        assert wire.answer().status == 408
    with server.wire() as wire:
        wire.send(POST + b"Transfer-Encoding: chunked\r\n\r\nno size\r\n")
        assert wire.answer().status == 400
    with server.counts("header_count"), server.wire() as wire:
        wire.send(POST + b"Transfer-Encoding: chunked\r\n\r\n0\r\n" + b"A: b\r\n" * 30)
        assert wire.answer().status == 431


def test_an_idle_clock_does_not_outlive_its_connection(server):
    before = server.rejected("idle")
    with server.wire() as upgraded:
        upgraded.send(GET + b"Connection: Upgrade\r\nUpgrade: h2c\r\n\r\n")
        assert upgraded.answer().status == 200
        upgraded.wait_for_close()
    with server.wire() as idle:  # whose clock began later
        idle.wait_for_close()
    assert server.rejected("idle") == before + 1


def test_pipelined_requests_are_answered_in_order(server):
    with server.wire() as wire:
        wire.send(LIVEZ * 5)
        assert [wire.answer().status for _ in range(5)] == [200] * 5


def test_a_long_pipeline_is_answered_as_far_as_it_may_go(server):
    before = server.rejected("pipelined")
    with server.wire() as wire:
        wire.send(LIVEZ * 10_000)
        answers = wire.wait_for_close().count(b"HTTP/1.1 200")
    assert 1 <= answers <= MAX_PIPELINED + 1
    assert server.rejected("pipelined") == before + 1


def test_a_malformed_request_does_not_get_into_the_answer_before_it(server):
    body = photo(2)
    with server.wire() as wire:
        wire.send(
            b"POST /predict?tasks=pets HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: %d\r\n\r\n"
            % len(body)
            + body
            + b"nonsense\r\n\r\n"
        )
        assert wire.answer().status == 200
        assert wire.wait_for_close() == b""
