"""The audit log: a hash-chained file of who did what, from where, with which result.

    {"sequence":7,"time":"…Z","previous":"<sha256 of line 6>","action":"publish","task":"pets",…}

Each record has the hash of the previous line, so `verify` finds a changed, removed or inserted
line. docs/how-to/audit.md describes the members.

One thread writes. A change waits until its record is on disk (`write`); other records are queued
without waiting (`note`), up to a limit. While the file cannot be written, changes are rejected.
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
from typing import IO, Any

from engram_server.engine.observer import EngineObserver
from engram_server.errors import AuditUnavailable, EngramError, SettingsError
from engram_server.observability.logs import timestamp
from engram_server.observability.metrics import AUDIT_DROPPED, AUDIT_FAILURES, AUDIT_SEQUENCE

STREAM = "-"  # standard output
GENESIS = "0" * 64  # `previous` of the first record

# Rejections recorded per minute, per source and in total, so that attackers cannot fill the disk.
REJECTIONS_EACH = 10
REJECTIONS_ALL = 60
_WINDOW_SECONDS = 60.0

_QUEUE_RECORDS = 10_000
_MAX_TEXT = 160  # longer members are cut
_TAIL_BYTES = 1024 * 1024
_SYNC_SECONDS = 1.0
_STOP_SECONDS = 10.0

_log = logging.getLogger("engram.audit")

Record = dict[str, Any]
Pending = tuple[Record, Future[None] | None]


class BrokenChain(ValueError):
    """The hash chain of an audit log is broken."""


def line_hash(line: bytes) -> str:
    return hashlib.sha256(line).hexdigest()


def encode(record: Record) -> bytes:
    # ASCII: names may contain lone surrogates.
    return json.dumps(record, ensure_ascii=True, separators=(",", ":")).encode()


@dataclass(slots=True)
class Head:
    """The end of the chain."""

    sequence: int = 0
    hash: str = GENESIS


class _File:
    """An append-only file, locked by one process and reopened after rotation."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._descriptor: int | None = None

    def open(self, head: Head) -> list[Record]:
        """Continue the chain at `head` or at the file's end; returns records to write first."""
        try:
            descriptor = os.open(self._path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o600)
        except OSError as error:
            raise AuditUnavailable(_cannot(self._path, error)) from None
        try:
            _lock(descriptor, self._path)
            records = _continue(descriptor, head)
        except OSError as error:
            os.close(descriptor)
            raise AuditUnavailable(_cannot(self._path, error)) from None
        except EngramError:
            os.close(descriptor)
            raise
        self._descriptor = descriptor
        return records

    @property
    def is_open(self) -> bool:
        """Whether the path still names this file."""
        if self._descriptor is None:
            return False
        try:
            there, here = os.stat(self._path), os.fstat(self._descriptor)
        except FileNotFoundError:
            return False
        return (there.st_ino, there.st_dev) == (here.st_ino, here.st_dev)

    def write(self, data: bytes) -> None:
        """Write everything, or nothing and raise OSError."""
        assert self._descriptor is not None, "opened before"
        size = os.fstat(self._descriptor).st_size
        written = 0
        try:
            while written < len(data):
                written += os.write(self._descriptor, data[written:])
        except OSError:
            self._truncate(size)
            raise

    def _truncate(self, size: int) -> None:
        """Remove half a line that a full disk has accepted."""
        assert self._descriptor is not None, "opened before"
        try:
            os.ftruncate(self._descriptor, size)
        except OSError:
            self.close()  # handled like a line torn by a crash

    def sync(self) -> None:
        if self._descriptor is not None:
            os.fsync(self._descriptor)

    def close(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)  # also releases the lock
            self._descriptor = None


class _Stream:
    """Lines on standard output. Each start begins a new chain.

    Several processes lock a file while they write, so that their lines stay whole.
    """

    is_open = True

    def __init__(self, stream: IO[bytes], lock: Path | None = None) -> None:
        self._stream = stream
        self._lock = None if lock is None else lock.open("wb")

    def open(self, head: Head) -> list[Record]:
        return []

    def write(self, data: bytes) -> None:
        if self._lock is None:
            self._write(data)
            return
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        try:
            self._write(data)
        finally:
            fcntl.flock(self._lock, fcntl.LOCK_UN)

    def _write(self, data: bytes) -> None:
        self._stream.write(data)
        self._stream.flush()

    def sync(self) -> None: ...

    def close(self) -> None:
        if self._lock is not None:
            self._lock.close()


@dataclass(frozen=True, slots=True)
class Chain:
    """One of several processes, each of which writes its own chain."""

    process: int
    lock: Path  # locked while a process writes to standard output

    def path(self, target: Path) -> Path:
        """The file of this process: `audit-2.jsonl` for `audit.jsonl`."""
        return target.with_name(f"{target.stem}-{self.process}{target.suffix}")


class AuditLog:
    """Writes hash-chained records in order."""

    def __init__(
        self,
        target: str,
        observer: EngineObserver,
        clock: Callable[[], float] = time.time,
        stream: IO[bytes] | None = None,
        *,
        chain: Chain | None = None,
    ) -> None:
        self._sink: _File | _Stream
        if target == STREAM:
            lock = None if chain is None else chain.lock
            self._sink = _Stream(stream or sys.stdout.buffer, lock)
        else:
            self._sink = _File(Path(target) if chain is None else chain.path(Path(target)))
        self._process = None if chain is None else chain.process
        self._observer = observer
        self._clock = clock
        self._head = Head()
        self._queue: queue.Queue[Pending | None] = queue.Queue(_QUEUE_RECORDS)
        self._rejections = _RejectionLimit(clock)
        self._left_out = 0
        self._lock = threading.Lock()  # guards `_left_out`
        self._thread: threading.Thread | None = None
        self._unsynced = False
        self._synced_at = 0.0  # time.monotonic
        self.error: str | None = None  # why the log cannot be written

    def start(self) -> None:
        """Open and lock the file, or raise SettingsError; then start the thread."""
        try:
            for record in self._sink.open(self._head):
                self._append([(record, None)])
        except (OSError, AuditUnavailable) as error:
            raise SettingsError(f"ENGRAM_AUDIT_LOG: {error}") from None
        self._thread = threading.Thread(target=self._run, name="engram-audit", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Write pending records and close."""
        if self._thread is None:
            return
        with suppress(queue.Full):
            self._queue.put(None, timeout=_STOP_SECONDS)
            self._thread.join(_STOP_SECONDS)
        self._thread = None

    # From any thread

    def write(self, record: Record) -> Future[None]:
        """Write a record; the future completes once it is on disk, or with AuditUnavailable."""
        future: Future[None] = Future()
        if not self._enqueue(record, future):
            future.set_exception(
                AuditUnavailable("Too many audit records are pending. Retry later.")
            )
        return future

    def note(self, record: Record) -> None:
        """Write a record without waiting for it."""
        self._enqueue(record, None)

    def rejected(self, source: str, record: Record) -> None:
        """Record a rejection, within the limits per minute."""
        if self._rejections.allows(source):
            self.note(record)
        else:
            self._drop(1)

    def _enqueue(self, record: Record, future: Future[None] | None) -> bool:
        record = {"time": timestamp(self._clock()), **record}
        try:
            self._queue.put_nowait((record, future))
        except queue.Full:
            self._drop(1)
            return False
        return True

    def _drop(self, records: int) -> None:
        with self._lock:
            self._left_out += records
        self._observer.record(AUDIT_DROPPED, records)

    # In the thread

    def _run(self) -> None:
        while True:
            batch, ended = self._take()
            if batch:
                self._write_batch(batch)
            elif self._unsynced or self.error is not None:
                self._idle()
            if ended:
                self._idle()
                self._sink.close()
                return

    def _take(self) -> tuple[list[Pending], bool]:
        """Wait up to a second for records; also returns whether the log is stopping."""
        batch: list[Pending] = []
        try:
            item = self._queue.get(timeout=_SYNC_SECONDS)
            while item is not None:
                record, future = item
                # A cancelled waiter's record is written all the same.
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
            self._drop(sum(future is None for _, future in batch))
            for _, future in batch:
                if future is not None:
                    future.set_exception(AuditUnavailable(_UNAVAILABLE))
            return
        for _, future in batch:
            if future is not None:
                future.set_result(None)

    def _append(self, batch: Sequence[Pending]) -> None:
        """Chain and write the records; sync if a caller waits."""
        head = Head(self._head.sequence, self._head.hash)
        lines: list[bytes] = []
        with self._lock:
            left_out = self._left_out
        for record, _ in batch:
            head.sequence += 1
            chained = {
                "sequence": head.sequence,
                "process": self._process,  # left out if it is None
                **record,
                "previous": head.hash,
            }
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
        self._observer.record(AUDIT_SEQUENCE, head.sequence)
        if self.error is not None:
            _log.warning("the audit log is writable again")
            self.error = None

    def _reopen_if_moved(self) -> None:
        if self._sink.is_open:
            return
        self._sync()
        self._sink.close()
        for record in self._sink.open(self._head):
            self._append([(record, None)])

    def _idle(self) -> None:
        """Sync, or check whether the log is writable again."""
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
            _log.error("cannot write the audit log, changes are rejected: %s", error)
        self.error = str(error)
        self._observer.record(AUDIT_FAILURES)


_UNAVAILABLE = "The audit log cannot be written, so changes are rejected. See the server's log."


class _RejectionLimit:
    """Limits recorded rejections per minute, per source and in total."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._began = clock()
        self._all = 0
        self._by_source: dict[str, int] = {}  # at most REJECTIONS_ALL sources

    def allows(self, source: str) -> bool:
        now = self._clock()
        if not 0 <= now - self._began < _WINDOW_SECONDS:
            self._began, self._all = now, 0
            self._by_source.clear()
        count = self._by_source.get(source, 0)
        if count >= REJECTIONS_EACH or self._all >= REJECTIONS_ALL:
            return False
        self._by_source[source] = count + 1
        self._all += 1
        return True


def _lock(descriptor: int, path: Path) -> None:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise AuditUnavailable(
            f"'{path}' is the audit log of another running process. Use one file per process."
        ) from None


def _continue(descriptor: int, head: Head) -> list[Record]:
    """Set `head` to the end of the file. A torn last line stays and becomes part of the chain."""
    size = os.fstat(descriptor).st_size
    if size == 0:
        return []
    tail = os.pread(descriptor, _TAIL_BYTES, max(0, size - _TAIL_BYTES))
    lines = tail.removesuffix(b"\n").split(b"\n")
    last = _parse(lines[-1])
    if not tail.endswith(b"\n"):
        os.write(descriptor, b"\n")  # a record without its line break is complete
    if not head.sequence:
        whole = [record for line in lines[-2:] if (record := _parse(line)) is not None]
        head.sequence = whole[-1]["sequence"] if whole else 0
        head.hash = line_hash(lines[-1])
    if last is not None:
        return []
    head.hash = line_hash(lines[-1])
    return [{"time": timestamp(time.time()), "action": "recover", "torn": len(lines[-1])}]


def _parse(line: bytes) -> Record | None:
    """Parse a line; None if it is not a record."""
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(record, dict):
        return None
    whole = isinstance(record.get("sequence"), int) and isinstance(record.get("previous"), str)
    return record if whole else None


def _shortened(record: Mapping[str, Any]) -> Record:
    return {
        name: value[:_MAX_TEXT] + "…"
        if isinstance(value, str) and len(value) > _MAX_TEXT
        else value
        for name, value in record.items()
        if value is not None
    }


def _cannot(path: Path, error: OSError) -> str:
    return f"Cannot write '{path}': {error.strerror or error}."


# Reading


def verify(paths: Iterable[Path], after: str | None = None) -> Head:
    """Check the chain over these files, oldest first; return its end or raise BrokenChain.

    The chain may start anywhere, or after the hash `after`.
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
                        raise BrokenChain(f"{where} is not a record.")
                    torn = True  # torn by a crash, if the next record says so
                    head = Head(head.sequence, line_hash(line))
                    continue
                _check(record, head, torn, where)
                torn = False
                head = Head(record["sequence"], line_hash(line))
        if torn:
            raise BrokenChain(f"{path}: the last line is incomplete.")
    return head or Head()


def _check(record: Record, head: Head | None, torn: bool, where: str) -> None:
    """Raise BrokenChain unless a record follows the previous line."""
    if torn and record.get("action") != "recover":
        raise BrokenChain(f"{where}: the previous line is not a record, and no crash was recorded.")
    if head is None:
        return
    if record["previous"] != head.hash:
        raise BrokenChain(
            f"{where}: the previous line was changed, removed or inserted (hash mismatch)."
        )
    if head.sequence >= 0 and record["sequence"] != head.sequence + 1:
        raise BrokenChain(f"{where} has number {record['sequence']}; expected {head.sequence + 1}.")
