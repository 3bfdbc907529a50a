"""The audit log: a chain of lines that holds through crashes, rotation and full disks."""

import errno
import io
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import typer
from engram_server.commands.audit import verify_log
from engram_server.errors import AuditUnavailable, SettingsError
from engram_server.observability import audit
from engram_server.observability.audit import (
    GENESIS,
    AuditLog,
    BrokenChain,
    Chain,
    line_hash,
    verify,
)
from typer.testing import CliRunner

from tests.serving import MetricListener


class Counts(MetricListener):
    def __init__(self):
        self.sequence = self.left_out = self.failures = 0

    def audit_sequence(self, sequence):
        self.sequence = sequence

    def audit_left_out(self, records):
        self.left_out += records

    def audit_failures(self, _):
        self.failures += 1


@pytest.fixture
def path(tmp_path) -> Path:
    return tmp_path / "audit.jsonl"


def started(path, counts=None, **options) -> AuditLog:
    log = AuditLog(str(path), counts or Counts(), **options)
    log.start()
    return log


def write(log, *actions):
    for action in actions:
        log.write({"action": action}).result(5)


def wrote(path, *actions):
    """A whole log that has been closed."""
    log = started(path)
    write(log, *actions)
    log.stop()


def records(path):
    return [json.loads(line) for line in path.read_bytes().splitlines()]


def test_each_record_has_its_number_its_time_and_the_hash_of_the_line_before(path):
    wrote(path, "one", "two", "three")
    lines = path.read_bytes().splitlines()
    parsed = [json.loads(line) for line in lines]
    assert [each["sequence"] for each in parsed] == [1, 2, 3]
    assert [each["action"] for each in parsed] == ["one", "two", "three"]
    assert [each["previous"] for each in parsed] == [GENESIS, *map(line_hash, lines[:2])]
    assert all(each["time"].endswith("Z") for each in parsed)
    assert path.stat().st_mode & 0o077 == 0
    assert verify([path]).sequence == 3


def test_the_chain_goes_on_after_a_restart(path):
    wrote(path, "one", "two")
    wrote(path, "three")
    assert verify([path]) == audit.Head(3, line_hash(path.read_bytes().splitlines()[-1]))


@pytest.mark.parametrize("number", range(4))
def test_a_removed_line_is_found(path, number):
    wrote(path, "one", "two", "three", "four", "five")
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines[:number] + lines[number + 1 :]))
    if number == 0:  # where older files were rotated away, only their last hash tells
        assert verify([path]).sequence == 5
        with pytest.raises(BrokenChain, match="line 1"):
            verify([path], after=GENESIS)
    else:
        with pytest.raises(BrokenChain, match=rf"line {number + 1}: .*removed or inserted"):
            verify([path])


@pytest.mark.parametrize("number", range(4))
def test_a_changed_line_is_found(path, number):
    wrote(path, "one", "two", "three", "four", "five")
    lines = path.read_bytes().splitlines(keepends=True)
    lines[number] = lines[number].replace(b'"action":"', b'"action":"never-')
    path.write_bytes(b"".join(lines))
    with pytest.raises(BrokenChain, match=f"line {number + 2}"):
        verify([path])


def test_lines_that_are_not_records_are_found(path):
    wrote(path, "one", "two", "three")
    lines = path.read_bytes().splitlines(keepends=True)
    for wrong in (b"\n", b"{}\n", b"[1]\n", b"\x00\x00\n", b"[" * 100_000 + b"\n"):
        path.write_bytes(b"".join([lines[0], wrong, *lines[1:]]))
        with pytest.raises(BrokenChain, match="line"):
            verify([path])


@pytest.mark.parametrize("cut", [1, 5, 60])
def test_a_torn_last_line_is_kept_and_the_chain_goes_on(path, cut):
    wrote(path, "one", "two")
    path.write_bytes(path.read_bytes()[:-cut])
    before = path.read_bytes()
    wrote(path, "three")
    assert path.read_bytes().startswith(before)
    after = [json.loads(line) for line in path.read_bytes().splitlines()[2:]]
    if cut == 1:  # only the line break was missing: the record is whole
        assert [(each["sequence"], each["action"]) for each in after] == [(3, "three")]
    else:
        assert [(each["sequence"], each["action"]) for each in after] == [
            (2, "recover"),
            (3, "three"),
        ]
    assert verify([path]).sequence == 3


def test_an_unreadable_line_does_not_crash(path):
    wrote(path, "one", "two", "three")
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join([lines[0], lines[1][:20] + b"\n", lines[2]]))
    with pytest.raises(BrokenChain, match="no crash was recorded"):
        verify([path])


def test_a_file_that_was_moved_away_is_continued_in_a_new_one(path):
    log = started(path)
    write(log, "one", "two")
    old = path.with_suffix(".1")
    path.rename(old)
    write(log, "three", "four")
    log.stop()
    assert [each["sequence"] for each in records(old)] == [1, 2]
    assert [each["sequence"] for each in records(path)] == [3, 4]
    assert verify([old, path]).sequence == 4
    assert verify([path]).sequence == 4
    assert verify([path], after=verify([old]).hash).sequence == 4
    with pytest.raises(BrokenChain):
        verify([path, old])


def test_two_processes_do_not_share_a_file(path):
    log = started(path)
    code = (
        "import sys; from engram_server.observability.audit import AuditLog\n"
        "from engram_server.errors import SettingsError\n"
        "try: AuditLog(sys.argv[1], None).start()\n"
        "except SettingsError as error: print(error)"
    )
    other = subprocess.run(
        [sys.executable, "-c", code, str(path)], capture_output=True, text=True, check=True
    )
    assert "is the audit log of another running process" in other.stdout
    assert other.stdout.startswith("ENGRAM_AUDIT_LOG: ")
    log.stop()
    wrote(path, "now it may")


def test_what_was_acknowledged_before_a_kill_is_there_and_the_chain_goes_on(path):
    code = (
        "import sys; from engram_server.observability.audit import AuditLog\n"
        "from unittest.mock import Mock\n"
        "log = AuditLog(sys.argv[1], Mock()); log.start()\n"
        "for number in range(10**6):\n"
        "    log.note({'action': 'note'})\n"
        "    log.write({'action': f'n{number}'}).result(); print(number, flush=True)"
    )
    for times in (1, 2, 3):
        command = [sys.executable, "-c", code, str(path)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            for acknowledged in process.stdout:
                if acknowledged == "40\n":
                    break
            process.kill()
        assert path.read_bytes().count(b'"n40"') == times
    wrote(path, "last")
    assert verify([path]).sequence >= 3 * 82


def test_a_file_that_cannot_be_opened_stops_the_start(tmp_path):
    with pytest.raises(SettingsError, match=r"ENGRAM_AUDIT_LOG: .*No such file"):
        AuditLog(str(tmp_path / "none" / "audit"), Counts()).start()


@pytest.fixture
def full_disk(monkeypatch):
    """A disk that can be full: it takes half a line and no more."""
    real, state = os.write, {"full": False, "took": False}

    def some_of_it(descriptor, data):
        if not state["full"]:
            return real(descriptor, data)
        state["took"] = not state["took"]
        if not state["took"]:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(descriptor, data[:10])

    monkeypatch.setattr("engram_server.observability.audit.os.write", some_of_it)
    return state


def test_while_the_disk_is_full_writes_fail_and_then_the_chain_goes_on(path, full_disk):
    counts = Counts()
    log = started(path, counts)
    write(log, "one")
    full_disk["full"] = True
    for _ in range(3):
        with pytest.raises(AuditUnavailable):
            write(log, "lost")
    log.note({"action": "forgotten"})
    with pytest.raises(AuditUnavailable):
        write(log, "lost")
    assert log.error == "[Errno 28] No space left on device"
    assert counts.failures >= 4
    full_disk["full"] = False
    write(log, "two")
    assert log.error is None
    log.stop()
    assert [each["action"] for each in records(path)] == ["one", "two"]
    assert records(path)[1]["left_out"] == 1
    assert verify([path]).sequence == 2


def test_a_log_that_can_be_written_again_says_so_by_itself(path, full_disk, monkeypatch):
    monkeypatch.setattr(audit, "_SYNC_SECONDS", 0.01)
    counts = Counts()
    log = started(path, counts)
    full_disk["full"] = True
    log.note({"action": "forgotten"})
    while counts.failures < 5:  # it tries, and does not believe before it has written
        assert counts.sequence == 0
    full_disk["full"] = False
    while counts.sequence == 0:
        pass
    log.stop()
    assert log.error is None
    (record,) = records(path)
    assert (record["action"], record["left_out"]) == ("resume", 1)


def test_half_a_line_that_cannot_be_taken_back_is_like_one_that_a_crash_tore(
    path, full_disk, monkeypatch
):
    log = started(path)
    write(log, "one")

    def append_only(*_):
        raise PermissionError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr("engram_server.observability.audit.os.ftruncate", append_only)
    full_disk["full"] = True
    with pytest.raises(AuditUnavailable):
        write(log, "lost")
    full_disk["full"] = False
    write(log, "two")
    log.stop()
    assert verify([path]).sequence == 3


def test_a_source_that_is_rejected_again_and_again_is_recorded_now_and_then(path):
    now, counts = [1000.0], Counts()
    log = started(path, counts, clock=lambda: now[0])
    for _ in range(1000):
        log.rejected("198.51.100.7", {"action": "predict"})
    log.rejected("203.0.113.9", {"action": "publish"})
    now[0] += 61
    log.rejected("198.51.100.7", {"action": "predict"})
    log.stop()
    written = records(path)
    assert [each["action"] for each in written] == [*["predict"] * 10, "publish", "predict"]
    assert sum(each.get("left_out", 0) for each in written) == 990
    assert counts.left_out == 990


def test_many_sources_together_are_bounded_too(path):
    log = started(path, clock=lambda: 1000.0)
    for number in range(5000):
        log.rejected(f"source {number}", {"action": "predict"})
    log.stop()
    assert len(records(path)) == audit.REJECTIONS_ALL


def test_a_queue_that_is_full_leaves_out_and_says_how_many(path, monkeypatch):
    monkeypatch.setattr(audit, "_QUEUE_RECORDS", 5)
    counts = Counts()
    log = AuditLog(str(path), counts)  # whose thread does not run yet
    for number in range(8):
        log.note({"action": f"n{number}"})
    with pytest.raises(AuditUnavailable, match="Too many audit records"):
        log.write({"action": "change"}).result(0)
    log.start()
    write_when_there_is_room(log, "last")
    log.stop()
    written = records(path)
    assert [each["action"] for each in written] == ["n0", "n1", "n2", "n3", "n4", "last"]
    assert written[0]["left_out"] == 4
    assert counts.left_out >= 4


def write_when_there_is_room(log, action):
    while log._queue.full():
        pass
    write(log, action)


def test_long_and_odd_text_of_strangers_stays_one_short_line(path):
    log = started(path)
    log.note({"action": "x" * 100_000, "task": "\ud800\n\x1b[31m", "label": None})
    log.stop()
    (line,) = path.read_bytes().splitlines()
    assert len(line) < 1000
    record = json.loads(line)
    assert record["task"] == "\ud800\n\x1b[31m"
    assert "label" not in record


def test_a_stream_gets_the_same_lines(tmp_path):
    stream = io.BytesIO()
    log = started("-", stream=stream)
    write(log, "one", "two")
    log.stop()
    copy = tmp_path / "collected"
    copy.write_bytes(stream.getvalue())
    assert verify([copy], after=GENESIS).sequence == 2


def test_a_caller_that_gave_up_does_not_stop_the_writer(path):
    log = AuditLog(str(path), Counts())
    assert log.write({"action": "one"}).cancel()
    log.start()
    write(log, "two")
    log.stop()
    assert [each["action"] for each in records(path)] == ["one", "two"]


def test_the_command_says_where_the_chain_breaks(path):
    app = typer.Typer()
    app.command()(verify_log)
    wrote(path, "one", "two", "three")
    whole = CliRunner().invoke(app, [str(path)])
    assert f"intact up to record 3 with hash {verify([path]).hash}" in whole.stdout
    path.write_bytes(path.read_bytes().replace(b'"two"', b'"six"'))
    broken = CliRunner().invoke(app, [str(path)])
    assert broken.exit_code == 1
    assert "line 3" in broken.stderr
    assert CliRunner().invoke(app, [str(path.parent / "none")]).exit_code == 1


def test_each_of_several_processes_has_a_file_and_a_chain(path):
    logs = [started(path, chain=Chain(number, path.with_name("lock"))) for number in (1, 2)]
    for number, log in enumerate(logs, start=1):
        write(log, *["change"] * number)
        log.stop()
    assert not path.exists()
    for number in (1, 2):
        own = path.with_name(f"audit-{number}.jsonl")
        assert verify([own]).sequence == number
        assert {record["process"] for record in records(own)} == {number}


class Halves(io.RawIOBase):
    """A pipe that takes half a write at a time, as full ones do."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def writable(self) -> bool:
        return True

    def write(self, data) -> int:
        return os.write(self._descriptor, data[: len(data) // 2 + 1])


def test_lines_of_several_processes_on_standard_output_stay_whole(tmp_path):
    output = os.open(tmp_path / "output", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    logs = []
    for number in (1, 2, 3):
        stream = io.BufferedWriter(Halves(output))
        chain = Chain(number, tmp_path / "lock")
        logs.append(started("-", stream=stream, chain=chain))
    for _ in range(200):
        for log in logs:
            log.note({"action": "change"})
    for log in logs:
        log.stop()
    os.close(output)
    lines = (tmp_path / "output").read_bytes().splitlines()
    assert len(lines) == 600
    for number in (1, 2, 3):
        own = tmp_path / str(number)
        own.write_bytes(
            b"".join(line + b"\n" for line in lines if b'"process":%d,' % number in line)
        )
        assert verify([own]).sequence == 200
