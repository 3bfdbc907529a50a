"""The supervisor with programs that stand in for servers."""

import asyncio
import json
import os
import signal
import socket
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import pytest
from engram_server.processes.accepting import ConnectionCounts
from engram_server.processes.process import Process
from engram_server.processes.supervisor import Supervisor

SECONDS = 30
PREAMBLE = """
import json, os, signal, sys, time
process = json.loads(sys.argv[1])
number, control = process["number"], process["control"]
path = os.path.join(process["folder"], "notes")
def note(what): open(path, "a").write(f"{what} {number}\\n")
def notes(): return open(path).read().splitlines()
def ready(): os.write(control, b"ready\\n"); note("ready")
def exits(code): return lambda *_: (note("stopped"), os._exit(code))
signal.signal(signal.SIGTERM, exits(0))
note("started")
"""
SERVES = "ready(); signal.pause()"


class Rig:
    """A supervisor of stand-ins, and what they noted."""

    def __init__(self, folder: Path, script: str, count: int, backoff: tuple[float, ...]) -> None:
        self.folder = folder
        self.processes: list[Process] = []
        self._script = script
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.port = self.listener.getsockname()[1]
        self.supervisor = Supervisor(
            count, self.listener, str(folder), command=self._command, backoff=backoff
        )

    def _command(self, process: Process) -> list[str]:
        self.processes.append(process)
        described = json.dumps(asdict(process))
        return [sys.executable, "-I", "-S", "-c", PREAMBLE + self._script, described]

    @property
    def notes(self) -> list[str]:
        path = self.folder / "notes"
        return path.read_text().splitlines() if path.exists() else []

    async def until(self, condition: Callable[[list[str]], bool]) -> None:
        async with asyncio.timeout(SECONDS):
            while not condition(self.notes):
                await asyncio.sleep(0.01)

    def pid(self, number: int) -> int:
        return self.supervisor._running[number].pid


def run(rig: Rig, scenario: Callable[[Rig], object] | None = None) -> int:
    """Run a supervisor to its end beside a scenario; returns the exit code."""

    async def both() -> int:
        running = asyncio.create_task(rig.supervisor.run())
        try:
            if scenario is not None:
                await scenario(rig)
            async with asyncio.timeout(SECONDS):
                return await running
        finally:
            rig.supervisor.stop(signal.SIGKILL)
            await asyncio.wait([running])

    return asyncio.run(both())


@pytest.fixture
def make(tmp_path):
    made = []

    def make_rig(script: str, count: int = 3, backoff: tuple[float, ...] = (0.0,)) -> Rig:
        made.append(Rig(tmp_path, script, count, backoff))
        return made[-1]

    yield make_rig
    for rig in made:
        rig.listener.close()


async def all_ready(rig: Rig, count: int = 3) -> None:
    await rig.until(lambda notes: sum(note.startswith("ready") for note in notes) == count)


def test_the_others_start_when_the_first_process_is_ready(make):
    async def scenario(rig):
        await all_ready(rig)
        rig.supervisor.stop()

    rig = make(SERVES)
    assert run(rig, scenario) == 0
    assert rig.notes[:2] == ["started 1", "ready 1"]
    assert sorted(note for note in rig.notes if "stopped" in note) == [
        "stopped 1", "stopped 2", "stopped 3"
    ]  # fmt: skip
    # Only the first accepts connections while it starts, and prints the banner.
    assert [(each.alone, each.announce) for each in rig.processes] == [
        (True, True), (False, False), (False, False)
    ]  # fmt: skip


def test_a_killed_process_is_replaced_and_the_others_go_on(make, caplog):
    async def scenario(rig):
        await all_ready(rig)
        pids = [rig.pid(number) for number in (1, 3)]
        os.kill(rig.pid(2), signal.SIGKILL)
        await rig.until(lambda notes: notes.count("ready 2") == 2)
        assert [rig.pid(number) for number in (1, 3)] == pids
        rig.supervisor.stop()

    rig = make(SERVES)
    assert run(rig, scenario) == 0
    assert not rig.processes[-1].alone
    assert "process 2 of 3 was ended by SIGKILL" in caplog.text


def test_an_error_at_the_start_is_shown_once_and_ends_with_its_exit_code(make):
    rig = make("sys.exit(7)")
    assert run(rig) == 7
    assert rig.notes == ["started 1"]


def test_a_process_that_cannot_start_beside_the_others_stops_them(make):
    rig = make("if number == 2: sys.exit(3)\n" + SERVES, count=2)
    assert run(rig) == 3
    assert rig.notes[-1] == "stopped 1"


def test_a_process_that_is_killed_while_it_starts_is_started_again(make):
    crash = "if open(os.path.join(process['folder'], 'notes')).read().count('started') == 1:\n"
    rig = make(crash + "    os.kill(os.getpid(), signal.SIGKILL)\n" + SERVES)

    async def scenario(rig):
        await all_ready(rig)
        rig.supervisor.stop()

    assert run(rig, scenario) == 0
    assert [each.announce for each in rig.processes[:3]] == [True, True, False]


def test_a_process_that_keeps_ending_is_restarted_and_reported(make, caplog):
    """After it has served, an exit code is no error of the configuration."""

    async def scenario(rig):
        await rig.until(lambda notes: notes.count("ready 2") == 4)
        rig.supervisor.stop()

    ends = "ready()\nif number == 2 and notes().count('ready 2') < 4: sys.exit(1)\nsignal.pause()"
    assert run(make(ends, count=2, backoff=(0.0, 0.01)), scenario) == 0
    errors = [each for each in caplog.records if each.levelname == "ERROR"]
    assert "keeps ending" in errors[0].getMessage()
    assert "in 0.01 s" in errors[0].getMessage()


def test_while_a_process_waits_to_start_again_the_others_stop_at_once(make):
    async def scenario(rig):
        await rig.until(lambda notes: "ready 2" in notes and 2 not in rig.supervisor._running)
        rig.supervisor.stop()

    ends = "ready()\nif number == 2: sys.exit(1)\nsignal.pause()"
    assert run(make(ends, count=2, backoff=(1000.0,)), scenario) == 0


@pytest.mark.parametrize(("end", "code"), [("os._exit(130)", 130), ("os._exit(0)", 0)])
def test_the_exit_code_of_a_forced_stop_is_passed_on(make, end, code):
    async def scenario(rig):
        await all_ready(rig)
        os.kill(os.getpid(), signal.SIGINT)  # as Ctrl-C does, to the supervisor only

    script = f"signal.signal(signal.SIGINT, lambda *_: {end})\n" + SERVES
    assert run(make(script), scenario) == code


def test_processes_are_in_groups_apart_from_the_terminals(make):
    """Otherwise Ctrl-C would reach them twice, which forces the stop."""

    async def scenario(rig):
        await all_ready(rig)
        groups = {os.getpgid(rig.pid(number)) for number in (1, 2, 3)}
        assert len(groups) == 3
        assert os.getpgrp() not in groups
        rig.supervisor.stop()

    assert run(make(SERVES), scenario) == 0


def test_the_port_accepts_connections_while_no_process_runs(make):
    async def scenario(rig):
        await all_ready(rig, 1)
        os.kill(rig.pid(1), signal.SIGKILL)
        await rig.until(lambda notes: notes.count("started 1") == 2)
        with socket.create_connection(("127.0.0.1", rig.port), timeout=5):
            rig.supervisor.stop()

    assert run(make("if process['announce']: ready()\nsignal.pause()", count=1), scenario) == 0


def test_a_dead_process_does_not_count_as_the_one_with_the_fewest_connections(make):
    async def scenario(rig):
        await all_ready(rig, 2)
        counts = ConnectionCounts(rig.folder / "connections")
        counts.write(1, 5)
        counts.write(2, 0)
        assert counts.least() == 0
        os.kill(rig.pid(2), signal.SIGKILL)
        await rig.until(lambda notes: notes.count("started 2") == 2)
        assert counts.least() == 5
        rig.supervisor.stop()

    assert run(make(SERVES, count=2), scenario) == 0
