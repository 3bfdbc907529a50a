"""Measure what many tasks cost a server before the first request: store, catalog, follower.

The log is written as the store would write it, without a file for each bundle: every digest reads
as the same small bundle, since none of these costs depends on what is in one.
"""

import statistics
import tempfile
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from engram_bundle import BackboneRef, Manifest, TaskBundle, digest_of
from engram_server.engine.observer import EngineObserver
from engram_server.engine.tasks.follower import StoreFollower
from engram_server.engine.tasks.loader import TaskLoader, TaskPreparer
from engram_server.engine.tasks.slots import Residency, Slot
from engram_server.engine.types import LoadedBundle
from engram_server.model import Backbone
from engram_server.model.tasks import Task
from engram_store import BundleCache, MoveAlias, TaskStore, open_store
from engram_store.catalog import NOTHING, Catalog
from engram_store.events import Entry, Published, Stamp, VersionFacts
from engram_store.layout import checkpoint_path, log_path
from engram_store.objects import open_objects
from engram_store.replay import dump_checkpoint

from benchmarks.capacity.costs import CatalogCosts
from benchmarks.measure import medians

TASKS_PER_REQUEST = 4
_CHANGES = 5


def measure_many_tasks(backbone: Backbone, tasks: int, seconds: float) -> CatalogCosts:
    """`backbone` must be on the CPU; `seconds` is the time for what is quick."""
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place) / "store"
        catalog = write_log(folder, tasks, backbone)
        open_log = _median(lambda: open_store(folder))
        checkpoint = folder / checkpoint_path(catalog.generation)
        checkpoint.parent.mkdir()
        checkpoint.write_bytes(dump_checkpoint(catalog))
        open_checkpoint = _median(lambda: open_store(folder))
        tracemalloc.start()
        kept = open_store(folder)
        version_bytes = tracemalloc.get_traced_memory()[0] / tasks
        tracemalloc.stop()
        del kept
        poll, change, resolve = _measure_follower(folder, backbone, tasks, seconds)
        return CatalogCosts(
            tasks=tasks,
            open_checkpoint=open_checkpoint,
            open_log=open_log,
            version_bytes=version_bytes,
            poll=poll,
            change=change,
            resolve=resolve,
            evict=_measure_eviction(max(tasks // 2, 1)),
            cache_put=_measure_cache(Path(place) / "bundles", tasks),
        )


def write_log(folder: Path, tasks: int, backbone: Backbone) -> Catalog:
    """A store's log of one version of each task, and the catalog it tells."""
    entries: list[Entry] = []
    previous = NOTHING
    for number in range(1, tasks + 1):
        entries.append(_entry(number, backbone, previous))
        previous = digest_of(entries[-1].to_json())
    (folder / "log").mkdir(parents=True)
    for entry in entries:
        (folder / log_path(entry.generation)).write_bytes(entry.to_json())
    catalog, problems = Catalog().read((e.generation, e.to_json()) for e in entries)
    assert not problems, problems
    return catalog


def _entry(number: int, backbone: Backbone, previous: str) -> Entry:
    return Entry(
        stamp=Stamp(
            generation=number,
            id=f"{number:032x}",
            time="2026-01-01T00:00:00.000Z",
            actor="bench",
            previous=previous,
        ),
        event=Published(
            task=task_name(number - 1),
            version=1,
            aliases=("default",),
            facts=VersionFacts(
                digest=digest_of(str(number).encode()),
                size=150_000,
                task_type="single_label",
                classes=100,
                memory_tokens=5,
                description="What the task tells apart, in a sentence of usual length.",
                backbone=backbone.name,
                fingerprint=backbone.fingerprint,
            ),
        ),
    )


def task_name(number: int) -> str:
    return f"team/task-{number:05}"


class _OneBundle(TaskStore):
    """A store in which every bundle reads as the same one."""

    def __init__(self, folder: Path, bundle: TaskBundle) -> None:
        self._bundle = bundle
        objects = open_objects(folder, create=False)
        super().__init__(objects)

    def read_bundle(self, digest: str) -> TaskBundle:
        return self._bundle


def _small_bundle(backbone: Backbone) -> TaskBundle:
    return TaskBundle(
        manifest=Manifest(
            task_type="single_label",
            labels=("no", "yes"),
            backbone=BackboneRef(name=backbone.name, fingerprint=backbone.fingerprint),
            preprocessing=backbone.preprocessing,
        ),
        tensors={"head.weight": np.zeros((2, backbone.width), np.float32)},
    )


def _measure_follower(
    folder: Path, backbone: Backbone, tasks: int, seconds: float
) -> tuple[float, float, float]:
    """A poll that finds nothing, taking over a change, resolving names: everything is loaded."""
    store, observer = _OneBundle(folder, _small_bundle(backbone)), EngineObserver()
    # The bundle has no examples to replay.
    preparer = TaskPreparer({backbone.device: backbone}, lambda *_: np.zeros((0, 0), np.float32))
    loader = TaskLoader(store, preparer, Residency(None, observer), observer)
    follower = StoreFollower(store, loader, observer, poll_seconds=3600.0)
    follower.start()
    try:
        random = np.random.default_rng(0)

        def resolve() -> None:
            numbers = random.integers(0, tasks, TASKS_PER_REQUEST).tolist()
            loader.served_tasks(
                follower.snapshot.resolve([task_name(number) for number in numbers])
            )

        times = medians({"poll": follower.sync, "resolve": resolve}, seconds=seconds)
        writer = open_store(folder)
        changes = []
        for number in range(_CHANGES):
            writer.commit(MoveAlias(task_name(number % tasks), f"canary{number}", 1))
            started = time.perf_counter()
            follower.sync()
            changes.append(time.perf_counter() - started)
        return times["poll"], statistics.median(changes), times["resolve"]
    finally:
        follower.stop()


def _measure_eviction(resident: int) -> float:
    """Making room for one task when so many are resident and no more may be."""
    task = Task(torch.zeros(1, 1), None)
    on = {torch.device("cpu"): task}
    residency = Residency(resident * task.nbytes, EngineObserver())

    def keep(number: int) -> None:
        slot = Slot(str(number))
        slot.used = number
        residency.keep(slot, LoadedBundle(slot.digest, "single_label", (), on))

    for number in range(resident):
        keep(number)
    times = []
    for number in range(20):
        started = time.perf_counter()
        keep(resident + number)
        times.append(time.perf_counter() - started)
    return statistics.median(times)


def _measure_cache(folder: Path, files: int) -> float:
    """Keeping one more bundle on the disk, beside so many."""
    folder.mkdir()
    for number in range(files):
        (folder / f"sha256-{number:064x}").touch()
    cache = BundleCache(folder, 2**40)
    times = []
    for number in range(files, files + 5):
        started = time.perf_counter()
        cache.put(f"sha256:{number:064x}", b"a small bundle")
        times.append(time.perf_counter() - started)
    return statistics.median(times)


def _median(run: Callable[[], object], times: int = 3) -> float:
    seconds = []
    for _ in range(times):
        started = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - started)
    return statistics.median(seconds)
