"""Bundles, photos and predictions for tests of the engine and the server."""

import io

import numpy as np
import torch
from engram_bundle import TaskBundle
from engram_server.engine.observer import EngineObserver
from engram_server.engine.types import RunOptions
from engram_server.model import Backbone, MultiTaskViT, TaskWeights
from engram_server.model.masked_pass import masked_pass
from engram_server.model.preprocessing.pipeline import golden_pixels
from PIL import Image

from tests.bundles import bundle, with_tensors


def make_bundle(
    backbone: Backbone,
    seed: int = 0,
    *,
    classes: int = 5,
    memory: int = 2,
    task_type: str = "single_label",
    extends: tuple[TaskBundle, ...] = (),
    golden: bool = True,
    **manifest,
) -> TaskBundle:
    """As `tests.bundles.bundle`, with golden examples that the backbone answers right.

    A negative `memory` leaves the class token out too.
    """
    made = bundle(
        seed,
        backbone=backbone,
        classes=classes,
        memory=max(memory, 0),
        class_token=memory >= 0,
        parents=extends,
        task_type=task_type,
        labels=tuple(f"label{index}" for index in range(classes)),
        **manifest,
    )
    if not golden:
        return made
    model = MultiTaskViT(backbone)
    for number, parent in enumerate(extends):
        model.add(f"parent{number}", parent)
    model.add("task", made)
    pixels = golden_pixels(backbone.image_size)
    logits = model(torch.from_numpy(pixels), tasks=["task"])["task"]
    return with_tensors(made, {"golden.pixels": pixels, "golden.logits": logits.numpy()})


async def predict(engine, images, tasks=None, *, at_least=None, **options):
    """Resolve tasks and predict, as the API does."""
    plan = await engine.predictions.resolve(tasks, at_least=at_least)
    return await engine.predictions.predict(plan, images, RunOptions(**options))


class ReplaceablePass:
    """The pass that an engine runs; a test may replace `run` for a while."""

    def __init__(self):
        self.run = masked_pass

    def __call__(self, *args, **kwargs):
        return self.run(*args, **kwargs)


def photo(seed: int = 0, size=(40, 50), image_format: str = "PNG") -> bytes:
    """A small noisy picture, different for every seed."""
    pixels = np.random.default_rng(seed).integers(0, 256, (*size, 3), dtype=np.uint8)
    out = io.BytesIO()
    Image.fromarray(pixels).save(out, image_format)
    return out.getvalue()


def reference_logits(backbone: Backbone, bundle: TaskBundle | TaskWeights, image: bytes):
    """What a task answers for an image when it is alone."""
    model = MultiTaskViT(backbone)
    model.add("task", bundle)
    pixels = torch.from_numpy(backbone.preprocessing(image, max_pixels=10**8))
    return model(pixels[None], tasks=["task"])["task"][0].numpy()


class MetricListener(EngineObserver):
    """Calls the method that is named like a metric, without `engram_`, with value and labels."""

    def record(self, instrument, value=1, *labels):
        listener = getattr(self, instrument.name.removeprefix("engram_"), None)
        if listener is not None:
            listener(value, *labels)
