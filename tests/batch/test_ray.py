"""`engram batch --ray`: the rows of one machine, also if an actor dies."""

import os
import secrets
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import takewhile
from pathlib import Path
from types import SimpleNamespace

import pytest
from engram_server.batch import ray_data
from engram_server.batch.run import run_batch
from engram_server.batch.setup import BatchOptions, Keep, RayCluster
from engram_server.engine.types import EngineConfig
from engram_server.errors import SettingsError, UnreadableSource
from engram_server.parts.kept import KeptFolder

from tests.batch.conftest import rows_of
from tests.conftest import REPOSITORY
from tests.e2e.server_process import free_port
from tests.serving import photo

CONFIG = EngineConfig(decode_threads=2, budget_rows=64)  # as in ray_program


@contextmanager
def ray_cluster(environment: dict[str, str]) -> Iterator[str]:
    """A cluster of one node with five CPUs, and its address."""
    # Not below `tmp_path`: the path of a socket has at most 107 characters, and Ray's are long.
    with tempfile.TemporaryDirectory(prefix="ray-", ignore_cleanup_errors=True) as files:
        # Ray waits 15 seconds for each port that it may choose, which a busy machine exceeds.
        ports = {
            f"--{name}": free_port()
            for name in ("port", "dashboard-agent-grpc-port", "dashboard-agent-listen-port",
                         "metrics-export-port", "runtime-env-agent-port")
        }  # fmt: skip
        process = subprocess.Popen(
            [Path(sys.executable).with_name("ray"), "start", "--head", "--block", "--num-cpus=5",
             "--include-dashboard=false", "--include-log-monitor=false", f"--temp-dir={files}",
             f"--object-store-memory={100 * 1024**2}", *(f"{n}={p}" for n, p in ports.items())],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )  # fmt: skip
        assert process.stdout is not None
        printed = list(takewhile(lambda line: "Ray runtime started" not in line, process.stdout))
        try:
            assert process.poll() is None, "".join(printed)
            yield f"127.0.0.1:{ports['--port']}"
        finally:
            process.terminate()  # Ray ends all its processes
            process.wait(timeout=60)
            process.stdout.close()


@pytest.mark.long
@pytest.mark.timeout(600)
def test_ray_gives_the_rows_of_one_machine_also_with_a_killed_actor(world, folder_of, tmp_path):
    photos = tmp_path / "photos"
    photos.mkdir()
    for number in range(80):
        (photos / f"{number:02}.png").write_bytes(photo(number))
    (photos / "33.png").write_text("not an image")
    bundle = tmp_path / "task.safetensors"
    bundle.write_bytes(world.bundle(60).to_bytes())
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(REPOSITORY),
        "RAY_USAGE_STATS_ENABLED": "0",
        # Otherwise Ray would write one into the home folder.
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": secrets.token_hex(32),
        "RAY_raylet_start_wait_time_s": "120",
    }
    with ray_cluster(environment) as address:
        arguments = [address, folder_of("vit"), photos, bundle, tmp_path / "ray", tmp_path / "kept"]
        done = subprocess.run(
            [sys.executable, "-m", "tests.batch.ray_program", *map(str, arguments)],
            env=environment,
            capture_output=True,
            text=True,
            cwd=REPOSITORY,
            timeout=400,
        )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "killed " in done.stdout
    options = BatchOptions(
        str(photos),
        tmp_path / "local",
        bundles=[bundle],
        output="logits",
        part_images=16,
        keep=Keep("summaries", tmp_path / "kept-here"),
    )
    run_batch(options, CONFIG, lambda: world.backbone, None)
    assert rows_of(tmp_path / "ray") == rows_of(tmp_path / "local")
    kept, here = (KeptFolder.open(tmp_path / name) for name in ("kept", "kept-here"))
    assert (kept.readouts(range(80)) == here.readouts(range(80))).all()


@pytest.fixture
def job(world, photos, tmp_path):
    def make(**changes):
        options = BatchOptions(str(photos), tmp_path / "out", ["pets"], ray=RayCluster("local"))
        chosen = ray_data.ChosenTasks((), {})
        values = {"lines": (), "digest": "", **changes}
        return ray_data.Job(options, CONFIG, world.backbone, chosen, **values)

    return make


def test_other_images_on_a_node_are_an_error(job):
    with pytest.raises(UnreadableSource, match="has other images on a node"):
        ray_data.Loader(job(digest="sha256:other"))


def test_errors_of_actors_are_raised_by_the_driver():
    def failing():
        raise UnreadableSource("The folder 'photos' does not exist any more.")

    row = {"batch": ray_data._caught(failing)}
    with pytest.raises(UnreadableSource, match="does not exist any more"):
        ray_data._opened(row, ray_data.AnsweredBatch)


@pytest.mark.parametrize(
    ("cpus", "gpus", "actors", "expected"),
    [(2, 0, None, 1), (8, 0, None, 4), (8, 0, 7, 7), (8, 0, 8, None), (4, 2, None, 2)],
)  # fmt: skip
def test_number_of_actors_follows_the_cluster(cpus, gpus, actors, expected):
    ray = SimpleNamespace(cluster_resources=lambda: {"CPU": cpus, "GPU": gpus})
    cluster = RayCluster("local", actors)
    if expected is None:
        with pytest.raises(SettingsError, match="Pass fewer, or add nodes"):
            ray_data._actors(ray, cluster, gpu=bool(gpus))
    else:
        assert ray_data._actors(ray, cluster, gpu=bool(gpus)) == expected


def test_missing_ray_is_named(run, photos, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(SettingsError, match=r"--ray requires Ray Data.*engram-vit-server\[ray\]"):
        run(photos, tasks=["pets"], ray=RayCluster("local"))
