"""Two backbones behind one address: the proxy of deploy/two-backbones.yml before real servers."""

import re
import subprocess
import time
from collections.abc import Iterator

import httpx
import pytest

from tests.deploy.files import DEPLOY, read_yaml, run
from tests.deploy.test_containers import BIN
from tests.e2e.server_process import free_port, start
from tests.serving import photo
from tests.tools import find_tool

CONFIG = DEPLOY / "haproxy" / "two-backbones.cfg"
COMPOSE = DEPLOY / "two-backbones.yml"


@pytest.fixture(scope="module")
def proxy(folder_of, tmp_path_factory) -> Iterator[httpx.Client]:
    """The proxy as it is deployed, but for the port and where it finds two tiny servers."""
    haproxy = find_tool("haproxy")
    folders = {name: tmp_path_factory.mktemp(name) for name in ("first", "second")}
    backbones = {"first": folder_of("vit"), "second": folder_of("deit")}
    servers = {name: start(folders[name], backbones[name]) for name in folders}
    config, port = CONFIG.read_text(encoding="utf-8"), free_port()
    config = config.replace("bind :8000", f"bind 127.0.0.1:{port}")
    for name, server in servers.items():
        address = server.url.removeprefix("http://")
        line = rf"server-template {name} 8 .* check (.*) resolvers docker init-addr none"
        config = re.sub(line, rf"server {name} {address} check \1", config)
    path = folders["first"] / "haproxy.cfg"
    path.write_text(config)
    process = None
    try:
        for server in servers.values():
            server.await_ready()
        process = subprocess.Popen([haproxy, "-db", "-f", path])
        with httpx.Client(base_url=f"http://127.0.0.1:{port}") as client:
            await_both(client)
            yield client
    finally:
        for server in servers.values():
            server.kill()
        if process is not None:
            process.kill()
            process.wait(timeout=30)


def await_both(client: httpx.Client) -> None:
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        try:
            answers = [client.get("/readyz?backbone=" + name) for name in ("first", "second")]
        except httpx.TransportError:
            answers = []
        if [answer.status_code for answer in answers] == [200, 200]:
            return
        time.sleep(0.05)
    raise AssertionError("the proxy does not reach both servers")


def backbone(answer: httpx.Response) -> str:
    assert answer.status_code == 200, answer.text
    return answer.json()["backbone"]


@pytest.mark.long
def test_the_query_picks_the_backbone_and_the_first_is_the_default(proxy):
    def ask(query: str) -> str:
        return backbone(proxy.post(f"/predict{query}", content=photo()))

    first, second = ask(""), ask("?backbone=second")
    assert first != second
    assert ask("?backbone=first") == first
    assert ask("?top_k=1") == first
    for query in ("backbone=second&top_k=1", "top_k=1&backbone=second", "top_k=1&backbone=second&"):
        assert ask(f"?{query}") == second
    # What only looks like the parameter reaches the server, which refuses it.
    assert proxy.post("/predict?mybackbone=second", content=photo()).status_code == 422


@pytest.mark.long
@pytest.mark.parametrize("query", ["backbone=third", "backbone=", "backbone=first%20"])
def test_an_unknown_backbone_is_a_problem_that_names_those_there_are(proxy, query):
    answer = proxy.post(f"/predict?{query}", content=photo())
    assert answer.status_code == 404
    assert answer.headers["Content-Type"] == "application/problem+json"
    assert answer.json()["status"] == 404
    assert answer.json()["detail"].endswith("There are: first, second.")


def test_the_compose_file_starts_what_the_proxy_looks_for():
    run(BIN / "check-jsonschema", "--builtin-schema", "vendor.compose-spec", COMPOSE)
    services = read_yaml(COMPOSE)["services"]
    names = [
        each["networks"]["default"]["aliases"] for each in services.values() if "networks" in each
    ]
    config = CONFIG.read_text(encoding="utf-8")
    assert names == [["first"], ["second"]]
    assert re.findall(r"^backend (\S+)$", config, re.M) == ["first", "second"]
    assert re.findall(r" (\w+):8000 check", config) == ["first", "second"]
    (volume,) = services["proxy"]["volumes"]
    assert volume.startswith("./deploy/haproxy/two-backbones.cfg:")
