"""What tests of a running server share: a client, a command line, a browser and its pictures."""

import os
from pathlib import Path

import pytest
from engram_vit import Client
from engram_vit.commands.main import main

from tests.conftest import PHOTOS
from tests.e2e.browser import DESKTOP, chromium, open_page
from tests.e2e.server_process import serving


@pytest.fixture(scope="session")
def embedded_server(tmp_path_factory):
    """The embedded backbone and its demo tasks, as `make serve` gives them. Publish nothing."""
    with serving(tmp_path_factory.mktemp("embedded")) as server:
        yield server


@pytest.fixture
def client(server):
    """Of the module's own `server`."""
    with Client(server.url) as client:
        yield client


@pytest.fixture
def engram(server, monkeypatch, capsys):
    """`engram(…)`: exit code and output of a command for the module's own `server`."""
    monkeypatch.setenv("ENGRAM_SERVER", server.url)
    monkeypatch.setenv("COLUMNS", "200")

    def run(*args):
        with pytest.raises(SystemExit) as stop:
            main(list(map(str, args)))
        captured = capsys.readouterr()
        return stop.value.code or 0, captured.out, captured.err

    return run


@pytest.fixture(scope="module")
def browser():
    """Of one module: while it is open, nothing else in its thread can run an event loop."""
    with chromium() as browser:
        yield browser


@pytest.fixture
def page(browser, server):
    """The console of the module's own `server`, ready."""
    with open_page(browser, server.url, **DESKTOP) as page:
        page.wait_for_selector("#server[data-state='ready']")
        yield page


@pytest.fixture(scope="session")
def pictures(tmp_path_factory) -> Path:
    """Where pictures of pages go."""
    named = os.environ.get("SCREENSHOTS")
    folder = Path(named) if named else tmp_path_factory.mktemp("pictures")
    folder.mkdir(parents=True, exist_ok=True)
    return folder


@pytest.fixture(scope="session")
def rocket() -> bytes:
    return (PHOTOS / "rocket.jpg").read_bytes()


@pytest.fixture(scope="session")
def cat() -> bytes:
    return (PHOTOS / "cat.jpg").read_bytes()
