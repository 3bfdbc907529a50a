"""Variants: candidates for one task, trained as tasks of the same pass.

A variant has a regime (what is trained), a memory size or a LoRA rank, a learning rate and a seed.
Each is trained independently, with separate initialisation, clipping, momentum and rate. Variants
of the same shape share tensors, so a dozen cost little more than one.

Shapes: V variants of a group, L layers, m memory tokens, r LoRA rank, D width, K outputs.
"""

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, Literal, NamedTuple, get_args

import torch
from engram_bundle.limits import DEFAULT_LIMITS
from engram_bundle.schema import LORA_TARGETS
from engram_server.model import Backbone, TaskWeights
from engram_server.model.lora import Lora, LoraWeight, target_sizes
from engram_server.model.tasks import LayerWeights, Task, prepare
from torch import Tensor

from engram_training.errors import SettingsConflict
from engram_training.fitting.closed_form import SolvedHead

# `layers` is the closed-form head on every layer, which is not trained. With `+layers`, the logits
# of a trained task row are added to those of that head, with weights fitted on validation images.
Regime = Literal[
    "head",
    "layers",
    "class",
    "memory",
    "lora",
    "memory+lora",
    "memory+layers",
    "lora+layers",
    "memory+lora+layers",
]
REGIMES: Final[tuple[Regime, ...]] = get_args(Regime)
AUTO_REGIMES: Final[tuple[Regime, ...]] = (
    "layers",
    "memory+layers",
    "lora+layers",
    "memory+lora+layers",
)
# Without a closed form on every layer: for regression, and for tasks that extend others.
TRAINED_REGIMES: Final[tuple[Regime, ...]] = ("head", "memory", "lora", "memory+lora")
# The initial head: zero, or solved in closed form.
Start = Literal["zero", "solved"]
STARTS: Final[tuple[Start, ...]] = get_args(Start)
Optimiser = Literal["SGD", "AdamW"]
WITHOUT_ROW: Final[tuple[Regime, ...]] = ("head", "layers")

# The paper uses SGD; AdamW is better for memory and LoRA (docs/explanation/accuracy.md).
OPTIMISERS: Final[Mapping[Regime, Optimiser]] = {
    regime: "SGD" if regime in ("head", "layers", "class") else "AdamW" for regime in REGIMES
}
AUTO_RATES: Final[Mapping[Regime, tuple[float, ...]]] = {
    "head": (0.01, 0.1),
    "layers": (0.0,),
    "class": (0.01, 0.1),
    "memory": (0.003, 0.01),
    "lora": (0.001, 0.003),
    "memory+lora": (0.003,),
    "memory+layers": (0.003,),
    "lora+layers": (0.001, 0.003),
    "memory+lora+layers": (0.003,),
}
# With a solved head, memory and LoRA fit training images as well but generalise worse
# (docs/explanation/accuracy.md).
AUTO_STARTS: Final[Mapping[Regime, tuple[Start, ...]]] = {
    **dict.fromkeys(REGIMES, ("zero",)),
    "head": ("zero", "solved"),
    "layers": ("solved",),
}
AUTO_RANKS: Final = (8,)
MAX_RANK: Final = DEFAULT_LIMITS.max_lora_rank
LORA: Final = "lora."  # prefix of tensor names
LAYER_WEIGHT: Final = "layer_weight"
LAYER_NUMBERS: Final = "layer_numbers"

MEMORY_DEVIATION = 0.02
MOMENTUM = 0.9
CLIP_NORM = 1.0
WARM_UP_STEPS = 5
# The step of AdamW does not depend on the size of the gradient, so the head needs another rate than
# memory and LoRA. The best rate of the head hardly depends on the data.
HEAD_RATE = 3e-3
BETAS = (0.9, 0.999)
EPSILON = 1e-8
DECAY = 0.01
_SCHEDULE = "clipped at 1.0, 5 steps of warm-up, cosine"
RECIPES: Final[Mapping[Optimiser, str]] = {
    "SGD": f"SGD, momentum 0.9, {_SCHEDULE}",
    "AdamW": f"AdamW, decay 0.01, head at rate 0.003, {_SCHEDULE}",
}


@dataclass(frozen=True, slots=True)
class Variant:
    regime: Regime
    memory: int  # tokens per layer; 0 unless the regime has memory
    rate: float  # 0 for `layers`, which is not trained
    seed: int
    rank: int = 0  # 0 unless the regime has LoRA
    optimiser: Optimiser = "SGD"
    start: Start = "zero"

    @property
    def name(self) -> str:
        if not self.rate:
            return "closed form, every layer"
        sizes = {"memory": self.memory, "lora": self.rank}
        parts = [f"{part} {sizes[part]}" if part in sizes else part for part in self.parts]
        start = ", from the closed form" if self.start == "solved" else ""
        return f"{' + '.join(parts)}, rate {self.rate:g}, seed {self.seed}{start}"

    @property
    def parts(self) -> tuple[str, ...]:
        return parts_of(self.regime)

    @property
    def reads_layers(self) -> bool:
        return "layers" in self.parts

    @property
    def has_row(self) -> bool:
        return self.regime not in WITHOUT_ROW


def parts_of(regime: Regime) -> tuple[str, ...]:
    return tuple(regime.split("+"))


def sweep(
    regimes: Sequence[Regime],
    memory: Sequence[int],
    rates: Sequence[float] | None,
    seeds: Sequence[int],
    ranks: Sequence[int] = AUTO_RANKS,
    starts: Sequence[Start] | None = ("zero",),
) -> list[Variant]:
    """Return all distinct combinations; None means the default rates or starts of each regime.

    Only memory and LoRA are random, so the other regimes use one seed. The head of a row that is
    added to the closed form starts from zero.
    """
    empty = any(values is not None and not values for values in (rates, starts))
    if not regimes or not seeds or empty:
        raise SettingsConflict(
            "Use at least one regime, one learning rate, one seed and one start."
        )
    for rate in rates or ():
        if not 0 < rate < math.inf:
            raise SettingsConflict(f"Learning rate {rate:g} is not positive.")
    parts = {part for regime in regimes for part in parts_of(regime)}
    if "memory" in parts and (not memory or min(memory) < 1 or max(memory) > 1024):
        raise SettingsConflict(
            "Memory must be 1 to 1024 tokens per layer. For no memory use the regime 'class'."
        )
    if "lora" in parts and (not ranks or min(ranks) < 1 or max(ranks) > MAX_RANK):
        raise SettingsConflict(f"LoRA ranks must be 1 to {MAX_RANK}.")
    variants = []
    for regime in regimes:
        of = parts_of(regime)
        sizes = itertools.product(
            memory if "memory" in of else (0,), ranks if "lora" in of else (0,)
        )
        is_random = "memory" in of or "lora" in of
        variants += [
            Variant(regime, tokens, rate, seed, rank, OPTIMISERS[regime], start)
            for tokens, rank in sizes
            for start in (AUTO_STARTS[regime] if "layers" in of else starts or AUTO_STARTS[regime])
            for seed in (seeds if is_random else seeds[:1])
            for rate in (rates if rates and regime != "layers" else AUTO_RATES[regime])
        ]
    return list(dict.fromkeys(variants))


def need_training(variants: Sequence[Variant]) -> bool:
    return any(variant.rate for variant in variants)


def need_rows(variants: Sequence[Variant]) -> bool:
    """Whether any variant has a task row; the others read the backbone's."""
    return any(variant.has_row for variant in variants)


def rate_factor(step: int, steps: int) -> float:
    """Return the factor of the learning rate at a step: linear warm-up, then cosine to zero."""
    if step < WARM_UP_STEPS:
        return (step + 1) / (WARM_UP_STEPS + 1)
    done = (step - WARM_UP_STEPS) / max(1, steps - WARM_UP_STEPS)
    return 0.5 * (1 + math.cos(math.pi * min(1.0, done)))


class Shares(NamedTuple):
    """The factors of the two parts of the logits of a row that is added to the closed form."""

    closed_form: float
    row: float


EQUAL_SHARES: Final = Shares(1.0, 1.0)


@dataclass(frozen=True, slots=True)
class _Group:
    """Variants of the same shape, and their indices in the sweep.

    The optimisers are written by hand because each variant has its own learning rate: one tensor
    of rates (V,) updates all variants at once, which torch.optim cannot do.
    """

    name: str
    members: list[int]
    optimiser: Optimiser
    values: dict[str, Tensor]  # named as in `named_tensors`: head_weight (V, K, D), …
    momentum: dict[str, Tensor]
    squares: dict[str, Tensor]  # mean of squared gradients for AdamW; empty for SGD
    rates: Tensor  # (V,)

    def update(self, name: str, gradient: Tensor, rates: Tensor, step: int) -> None:
        """Update one parameter of all variants with the rates (V,) of this step."""
        value, momentum = self.values[name], self.momentum[name]
        rates = rates.view(-1, *(1,) * (value.ndim - 1))
        if self.optimiser == "SGD":
            value.sub_(momentum.mul_(MOMENTUM).add_(gradient) * rates)
            return
        (first, second), squares = BETAS, self.squares[name]
        momentum.lerp_(gradient, 1 - first)
        squares.mul_(second).addcmul_(gradient, gradient, value=1 - second)
        scale = (squares / (1 - second**step)).sqrt_().add_(EPSILON)
        value.sub_(rates * (momentum / (1 - first**step) / scale + DECAY * value))


class Variants:
    """The parameters of a sweep, and the optimiser step for all variants."""

    def __init__(
        self,
        backbone: Backbone,
        variants: Sequence[Variant],
        outputs: int,
        *,
        head_bias: Tensor | None = None,
        solved: SolvedHead | None = None,
        solved_row: SolvedHead | None = None,
        every_layer: SolvedHead | None = None,
        parents: Sequence[Task] = (),
    ) -> None:
        """`head_bias` (K,) is the initial bias of heads with the start `zero`.

        `solved_row` is the closed-form head for task rows, if it differs from that for head-only
        tasks. `every_layer` is that of variants that read layers.
        """
        if parents and any(variant.regime == "head" for variant in variants):
            raise SettingsConflict(
                "A head-only variant cannot extend a task. Omit the regime 'head', or --extends."
            )
        self.variants = list(variants)
        self.need_rows = need_rows(variants)
        self.diverged = torch.zeros(len(self.variants), dtype=torch.bool)
        self.stopped: frozenset[int] = frozenset()  # fell behind, and are not trained any more
        self._steps = 0
        self._backbone = backbone
        older = [ancestor for parent in parents for ancestor in parent.ancestors]
        self._ancestors = tuple(dict.fromkeys([*parents, *older]))  # head-only tasks have none
        bias = torch.zeros(outputs) if head_bias is None else head_bias
        zero = SolvedHead(torch.zeros(outputs, backbone.width), bias)
        self._heads: dict[Start, SolvedHead] = {"zero": zero, "solved": solved or zero}
        of_row = solved_row or solved or zero
        self._row_heads: dict[Start, SolvedHead] = {"zero": zero, "solved": of_row}
        self.every_layer = ClosedForm.of(backbone, every_layer or self._heads["solved"])
        shapes: dict[str, list[int]] = {}
        for index, variant in enumerate(self.variants):
            shape = f"{variant.optimiser}-{variant.regime}-{variant.memory}-{variant.rank}"
            shapes.setdefault(shape, []).append(index)
        self._groups = [self._group(name, members) for name, members in shapes.items()]

    def __len__(self) -> int:
        return len(self.variants)

    @property
    def running(self) -> list[int]:
        """The variants that were not stopped."""
        return [index for index in range(len(self)) if index not in self.stopped]

    @property
    def trained(self) -> list[int]:
        """The variants that are still trained."""
        return [index for index in self.running if self.variants[index].rate]

    def tasks(self) -> dict[int, Task]:
        """Return the task of each running variant by its index in the sweep, with gradients.

        A row is returned without the closed form that `weights` adds to it.
        """
        tasks: dict[int, Task] = {}
        memories = self._memory_states()
        for group in self._groups:
            values = dict(group.values)
            if "class_token" in values:
                values["class_token"] = self._backbone.embed_class_token(values["class_token"])
            for index, tensors in zip(group.members, _unbound(values), strict=True):
                if index in self.stopped:
                    continue
                memory_keys, memory_values = memories.get(index, (None, None))
                task = Task(
                    head_weight=tensors["head_weight"],
                    head_bias=tensors["head_bias"],
                    token=tensors.get("class_token"),
                    memory_keys=memory_keys,
                    memory_values=memory_values,
                    ancestors=self._ancestors,
                    lora=_lora(tensors),
                )
                if not self.variants[index].rate:
                    task = self.every_layer.task()
                tasks[index] = task
        return dict(sorted(tasks.items()))

    def closed_form(self) -> Task | None:
        """Return the closed form that is added to rows, if any has it."""
        added = any(self.variants[index].reads_layers for index in self.trained)
        return self.every_layer.task() if added else None

    def step(self, factor: float) -> Tensor:
        """Run one optimiser step with `factor` of each rate; return the gradient norms, (V,).

        A variant with a gradient that is not finite is not updated any more.
        """
        norms = self._gradient_norms()
        self.diverged |= ~torch.isfinite(norms).cpu()
        scale = torch.where(torch.isfinite(norms), CLIP_NORM / norms.clamp(min=CLIP_NORM), 0.0)
        alive = (~self.diverged).to(norms)
        alive[list(self.stopped)] = 0
        self._steps += 1
        with torch.no_grad():
            for group in self._groups:
                clip = scale[group.members] * alive[group.members]
                part = factor * alive[group.members]
                for name, value in group.values.items() if clip.any() else ():
                    assert value.grad is not None
                    shape = (-1,) + (1,) * (value.ndim - 1)
                    gradient = torch.nan_to_num(value.grad, 0.0, 0.0, 0.0) * clip.view(shape)
                    of_head = group.optimiser == "AdamW" and name.startswith("head_")
                    rates = HEAD_RATE * part if of_head else group.rates * part
                    group.update(name, gradient, rates, self._steps)
                    value.grad = None
        return norms

    def weights(self, index: int, shares: Shares = EQUAL_SHARES) -> TaskWeights:
        """Return a copy of the parameters of one variant, on the host.

        Logits of a row with layers are the sum of row and closed form, with these factors.
        """
        group = next(group for group in self._groups if index in group.members)
        row = group.members.index(index)
        copies = {name: value[row].detach().cpu().clone() for name, value in group.values.items()}
        weights, variant = weights_from(copies), self.variants[index]
        if not variant.rate:
            return self.every_layer.weights()
        return self.every_layer.added_to(weights, shares) if variant.reads_layers else weights

    def state(self) -> dict[str, Tensor]:
        state = {name: tensor.detach().cpu().clone() for name, tensor in self._learned()}
        return {"diverged": self.diverged.clone(), "steps": torch.tensor(self._steps), **state}

    def load(self, state: Mapping[str, Tensor]) -> None:
        self.diverged = state["diverged"].clone()
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
        starts = [self._start(self.variants[index]) for index in members]
        device = self._backbone.device
        is_trained = any(self.variants[index].rate for index in members)
        values = {
            part: torch.stack([start[part] for start in starts])
            .to(device)
            .requires_grad_(is_trained)
            for part in starts[0]
        }
        optimiser = self.variants[members[0]].optimiser
        momentum = {part: torch.zeros_like(value) for part, value in values.items()}
        squares = {}
        if optimiser == "AdamW":
            squares = {part: torch.zeros_like(value) for part, value in values.items()}
        rates = torch.tensor([self.variants[index].rate for index in members], device=device)
        return _Group(name, members, optimiser, values, momentum, squares, rates)

    def _start(self, variant: Variant) -> dict[str, Tensor]:
        heads = self._row_heads if variant.has_row else self._heads
        head = heads[variant.start]
        values = {"head_weight": head.weight.clone(), "head_bias": head.bias.clone()}
        if variant.has_row:
            values["class_token"] = self._backbone.first_token.cpu().float().clone()
        generator, layers = torch.Generator().manual_seed(variant.seed), self._backbone.layers
        if variant.memory:
            shape = (layers, variant.memory, self._backbone.width)
            values["memory"] = MEMORY_DEVIATION * torch.randn(shape, generator=generator)
        if variant.rank:
            for name, (into, out) in target_sizes(self._backbone).items():
                drawn = torch.randn(layers, into, variant.rank, generator=generator)
                values[f"{LORA}{name}.a"] = drawn * into**-0.5
                values[f"{LORA}{name}.b"] = torch.zeros(layers, variant.rank, out)
        return values

    def _memory_states(self) -> dict[int, tuple[Tensor, Tensor]]:
        """Return the keys and values (L, H, m, d) of each variant with memory."""
        rows, owners, sizes = [], [], []
        for group in self._groups:
            if "memory" in group.values:
                memory = group.values["memory"]  # (V, L, m, D)
                rows.append(memory.transpose(0, 1).flatten(1, 2))
                owners += group.members
                sizes += [memory.shape[2]] * len(group.members)
        if not rows:
            return {}
        # `prepare` takes all memory of the sweep as that of one task: one product per layer.
        head = rows[0].new_zeros(1, self._backbone.width)
        whole = TaskWeights(head, None, head[0], torch.cat(rows, dim=1))
        prepared = prepare(self._backbone, whole)
        assert prepared.memory_keys is not None
        assert prepared.memory_values is not None
        keys = torch.split_with_sizes(prepared.memory_keys, sizes, dim=2)
        values = torch.split_with_sizes(prepared.memory_values, sizes, dim=2)
        return dict(zip(owners, zip(keys, values, strict=True), strict=True))

    def _gradient_norms(self) -> Tensor:
        squares = torch.zeros(len(self), device=self._backbone.device)
        for group in self._groups:
            for value in group.values.values():
                if value.grad is None:  # no output depends on it yet
                    value.grad = torch.zeros_like(value)
                squares[group.members] += value.grad.flatten(1).square().sum(dim=1)
        return squares.sqrt()


@dataclass(frozen=True, slots=True)
class ClosedForm:
    """The closed-form head on every layer, split as a task has it. It is not trained."""

    backbone: Backbone
    feature: Tensor  # (K, D)
    bias: Tensor  # (K,)
    layers: LayerWeights | None

    @classmethod
    def of(cls, backbone: Backbone, head: SolvedHead) -> "ClosedForm":
        width, layers = backbone.width, None
        if head.weight.shape[1] > width:
            summary = head.weight[:, width:].reshape(len(head.bias), *backbone.summary_shape)
            layers = LayerWeights(backbone.summary_layers, summary)
        return cls(backbone, head.weight[:, :width], head.bias, layers)

    def weights(self) -> TaskWeights:
        return TaskWeights(self.feature, self.bias, layers=self.layers)

    def task(self) -> Task:
        return prepare(self.backbone, self.weights())

    def in_place_of(
        self, other: "ClosedForm", weights: TaskWeights, variant: Variant, shares: Shares
    ) -> TaskWeights:
        """Exchange the closed form in the weights of a variant."""
        if not variant.rate:
            return self.weights()
        assert weights.head_bias is not None
        row_bias = weights.head_bias - other.bias * shares.closed_form
        alone = Shares(shares.closed_form, 1.0)  # the row has its share already
        return self.added_to(replace(weights, head_bias=row_bias), alone)

    def added_to(self, row: TaskWeights, shares: Shares) -> TaskWeights:
        """Add this head to that of a task row."""
        assert row.head_bias is not None
        layers = self.layers
        if layers is not None:
            layers = replace(layers, weight=layers.weight * shares.closed_form)
        return replace(
            row,
            head_weight=row.head_weight * shares.row,
            head_bias=row.head_bias * shares.row + self.bias * shares.closed_form,
            layers=layers,
            feature_weight=self.feature * shares.closed_form,
        )


def named_tensors(weights: TaskWeights) -> dict[str, Tensor]:
    """Return the tensors of a task, including LoRA, by names that `weights_from` reads."""
    names = ("head_weight", "head_bias", "class_token", "memory", "feature_weight")
    tensors = {name: tensor for name in names if (tensor := getattr(weights, name)) is not None}
    for name, change in weights.lora.items():
        tensors |= {f"{LORA}{name}.{part}": one for part, one in change._asdict().items()}
    if weights.layers is not None:
        tensors[LAYER_WEIGHT] = weights.layers.weight
        tensors[LAYER_NUMBERS] = torch.tensor(weights.layers.layers)
    return tensors


def weights_from(tensors: Mapping[str, Tensor]) -> TaskWeights:
    others = (LAYER_WEIGHT, LAYER_NUMBERS)
    plain: dict[str, Any] = {
        name: tensor
        for name, tensor in tensors.items()
        if not name.startswith(LORA) and name not in others
    }
    layers = None
    if LAYER_WEIGHT in tensors:
        layers = LayerWeights(tuple(tensors[LAYER_NUMBERS].tolist()), tensors[LAYER_WEIGHT])
    return TaskWeights(**plain, lora=_lora(tensors), layers=layers)


def _lora(tensors: Mapping[str, Tensor]) -> Lora:
    """Return the LoRA weights among named tensors; may be empty."""
    return {
        name: LoraWeight(tensors[f"{LORA}{name}.a"], tensors[f"{LORA}{name}.b"])
        for name in LORA_TARGETS
        if f"{LORA}{name}.a" in tensors
    }


def _unbound(values: Mapping[str, Tensor]) -> list[dict[str, Tensor]]:
    """Return the tensors of each variant of a group."""
    rows = zip(*(value.unbind(0) for value in values.values()), strict=True)
    return [dict(zip(values, row, strict=True)) for row in rows]
