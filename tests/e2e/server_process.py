"""A real server in its own process: `engram serve`, forked from one that has imported it all.

Importing is most of what a start takes. `tests/api/test_cli.py` runs the installed command itself.
"""

import contextlib
import multiprocessing
import os
import runpy
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

import httpx
from engram_vit.commands.main import main

START_SECONDS = 90

# One process of a test run imports these once; each server is a copy of it, made in milliseconds.
_forks = multiprocessing.get_context("forkserver")
_forks.set_forkserver_preload(
    ["engram_server.commands.serve", "engram_server.model.families", __name__]
)


class Fork:
    """A copy of the prepared process that runs a program, with the methods of `Popen` we use.

    The program is `engram` with arguments, or a module in its place.
    """

    def __init__(
        self, program: list[str] | str, environment: Mapping[str, str], folder: Path, log: Path
    ) -> None:
        self._process = _forks.Process(
            target=_run, args=(program, dict(environment), folder, log), daemon=True
        )
        self._process.start()

    @property
    def pid(self) -> int:
        return self._process.pid

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float) -> int:
        self._process.join(timeout)
        code = self._process.exitcode
        if code is None:
            raise subprocess.TimeoutExpired("engram", timeout)
        return code

    def send_signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def kill(self) -> None:
        self._process.kill()


def _run(program: list[str] | str, environment: dict[str, str], folder: Path, log: Path) -> None:
    """What the copy does."""
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    with log.open("a") as output:
        os.dup2(output.fileno(), sys.stdout.fileno())
        os.dup2(output.fileno(), sys.stderr.fileno())
    if isinstance(program, str):
        runpy.run_module(program, run_name="__main__")
    else:
        main(program)


def run_engram(
    folder: Path, *arguments: str, environment: Mapping[str, str] = MappingProxyType({})
) -> tuple[int, str]:
    """`engram …` to its end: its exit code and what it printed."""
    log = folder / "engram.log"
    log.unlink(missing_ok=True)
    whole = {**os.environ, **environment}
    code = Fork(list(arguments), whole, folder, log).wait(timeout=90)
    return code, log.read_text()


@dataclass
class ServerProcess:
    url: str
    process: Fork
    log: Path

    def stop(self, seconds: float = 60) -> int:
        """SIGTERM, and the exit code once it has drained."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(timeout=seconds)

    def kill(self) -> None:
        """Gone at once, if it is not yet."""
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait(timeout=30)

    def await_ready(self) -> None:
        deadline = time.monotonic() + START_SECONDS
        while time.monotonic() < deadline:
            if self.process.poll() is not None:
                raise AssertionError(f"the server ended:\n{self.log.read_text()}")
            with contextlib.suppress(httpx.TransportError):
                if httpx.get(f"{self.url}/readyz", timeout=5).status_code == 200:
                    return
            time.sleep(0.05)
        raise AssertionError(f"the server was not ready in time:\n{self.log.read_text()}")

    def follow_log(self) -> Iterator[str]:
        """The lines of its log as they are written, until it ends."""
        with self.log.open() as log:
            line = ""
            while self.process.poll() is None:
                line += log.readline()
                if line.endswith("\n"):
                    yield line
                    line = ""
                else:
                    time.sleep(0.05)

    def resident_bytes(self) -> int:
        pages = int(Path(f"/proc/{self.process.pid}/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def start(
    folder: Path,
    backbone: Path | None = None,
    *,
    port: int | None = None,
    environment: Mapping[str, str] = MappingProxyType({}),
    module: str | None = None,
    **settings,
) -> ServerProcess:
    """`engram serve`, not ready yet, with `ENGRAM_<SETTING>` for each setting.

    `module` is run in its place: one that makes something of it fail.
    """
    port = port or free_port()
    whole = {
        **{name: value for name, value in os.environ.items() if not name.startswith("ENGRAM_")},
        "OMP_NUM_THREADS": "1",
        "ENGRAM_PORT": str(port),
        "ENGRAM_STORE": str(folder / "store"),
        "ENGRAM_TORCH_THREADS": "1",
        **{f"ENGRAM_{name.upper()}": str(value) for name, value in settings.items()},
        **environment,
    }
    if backbone is not None:
        whole["ENGRAM_BACKBONE"] = str(backbone)
    log = folder / "server.log"
    log.touch()
    process = Fork(module or ["serve"], whole, folder, log)
    return ServerProcess(f"http://127.0.0.1:{port}", process, log)


@contextlib.contextmanager
def serving(folder: Path, backbone: Path | None = None, **settings) -> Iterator[ServerProcess]:
    """`engram serve` on a free port, ready, with `ENGRAM_<SETTING>` for each setting."""
    server = start(folder, backbone, **settings)
    try:
        server.await_ready()
        yield server
    finally:
        server.kill()
