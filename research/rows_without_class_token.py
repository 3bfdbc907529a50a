"""Where a task's row belongs on a backbone without a class token: in all layers, or in the last.

    python -m research.rows_without_class_token --sets flowers,counting --seeds 2

SigLIP has no class token but a block that pools its final rows. A task's row could go through all
layers, as in other families, or be in that block alone, with a context of one layer. Weights of
SigLIP are not at hand. The ViT-Ti of the server stands in: its class token is dropped, its mean
patch is read, and its last layer stands for the pooling block, into which a row comes as the mean
class token does, as a trained probe would. That layer has learned to gather for a class token, so
the stand-in favours the row in the last layer.

Rows have memory and an adapter, and start from the head that is solved from what they read then.
"""

import argparse
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from research.accuracy import BATCH, EPOCHS, SHARED, Cell, read_images
from research.accuracy_sets import collections
from research.paper_images import SPLITS, Images, Split
from server import embedded
from server.model import Backbone, ContextBatch, TaskWeights, load_backbone
from server.model.adapters import LowRank, map_sizes
from server.model.closed_form import solve_discriminant
from server.model.masked_pass import encode, masked_pass
from server.model.tasks import StackCache, prepare
from training.fitting.variants import SolvedHead

RATES = (0.001, 0.003)
CELLS = 10
RANK = 8

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

    def __init__(self, backbone: Backbone, token: Tensor, head: SolvedHead) -> None:
        generator = torch.Generator().manual_seed(0)

        def drawn(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator)

        layers, width = backbone.layers, backbone.width
        self._backbone = backbone
        adapter = {
            name: LowRank(drawn(layers, into, RANK) * into**-0.5, torch.zeros(layers, RANK, out))
            for name, (into, out) in map_sizes(backbone).items()
        }
        weight, bias, token = head.weight.clone(), head.bias.clone(), token.clone()
        memory = 0.02 * drawn(layers, CELLS, width)
        self._weights = TaskWeights(weight, bias, token, memory, adapter=adapter)
        self._learned = [weight, bias, token, memory]
        self._learned += [part for change in adapter.values() for part in change]

    def learn(self, contexts: ContextBatch, targets: Tensor, rate: float) -> None:
        for tensor in self._learned:
            tensor.requires_grad_()
        optimiser = torch.optim.AdamW(self._learned, lr=rate, weight_decay=0.01)
        steps = EPOCHS * -(-len(targets) // BATCH)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, steps)
        for epoch in range(EPOCHS):
            order = torch.randperm(len(targets), generator=torch.Generator().manual_seed(epoch))
            for start in range(0, len(order), BATCH):
                places = order[start : start + BATCH]
                loss = F.cross_entropy(
                    logits_of(self._backbone, self._weights, contexts, places.tolist()),
                    targets[places],
                )
                optimiser.zero_grad()
                torch.autograd.backward(loss)
                optimiser.step()
                schedule.step()

    @torch.no_grad()
    def accuracy(self, contexts: ContextBatch, targets: Tensor) -> float:
        answers = answers_of(self._backbone, self._weights, contexts)
        return float((answers.argmax(dim=1) == targets).double().mean())


def answers_of(backbone: Backbone, weights: TaskWeights, contexts: ContextBatch) -> Tensor:
    """A task's logits of all images, (n, K)."""
    places = range(len(contexts))
    with torch.no_grad():
        return torch.cat(
            [
                logits_of(backbone, weights, contexts, places[start : start + BATCH])
                for start in range(0, len(places), BATCH)
            ]
        )


def logits_of(
    backbone: Backbone, weights: TaskWeights, contexts: ContextBatch, places: Sequence[int]
) -> Tensor:
    some = contexts.pick(places)
    warm = ContextBatch(tuple(layer.float() for layer in some.states), some.readout)
    task = prepare(backbone, weights)
    result = masked_pass(backbone, None, warm, [[task]] * len(places), StackCache())
    return result.logits[0].values


def solved(features: Tensor, targets: Tensor) -> SolvedHead:
    found = solve_discriminant(features.double().numpy(), targets.numpy())
    return SolvedHead(torch.from_numpy(found.weight), torch.from_numpy(found.bias))


def run_cell(cell: Cell, backbone: Backbone) -> None:
    with ExitStack() as stack:
        images = read_images(cell, backbone, stack)
        bare = without_class_token(backbone)
        read: Read = {split: _read(bare, images, split, keep_states=True) for split in SPLITS}
        last: Read = {
            split: ContextBatch(one.states[-1:], one.readout) for split, one in read.items()
        }
        learned = images.targets["train"]
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
        head = solved(read["train"].readout, learned)
        _say(
            cell, "head of the mean patch", images, read["test"].readout @ head.weight.T + head.bias
        )
        for name, (its_backbone, contexts, token) in starts.items():
            untrained = TaskWeights(torch.eye(backbone.width), None, token)
            head = solved(answers_of(its_backbone, untrained, contexts["train"]), learned)
            untrained = TaskWeights(head.weight, head.bias, token)
            _say(
                cell,
                f"{name}, solved",
                images,
                answers_of(its_backbone, untrained, contexts["test"]),
            )
            judged = []
            for rate in RATES:
                learner = Learner(its_backbone, token, head)
                learner.learn(contexts["train"], learned, rate)
                val, test = (
                    learner.accuracy(contexts[split], images.targets[split])
                    for split in ("val", "test")
                )
                judged.append((val, test, rate))
            val, test, rate = max(judged)
            print(f"{cell.name}: {name} {test:.4f} (validation {val:.4f}, rate {rate})", flush=True)


def _say(cell: Cell, what: str, images: Images, answers: Tensor) -> None:
    right = (answers.argmax(dim=1) == images.targets["test"]).double().mean()
    print(f"{cell.name}: {what} {float(right):.4f}", flush=True)


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
