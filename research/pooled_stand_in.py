"""A stand-in for SigLIP: an encoder without a class token whose final rows a probe pools.

Weights of SigLIP are not at hand. The ViT-Ti of the server loses its class token; its last two
layers and a pooling block as SigLIP has it are trained to give, pooled, what the whole model's
class token gave: its final row, and the answers of its head for ImageNet. So the probe, the block
and the final rows have learned to work together from real photos, as SigLIP's have. The photos are
training images of three sets; no label of theirs is read.
"""

import math
import tarfile
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import fields, replace
from pathlib import Path
from typing import Final

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor

from research.comparison import final_rows
from research.paper_images import list_images
from server.model import Backbone, TaskWeights
from server.model.backbone import ACTIVATIONS, Geometry, Layer, Pooling
from server.model.linear import plain
from server.model.readout import pool
from server.model.tasks import prepare
from training.data.images import ImageSet
from training.data.workspace import Scratch

PHOTOS: Final = {"cifar100.tar": 3000, "flowers102.tar": 1200, "plants.tar": 600}
TUNED_LAYERS: Final = 2
EPOCHS: Final = 8
BATCH: Final = 32
RATE, LAYERS_RATE = 1e-3, 2e-4
KEEP_BYTES = 2**30


def stand_in(backbone: Backbone, datasets: Path, kept: Path) -> Backbone:
    """Trained, or as an earlier run left it in the file `kept`."""
    if not kept.exists():
        kept.parent.mkdir(parents=True, exist_ok=True)
        save_file(_train(backbone, datasets), kept)
    return _built(without_class_token(backbone), load_file(kept))


def without_class_token(backbone: Backbone) -> Backbone:
    embedding = replace(backbone.embedding, class_token=None, class_position=None)
    geometry = replace(backbone.geometry, prefix_tokens=0)
    return replace(backbone, embedding=embedding, geometry=geometry, base=None)


def _train(backbone: Backbone, datasets: Path) -> dict[str, Tensor]:
    rows, wanted = _read(backbone, datasets)
    bare = without_class_token(backbone)
    numbers = _first_numbers(bare)
    groups = [
        {"params": [numbers[name] for name in numbers if _is_new(name)], "lr": RATE},
        {"params": [numbers[name] for name in numbers if not _is_new(name)], "lr": LAYERS_RATE},
    ]
    optimiser = torch.optim.AdamW(groups, weight_decay=0.01)
    steps = EPOCHS * -(-len(rows) // BATCH)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimiser, [RATE, LAYERS_RATE], total_steps=steps, pct_start=0.1
    )
    assert backbone.base is not None
    spread = wanted.var(dim=0).mean()
    for epoch in range(EPOCHS):
        started, told = time.perf_counter(), 0.0
        order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(epoch))
        for places in torch.split(order, BATCH):
            pooled = _pooled(_built(bare, numbers), rows[places].float())
            teacher = wanted[places]
            head = backbone.base.weight
            answers = F.log_softmax(F.linear(pooled, head, backbone.base.bias), dim=-1)
            asked = F.softmax(F.linear(teacher, head, backbone.base.bias), dim=-1)
            apart = F.mse_loss(pooled, teacher) / spread
            loss = apart + F.kl_div(answers, asked, reduction="batchmean")
            optimiser.zero_grad()
            torch.autograd.backward(loss)
            optimiser.step()
            schedule.step()
            told += float(apart.detach()) * len(places) / len(rows)
        took = time.perf_counter() - started
        print(f"stand-in, epoch {epoch}: {told:.3f} of the variance, {took:.0f} s", flush=True)
    return {name: tensor.detach().contiguous() for name, tensor in numbers.items()}


def _is_new(name: str) -> bool:
    return name.startswith("pooling.")


def _first_numbers(bare: Backbone) -> dict[str, Tensor]:
    """The layers that are tuned, as they are, and a new pooling block."""
    width, first = bare.width, bare.layers - TUNED_LAYERS
    hidden = bare.blocks[0].down_weight.shape[1]
    generator = torch.Generator().manual_seed(0)

    def drawn(out: int, into: int) -> Tensor:
        return torch.randn(out, into, generator=generator) / math.sqrt(into)

    new = Pooling(
        probe=torch.randn(width, generator=generator),
        qkv_weight=drawn(3 * width, width),
        qkv_bias=torch.zeros(3 * width),
        out_weight=drawn(width, width),
        out_bias=torch.zeros(width),
        norm_weight=torch.ones(width),
        norm_bias=torch.zeros(width),
        up_weight=drawn(hidden, width),
        up_bias=torch.zeros(hidden),
        down_weight=drawn(width, hidden),
        down_bias=torch.zeros(width),
    )
    assert bare.final_norm_weight is not None
    assert bare.final_norm_bias is not None
    numbers = {"norm.weight": bare.final_norm_weight, "norm.bias": bare.final_norm_bias}
    numbers |= {f"pooling.{each.name}": getattr(new, each.name) for each in fields(new)}
    for index in range(first, bare.layers):
        block = bare.blocks[index]
        numbers |= {f"{index}.{one.name}": plain(getattr(block, one.name)) for one in fields(block)}
    return {name: tensor.clone().requires_grad_() for name, tensor in numbers.items()}


def _built(bare: Backbone, numbers: dict[str, Tensor]) -> Backbone:
    first = bare.layers - TUNED_LAYERS
    tuned = [
        Layer(**{each.name: numbers[f"{index}.{each.name}"] for each in fields(Layer)})
        for index in range(first, bare.layers)
    ]
    return replace(
        bare,
        blocks=(*bare.blocks[:first], *tuned),
        final_norm_weight=numbers["norm.weight"],
        final_norm_bias=numbers["norm.bias"],
        pooling=Pooling(**{each.name: numbers[f"pooling.{each.name}"] for each in fields(Pooling)}),
    )


def _pooled(backbone: Backbone, rows: Tensor) -> Tensor:
    """Rows (B, S, D) that enter the tuned layers to the pooled row, (B, D)."""
    for block in backbone.blocks[-TUNED_LAYERS:]:
        rows = _layer(backbone.geometry, block, rows)
    assert backbone.pooling is not None
    return pool(backbone.pooling, backbone.geometry, backbone.final_norm(rows))[0]


def _layer(geometry: Geometry, block: Layer, rows: Tensor) -> Tensor:
    normed = geometry.norm(rows, block.norm1_weight, block.norm1_bias)
    states = F.linear(normed, plain(block.qkv_weight), block.qkv_bias)
    states = states.view(*rows.shape[:2], 3, geometry.heads, geometry.head_width)
    attended = F.scaled_dot_product_attention(*states.permute(2, 0, 3, 1, 4))
    attended = attended.transpose(1, 2).flatten(2)
    rows = rows + F.linear(attended, plain(block.out_weight), block.out_bias)
    normed = geometry.norm(rows, block.norm2_weight, block.norm2_bias)
    hidden = ACTIVATIONS[geometry.activation](
        F.linear(normed, plain(block.up_weight), block.up_bias)
    )
    return rows + F.linear(hidden, plain(block.down_weight), block.down_bias)


@torch.no_grad()
def _read(backbone: Backbone, datasets: Path) -> tuple[Tensor, Tensor]:
    """Rows before the tuned layers, (n, S, D), and the class token of the whole model, (n, D)."""
    bare = without_class_token(backbone)
    below = replace(
        bare, blocks=bare.blocks[:-TUNED_LAYERS], final_norm_weight=None, final_norm_bias=None
    )
    nothing = prepare(backbone, TaskWeights(torch.zeros(1, backbone.width)))
    rows, wanted = [], []
    for pixels in _photos(backbone, datasets):
        view = backbone.preprocessing.normalise(pixels, backbone.dtype)
        rows.append(final_rows(below, view, nothing).half())
        wanted.append(final_rows(backbone, view, nothing)[:, 0])
    return torch.cat(rows), torch.cat(wanted)


def _photos(backbone: Backbone, datasets: Path) -> Iterator[Tensor]:
    """Training images of the archives, in batches."""
    for archive, most in PHOTOS.items():
        names = [name for of in list_images(datasets / archive)["train"].values() for name in of]
        order = np.random.default_rng(0).permutation(len(names))[:most]
        yield from _batches(backbone, datasets / archive, [names[place] for place in order])


def _batches(backbone: Backbone, archive: Path, names: Sequence[str]) -> Iterator[Tensor]:
    with (
        tempfile.TemporaryDirectory() as folder,
        closing(Scratch(KEEP_BYTES)) as scratch,
        ThreadPoolExecutor(1) as threads,
    ):
        chosen = set(names)
        with tarfile.open(archive) as tar:
            tar.extractall(folder, [one for one in tar if one.name in chosen], filter="data")
        images = ImageSet([Path(folder, name) for name in names], backbone.preprocessing, scratch)
        if bad := images.read_all(threads):
            raise SystemExit(f"'{bad[0].path.name}' in '{archive}': {bad[0].reason}")
        for start in range(0, len(names), BATCH):
            yield images.batch(range(start, min(start + BATCH, len(names))))
