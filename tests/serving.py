"""What tests of the engine and the server need: bundles for a backbone, and photos."""

import io

import numpy as np
import torch
from PIL import Image

from server.model import Backbone, MultiTaskViT, TaskWeights
from task_store import Manifest, TaskBundle
from task_store.manifest import BackboneRef, PreprocessingSpec
from training.bundles import golden_pixels


def task_weights(backbone: Backbone, seed: int, *, classes: int = 5, memory: int = 2):
    """A random task; a negative `memory` leaves the class token out too."""
    generator = torch.Generator().manual_seed(seed)

    def random(*shape):
        return torch.randn(*shape, generator=generator)

    return TaskWeights(
        head_weight=random(classes, backbone.width) * 0.3,
        head_bias=random(classes) * 0.1,
        class_token=None if memory < 0 else random(backbone.width),
        memory=random(backbone.layers, memory, backbone.width) if memory > 0 else None,
    )


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
    """A random task as a bundle, with golden answers unless told otherwise."""
    weights = task_weights(backbone, seed, classes=classes, memory=memory)
    model = MultiTaskViT(backbone)
    names = [f"parent{number}" for number in range(len(extends))]
    for name, parent in zip(names, extends, strict=True):
        model.add(name, parent)
    model.add("task", weights, extends=names)
    pixels = golden_pixels(backbone.image_size)
    logits = model(torch.from_numpy(pixels), tasks=["task"])["task"]

    def array(tensor):
        return None if tensor is None else tensor.numpy()

    return TaskBundle(
        manifest=Manifest(
            problem=problem,
            labels=[f"label{index}" for index in range(classes)],
            backbone=BackboneRef(name=backbone.name, fingerprint=backbone.fingerprint),
            preprocessing=PreprocessingSpec.of(backbone.preprocessing),
            extends=tuple(parent.digest for parent in extends),
            **manifest,
        ),
        head_weight=weights.head_weight.numpy(),
        head_bias=array(weights.head_bias),
        class_token=array(weights.class_token),
        memory=array(weights.memory),
        golden_pixels=pixels if golden else None,
        golden_logits=logits.numpy() if golden else None,
    )


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
