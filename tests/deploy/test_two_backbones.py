"""Two backbones behind one address: the proxy of deploy/two-backbones.yml before real servers.

The overlay of Kubernetes has the same proxy; no cluster is needed.
"""

import re
import subprocess
import time
from collections.abc import Iterator

import httpx
import kubernetes_validate
import pytest
import yaml

from tests.deploy.files import DEPLOY, read_yaml, run
from tests.deploy.test_containers import BIN
from tests.deploy.test_kubernetes import NOT_KUBERNETES_OWN, VERSIONS
from tests.e2e.server_process import free_port, start
from tests.serving import photo
from tests.tools import find_tool

CONFIG = DEPLOY / "haproxy" / "two-backbones.cfg"
COMPOSE = DEPLOY / "two-backbones.yml"
OVERLAY = DEPLOY / "kubernetes" / "overlays" / "two-backbones"
BACKBONES = ["first", "second"]


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


# Kubernetes


@pytest.fixture(scope="module")
def manifests() -> list[dict]:
    return list(yaml.safe_load_all(run(find_tool("kubectl"), "kustomize", OVERLAY)))


def of_kind(manifests: list[dict], kind: str) -> dict[str, dict]:
    return {each["metadata"]["name"]: each for each in manifests if each["kind"] == kind}


def aliases_of(deployment: dict) -> dict[str, str]:
    return deployment["spec"]["template"]["metadata"]["labels"]


@pytest.mark.parametrize("version", VERSIONS)
def test_every_manifest_of_the_overlay_is_valid(manifests, version):
    for manifest in manifests:
        if manifest["kind"] not in NOT_KUBERNETES_OWN:
            kubernetes_validate.validate(manifest, version, strict=True)


def section(config: str, name: str) -> str:
    (text,) = re.findall(rf"^{name}\n((?: .*\n|\n)*)", config, re.M)
    return text


def test_both_proxies_route_alike():
    compose = CONFIG.read_text(encoding="utf-8")
    kubernetes = (OVERLAY / "haproxy.cfg").read_text(encoding="utf-8")
    for part in ("global", "defaults", "frontend http"):
        assert section(compose, part) == section(kubernetes, part)
    run(find_tool("haproxy"), "-c", "-f", OVERLAY / "haproxy.cfg")
    image = read_yaml(DEPLOY.parent / "docker-compose.yml")["services"]["proxy"]["image"]
    assert f"image: {image}\n" in (OVERLAY / "proxy.yaml").read_text(encoding="utf-8")


def test_the_proxy_finds_a_service_of_each_backbone(manifests):
    config = (OVERLAY / "haproxy.cfg").read_text(encoding="utf-8")
    found = re.findall(r"server (\w+) (\S+)\.engram\.svc\.cluster\.local:(\d+) ", config)
    assert [name for name, _, _ in found] == BACKBONES
    services, deployments = of_kind(manifests, "Service"), of_kind(manifests, "Deployment")
    for name, service, port in found:
        spec = services[service]["spec"]
        assert str(spec["ports"][0]["port"]) == port
        selected = [
            each
            for each, deployment in deployments.items()
            if spec["selector"].items() <= aliases_of(deployment).items()
        ]
        assert selected == [f"engram-{name}"], "no service mixes two backbones"


def test_each_backbone_has_pods_settings_and_an_autoscaler_of_its_own(manifests):
    deployments, maps = of_kind(manifests, "Deployment"), of_kind(manifests, "ConfigMap")
    seen = set()
    for name in BACKBONES:
        deployment = deployments[f"engram-{name}"]
        (container,) = deployment["spec"]["template"]["spec"]["containers"]
        settings = maps[container["envFrom"][0]["configMapRef"]["name"]]["data"]
        assert settings["ENGRAM_STORE"] == "s3://engram/tasks"
        seen.add(settings["ENGRAM_BACKBONE"])
        scaler = of_kind(manifests, "HorizontalPodAutoscaler")[f"engram-{name}"]
        assert scaler["spec"]["scaleTargetRef"]["name"] == f"engram-{name}"
        selector = deployment["spec"]["selector"]["matchLabels"]
        assert selector.items() <= aliases_of(deployment).items()
        assert selector["engram-backbone"] == name
    assert len(seen) == len(BACKBONES)


def test_clients_reach_the_proxy_and_the_proxy_the_servers(manifests):
    policies, deployments = of_kind(manifests, "NetworkPolicy"), of_kind(manifests, "Deployment")
    proxy = aliases_of(deployments["engram-proxy"])
    assert of_kind(manifests, "Service")["engram"]["spec"]["selector"].items() <= proxy.items()
    assert policies.keys() == {"engram-first", "engram-second", "engram-proxy"}
    for policy in policies.values():
        allowed = policy["spec"]["ingress"][0]["from"][0]["podSelector"]["matchLabels"]
        assert allowed == {"engram-vit": "true"}
        assert allowed.items() <= proxy.items()
    out = policies["engram-proxy"]["spec"]["egress"][1]["to"][0]["podSelector"]["matchLabels"]
    for name in BACKBONES:
        assert out.items() <= aliases_of(deployments[f"engram-{name}"]).items()


def test_one_monitor_finds_the_servers_of_both_and_not_the_proxy(manifests):
    (monitor,) = of_kind(manifests, "ServiceMonitor").values()
    selector = monitor["spec"]["selector"]["matchLabels"].items()
    found = {
        name
        for name, service in of_kind(manifests, "Service").items()
        if selector <= service["metadata"]["labels"].items()
    }
    assert found == {"engram-first", "engram-second"}
