"""What the tests of several processes look at from outside: which one has which connection."""

import json
import os
import re
import signal
import time
from pathlib import Path

import httpx

from tests.e2e.server_process import START_SECONDS, ServerProcess

LISTENING = "0A"


def process_ids(server: ServerProcess) -> dict[int, int]:
    """The process ids of the servers that a supervisor runs, by their number."""
    supervisor = server.process.pid
    children = Path(f"/proc/{supervisor}/task/{supervisor}/children").read_text().split()
    found = {}
    for pid in map(int, children):
        arguments = Path(f"/proc/{pid}/cmdline").read_text().split("\0")
        if "--process" in arguments:
            found[json.loads(arguments[arguments.index("--process") + 1])["number"]] = pid
    return found


def await_all(server: ServerProcess, count: int) -> None:
    """Wait until all processes are ready. A server with one has no supervisor."""
    for number in range(1, count + 1) if count > 1 else ():
        await_ready(server, number)


def peak_bytes(server: ServerProcess, *, forget: bool = False) -> int:
    """Peak memory of all processes since the last reset; `forget` resets it."""
    total = 0
    for pid in process_ids(server).values() or [server.process.pid]:
        folder = Path(f"/proc/{pid}")
        if forget:
            (folder / "clear_refs").write_text("5")
        status = (folder / "status").read_text().splitlines()
        total += int(next(line for line in status if line.startswith("VmHWM")).split()[1]) * 1024
    return total


def connections_of(pid: int, port: int) -> set[int]:
    """The client's ports of the connections that a process has accepted on a port."""
    sockets = set()
    for each in Path(f"/proc/{pid}/fd").iterdir():
        link = os.readlink(each)
        if link.startswith("socket:"):
            sockets.add(link[len("socket:[") : -1])
    found = set()
    for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
        columns = line.split()
        local, remote, state, inode = columns[1], columns[2], columns[3], columns[9]
        if inode in sockets and state != LISTENING and int(local.partition(":")[2], 16) == port:
            found.add(int(remote.partition(":")[2], 16))
    return found


def kill_with_its_connections(pid: int, port: int) -> set[int]:
    """Kill a process; returns the client's ports of the connections that it had."""
    os.kill(pid, signal.SIGSTOP)  # so that it accepts no more
    connections = connections_of(pid, port)
    os.kill(pid, signal.SIGKILL)
    return connections


def by_process(metrics: str, name: str, labels: str = "") -> dict[int, float]:
    """The values of a metric whose series have these labels, added up for each process."""
    found: dict[int, float] = {}
    for series, value in re.findall(rf"^{re.escape(name)}{{(.*)}} (\S+)$", metrics, re.MULTILINE):
        number = re.search(r'process="(\d+)"', series)
        if number is not None and labels in series:
            found[int(number[1])] = found.get(int(number[1]), 0) + float(value)
    return found


def await_ready(server: ServerProcess, number: int, times: int = 1) -> None:
    """Wait until a process is ready, for so many times."""
    deadline = time.monotonic() + START_SECONDS
    while len(re.findall(rf"process {number} of \d+ is ready", server.log.read_text())) < times:
        assert server.process.poll() is None, server.log.read_text()
        assert time.monotonic() < deadline, server.log.read_text()
        time.sleep(0.05)


def scrape(server: ServerProcess, **options) -> str:
    answer = httpx.get(f"{server.url}/metrics", timeout=30, **options)
    answer.raise_for_status()
    return answer.text
