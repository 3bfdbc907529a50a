"""A real server in its own process, as `engram serve` starts it."""

import contextlib
import os
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

START_SECONDS = 90
REPOSITORY = Path(__file__).resolve().parent.parent.parent


@dataclass
class ServerProcess:
    url: str
    process: subprocess.Popen
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
    command = [str(Path(sys.executable).with_name("engram")), "serve"]
    if module is not None:
        command = [sys.executable, "-m", module]
        whole["PYTHONPATH"] = str(REPOSITORY)
    log = folder / "server.log"
    with log.open("a") as output:
        process = subprocess.Popen(
            command,
            env=whole,
            stdout=output,
            stderr=subprocess.STDOUT,
            cwd=folder,
        )
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
