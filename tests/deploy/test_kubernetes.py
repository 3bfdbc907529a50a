"""The manifests: rendered by kubectl, valid, and in step with the server and with each other.

No cluster is needed: `kubectl kustomize` works on files alone.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import kubernetes_validate
import pytest
import yaml
from engram_server.app import create_app
from engram_server.observability.metrics import Metrics
from engram_server.settings import GIB, load_settings
from kubernetes_validate.utils import all_versions

from tests.deploy.files import (
    DEPLOY,
    KUBERNETES_PAGE,
    image_environment,
    read_yaml,
    run,
    settings_of,
)
from tests.hub_server import Repository, serving_hub
from tests.tools import find_tool

KUBERNETES = DEPLOY / "kubernetes"
OVERLAYS = ("cpu", "gpu", "production")
COMPONENTS = sorted(folder.name for folder in (KUBERNETES / "components").iterdir())
# The oldest and the newest that kubernetes-validate knows.
VERSIONS = [all_versions()[0], all_versions()[-1]]
NOT_KUBERNETES_OWN = {"ServiceMonitor"}


def render(folder: Path) -> dict[str, dict]:
    """What a folder renders to, by kind: there is one of each."""
    documents = list(yaml.safe_load_all(run(find_tool("kubectl"), "kustomize", folder)))
    by_kind = {document["kind"]: document for document in documents}
    assert len(by_kind) == len(documents)
    return by_kind


@pytest.fixture(scope="module", params=OVERLAYS)
def manifests(request) -> dict[str, dict]:
    return render(KUBERNETES / "overlays" / request.param)


@pytest.fixture(scope="module")
def production() -> dict[str, dict]:
    """The overlay that has all components."""
    return render(KUBERNETES / "overlays" / "production")


@pytest.fixture(scope="module")
def predictor() -> dict:
    """The pod of the KServe example, without KServe's own members."""
    service = read_yaml(KUBERNETES / "kserve" / "inferenceservice.yaml")
    assert service["apiVersion"] == "serving.kserve.io/v1beta1"
    spec = dict(service["spec"]["predictor"])
    assert 1 <= spec.pop("minReplicas") <= spec.pop("maxReplicas")
    return spec


def pod_of(manifests: dict) -> dict:
    return manifests["Deployment"]["spec"]["template"]["spec"]


def environment(pod: dict, config: dict) -> dict[str, str | None]:
    """The variables of a pod's only container; None where the value comes from a secret."""
    (container,) = pod["containers"]
    return {**config, **{each["name"]: each.get("value") for each in container["env"]}}


def secrets_of(pod: dict) -> set[str]:
    (container,) = pod["containers"]
    named = [each["valueFrom"]["secretKeyRef"] for each in container["env"] if "valueFrom" in each]
    named += [each["secretRef"] for each in container["envFrom"] if "secretRef" in each]
    mounted = {each["secret"]["secretName"] for each in pod["volumes"] if "secret" in each}
    return mounted | {each["name"] for each in named}


def size(text: str) -> int:
    return int(text.removesuffix("Gi")) * GIB


@pytest.mark.parametrize("version", VERSIONS)
def test_every_manifest_is_valid(manifests, version):
    for kind, manifest in manifests.items():
        if kind not in NOT_KUBERNETES_OWN:
            kubernetes_validate.validate(manifest, version, strict=True)


@pytest.mark.parametrize("version", VERSIONS)
def test_the_kserve_predictor_is_a_valid_pod(predictor, version):
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "engram"}, "spec": predictor}
    kubernetes_validate.validate(pod, version, strict=True)
    assert predictor["containers"][0]["name"] == "kserve-container"


@pytest.mark.parametrize("version", VERSIONS)
def test_the_validation_would_notice_a_typing_error(manifests, version):
    pod = {**pod_of(manifests), "enableServiceLink": False}
    manifest = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "engram"}, "spec": pod}
    with pytest.raises(kubernetes_validate.ValidationError, match="enableServiceLink"):
        kubernetes_validate.validate(manifest, version, strict=True)


def test_the_server_starts_with_the_settings_of_the_manifests(manifests, predictor):
    check_pod(pod_of(manifests), manifests["ConfigMap"]["data"])
    check_pod(predictor, {})


def check_pod(pod: dict, config: dict) -> None:
    settings = settings_of(environment(pod, config))
    (container,) = pod["containers"]
    # Otherwise the service would set ENGRAM_PORT to its own address.
    assert pod["enableServiceLinks"] is False
    # One thread per requested CPU, not per CPU of the node.
    cpus = int(container["resources"]["requests"]["cpu"])
    assert settings.decode_threads == cpus
    if settings.devices == ("cpu",):
        assert settings.torch_threads == cpus
    else:
        assert container["resources"]["limits"]["nvidia.com/gpu"] == "1"
    # Nothing is cut off: Kubernetes waits longer than the server takes to leave.
    sleep, seconds = container["lifecycle"]["preStop"]["exec"]["command"]
    assert sleep == "sleep"
    leaving = int(seconds) + settings.drain_notice_seconds + settings.drain_seconds
    assert pod["terminationGracePeriodSeconds"] > leaving


def test_pods_run_unprivileged_on_a_read_only_root(manifests, predictor):
    for pod in (pod_of(manifests), predictor):
        (container,) = pod["containers"]
        assert pod["securityContext"]["runAsNonRoot"]
        assert pod["securityContext"]["runAsUser"] == 10001
        assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert pod["automountServiceAccountToken"] is False
        for each in (container, *pod.get("initContainers", [])):
            assert each["securityContext"] == {
                "allowPrivilegeEscalation": False,
                "readOnlyRootFilesystem": True,
                "capabilities": {"drop": ["ALL"]},
            }
        mounts = container["volumeMounts"]
        writable = {each["mountPath"] for each in mounts if not each.get("readOnly")}
        assert writable == {"/tmp", "/var/lib/engram"}


def test_a_pod_takes_no_more_memory_and_disk_than_is_written_down(manifests, predictor):
    check_bounds(pod_of(manifests), manifests["ConfigMap"]["data"])
    check_bounds(predictor, {})


def check_bounds(pod: dict, config: dict) -> None:
    settings = settings_of(environment(pod, config))
    (container,) = pod["containers"]
    requests, limits = container["resources"]["requests"], container["resources"]["limits"]
    assert requests["memory"] == limits["memory"]
    assert size(limits["memory"]) >= settings.cache_bytes + settings.decoded_bytes + 2 * GIB
    sizes = {
        each["name"]: size(each["emptyDir"]["sizeLimit"])
        for each in pod["volumes"]
        if "emptyDir" in each
    }
    assert sizes.keys() == {"state", "tmp"}
    for init in pod.get("initContainers", []):
        # The larger one counts, so the pod needs no more than its server.
        assert size(init["resources"]["limits"]["memory"]) <= size(limits["memory"])
    # Bundles that are kept, and room for a backbone.
    assert sizes["state"] >= settings.bundle_cache_bytes + 2 * GIB
    assert sizes["tmp"] >= settings.inflight_body_bytes
    # A pod over this is evicted, whatever its volumes may hold.
    assert size(limits["ephemeral-storage"]) > sum(sizes.values())
    assert size(requests["ephemeral-storage"]) <= size(limits["ephemeral-storage"])


def test_keys_are_files_and_no_variables(manifests, predictor):
    for pod in (pod_of(manifests), predictor):
        (container,) = pod["containers"]
        assert not any("valueFrom" in each for each in container["env"])
        (volume,) = [each["secret"] for each in pod["volumes"] if "secret" in each]
        assert volume["defaultMode"] == 0o440
        (place,) = {
            each["mountPath"]
            for each in container["volumeMounts"]
            if each["name"] == "keys" and each["readOnly"]
        }
        files = {f"{place}/{each['path']}" for each in volume["items"]}
        assert files == {each["value"] for each in container["env"] if "_FILE" in each["name"]}


def test_probes_ask_routes_of_the_server_on_its_port(manifests, predictor):
    app = create_app(load_settings())
    open_to_all = {"/livez", "/readyz", "/v2/health/live", "/v2/health/ready"}
    assert open_to_all <= {route.path for route in app.state.routes}
    for pod in (pod_of(manifests), predictor):
        (container,) = pod["containers"]
        (port,) = container["ports"]
        assert str(port["containerPort"]) == image_environment()["ENGRAM_PORT"]
        probes = {name: container[name]["httpGet"] for name in container if "Probe" in name}
        assert {"livenessProbe", "readinessProbe"} <= probes.keys()
        for name, probe in probes.items():
            assert probe["path"] in open_to_all
            assert ("ready" in probe["path"]) == (name == "readinessProbe")
            assert probe["port"] in (port["name"], port["containerPort"])


def test_all_find_the_pods_by_the_labels_they_have(manifests):
    labels = manifests["Deployment"]["spec"]["template"]["metadata"]["labels"]
    selectors = [
        manifests["Deployment"]["spec"]["selector"]["matchLabels"],
        manifests["Service"]["spec"]["selector"],
        manifests["PodDisruptionBudget"]["spec"]["selector"]["matchLabels"],
        manifests["NetworkPolicy"]["spec"]["podSelector"]["matchLabels"],
    ]
    for selector in selectors:
        assert selector.items() <= labels.items()
    target = manifests["HorizontalPodAutoscaler"]["spec"]["scaleTargetRef"]
    assert target["kind"] == "Deployment"
    assert target["name"] == manifests["Deployment"]["metadata"]["name"]
    assert "replicas" not in manifests["Deployment"]["spec"]


@pytest.mark.parametrize("overlay", ["cpu", "gpu"])
def test_the_autoscaler_follows_the_queue(overlay):
    manifests = render(KUBERNETES / "overlays" / overlay)
    (metric,) = manifests["HorizontalPodAutoscaler"]["spec"]["metrics"]
    assert metric["pods"]["metric"]["name"] == "engram_queue_images"
    assert Metrics(max_tasks=1).registry.get_sample_value("engram_queue_images") == 0


def test_prometheus_reads_the_service_with_a_key_of_its_own(production):
    manifests = production
    monitor, service = manifests["ServiceMonitor"]["spec"], manifests["Service"]
    assert monitor["selector"]["matchLabels"].items() <= service["metadata"]["labels"].items()
    (endpoint,) = monitor["endpoints"]
    assert endpoint["port"] in [port["name"] for port in service["spec"]["ports"]]
    (container,) = pod_of(manifests)["containers"]
    (keys,) = [each["secret"] for each in pod_of(manifests)["volumes"] if "secret" in each]
    assert endpoint["authorization"]["credentials"] == {
        "name": keys["secretName"],
        "key": "metrics-key",
    }
    # Pods know the hash of it in the keys file, and not the key.
    assert {each["key"] for each in keys["items"]} == {"api-key", "admin-key", "keys.json"}
    allowed = manifests["NetworkPolicy"]["spec"]["ingress"][0]["ports"]
    assert allowed == [{"port": container["ports"][0]["name"]}]


def test_the_page_says_how_to_create_every_secret(manifests, predictor):
    text = KUBERNETES_PAGE.read_text(encoding="utf-8")
    for pod in (pod_of(manifests), predictor):
        for name in secrets_of(pod):
            assert f"create secret generic {name} " in text


# --- the components -------------------------------------------------------------------------------


def test_the_production_overlay_has_every_component():
    listed = read_yaml(KUBERNETES / "overlays" / "production" / "kustomization.yaml")["components"]
    assert sorted(Path(each).name for each in listed) == COMPONENTS


@pytest.mark.parametrize("component", COMPONENTS)
@pytest.mark.parametrize("overlay", ["cpu", "gpu"])
def test_each_component_fits_each_overlay(component, overlay, tmp_path):
    folder = tmp_path / "deploy"
    subprocess.run(["cp", "-r", KUBERNETES, folder], check=True)
    mine = folder / "mine"
    mine.mkdir()
    (mine / "kustomization.yaml").write_text(
        f"resources: [../overlays/{overlay}]\ncomponents: [../components/{component}]\n"
    )
    for kind, manifest in render(mine).items():
        if kind not in NOT_KUBERNETES_OWN:
            kubernetes_validate.validate(manifest, VERSIONS[-1], strict=True)


def test_the_ingress_reaches_the_service_and_passes_the_network_policy(production):
    (rule,) = production["Ingress"]["spec"]["rules"]
    (path,) = rule["http"]["paths"]
    service, port = production["Service"], path["backend"]["service"]
    assert port["name"] == service["metadata"]["name"]
    assert port["port"]["name"] in [each["name"] for each in service["spec"]["ports"]]
    assert production["Ingress"]["spec"]["tls"][0]["hosts"] == [rule["host"]]
    sources = production["NetworkPolicy"]["spec"]["ingress"][0]["from"]
    labels = sources[-1]["namespaceSelector"]["matchLabels"]
    (label,) = (f"{name}={value}" for name, value in labels.items())
    assert f"kubectl label namespace NAMESPACE {label}" in KUBERNETES_PAGE.read_text()
    assert f"create secret tls {production['Ingress']['spec']['tls'][0]['secretName']} " in (
        KUBERNETES_PAGE.read_text()
    )


def test_the_autoscaler_can_follow_the_cpu_that_pods_request(production):
    (metric,) = production["HorizontalPodAutoscaler"]["spec"]["metrics"]
    assert metric["resource"]["name"] == "cpu"
    (container,) = pod_of(production)["containers"]
    assert container["resources"]["requests"]["cpu"]


def test_a_gpu_pod_has_one_gpu_and_leaves_before_its_successor():
    manifests = render(KUBERNETES / "overlays" / "gpu")
    (container,) = pod_of(manifests)["containers"]
    assert container["resources"]["limits"]["nvidia.com/gpu"] == "1"
    assert settings_of(environment(pod_of(manifests), manifests["ConfigMap"]["data"])).devices == (
        "cuda:0",
    )
    strategy = manifests["Deployment"]["spec"]["strategy"]["rollingUpdate"]
    assert strategy == {"maxSurge": 0, "maxUnavailable": 1}


def test_servers_read_the_backbone_from_a_volume_without_a_network(production):
    pod, config = pod_of(production), production["ConfigMap"]["data"]
    (server,), (init,) = pod["containers"], pod["initContainers"]
    assert {"name": "HF_HUB_OFFLINE", "value": "1"} in server["env"]
    claim = production["PersistentVolumeClaim"]
    (volume,) = [each for each in pod["volumes"] if "persistentVolumeClaim" in each]
    assert volume["persistentVolumeClaim"]["claimName"] == claim["metadata"]["name"]
    assert claim["spec"]["accessModes"] == ["ReadWriteMany"]
    for container, read_only in ((server, True), (init, False)):
        assert container["envFrom"][0] == server["envFrom"][0]
        (mount,) = [each for each in container["volumeMounts"] if each["name"] == volume["name"]]
        assert mount["mountPath"] == config["HF_HOME"]
        assert mount.get("readOnly", False) is read_only
    assert init["image"] == server["image"]
    # Only the container that downloads gets the token.
    assert [each["secretRef"]["name"] for each in init["envFrom"][1:]] == ["engram-hub"]
    assert "engram-hub" not in str(server)
    assert re.search(r"create secret generic engram-hub .*HF_TOKEN=", KUBERNETES_PAGE.read_text())


@pytest.mark.long
def test_the_backbone_is_downloaded_once_and_then_needs_no_hub(production, folder_of, tmp_path):
    (init,) = pod_of(production)["initContainers"]
    models = tmp_path / "models"

    def start(**variables: str) -> str:
        done = subprocess.run(
            init["command"],
            env={
                "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
                "HOME": str(tmp_path),
                **variables,
            },
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    with serving_hub() as hub:
        repository = hub.repositories["lab/vit"] = Repository(private=True)
        commit = repository.commit(
            {file.name: file.read_bytes() for file in folder_of("vit").iterdir()}
        )
        name = f"lab/vit@{commit}"
        environment = {**hub.environment(models), "ENGRAM_BACKBONE": name}
        assert "agrees" in start(**environment)
        assert hub.requests
    # The hub is gone.
    assert start(**environment) == ""
    server = [sys.executable, "-c", f"import engram_server.model as m; m.load_backbone({name!r})"]
    offline = {**os.environ, "HF_HOME": str(models), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(server, env=offline, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
