"""`engram serve` as a process: what it prints, and how it leaves."""

import asyncio
import contextlib
import json
import os
import shutil
import signal
import ssl
import subprocess
import sys
import threading
import time
from pathlib import Path

import httpx
import pytest
import uvicorn

from server.app import create_app
from server.cli import DrainingServer, banner, listen
from server.errors import SettingsError
from task_store import open_store
from tests.api.certificates import Authority
from tests.bundles import bundle as foreign_bundle
from tests.conftest import PHOTOS

ENGRAM = str(Path(sys.executable).with_name("engram"))
CAT = PHOTOS / "cat.jpg"


class Process:
    """A server that prints its address when it is ready."""

    def __init__(self, folder: Path, **settings):
        own = {f"ENGRAM_{name.upper()}": str(value) for name, value in settings.items()}
        clean = {k: v for k, v in os.environ.items() if not k.startswith("ENGRAM_")}
        self.popen = subprocess.Popen(
            [ENGRAM, "serve", "--port", "0", "--store", str(folder / "store")],
            env={**clean, "OMP_NUM_THREADS": "1", "ENGRAM_LOG_FORMAT": "json", **own},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=folder,
        )
        self.banner = []
        for line in self.popen.stdout:
            self.banner.append(line.strip())
            if line.strip().startswith("curl"):
                break
        (address,) = [line for line in self.banner if "ready at" in line] or [""]
        self.url = address.rpartition(" ")[2]

    def finish(self) -> tuple[int, list[dict]]:
        """The exit code, and the log."""
        _, log = self.popen.communicate(timeout=60)
        return self.popen.returncode, [json.loads(line) for line in log.splitlines()]


@pytest.fixture
def serve(folder_of, tmp_path, world):
    """`serve(**settings)`: a process that serves the tiny backbone with the task `pets`."""
    open_store(tmp_path / "store").publish("pets", world.bundles["pets"])
    started = []

    def start(**settings):
        started.append(Process(tmp_path, backbone=folder_of("vit"), devices="cpu", **settings))
        return started[-1]

    yield start
    for process in started:
        if process.popen.poll() is None:
            process.popen.kill()
            process.popen.wait()
        with contextlib.suppress(ValueError):
            process.popen.communicate()


def test_banner_names_what_is_served_and_its_line_works(serve):
    process = serve(drain_notice_seconds=0)
    text = "\n".join(process.banner)
    assert "2 ready: base, pets" in text
    assert "cpu (float32)" in text
    assert "vit0" in text
    line = process.banner[-1]
    assert line == f"curl -T cat.jpg '{process.url}/predict?tasks=base,pets'"
    if shutil.which("curl"):
        command = line.replace("cat.jpg", str(CAT)).replace("curl", "curl --silent --noproxy '*'")
        done = subprocess.run(command, shell=True, capture_output=True, timeout=60, check=True)
        assert list(json.loads(done.stdout)["images"][0]["tasks"]) == ["base", "pets"]
    process.popen.send_signal(signal.SIGINT)
    code, log = process.finish()
    assert code == 0
    assert not [line for line in log if line["level"] in ("error", "critical")]


def test_banner_of_a_server_with_a_certificate_says_https(serve, tmp_path):
    authority = Authority(tmp_path)
    certificate, key = authority.certificate("127.0.0.1")
    process = serve(tls_certificate=certificate, tls_key=key)
    assert process.url.startswith("https://")
    assert f"'{process.url}/predict" in process.banner[-1]
    trusted = ssl.create_default_context(cafile=str(authority.file))
    assert httpx.get(f"{process.url}/livez", verify=trusted).status_code == 200


def test_sigterm_lowers_readiness_first_and_leaves_with_zero(serve):
    process = serve(drain_notice_seconds=1.5)
    with httpx.Client(base_url=process.url, timeout=30) as client:
        assert client.get("/readyz").status_code == 200
        process.popen.send_signal(signal.SIGTERM)
        deadline = time.monotonic() + 1.2
        while client.get("/readyz").status_code == 200:
            assert time.monotonic() < deadline
        # Those who have not noticed yet are still served.
        assert client.post("/predict", content=CAT.read_bytes()).status_code == 200
    code, log = process.finish()
    assert code == 0
    assert [line["status"] for line in log if line.get("path") == "/predict"] == [200]


def test_requests_in_flight_finish_before_the_server_ends(world, monkeypatch):
    """In this process, with an engine that answers only once the server is shutting down."""
    predict, begun = world.engine.predict, threading.Event()
    app = world.app()
    monkeypatch.setattr(world.engine, "predict", None)
    listener = listen("127.0.0.1", 0)
    config = uvicorn.Config(app, log_config=None, lifespan="on", timeout_graceful_shutdown=30)
    server = DrainingServer(config, app.state.runtime)

    async def slow(request):
        begun.set()
        while server.should_exit is False:
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.3)
        return await predict(request)

    monkeypatch.setattr(world.engine, "predict", slow)
    port = listener.getsockname()[1]
    running = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    running.start()
    answers = []

    def ask():
        url = f"http://127.0.0.1:{port}/predict?tasks=pets"
        answers.append(httpx.post(url, content=CAT.read_bytes(), timeout=30))

    asking = threading.Thread(target=ask)
    asking.start()
    assert begun.wait(30)
    server.handle_exit(signal.SIGTERM, None)
    assert app.state.runtime.draining
    asking.join(30)
    running.join(30)
    assert [answer.status_code for answer in answers] == [200]
    assert not server.force_exit


def test_second_interrupt_does_not_wait(settings):
    app = create_app(settings)
    server = DrainingServer(uvicorn.Config(app), app.state.runtime)
    server.handle_exit(signal.SIGINT, None)
    assert (server.should_exit, server.force_exit) == (True, False)
    server.handle_exit(signal.SIGTERM, None)
    assert not server.force_exit
    server.handle_exit(signal.SIGINT, None)
    assert server.force_exit


def test_addresses_that_cannot_be_listened_on_are_told_in_a_sentence():
    with listen("127.0.0.1", 0) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(SettingsError, match=rf"Port {port} on 127\.0\.0\.1 is in use"):
            listen("127.0.0.1", port)
    with pytest.raises(SettingsError, match=r"Cannot listen on no\.such\.host\.invalid"):
        listen("no.such.host.invalid", 0)


def test_banner_names_failed_tasks_and_the_key(world, fresh):
    world.store.publish(fresh, foreign_bundle())
    world.engine.sync()
    text = banner(world.engine, "http://127.0.0.1:1", with_key=True)
    assert f"failed    {fresh}" in text
    assert "curl -H 'X-API-Key: …' -T cat.jpg" in text
