"""`engram serve` as a process: what it prints, and how it leaves."""

import asyncio
import json
import os
import shutil
import signal
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Iterable
from pathlib import Path

import httpx
import pytest
import uvicorn
from engram_server.app import create_app
from engram_server.commands.serve import DrainingServer, banner, listen
from engram_server.errors import SettingsError
from engram_store import open_store

from tests.api.certificates import Authority
from tests.bundles import bundle as foreign_bundle
from tests.conftest import PHOTOS
from tests.e2e.server_process import serving, start

ENGRAM = str(Path(sys.executable).with_name("engram"))
CAT = PHOTOS / "cat.jpg"


@pytest.fixture
def folder(tmp_path, world) -> Path:
    """Where a server with the task `pets` runs."""
    open_store(tmp_path / "store").publish("pets", world.bundles["pets"])
    return tmp_path


def read_banner(lines: Iterable[str]) -> list[str]:
    """What a server prints until it is ready, of which the last line shows how to ask it."""
    found = []
    for line in lines:
        found.append(line.strip())
        if found[-1].startswith("curl"):
            return found
    raise AssertionError(f"the server ended: {found}")


def url_in(banner: list[str]) -> str:
    (address,) = [line for line in banner if "ready at" in line]
    return address.rpartition(" ")[2]


def test_banner_names_what_is_served_and_its_line_works(folder_of, folder):
    """The installed command, as people run it."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith("ENGRAM_")}
    settings = {"BACKBONE": str(folder_of("vit")), "DEVICES": "cpu", "DRAIN_NOTICE_SECONDS": "0"}
    own = {f"ENGRAM_{name}": value for name, value in settings.items()}
    with subprocess.Popen(
        [ENGRAM, "serve", "--port", "0", "--store", str(folder / "store")],
        env={**clean, "OMP_NUM_THREADS": "1", "ENGRAM_LOG_FORMAT": "json", **own},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=folder,
    ) as process:
        try:
            banner = read_banner(process.stdout)
            text = "\n".join(banner)
            assert "2 ready: base, pets" in text
            assert "cpu (float32)" in text
            assert "vit0" in text
            assert banner[-1] == f"curl -T cat.jpg '{url_in(banner)}/predict?tasks=base,pets'"
            if shutil.which("curl"):
                command = banner[-1].replace("cat.jpg", str(CAT))
                command = command.replace("curl", "curl --silent --noproxy '*'")
                done = subprocess.run(
                    command, shell=True, capture_output=True, timeout=60, check=True
                )
                assert list(json.loads(done.stdout)["images"][0]["tasks"]) == ["base", "pets"]
            process.send_signal(signal.SIGINT)
            _, log = process.communicate(timeout=60)
        finally:
            process.kill()
    assert process.returncode == 0
    lines = [json.loads(line) for line in log.splitlines()]
    assert not [line for line in lines if line["level"] in ("error", "critical")]


@pytest.mark.long
def test_banner_of_a_server_with_a_certificate_says_https(folder_of, folder):
    authority = Authority(folder)
    certificate, key = authority.certificate("127.0.0.1")
    server = start(folder, folder_of("vit"), tls_certificate=certificate, tls_key=key)
    try:
        banner = read_banner(server.follow_log())
        url = url_in(banner)
        assert url.startswith("https://")
        assert f"'{url}/predict" in banner[-1]
        trusted = ssl.create_default_context(cafile=str(authority.file))
        assert httpx.get(f"{url}/livez", verify=trusted).status_code == 200
    finally:
        server.kill()


def test_sigterm_lowers_readiness_first_and_leaves_with_zero(folder_of, folder):
    with serving(folder, folder_of("vit"), drain_notice_seconds=4) as server:
        with httpx.Client(base_url=server.url, timeout=30) as client:
            server.process.send_signal(signal.SIGTERM)
            deadline = time.monotonic() + 3
            while client.get("/readyz").status_code == 200:
                assert time.monotonic() < deadline
            # Clients that have not noticed yet are still served.
            assert client.post("/predict", content=CAT.read_bytes()).status_code == 200
        assert server.process.wait(timeout=60) == 0
    log = [json.loads(line) for line in server.log.read_text().splitlines() if line[:1] == "{"]
    assert [line["status"] for line in log if line.get("path") == "/predict"] == [200]


def test_requests_in_flight_finish_before_the_server_ends(world, monkeypatch):
    """In this process, with an engine that answers only once the server is shutting down."""
    predict, begun = world.engine.predictions.predict, threading.Event()
    app = world.app()
    monkeypatch.setattr(world.engine.predictions, "predict", None)
    listener = listen("127.0.0.1", 0)
    config = uvicorn.Config(app, log_config=None, lifespan="on", timeout_graceful_shutdown=30)
    server = DrainingServer(config, app.state.runtime)

    async def slow(*args, **kwargs):
        begun.set()
        while server.should_exit is False:
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.3)
        return await predict(*args, **kwargs)

    monkeypatch.setattr(world.engine.predictions, "predict", slow)
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


def test_an_unusable_listen_address_is_a_clear_error():
    with listen("127.0.0.1", 0) as listener:
        port = listener.getsockname()[1]
        with pytest.raises(SettingsError, match=rf"Port {port} on 127\.0\.0\.1 is in use"):
            listen("127.0.0.1", port)
    with pytest.raises(SettingsError, match=r"Cannot listen on no\.such\.host\.invalid"):
        listen("no.such.host.invalid", 0)


def test_banner_names_failed_tasks_and_the_key(world, fresh):
    world.store.publish(fresh, foreign_bundle())
    world.engine.tasks.sync()
    text = banner(world.engine, "http://127.0.0.1:1", with_key=True)
    assert f"failed    {fresh}" in text
    assert "curl -H 'X-API-Key: …' -T cat.jpg" in text
