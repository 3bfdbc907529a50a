"""Bundles for a backbone, what they answer, and a listener that tests can wait on."""

import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from server.engine.observer import EngineObserver
from server.engine.types import Floats, Pixels, ResidentTask
from server.model import Backbone, MultiTaskViT
from server.model.masked_pass import masked_pass
from server.model.tasks import StackCache
from task_store import BackboneRef, TaskBundle
from tests.bundles import bundle

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
    return replace(
        made, golden_pixels=pixels, golden_logits=expected_logits(backbone, made, pixels, parents)
    )


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

    def replay(self, task: ResidentTask, pixels: Sequence[Pixels]) -> Floats:
        self.replayed[task.served.name] += 1
        return self.run(task, np.stack(pixels))

    def run(self, task: ResidentTask, pixels: Pixels, device: torch.device | None = None) -> Floats:
        device = device or next(iter(self.backbones))
        backbone = self.backbones[device]
        images = backbone.preprocessing.normalise(torch.tensor(pixels), backbone.dtype)
        tasks = [[task.on[device]]] * len(images)
        with torch.no_grad():
            result = masked_pass(backbone, images, None, tasks, StackCache())
        return result.logits[0].values.numpy()


class Listener(EngineObserver):
    """Notes what is reported of tasks, and lets a test wait for it."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self.counts: Counter[str] = Counter()
        self.evicted: list[tuple[str, int]] = []
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

    def task_loaded(self, name: str, version: int, seconds: float) -> None:
        assert seconds >= 0
        self._note("loaded")

    def task_failed(self, name: str, version: int) -> None:
        self._note("failed")

    def task_evicted(self, name: str, version: int) -> None:
        self.evicted.append((name, version))
        self._note("evicted")

    def tasks_resident(self, tasks: int, nbytes: int) -> None:
        self._note("counted", resident=tasks, resident_bytes=nbytes)

    def catalog_served(self, generation: int) -> None:
        self._note("served", served=generation)

    def catalog_seen(self, generation: int) -> None:
        self._note("seen", seen=generation)

    def store_failed(self) -> None:
        self._note("store_failed")
