"""Ray Serve: valid config files, settings that fit a replica's share, and replicas that agree."""

import contextlib
import json
import os
import secrets
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import httpx
import numpy as np
import pytest
from engram_server.errors import SettingsError
from engram_server.model import load_backbone
from engram_server.ray_app import (
    MAX_ONGOING_REQUESTS,
    SHUTDOWN_SECONDS,
    DeploymentOptions,
    build,
    settings_for,
)
from engram_server.settings import Settings
from ray.serve.schema import ServeDeploySchema

from tests.conftest import REPOSITORY
from tests.deploy.files import DEPLOY, read_yaml
from tests.e2e.server_process import free_port
from tests.serving import make_bundle, photo, reference_logits

LOCAL = DEPLOY / "ray" / "local.yaml"
CLUSTER = DEPLOY / "ray" / "cluster.yaml"
KEYS = {"ENGRAM_API_KEY": "a key of tests", "ENGRAM_ADMIN_KEY": "another key"}
STORE = "s3://engram/tasks"
START_SECONDS = 200


# --- the config files -----------------------------------------------------------------------------


def application_of(file: Path) -> dict:
    (application,) = read_yaml(file)["applications"]
    return application


def settings_of(file: Path, monkeypatch, environment: Mapping[str, str]) -> Settings:
    """The settings of a replica that Ray starts as the file says, on nodes with these variables."""
    application = application_of(file)
    options = DeploymentOptions.model_validate(application["args"])
    for name, value in {**environment, **application["runtime_env"]["env_vars"]}.items():
        monkeypatch.setenv(name, value)
    return settings_for(options.num_cpus, options.num_gpus)


@pytest.mark.parametrize("file", [LOCAL, CLUSTER], ids=lambda file: file.name)
def test_ray_understands_every_line_of_the_config(file):
    config = ServeDeploySchema.model_validate(read_yaml(file))
    # Ray ignores what it does not know, such as a misspelt option.
    assert config.model_dump(mode="json", exclude_unset=True) == read_yaml(file)


@pytest.mark.parametrize("file", [LOCAL, CLUSTER], ids=lambda file: file.name)
def test_the_application_can_be_built_from_the_config(file):
    application = application_of(file)
    assert application["import_path"] == f"{build.__module__}:{build.__name__}"
    app = build(DeploymentOptions.model_validate(application["args"]))
    overridden = {each["name"] for each in application.get("deployments", [])}
    assert overridden <= {app._bound_deployment.name}


@pytest.mark.parametrize("file", [LOCAL, CLUSTER], ids=lambda file: file.name)
def test_a_replica_knows_where_the_proxy_listens(file, monkeypatch):
    settings = settings_of(file, monkeypatch, {"ENGRAM_STORE": STORE, **KEYS})
    assert settings.host == read_yaml(file)["http_options"]["host"]


def test_the_cluster_wants_keys_and_this_machine_does_not(monkeypatch):
    assert settings_of(LOCAL, monkeypatch, {"ENGRAM_STORE": STORE}).api_key is None
    monkeypatch.delenv("ENGRAM_HOST")
    with pytest.raises(SettingsError, match="no key is set"):
        settings_of(CLUSTER, monkeypatch, {})


def test_a_replica_may_take_longer_to_leave_than_its_engine_to_drain(monkeypatch):
    assert Settings().drain_seconds < SHUTDOWN_SECONDS
    settings = settings_of(CLUSTER, monkeypatch, KEYS)
    (deployment,) = application_of(CLUSTER)["deployments"]
    assert settings.drain_seconds < deployment["graceful_shutdown_timeout_s"]


def test_ray_lets_in_more_than_an_engine_admits():
    assert Settings().queue_images < MAX_ONGOING_REQUESTS


# --- args and settings ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("args", "reason"),
    [
        ({"replicas": 2}, "replicas\n"),
        ({"num_gpus": -1}, "num_gpus\n"),
        ({"num_gpus": 1.5}, "num_gpus\n.*whole number"),
        ({"min_replicas": 3, "max_replicas": 2}, r"max_replicas \(2\)"),
    ],
)
def test_impossible_args_are_rejected_by_name(args, reason):
    with pytest.raises(ValueError, match=reason):
        build(DeploymentOptions.model_validate(args))


@pytest.fixture
def shared_store(monkeypatch):
    monkeypatch.setenv("ENGRAM_STORE", STORE)
    monkeypatch.setenv("ENGRAM_HOST", "127.0.0.1")


@pytest.mark.parametrize(
    ("gpus", "devices"),
    [(0, ("cpu",)), (0.25, ("cuda:0",)), (1, ("cuda:0",)), (2, ("cuda:0", "cuda:1"))],
)
def test_a_replica_uses_the_gpus_that_ray_gave_it(shared_store, gpus, devices):
    assert settings_for(cpus=1, gpus=gpus).devices == devices


@pytest.mark.parametrize(("cpus", "threads"), [(0, 1), (0.5, 1), (4, 4)])
def test_a_replica_has_the_threads_of_its_share(shared_store, cpus, threads):
    settings = settings_for(cpus=cpus, gpus=0)
    assert (settings.torch_threads, settings.decode_threads) == (threads, threads)


def test_variables_go_before_what_fits_the_share(shared_store, monkeypatch):
    monkeypatch.setenv("ENGRAM_DEVICES", "cpu")
    monkeypatch.setenv("ENGRAM_DECODE_THREADS", "3")
    settings = settings_for(cpus=8, gpus=1)
    assert (settings.devices, settings.decode_threads) == (("cpu",), 3)


@pytest.mark.parametrize("store", [None, "tasks", "./tasks", "memory://"])
def test_a_store_of_one_replica_alone_is_refused(shared_store, monkeypatch, store):
    if store is None:
        monkeypatch.delenv("ENGRAM_STORE")
    else:
        monkeypatch.setenv("ENGRAM_STORE", store)
    with pytest.raises(SettingsError, match=r"ENGRAM_STORE is '.*all nodes"):
        settings_for(cpus=1, gpus=0)


@pytest.mark.parametrize(("variable", "value"), [("GRPC_PORT", "8001"), ("PROCESSES", "2")])
def test_what_ray_does_itself_is_refused(shared_store, monkeypatch, variable, value):
    monkeypatch.setenv(f"ENGRAM_{variable}", value)
    with pytest.raises(SettingsError, match=f"ENGRAM_{variable} is not supported on Ray Serve"):
        settings_for(cpus=1, gpus=0)


@pytest.mark.parametrize("store", ["/mnt/tasks", "file:///mnt/tasks", "gs://models/tasks"])
def test_a_store_that_replicas_can_share_is_accepted(shared_store, monkeypatch, store):
    monkeypatch.setenv("ENGRAM_STORE", store)
    assert settings_for(cpus=1, gpus=0).store == store


# --- a real deployment ----------------------------------------------------------------------------


@dataclass
class ServeRun:
    """`serve run` in its own process, with the processes that Ray starts for it."""

    url: str
    process: subprocess.Popen
    log: Path

    def await_ready(self) -> None:
        # Before there is a replica Ray's proxy answers, and it knows no JSON.
        first = self._await("/readyz", lambda reply: "json" in reply.headers["Content-Type"])
        assert first.json()["ready"], "requests reached a replica that was still starting"

    def await_replicas(self, count: int) -> None:
        self._await("/replicas", lambda reply: len(reply.json()["replicas"]) == count)

    def _await(self, path: str, condition: Callable[[httpx.Response], bool]) -> httpx.Response:
        deadline = time.monotonic() + START_SECONDS
        while time.monotonic() < deadline:
            assert self.process.poll() is None, self.log.read_text()
            with contextlib.suppress(httpx.TransportError):
                reply = httpx.get(f"{self.url}{path}", timeout=30)
                if condition(reply):
                    return reply
            time.sleep(0.1)
        raise AssertionError(f"waited for {path} in vain:\n{self.log.read_text()}")

    def stop(self) -> None:
        """As Ctrl-C, which lets the replicas leave in order."""
        self.process.send_signal(signal.SIGTERM)
        assert self.process.wait(timeout=120) == 0, self.log.read_text()

    def kill(self) -> None:
        """Whatever is left of it, gone at once."""
        deadline = time.monotonic() + 60
        while (left := processes_of(self.process.pid)) and time.monotonic() < deadline:
            for process in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process, signal.SIGKILL)
            self.process.poll()
            time.sleep(0.05)
        assert not left


def processes_of(session: int) -> list[int]:
    """The processes of a session, which none of Ray's leaves, even one with a group of its own."""
    found = []
    for file in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            # pid (name) state parent group session …, and the name may be anything.
            if int(file.read_text().rpartition(")")[2].split()[3]) == session:
                found.append(int(file.parent.name))
    return found


@contextlib.contextmanager
def serve_run(folder: Path, config: dict, environment: Mapping[str, str]) -> Iterator[ServeRun]:
    port = free_port()
    config = {**config, "http_options": {**config["http_options"], "port": port}}
    path, log = folder / "config.yaml", folder / "serve.log"
    path.write_text(json.dumps(config))  # which is YAML
    # Not below `folder`: the path of a socket has at most 107 characters, and Ray's are long.
    with tempfile.TemporaryDirectory(prefix="ray-", ignore_cleanup_errors=True) as ray_files:
        with log.open("w") as output:
            process = subprocess.Popen(
                [sys.executable, "-m", "tests.deploy.ray_program", ray_files, path],
                env={
                    **os.environ,
                    "OMP_NUM_THREADS": "1",
                    "RAY_USAGE_STATS_ENABLED": "0",
                    "RAY_TMPDIR": ray_files,
                    # Otherwise Ray would write one into the home folder.
                    "RAY_AUTH_MODE": "token",
                    "RAY_AUTH_TOKEN": secrets.token_hex(32),
                    # As on macOS and Windows, Ray listens on 127.0.0.1.
                    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
                    # On a busy machine its proxy takes longer than the default of five seconds.
                    "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": "60",
                    **environment,
                },
                stdout=output,
                stderr=subprocess.STDOUT,
                cwd=REPOSITORY,
                start_new_session=True,
            )
        run = ServeRun(f"http://127.0.0.1:{port}", process, log)
        try:
            yield run
        finally:
            run.kill()


def scores_of(answer: dict, task: str) -> np.ndarray:
    predictions = answer["images"][0]["tasks"][task]["predictions"]
    return np.array([each["score"] for each in sorted(predictions, key=lambda p: p["index"])])


def ask_until_both_answered(url: str, image: bytes) -> list[dict]:
    """All answers until two were cold: a replica that has seen the image answers from its cache."""
    answers: list[dict] = []
    deadline = time.monotonic() + 60
    while sum(answer["images"][0]["cache"] == "miss" for answer in answers) < 2:
        assert time.monotonic() < deadline, "only one replica ever answered"
        reply = httpx.post(f"{url}/predict?tasks=birds&top_k=100", content=image, timeout=30)
        assert reply.status_code == 200, reply.text
        answers.append(reply.json())
    return answers


@pytest.mark.long
@pytest.mark.alone
@pytest.mark.timeout(600)
def test_two_replicas_give_the_same_answers(folder_of, tmp_path):
    backbone = load_backbone(folder_of("vit"))
    bundle, image = make_bundle(backbone), photo()
    environment = {
        "ENGRAM_STORE": str(tmp_path / "store"),
        "ENGRAM_BACKBONE": str(folder_of("vit")),
        "ENGRAM_DEVICES": "cpu",
        "ENGRAM_CACHE_PRECISION": "float32",
    }
    config = read_yaml(LOCAL)
    # Ray has one GPU, by name alone: both find room because each asks for a half.
    config["applications"][0]["args"] |= {"min_replicas": 2, "max_replicas": 2, "num_gpus": 0.5}
    with serve_run(tmp_path, config, environment) as run:
        run.await_ready()
        run.await_replicas(2)
        put = httpx.put(f"{run.url}/tasks/birds?wait=all", content=bundle.to_bytes(), timeout=60)
        assert put.status_code == 201, put.text
        assert len(put.json()["replicas"]["serving"]) == 2
        generation, version = put.json()["generation"], put.json()["version"]

        answers = ask_until_both_answered(run.url, image)
        logits = reference_logits(backbone, bundle, image)
        expected = np.exp(logits) / np.exp(logits).sum()
        for answer in answers:
            assert answer["generation"] == generation
            assert answer["images"][0]["tasks"]["birds"]["version"] == version
            assert np.abs(scores_of(answer, "birds") - expected).max() < 1e-4
            assert np.abs(scores_of(answer, "birds") - scores_of(answers[0], "birds")).max() < 1e-5

        listed = httpx.get(f"{run.url}/replicas").json()["replicas"]
        assert [each["generation"] for each in listed] == [generation] * 2
        run.stop()
    # Both left in order: only what is killed leaves its heartbeat behind.
    assert list((tmp_path / "store" / "replicas").iterdir()) == []


def predict(url: str, stop: threading.Event, *, slowly: bool) -> list[int]:
    """Ask until the event, in one request whose body ends then or in many; the statuses."""
    image, statuses = photo(), []

    def body() -> Iterator[bytes]:
        yield image[:100]
        stop.wait()
        yield image[100:]

    with httpx.Client(timeout=START_SECONDS) as client:
        while not stop.is_set():
            content = body() if slowly else image
            statuses.append(client.post(f"{url}/predict?tasks=base", content=content).status_code)
    return statuses


@pytest.mark.long
@pytest.mark.alone
@pytest.mark.timeout(600)
def test_replicas_come_and_go_with_the_load_and_no_request_is_lost(folder_of, tmp_path):
    environment = {
        "ENGRAM_STORE": str(tmp_path / "store"),
        "ENGRAM_BACKBONE": str(folder_of("vit")),
    }
    config = read_yaml(LOCAL)
    scaling = {"min_replicas": 1, "max_replicas": 2, "target_ongoing_requests": 2}
    soon = {"upscale_delay_s": 1, "downscale_delay_s": 2}
    soon |= {"metrics_interval_s": 1, "look_back_period_s": 2}
    config["applications"][0]["deployments"] = [
        {"name": "engram", "autoscaling_config": scaling | soon}
    ]
    held, end = threading.Event(), threading.Event()
    with serve_run(tmp_path, config, environment) as run, ThreadPoolExecutor(9) as pool:
        run.await_ready()
        run.await_replicas(1)
        requests = [pool.submit(predict, run.url, end, slowly=False)]
        try:
            requests += [pool.submit(predict, run.url, held, slowly=True) for _ in range(8)]
            run.await_replicas(2)
            held.set()
            run.await_replicas(1)
        finally:
            held.set()
            end.set()
        assert {status for each in requests for status in each.result()} == {200}
