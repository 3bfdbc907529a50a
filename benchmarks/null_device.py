"""A server whose pass returns constants: `python -m benchmarks.null_device [--stages] PORT`.

Everything else is the server's own code. With `--stages`, `GET /stages` returns the CPU time of
each stage since the last call, for one request at a time; reading the clocks takes time as well.
"""

import functools
import inspect
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import uvicorn
from engram_bundle import Manifest, TaskBundle
from engram_bundle.manifest import BackboneRef
from engram_server.api import inference
from engram_server.api.auth import Requires
from engram_server.api.routes import predict
from engram_server.app import build_metrics, create_app, engine_config, tune_garbage_collection
from engram_server.commands.serve import SWITCH_SECONDS, uvicorn_config
from engram_server.edge.connections import LimitedProtocol
from engram_server.engine.engine import Engine
from engram_server.model import Backbone, load_backbone
from engram_server.model.context import ContextBatch
from engram_server.model.masked_pass import PassResult, TaskLogits, images_by_task
from engram_server.model.tasks import Task
from engram_server.settings import load_settings
from engram_store import open_store
from fastapi import FastAPI
from transformers import ViTConfig, ViTForImageClassification

TASKS = 16
LABELS = 100
IMAGE_SIZE = (224, 224)
# Different ones, as of a real model: numpy takes longest to find the highest of equal scores.
ANSWER = torch.linspace(-4, 4, LABELS)[torch.randperm(LABELS, generator=torch.Generator())]


def null_pass(
    backbone: Backbone,
    pixels: torch.Tensor | None,
    warm: ContextBatch | None,
    requested: Sequence[Sequence[Task]],
    _stacks: object,
    *,
    keep_contexts: bool = False,
) -> PassResult:
    """The answers of a pass, the same for every image, as a device would return them at once."""
    cold = 0 if pixels is None else len(pixels)
    width = len(backbone.readout) * backbone.width
    features = torch.zeros(len(requested), width)
    by_task = images_by_task(requested, with_rows=False) or images_by_task(
        requested,
        with_rows=True,  # of the warm-up
    )
    logits = [
        TaskLogits(task, images, ANSWER.expand(len(images), -1), features[images], None)
        for task, images in by_task.items()
    ]
    contexts = None
    if keep_contexts and cold:
        states = torch.zeros(2, cold, 1, 1, 1)
        contexts = ContextBatch((states,), features[:cold], None)
    return PassResult(logits, contexts, None, None)


def small_backbone(folder: Path) -> Backbone:
    """A backbone with the input of a ViT-B/32 and next to no weights."""
    torch.manual_seed(0)
    config = ViTConfig(
        hidden_size=64,
        num_hidden_layers=1,
        num_attention_heads=1,
        intermediate_size=64,
        patch_size=32,
    )
    ViTForImageClassification(config).save_pretrained(folder)
    return load_backbone(folder)


def bundle(backbone: Backbone) -> TaskBundle:
    return TaskBundle(
        manifest=Manifest(
            task_type="single_label",
            labels=tuple(f"class {number}" for number in range(LABELS)),
            backbone=BackboneRef(name=backbone.name, fingerprint=backbone.fingerprint),
            preprocessing=backbone.preprocessing,
        ),
        tensors={"head.weight": np.zeros((LABELS, backbone.width), np.float32)},
    )


class Stages:
    """CPU time of the event loop by what it does, for one request at a time."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._open = ["loop"]
        self._since = 0.0
        self._thread = threading.get_ident()  # of the event loop

    def begin(self) -> None:
        self.seconds = {}
        self._since = time.thread_time()
        self._threads = {each.name: _cpu_time(each) for each in threading.enumerate()}

    def read(self) -> dict[str, float]:
        """All stages since `begin`: those of the event loop, and the other threads."""
        assert threading.get_ident() == self._thread
        self._charge()
        others = {"decode": 0.0, "worker": 0.0}
        for thread in threading.enumerate():
            for stage in others:
                if thread.name.startswith(f"engram-{stage}"):
                    others[stage] += _cpu_time(thread) - self._threads.get(thread.name, 0.0)
        return self.seconds | others

    def watch(self, owner: Any, name: str, stage: str) -> None:  # noqa: ANN401 - a class or module
        """Count the time inside a function as that of a stage."""
        plain: Callable[..., Any] = getattr(owner, name)
        if inspect.iscoroutinefunction(plain):

            @functools.wraps(plain)
            async def watched(*values: Any, **named: Any) -> Any:  # noqa: ANN401
                self._enter(stage)
                try:
                    return await plain(*values, **named)
                finally:
                    self._leave()
        else:

            @functools.wraps(plain)
            def watched(*values: Any, **named: Any) -> Any:  # noqa: ANN401
                if threading.get_ident() != self._thread:
                    return self._elsewhere(stage, functools.partial(plain, *values, **named))
                self._enter(stage)
                try:
                    return plain(*values, **named)
                finally:
                    self._leave()

        setattr(owner, name, watched)

    def _elsewhere(self, stage: str, run: Callable[[], Any]) -> Any:  # noqa: ANN401
        """Count work of a stage that another thread does."""
        before = time.thread_time()
        try:
            return run()
        finally:
            spent = time.thread_time() - before
            self.seconds[stage] = self.seconds.get(stage, 0.0) + spent

    def _enter(self, stage: str) -> None:
        self._charge()
        self._open.append(stage)

    def _leave(self) -> None:
        self._charge()
        self._open.pop()

    def _charge(self) -> None:
        now = time.thread_time()
        stage = self._open[-1]
        self.seconds[stage] = self.seconds.get(stage, 0.0) + now - self._since
        self._since = now


def _cpu_time(thread: threading.Thread) -> float:
    assert thread.ident is not None
    return time.clock_gettime(time.pthread_getcpuclockid(thread.ident))


def watch_stages(app: FastAPI) -> Stages:
    stages = Stages()
    stages.watch(LimitedProtocol, "data_received", "parse")
    stages.watch(Requires, "__call__", "auth")
    stages.watch(inference.InferenceCall, "__init__", "admission")
    stages.watch(inference.InferenceCall, "resolve", "admission")
    stages.watch(inference.InferenceCall, "predict", "queue")
    stages.watch(predict, "read_images", "body")
    stages.watch(predict, "write", "render")

    @app.get("/stages", include_in_schema=False)
    async def report() -> dict[str, float]:
        found = stages.read()
        stages.begin()
        return found

    app.router.routes.insert(0, app.router.routes.pop())
    return stages


def main(port: int, *, with_stages: bool) -> None:
    settings = load_settings(port=port)
    settings = settings.model_copy(update={"log_level": "warning", "queue_images": 4096})
    sys.setswitchinterval(SWITCH_SECONDS)
    with tempfile.TemporaryDirectory() as place:
        backbone = small_backbone(Path(place) / "backbone")
        store = open_store(f"{place}/store")
        for number in range(TASKS):
            store.publish(f"task{number}", bundle(backbone))
        metrics = build_metrics(settings)
        engine = Engine(backbone, store, engine_config(settings), metrics, run_pass=null_pass)
        engine.start()
        app = create_app(settings, engine=engine, metrics=metrics)
        tune_garbage_collection()
        if with_stages:
            watch_stages(app).begin()
        with socket.create_server(("127.0.0.1", port), backlog=2048) as listener:
            server = uvicorn.Server(uvicorn_config(app, settings))
            server.run(sockets=[listener])
        engine.stop()


if __name__ == "__main__":
    main(int(sys.argv[-1]), with_stages="--stages" in sys.argv)
