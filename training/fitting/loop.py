"""The training loop: all variants of a sweep, step by step, over the same images.

Order and augmentation of the images depend on the run's seed, the epoch and the image alone, never
on the variants or on where a run was interrupted. Validation follows every epoch; the best variant
at its best epoch is kept. Best is the highest mean of the scores of the last three epochs: the
highest of a hundred single scores, on few images, would mostly be the luckiest.
"""

import itertools
import math
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, Future
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from server.model import Backbone, ContextBatch, TaskWeights
from server.model.masked_pass import masked_pass
from server.model.tasks import StackCache, Task
from training.data.augment import Augmentation
from training.data.contexts import encode
from training.data.dataset import Problem, SplitName
from training.fitting.losses import count_hits, mean_losses, score_of
from training.fitting.parts import Part
from training.fitting.variants import (
    WARM_UP_STEPS,
    Variants,
    named_tensors,
    rate_factor,
    weights_from,
)
from training.progress import Tick

AHEAD = 2  # batches prepared while a step runs
SMOOTHED = 3  # epochs whose mean score counts

TRIAL_STEPS = 10
# The first ones wait for caches, threads and the first images: they say nothing about the rest.
SLOW_STEPS = 4
# Kept back for the last judgement and for a machine that gets slower.
SPARE = 0.1
# Trying may take no more than this share of the time.
TRIAL_SHARE = 0.1


@dataclass(frozen=True, slots=True)
class Plan:
    """What is fixed before the first step."""

    problem: Problem
    steps: int
    batch: int
    seed: int
    augmentation: Augmentation

    def steps_per_epoch(self, images: int) -> int:
        return -(-images // self.batch)


@dataclass(slots=True)
class Epoch:
    """What happened between two validations, for each variant."""

    step: int  # done so far
    train_loss: list[float]
    train_score: list[float]
    val_loss: list[float] | None = None
    val_score: list[float] | None = None


def smoothed_scores(epochs: Sequence[Epoch]) -> list[float]:
    """By which variants are compared: the mean of each one's scores of the last few epochs."""
    last = [epoch.val_score or epoch.train_score for epoch in epochs[-SMOOTHED:]]
    return [sum(scores) / len(scores) for scores in zip(*last, strict=True)]


@dataclass(slots=True)
class Best:
    variant: int
    step: int
    score: float  # smoothed
    loss: float
    weights: TaskWeights


@dataclass(slots=True)
class Running:
    """What adds up during an epoch."""

    loss: Tensor
    counts: Tensor
    images: int = 0

    @classmethod
    def zero(cls, variants: int) -> "Running":
        return cls(torch.zeros(variants, dtype=torch.float64), torch.zeros(variants, 3).double())

    def add(self, loss: Tensor, counts: Tensor, images: int) -> None:
        self.loss += loss.detach().double().cpu() * images
        self.counts += counts.cpu()
        self.images += images


@dataclass(eq=False)
class Loop:
    """Runs a plan. Not reusable; a resumed run is a new loop on a loaded state."""

    backbone: Backbone
    variants: Variants
    train: Part
    val: Part | None
    plan: Plan
    pool: Executor
    # With the variants' state these are the whole checkpoint.
    step: int = 0
    epochs: list[Epoch] = field(default_factory=list)
    best: Best | None = None

    def __post_init__(self) -> None:
        self._running = Running.zero(len(self.variants))

    @property
    def done(self) -> bool:
        return self.step >= self.plan.steps

    def run(
        self,
        stop: Callable[[], bool] = lambda: False,
        on_step: Callable[[Tick], None] | None = None,
        on_checkpoint: Callable[[], None] | None = None,
    ) -> None:
        """Steps until the plan is done or `stop` says so; `on_checkpoint` after every step."""
        seen, started = 0, time.perf_counter()
        for places, pixels in self._batches(self.step):
            if stop():
                break
            loss = self._step(places, pixels)
            self.step += 1
            seen += len(places)
            rate = seen / max(1e-9, time.perf_counter() - started)
            if self.step % self.plan.steps_per_epoch(len(self.train)) == 0 or self.done:
                self._close_epoch()
            if on_step is not None:
                on_step(self._tick(loss, rate))
            if on_checkpoint is not None:
                on_checkpoint()

    def find_best(self) -> None:
        """For a run that was stopped before its first validation: validate it as it is."""
        if self.best is None and self._running.images:
            self._close_epoch()

    def state(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """Numbers and tensors from which `load` goes on."""
        running, best = self._running, self.best
        tensors = {f"variants.{name}": tensor for name, tensor in self.variants.state().items()}
        tensors |= {"running.loss": running.loss.clone(), "running.counts": running.counts.clone()}
        numbers: dict[str, Any] = {
            "step": self.step,
            "epochs": [asdict(epoch) for epoch in self.epochs],
            "images": running.images,
            "best": None,
        }
        if best is not None:
            numbers["best"] = [best.variant, best.step, best.score, best.loss]
            for name, tensor in named_tensors(best.weights).items():
                tensors[f"best.{name}"] = tensor
        return numbers, tensors

    def load(self, numbers: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        def under(prefix: str) -> dict[str, Any]:
            return {
                name.removeprefix(prefix): tensor
                for name, tensor in tensors.items()
                if name.startswith(prefix)
            }

        self.variants.load(under("variants."))
        self._running = Running(**under("running."), images=numbers["images"])
        self.step = numbers["step"]
        self.epochs = [Epoch(**epoch) for epoch in numbers["epochs"]]
        if numbers["best"] is not None:
            variant, step, score, loss = numbers["best"]
            self.best = Best(variant, step, score, loss, weights_from(under("best.")))

    # --- one step ---------------------------------------------------------------------------------

    def _batches(self, first: int) -> Iterator[tuple[list[int], Tensor | None]]:
        """Images of each step from `first` on, with their pixels where no context is kept."""
        steps = iter(range(first, self.plan.steps))
        waiting = deque(map(self._submit, itertools.islice(steps, AHEAD)))
        try:
            while waiting:
                places, future = waiting.popleft()
                waiting.extend(map(self._submit, itertools.islice(steps, 1)))
                yield places, None if future is None else future.result()
        finally:
            for _, future in waiting:
                if future is not None:
                    future.cancel()

    def _submit(self, step: int) -> "tuple[list[int], Future[Tensor] | None]":
        epoch, position = divmod(step, self.plan.steps_per_epoch(len(self.train)))
        start = position * self.plan.batch
        order = epoch_order(self.plan.seed, epoch, len(self.train))
        places = order[start : start + self.plan.batch]
        if self.train.kept is not None:
            return places, None
        images, how = self.train.images, self.plan.augmentation
        if how == "none":
            return places, self.pool.submit(images.batch, places)
        seed = [self.plan.seed, 0xA6, epoch]
        return places, self.pool.submit(images.augmented_batch, places, how, seed)

    def _step(self, places: list[int], pixels: Tensor | None) -> Tensor:
        loss = self._losses(self.train, places, pixels, self.variants.tasks(), self._running)
        # A sum, so that no variant's gradient knows of another.
        torch.autograd.backward(loss.sum())
        self.variants.step(rate_factor(self.step, self.plan.steps))
        return loss.detach()

    def _losses(
        self,
        part: Part,
        places: list[int],
        pixels: Tensor | None,
        tasks: Sequence[Task],
        running: Running,
    ) -> Tensor:
        """The loss of every variant on these images, (V,); `running` counts them."""
        contexts, places = self._contexts(part, places, pixels)
        targets = part.targets[places].to(self.backbone.device)
        logits = answers(self.backbone, contexts, tasks)
        loss = mean_losses(logits, targets, self.plan.problem)
        running.add(loss, count_hits(logits.detach(), targets, self.plan.problem), len(places))
        return loss

    def _contexts(
        self, part: Part, places: list[int], pixels: Tensor | None
    ) -> tuple[ContextBatch, list[int]]:
        if pixels is not None:
            return encode(self.backbone, pixels, rows=self.variants.need_rows), places
        assert part.kept is not None
        contexts, order = part.kept.batch(places)
        return contexts, [places[position] for position in order]

    # --- after an epoch ---------------------------------------------------------------------------

    def _close_epoch(self) -> None:
        running, problem = self._running, self.plan.problem
        train_loss = running.loss / max(1, running.images)
        train_score = score_of(running.counts, problem)
        epoch = Epoch(self.step, train_loss.tolist(), train_score.tolist())
        if self.val is not None:
            val_loss, val_score = self._validate(self.val)
            epoch.val_loss, epoch.val_score = val_loss.tolist(), val_score.tolist()
        self.epochs.append(epoch)
        self._running = Running.zero(len(self.variants))
        self._keep_best(epoch.val_loss or epoch.train_loss, smoothed_scores(self.epochs))

    def _validate(self, val: Part) -> tuple[Tensor, Tensor]:
        running = Running.zero(len(self.variants))
        with torch.no_grad():
            tasks = self.variants.tasks()
            for start in range(0, len(val), self.plan.batch):
                places = list(range(start, min(start + self.plan.batch, len(val))))
                self._losses(val, places, None, tasks, running)
        return running.loss / running.images, score_of(running.counts, self.plan.problem)

    def _keep_best(self, losses: Sequence[float], scores: Sequence[float]) -> None:
        """The highest score; of equal ones the lowest loss."""
        ranked = []
        for place, (loss, score) in enumerate(zip(losses, scores, strict=True)):
            finite = math.isfinite(loss) and math.isfinite(score)
            if finite and not self.variants.diverged[place]:
                ranked.append((score, -loss, -place))
        if not ranked:
            return
        best = self.best
        top = max(ranked)
        if best is None or top[:2] > (best.score, -best.loss):
            place = -top[2]
            self.best = Best(place, self.step, top[0], -top[1], self.variants.weights(place))

    def _tick(self, loss: Tensor, rate: float) -> Tick:
        if self._running.images:
            scores = score_of(self._running.counts, self.plan.problem).nan_to_num(-torch.inf)
            best = float(scores.max())
        else:
            best = max(self.epochs[-1].train_score)
        lowest = float(loss.nan_to_num(torch.inf).min())
        return Tick(self.step, self.plan.steps, lowest, best, rate)


def epoch_order(seed: int, epoch: int, count: int) -> list[int]:
    order: list[int] = np.random.default_rng([seed, 0x0D, epoch]).permutation(count).tolist()
    return order


def answers(backbone: Backbone, contexts: ContextBatch, tasks: Sequence[Task]) -> Tensor:
    """What every task answers to every image, (V, B, K), in the order of both."""
    result = masked_pass(backbone, None, contexts, [list(tasks)] * len(contexts), StackCache())
    by_task = {answer.task: answer.values for answer in result.logits}
    return torch.stack([by_task[task] for task in tasks])


def steps_within(
    seconds: float,
    backbone: Backbone,
    variants: Variants,
    parts: Mapping[SplitName, Part],
    plan: Plan,
    pool: Executor,
) -> Plan:
    """The plan with as many steps as fit; at least the warm-up.

    The steps tried leave no trace, so that the run can be repeated by giving the epochs this comes
    to.
    """
    before = variants.state()
    train = parts["train"]
    loop = Loop(backbone, variants, train, None, replace(plan, steps=TRIAL_STEPS + 1), pool)
    times = [time.perf_counter()]
    loop.run(
        stop=lambda: time.perf_counter() - times[0] > seconds * TRIAL_SHARE,
        on_step=lambda tick: times.append(time.perf_counter()),
    )
    variants.load(before)
    taken = [end - start for start, end in itertools.pairwise(times)]
    steady = sorted(taken[SLOW_STEPS:] or taken[-1:])
    step = steady[len(steady) // 2] if steady else time.perf_counter() - times[0]
    seconds -= time.perf_counter() - times[0]
    per_epoch = plan.steps_per_epoch(len(train))
    epoch = step * per_epoch
    if "val" in parts:
        # Validation has no backward pass and its contexts are mostly kept: a third at most.
        epoch += step * plan.steps_per_epoch(len(parts["val"])) / 3
    epochs = max(0.0, seconds * (1 - SPARE) / epoch)
    steps = int(epochs) * per_epoch if epochs >= 1 else int(epochs * per_epoch)
    return replace(plan, steps=max(WARM_UP_STEPS + 1, steps))
