"""What a process learns from its supervisor, and does without it."""

import json
import os
import signal
import socket
import subprocess
import sys
from dataclasses import asdict

import pytest
from engram_server.commands import serve
from engram_server.errors import SettingsError
from engram_server.processes.process import READY, Process

SECONDS = 30
FOLLOWS = """
import sys, time
from engram_server.processes.process import Process
process = Process.parse(sys.argv[1])
process.follow_supervisor(0)
process.report_ready()
time.sleep(60)
"""
BREAKS = """
import sys, threading
from engram_server.processes.process import Process
broken = threading.Event()
process = Process.parse(sys.argv[1])
process.replace_when(broken.is_set)
process.report_ready()
broken.set()
threading.Event().wait(60)
"""


def start(program: str, folder, control: socket.socket, listener: socket.socket):
    descriptors = (listener.fileno(), control.fileno())
    process = Process(1, 2, *descriptors, str(folder), alone=True, announce=True)
    return subprocess.Popen(
        [sys.executable, "-c", program, json.dumps(asdict(process))], pass_fds=descriptors
    )


@pytest.fixture
def listener():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener


def test_a_process_without_its_supervisor_stops_and_removes_their_folder(tmp_path, listener):
    folder = tmp_path / "private"
    folder.mkdir()
    ours, theirs = socket.socketpair()
    with start(FOLLOWS, folder, theirs, listener) as process:
        theirs.close()
        assert ours.recv(100) == READY
        assert process.poll() is None
        ours.close()
        assert process.wait(SECONDS) == -signal.SIGTERM
    assert not folder.exists()


def test_a_broken_process_stops(tmp_path, listener):
    ours, theirs = socket.socketpair()
    with ours, theirs, start(BREAKS, tmp_path, theirs, listener) as process:
        assert process.wait(SECONDS) == -signal.SIGTERM


def test_its_command_line_describes_it_and_its_descriptors_go_no_further(tmp_path, listener):
    ours, theirs = socket.socketpair()
    with ours, theirs:
        process = Process(
            2, 3, listener.fileno(), theirs.fileno(), str(tmp_path), alone=False, announce=False
        )
        command = process.command()
        theirs.set_inheritable(True)
        assert Process.parse(command[command.index("--process") + 1]) == process
        assert not os.get_inheritable(theirs.fileno())


def test_a_folder_that_is_too_long_for_sockets_is_a_clear_error(monkeypatch, tmp_path):
    long = tmp_path / ("x" * 80)
    long.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(long))
    with pytest.raises(SettingsError, match="TMPDIR"):
        serve._make_private_folder()
    assert list(long.iterdir()) == []


def test_a_folder_that_cannot_be_made_is_a_clear_error(monkeypatch, tmp_path):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "missing"))
    with pytest.raises(SettingsError, match="TMPDIR"):
        serve._make_private_folder()
