"""Starting, refusing and leaving, as an operator sees it: a real process and real signals."""

import asyncio
import signal
import socket
import time

import httpx
import pytest
from engram_server.model import load_backbone

from tests.e2e.server_process import free_port, run_engram, serving
from tests.serving import make_bundle, photo


async def until(condition, seconds=30.0):
    async with asyncio.timeout(seconds):
        while not await condition():
            await asyncio.sleep(0.01)


def test_sigterm_drains_readiness_first_requests_finish_exit_zero(folder_of, tmp_path):
    # Large enough that decoding them takes longer than the signal.
    images = [photo(number, size=(700, 700), image_format="JPEG") for number in range(24)]

    async def scenario(server):
        async with httpx.AsyncClient(base_url=server.url, timeout=60) as client:

            async def under_way():
                return (await client.get("/readyz")).json()["pending_images"] > 0

            async def not_ready():
                return (await client.get("/readyz")).status_code == 503

            files = [("image", ("a.jpg", image, "image/jpeg")) for image in images]
            flying = [
                asyncio.create_task(client.post("/predict?tasks=base", files=files))
                for _ in range(4)
            ]
            await until(under_way)
            server.process.send_signal(signal.SIGTERM)
            await until(not_ready)
            assert (await client.get("/livez")).status_code == 200
            return await asyncio.gather(*flying)

    with serving(tmp_path, folder_of("vit"), drain_notice_seconds=2) as server:
        answers = asyncio.run(scenario(server))
        assert server.process.wait(timeout=60) == 0
    # Requests in flight are answered in full, later ones get 503, and none is cut off.
    finished = [answer for answer in answers if answer.status_code == 200]
    assert finished
    assert all(len(answer.json()["images"]) == len(images) for answer in finished)
    assert {answer.status_code for answer in answers} <= {200, 503}


@pytest.mark.long
def test_a_restarted_server_serves_what_was_published_before(folder_of, tmp_path):
    folder = folder_of("vit")
    bundle = make_bundle(load_backbone(folder), 5)
    with serving(tmp_path, folder) as server:
        published = httpx.put(f"{server.url}/tasks/team/birds", content=bundle.to_bytes())
        assert published.status_code == 201, published.text
        server.process.kill()
        server.process.wait(timeout=30)
    with serving(tmp_path, folder) as server:
        answer = httpx.post(f"{server.url}/predict?tasks=team/birds", content=photo(1)).json()
        assert answer["images"][0]["tasks"]["team/birds"]["version"] == 1
        assert server.stop() == 0


@pytest.mark.long
def test_one_replica_serves_what_was_published_through_another(folder_of, tmp_path):
    folder = folder_of("vit")
    bundle = make_bundle(load_backbone(folder), 6)
    settings = {"store": tmp_path / "store", "poll_seconds": 0.05}
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    with (
        serving(tmp_path / "a", folder, **settings) as first,
        serving(tmp_path / "b", folder, **settings) as second,
    ):
        httpx.put(f"{first.url}/tasks/birds", content=bundle.to_bytes()).raise_for_status()
        deadline = time.monotonic() + 30
        while httpx.post(f"{second.url}/predict?tasks=birds", content=photo(1)).status_code != 200:
            assert time.monotonic() < deadline
            time.sleep(0.05)


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        (["--backbone", "./nowhere"], "does not exist"),
        (["--host", "0.0.0.0"], "ENGRAM_API_KEY"),
        (["--device", "cuda:7"], "cuda:7"),
        (["--store", "ftp://x/y"], "ftp"),
    ],
)
def test_settings_that_cannot_be_served_are_clear_errors(folder_of, tmp_path, settings, complaint):
    arguments = ["--backbone", str(folder_of("vit")), "--port", str(free_port()), *settings]
    code, printed = run_engram(tmp_path, "serve", *arguments)
    assert code == 1
    assert complaint in printed
    assert "Traceback" not in printed


def test_a_port_in_use_is_a_clear_error(folder_of, tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = str(listener.getsockname()[1])
        arguments = ["--backbone", str(folder_of("vit")), "--port", port]
        code, printed = run_engram(tmp_path, "serve", *arguments)
    assert code == 1
    assert f"Port {port}" in printed
