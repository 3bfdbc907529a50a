"""What training costs: a sweep over one variant, kept contexts over the backbone, ours over dense.

    python -m benchmarks.training [--quick]

A ViT-Ti/16 at 224 px, the pretrained one beside the repository where there is one and else of
random weights; random pictures; augmentation on, so that every step of `cold` decodes no file but
crops, encodes and trains. Contenders take turns within one run, and every figure is a ratio of
medians. `dense` is the way of the public reproduction, necrashter/transformers-learnable-memory:
tokens of the task in one sequence with the image's, a mask, and autograd through the whole of it.
"""

import argparse
import io
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from functools import partial
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from engram_server.model import Backbone, ContextBatch, load_backbone
from engram_training.data.contexts import KeptContexts
from engram_training.data.images import ImageSet, encode
from engram_training.data.workspace import Scratch
from engram_training.fitting.loop import answers
from engram_training.fitting.losses import mean_losses
from engram_training.fitting.variants import Variants, sweep
from engram_training.options import TrainOptions
from PIL import Image
from rich.console import Console
from torch import Tensor
from transformers import ViTConfig, ViTModel

from benchmarks.dense_mask import dense_layers
from benchmarks.measure import medians, write_results

BATCH = 32
CLASSES = 100
PRETRAINED = Path(__file__).resolve().parents[2] / "shared" / "backbones" / "vit-tiny-patch16-224"
ONE = sweep(["memory"], [5], [0.01], [0])
TWELVE = sweep(["memory"], [1, 5, 10, 20], [0.003, 0.01, 0.03], [0])
DEFAULT = TrainOptions().variants()  # twelve too: four each of head, memory and adapter


def vit_tiny() -> Backbone:
    if PRETRAINED.is_dir():
        return load_backbone(PRETRAINED)
    torch.manual_seed(0)
    config = ViTConfig(
        hidden_size=192, num_hidden_layers=12, num_attention_heads=3, intermediate_size=768
    )
    with tempfile.TemporaryDirectory() as folder:
        ViTModel(config).save_pretrained(folder)
        return load_backbone(folder)


def write_pictures(folder: Path, count: int) -> list[Path]:
    """Smooth random pictures as JPEG, of the size of a usual thumbnail."""
    rng = np.random.default_rng(0)
    paths = []
    for number in range(count):
        coarse = Image.fromarray(rng.integers(0, 256, (8, 10, 3), dtype=np.uint8))
        file = io.BytesIO()
        coarse.resize((340, 256), Image.Resampling.BICUBIC).save(file, "JPEG")
        paths.append(folder / f"{number}.jpg")
        paths[-1].write_bytes(file.getvalue())
    return paths


class Step:
    """One step of training, on augmented pixels or on kept contexts."""

    def __init__(self, backbone: Backbone, variants: Variants, targets: Tensor) -> None:
        self._backbone = backbone
        self._variants = variants
        self._targets = targets

    def cold(self, images: ImageSet) -> None:
        pixels = images.augmented_batch(range(BATCH), "inception", [0])
        self._learn(lambda: encode(self._backbone, pixels))

    def decoded(self, images: ImageSet) -> None:
        """As the first epoch of kept contexts: the server's view, encoded."""
        self._learn(lambda: encode(self._backbone, images.batch(range(BATCH))))

    def warm(self, kept: KeptContexts) -> None:
        self._learn(lambda: kept.batch(list(range(BATCH)))[0])

    def _learn(self, contexts: Callable[[], ContextBatch]) -> None:
        found = contexts()
        logits = answers(self._backbone, found, list(self._variants.tasks().values()))
        loss = mean_losses(logits, self._targets, "single_label").sum()
        torch.autograd.backward(loss)
        self._variants.step(0.1)


class DenseStep:
    """The public reproduction's way: one masked sequence, and autograd through all of its rows."""

    def __init__(self, backbone: Backbone, variants: Variants, targets: Tensor) -> None:
        self._backbone = backbone
        self._targets = targets
        start = variants.weights(0)
        assert start.class_token is not None
        assert start.memory is not None
        self._head = start.head_weight.requires_grad_()
        self._token = start.class_token.requires_grad_()
        self._memory = start.memory.requires_grad_()
        parameters = [self._head, self._token, self._memory]
        self._optimiser = torch.optim.SGD(parameters, lr=0.001, momentum=0.9)
        tokens = backbone.geometry.tokens
        mask = torch.zeros(tokens + 1, tokens + 1 + start.memory.shape[1])
        mask[:tokens, tokens:] = -torch.inf
        self._mask = mask

    def __call__(self, images: ImageSet) -> None:
        pixels = images.augmented_batch(range(BATCH), "inception", [0])
        view = self._backbone.preprocessing.normalise(pixels)
        loss = F.cross_entropy(self._forward(view), self._targets)
        self._optimiser.zero_grad()
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_([self._head, self._token, self._memory], 1.0)
        self._optimiser.step()

    def _forward(self, view: Tensor) -> Tensor:
        backbone = self._backbone
        own = backbone.embed_class_token(self._token).expand(len(view), 1, -1)
        rows = torch.cat([backbone.embed_images(view), own], dim=1)
        rows = dense_layers(backbone, rows, self._memory, self._mask)
        return F.linear(backbone.final_norm(rows[:, -1]), self._head)


def measure(seconds: float) -> dict[str, float]:
    backbone = vit_tiny()
    targets = torch.arange(BATCH) % CLASSES
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        scratch = stack.enter_context(closing(Scratch(2**30)))
        pool = stack.enter_context(ThreadPoolExecutor(1))
        paths = write_pictures(folder, BATCH)
        sources = ImageSet(paths, backbone.preprocessing, scratch, sources=True)
        views = ImageSet(paths, backbone.preprocessing, scratch)
        undecoded = ImageSet(paths, backbone.preprocessing, scratch)
        for images in (sources, views):
            images.read_all(pool)
        kept = KeptContexts(backbone, views, scratch, rows=True)
        kept.fill(BATCH)
        one = Step(backbone, Variants(backbone, ONE, CLASSES), targets)
        twelve = Step(backbone, Variants(backbone, TWELVE, CLASSES), targets)
        mixed = Step(backbone, Variants(backbone, DEFAULT, CLASSES), targets)
        dense = DenseStep(backbone, Variants(backbone, ONE, CLASSES), targets)
        contenders = {
            "1 variant, augmented": partial(one.cold, sources),
            "12 variants, augmented": partial(twelve.cold, sources),
            "4 of each regime, augmented": partial(mixed.cold, sources),
            "1 variant, dense mask": partial(dense, sources),
            "1 variant, first epoch": partial(one.decoded, undecoded),
            "1 variant, kept contexts": partial(one.warm, kept),
            "12 variants, first epoch": partial(twelve.decoded, undecoded),
            "12 variants, kept contexts": partial(twelve.warm, kept),
        }
        return medians(contenders, seconds=seconds)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="less time, less certain figures")
    times = measure(20.0 if parser.parse_args().quick else 180.0)
    ratios = {
        "12 variants over 1": ("12 variants, augmented", "1 variant, augmented"),
        "4 of each regime over 1": ("4 of each regime, augmented", "1 variant, augmented"),
        "dense mask over ours": ("1 variant, dense mask", "1 variant, augmented"),
        "first epoch over kept": ("1 variant, first epoch", "1 variant, kept contexts"),
        "the same of 12": ("12 variants, first epoch", "12 variants, kept contexts"),
    }
    found: dict[str, object] = {name: times[a] / times[b] for name, (a, b) in ratios.items()}
    console = Console()
    for name, seconds in times.items():
        console.print(f"{name:28} {1000 * seconds:8.0f} ms a step of {BATCH} images")
    for name, ratio in found.items():
        console.print(f"{name:28} {ratio:8.2f}×")
    rows = [{"backbone": "ViT-Ti/16", "batch": BATCH, "milliseconds": times, **found}]
    console.print(f"written to {write_results('training', rows).name}")


if __name__ == "__main__":
    main()
