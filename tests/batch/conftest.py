"""A folder of photos, a tiny engine with tasks of every type, and batch runs on it."""

from functools import partial
from pathlib import Path

import numpy as np
import pyarrow.parquet
import pytest
from engram_bundle import OodSpec
from engram_server.app import engine_config
from engram_server.batch.run import run_batch
from engram_server.batch.setup import BatchOptions
from engram_server.settings import Settings
from starlette.testclient import TestClient

from tests.api.conftest import World, running_world
from tests.bundles import with_tensors
from tests.serving import photo
from tests.task_store.conftest import s3, s3_server  # noqa: F401 - fixtures

TASKS = ("pets", "scene", "age", "face", "known", "unknown")


@pytest.fixture(scope="session")
def settings(folder_of) -> Settings:
    return Settings(
        backbone=str(folder_of("vit")),
        store="memory://",
        allowed_hosts="testserver",
        devices="cpu",
        poll_seconds=3600,
        max_pixels=1_000_000,
        decode_threads=2,
        budget_rows=64,  # a few images per batch
    )


@pytest.fixture(scope="session")
def world(settings):
    with running_world(settings) as world:
        for name, threshold in (("known", 1e6), ("unknown", 1e-6)):
            made, width = world.bundle(7), world.backbone.width
            manifest = made.manifest.model_copy(update={"ood": OodSpec(threshold=threshold)})
            tensors = {"ood.means": np.zeros((2, width)), "ood.axes": np.zeros((1, width))}
            world.store.publish(name, with_tensors(made, tensors, manifest))
        world.engine.tasks.sync()
        yield world


@pytest.fixture(scope="session")
def client(world):
    with TestClient(world.app()) as client:
        yield client


@pytest.fixture(scope="session")
def photos(tmp_path_factory) -> Path:
    """Ten photos in two folders, and files that are not photos."""
    folder = tmp_path_factory.mktemp("photos")
    for number in range(10):
        place = folder / ("b" if number % 2 else "a")
        place.mkdir(exist_ok=True)
        (place / f"{number}.png").write_bytes(photo(number, (40, 30 + number)))
    (folder / "notes.txt").write_text("not a photo")
    (folder / ".hidden.png").write_bytes(photo(99))
    return folder


@pytest.fixture
def run(world: World, tmp_path):
    """`run(source, **options)`: the rows of a batch run. `out` and `tasks` have defaults."""

    def run(source, *, lines=(), config=None, **options):
        values = {"out": tmp_path / "out", "tasks": TASKS, "part_images": 4, **options}
        run_batch(
            BatchOptions(str(source), **values),
            config or engine_config(world.settings),
            lambda: world.backbone,
            world.store,
            lines,
        )
        return [] if values["out"] is None else rows_of(values["out"])

    return run


@pytest.fixture
def run_pets(run):
    return partial(run, tasks=["pets"])


def rows_of(out: Path) -> list[dict]:
    parts = sorted(out.glob("part-*.parquet"))
    return [row for part in parts for row in pyarrow.parquet.read_table(part).to_pylist()]
