"""Peers and ours get the same requests, and are compared within their turns, children included."""

import io
import itertools
import json
import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib import metadata
from pathlib import Path

import pytest

from benchmarks.peers import load
from benchmarks.peers.contenders import ENGRAM, ENGRAM_HEADS, ONE_BACKBONE, PEERS, rivals
from benchmarks.peers.environments import PINS, REPOSITORY
from benchmarks.peers.load import FORMS, Outcome, Phase, RequestFailed, send
from benchmarks.peers.measuring import check_answer, summarise
from benchmarks.peers.processes import NotStarted, alive, memory_of, running, stopped, tree_of


@contextmanager
def answering(status=200):
    """A server that keeps what it is sent; its port, and what it got."""
    got = []

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self):
            body = self.rfile.read(int(self.headers["Content-Length"]))
            got.append((self.path, self.headers["Content-Type"], body, self.client_address))
            content = b'{"score": 1.0}'
            self.send_response(status)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *_):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield server.server_port, got
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


# --- the load generator ---------------------------------------------------------------------------


def test_clients_begin_at_different_photos_and_keep_their_connections():
    with answering() as (port, got):
        photos = [bytes([number]) for number in range(4)]
        outcome = send(Phase(port, "/predict?tasks=1", "raw", 1, 2, 0.2), photos)
    assert len(outcome.latencies) == len(got) >= 2
    assert outcome.rate == len(got) / outcome.elapsed
    by_connection = {}
    for _, kind, body, address in got:
        assert kind == "image/jpeg"
        by_connection.setdefault(address, []).append(body[0])
    sent = sorted(by_connection.values())
    assert [each[0] for each in sent] == [0, 1]
    for each in sent:
        assert all(after == (before + 1) % 4 for before, after in itertools.pairwise(each))


def test_a_phase_of_no_time_is_one_photo_of_each_client():
    with answering() as (port, got):
        assert len(send(Phase(port, "/", "raw", 1, 3, 0.0), [b"photo"]).latencies) == 3
    assert len(got) == 3


def test_an_error_response_ends_the_phase_with_its_message():
    with answering(status=503) as (port, _):
        line = json.dumps({**_phase(port), "seconds": 0.0})
        out = io.StringIO()
        load.main([b"photo"], io.StringIO(line + "\n"), out)
        with pytest.raises(RequestFailed, match="503"):
            send(Phase(**_phase(port)), [b"photo"])
    assert json.loads(out.getvalue())["error"].startswith("503")


def _phase(port):
    return {"port": port, "path": "/", "form": "json", "tasks": 2, "clients": 1, "seconds": 0.0}


def test_bodies_carry_photo_and_number_of_tasks():
    photo = b"\xff\xd8 photo"
    assert FORMS["raw"][1](photo, 4) == photo
    assert json.loads(FORMS["json"][1](photo, 4))["tasks"] == 4
    image, tasks = json.loads(FORMS["open inference"][1](photo, 4))["inputs"]
    assert (len(image["data"]), tasks["data"]) == (1, [4])


def test_the_load_generator_needs_nothing_but_the_standard_library():
    program = (
        "import sys, benchmarks.peers.load; print(*{'torch', 'numpy', 'PIL'} & {*sys.modules})"
    )
    result = subprocess.run(
        [sys.executable, "-c", program], cwd=REPOSITORY, capture_output=True, text=True, check=True
    )
    assert result.stdout.strip() == ""


# --- processes ------------------------------------------------------------------------------------


def test_a_server_is_weighed_with_its_children_and_none_is_left(tmp_path):
    program = (
        "import subprocess, sys, time\n"
        "held = bytes(50_000_000)\n"
        "child = 'held = b\"x\" * 50_000_000; print(1, flush=True); import time; time.sleep(60)'\n"
        "below = subprocess.Popen([sys.executable, '-c', child], stdout=subprocess.PIPE)\n"
        "below.stdout.readline(); open('ready', 'w').close(); time.sleep(60)\n"
    ).replace("'ready'", repr(str(tmp_path / "ready")))
    ready = (tmp_path / "ready").exists
    with running([sys.executable, "-c", program], {}, ready, tmp_path / "log") as pid:
        tree = tree_of(pid)
        assert len(tree) == 2
        assert 50e6 < memory_of(pid) < 500e6
        assert all(map(alive, tree))
    assert not any(map(alive, tree))


def test_a_server_that_is_not_on_turn_gets_no_processor(tmp_path):
    program = f"open({str(tmp_path / 'ready')!r}, 'w').close()\nwhile True: pass\n"
    ready = (tmp_path / "ready").exists
    with running([sys.executable, "-c", program], {}, ready, tmp_path / "log") as pid:
        with stopped([pid]):
            await_state(pid, "T")
        await_state(pid, "R")


def await_state(pid, letter):
    until = time.monotonic() + 10
    while Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != letter:
        assert time.monotonic() < until


def test_a_server_that_ends_is_reported_with_its_last_line(tmp_path):
    command = [sys.executable, "-c", "raise SystemExit('no such model')"]
    with (
        pytest.raises(NotStarted, match="no such model"),
        running(command, {}, lambda: False, tmp_path / "log"),
    ):
        pass


# --- figures --------------------------------------------------------------------------------------


def outcome(rate, latency=1.0, answer="score"):
    return Outcome([latency] * 10, 10 / rate, answer)


def test_ratios_are_those_within_a_turn():
    """The machine was half as fast in the second round: for both, so the ratio stays."""
    row = summarise("ours", "peer", 4, [outcome(20), outcome(10)], [outcome(4), outcome(2)], 7)
    assert (row.rate, row.ratio, row.requests, row.memory) == (15, 5, 20, 7)


def test_a_server_that_answers_fewer_tasks_is_not_compared():
    check_answer(outcome(1, answer="score score"), 2, "peer")
    with pytest.raises(RequestFailed, match="gave 1 answers for 2 tasks"):
        check_answer(outcome(1), 2, "peer")


# --- the servers compared -------------------------------------------------------------------------


def test_every_peer_has_its_program_its_environment_and_a_form():
    for peer in PEERS:
        assert peer.environment in PINS
        assert peer.form in FORMS
    programs = {path.stem for path in (REPOSITORY / "benchmarks/peers/servers").glob("*_server.py")}
    assert {f"{name}_server" for name in ("litserve", "mlserver", "ray", "pipelines")} <= programs


def test_peers_are_pinned_and_bring_no_torch():
    pins = [pin for name in PINS for pin in PINS[name]]
    assert all("==" in pin for pin in pins)
    assert not any(pin.startswith("torch") for pin in pins)
    assert metadata.version("torch").startswith("2.13.0")


def test_plain_heads_are_compared_with_plain_heads():
    for peer in PEERS:
        ours = rivals(peer)
        if peer.holds != ONE_BACKBONE:
            assert ours == [ENGRAM]
        elif peer.precision == "float32":
            assert ours == [ENGRAM_HEADS, ENGRAM]
        else:
            assert ours[0].prefix == ENGRAM_HEADS.prefix
    assert ENGRAM_HEADS.path(2) == "/predict?top_k=1&tasks=head0,head1"
