"""Measures what things cost here: batches, photos, requests, tasks in memory and from a store."""

import asyncio
import hashlib
import io
import math
import os
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial

import httpx
import numpy as np
import torch
import uvicorn
from engram_server.app import create_app, engine_config
from engram_server.commands.serve import uvicorn_config
from engram_server.engine.engine import Engine
from engram_server.engine.observer import EngineObserver
from engram_server.engine.types import EngineConfig
from engram_server.model import Backbone, MultiTaskViT
from engram_server.model.tasks import prepare
from engram_server.settings import Settings
from engram_store import open_store
from PIL import Image

from benchmarks.capacity.costs import NOTHING, CatalogCosts, Costs, Shape, Size
from benchmarks.capacity.many_tasks import TASKS_PER_REQUEST
from benchmarks.capacity.passes import CLASSES, MEMORY, Bench, random_weights
from benchmarks.measure import medians, processor_name
from benchmarks.serving import bundle

PHOTOS = {"640x480": (640, 480), "1280x960": (1280, 960), "4032x3024": (4032, 3024)}
USUAL = "640x480"

_TASKS = 64  # of the engine that is measured
_CONTEXTS = 64  # its cache holds
_ADMITTED = 64
_REQUESTS = 100
_TASK_SHAPES = ((0, 10), (1, 100), (5, 1000), (20, 100))  # memory tokens, classes
_PRECISIONS = {"float16": torch.float16, "float32": torch.float32}


@dataclass(frozen=True, slots=True)
class Running:
    """An engine with tasks, its backbone where it runs, and how long each task took to load."""

    engine: Engine
    backbone: Backbone
    tasks: list[str]
    load: float


def measure(running: Running, settings: Settings, catalog: CatalogCosts, seconds: float) -> Costs:
    """All costs but those of batches, which a bench measures; `seconds` for what is quick."""
    backbone = running.backbone
    shape = shape_of(backbone)
    photos = {name: photo(0, *size) for name, size in PHOTOS.items()}
    times = _measure_photos(backbone, photos, seconds)
    look_up = times.pop("look up")
    precision = settings.cache_precision
    contexts = [context_size(backbone, shape, name) for name in _PRECISIONS]
    tasks = [task_size(backbone, shape, memory, classes) for memory, classes in _TASK_SHAPES]
    return Costs(
        backbone=backbone.name,
        device=backbone.device.type,
        processor=processor_name(),
        cores=os.cpu_count() or 1,
        threads=torch.get_num_threads(),
        memory=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        gpu_memory=_gpu_memory(backbone.device),
        shape=shape,
        passes=NOTHING,
        decode=times,
        look_up=look_up,
        request=_measure_http(running, settings, photos[USUAL]),
        engine_request=_measure_engine(running, photos[USUAL]),
        task=task_size(backbone, shape, MEMORY, CLASSES),
        host_task_bytes=shape.host_task_bytes(MEMORY, CLASSES),
        context=context_size(backbone, shape, precision),
        sizes=(*tasks, *contexts),
        bundle_bytes=bundle(backbone.to("cpu", torch.float32), 0).size_bytes,
        load=running.load,
        reload=_measure_reload(backbone, seconds / 2),
        catalog=catalog,
    )


@contextmanager
def open_bench(running: Running) -> Iterator[Bench]:
    """A bench for batches like the engine's."""
    config = running.engine.config
    bench = Bench(running.backbone, config.cache_dtype, config.cache_device)
    try:
        yield bench
    finally:
        bench.close()


def photo(seed: int, width: int, height: int) -> bytes:
    """A JPEG of random colour patches: compresses about as a photo does."""
    random = np.random.default_rng(seed)
    patches = random.integers(0, 256, (height // 16, width // 16, 3), dtype=np.uint8)
    out = io.BytesIO()
    picture = Image.fromarray(patches).resize((width, height), Image.Resampling.BICUBIC)
    picture.save(out, "JPEG")
    return out.getvalue()


@contextmanager
def run_engine(backbone: Backbone, settings: Settings) -> Iterator[Running]:
    """An engine of the settings, but for a cache and an admission that a short run can fill."""
    base = engine_config(settings)
    dtype = base.cache_dtype or base.dtype
    config = replace(
        base,
        cache_bytes=_CONTEXTS * shape_of(backbone).context_bytes(dtype.itemsize),
        queue_images=_ADMITTED,
        resident_bytes=None,
        pinned_tasks=frozenset(),
        poll_seconds=3600.0,
        heartbeat_seconds=None,
    )
    tasks = [f"task{number}" for number in range(_TASKS)]
    with tempfile.TemporaryDirectory() as empty, tempfile.TemporaryDirectory() as full:
        store = open_store(full)
        for number, task in enumerate(tasks):
            store.publish(task, bundle(backbone, number))
        alone, _ = _started(backbone, empty, config)
        seconds, engine = _started(backbone, full, config)
        try:
            yield Running(engine, engine.backbone, tasks, max(seconds - alone, 0.0) / _TASKS)
        finally:
            engine.stop()


def _started(backbone: Backbone, folder: str, config: EngineConfig) -> tuple[float, Engine]:
    """How long an engine took to start on a store, and the engine; stopped if it has no tasks."""
    engine = Engine(backbone, open_store(folder), config, EngineObserver())
    started = time.perf_counter()
    engine.start()
    seconds = time.perf_counter() - started
    if not engine.tasks.snapshot.catalog.names:
        engine.stop()
    return seconds, engine


def shape_of(backbone: Backbone) -> Shape:
    geometry = backbone.geometry
    return Shape(
        layers=geometry.layers,
        tokens=geometry.tokens,
        patches=geometry.patches,
        width=geometry.width,
        attention_width=geometry.attention_width,
        readout=len(backbone.readout) * geometry.width + math.prod(backbone.summary_shape),
        itemsize=backbone.dtype.itemsize,
        weights=backbone.nbytes,
    )


def task_size(backbone: Backbone, shape: Shape, memory: int, classes: int) -> Size:
    weights = random_weights(backbone, 0, memory=memory, classes=classes)
    return Size(
        f"task, {memory} memory tokens, {classes} classes",
        prepare(backbone, weights).nbytes,
        shape.task_bytes(memory, classes),
    )


def context_size(backbone: Backbone, shape: Shape, precision: str) -> Size:
    dtype = _PRECISIONS.get(precision, torch.bfloat16)
    blank = torch.zeros(1, *backbone.image_size, 3, dtype=torch.uint8)
    context = MultiTaskViT(backbone).encode(blank)[0]
    kept = replace(context, states=context.states.to(dtype))
    return Size(f"context, {precision}", kept.nbytes, shape.context_bytes(dtype.itemsize))


def _measure_photos(
    backbone: Backbone, photos: Mapping[str, bytes], seconds: float
) -> dict[str, float]:
    """Decoding and resizing by size of the photo, and `look up`: naming one by its bytes."""
    runs: dict[str, Callable[[], object]] = {
        name: partial(backbone.preprocessing, data, max_pixels=None)
        for name, data in photos.items()
    }
    runs["look up"] = lambda: hashlib.sha256(photos[USUAL]).hexdigest()
    return medians(runs, seconds=seconds)


def _measure_engine(running: Running, image: bytes) -> float:
    """CPU time of the event loop for one request, without HTTP."""
    predictions, tasks = running.engine.predictions, running.tasks[:TASKS_PER_REQUEST]

    async def predict() -> None:
        await predictions.predict(await predictions.resolve(tasks), [image])

    async def measure() -> float:
        await predict()
        before = time.thread_time()
        for _ in range(_REQUESTS):
            await predict()
        return (time.thread_time() - before) / _REQUESTS

    return asyncio.run(measure())


def _measure_http(running: Running, settings: Settings, image: bytes) -> float:
    """CPU time of the server's event loop for one request over HTTP; the client's is not in it."""
    app = create_app(settings, engine=running.engine)
    server = uvicorn.Server(uvicorn_config(app, settings))
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()  # requests before the server is ready wait in the backlog
        address = f"http://127.0.0.1:{listener.getsockname()[1]}"
        thread = threading.Thread(target=server.run, args=([listener],))
        thread.start()
        try:
            return _time_http(address, thread, running.tasks[:TASKS_PER_REQUEST], image)
        finally:
            server.should_exit = True
            thread.join()


def _time_http(address: str, thread: threading.Thread, tasks: Sequence[str], image: bytes) -> float:
    while httpx.get(f"{address}/readyz", timeout=10).status_code != 200:
        time.sleep(0.01)
    assert thread.ident is not None
    clock = time.pthread_getcpuclockid(thread.ident)
    with httpx.Client(base_url=address, params={"tasks": ",".join(tasks)}, timeout=60) as client:
        before = 0.0
        for number in range(_REQUESTS + 1):
            if number == 1:  # the first meets a cold cache
                before = time.clock_gettime(clock)
            client.post("/predict", content=image).raise_for_status()
        return (time.clock_gettime(clock) - before) / _REQUESTS


def _measure_reload(backbone: Backbone, seconds: float) -> float:
    """A task from host memory to the device: its memory's keys and values are computed anew."""
    weights = random_weights(backbone, 0)

    def run() -> None:
        with torch.no_grad():
            prepare(backbone, weights)
        if backbone.device.type == "cuda":
            torch.cuda.synchronize(backbone.device)

    return medians({"": run}, seconds=seconds)[""]


def _gpu_memory(device: torch.device) -> int:
    if device.type != "cuda":
        return 0
    total: int = torch.cuda.get_device_properties(device).total_memory
    return total
