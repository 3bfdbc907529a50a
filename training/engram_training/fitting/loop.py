"""The training loop: all variants of a sweep, step by step, on the same images.

The order and augmentation of images depend only on the seed, the epoch and the image, not on the
variants or on interruptions. Each epoch ends with validation, and the best variant at its best
epoch is kept. Variants are compared by their mean score over the last three epochs, because the
maximum of many single scores on few images is mostly luck.
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
from engram_server.model import Backbone, ContextBatch, TaskWeights
from engram_server.model.masked_pass import masked_pass
from engram_server.model.tasks import StackCache, Task
from torch import Tensor

from engram_training.data.augment import Augmentation
from engram_training.data.contexts import encode
from engram_training.data.dataset import SplitName, TaskType
from engram_training.data.workspace import Tick
from engram_training.fitting.losses import count_hits, mean_losses, score_of
from engram_training.fitting.parts import Part
from engram_training.fitting.variants import (
    WARM_UP_STEPS,
    Variants,
    named_tensors,
    rate_factor,
    weights_from,
)

AHEAD = 2  # batches prepared while a step runs
SMOOTHED = 3  # epochs whose mean score counts
TRIAL_STEPS = 10
SLOW_STEPS = 4  # at first, which wait for caches, threads and images
SPARE = 0.1  # reserved for the final evaluation and for a machine that gets slower
TRIAL_SHARE = 0.1  # of the time, at most for trial steps


@dataclass(frozen=True, slots=True)
class Plan:
    task_type: TaskType
    steps: int
    batch: int
    seed: int
    augmentation: Augmentation

    def steps_per_epoch(self, images: int) -> int:
        return -(-images // self.batch)


@dataclass(slots=True)
class Epoch:
    """The results of one epoch for each variant."""

    step: int  # at the end of the epoch
    train_loss: list[float]
    train_score: list[float]
    val_loss: list[float] | None = None
    val_score: list[float] | None = None


def smoothed_scores(epochs: Sequence[Epoch]) -> list[float]:
    """Return the mean score of each variant over the last epochs."""
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
    """Runs a plan once; a resumed run is a new loop with loaded state."""

    backbone: Backbone
    variants: Variants
    train: Part
    val: Part | None
    plan: Plan
    pool: Executor
    # Together with the state of the variants, these are the checkpoint.
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
        """Run until the plan is done or `stop` is True; calls `on_checkpoint` after every step."""
        seen, started = 0, time.perf_counter()
        for indices, pixels in self._batches(self.step):
            if stop():
                break
            loss = self._losses(self.train, indices, pixels, self.variants.tasks(), self._running)
            # A sum, so that the gradient of a variant does not depend on the others.
            if loss.requires_grad:
                torch.autograd.backward(loss.sum())
            self.variants.step(rate_factor(self.step, self.plan.steps))
            self.step += 1
            seen += len(indices)
            rate = seen / max(1e-9, time.perf_counter() - started)
            if self.step % self.plan.steps_per_epoch(len(self.train)) == 0 or self.done:
                self._close_epoch()
            if on_step is not None:
                on_step(self._tick(loss.detach(), rate))
            if on_checkpoint is not None:
                on_checkpoint()

    def find_best(self) -> None:
        """Validate now, if the run was stopped before its first validation."""
        if self.best is None and self._running.images:
            self._close_epoch()

    def state(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """Return the numbers and tensors that `load` restores."""
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

    def _batches(self, first: int) -> Iterator[tuple[list[int], Tensor | None]]:
        """Yield the images of each step from `first`, with pixels if contexts are not kept."""
        steps = iter(range(first, self.plan.steps))
        waiting = deque(map(self._submit, itertools.islice(steps, AHEAD)))
        try:
            while waiting:
                indices, future = waiting.popleft()
                waiting.extend(map(self._submit, itertools.islice(steps, 1)))
                yield indices, None if future is None else future.result()
        finally:
            for _, future in waiting:
                if future is not None:
                    future.cancel()

    def _submit(self, step: int) -> "tuple[list[int], Future[Tensor] | None]":
        epoch, position = divmod(step, self.plan.steps_per_epoch(len(self.train)))
        start = position * self.plan.batch
        order = epoch_order(self.plan.seed, epoch, len(self.train))
        indices = order[start : start + self.plan.batch]
        if self.train.kept is not None:
            return indices, None
        images, how = self.train.images, self.plan.augmentation
        if how == "none":
            return indices, self.pool.submit(images.batch, indices)
        seed = [self.plan.seed, 0xA6, epoch]
        return indices, self.pool.submit(images.augmented_batch, indices, how, seed)

    def _losses(
        self,
        part: Part,
        indices: list[int],
        pixels: Tensor | None,
        tasks: Sequence[Task],
        running: Running,
    ) -> Tensor:
        """Return the loss of every variant, (V,), and add it to `running`."""
        if pixels is not None:
            contexts = encode(self.backbone, pixels, rows=self.variants.need_rows)
        else:
            assert part.kept is not None
            contexts, order = part.kept.batch(indices)
            indices = [indices[position] for position in order]
        targets = part.targets[indices].to(self.backbone.device)
        logits = answers(self.backbone, contexts, tasks)
        loss = mean_losses(logits, targets, self.plan.task_type)
        running.add(loss, count_hits(logits.detach(), targets, self.plan.task_type), len(indices))
        return loss

    def _close_epoch(self) -> None:
        running, task_type = self._running, self.plan.task_type
        train_loss = running.loss / max(1, running.images)
        train_score = score_of(running.counts, task_type)
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
                indices = list(range(start, min(start + self.plan.batch, len(val))))
                self._losses(val, indices, None, tasks, running)
        return running.loss / running.images, score_of(running.counts, self.plan.task_type)

    def _keep_best(self, losses: Sequence[float], scores: Sequence[float]) -> None:
        """Keep the highest score, and the lowest loss among equal scores."""
        ranked = [
            (score, -loss, -index)
            for index, (loss, score) in enumerate(zip(losses, scores, strict=True))
            if math.isfinite(loss) and math.isfinite(score) and not self.variants.diverged[index]
        ]
        if not ranked:
            return
        score, negative_loss, negative_index = max(ranked)
        best, index = self.best, -negative_index
        if best is None or (score, negative_loss) > (best.score, -best.loss):
            self.best = Best(index, self.step, score, -negative_loss, self.variants.weights(index))

    def _tick(self, loss: Tensor, rate: float) -> Tick:
        if self._running.images:
            scores = score_of(self._running.counts, self.plan.task_type).nan_to_num(-torch.inf)
            best = float(scores.max())
        else:
            best = max(self.epochs[-1].train_score)
        lowest = float(loss.nan_to_num(torch.inf).min())
        return Tick(self.step, self.plan.steps, lowest, best, rate)


def epoch_order(seed: int, epoch: int, count: int) -> list[int]:
    order: list[int] = np.random.default_rng([seed, 0x0D, epoch]).permutation(count).tolist()
    return order


def answers(backbone: Backbone, contexts: ContextBatch, tasks: Sequence[Task]) -> Tensor:
    """Return the logits of every task for every image, (V, B, K)."""
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
    """Plan as many steps as fit into the time, at least the warm-up.

    The trial steps leave no trace, so a run with the resulting number of epochs gives the same
    bundle.
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
    durations = [end - start for start, end in itertools.pairwise(times)]
    steady = sorted(durations[SLOW_STEPS:] or durations[-1:])
    step = steady[len(steady) // 2] if steady else time.perf_counter() - times[0]
    seconds -= time.perf_counter() - times[0]
    per_epoch = plan.steps_per_epoch(len(train))
    epoch = step * per_epoch
    if "val" in parts:
        # Validation has no backward pass and mostly kept contexts: at most a third of the cost.
        epoch += step * plan.steps_per_epoch(len(parts["val"])) / 3
    epochs = max(0.0, seconds * (1 - SPARE) / epoch)
    steps = int(epochs) * per_epoch if epochs >= 1 else int(epochs * per_epoch)
    return replace(plan, steps=max(WARM_UP_STEPS + 1, steps))
