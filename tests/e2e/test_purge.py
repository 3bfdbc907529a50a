"""The purge drill: what is purged is in no byte of the store, of replicas' caches and of copies.

Replicas with disk caches serve a bucket; a purge goes through one of them, another is down. Then a
purging process is killed at random moments: the store is untouched, or the purge can be completed.
"""

import contextlib
import hashlib
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest
from engram_server.model import load_backbone
from engram_store import Correction, open_store
from engram_store.commands.tasks import back_up, purge, restore_backup, verify

from tests.bundles import bundle
from tests.e2e import s3_servers
from tests.e2e.cluster import Cluster
from tests.serving import make_bundle, photo

STORE = f"s3://{s3_servers.BUCKET}/store"
LABEL, FILE = "alice smith", "alice-at-the-lake.png"
FACE, OTHERS = photo(1), [photo(number) for number in range(2, 6)]
KILLS = 20
PATIENCE_SECONDS = 60.0


def traces_in(contents: dict[str, bytes]) -> list[str]:
    """The names of contents that have the photo's SHA-256 or file name, or the label."""
    digest = hashlib.sha256(FACE).digest()
    wanted = digest, digest.hex().encode(), FILE.encode(), LABEL.encode()
    return [name for name, data in contents.items() if any(text in data for text in wanted)]


def in_store(url: str) -> dict[str, bytes]:
    objects = open_store(url).objects
    return {info.path: objects.get(info.path) or b"" for info in objects.listing("")}


def in_folder(folder: Path) -> dict[str, bytes]:
    """Every file below a folder. Logs of servers are elsewhere."""
    contents = {}
    for path in folder.rglob("*"):
        with contextlib.suppress(FileNotFoundError, IsADirectoryError):
            contents[str(path)] = path.read_bytes()
    return contents


def await_no_trace(folder: Path) -> None:
    """Return once a cache has none; the replica sees the purge when it polls the store."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while found := traces_in(in_folder(folder)):
        assert time.monotonic() < deadline, found
        time.sleep(0.05)


def teach(url: str, task: str, photos: dict[str, list[bytes]]) -> None:
    files = [
        (label, (FILE if data == FACE else "photo.png", data))
        for label, many in photos.items()
        for data in many
    ]
    response = httpx.post(f"{url}/tasks/{task}/examples", files=files, timeout=60)
    assert response.status_code == 201, response.text


def correct(url: str, task: str, data: bytes, label: str) -> None:
    body = {"examples": [{"digest": f"sha256:{hashlib.sha256(data).hexdigest()}", "label": label}]}
    response = httpx.post(f"{url}/tasks/{task}/corrections", json=body, timeout=60)
    assert response.status_code == 201, response.text


@pytest.mark.long
def test_nothing_of_a_purged_task_and_photo_is_left(folder_of, tmp_path, monkeypatch):
    backbone = folder_of("vit")
    with s3_servers.moto(tmp_path) as port:
        environment = s3_servers.environment(port)
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        settings = {"store": STORE, "bundle_cache": "cache", "poll_seconds": 0.2}
        caches = [tmp_path / f"replica-{number}" / "cache" for number in range(2)]
        backup, restored = tmp_path / "backup", tmp_path / "restored"
        with Cluster(tmp_path, backbone, 2, environment, **settings) as cluster:
            # By number: `cluster.urls` is in the order in which the servers became ready.
            first, second = (f"http://127.0.0.1:{port}" for port in cluster.ports)
            # A trained task whose class is called as the person, and two taught ones.
            trained = make_bundle(load_backbone(backbone), 7, golden=False)
            labels = (LABEL, *trained.labels[1:])
            manifest = trained.manifest.model_copy(update={"labels": labels})
            store = open_store(STORE)
            store.publish("trained", type(trained)(manifest, dict(trained.tensors)))
            teach(first, "people", {LABEL: [FACE, OTHERS[0]], "bob": OTHERS[1:3]})
            teach(first, "things", {"cat": [FACE, OTHERS[0]], "dog": OTHERS[1:3]})
            teach(second, "things", {"dog": OTHERS[3:4]})
            newest = {"X-Min-Generation": str(store.catalog().generation)}
            for url in cluster.urls:
                for task in ("people", "things", "trained"):
                    answer = httpx.post(
                        f"{url}/predict?tasks={task}", content=FACE, headers=newest, timeout=60
                    )
                    assert answer.status_code == 200, answer.text
            correct(first, "trained", FACE, LABEL)
            back_up(str(backup), STORE)
            assert all(traces_in(in_folder(folder)) for folder in caches)
            assert traces_in(in_folder(backup))

            cluster.kill(1)
            for path in ("people", "trained"):
                done = httpx.delete(f"{first}/tasks/{path}?purge=true", timeout=60)
                assert done.status_code == 200, done.text
            digest = f"sha256:{hashlib.sha256(FACE).hexdigest()}"
            params = {"digest": digest, "purge": "true"}
            done = httpx.delete(f"{first}/tasks/things/examples", params=params, timeout=60)
            assert done.json()["purged"] == [1, 2], done.text
            assert traces_in(in_store(STORE)) == []
            await_no_trace(caches[0])
            assert traces_in(in_folder(caches[1])), "it is down"

            cluster.start(1)
            await_no_trace(caches[1])
            cluster.stop(0)
            cluster.start(0)
            for url in cluster.urls:
                answer = httpx.post(f"{url}/predict?tasks=things", content=OTHERS[0], timeout=60)
                assert answer.status_code == 200, answer.text
                assert httpx.get(f"{url}/tasks/people", timeout=60).status_code == 404
            assert all(traces_in(in_folder(folder)) == [] for folder in caches)

        back_up(str(backup), STORE)
        restore_backup(str(backup), str(restored))
        assert traces_in(in_folder(backup)) == []
        assert traces_in(in_folder(restored)) == []
        for url in (STORE, str(backup), str(restored)):
            verify(url)  # exits if anything is damaged


# Purges a task, and is killed at its n-th write, link, rename or deletion; without a kill, it
# prints how many there are.
PURGER = """
import os, signal, sys
from engram_store import Purge, open_store
url, moment = sys.argv[1], int(sys.argv[2])
count = 0
def on_event(event, arguments):
    global count
    if event in ("open", "os.remove", "os.link", "os.rename"):
        count += 1
        if count == moment:
            os.kill(os.getpid(), signal.SIGKILL)
store = open_store(url)
sys.addaudithook(on_event)
store.commit(Purge("doomed"))
print(count)
"""


def run_purger(folder: Path, moment: int) -> subprocess.CompletedProcess:
    command = [sys.executable, "-c", PURGER, str(folder), str(moment)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


@pytest.mark.long
def test_purging_process_killed_at_any_moment_leaves_all_or_nothing(tmp_path):
    template = tmp_path / "template"
    store = open_store(template)
    for seed in range(4):
        store.publish("doomed", bundle(seed))
    store.publish("kept", bundle(99))
    digest = f"sha256:{hashlib.sha256(FACE).hexdigest()}"
    for _ in range(4):
        store.correct("doomed", [Correction(digest=digest, labels=(LABEL,))])
    before = in_store(str(template))
    shutil.copytree(template, tmp_path / "counted")
    whole = run_purger(tmp_path / "counted", 0)
    dice, untouched, interrupted = random.Random(0), 0, 0
    for number in range(KILLS):
        folder = tmp_path / f"store-{number}"
        shutil.copytree(template, folder)
        done = run_purger(folder, dice.randint(1, int(whole.stdout)))
        assert done.returncode == -signal.SIGKILL, done.stderr
        if in_store(str(folder)) == before:
            untouched += 1
            assert open_store(folder).verify().damages == ()
            continue
        interrupted += 1
        assert open_store(folder).catalog().names == ("kept",), "the purge is in the log"
        purge("doomed", str(folder))
        assert traces_in(in_folder(folder)) == []
        verify(str(folder))  # exits if anything is damaged
        assert open_store(folder).read_bundle(bundle(99).digest) == bundle(99)
    assert untouched
    assert interrupted
