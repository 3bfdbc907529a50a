"""Everything that can break, at random and all the time, under traffic and publishes.

Servers are killed, the disk is full, the store is away, the device fails and its thread dies, while
garbage is collected without a pause. Every answer is right or a documented refusal, and the log is
what was acknowledged. `make soak` runs this for ten minutes, and prints the figures.
"""

import contextlib
import random
import shutil
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path

import httpx
import numpy as np
import pytest
import torch
from engram_bundle import TaskStoreError
from engram_server.api.problems import URN, error_rows
from engram_server.model import MultiTaskViT, load_backbone
from engram_store import open_store
from engram_store.catalog import Catalog

from tests.e2e.server_process import ServerProcess, free_port, start
from tests.e2e.soak import CHAOS_SECONDS
from tests.e2e.test_changing_tasks import defaults_by_generation, logits_of
from tests.serving import make_bundle, photo

TASKS = ["birds", "cars", "team/pets"]
PASSING = "passing"  # is published and retired all the time
BUNDLES = 8  # of each task
CLIENTS = 2
SERVERS = 2
IMAGES = [photo(number) for number in range(4)]
TOLERANCE = 1e-4
DISK = "48m"
GRACE = timedelta(seconds=2)  # of the collection of garbage
# What a refusal may be, of a prediction or of a change.
REFUSED = frozenset({409, 429, 503, 507})
DOCUMENTED = frozenset(URN + name for _, name, _, _ in error_rows())

pytestmark = [pytest.mark.long, pytest.mark.alone, pytest.mark.timeout(CHAOS_SECONDS + 600)]


class Bundles:
    """All that is published, and what each bundle answers for each image."""

    def __init__(self, backbone) -> None:
        self.of = {
            task: [make_bundle(backbone, 100 * place + n, golden=False) for n in range(BUNDLES)]
            for place, task in enumerate([*TASKS, PASSING])
        }
        pixels = [backbone.preprocessing(image, max_pixels=10**8) for image in IMAGES]
        model = MultiTaskViT(backbone)
        every = [bundle for bundles in self.of.values() for bundle in bundles]
        for bundle in every:
            model.add(bundle.digest[7:40], bundle)
        logits = model(torch.stack([torch.from_numpy(each) for each in pixels]))
        self.expected = {each.digest: logits[each.digest[7:40]].numpy() for each in every}


@dataclass(frozen=True)
class Prediction:
    """A prediction: its answer, or how it failed."""

    server: int
    began: float
    ended: float
    image: int
    tasks: list[str]
    status: int
    body: dict


@dataclass(frozen=True)
class Changed:
    """A change: what it should have done, and what became of it."""

    task: str
    status: int  # 0: unknown
    body: dict
    # Whether a catalog shows it.
    shows: Callable[[Catalog, dict], bool]


@dataclass
class Run:
    """Servers of one store, their clients, and the faults."""

    folder: Path
    backbone: Path
    disk: Path
    full_disk: bool
    bundles: Bundles
    stopped: threading.Event = field(default_factory=threading.Event)
    predictions: list[Prediction] = field(default_factory=list)
    changed: list[Changed] = field(default_factory=list)
    faults: Counter[str] = field(default_factory=Counter)
    collections: Counter[str] = field(default_factory=Counter)
    # When each server was, or may have been, away; and when no device may have answered.
    away: list[tuple[int, float, float]] = field(default_factory=list)
    broken: list[tuple[int, float, float]] = field(default_factory=list)
    ports: list[int] = field(default_factory=lambda: [free_port() for _ in range(SERVERS)])
    servers: dict[int, ServerProcess] = field(default_factory=dict)

    @property
    def store(self) -> Path:
        return self.disk / "store"

    def url(self, number: int) -> str:
        return f"http://127.0.0.1:{self.ports[number]}"

    def order(self, number: int) -> Path:
        return self.folder / f"break-{number}"

    # The servers

    def start(self, number: int) -> None:
        """As a supervisor does; it is ready some seconds later."""
        folder = self.folder / f"server-{number}"
        folder.mkdir(exist_ok=True)
        self.servers[number] = start(
            folder,
            self.backbone,
            port=self.ports[number],
            module="tests.e2e.breakable_server",
            environment={"BREAK_DEVICE": str(self.order(number)), "TMPDIR": str(self.disk)},
            store=self.store,
            cache_precision="float32",
            poll_seconds=0.2,
            log_level="warning",
        )

    def restart(self, number: int) -> None:
        began = time.monotonic()
        self.order(number).unlink(missing_ok=True)
        self.servers[number].kill()
        self.start(number)
        self.servers[number].await_ready()
        self.away.append((number, began, time.monotonic()))

    # Clients

    def ask(self, seed: int) -> None:
        dice = random.Random(seed)
        with httpx.Client(timeout=30) as client:
            while not self.stopped.wait(0.02):
                server = dice.randrange(SERVERS)
                image, tasks = dice.randrange(len(IMAGES)), dice.sample(TASKS, dice.randint(1, 3))
                params = {"tasks": ",".join(tasks), "return": "logits"}
                url, began = f"{self.url(server)}/predict", time.monotonic()
                status, body = send(client, "POST", url, params=params, content=IMAGES[image])
                ended = time.monotonic()
                self.predictions.append(
                    Prediction(server, began, ended, image, tasks, status, body)
                )

    def change(self) -> None:
        dice = random.Random("changes")
        with httpx.Client(timeout=60) as client:
            while not self.stopped.wait(0.05):
                url, task = self.url(dice.randrange(SERVERS)), dice.choice([*TASKS, PASSING])
                how = dice.random()
                if how < 0.7:
                    bundle = dice.choice(self.bundles.of[task])
                    self._publish(client, url, task, bundle)
                elif task == PASSING:
                    status, body = send(client, "DELETE", f"{url}/tasks/{task}")
                    self.changed.append(
                        Changed(task, status, body, lambda c, _: PASSING not in c.names)
                    )
                else:
                    status, body = send(client, "POST", f"{url}/tasks/{task}/rollback")
                    self.changed.append(Changed(task, status, body, default_is_the_answers(task)))

    def _publish(self, client: httpx.Client, url: str, task: str, bundle) -> None:
        status, body = send(client, "PUT", f"{url}/tasks/{task}", content=bundle.to_bytes())
        self.changed.append(
            Changed(task, status, body, lambda c, _: c.resolve(task).digest == bundle.digest)
        )

    def collect_garbage(self) -> None:
        while not self.stopped.wait(0.05):
            try:
                open_store(self.store, create=False).collect_garbage(GRACE)
                self.collections["done"] += 1
            except TaskStoreError as error:
                self.collections[type(error).__name__] += 1

    # Faults

    def break_things(self, until: float) -> None:
        dice = random.Random("faults")
        faults = [self.kill, self.fail_device, self.end_worker, self.remove_the_store]
        if self.full_disk:
            faults.append(self.fill_the_disk)
        while time.monotonic() < until or len(self.faults) < len(faults):
            # Each of them before any comes again, however short the run.
            for fault in dice.sample(faults, len(faults)):
                fault(dice)
                self.faults[fault.__name__] += 1
                self.stopped.wait(dice.uniform(0, 1))
                self.check_none_ended()

    def kill(self, dice: random.Random) -> None:
        self.restart(dice.randrange(SERVERS))

    def fail_device(self, dice: random.Random) -> None:
        number, began = dice.randrange(SERVERS), time.monotonic()
        self.order(number).write_text("error")
        self.stopped.wait(dice.uniform(0.1, 4))
        self.order(number).unlink()
        self._await_device(number, began)

    def end_worker(self, dice: random.Random) -> None:
        number, began = dice.randrange(SERVERS), time.monotonic()
        self.order(number).write_text("death")
        while self.order(number).exists():
            assert time.monotonic() - began < 60, "no request reached the device"
            self.stopped.wait(0.05)
        self._await_device(number, began)

    def _await_device(self, number: int, began: float) -> None:
        """Until the server is ready again, or says that it must be restarted."""
        while time.monotonic() - began < 60:
            with contextlib.suppress(httpx.TransportError):
                if httpx.get(f"{self.url(number)}/livez", timeout=30).status_code == 503:
                    self.restart(number)
                    break
                if httpx.get(f"{self.url(number)}/readyz", timeout=30).status_code == 200:
                    break
            self.stopped.wait(0.1)
        else:
            raise AssertionError("the device never came back")
        self.broken.append((number, began, time.monotonic()))

    def remove_the_store(self, dice: random.Random) -> None:
        away = self.store.with_name("away")
        self.store.rename(away)
        self.stopped.wait(dice.uniform(0.1, 2))
        assert not self.store.exists(), "another store was created"
        away.rename(self.store)

    def fill_the_disk(self, dice: random.Random) -> None:
        ballast = self.disk / "ballast"
        with contextlib.suppress(OSError), ballast.open("wb", buffering=0) as file:
            while True:
                file.write(bytes(65536))
        with contextlib.suppress(OSError), ballast.open("ab", buffering=0) as file:
            while True:
                file.write(bytes(512))
        self.stopped.wait(dice.uniform(0.1, 2))
        ballast.unlink()

    def check_none_ended(self) -> None:
        """By itself, that is."""
        for number, server in self.servers.items():
            assert server.process.poll() is None, (
                f"server {number} ended:\n{server.log.read_text()}"
            )


def send(client: httpx.Client, method: str, url: str, **options) -> tuple[int, dict]:
    """Status and document; 0 when the connection failed."""
    try:
        answer = client.request(method, url, **options)
    except httpx.TransportError:
        return 0, {}
    return answer.status_code, answer.json() if answer.content else {}


def default_is_the_answers(task: str) -> Callable[[Catalog, dict], bool]:
    return lambda catalog, body: catalog.resolve(task).version == body["aliases"]["default"]


@contextlib.contextmanager
def small_disk(folder: Path) -> Iterator[bool]:
    """A disk of its own at the folder, if this user may mount one; whether it may."""
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={DISK}", "tmpfs", str(folder)]
    mounted = bool(shutil.which("mount")) and not subprocess.run(command, check=False).returncode
    try:
        yield mounted
    finally:
        if mounted:
            subprocess.run(["umount", "-l", str(folder)], check=True)


def during(moment: Prediction, spans: list[tuple[int, float, float]]) -> bool:
    return any(
        moment.server == server and moment.began <= until and moment.ended >= since
        for server, since, until in spans
    )


def check_answers(run: Run, catalogs: dict[int, Catalog]) -> None:
    """Every answer is right for its generation, and every refusal is documented and has a cause."""
    for one in run.predictions:
        if one.status == 200:
            catalog = catalogs[one.body["generation"]]
            (found,) = one.body["images"]
            for task in one.tasks:
                version = catalog.resolve(task)
                assert found["tasks"][task]["version"] == version.version
                expected = run.bundles.expected[version.digest][one.image]
                assert np.abs(logits_of(found["tasks"][task]) - expected).max() < TOLERANCE
        elif one.status == 0:
            assert during(one, run.away), "a connection failed and no server was killed"
        elif one.status == 500:
            assert one.body["type"] == f"{URN}batch-failed", one.body
            assert during(one, run.broken), one.body
        else:
            assert one.status in REFUSED, one.body
            assert one.body["type"] in DOCUMENTED, one.body


def check_log(run: Run, catalogs: dict[int, Catalog]) -> None:
    """Every acknowledged change is in the log, and every log entry was requested."""
    unknown = [one for one in run.changed if one.status == 0 or one.status >= 500]
    acknowledged = [one for one in run.changed if 200 <= one.status < 300]
    for one in run.changed:
        if 0 != one.status >= 300:
            assert one.body["type"] in DOCUMENTED, one.body
            # 404: what is retired cannot be retired.
            failed = one.body["type"] == f"{URN}batch-failed"
            assert failed or one.status in REFUSED | {404}, one.body
    for one in acknowledged:
        assert one.shows(catalogs[one.body["generation"]], one.body), one
    known = {one.body["generation"] for one in acknowledged}
    made_up = [
        entry
        for entry in open_store(run.store).history(limit=10**6)
        if entry.generation not in known
        and getattr(entry.event, "task", None) not in {one.task for one in unknown} | {None}
    ]
    assert made_up == []


def test_every_answer_is_right_and_no_change_is_lost_whatever_breaks(folder_of, tmp_path):
    backbone = folder_of("vit")
    bundles = Bundles(load_backbone(backbone))
    with small_disk(tmp_path / "disk") as mounted:
        if not mounted:
            print("\nno disk can be mounted here: it is never full")
        run = Run(tmp_path, backbone, tmp_path / "disk", mounted, bundles)
        store = open_store(run.store)
        for task in [*TASKS, PASSING]:
            store.publish(task, bundles.of[task][0])
        try:
            for number in range(SERVERS):
                run.start(number)
            for server in run.servers.values():
                server.await_ready()
            under_way = [threading.Thread(target=run.ask, args=(n,)) for n in range(CLIENTS)]
            under_way += [threading.Thread(target=run.change)]
            under_way += [threading.Thread(target=run.collect_garbage)]
            for thread in under_way:
                thread.start()
            try:
                run.break_things(time.monotonic() + CHAOS_SECONDS)
            finally:
                run.stopped.set()
                for thread in under_way:
                    thread.join(90)
        finally:
            for server in run.servers.values():
                server.kill()
        statuses = Counter(one.status for one in run.predictions)
        changes = Counter(one.status for one in run.changed)
        print(f"\n{CHAOS_SECONDS} s; faults {dict(run.faults)}; predictions {dict(statuses)}")
        print(f"changes {dict(changes)}; collections {dict(run.collections)}")
        store = open_store(run.store)
        assert store.verify().damages == (), "every byte is as it was written"
        catalogs = defaults_by_generation(store)
        check_answers(run, catalogs)
        check_log(run, catalogs)
        for version in (v for task in store.catalog().tasks.values() for v in task.live):
            assert store.read_bundle(version.digest).digest == version.digest
    assert statuses[200] > 10 * CHAOS_SECONDS / 10
    assert run.collections["done"]
