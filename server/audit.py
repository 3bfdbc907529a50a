"""The audit log: who did what, from where, and how it ended, as lines that cannot change unseen.

    {"sequence":7,"time":"…Z","previous":"<sha256 of line 6>","action":"publish","task":"pets",…}

Each record carries the hash of the line before it, so a line that was changed, removed or put in
breaks the chain, and `verify` finds it. docs/how-to/audit.md describes every member.

One thread writes. A change waits until the disk has its record (`write`); everything else is
handed over and forgotten (`note`), through a queue that has an end. While the file cannot be
written, changes are refused.
"""

import fcntl
import hashlib
import json
import logging
import os
import queue
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Protocol

from server.errors import AuditUnavailable, EngramError, SettingsError
from server.logs import timestamp

STREAM = "-"  # standard output, in place of a file
GENESIS = "0" * 64  # what the first record of a chain follows

# Of one address or identity, and of all together, so many refusals are recorded in a minute. A
# record has some 400 bytes, and 3,000 if a stranger tries: nobody fills a disk with them.
REFUSALS_EACH = 10
REFUSALS_ALL = 60
_WINDOW_SECONDS = 60.0

_QUEUE_RECORDS = 10_000
_MAX_TEXT = 160  # of one member: what is longer is cut
_TAIL_BYTES = 1024 * 1024
_SYNC_SECONDS = 1.0
_STOP_SECONDS = 10.0

_log = logging.getLogger("engram.audit")

Record = dict[str, Any]
# A record, and who waits for it.
Pending = tuple[Record, Future[None] | None]


class BrokenChain(ValueError):
    """A line of an audit log is not the one that was written."""


class AuditObserver(Protocol):
    """Who counts what is written."""

    def audited(self, sequence: int) -> None: ...
    def audit_left_out(self, records: int) -> None: ...
    def audit_failed(self) -> None: ...


def line_hash(line: bytes) -> str:
    """The hash of a line, without its line break."""
    return hashlib.sha256(line).hexdigest()


def encode(record: Record) -> bytes:
    """A record as its line, without the line break."""
    # ASCII: half a character of a stranger's name has no other form.
    return json.dumps(record, ensure_ascii=True, separators=(",", ":")).encode()


@dataclass(slots=True)
class Head:
    """The end of the chain so far."""

    sequence: int = 0
    hash: str = GENESIS


class _File:
    """A file that only grows, of one process. It is opened again when it has been moved away."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._descriptor: int | None = None

    def open(self, head: Head) -> list[Record]:
        """Continue `head`, or the file's own end; what there is to say of it first."""
        try:
            descriptor = os.open(self._path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o600)
        except OSError as error:
            raise AuditUnavailable(_cannot(self._path, error)) from None
        try:
            _lock(descriptor, self._path)
            said = _continue(descriptor, head)
        except OSError as error:
            os.close(descriptor)
            raise AuditUnavailable(_cannot(self._path, error)) from None
        except EngramError:
            os.close(descriptor)
            raise
        self._descriptor = descriptor
        return said

    @property
    def is_open(self) -> bool:
        """Whether what is written now is found at the path later."""
        if self._descriptor is None:
            return False
        try:
            there, here = os.stat(self._path), os.fstat(self._descriptor)
        except FileNotFoundError:
            return False
        return (there.st_ino, there.st_dev) == (here.st_ino, here.st_dev)

    def write(self, data: bytes) -> None:
        """All of it, or nothing and OSError."""
        assert self._descriptor is not None, "opened before"
        size = os.fstat(self._descriptor).st_size
        written = 0
        try:
            while written < len(data):
                written += os.write(self._descriptor, data[written:])
        except OSError:
            self._take_back(size)
            raise

    def _take_back(self, size: int) -> None:
        """A full disk may have taken half a line."""
        assert self._descriptor is not None, "opened before"
        try:
            os.ftruncate(self._descriptor, size)
        except OSError:
            self.close()  # it stays, and is dealt with like one that a crash tore

    def sync(self) -> None:
        if self._descriptor is not None:
            os.fsync(self._descriptor)

    def close(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)  # which ends the lock too
            self._descriptor = None


class _Stream:
    """Lines on standard output, for whoever collects them. Each start begins a new chain."""

    is_open = True

    def __init__(self, stream: IO[bytes]) -> None:
        self._stream = stream

    def open(self, head: Head) -> list[Record]:
        return []

    def write(self, data: bytes) -> None:
        self._stream.write(data)
        self._stream.flush()

    def sync(self) -> None:
        """Nothing to wait for: whoever reads the stream keeps it."""

    def close(self) -> None:
        """Not ours to close."""


class AuditLog:
    """Writes records in the order they come, each chained to the one before."""

    def __init__(
        self,
        target: str,
        observer: AuditObserver,
        clock: Callable[[], float] = time.time,
        stream: IO[bytes] | None = None,
    ) -> None:
        self._sink: _File | _Stream
        if target == STREAM:
            self._sink = _Stream(stream or sys.stdout.buffer)
        else:
            self._sink = _File(Path(target))
        self._observer = observer
        self._clock = clock
        self._head = Head()
        self._queue: queue.Queue[Pending | None] = queue.Queue(_QUEUE_RECORDS)
        self._refusals = _RefusalRate(clock)
        self._left_out = 0
        self._lock = threading.Lock()  # of what was left out: many threads count
        self._thread: threading.Thread | None = None
        self._unsynced = False
        self._synced_at = 0.0  # on the clock of time.monotonic
        self.error: str | None = None  # why nothing can be written at present

    def start(self) -> None:
        """Open the file, which must be writable now and nobody else's; then begin to write."""
        try:
            for record in self._sink.open(self._head):
                self._append([(record, None)])
        except (OSError, AuditUnavailable) as error:
            raise SettingsError(f"ENGRAM_AUDIT_LOG: {error}") from None
        self._thread = threading.Thread(target=self._run, name="engram-audit", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Write what waits, and close."""
        if self._thread is None:
            return
        with suppress(queue.Full):
            self._queue.put(None, timeout=_STOP_SECONDS)
            self._thread.join(_STOP_SECONDS)
        self._thread = None

    # From any thread

    def write(self, record: Record) -> Future[None]:
        """A record for the disk: done when it is there, or with AuditUnavailable."""
        future: Future[None] = Future()
        if not self._hand_over(record, future):
            future.set_exception(AuditUnavailable("The audit log has too much to write already."))
        return future

    def note(self, record: Record) -> None:
        """A record that nobody waits for."""
        self._hand_over(record, None)

    def refused(self, source: str, record: Record) -> None:
        """A refusal, unless there were many of this source, or in all, a moment ago."""
        if self._refusals.allows(source):
            self.note(record)
        else:
            self._leave_out(1)

    def _hand_over(self, record: Record, future: Future[None] | None) -> bool:
        record = {"time": timestamp(self._clock()), **record}
        try:
            self._queue.put_nowait((record, future))
        except queue.Full:
            self._leave_out(1)
            return False
        return True

    def _leave_out(self, records: int) -> None:
        with self._lock:
            self._left_out += records
        self._observer.audit_left_out(records)

    # In the thread

    def _run(self) -> None:
        while True:
            batch, ended = self._take()
            if batch:
                self._write_batch(batch)
            elif self._unsynced or self.error is not None:
                self._tidy()
            if ended:
                self._tidy()
                self._sink.close()
                return

    def _take(self) -> tuple[list[Pending], bool]:
        """What waits, at most for a second; and whether it is the last."""
        batch: list[Pending] = []
        try:
            item = self._queue.get(timeout=_SYNC_SECONDS)
            while item is not None:
                record, future = item
                # From here on nobody can cancel it; whoever has, still has the record written.
                waited_for = future is not None and future.set_running_or_notify_cancel()
                batch.append((record, future if waited_for else None))
                item = self._queue.get_nowait()
        except queue.Empty:
            return batch, False
        return batch, True

    def _write_batch(self, batch: Sequence[Pending]) -> None:
        try:
            self._reopen_if_moved()
            self._append(batch)
        except (OSError, AuditUnavailable) as error:
            self._fail(error)
            self._leave_out(sum(future is None for _, future in batch))
            for _, future in batch:
                if future is not None:
                    future.set_exception(AuditUnavailable(_REFUSED))
            return
        for _, future in batch:
            if future is not None:
                future.set_result(None)

    def _append(self, batch: Sequence[Pending]) -> None:
        """Chain the records, write them at once, and see them on the disk if anybody waits."""
        head = Head(self._head.sequence, self._head.hash)
        lines: list[bytes] = []
        with self._lock:
            left_out = self._left_out
        for record, _ in batch:
            head.sequence += 1
            chained = {"sequence": head.sequence, **record, "previous": head.hash}
            if left_out and not lines:
                chained["left_out"] = left_out
            lines.append(encode(_shortened(chained)))
            head.hash = line_hash(lines[-1])
        self._sink.write(b"".join(line + b"\n" for line in lines))
        self._head = head
        self._unsynced = True
        with self._lock:
            self._left_out -= left_out
        waited_for = any(future is not None for _, future in batch)
        if waited_for or time.monotonic() - self._synced_at >= _SYNC_SECONDS:
            self._sync()
        self._observer.audited(head.sequence)
        if self.error is not None:
            _log.warning("the audit log can be written again")
            self.error = None

    def _reopen_if_moved(self) -> None:
        if self._sink.is_open:
            return
        self._sync()
        self._sink.close()
        for record in self._sink.open(self._head):
            self._append([(record, None)])

    def _tidy(self) -> None:
        """Without a record to write: sync what was, or see whether writing is possible again."""
        try:
            self._reopen_if_moved()
            if self.error is not None:
                self._append([({"time": timestamp(self._clock()), "action": "resume"}, None)])
            self._sync()
        except (OSError, AuditUnavailable) as error:
            self._fail(error)

    def _sync(self) -> None:
        if self._unsynced:
            self._sink.sync()
            self._unsynced, self._synced_at = False, time.monotonic()

    def _fail(self, error: Exception) -> None:
        if self.error is None:
            _log.error("the audit log cannot be written, changes are refused: %s", error)
        self.error = str(error)
        self._observer.audit_failed()


_REFUSED = (
    "The audit log cannot be written, and nothing is done that it would not show; the server's "
    "log says why."
)


class _RefusalRate:
    """How many refusals of one source, and of all, are recorded in a minute."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._began = clock()
        self._all = 0
        self._by_source: dict[str, int] = {}  # as many as are recorded, at most

    def allows(self, source: str) -> bool:
        now = self._clock()
        if not 0 <= now - self._began < _WINDOW_SECONDS:
            self._began, self._all = now, 0
            self._by_source.clear()
        count = self._by_source.get(source, 0)
        if count >= REFUSALS_EACH or self._all >= REFUSALS_ALL:
            return False
        self._by_source[source] = count + 1
        self._all += 1
        return True


def _lock(descriptor: int, path: Path) -> None:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise AuditUnavailable(
            f"'{path}' is the audit log of another running process: give each a file of its own."
        ) from None


def _continue(descriptor: int, head: Head) -> list[Record]:
    """Make `head` the end of what is in the file. A torn last line stays, ended and chained."""
    size = os.fstat(descriptor).st_size
    if size == 0:
        return []
    tail = os.pread(descriptor, _TAIL_BYTES, max(0, size - _TAIL_BYTES))
    lines = tail.removesuffix(b"\n").split(b"\n")
    last = _parse(lines[-1])
    if not tail.endswith(b"\n"):
        os.write(descriptor, b"\n")  # a record without its line break is whole all the same
    if not head.sequence:
        whole = [record for line in lines[-2:] if (record := _parse(line)) is not None]
        head.sequence = whole[-1]["sequence"] if whole else 0
        head.hash = line_hash(lines[-1])
    if last is not None:
        return []
    head.hash = line_hash(lines[-1])
    return [{"time": timestamp(time.time()), "action": "recover", "torn": len(lines[-1])}]


def _parse(line: bytes) -> Record | None:
    """The record of a line; None if it is none."""
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(record, dict):
        return None
    whole = isinstance(record.get("sequence"), int) and isinstance(record.get("previous"), str)
    return record if whole else None


def _shortened(record: Mapping[str, Any]) -> Record:
    """Without text that goes on and on: a stranger may have written it."""
    return {
        name: value[:_MAX_TEXT] + "…"
        if isinstance(value, str) and len(value) > _MAX_TEXT
        else value
        for name, value in record.items()
        if value is not None
    }


def _cannot(path: Path, error: OSError) -> str:
    return f"'{path}' cannot be written: {error.strerror or error}."


# Reading


def verify(paths: Iterable[Path], after: str | None = None) -> Head:
    """The end of a chain that is whole over these files, oldest first; or BrokenChain.

    The chain may begin in the middle: where older files are gone, or after `after`.
    """
    head: Head | None = None if after is None else Head(-1, after)
    for path in paths:
        torn = False
        with path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                where = f"{path}, line {number}"
                line = line.removesuffix(b"\n")
                record = _parse(line)
                if record is None:
                    if torn or head is None:
                        raise BrokenChain(f"{where} is no record.")
                    torn = True  # a crash tore it, if the next record says so
                    head = Head(head.sequence, line_hash(line))
                    continue
                _check(record, head, torn, where)
                torn = False
                head = Head(record["sequence"], line_hash(line))
        if torn:
            raise BrokenChain(f"{path}: the last line is no whole record.")
    return head or Head()


def _check(record: Record, head: Head | None, torn: bool, where: str) -> None:
    """BrokenChain unless a record follows what was before it."""
    if torn and record.get("action") != "recover":
        raise BrokenChain(f"{where}: the line before it is no record, and no crash explains it.")
    if head is None:
        return
    if record["previous"] != head.hash:
        raise BrokenChain(
            f"{where}: the line before it is not the one that was there when it was written: "
            f"changed, removed or put in."
        )
    if head.sequence >= 0 and record["sequence"] != head.sequence + 1:
        raise BrokenChain(
            f"{where} has the number {record['sequence']}, and should have {head.sequence + 1}."
        )
