"""`engram batch --ray`: the batches of a run as a Ray Data pipeline.

Actors read and decode batches, other actors run the pass, and the driver writes the parts: the
batches, rows and files are those of a run on one machine. Ray restarts an actor that dies and
repeats its batch. Every node needs this package and the photos under the same paths or URLs; the
backbone and the tasks are sent to them.
"""

import pickle
from collections.abc import Callable, Generator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from engram_server.batch.images import ImageBatch
from engram_server.batch.pipeline import AnsweredBatch, Predictor
from engram_server.batch.setup import (
    BatchOptions,
    RayCluster,
    load_model,
    open_corpus,
    open_images,
)
from engram_server.batch.tasks import ChosenTasks
from engram_server.engine.types import EngineConfig
from engram_server.errors import EngramError, SettingsError, UnreadableSource
from engram_server.model.backbone import Backbone

T = TypeVar("T")

_BLOCKS = 4096  # of a dataset, at most: Ray tracks each of them
_Row = dict[str, Any]  # of a dataset


@dataclass(frozen=True, slots=True)
class Job:
    """What the actors of a run need."""

    options: BatchOptions
    config: EngineConfig
    backbone: Backbone
    chosen: ChosenTasks
    lines: Sequence[str]  # of standard input
    digest: str  # of the source


class Loader:
    """An actor that reads batches."""

    def __init__(self, job: Job) -> None:
        source = open_corpus(job.options, job.lines)
        if source.digest != job.digest:
            raise UnreadableSource(
                f"'{source.name}' has other images on a node of the cluster than on the driver. "
                f"Use a bucket, or a folder that all nodes share."
            )
        self._images = open_images(source, job.backbone, job.config)

    def __call__(self, row: _Row) -> _Row:
        return {"batch": _caught(lambda: self._images.load(range(row["start"], row["stop"])))}


class Passer:
    """An actor that runs passes, on its GPU or its CPUs."""

    def __init__(self, job: Job) -> None:
        device = "cuda:0" if job.config.devices[0].startswith("cuda") else "cpu"
        config = replace(job.config, devices=(device,))
        model = load_model(job.options, config, job.backbone, job.chosen)
        self._predict = Predictor(model.passes, model.tasks)

    def __call__(self, row: _Row) -> _Row:
        return {"batch": _caught(lambda: self._predict(_opened(row, ImageBatch)))}


def _caught(work: Callable[[], object]) -> bytes:
    """Return a result, or an error for the user, which Ray would wrap into its own."""
    try:
        return pickle.dumps(work(), pickle.HIGHEST_PROTOCOL)
    except EngramError as error:
        return pickle.dumps(error)


def _opened(row: _Row, kind: type[T]) -> T:
    found = pickle.loads(row["batch"])
    if isinstance(found, EngramError):
        raise found
    assert isinstance(found, kind)
    return found


@dataclass(frozen=True, slots=True)
class RayAnswerer:
    """Answers on a Ray cluster."""

    job: Job

    def __call__(self, batches: Sequence[range]) -> Generator[AnsweredBatch]:
        cluster = self.job.options.ray
        assert cluster is not None
        if not batches:
            return
        ray = _import_ray()
        with ExitStack() as session:
            if not ray.is_initialized():
                _connect(ray, cluster)
                session.callback(ray.shutdown)
            for row in self._pipeline(ray, cluster, batches).iter_rows():
                yield _opened(row, AnsweredBatch)

    def _pipeline(self, ray: Any, cluster: RayCluster, batches: Sequence[range]) -> Any:  # noqa: ANN401
        context = ray.data.DataContext.get_current()
        context.execution_options.preserve_order = True
        context.enable_progress_bars = False
        gpu = self.job.config.devices[0].startswith("cuda")
        actors = _actors(ray, cluster, gpu)
        cpus = int(ray.cluster_resources().get("CPU", 1))
        items = [{"start": batch.start, "stop": batch.stop} for batch in batches]
        loaded = ray.data.from_items(items, override_num_blocks=min(len(items), _BLOCKS)).map(
            Loader,
            fn_constructor_args=(self.job,),
            compute=ray.data.ActorPoolStrategy(min_size=1, max_size=max(1, cpus - actors)),
            num_cpus=1,
        )
        return loaded.map(
            Passer,
            fn_constructor_args=(self.job,),
            compute=ray.data.ActorPoolStrategy(size=actors),
            **({"num_gpus": 1} if gpu else {"num_cpus": 1}),
        )


def _import_ray() -> Any:  # noqa: ANN401 - an optional module
    try:
        import ray
        import ray.data
    except ModuleNotFoundError as error:
        raise SettingsError(
            f"--ray requires Ray Data ({error.name} is not installed). Run pip install "
            f"'engram-vit-server[ray]'."
        ) from None
    return ray


def _connect(ray: Any, cluster: RayCluster) -> None:  # noqa: ANN401
    try:
        ray.init(address=cluster.address, log_to_driver=False, logging_level="error")
    except (ConnectionError, ValueError, RuntimeError) as error:
        raise SettingsError(
            f"Cannot connect to the Ray cluster '{cluster.address}': {error} Valid values of --ray "
            f"are local, auto and host:port."
        ) from error


def _actors(ray: Any, cluster: RayCluster, gpu: bool) -> int:  # noqa: ANN401
    """Return the number of actors that run passes. CPU actors leave a CPU for reading."""
    resources = ray.cluster_resources()
    unit, most = ("GPUs", int(resources.get("GPU", 0))) if gpu else (
        "CPUs", int(resources.get("CPU", 1)) - 1)  # fmt: skip
    wanted = cluster.actors or (most if gpu else max(1, (most + 1) // 2))
    if wanted > most:
        raise SettingsError(
            f"The cluster '{cluster.address}' has {unit} for {most} actors, one CPU left for "
            f"reading, and --actors is {wanted}. Pass fewer, or add nodes."
        )
    return wanted
