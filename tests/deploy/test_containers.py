"""The image's recipe and the compose file: clean, pinned, and in step with the server."""

import re
import sys
import tomllib
from ipaddress import ip_address, ip_network
from pathlib import Path

import pytest
from engram_server.errors import SettingsError
from engram_server.settings import GIB, OTHERS, PREFIX, Settings

from tests.conftest import REPOSITORY
from tests.deploy.files import (
    COMPOSE,
    DEPLOY,
    DOCKER_PAGE,
    DOCKERFILE,
    KUBERNETES_PAGE,
    image_environment,
    read_yaml,
    run,
    settings_of,
)
from tests.tools import find_tool

MODELS = "/var/lib/engram/models"
BIN = Path(sys.executable).parent
SERVICES = read_yaml(COMPOSE)["services"]
ENGRAMS = [name for name in SERVICES if name.startswith("engram")]
DEPLOYED = [
    *(DOCKERFILE, COMPOSE, DOCKER_PAGE, KUBERNETES_PAGE),
    *(file for file in DEPLOY.rglob("*") if file.is_file()),
]


@pytest.mark.parametrize("file", DEPLOYED, ids=lambda file: str(file.relative_to(REPOSITORY)))
def test_every_variable_named_is_a_setting(file):
    known = {PREFIX + name.upper() for name in Settings.model_fields} | OTHERS
    named = set(re.findall(rf"\b{PREFIX}[A-Z][A-Z_]*", file.read_text(encoding="utf-8")))
    assert named <= known


# --- the image ------------------------------------------------------------------------------------


def test_the_dockerfile_passes_the_linter():
    run(BIN / "hadolint", "--failure-threshold", "style", DOCKERFILE)


def test_the_image_serves_other_machines_and_so_wants_a_key():
    with pytest.raises(SettingsError, match="no key is set"):
        settings_of({})
    settings = settings_of({"ENGRAM_API_KEY": None})
    assert f"\nEXPOSE {settings.port}\n" in DOCKERFILE.read_text()


def test_all_that_the_image_writes_lies_on_its_volume():
    (volume,) = re.findall(r"^VOLUME (\S+)$", DOCKERFILE.read_text(), re.M)
    assert settings_of({"ENGRAM_API_KEY": None}).store.startswith(f"{volume}/")
    assert image_environment()["HOME"] == volume
    assert image_environment()["HF_HOME"] == MODELS
    assert MODELS.startswith(f"{volume}/")


def test_the_image_does_not_run_as_root():
    assert re.findall(r"^USER (.*)$", DOCKERFILE.read_text(), re.M) == ["10001:10001"]


def test_the_builder_gets_all_that_the_packages_are_made_of():
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))
    needed = {
        *project["tool"]["setuptools"]["packages"]["find"]["where"],
        *project["project"]["license-files"],
        "pyproject.toml",
        "constraints.txt",
        "requirements",
        "clients/python",
        "deploy/install_torch.py",
    }
    lines = (REPOSITORY / ".dockerignore").read_text(encoding="utf-8").splitlines()
    assert "*" in lines
    assert {line[1:] for line in lines if line.startswith("!")} == needed
    assert all((REPOSITORY / name).exists() for name in needed)
    copied = re.findall(r"^COPY (?!--)(.*) \S+$", DOCKERFILE.read_text(), re.M)
    for name in " ".join(copied).split():
        assert name == "." or any(name == each or name.startswith(f"{each}/") for each in needed)


def test_the_image_for_gpus_has_a_compiler_for_the_attention_kernel():
    text = DOCKERFILE.read_text(encoding="utf-8")
    (packages,) = re.findall(r"--no-install-recommends (.*) \\\n", text)
    assert packages.split() == ["gcc", "libc6-dev"]
    assert re.findall(r"^ARG (DEVICE.*)$", text, re.M) == ["DEVICE=cpu"]


# --- the compose file -----------------------------------------------------------------------------


def test_the_compose_file_follows_the_specification():
    run(BIN / "check-jsonschema", "--builtin-schema", "vendor.compose-spec", COMPOSE)


@pytest.mark.parametrize("name", ENGRAMS)
def test_the_servers_of_the_compose_file_can_start_and_are_locked_down(name):
    service = SERVICES[name]
    settings = settings_of(service["environment"])
    assert settings.admin_key is not None
    # Memory is what the settings may take, uploads on the tmpfs included, and room for the model.
    (uploads,) = re.findall(r"/tmp:size=(\d+)g", service["tmpfs"][0])
    assert int(uploads) * GIB >= settings.inflight_body_bytes
    reserved = settings.cache_bytes + settings.decoded_bytes + int(uploads) * GIB
    assert int(service["mem_limit"].removesuffix("g")) * GIB >= reserved + 2 * GIB
    leaving = settings.drain_notice_seconds + settings.drain_seconds
    assert int(service["stop_grace_period"].removesuffix("s")) > leaving


def test_each_profile_has_one_server_per_gpu():
    started: dict[str, list[dict]] = {}
    for name in ENGRAMS:
        for profile in SERVICES[name]["profiles"]:
            started.setdefault(profile, []).append(SERVICES[name])
    assert [each["deploy"] for each in started.pop("cpu")] == [{"replicas": 2}]
    assert {profile: len(services) for profile, services in started.items()} == {
        "gpu": 1,
        "two-gpus": 2,
    }
    for services in started.values():
        devices = []
        for service in services:
            assert service["deploy"]["replicas"] == 1
            (device,) = service["deploy"]["resources"]["reservations"]["devices"]
            assert (device["driver"], device["capabilities"]) == ("nvidia", ["gpu"])
            devices += device["device_ids"]
        assert devices == sorted(set(devices)), "no two servers share a GPU"


@pytest.mark.parametrize("name", ENGRAMS)
def test_each_server_of_the_compose_file_is_built_for_its_device(name):
    service = SERVICES[name]
    device = "cpu" if name == "engram-cpu" else "cuda"
    assert service["image"] == f"engram:{device}"
    assert service["build"]["args"]["DEVICE"] == device
    assert ("TORCH_INDEX" in service["build"]["args"]) == (device == "cpu")
    assert f"models:{MODELS}" in service["volumes"]


def test_servers_and_store_share_their_keys():
    for name in ENGRAMS:
        for key in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
            assert SERVICES[name]["environment"][key] == SERVICES["store"]["environment"][key]


@pytest.mark.parametrize("name", sorted(SERVICES))
def test_images_are_pinned_ports_are_local_and_mounted_files_are_there(name):
    service = SERVICES[name]
    if "build" not in service:
        tag = r"[\w/]+:v?\d+\.\d+(\.\d+)?(-alpine)?(@sha256:[0-9a-f]{64})?"
        assert re.fullmatch(tag, service["image"])
    for port in service.get("ports", []):
        assert port.startswith("127.0.0.1:")
    for volume in service.get("volumes", []):
        if volume.startswith("./.secrets/"):
            assert (
                f"mkdir -p {volume.split(':')[0].removeprefix('./')}\n" in DOCKER_PAGE.read_text()
            )
        elif volume.startswith("./"):
            assert (REPOSITORY / volume.split(":")[0]).exists(), volume


@pytest.mark.parametrize("name", sorted(SERVICES))
def test_no_service_may_take_all_memory_fork_without_end_or_gain_privileges(name):
    service = SERVICES[name]
    assert re.fullmatch(r"\d+[mg]", service["mem_limit"])
    assert service["pids_limit"] <= 512
    assert service["security_opt"] == ["no-new-privileges:true"]
    assert service["cap_drop"] == ["ALL"]
    assert service["read_only"]


def test_servers_know_the_address_of_the_client_from_the_proxy():
    address = SERVICES["proxy"]["networks"]["default"]["ipv4_address"]
    (pool,) = read_yaml(COMPOSE)["networks"]["default"]["ipam"]["config"]
    assert ip_address(address) in ip_network(pool["subnet"])
    assert ip_address(address) not in ip_network(pool["ip_range"]), "no other container gets it"
    for name in ENGRAMS:
        settings = settings_of(SERVICES[name]["environment"])
        assert settings.trusted_proxies == (address,)
    for config in DEPLOY.rglob("*.cfg"):
        assert "\n    option forwardfor\n" in config.read_text(encoding="utf-8"), config


def folded(page: Path) -> str:
    """A page with the continued lines of its commands on one line."""
    return re.sub(r"\s*\\\n\s*", " ", page.read_text(encoding="utf-8"))


def test_every_secret_of_the_compose_file_is_made_as_the_document_says():
    text = DOCKER_PAGE.read_text(encoding="utf-8")
    variables = set(re.findall(r"\$\{(\w+):\?", COMPOSE.read_text(encoding="utf-8")))
    assert variables == set(re.findall(r'^echo "(\w+)=\$\(openssl', text, re.M))
    files = {Path(each["file"]) for each in read_yaml(COMPOSE)["secrets"].values()}
    (loop,) = re.findall(r"^for name in (.*); do$", text, re.M)
    made = {Path(".secrets") / name for name in loop.split()}
    made |= {Path(file) for file in re.findall(r"> (\.secrets/\S+)$", folded(DOCKER_PAGE), re.M)}
    assert files <= made


def test_prometheus_has_a_key_that_opens_nothing_but_the_metrics():
    (line,) = re.findall(r"^(.* keys add .*) > \.secrets/metrics-key$", folded(DOCKER_PAGE), re.M)
    assert "docker run --rm " in line, "no other program is needed"
    assert re.findall(r"--scope (\S+)", line) == ["metrics"]
    assert '-v "$PWD/.secrets/keys:/keys"' in line
    (file,) = re.findall(r"--file /keys/(\S+)", line)
    assert SERVICES["prometheus"]["secrets"] == ["metrics-key"]
    for name in ENGRAMS:
        (folder,) = [each.split(":") for each in SERVICES[name]["volumes"] if "keys" in each]
        assert folder == ["./.secrets/keys", "/etc/engram", "ro"]
        assert SERVICES[name]["environment"]["ENGRAM_KEYS_FILE"] == f"/etc/engram/{file}"


@pytest.mark.parametrize("name", sorted(SERVICES))
def test_secrets_are_files_where_the_service_looks_for_them(name):
    service = SERVICES[name]
    places = [value for value in service.get("environment", {}).values() if value]
    if name == "prometheus":
        places = [(DEPLOY / "prometheus" / "prometheus.yml").read_text(encoding="utf-8")]
    named = re.findall(r"/run/secrets/([\w-]+)", " ".join(places))
    assert sorted(named) == sorted(service.get("secrets", []))
    assert set(named) <= read_yaml(COMPOSE)["secrets"].keys()


def test_the_proxy_is_configured_correctly_and_asks_whether_servers_are_ready():
    config = DEPLOY / "haproxy" / "haproxy.cfg"
    run(find_tool("haproxy"), "-c", "-f", config)
    assert "option httpchk GET /readyz\n" in config.read_text(encoding="utf-8")
    for name in ENGRAMS:
        aliases = SERVICES[name]["networks"]["default"]["aliases"]
        assert f" {aliases[0]}:{image_environment()['ENGRAM_PORT']} " in config.read_text()
