"""`engram serve --processes`: several real servers on one port, killed, stopped and changed."""

import asyncio
import contextlib
import json
import os
import signal
import socket
import ssl
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import grpc
import httpx
import pytest
from engram_server.api.rpc.protocol import SERVICE
from engram_server.model import load_backbone
from engram_server.observability.audit import verify
from engram_store import open_store

from tests.api.certificates import Authority
from tests.e2e.process_group import (
    await_all,
    await_ready,
    by_process,
    kill_with_its_connections,
    process_ids,
    scrape,
)
from tests.e2e.server_process import ServerProcess, free_port, run_engram, serving, start
from tests.serving import make_bundle, photo

CLIENTS = 12
SECONDS = 60
IMAGES = [photo(number) for number in range(8)]

pytestmark = pytest.mark.slow


@contextlib.contextmanager
def several(folder: Path, backbone: Path, count: int, **settings) -> Iterator[ServerProcess]:
    """A server whose processes are all ready."""
    with serving(folder, backbone, processes=count, **settings) as server:
        await_all(server, count)
        yield server


@dataclass
class Load:
    """Clients that predict all the time, each on a connection that it keeps while it can."""

    port: int
    task: str = "base"
    keep_alive: bool = True
    answers: list[dict] = field(default_factory=list)
    statuses: Counter[int] = field(default_factory=Counter)
    refused: int = 0
    broken: list[tuple[int, str]] = field(default_factory=list)  # the client's port, and the error
    _stop: asyncio.Event = field(default_factory=asyncio.Event)

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        clients = [asyncio.create_task(self._client(number)) for number in range(CLIENTS)]
        try:
            yield
        finally:
            self._stop.set()
            async with asyncio.timeout(SECONDS):
                await asyncio.gather(*clients)

    async def more(self, requests: int) -> None:
        """Wait until so many more requests are answered."""
        enough = self.statuses.total() + requests
        async with asyncio.timeout(SECONDS):
            while self.statuses.total() < enough:
                await asyncio.sleep(0.01)

    async def _client(self, number: int) -> None:
        while not self._stop.is_set():
            try:
                reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
            except OSError:
                self.refused += 1
                return
            own_port = writer.get_extra_info("sockname")[1]
            try:
                while not self._stop.is_set():
                    await self._predict(reader, writer, IMAGES[number % len(IMAGES)])
                    if not self.keep_alive:
                        break
            except (OSError, EOFError) as error:
                self.broken.append((own_port, repr(error)))
            writer.close()

    async def _predict(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, image: bytes
    ) -> None:
        head = f"POST /predict?tasks={self.task} HTTP/1.1\r\nHost: 127.0.0.1\r\n"
        if not self.keep_alive:
            head += "Connection: close\r\n"
        writer.write(f"{head}Content-Length: {len(image)}\r\n\r\n".encode() + image)
        answer = (await reader.readuntil(b"\r\n\r\n")).lower()
        length = int(answer.partition(b"content-length:")[2].partition(b"\r\n")[0])
        body = await reader.readexactly(length)
        self.statuses[int(answer.split()[1])] += 1
        if answer.split()[1] == b"200":
            self.answers.append(json.loads(body))


def port_of(server: ServerProcess) -> int:
    return httpx.URL(server.url).port


def test_a_killed_process_takes_only_its_own_connections_along(folder_of, tmp_path):
    async def scenario(server: ServerProcess) -> tuple[Load, set[int]]:
        load = Load(port_of(server))
        async with load.running():
            await load.more(100)
            killed = process_ids(server)[2]
            lost = kill_with_its_connections(killed, load.port)
            await load.more(100)  # while it is away
            await asyncio.to_thread(await_ready, server, 2, times=2)
            await load.more(100)
        assert process_ids(server).keys() == {1, 2, 3}
        assert process_ids(server)[2] != killed
        return load, lost

    with several(tmp_path, folder_of("vit"), 3) as server:
        load, lost = asyncio.run(scenario(server))
        assert 0 < len(lost) < CLIENTS
        assert load.refused == 0
        assert {port for port, _ in load.broken} <= lost, load.broken
        assert load.statuses.keys() == {200}
        # It is back at work: of connections that stay open, it gets its share.
        before = by_process(scrape(server), "engram_images_admitted_total")[2]
        with contextlib.ExitStack() as stack:
            for number in range(24):  # more than enough, also on a busy machine
                client = stack.enter_context(httpx.Client(base_url=server.url, timeout=SECONDS))
                client.post("/predict?tasks=base", content=IMAGES[number % 8])
            assert by_process(scrape(server), "engram_images_admitted_total")[2] > before
        assert server.stop() == 0


@pytest.mark.long
def test_sigterm_under_load_answers_every_request(folder_of, tmp_path):
    async def scenario(server: ServerProcess) -> Load:
        load = Load(port_of(server), keep_alive=False)
        async with load.running(), httpx.AsyncClient(base_url=server.url) as client:
            await load.more(100)
            server.process.send_signal(signal.SIGTERM)
            async with asyncio.timeout(SECONDS):  # as a load balancer does
                while (await client.get("/readyz")).status_code == 200:
                    await asyncio.sleep(0.01)
        return load

    with several(tmp_path, folder_of("vit"), 3, drain_notice_seconds=3) as server:
        load = asyncio.run(scenario(server))
        assert server.process.wait(timeout=SECONDS) == 0
    assert load.refused == 0
    assert load.broken == []
    assert load.statuses.keys() <= {200, 503}
    assert load.statuses[200] > 100


@pytest.mark.long
def test_a_publish_that_waits_is_served_by_every_process(folder_of, tmp_path):
    bundles = [make_bundle(load_backbone(folder_of("vit")), seed) for seed in range(3)]

    async def scenario(server: ServerProcess) -> Load:
        load = Load(port_of(server), task="birds", keep_alive=False)
        async with load.running(), httpx.AsyncClient(base_url=server.url, timeout=60) as client:
            for bundle in bundles[1:]:
                answer = await client.put(
                    "/tasks/birds", params={"wait": "all"}, content=bundle.to_bytes()
                )
                assert answer.status_code == 201, answer.text
                assert len(answer.json()["replicas"]["serving"]) == 3
                seen = len(load.answers)
                await load.more(30 + CLIENTS)
                # The first of these may have been answered before.
                for each in load.answers[seen + CLIENTS :]:
                    (image,) = each["images"]
                    assert image["tasks"]["birds"]["version"] == answer.json()["version"]
        listed = httpx.get(f"{server.url}/replicas").json()["replicas"]
        assert {each["process"] for each in listed} == {1, 2, 3}
        assert {each["address"] for each in listed} == {server.url}
        assert len({each["id"] for each in listed}) == 3
        return load

    open_store(tmp_path / "store").publish("birds", bundles[0])
    with several(tmp_path, folder_of("vit"), 3) as server:
        load = asyncio.run(scenario(server))
    assert load.statuses.keys() == {200}


@pytest.mark.parametrize(
    ("setting", "complaint"),
    [
        (["--backbone", "./nowhere"], "does not exist"),
        (["--device", "cuda:7"], "cuda:7"),
    ],
)
def test_an_error_at_the_start_is_printed_once(folder_of, tmp_path, setting, complaint):
    arguments = ["--backbone", str(folder_of("vit")), "--port", str(free_port()), *setting]
    code, printed = run_engram(tmp_path, "serve", "--processes", "3", *arguments)
    assert code == 1
    assert printed.count("error: ") == 1
    assert complaint in printed
    assert "Traceback" not in printed


def test_a_port_in_use_is_an_error_before_any_process_starts(folder_of, tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = str(listener.getsockname()[1])
        arguments = ["--backbone", str(folder_of("vit")), "--port", port, "--processes", "2"]
        code, printed = run_engram(tmp_path, "serve", *arguments)
    assert code == 1
    assert f"Port {port}" in printed


def test_one_scrape_has_every_process_and_the_logs_name_them(folder_of, tmp_path):
    with several(tmp_path, folder_of("vit"), 3) as server:
        for image in IMAGES * 3:  # each on a connection of its own
            answer = httpx.post(f"{server.url}/predict?tasks=base", content=image)
            assert answer.status_code == 200
        text = scrape(server)
        assert by_process(text, "engram_process_up") == {1: 1, 2: 1, 3: 1}
        admitted = by_process(text, "engram_images_admitted_total")
        assert sum(admitted.values()) == 24
        assert by_process(text, "engram_workers") == {1: 1, 2: 1, 3: 1}
        assert by_process(text, "process_resident_memory_bytes").keys() == {1, 2, 3}
        records = [json.loads(x) for x in server.log.read_text().splitlines() if x.startswith("{")]
        lines = Counter(each["process"] for each in records if each.get("path") == "/predict")
        assert lines == {number: count for number, count in admitted.items() if count}


@pytest.mark.long
def test_each_process_has_an_audit_log_that_verifies(folder_of, tmp_path):
    bundle = make_bundle(load_backbone(folder_of("vit")), 1).to_bytes()
    with several(tmp_path, folder_of("vit"), 3, audit_log=tmp_path / "audit.jsonl") as server:
        for number in range(6):
            answer = httpx.put(f"{server.url}/tasks/task{number}", content=bundle)
            assert answer.status_code == 201, answer.text
        kill_with_its_connections(process_ids(server)[3], port_of(server))
        await_ready(server, 3, times=2)
        assert server.stop() == 0
    records = []
    for number in (1, 2, 3):
        path = tmp_path / f"audit-{number}.jsonl"
        assert verify([path]).sequence == len(path.read_bytes().splitlines())
        records += [json.loads(line) for line in path.read_bytes().splitlines()]
        assert {each["process"] for each in records[-2:]} == {number}
    changes = [each for each in records if each.get("outcome") == "ended"]
    assert sorted(each["task"] for each in changes) == [f"task{number}" for number in range(6)]


@pytest.mark.long
def test_processes_share_the_port_of_grpc(folder_of, tmp_path):
    port = free_port()
    with several(tmp_path, folder_of("vit"), 2, grpc_port=port) as server:
        # The kernel spreads connections at random: some of many reach each process.
        for _ in range(24):
            options = [("grpc.use_local_subchannel_pool", 1)]
            with grpc.insecure_channel(f"127.0.0.1:{port}", options) as channel:
                channel.unary_unary(f"/{SERVICE}/ServerReady")(b"", timeout=60)
        calls = by_process(scrape(server), "engram_request_seconds_count", "ServerReady")
        assert calls.keys() == {1, 2}
        assert sum(calls.values()) == 24
        (tmp_path / "other").mkdir()
        code, printed = run_engram(
            tmp_path / "other", "serve", "--backbone", str(folder_of("vit")), "--processes", "2",
            *("--port", str(free_port())), environment={"ENGRAM_GRPC_PORT": str(port)},
        )  # fmt: skip
        assert code == 1, "another server cannot have the port"
        assert f"Port {port}" in printed
        assert server.stop() == 0


@pytest.mark.long
def test_processes_speak_tls(folder_of, tmp_path):
    authority = Authority(tmp_path)
    certificate, key = authority.certificate("127.0.0.1")
    trusted = ssl.create_default_context(cafile=str(authority.file))
    settings = {"tls_certificate": certificate, "tls_key": key}
    server = start(tmp_path, folder_of("vit"), processes=2, **settings)
    server.url = server.url.replace("http:", "https:")
    try:
        await_all(server, 2)
        for image in IMAGES:
            answer = httpx.post(f"{server.url}/predict?tasks=base", content=image, verify=trusted)
            assert answer.status_code == 200
        admitted = by_process(scrape(server, verify=trusted), "engram_images_admitted_total")
        assert sum(admitted.values()) == len(IMAGES)
        assert server.stop() == 0
    finally:
        server.kill()


@pytest.mark.long
def test_without_their_supervisor_processes_end(folder_of, tmp_path):
    with several(tmp_path, folder_of("vit"), 2, drain_notice_seconds=0) as server:
        pids = process_ids(server).values()
        server.process.kill()
        deadline = time.monotonic() + SECONDS
        while any(os.path.exists(f"/proc/{pid}") for pid in pids):
            assert time.monotonic() < deadline
            time.sleep(0.05)
        with pytest.raises(httpx.ConnectError):
            httpx.get(f"{server.url}/livez")


@pytest.mark.long
def test_a_second_interrupt_ends_all_at_once(folder_of, tmp_path):
    with (
        several(tmp_path, folder_of("vit"), 2) as server,
        socket.create_connection(("127.0.0.1", port_of(server))) as waiting,
    ):
        waiting.sendall(b"POST /predict HTTP/1.1\r\nHost: a\r\nContent-Length: 9\r\n\r\n")
        server.process.send_signal(signal.SIGINT)
        deadline = time.monotonic() + SECONDS
        with contextlib.suppress(httpx.TransportError):
            while time.monotonic() < deadline:
                httpx.get(f"{server.url}/livez", timeout=5)
        server.process.send_signal(signal.SIGINT)
        assert server.process.wait(timeout=SECONDS) == 130
