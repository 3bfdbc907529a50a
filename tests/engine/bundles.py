"""Bundles for a backbone, what they answer, and a listener that tests can wait on."""

import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from engram_bundle import BackboneRef, TaskBundle
from engram_server.engine.types import Floats, Pixels, ServedTask
from engram_server.model import Backbone, MultiTaskViT
from engram_server.model.masked_pass import masked_pass
from engram_server.model.tasks import StackCache

from tests.bundles import bundle, with_tensors
from tests.serving import MetricListener

WAIT_SECONDS = 20.0


def random_pixels(backbone: Backbone, count: int, seed: int = 0) -> Pixels:
    """(count, H, W, 3) uint8, as preprocessing leaves images."""
    random = np.random.default_rng(seed)
    return random.integers(0, 256, (count, *backbone.image_size, 3), dtype=np.uint8)


def make_bundle(
    backbone: Backbone,
    seed: int = 0,
    /,
    *,
    parents: Sequence[TaskBundle] = (),
    golden: int = 0,
    trained_on: BackboneRef | None = None,
    **options: Any,
) -> TaskBundle:
    """As `tests.bundles.bundle`, with golden examples that the backbone answers right.

    `parents` in an order that can be added; `trained_on` claims another backbone.
    """
    made = bundle(seed, backbone=backbone, parents=parents, **options)
    if trained_on is not None:
        claim = made.manifest.model_copy(update={"backbone": trained_on})
        made = replace(made, manifest=claim)
    return with_golden(backbone, made, parents, golden) if golden else made


def with_golden(
    backbone: Backbone, made: TaskBundle, parents: Sequence[TaskBundle] = (), count: int = 2
) -> TaskBundle:
    pixels = random_pixels(backbone, count, seed=99)
    logits = expected_logits(backbone, made, pixels, parents)
    return with_tensors(made, {"golden.pixels": pixels, "golden.logits": logits})


def expected_logits(
    backbone: Backbone, made: TaskBundle, pixels: Pixels, parents: Sequence[TaskBundle] = ()
) -> Floats:
    """What the bundle answers, (B, K), by a model that has nothing but it and its parents."""
    model = MultiTaskViT(backbone)
    for number, parent in enumerate(parents):
        model.add(f"parent-{number}", parent)
    model.add("task", made)
    with torch.no_grad():
        return model(torch.tensor(pixels), tasks=["task"])["task"].numpy()


class Runner:
    """Runs resident tasks as a worker would, and counts what was replayed."""

    def __init__(self, backbones: Mapping[torch.device, Backbone]) -> None:
        self.backbones = backbones
        self.replayed: Counter[str] = Counter()

    def replay(self, task: ServedTask, pixels: Sequence[Pixels]) -> Floats:
        self.replayed[task.name] += 1
        return self.run(task, np.stack(pixels))

    def run(self, task: ServedTask, pixels: Pixels, device: torch.device | None = None) -> Floats:
        device = device or next(iter(self.backbones))
        backbone = self.backbones[device]
        images = backbone.preprocessing.normalise(torch.tensor(pixels), backbone.dtype)
        tasks = [[task.on[device]]] * len(images)
        with torch.no_grad():
            result = masked_pass(backbone, images, None, tasks, StackCache())
        return result.logits[0].values.numpy()


class Listener(MetricListener):
    """Notes what is reported of tasks, and lets a test wait for it."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self.counts: Counter[str] = Counter()
        self.served = self.seen = self.resident = self.resident_bytes = 0

    def wait_until(self, condition: Callable[[], bool]) -> None:
        with self._changed:
            assert self._changed.wait_for(condition, WAIT_SECONDS), "waited in vain"

    def _note(self, event: str, **values: int) -> None:
        with self._changed:
            self.counts[event] += 1
            for name, value in values.items():
                setattr(self, name, value)
            self._changed.notify_all()

    def task_load_seconds(self, seconds: float) -> None:
        assert seconds >= 0
        self._note("loaded")

    def task_load_failures(self, _: float, name: str, version: str) -> None:
        self._note("failed")

    def task_evictions(self, _: float) -> None:
        self._note("evicted")

    def tasks_resident(self, tasks: float) -> None:
        self._note("resident", resident=int(tasks))

    def tasks_resident_bytes(self, nbytes: float) -> None:
        self._note("resident", resident_bytes=int(nbytes))

    def catalog_generation_served(self, generation: float) -> None:
        self._note("served", served=int(generation))

    def catalog_generation_seen(self, generation: float) -> None:
        self._note("seen", seen=int(generation))

    def store_failures(self, _: float) -> None:
        self._note("store_failed")
