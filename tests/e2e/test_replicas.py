"""Several servers on one store, as in production: killed, cut off, slowed, restarted, under load.

Whatever happens, every answer is right for one generation of the catalog, changes that were
acknowledged are kept and those that were refused were not made, and all replicas serve the newest
state within seconds.
"""

import asyncio
import contextlib
import math
import random
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field

import httpx
import numpy as np
import pytest
import torch
from engram_server.model import MultiTaskViT, load_backbone
from engram_store import open_store

from tests.e2e import s3_servers
from tests.e2e.cluster import Cluster, haproxy
from tests.e2e.tcp_proxy import TcpProxy
from tests.e2e.test_changing_tasks import defaults_by_generation, logits_of
from tests.serving import make_bundle, photo

TASKS = ["birds", "cars", "team/pets"]
VERSIONS = 3
CLIENTS = 3
PAUSE_SECONDS = 0.02  # of each client between two requests
CONVERGENCE_SECONDS = 3.0
OUTAGE_SECONDS = 10.0
SLOW_SECONDS = 0.05  # by which each piece of the store's traffic is late
IMAGES = [photo(number) for number in range(4)]
TOLERANCE = 1e-4
STORE = f"s3://{s3_servers.BUCKET}/store"
SETTINGS = {"store": STORE, "cache_precision": "float32", "drain_notice_seconds": 2}


class Bundles:
    """What is published, and what each bundle answers for each image."""

    def __init__(self, backbone) -> None:
        self.of = {
            (task, number): make_bundle(backbone, 10 * place + number, golden=number == 0)
            for place, task in enumerate(TASKS)
            for number in range(VERSIONS)
        }
        pixels = [backbone.preprocessing(image, max_pixels=10**8) for image in IMAGES]
        model = MultiTaskViT(backbone)
        for (task, number), bundle in self.of.items():
            model.add(f"{task}-{number}", bundle)
        logits = model(torch.stack([torch.from_numpy(each) for each in pixels]))
        self.expected = {
            bundle.digest: logits[f"{task}-{number}"].numpy()
            for (task, number), bundle in self.of.items()
        }


@dataclass(frozen=True)
class Prediction:
    """One request of the load."""

    began: float
    ended: float
    image: int
    tasks: list[str]
    status: int
    body: dict | None


@dataclass
class Run:
    """A cluster under load, and the predictions it served."""

    cluster: Cluster
    client: httpx.AsyncClient
    bundles: Bundles
    dice: random.Random = field(default_factory=lambda: random.Random(0))
    predictions: list[Prediction] = field(default_factory=list)
    acknowledged: list[int] = field(default_factory=list)  # generations

    @property
    def newest(self) -> int:
        return self.acknowledged[-1]

    # The load

    @contextlib.asynccontextmanager
    async def load(self, url: str) -> AsyncIterator[None]:
        """Clients that ask all the time."""
        stop = asyncio.Event()
        clients = [asyncio.create_task(self._ask(url, seed, stop)) for seed in range(CLIENTS)]
        try:
            yield
        finally:
            stop.set()
            await asyncio.gather(*clients)

    async def _ask(self, url: str, seed: int, stop: asyncio.Event) -> None:
        dice = random.Random(seed)
        while not stop.is_set():
            image, tasks = dice.randrange(len(IMAGES)), dice.sample(TASKS, dice.randint(1, 3))
            params = {"tasks": ",".join(tasks), "return": "logits"}
            began, status, body = time.monotonic(), 0, None
            with contextlib.suppress(httpx.TransportError):
                answer = await self.client.post(
                    f"{url}/predict", params=params, content=IMAGES[image]
                )
                status = answer.status_code
                body = answer.json() if status == 200 else None
            self.predictions.append(Prediction(began, time.monotonic(), image, tasks, status, body))
            await asyncio.sleep(PAUSE_SECONDS)

    # Changes

    async def publish(self, **params: object) -> httpx.Response:
        task = self.dice.choice(TASKS)
        bundle = self.bundles.of[task, self.dice.randrange(VERSIONS)]
        url = self.dice.choice(self.cluster.urls)
        return await self.client.put(
            f"{url}/tasks/{task}", params=params, content=bundle.to_bytes()
        )

    async def roll_back(self) -> httpx.Response:
        url, task = self.dice.choice(self.cluster.urls), self.dice.choice(TASKS)
        return await self.client.post(f"{url}/tasks/{task}/rollback")

    async def change(self) -> None:
        """Any change through any replica, and then all of them serve it."""
        made = False
        while not made:
            answer = await (self.roll_back() if self.dice.random() < 0.4 else self.publish())
            # 409: there is nothing to roll back.
            assert answer.status_code in (200, 201, 409), answer.text
            made = answer.status_code != 409 and self.note(answer)
        await self.converge()

    def note(self, answer: httpx.Response) -> bool:
        """Whether a change that was acknowledged changed anything."""
        generation = answer.json()["generation"]
        if self.acknowledged and generation == self.newest:
            return False
        self.acknowledged.append(generation)
        return True

    async def converge(self, seconds: float = CONVERGENCE_SECONDS) -> None:
        """Every replica that runs serves the newest generation, soon."""
        began = time.monotonic()
        while behind := [s for s in await self.readiness() if s["generation"] < self.newest]:
            waited = time.monotonic() - began
            assert waited < seconds, f"{len(behind)} replicas are behind after {waited:.1f} s"
            await asyncio.sleep(0.05)

    async def readiness(self) -> list[dict]:
        """What each replica says of itself; all are ready."""
        answers = [await self.client.get(f"{url}/readyz") for url in self.cluster.urls]
        assert [answer.status_code for answer in answers] == [200] * len(answers)
        return [answer.json() for answer in answers]

    async def until(self, condition: Callable[[dict], bool], seconds: float) -> None:
        """Every replica says something, soon."""
        deadline = time.monotonic() + seconds
        while not all(condition(each) for each in await self.readiness()):
            assert time.monotonic() < deadline, "waited in vain"
            await asyncio.sleep(0.05)

    # What must be true afterwards

    def check_answers(self) -> None:
        """Every answer is that of one generation, to the last task and number."""
        generations = defaults_by_generation(open_store(STORE))
        for one in self.predictions:
            if one.body is None:
                continue
            catalog = generations[one.body["generation"]]
            (found,) = one.body["images"]
            assert list(found["tasks"]) == one.tasks
            for task in one.tasks:
                version = catalog.resolve(task)
                assert found["tasks"][task]["version"] == version.version
                expected = self.bundles.expected[version.digest][one.image]
                assert np.abs(logits_of(found["tasks"][task]) - expected).max() < TOLERANCE

    def check_no_failure(self, but_in_flight: tuple[float, float] | None = None) -> None:
        """Nothing failed, except what a replica killed in that time may have been answering."""
        since, until = but_in_flight or (math.inf, -math.inf)
        for one in self.predictions:
            in_flight = one.began <= until and one.ended >= since
            assert one.status == 200 or in_flight, f"{one.status} for {one.tasks}"

    def check_nothing_was_lost_or_made_up(self) -> None:
        """The log has what was acknowledged and nothing else."""
        log = [entry.generation for entry in open_store(STORE).history(limit=10**6)]
        assert sorted(log) == sorted(self.acknowledged)


async def first_versions(run: Run) -> None:
    for task in TASKS:
        url = run.cluster.urls[0]
        content = run.bundles.of[task, 0].to_bytes()
        answer = await run.client.put(f"{url}/tasks/{task}", content=content)
        assert answer.status_code == 201, answer.text
        run.note(answer)
    await run.converge()


async def wait_for_all(run: Run) -> None:
    """A change that waits is served by everybody when it returns."""
    while True:
        answer = await run.publish(wait="all", timeout=30)
        assert answer.status_code in (200, 201), answer.text
        if run.note(answer):
            break
    assert len(answer.json()["replicas"]["serving"]) == len(run.cluster.urls)
    await run.converge(seconds=0.0)
    listed = (await run.client.get(f"{run.cluster.urls[-1]}/replicas")).json()
    assert {each["address"] for each in listed["replicas"]} == set(run.cluster.urls), listed
    assert {each["generation"] for each in listed["replicas"]} == {run.newest}


async def read_own_write(run: Run) -> None:
    """The generation of a change is enough to have it from any replica, at once."""
    answer = await run.publish()
    assert answer.status_code in (200, 201), answer.text
    run.note(answer)
    known = {"X-Min-Generation": str(run.newest)}
    for url in run.cluster.urls:
        response = await run.client.post(
            f"{url}/predict?tasks=birds", content=IMAGES[0], headers=known
        )
        assert response.status_code == 200, response.text
        assert response.json()["generation"] >= run.newest


async def outage(run: Run, proxy: TcpProxy, seconds: float) -> None:
    """Without the store everything is answered and nothing is changed; then all go on."""
    began = time.monotonic()
    proxy.cut()
    refused = await asyncio.gather(run.publish(), run.roll_back(), run.publish())
    for answer in refused:
        assert answer.status_code == 503, answer.text
        assert answer.json()["type"].endswith(":store-unavailable")
        assert int(answer.headers["Retry-After"]) > 0
    await run.until(lambda status: status["store"]["error"] is not None, seconds=30)
    await asyncio.sleep(max(0.0, began + seconds - time.monotonic()))
    for url in run.cluster.urls:
        metrics = (await run.client.get(f"{url}/metrics")).text
        (stale,) = (
            line for line in metrics.splitlines() if line.startswith("engram_store_staleness_sec")
        )
        assert float(stale.split()[1]) > seconds / 2
    proxy.restore()
    await run.until(lambda status: status["store"]["error"] is None, seconds=CONVERGENCE_SECONDS)
    await run.change()


def run_in(store: Callable, tmp_path, folder_of, monkeypatch, count: int, scenario: Callable):
    """A scenario on a cluster whose store is behind a proxy; then what must be true."""
    folder = folder_of("vit")
    with store(tmp_path) as port, TcpProxy(port) as proxy:
        environment = s3_servers.environment(proxy.port)
        for name, value in environment.items():
            monkeypatch.setenv(name, value)  # for looking into the store afterwards
        with Cluster(tmp_path, folder, count, environment, **SETTINGS) as cluster:

            async def whole() -> Run:
                limits = httpx.Limits(max_keepalive_connections=CLIENTS)
                async with httpx.AsyncClient(timeout=60, limits=limits) as client:
                    run = Run(cluster, client, Bundles(load_backbone(folder)))
                    await first_versions(run)
                    await scenario(run, proxy)
                return run

            run = asyncio.run(whole())
        run.check_answers()
        run.check_nothing_was_lost_or_made_up()
    return run


@pytest.mark.long
@pytest.mark.alone
@pytest.mark.timeout(900)
def test_three_replicas_answer_right_whatever_happens(tmp_path, folder_of, monkeypatch):
    killed: list[float] = []  # before and after

    async def scenario(run: Run, proxy: TcpProxy) -> None:
        cluster = run.cluster
        with haproxy(tmp_path, cluster.ports) as url:
            async with run.load(url):
                for _ in range(4):
                    await run.change()
                await wait_for_all(run)
                await read_own_write(run)

                killed.append(time.monotonic())
                cluster.kill(1)
                killed.append(time.monotonic())
                await run.change()
                await asyncio.to_thread(cluster.start, 1)
                await run.converge()

                await outage(run, proxy, OUTAGE_SECONDS)

                proxy.delay = SLOW_SECONDS
                for _ in range(2):
                    await run.change()
                proxy.delay = 0.0
                await wait_for_all(run)

    run = run_in(s3_servers.moto, tmp_path, folder_of, monkeypatch, 3, scenario)
    run.check_no_failure(but_in_flight=(killed[0], killed[1]))
    assert len({one.body["generation"] for one in run.predictions if one.body}) > 5


@pytest.mark.long
@pytest.mark.alone
@pytest.mark.timeout(900)
def test_a_rolling_restart_loses_no_request_and_downloads_nothing(tmp_path, folder_of, monkeypatch):
    async def scenario(run: Run, proxy: TcpProxy) -> None:
        cluster = run.cluster
        for _ in range(3):
            await run.change()
        await wait_for_all(run)
        with haproxy(tmp_path, cluster.ports) as url:
            async with run.load(url):
                proxy.requests.clear()
                for number in range(len(cluster.ports)):
                    await asyncio.to_thread(cluster.stop, number)
                    await asyncio.to_thread(cluster.start, number)
                    await run.converge()
                downloads = [
                    path for verb, path in proxy.requests if verb == "GET" and "/blobs/" in path
                ]
                assert downloads == []
                await run.change()

    run = run_in(s3_servers.moto, tmp_path, folder_of, monkeypatch, 3, scenario)
    run.check_no_failure()
    assert len(run.predictions) > 50


@pytest.mark.long
@pytest.mark.alone
@pytest.mark.timeout(900)
def test_the_same_on_seaweedfs(tmp_path, folder_of, monkeypatch):
    async def scenario(run: Run, proxy: TcpProxy) -> None:
        async with run.load(run.cluster.urls[0]):
            for _ in range(4):
                await run.change()
            await wait_for_all(run)
            await read_own_write(run)
            await outage(run, proxy, seconds=2.0)
            await wait_for_all(run)

    run = run_in(s3_servers.seaweedfs, tmp_path, folder_of, monkeypatch, 2, scenario)
    run.check_no_failure()
