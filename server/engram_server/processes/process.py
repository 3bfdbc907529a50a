"""One of several server processes: what the supervisor passes to it, and what it reports back."""

import json
import os
import shutil
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

READY: Final = b"ready\n"
CONNECTION_COUNTS: Final = "connections"  # a file in the private folder
_COMMAND = "from engram_vit.commands.main import main; main()"
_GRACE_SECONDS = 10.0


@dataclass(frozen=True, slots=True)
class Process:
    """One of `count` processes."""

    number: int  # from 1
    count: int
    listener: int  # descriptor of the listening socket, which all processes share
    control: int  # descriptor of a socket to the supervisor, which reads READY from it
    folder: str  # private to these processes
    alone: bool  # no other process is ready: accept connections while starting
    announce: bool  # print the banner

    def command(self) -> list[str]:
        """The command line of this process. `-P`: import nothing from the working directory."""
        settings = json.dumps(asdict(self))
        return [sys.executable, "-P", "-c", _COMMAND, "serve", "--process", settings]

    @classmethod
    def parse(cls, text: str) -> "Process":
        """Read the argument of a command line; the descriptors stay in this process."""
        process = cls(**json.loads(text))
        for descriptor in (process.listener, process.control):
            os.set_inheritable(descriptor, False)
        return process

    def open_listener(self) -> socket.socket:
        return socket.socket(fileno=self.listener)

    def metrics_socket(self, number: int) -> Path:
        return Path(self.folder) / f"{number}.socket"

    @property
    def connection_counts(self) -> Path:
        return Path(self.folder) / CONNECTION_COUNTS

    @property
    def audit_lock(self) -> Path:
        return Path(self.folder) / "audit.lock"

    def report_ready(self) -> None:
        os.write(self.control, READY)

    def follow_supervisor(self, drain_seconds: float) -> None:
        """Shut this process down when the supervisor is gone, and end it after this time."""
        threading.Thread(
            target=self._follow, args=(drain_seconds,), name="engram-supervised", daemon=True
        ).start()

    def _follow(self, drain_seconds: float) -> None:
        while os.read(self.control, 1):
            pass
        shutil.rmtree(self.folder, ignore_errors=True)
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(drain_seconds + _GRACE_SECONDS)
        os._exit(1)

    def replace_when(self, broken: Callable[[], object]) -> None:
        """Shut this process down when it is broken; the supervisor starts another one."""
        threading.Thread(
            target=_await_breakage, args=(broken,), name="engram-broken", daemon=True
        ).start()


def _await_breakage(broken: Callable[[], object]) -> None:
    while not broken():
        time.sleep(1)
    os.kill(os.getpid(), signal.SIGTERM)
