"""Where a task's row belongs on a backbone without a class token: in all layers, or in the last.

    python -m research.rows_without_class_token --sets flowers,counting --seeds 2

SigLIP has no class token but a block that pools its final rows. A task's row could go through all
layers, as in other families, or be in that block alone, with a context of one layer. Weights of
SigLIP are not at hand. The ViT-Ti of the server stands in: its class token is dropped, its mean
patch is read, and its last layer stands for the pooling block, into which a row comes as the mean
class token does, as a trained probe would. That layer has learned to gather for a class token, so
the stand-in favours the row in the last layer.

Rows have memory and an adapter; all start from the solved head of the mean patch.
"""

import argparse
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from research.accuracy import BATCH, CELLS, EPOCHS, RANK, SHARED, Cell, read_images
from research.accuracy_sets import collections
from research.paper_images import SPLITS, Images, Split
from server import embedded
from server.model import Backbone, ContextBatch, TaskWeights, load_backbone
from server.model.adapters import LowRank, map_sizes
from server.model.closed_form import solve_discriminant
from server.model.masked_pass import encode, masked_pass
from server.model.tasks import StackCache, prepare

RATES = (0.0003, 0.001, 0.003)

Read = dict[Split, ContextBatch]


def without_class_token(backbone: Backbone) -> Backbone:
    embedding = replace(backbone.embedding, class_token=None, class_position=None)
    geometry = replace(backbone.geometry, prefix_tokens=0)
    return replace(backbone, embedding=embedding, geometry=geometry, base=None)


def last_layer(backbone: Backbone) -> Backbone:
    geometry = replace(backbone.geometry, layers=1)
    return replace(backbone, blocks=backbone.blocks[-1:], geometry=geometry)


def token_before_last_layer(backbone: Backbone, images: Images) -> Tensor:
    """The mean class token of training images, as it enters the last layer."""
    geometry = replace(backbone.geometry, layers=backbone.layers - 1)
    before = replace(
        backbone,
        blocks=backbone.blocks[:-1],
        geometry=geometry,
        base=None,
        final_norm_weight=None,
        final_norm_bias=None,
    )
    return _read(before, images, "train", keep_states=False).readout.mean(dim=0)


def _read(backbone: Backbone, images: Images, split: Split, *, keep_states: bool) -> ContextBatch:
    parts = []
    for start in range(0, len(images.sets[split]), BATCH):
        places = range(start, min(start + BATCH, len(images.sets[split])))
        pixels = images.sets[split].batch(places)
        batch = encode(backbone, backbone.preprocessing.normalise(pixels, backbone.dtype))
        states = tuple(layer.half() for layer in batch.states) if keep_states else ()
        parts.append(ContextBatch(states, batch.readout))
    layers = len(parts[0].states)
    return ContextBatch(
        tuple(torch.cat([part.states[layer] for part in parts], dim=1) for layer in range(layers)),
        torch.cat([part.readout for part in parts]),
    )


class Learner:
    """One task with a row, on contexts."""

    def __init__(self, backbone: Backbone, token: Tensor, head: tuple[Tensor, Tensor]) -> None:
        generator = torch.Generator().manual_seed(0)

        def drawn(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator)

        layers, width = backbone.layers, backbone.width
        self._backbone = backbone
        adapter = {
            name: LowRank(drawn(layers, into, RANK) * into**-0.5, torch.zeros(layers, RANK, out))
            for name, (into, out) in map_sizes(backbone).items()
        }
        weight, bias = (part.clone() for part in head)
        memory = 0.02 * drawn(layers, CELLS, width)
        self._weights = TaskWeights(weight, bias, token.clone(), memory, adapter=adapter)
        self._learned = [weight, bias, self._weights.class_token, memory]
        self._learned += [part for change in adapter.values() for part in change]

    def learn(self, contexts: ContextBatch, targets: Tensor, rate: float) -> None:
        for tensor in self._learned:
            tensor.requires_grad_()
        optimiser = torch.optim.AdamW(self._learned, lr=rate, weight_decay=0.01)
        steps = EPOCHS * -(-len(targets) // BATCH)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, steps)
        for epoch in range(EPOCHS):
            order = torch.randperm(len(targets), generator=torch.Generator().manual_seed(epoch))
            for places in order.split(BATCH):
                loss = F.cross_entropy(self._logits(contexts, places.tolist()), targets[places])
                optimiser.zero_grad()
                loss.backward()
                optimiser.step()
                schedule.step()

    @torch.no_grad()
    def accuracy(self, contexts: ContextBatch, targets: Tensor) -> float:
        found = [
            self._logits(contexts, places.tolist()).argmax(dim=1)
            for places in torch.arange(len(targets)).split(BATCH)
        ]
        return float((torch.cat(found) == targets).double().mean())

    def _logits(self, contexts: ContextBatch, places: list[int]) -> Tensor:
        some = contexts.pick(places)
        warm = ContextBatch(tuple(layer.float() for layer in some.states), some.readout)
        task = prepare(self._backbone, self._weights)
        result = masked_pass(self._backbone, None, warm, [[task]] * len(places), StackCache())
        return result.logits[0].values


def solved(contexts: ContextBatch, targets: Tensor) -> tuple[Tensor, Tensor]:
    found = solve_discriminant(contexts.readout.double().numpy(), targets.numpy())
    return torch.from_numpy(found.weight).float(), torch.from_numpy(found.bias).float()


def run_cell(cell: Cell, backbone: Backbone) -> None:
    with ExitStack() as stack:
        images = read_images(cell, backbone, stack)
        bare = without_class_token(backbone)
        read: Read = {split: _read(bare, images, split, keep_states=True) for split in SPLITS}
        last: Read = {
            split: ContextBatch(one.states[-1:], one.readout) for split, one in read.items()
        }
        head = solved(read["train"], images.targets["train"])
        own = backbone.embedding
        assert own.class_token is not None
        assert own.class_position is not None
        starts = {
            "all layers, from an average patch": (bare, read, bare.first_token),
            "all layers, from the class token": (bare, read, own.class_token + own.class_position),
            "last layer, from the mean class token": (
                last_layer(bare),
                last,
                token_before_last_layer(backbone, images),
            ),
        }
        answers = read["test"].readout @ head[0].T + head[1]
        right = float((answers.argmax(dim=1) == images.targets["test"]).double().mean())
        print(f"{cell.name}: head of the mean patch {right:.4f}", flush=True)
        for name, (its_backbone, contexts, token) in starts.items():
            judged = []
            for rate in RATES:
                learner = Learner(its_backbone, token, head)
                learner.learn(contexts["train"], images.targets["train"], rate)
                val, test = (
                    learner.accuracy(contexts[split], images.targets[split])
                    for split in ("val", "test")
                )
                judged.append((val, test, rate))
            val, test, rate = max(judged)
            print(f"{cell.name}: {name} {test:.4f} (validation {val:.4f}, rate {rate})", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--backbone", type=Path, default=embedded.BACKBONE)
    parser.add_argument("--sets", default="flowers,counting")
    parser.add_argument("--seeds", type=int, default=1)
    given = parser.parse_args()
    backbone, known = load_backbone(given.backbone), collections(SHARED, None)
    for seed in range(given.seeds):
        for name in given.sets.split(","):
            run_cell(Cell(known[name], known[name].sizes, seed, "frozen"), backbone)


if __name__ == "__main__":
    main()
