"""Where a task's row belongs on a backbone without a class token: in all layers, or at the end.

    python -m research.rows_without_class_token --sets flowers,leaves,counting --seeds 0,1
    python -m research.rows_without_class_token --table     # of what is there already

SigLIP has no class token but a block that pools its final rows with a probe. A task's row could
go (a) through all layers, as in other families, or (b) be in that block alone, with a probe, memory
and an adapter of its own, and a context of one layer. Both are compared with heads of what the
backbone gives anyway, on a stand-in (`research.pooled_stand_in`). Every method is tuned on
validation images; results are JSON files below research/results/rows.
"""

import argparse
import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from research.accuracy import BATCH, EPOCHS, REPOSITORY, SHARED, Cell, judged, read_images
from research.accuracy_page import Difference, rank
from research.accuracy_sets import Sizes, collections
from research.comparison import final_rows
from research.paper_images import SPLITS, Images, Split
from research.pooled_stand_in import stand_in
from server import embedded
from server.model import Backbone, ContextBatch, TaskWeights, load_backbone
from server.model.adapters import AdaptedMap, LowRank, map_sizes
from server.model.backbone import ACTIVATIONS
from server.model.closed_form import solve_discriminant
from server.model.masked_pass import masked_pass
from server.model.readout import pool
from server.model.tasks import StackCache, prepare
from training.bundles import write_whole
from training.fitting.variants import (
    CLIP_NORM,
    DECAY,
    HEAD_RATE,
    MEMORY_SPREAD,
    SolvedHead,
    rate_factor,
)

RESULTS = REPOSITORY / "research" / "results" / "rows"
CELLS, RANK = 10, 8
DEEP_RATES, POOLED_RATES = (0.001, 0.003), (0.001, 0.003, 0.01)
# Fewer images than in the accuracy study: it is two ways of doing it that are compared.
SIZES: Final = {
    "flowers": Sizes(51, 5, 3, 8),
    "leaves": Sizes(38, 8, 3, 8),
    "counting": Sizes(8, 40, 20, 50),
}
METHODS: Final = (
    "head on pooled",
    "head on mean",
    "(a) from an average patch",
    "(a) from the probe",
    "(a)",
    "(b)",
)

Run = dict[str, Any]
Answer = Callable[[Split, Sequence[int]], list[Tensor]]  # logits (n, K) of every variant
Kind = Callable[[Backbone, Mapping[Split, "Encoded"], Sequence[TaskWeights]], Answer]


@dataclass(frozen=True, slots=True)
class Encoded:
    """What the backbone made of the images of one split."""

    states: tuple[Tensor, ...]  # per layer (2, n, H, S, d), in half precision
    pooled_states: Tensor  # (2, n, H, S, d): keys and values of the pooling block
    pooled: Tensor  # (n, D)
    mean: Tensor  # (n, D)


@torch.no_grad()
def encode_all(backbone: Backbone, images: Images, split: Split) -> Encoded:
    nothing = prepare(backbone, TaskWeights(torch.zeros(1, backbone.width)))
    pooling, geometry = backbone.pooling, backbone.geometry
    assert pooling is not None
    width = backbone.width
    layers: list[list[Tensor]] = []
    parts: list[tuple[Tensor, Tensor, Tensor]] = []
    count = len(images.sets[split])
    for start in range(0, count, BATCH):
        pixels = images.sets[split].batch(range(start, min(start + BATCH, count)))
        states: list[Tensor] = []
        view = backbone.preprocessing.normalise(pixels, backbone.dtype)
        rows = final_rows(backbone, view, nothing, states)
        layers.append([one.half() for one in states])
        both = F.linear(rows, pooling.qkv_weight[width:], pooling.qkv_bias[width:])
        both = both.view(*rows.shape[:2], 2, geometry.heads, -1).permute(2, 0, 3, 1, 4)
        parts.append((both, pool(pooling, geometry, rows)[0], rows.mean(dim=1)))
    return Encoded(
        tuple(torch.cat(layer, dim=1) for layer in zip(*layers, strict=True)),
        torch.cat([both for both, _, _ in parts], dim=1),
        torch.cat([pooled for _, pooled, _ in parts]),
        torch.cat([mean for _, _, mean in parts]),
    )


@dataclass(frozen=True, slots=True)
class Variant:
    """One candidate: its numbers, and how fast they learn."""

    method: str
    detail: str
    weights: TaskWeights  # of (b) with one layer, the pooling block
    rate: float

    @property
    def groups(self) -> list[dict[str, Any]]:
        """As the product's trainer does it: the head at a rate of its own."""
        one = self.weights
        assert one.head_bias is not None
        assert one.class_token is not None
        assert one.memory is not None
        rest = [one.class_token, one.memory]
        rest += [part for change in one.adapter.values() for part in change]
        return [
            {"params": [one.head_weight, one.head_bias], "lr": HEAD_RATE},
            {"params": rest, "lr": self.rate},
        ]


def new_variant(
    backbone: Backbone, method: str, layers: int, token: Tensor, head: SolvedHead, rate: float
) -> Variant:
    generator = torch.Generator().manual_seed(0)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    adapter = {
        name: LowRank(drawn(layers, into, RANK) * into**-0.5, torch.zeros(layers, RANK, out))
        for name, (into, out) in map_sizes(backbone).items()
    }
    weights = TaskWeights(
        head.weight.clone(),
        head.bias.clone(),
        token.clone(),
        MEMORY_SPREAD * drawn(layers, CELLS, backbone.width),
        adapter=adapter,
    )
    start = "solved" if head.weight.any() else "zero"
    variant = Variant(method, f"head {start}, rate {rate:g}", weights, rate)
    for group in variant.groups:
        for tensor in group["params"]:
            tensor.requires_grad_()
    return variant


def deep_answers(
    backbone: Backbone, encoded: Mapping[Split, Encoded], weights: Sequence[TaskWeights]
) -> Answer:
    """(a): rows that go through all layers, all in one pass."""

    def answer(split: Split, places: Sequence[int]) -> list[Tensor]:
        of = encoded[split]
        chosen = list(places)
        states = tuple(layer[:, chosen].float() for layer in of.states)
        tasks = [prepare(backbone, one) for one in weights]
        warm = ContextBatch(states, of.pooled[chosen])
        result = masked_pass(backbone, None, warm, [tasks] * len(chosen), StackCache())
        found = {id(one.task): one.values for one in result.logits}
        return [found[id(task)] for task in tasks]

    return answer


def pooled_answers(
    backbone: Backbone, encoded: Mapping[Split, Encoded], weights: Sequence[TaskWeights]
) -> Answer:
    """(b): rows that are in the pooling block alone."""

    def answer(split: Split, places: Sequence[int]) -> list[Tensor]:
        keys, values = encoded[split].pooled_states[:, list(places)]
        return [_pooled_row(backbone, one, keys, values) for one in weights]

    return answer


def _pooled_row(backbone: Backbone, one: TaskWeights, keys: Tensor, values: Tensor) -> Tensor:
    pooling, geometry = backbone.pooling, backbone.geometry
    assert pooling is not None
    assert one.class_token is not None
    assert one.memory is not None
    width, heads = backbone.width, geometry.heads

    def changed(name: AdaptedMap, rows: Tensor, made: Tensor) -> Tensor:
        a, b = one.adapter[name]
        return made + rows @ a[0] @ b[0]

    probe, weight, bias = one.class_token, pooling.qkv_weight, pooling.qkv_bias
    query = changed("query", probe, F.linear(probe, weight[:width], bias[:width]))
    own = F.linear(one.memory[0], weight[width:], bias[width:])
    own = (
        own.view(CELLS, 2, heads, -1).permute(1, 2, 0, 3)[:, None].expand(-1, len(keys), *[-1] * 3)
    )
    taken = F.scaled_dot_product_attention(
        query.view(1, heads, 1, -1).expand(len(keys), -1, -1, -1),
        torch.cat([keys, own[0]], dim=2),
        torch.cat([values, own[1]], dim=2),
    ).flatten(1)
    mixed = changed("output", taken, F.linear(taken, pooling.out_weight, pooling.out_bias))
    normed = geometry.norm(mixed, pooling.norm_weight, pooling.norm_bias)
    raised = changed("up", normed, F.linear(normed, pooling.up_weight, pooling.up_bias))
    hidden = ACTIVATIONS[geometry.activation](raised)
    lowered = changed("down", hidden, F.linear(hidden, pooling.down_weight, pooling.down_bias))
    return F.linear(mixed + lowered, one.head_weight, one.head_bias)


def learn(variants: Sequence[Variant], answer: Answer, targets: Tensor, seed: int) -> None:
    """By the product's recipe; every variant as if it were alone."""
    groups = [group for variant in variants for group in variant.groups]
    optimiser = torch.optim.AdamW(groups, weight_decay=DECAY)
    steps = EPOCHS * -(-len(targets) // BATCH)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimiser, lambda step: rate_factor(step, steps))
    for epoch in range(EPOCHS):
        generator = torch.Generator().manual_seed(1000 * seed + epoch)
        order = torch.randperm(len(targets), generator=generator)
        for places in torch.split(order, BATCH):
            losses = [
                F.cross_entropy(logits, targets[places])
                for logits in answer("train", places.tolist())
            ]
            optimiser.zero_grad()
            torch.autograd.backward(torch.stack(losses).sum())
            for variant in variants:
                learned = [one for group in variant.groups for one in group["params"]]
                torch.nn.utils.clip_grad_norm_(learned, CLIP_NORM)
            optimiser.step()
            schedule.step()


@torch.no_grad()
def answers(answer: Answer, split: Split, count: int) -> list[Tensor]:
    """Logits (n, K) of every variant, of all images."""
    parts = [
        answer(split, range(start, min(start + BATCH, count))) for start in range(0, count, BATCH)
    ]
    return [torch.cat(of) for of in zip(*parts, strict=True)]


def solved(features: Tensor, targets: Tensor) -> SolvedHead:
    found = solve_discriminant(features.double().numpy(), targets.numpy())
    return SolvedHead(torch.from_numpy(found.weight), torch.from_numpy(found.bias))


def train_rows(
    backbone: Backbone, images: Images, encoded: Mapping[Split, Encoded], seed: int
) -> list[Run]:
    pooling = backbone.pooling
    assert pooling is not None
    deep = {
        "(a) from an average patch": backbone.first_token,
        "(a) from the probe": pooling.probe,
    }
    kinds: list[tuple[Kind, int, Mapping[str, Tensor], Sequence[float]]] = [
        (deep_answers, backbone.layers, deep, DEEP_RATES),
        (pooled_answers, 1, {"(b)": pooling.probe}, POOLED_RATES),
    ]
    runs = []
    for kind, layers, tokens, rates in kinds:
        variants = [
            new_variant(backbone, method, layers, token, head, rate)
            for method, token in tokens.items()
            for head in first_heads(backbone, images, encoded, kind, layers, token)
            for rate in rates
        ]
        answer = kind(backbone, encoded, [one.weights for one in variants])
        learn(variants, answer, images.targets["train"], seed)
        val, test = (answers(answer, split, len(images.sets[split])) for split in ("val", "test"))
        for place, variant in enumerate(variants):
            runs.append(judged(images, variant.method, variant.detail, val[place], test[place]))
    return runs


def first_heads(
    backbone: Backbone,
    images: Images,
    encoded: Mapping[Split, Encoded],
    kind: Kind,
    layers: int,
    token: Tensor,
) -> list[SolvedHead]:
    """Zero, and what is solved from what the row reads before it has learned anything."""
    width, targets = backbone.width, images.targets["train"]
    none = SolvedHead(torch.zeros(width, width), torch.zeros(width))
    reader = new_variant(backbone, "", layers, token, none, 0.0).weights
    reader.head_weight.data.copy_(torch.eye(width))
    read = answers(kind(backbone, encoded, [reader]), "train", len(targets))[0]
    zero = SolvedHead(torch.zeros(images.classes, width), torch.zeros(images.classes))
    return [zero, solved(read, targets)]


def run_cell(cell: Cell, backbone: Backbone) -> None:
    with ExitStack() as stack:
        images = read_images(cell, backbone, stack)
        encoded = {split: encode_all(backbone, images, split) for split in SPLITS}
        runs = []
        for part in ("pooled", "mean"):
            rows = {split: getattr(of, part) for split, of in encoded.items()}
            head = solved(rows["train"], images.targets["train"])
            val, test = (rows[split] @ head.weight.T + head.bias for split in ("val", "test"))
            runs.append(judged(images, f"head on {part}", "solved", val, test))
        runs += train_rows(backbone, images, encoded, cell.seed)
        result = {"set": cell.collection.name, "seed": cell.seed, "runs": runs}
        result["images"] = {split: len(images.sets[split]) for split in SPLITS}
    path = RESULTS / f"{cell.collection.name}-{cell.seed}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, json.dumps(result, indent=1).encode())
    for method in METHODS:
        print(cell.name, method, f"{100 * _right(result, method).mean():.1f}", flush=True)


def _right(result: Mapping[str, Any], method: str) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Of every test image whether the candidate that validated best was right."""
    best = max((run for run in result["runs"] if run["method"].startswith(method)), key=rank)
    packed = np.frombuffer(bytes.fromhex(best["test"]), dtype=np.uint8)
    return np.unpackbits(packed, count=result["images"]["test"]).astype(np.float64)


def table() -> str:
    """Accuracy of each method, and what (b) is over (a), in pairs over all seeds."""
    results = [json.loads(path.read_text()) for path in sorted(RESULTS.glob("*.json"))]
    lines = [f"| set | {' | '.join(METHODS)} | (a) over head | (b) over head | (b) over (a) |"]
    lines.append("|---|" + "---:|" * (len(METHODS) + 3))
    for name in sorted({result["set"] for result in results}):
        of = [result for result in results if result["set"] == name]
        right = {m: np.concatenate([_right(one, m) for one in of]) for m in METHODS}
        shown = [f"{100 * right[method].mean():.1f}" for method in METHODS]
        for one, other in (("(a)", METHODS[0]), ("(b)", METHODS[0]), ("(b)", "(a)")):
            shown.append(str(Difference.of(right[one], right[other])))
        lines.append(f"| {name} | {' | '.join(shown)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--backbone", type=Path, default=embedded.BACKBONE)
    parser.add_argument(
        "--stand-in", type=Path, default=REPOSITORY / "build" / "pooled.safetensors"
    )
    parser.add_argument("--sets", default=",".join(SIZES))
    parser.add_argument("--seeds", default="0,1")
    parser.add_argument("--table", action="store_true", help="only print the table")
    given = parser.parse_args()
    if not given.table:
        known = collections(SHARED, None)
        backbone = stand_in(load_backbone(given.backbone), SHARED / "datasets", given.stand_in)
        for seed in map(int, given.seeds.split(",")):
            for name in given.sets.split(","):
                run_cell(Cell(known[name], SIZES[name], seed, "frozen"), backbone)
    print(table())


if __name__ == "__main__":
    main()
