"""The supervisor: starts the server processes, replaces those that end, and stops them all.

    python -m engram_server.processes.supervisor '{"count": 3, "listener": 5, …}'

It holds the listening socket, so that connections wait while a process is replaced, and are never
refused. The first process starts alone: it shows errors of the configuration once, and downloads
what the others then find on the disk.
"""

import asyncio
import json
import logging
import os
import shutil
import signal
import socket
import sys
from asyncio.subprocess import DEVNULL
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from engram_server.observability import logs
from engram_server.processes.accepting import ConnectionCounts
from engram_server.processes.process import CONNECTION_COUNTS, READY, Process

# Before each restart of a process that keeps ending.
BACKOFF_SECONDS = (0.0, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0)
# A process that has served for this long starts again without a pause.
STABLE_SECONDS = 60.0

_log = logging.getLogger("engram.processes")

Command = Callable[[Process], list[str]]


@dataclass(frozen=True, slots=True)
class Plan:
    """What to supervise."""

    count: int
    listener: int  # descriptor of the listening socket
    folder: str  # private to the processes; removed at the end
    log_format: logs.LogFormat
    log_level: str

    def command(self) -> list[str]:
        """The command line of the supervisor."""
        return [sys.executable, "-P", "-m", __name__, json.dumps(asdict(self))]


class Supervisor:
    """Keeps a number of processes running."""

    def __init__(
        self,
        count: int,
        listener: socket.socket,
        folder: str,
        *,
        command: Command = Process.command,
        backoff: tuple[float, ...] = BACKOFF_SECONDS,
    ) -> None:
        self._count = count
        self._listener = listener
        self._folder = folder
        counts = Path(folder) / CONNECTION_COUNTS
        ConnectionCounts.create(counts, count)
        self._connections = ConnectionCounts(counts)
        self._command = command
        self._backoff = backoff
        self._running: dict[int, asyncio.subprocess.Process] = {}
        self._ready: set[int] = set()  # now
        self._served: set[int] = set()  # ready at any time
        self._first_ready = asyncio.Event()
        self._stopping = asyncio.Event()
        self._code = 0

    async def run(self) -> int:
        """Run until a signal stops it or a process cannot start; returns the exit code."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self.stop, number)
        first = asyncio.create_task(self._keep(1))
        ready = asyncio.create_task(self._first_ready.wait())
        await asyncio.wait([first, ready], return_when=asyncio.FIRST_COMPLETED)
        ready.cancel()
        others = [] if self._stopping.is_set() else range(2, self._count + 1)
        await asyncio.gather(first, *(self._keep(number) for number in others))
        return self._code

    def stop(self, number: int = signal.SIGTERM) -> None:
        """Forward a signal to all processes, and start no more."""
        self._stopping.set()
        self._listener.close()  # the processes have it until they have drained
        for process in self._running.values():
            _send(process, number)

    async def _keep(self, number: int) -> None:
        """Run one process, again whenever it ends."""
        attempts = 0
        loop = asyncio.get_running_loop()
        while not self._stopping.is_set():
            started = loop.time()
            code = await self._run(number)
            if self._stopping.is_set():
                self._note_exit(code)
                return
            if code > 0 and number not in self._served:
                # It has shown its error, which the next attempt would repeat.
                _log.error("process %d of %d cannot start; stopping", number, self._count)
                self._code = code
                self.stop()
                return
            if number in self._served and loop.time() - started >= STABLE_SECONDS:
                attempts = 0
            pause = self._backoff[min(attempts, len(self._backoff) - 1)]
            self._log_end(number, code, attempts, pause)
            attempts += 1
            await self._pause(pause)

    async def _run(self, number: int) -> int:
        """Run one process to its end; returns its exit code, or minus the signal that ended it."""
        ours, theirs = socket.socketpair()
        process = await self._spawn(number, theirs)
        self._running[number] = process
        if self._stopping.is_set():  # while it was being started
            _send(process, signal.SIGTERM)
        reader, writer = await asyncio.open_connection(sock=ours)
        try:
            if await reader.readline() == READY:
                self._ready.add(number)
                self._served.add(number)
                self._first_ready.set()
                _log.info("process %d of %d is ready", number, self._count)
            return await process.wait()
        finally:
            writer.close()
            self._connections.close(number)
            self._ready.discard(number)
            del self._running[number]

    async def _spawn(self, number: int, control: socket.socket) -> asyncio.subprocess.Process:
        with control:
            process = Process(
                number=number,
                count=self._count,
                listener=self._listener.fileno(),
                control=control.fileno(),
                folder=self._folder,
                alone=not self._ready,
                announce=not self._served,
            )
            return await asyncio.create_subprocess_exec(
                *self._command(process),
                stdin=DEVNULL,
                pass_fds=(process.listener, process.control),
                # Ctrl-C reaches the supervisor only, which forwards it.
                process_group=0,
            )

    def _note_exit(self, code: int) -> None:
        """Keep the first exit code that is not that of an orderly end."""
        if code not in (0, -signal.SIGTERM, -signal.SIGINT) and not self._code:
            self._code = code if code > 0 else 128 - code

    def _log_end(self, number: int, code: int, attempts: int, pause: float) -> None:
        how = f"ended with exit code {code}"
        if code < 0:
            how = f"was ended by {signal.Signals(-code).name}"
        often = attempts >= len(self._backoff) - 1
        _log.log(
            logging.ERROR if often else logging.WARNING,
            "process %d of %d %s. Starting it again in %g s; processes ready: %d.%s",
            *(number, self._count, how, pause, len(self._ready)),
            " It keeps ending: see its last error." if often else "",
        )

    async def _pause(self, seconds: float) -> None:
        try:
            await asyncio.wait_for(self._stopping.wait(), seconds)
        except TimeoutError:
            return


def _send(process: asyncio.subprocess.Process, number: int) -> None:
    """Send a signal. asyncio's own method may reap a process that ends, and lose its exit code."""
    if process.returncode is None:
        with suppress(ProcessLookupError):
            os.kill(process.pid, number)


def main(plan: Plan) -> int:
    logs.configure(plan.log_format, plan.log_level)
    try:
        with socket.socket(fileno=plan.listener) as listener:
            listener.set_inheritable(False)
            return asyncio.run(Supervisor(plan.count, listener, plan.folder).run())
    finally:
        shutil.rmtree(plan.folder, ignore_errors=True)


if __name__ == "__main__":
    sys.exit(main(Plan(**json.loads(sys.argv[1]))))
