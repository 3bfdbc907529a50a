"""Servers as processes: started, awaited, weighed with all their children, and ended."""

import contextlib
import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from benchmarks.peers.environments import REPOSITORY

START_SECONDS = 90.0


class NotStarted(Exception):
    """A server ended, or did not answer in time."""


def free_port() -> int:
    """A port with two free ones after it: MLServer wants three."""
    while True:
        with socket.socket() as first:
            first.bind(("127.0.0.1", 0))
            port: int = first.getsockname()[1]
            with contextlib.suppress(OSError, OverflowError):
                for number in (port + 1, port + 2):
                    with socket.socket() as other:
                        other.bind(("127.0.0.1", number))
                return port


@contextmanager
def running(
    command: Sequence[str], environment: Mapping[str, str], ready: Callable[[], bool], log: Path
) -> Iterator[int]:
    """The process's id, once `ready`. What it prints goes to `log`."""
    with log.open("wb") as out:
        process = subprocess.Popen(
            command,
            env={**os.environ, "PYTHONPATH": str(REPOSITORY), **environment},
            cwd=REPOSITORY,
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        deadline = time.monotonic() + START_SECONDS
        while not ready():
            if process.poll() is not None or time.monotonic() > deadline:
                raise NotStarted(f"see {log.name}: {_last_line(log)}")
            time.sleep(0.1)
        yield process.pid
    finally:
        _end(process)


def _last_line(log: Path) -> str:
    lines = log.read_text(errors="replace").split("\n")
    return next((line.strip() for line in reversed(lines) if line.strip()), "no output")


def _end(process: subprocess.Popen[bytes]) -> None:
    """The server, then whatever it started and left."""
    tree = tree_of(process.pid)
    process.terminate()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(timeout=30)
    _signal(tree, signal.SIGKILL)
    process.wait()
    while any(map(alive, tree)):  # what is left of one server must not slow the next
        time.sleep(0.05)


@contextmanager
def stopped(pids: Iterable[int]) -> Iterator[None]:
    """Servers that get no processor, with all below them: some are busy while they wait."""
    trees = [each for pid in pids for each in tree_of(pid)]
    _signal(trees, signal.SIGSTOP)
    try:
        yield
    finally:
        _signal(trees, signal.SIGCONT)


def _signal(pids: Iterable[int], number: int) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def alive(pid: int) -> bool:
    """Whether the process still runs. A zombie has ended; its parent has not reaped it yet."""
    with contextlib.suppress(OSError):
        return _fields(Path(f"/proc/{pid}/stat"))[0] not in "ZX"
    return False


def _fields(status: Path) -> list[str]:
    """Of /proc/…/stat after the name, which is in brackets and may itself have blanks."""
    return status.read_text().rpartition(")")[2].split()


def tree_of(pid: int) -> list[int]:
    """A process and all below it."""
    children: dict[int, list[int]] = {}
    for status in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            children.setdefault(int(_fields(status)[1]), []).append(int(status.parent.name))
    found = [pid]
    for each in found:
        found.extend(children.get(each, ()))
    return found


def memory_of(pid: int) -> int:
    """Bytes in memory of a process and all below it; what they share counts once (PSS)."""
    total = 0
    for each in tree_of(pid):
        with contextlib.suppress(OSError):
            for line in Path(f"/proc/{each}/smaps_rollup").read_text().splitlines():
                if line.startswith("Pss:"):
                    total += 1024 * int(line.split()[1])
    return total
