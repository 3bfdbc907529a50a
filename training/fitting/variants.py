"""Variants: candidates for one task, trained as tasks of the same pass.

Each has a regime (what is learned), a memory size or a rank, a learning rate and a seed, and each
is trained as if alone: its own start, its own clipping, its own momentum, its own rate. Variants of
one shape lie in the same tensors, so that a dozen cost a handful of small operations more than one.

Shapes: V variants of a group, L layers, m memory tokens, r rank of an adapter, D width, K outputs.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, Literal, NamedTuple, get_args

import torch
from torch import Tensor

from server.model import Backbone, TaskWeights
from server.model.adapters import ADAPTED_MAPS, Adapter, LowRank, map_sizes
from server.model.tasks import Task, prepare
from task_store.limits import DEFAULT_LIMITS
from training.data.dataset import Problem
from training.errors import SettingsConflict

Regime = Literal["head", "class", "memory", "adapter", "memory+adapter"]
REGIMES: Final[tuple[Regime, ...]] = get_args(Regime)
AUTO_REGIMES: Final[tuple[Regime, ...]] = ("head", "memory", "adapter", "memory+adapter")
# Where a head starts: from zero, or from what is solved without training it.
Start = Literal["zero", "solved"]
STARTS: Final[tuple[Start, ...]] = get_args(Start)
Optimiser = Literal["SGD", "AdamW"]

# The paper's is SGD; adapters were prototyped with AdamW.
OPTIMISERS: Final[Mapping[Regime, Optimiser]] = {
    "head": "SGD",
    "class": "SGD",
    "memory": "AdamW",
    "adapter": "AdamW",
    "memory+adapter": "AdamW",
}
AUTO_RATES: Final[Mapping[Regime, tuple[float, ...]]] = {
    "head": (0.01, 0.1),
    "class": (0.01, 0.1),
    "memory": (0.003, 0.01),
    "adapter": (0.001, 0.003),
    "memory+adapter": (0.003,),
}
# Below a solved head memory and adapters fit training images as well and new ones worse
# (docs/explanation/accuracy.md).
AUTO_STARTS: Final[Mapping[Regime, tuple[Start, ...]]] = {
    "head": ("zero", "solved"),
    "class": ("zero",),
    "memory": ("zero",),
    "adapter": ("zero",),
    "memory+adapter": ("zero",),
}
AUTO_RANKS: Final = (8,)
MAX_RANK: Final = DEFAULT_LIMITS.max_adapter_rank
ADAPTER: Final = "adapter."  # how its tensors are named

MEMORY_SPREAD = 0.02
MOMENTUM = 0.9
CLIP_NORM = 1.0
WARM_UP_STEPS = 5
# AdamW's steps are as long as its rate, whatever the gradient: a head and what is before it need
# different ones, and the head's hardly depends on the data.
HEAD_RATE = 3e-3
BETAS = (0.9, 0.999)
EPSILON = 1e-8
DECAY = 0.01
_SCHEDULE = "clipped at 1.0, 5 steps of warm-up, cosine"
# As manifests have it.
RECIPES: Final[Mapping[Optimiser, str]] = {
    "SGD": f"SGD, momentum 0.9, {_SCHEDULE}",
    "AdamW": f"AdamW, decay 0.01, head at rate 0.003, {_SCHEDULE}",
}


@dataclass(frozen=True, slots=True)
class Variant:
    regime: Regime
    memory: int  # tokens per layer; 0 unless the regime has memory
    rate: float  # 0: the solved head itself
    seed: int
    rank: int = 0  # of the adapter; 0 unless the regime has one
    optimiser: Optimiser = "SGD"
    start: Start = "zero"

    @property
    def name(self) -> str:
        if not self.rate:
            return "solved, not trained"
        sizes = {"memory": self.memory, "adapter": self.rank}
        what = " + ".join(f"{part} {size}" for part, size in sizes.items() if size) or self.regime
        start = ", from the solved head" if self.start == "solved" else ""
        return f"{what}, rate {self.rate:g}, seed {self.seed}{start}"


def sweep(
    regimes: Sequence[Regime],
    memory: Sequence[int],
    rates: Sequence[float] | None,
    seeds: Sequence[int],
    ranks: Sequence[int] = AUTO_RANKS,
    starts: Sequence[Start] | None = ("zero",),
) -> list[Variant]:
    """Every combination that differs; rates and starts that are None are those of each regime.

    Only memory and adapters are drawn: for the others one seed is enough. Unless heads start from
    zero alone, what is solved is itself one more.
    """
    empty = any(given is not None and not given for given in (rates, starts))
    if not regimes or not seeds or empty:
        raise SettingsConflict(
            "give at least one regime, one learning rate, one seed and one start"
        )
    for rate in rates or ():
        if not 0 < rate < math.inf:
            raise SettingsConflict(f"the learning rate {rate:g} is not above zero")
    with_memory = not {"memory", "memory+adapter"}.isdisjoint(regimes)
    if with_memory and (not memory or min(memory) < 1 or max(memory) > 1024):
        raise SettingsConflict(
            "memory sizes are 1 to 1024 tokens per layer; for none use the regime 'class'"
        )
    with_adapter = not {"adapter", "memory+adapter"}.isdisjoint(regimes)
    if with_adapter and (not ranks or min(ranks) < 1 or max(ranks) > MAX_RANK):
        raise SettingsConflict(f"ranks of an adapter are 1 to {MAX_RANK}")
    variants = []
    for regime in dict.fromkeys(regimes):
        optimiser = OPTIMISERS[regime]
        sizes = {
            "memory": [(size, 0) for size in memory],
            "adapter": [(0, rank) for rank in ranks],
            "memory+adapter": [(size, rank) for size in memory for rank in ranks],
        }
        drawn = seeds if regime in sizes else seeds[:1]
        for tokens, rank in sizes.get(regime, [(0, 0)]):
            variants += [
                Variant(regime, tokens, rate, seed, rank, optimiser, start)
                for start in starts or AUTO_STARTS[regime]
                for seed in drawn
                for rate in rates or AUTO_RATES[regime]
            ]
    if starts is None or "solved" in starts:
        variants.append(Variant("head", 0, 0.0, seeds[0], start="solved"))
    return list(dict.fromkeys(variants))


def suited(variants: Sequence[Variant], problem: Problem, extends: bool) -> list[Variant]:
    """Those that make sense: numbers have no solved head, and one alone cannot extend a task."""
    kept = [one for one in variants if one.rate or not (extends or problem == "regression")]
    if problem == "regression":
        kept = [replace(one, start="zero") for one in kept]
    return list(dict.fromkeys(kept))


def need_rows(variants: Sequence[Variant]) -> bool:
    """Whether any has a row of its own; a head alone reads the backbone's."""
    return any(variant.regime != "head" for variant in variants)


def rate_factor(step: int, steps: int) -> float:
    """The share of the learning rate at a step: a linear warm-up, then a cosine to zero."""
    if step < WARM_UP_STEPS:
        return (step + 1) / (WARM_UP_STEPS + 1)
    done = (step - WARM_UP_STEPS) / max(1, steps - WARM_UP_STEPS)
    return 0.5 * (1 + math.cos(math.pi * min(1.0, done)))


class SolvedHead(NamedTuple):
    weight: Tensor  # (K, D)
    bias: Tensor  # (K,)


@dataclass(frozen=True, slots=True)
class _Group:
    """Variants of one shape, and their places in the sweep."""

    name: str
    members: list[int]
    optimiser: Optimiser
    values: dict[str, Tensor]  # by the names of `named_tensors`: head_weight (V, K, D), …
    momentum: dict[str, Tensor]
    squares: dict[str, Tensor]  # AdamW's mean of squared gradients; empty with SGD
    rates: Tensor  # (V,)

    def update(self, name: str, gradient: Tensor, rates: Tensor, step: int) -> None:
        """One parameter of all variants; `rates` (V,) are those of this step."""
        value, momentum = self.values[name], self.momentum[name]
        rates = rates.view(-1, *(1,) * (value.ndim - 1))
        if self.optimiser == "SGD":
            value.sub_(momentum.mul_(MOMENTUM).add_(gradient) * rates)
            return
        (first, second), squares = BETAS, self.squares[name]
        momentum.lerp_(gradient, 1 - first)
        squares.mul_(second).addcmul_(gradient, gradient, value=1 - second)
        spread = (squares / (1 - second**step)).sqrt_().add_(EPSILON)
        value.sub_(rates * (momentum / (1 - first**step) / spread + DECAY * value))


class Variants:
    """The parameters of a sweep, and one optimiser step for all of it."""

    def __init__(
        self,
        backbone: Backbone,
        variants: Sequence[Variant],
        outputs: int,
        *,
        head_bias: Tensor | None = None,
        solved: SolvedHead | None = None,
        solved_row: SolvedHead | None = None,
        parents: Sequence[Task] = (),
    ) -> None:
        """`head_bias` (K,) is where biases start that start from zero, as all else of the heads.

        `solved_row` is solved from what a new row reads; left out, that is what a head alone reads.
        """
        if parents and any(variant.regime == "head" for variant in variants):
            raise SettingsConflict(
                "a head-only variant has no class token to attend to a parent; leave out either "
                "the regime 'head' or what the task extends"
            )
        self.variants = list(variants)
        self.diverged = torch.zeros(len(self.variants), dtype=torch.bool)
        self._steps = 0  # taken so far
        self._backbone = backbone
        older = [ancestor for parent in parents for ancestor in parent.ancestors]
        self._ancestors = tuple(dict.fromkeys([*parents, *older]))  # a head alone has none
        self._layers, self._width = backbone.layers, backbone.width
        bias = torch.zeros(outputs) if head_bias is None else head_bias
        zero = SolvedHead(torch.zeros(outputs, self._width), bias)
        self._heads: dict[Start, SolvedHead] = {"zero": zero, "solved": solved or zero}
        of_row = solved_row or solved or zero
        self._row_heads: dict[Start, SolvedHead] = {"zero": zero, "solved": of_row}
        shapes: dict[str, list[int]] = {}
        for place, variant in enumerate(self.variants):
            shape = f"{variant.optimiser}-{variant.regime}-{variant.memory}-{variant.rank}"
            shapes.setdefault(shape, []).append(place)
        self._groups = [self._group(name, members) for name, members in shapes.items()]

    def __len__(self) -> int:
        return len(self.variants)

    @property
    def need_rows(self) -> bool:
        return need_rows(self.variants)

    def tasks(self) -> list[Task]:
        """One task per variant in the order of the sweep, differentiable in its parameters."""
        tasks: dict[int, Task] = {}
        memories = self._memory_states()
        for group in self._groups:
            weights = group.values["head_weight"].unbind(0)
            biases = group.values["head_bias"].unbind(0)
            tokens: Sequence[Tensor | None] = [None] * len(weights)
            if "class_token" in group.values:
                embedded = self._backbone.embed_class_token(group.values["class_token"])
                tokens = embedded.unbind(0)
            rows = _rows(group.values, ADAPTER)
            for place, weight, bias, token, row in zip(
                group.members, weights, biases, tokens, rows, strict=True
            ):
                keys, values = memories.get(place, (None, None))
                adapter = _adapter(row)
                tasks[place] = Task(
                    weight,
                    bias,
                    token,
                    keys,
                    values,
                    ancestors=self._ancestors,
                    adapter=adapter,
                )
        return [tasks[place] for place in range(len(self))]

    def step(self, factor: float) -> Tensor:
        """One step of each one's optimiser, `factor` of its rate; the norms before clipping, (V,).

        A variant whose gradient is not finite stays as it is from then on.
        """
        norms = self._gradient_norms()
        self.diverged |= ~torch.isfinite(norms).cpu()
        scale = torch.where(torch.isfinite(norms), CLIP_NORM / norms.clamp(min=CLIP_NORM), 0.0)
        alive = (~self.diverged).to(norms)
        self._steps += 1
        with torch.no_grad():
            for group in self._groups:
                clip = scale[group.members] * alive[group.members]
                part = factor * alive[group.members]
                for name, value in group.values.items():
                    assert value.grad is not None
                    shape = (-1,) + (1,) * (value.ndim - 1)
                    gradient = torch.nan_to_num(value.grad, 0.0, 0.0, 0.0) * clip.view(shape)
                    of_head = group.optimiser == "AdamW" and name.startswith("head_")
                    rates = HEAD_RATE * part if of_head else group.rates * part
                    group.update(name, gradient, rates, self._steps)
                    value.grad = None
        return norms

    def weights(self, place: int) -> TaskWeights:
        """A copy of one variant's parameters, on the host."""
        for group in self._groups:
            if place in group.members:
                row = group.members.index(place)
                return weights_from(
                    {
                        name: value[row].detach().cpu().clone()
                        for name, value in group.values.items()
                    }
                )
        raise IndexError(place)

    def state(self) -> dict[str, Tensor]:
        """Everything a later `load` needs to go on exactly here."""
        state = {name: tensor.detach().cpu().clone() for name, tensor in self._learned()}
        return {"lost": self.diverged.clone(), "steps": torch.tensor(self._steps), **state}

    def load(self, state: Mapping[str, Tensor]) -> None:
        self.diverged = state["lost"].clone()
        self._steps = int(state["steps"])
        with torch.no_grad():
            for name, tensor in self._learned():
                tensor.copy_(state[name])

    def _learned(self) -> Iterator[tuple[str, Tensor]]:
        for group in self._groups:
            kinds = {"value": group.values, "momentum": group.momentum, "squares": group.squares}
            for kind, tensors in kinds.items():
                for name, tensor in tensors.items():
                    yield f"{group.name}.{kind}.{name}", tensor

    def _group(self, name: str, members: list[int]) -> _Group:
        starts = [self._start(self.variants[place]) for place in members]
        device = self._backbone.device
        values = {
            part: torch.stack([start[part] for start in starts]).to(device).requires_grad_()
            for part in starts[0]
        }
        optimiser = self.variants[members[0]].optimiser
        zeros = {part: torch.zeros_like(value) for part, value in values.items()}
        squares = {part: torch.zeros_like(value) for part, value in values.items()}
        rates = torch.tensor([self.variants[place].rate for place in members], device=device)
        adam = optimiser == "AdamW"
        return _Group(name, members, optimiser, values, zeros, squares if adam else {}, rates)

    def _start(self, variant: Variant) -> dict[str, Tensor]:
        heads = self._heads if variant.regime == "head" else self._row_heads
        head = heads[variant.start]
        values = {"head_weight": head.weight.clone(), "head_bias": head.bias.clone()}
        if variant.regime != "head":
            values["class_token"] = self._backbone.first_token.cpu().float().clone()
        generator = torch.Generator().manual_seed(variant.seed)
        if variant.memory:
            shape = (self._layers, variant.memory, self._width)
            values["memory"] = MEMORY_SPREAD * torch.randn(shape, generator=generator)
        if variant.rank:
            for name, (into, out) in map_sizes(self._backbone).items():
                drawn = torch.randn(self._layers, into, variant.rank, generator=generator)
                values[f"{ADAPTER}{name}.a"] = drawn * into**-0.5
                values[f"{ADAPTER}{name}.b"] = torch.zeros(self._layers, variant.rank, out)
        return values

    def _memory_states(self) -> dict[int, tuple[Tensor, Tensor]]:
        """Keys and values (L, H, m, d) of the memory of each variant that has any."""
        with_memory = [group for group in self._groups if "memory" in group.values]
        if not with_memory:
            return {}
        rows, owners, sizes = [], [], []
        for group in with_memory:
            memory = group.values["memory"]  # (V, L, m, D)
            rows.append(memory.transpose(0, 1).flatten(1, 2))
            owners += group.members
            sizes += [memory.shape[2]] * len(group.members)
        # All memory of the sweep side by side is one task's to `prepare`: one product a layer.
        token = rows[0].new_zeros(self._width)
        whole = TaskWeights(rows[0].new_zeros(1, self._width), None, token, torch.cat(rows, dim=1))
        prepared = prepare(self._backbone, whole)
        assert prepared.memory_keys is not None
        assert prepared.memory_values is not None
        keys = torch.split_with_sizes(prepared.memory_keys, sizes, dim=2)
        values = torch.split_with_sizes(prepared.memory_values, sizes, dim=2)
        return dict(zip(owners, zip(keys, values, strict=True), strict=True))

    def _gradient_norms(self) -> Tensor:
        device = self._backbone.device
        squares = torch.zeros(len(self), device=device)
        for group in self._groups:
            for value in group.values.values():
                if value.grad is None:  # nothing depends on it yet
                    value.grad = torch.zeros_like(value)
                squares[group.members] += value.grad.flatten(1).square().sum(dim=1)
        return squares.sqrt()


def named_tensors(weights: TaskWeights) -> dict[str, Tensor]:
    """A task's tensors, those of an adapter too, by names that `weights_from` reads."""
    names = ("head_weight", "head_bias", "class_token", "memory")
    tensors = {name: tensor for name in names if (tensor := getattr(weights, name)) is not None}
    for name, change in weights.adapter.items():
        tensors |= {f"{ADAPTER}{name}.{part}": one for part, one in change._asdict().items()}
    return tensors


def weights_from(tensors: Mapping[str, Tensor]) -> TaskWeights:
    plain: dict[str, Any] = {
        name: tensor for name, tensor in tensors.items() if not name.startswith(ADAPTER)
    }
    return TaskWeights(**plain, adapter=_adapter(tensors))


def _adapter(tensors: Mapping[str, Tensor]) -> Adapter:
    """The adapter among some named tensors; empty without one."""
    return {
        name: LowRank(tensors[f"{ADAPTER}{name}.a"], tensors[f"{ADAPTER}{name}.b"])
        for name in ADAPTED_MAPS
        if f"{ADAPTER}{name}.a" in tensors
    }


def _rows(values: Mapping[str, Tensor], prefix: str) -> list[dict[str, Tensor]]:
    """The named tensors of each variant of a group, of those whose name begins so."""
    count = len(values["head_weight"])
    chosen = {name: value.unbind(0) for name, value in values.items() if name.startswith(prefix)}
    return [{name: rows[place] for name, rows in chosen.items()} for place in range(count)]
