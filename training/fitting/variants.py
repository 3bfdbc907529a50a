"""Variants: candidates for one task, trained as tasks of the same pass.

Each has a regime (what is learned), a memory size, a learning rate and a seed, and each is trained
as if alone: its own start, its own clipping, its own momentum, its own rate. Variants of one shape
lie in the same tensors, so that a dozen cost a handful of small operations more than one.

Shapes: V variants of a group, L layers, m memory tokens, D width, K outputs.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, Literal, NamedTuple, get_args

import torch
from torch import Tensor

from server.model import Backbone, TaskWeights
from server.model.tasks import Task, prepare
from training.data.dataset import Problem
from training.errors import SettingsConflict

Regime = Literal["memory", "class", "head"]
REGIMES: Final[tuple[Regime, ...]] = get_args(Regime)
# Where a head starts: from zero, or from what is solved without training it.
Start = Literal["zero", "solved"]
STARTS: Final[tuple[Start, ...]] = get_args(Start)
AUTO_RATES: Final = (0.003, 0.01, 0.03, 0.1)

MEMORY_SPREAD = 0.02
MOMENTUM = 0.9
CLIP_NORM = 1.0
WARM_UP_STEPS = 5


@dataclass(frozen=True, slots=True)
class Variant:
    regime: Regime
    memory: int  # tokens per layer; 0 unless the regime is memory
    rate: float  # 0: the solved head itself
    seed: int
    start: Start = "zero"

    @property
    def name(self) -> str:
        if not self.rate:
            return "solved, not trained"
        what = f"memory {self.memory}" if self.regime == "memory" else self.regime
        start = ", from the solved head" if self.start == "solved" else ""
        return f"{what}, rate {self.rate:g}, seed {self.seed}{start}"


def sweep(
    regimes: Sequence[Regime],
    memory: Sequence[int],
    rates: Sequence[float],
    seeds: Sequence[int],
    starts: Sequence[Start] = ("zero",),
) -> list[Variant]:
    """Every combination that differs; without memory nothing is drawn, so one seed is enough.

    Where heads start from what is solved, that itself is one more.
    """
    if not regimes or not rates or not seeds or not starts:
        raise SettingsConflict(
            "give at least one regime, one learning rate, one seed and one start"
        )
    for rate in rates:
        if not 0 < rate < math.inf:
            raise SettingsConflict(f"the learning rate {rate:g} is not above zero")
    if "memory" in regimes and (not memory or min(memory) < 1 or max(memory) > 1024):
        raise SettingsConflict(
            "memory sizes are 1 to 1024 tokens per layer; for none use the regime 'class'"
        )
    variants = []
    for regime in dict.fromkeys(regimes):
        for size in memory if regime == "memory" else (0,):
            drawn = seeds if regime == "memory" else seeds[:1]
            variants += [
                Variant(regime, size, rate, seed, start)
                for start in starts
                for seed in drawn
                for rate in rates
            ]
    if "solved" in starts:
        variants.append(Variant("head", 0, 0.0, seeds[0], "solved"))
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
    values: dict[str, Tensor]  # head_weight (V, K, D), head_bias (V, K), class_token, memory
    momentum: dict[str, Tensor]
    rates: Tensor  # (V,)


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
        parents: Sequence[Task] = (),
    ) -> None:
        """`head_bias` (K,) is where biases start that start from zero, as all else of the heads."""
        if parents and any(variant.regime == "head" for variant in variants):
            raise SettingsConflict(
                "a head-only variant has no class token to attend to a parent; leave out either "
                "the regime 'head' or what the task extends"
            )
        self.variants = list(variants)
        self.diverged = torch.zeros(len(self.variants), dtype=torch.bool)
        self._backbone = backbone
        older = [ancestor for parent in parents for ancestor in parent.ancestors]
        self._ancestors = tuple(dict.fromkeys([*parents, *older]))  # a head alone has none
        self._layers, self._width = backbone.layers, backbone.width
        bias = torch.zeros(outputs) if head_bias is None else head_bias
        zero = SolvedHead(torch.zeros(outputs, self._width), bias)
        self._heads: dict[Start, SolvedHead] = {"zero": zero, "solved": solved or zero}
        shapes: dict[str, list[int]] = {}
        for place, variant in enumerate(self.variants):
            shapes.setdefault(f"{variant.regime}-{variant.memory}", []).append(place)
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
            for place, weight, bias, token in zip(
                group.members, weights, biases, tokens, strict=True
            ):
                keys, values = memories.get(place, (None, None))
                tasks[place] = Task(weight, bias, token, keys, values, self._ancestors)
        return [tasks[place] for place in range(len(self))]

    def step(self, factor: float) -> Tensor:
        """One step of SGD with momentum, `factor` of each rate; the norms before clipping, (V,).

        A variant whose gradient is not finite stays as it is from then on.
        """
        norms = self._gradient_norms()
        self.diverged |= ~torch.isfinite(norms).cpu()
        scale = torch.where(torch.isfinite(norms), CLIP_NORM / norms.clamp(min=CLIP_NORM), 0.0)
        alive = (~self.diverged).to(norms)
        with torch.no_grad():
            for group in self._groups:
                clip = scale[group.members] * alive[group.members]
                rates = group.rates * factor * alive[group.members]
                for name, value in group.values.items():
                    assert value.grad is not None
                    shape = (-1,) + (1,) * (value.ndim - 1)
                    gradient = torch.nan_to_num(value.grad, 0.0, 0.0, 0.0) * clip.view(shape)
                    momentum = group.momentum[name].mul_(MOMENTUM).add_(gradient)
                    value.sub_(momentum * rates.view(shape))
                    value.grad = None
        return norms

    def weights(self, place: int) -> TaskWeights:
        """A copy of one variant's parameters, on the host."""
        for group in self._groups:
            if place in group.members:
                row = group.members.index(place)
                host: dict[str, Any] = {
                    name: value[row].detach().cpu().clone() for name, value in group.values.items()
                }
                return TaskWeights(**host)
        raise IndexError(place)

    def state(self) -> dict[str, Tensor]:
        """Everything a later `load` needs to go on exactly here."""
        state = {name: tensor.detach().cpu().clone() for name, tensor in self._learned()}
        return {"lost": self.diverged.clone(), **state}

    def load(self, state: Mapping[str, Tensor]) -> None:
        self.diverged = state["lost"].clone()
        with torch.no_grad():
            for name, tensor in self._learned():
                tensor.copy_(state[name])

    def _learned(self) -> Iterator[tuple[str, Tensor]]:
        for group in self._groups:
            for kind, tensors in (("value", group.values), ("momentum", group.momentum)):
                for name, tensor in tensors.items():
                    yield f"{group.name}.{kind}.{name}", tensor

    def _group(self, name: str, members: list[int]) -> _Group:
        starts = [self._start(self.variants[place]) for place in members]
        device = self._backbone.device
        values = {
            part: torch.stack([start[part] for start in starts]).to(device).requires_grad_()
            for part in starts[0]
        }
        momentum = {part: torch.zeros_like(value) for part, value in values.items()}
        rates = torch.tensor([self.variants[place].rate for place in members], device=device)
        return _Group(name, members, values, momentum, rates)

    def _start(self, variant: Variant) -> dict[str, Tensor]:
        head = self._heads[variant.start]
        values = {"head_weight": head.weight.clone(), "head_bias": head.bias.clone()}
        if variant.regime != "head":
            values["class_token"] = self._backbone.embedding.class_token.cpu().float().clone()
        if variant.regime == "memory":
            generator = torch.Generator().manual_seed(variant.seed)
            shape = (self._layers, variant.memory, self._width)
            values["memory"] = MEMORY_SPREAD * torch.randn(shape, generator=generator)
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
