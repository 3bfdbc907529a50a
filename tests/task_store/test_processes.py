"""Several processes on one folder, and processes that die in the middle."""

import os
import random
import signal
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path

import pytest
from engram_store import open_store

ROOT = Path(__file__).resolve().parents[2]
WRITERS = [sys.executable, "-m", "tests.task_store.writers"]


@pytest.mark.long
def test_eight_processes_publishing_fifty_versions_each_lose_none(tmp_path):
    location = str(tmp_path / "store")
    children = [
        subprocess.Popen(
            [*WRITERS, "publish", location, "shared", "50", str(seed)],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            text=True,
        )
        for seed in range(8)
    ]
    acknowledged = {}
    for child in children:
        output, _ = child.communicate()
        assert child.returncode == 0
        for line in output.splitlines():
            version, digest = line.split()
            acknowledged[int(version)] = digest
    assert sorted(acknowledged) == list(range(1, 401)), "400 distinct versions"
    store = open_store(location)
    live = {v.version: v.digest for v in store.catalog().task("shared").live}
    assert live == acknowledged
    assert store.catalog().generation == 400
    assert len(set(live.values())) == 400
    assert store.find_damage() == []


def _receive_until_dead(pipe) -> list[tuple[str, int, str]]:
    acknowledged = []
    for line in pipe:
        word, *rest = line.split()
        if word == "dead":
            return acknowledged
        if word == "ack":
            acknowledged.append((rest[0], int(rest[1]), rest[2]))
    raise AssertionError("the fork server went away")


def _receive_pid(lines):
    """The child's number, and what it acknowledged before it died."""
    received = []
    for line in lines:
        word, *rest = line.split()
        if word == "pid":
            return int(rest[0]), received
        received.append((rest[0], int(rest[1]), rest[2]))
    raise AssertionError("the fork server went away")


@pytest.mark.long
def test_two_hundred_kills_lose_no_acknowledged_publish(tmp_path):
    location = str(tmp_path / "store")
    chance = random.Random(20220622)
    server = subprocess.Popen(
        [*WRITERS, "forks", location],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    acknowledged = []
    try:
        assert server.stdout.readline() == "ready\n"
        window = None
        for _ in range(200):
            started = time.monotonic()
            server.stdin.write("go\n")
            server.stdin.flush()
            child, received = _receive_pid(server.stdout)
            if window is None:
                # As long as this machine takes for some publishes, the first of which is slowest.
                while len(received) < 5:
                    _, task, version, digest = server.stdout.readline().split()
                    received.append((task, int(version), digest))
                window = 2 * (time.monotonic() - started)
            # The random moment is the test: from before the store is open to some publishes in.
            time.sleep(chance.uniform(0, window))
            os.kill(child, signal.SIGKILL)
            received += _receive_until_dead(server.stdout)
            store = open_store(location)
            catalog = store.catalog(refresh=False)
            for task, version, digest in received:
                assert catalog.resolve(f"{task}@{version}").digest == digest
                store.read_bundle(digest)
            acknowledged += received
    finally:
        server.stdin.close()
        server.stdout.close()
        server.wait()
    assert len(acknowledged) > 50, "the children did publish"
    _check_after_the_storm(location, acknowledged)


def _check_after_the_storm(location: str, acknowledged: list[tuple[str, int, str]]) -> None:
    store = open_store(location)
    catalog = store.catalog()
    for task, version, digest in acknowledged:
        assert catalog.resolve(f"{task}@{version}").digest == digest
    for digest in catalog.by_digest:
        store.read_bundle(digest)
    assert store.find_damage() == [], "an unacknowledged publish is whole or absent"
    store.collect_garbage(timedelta(seconds=-5))
    assert store.objects.staged() == []
    blobs = {"sha256:" + o.path[-64:] for o in store.objects.listing("blobs")}
    assert blobs == set(catalog.by_digest), "what killed writers left was collected"
    again = open_store(location).catalog()
    assert (again.all_tasks, again.by_digest) == (catalog.all_tasks, catalog.by_digest)


def test_use_after_a_fork_is_refused_instead_of_hanging(tmp_path):
    script = """
import os, sys
from engram_store import StoreUnavailable, open_store
store = open_store(sys.argv[1])
if os.fork() == 0:
    try:
        store.refresh()
    except StoreUnavailable as error:
        print(error, flush=True)
    os._exit(0)
os.wait()
"""
    done = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert "forked" in done.stdout, done.stderr
