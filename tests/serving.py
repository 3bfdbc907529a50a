"""What tests of the engine and the server need: bundles for a backbone, and photos."""

import io
from dataclasses import replace

import numpy as np
import torch
from PIL import Image

from server.model import Backbone, MultiTaskViT, TaskWeights
from server.model.golden import golden_pixels
from task_store import TaskBundle
from tests.bundles import bundle


def make_bundle(
    backbone: Backbone,
    seed: int = 0,
    *,
    classes: int = 5,
    memory: int = 2,
    problem: str = "single_label",
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
        problem=problem,
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
    return replace(made, golden_pixels=pixels, golden_logits=logits.numpy())


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
