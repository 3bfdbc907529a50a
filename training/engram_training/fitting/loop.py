"""The training loop: all variants of a sweep, step by step, on the same images.

The order and augmentation of images depend only on the seed, the epoch and the image, not on the
variants or on interruptions. Each epoch ends with validation, and the best variant at its best
epoch is kept. Variants are compared by their mean score over the last three epochs, because the
maximum of many single scores on few images is mostly luck. Variants that fall behind are stopped,
and the run ends when none makes progress (`fitting.stopping`).
"""

import itertools
import math
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
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
from engram_training.data.dataset import SplitName, TaskType
from engram_training.data.images import encode
from engram_training.data.workspace import Tick
from engram_training.fitting.closed_form import fused
from engram_training.fitting.losses import count_hits, mean_losses, score_of
from engram_training.fitting.parts import Part
from engram_training.fitting.stopping import Epoch, behind, has_stalled, smoothed_scores
from engram_training.fitting.variants import (
    EQUAL_SHARES,
    WARM_UP_STEPS,
    Shares,
    Variants,
    named_tensors,
    rate_factor,
    weights_from,
)

AHEAD = 2  # batches prepared while a step runs
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
class Best:
    variant: int
    step: int
    score: float  # smoothed
    loss: float
    weights: TaskWeights
    shares: Shares


@dataclass(slots=True)
class Running:
    """Sums over images for each variant; NaN for those that do not run."""

    loss: Tensor  # (V,)
    counts: Tensor  # (V, 3)
    images: int = 0

    @classmethod
    def zero(cls, variants: int, run: Collection[int]) -> "Running":
        loss, counts = torch.full((variants,), torch.nan), torch.full((variants, 3), torch.nan)
        loss[list(run)], counts[list(run)] = 0, 0
        return cls(loss.double(), counts.double())

    def add(self, variants: list[int], loss: Tensor, counts: Tensor, images: int) -> None:
        self.loss[variants] += loss.detach().double().cpu() * images
        self.counts[variants] += counts.cpu()
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
    _stalled: bool = False

    def __post_init__(self) -> None:
        self._running = self._no_images()
        self._shares: dict[int, Shares] = {}  # as last validated

    @property
    def done(self) -> bool:
        return self.step >= self.plan.steps or self._stalled

    def run(
        self,
        stop: Callable[[], bool] = lambda: False,
        on_step: Callable[[Tick], None] | None = None,
        on_checkpoint: Callable[[], None] | None = None,
    ) -> None:
        """Run until the plan is done or `stop` is True; calls `on_checkpoint` after every step."""
        seen, started = 0, time.perf_counter()
        for indices, pixels in self._batches(self.step):
            if stop() or self.done:
                break
            loss = self._losses(indices, pixels)
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
            numbers["best"] = [best.variant, best.step, best.score, best.loss, best.shares]
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
            variant, step, score, loss, shares = numbers["best"]
            weights = weights_from(under("best."))
            self.best = Best(variant, step, score, loss, weights, Shares(*shares))
        for count in range(1, len(self.epochs) + 1):
            self._stop_early(self.epochs[:count])

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

    def _losses(self, indices: list[int], pixels: Tensor | None) -> Tensor:
        """Return the loss of each running variant on training images, and count it."""
        if pixels is not None:
            contexts = encode(self.backbone, pixels, rows=self.variants.need_rows)
        else:
            contexts, indices = self._kept(self.train, indices)
        tasks = self.variants.tasks()
        targets = self.train.targets[indices].to(self.backbone.device)
        logits = answers(self.backbone, contexts, list(tasks.values()))
        loss = mean_losses(logits, targets, self.plan.task_type)
        counts = count_hits(logits.detach(), targets, self.plan.task_type)
        self._running.add(list(tasks), loss, counts, len(indices))
        return loss

    def _kept(self, part: Part, indices: list[int]) -> tuple[ContextBatch, list[int]]:
        """Return kept contexts, and the images in their order."""
        assert part.kept is not None
        contexts, order = part.kept.batch(indices)
        return contexts, [indices[position] for position in order]

    def _no_images(self) -> Running:
        return Running.zero(len(self.variants), self.variants.running)

    def _close_epoch(self) -> None:
        running, task_type = self._running, self.plan.task_type
        train_loss = running.loss / max(1, running.images)
        train_score = score_of(running.counts, task_type)
        epoch = Epoch(self.step, train_loss.tolist(), train_score.tolist())
        if self.val is not None:
            self._validate(self.val, epoch)
        self.epochs.append(epoch)
        self._keep_best(epoch.val_loss or epoch.train_loss, smoothed_scores(self.epochs))
        self._stop_early(self.epochs)
        self._running = self._no_images()

    def _stop_early(self, epochs: Sequence[Epoch]) -> None:
        """Stop variants that are behind, and the run if there is no progress."""
        if self.val is None:
            return
        self.variants.stopped |= behind(epochs, len(self.val))
        self._stalled = has_stalled(epochs) or not self.variants.trained

    @torch.no_grad()
    def _validate(self, val: Part, epoch: Epoch) -> None:
        """Set the validation figures of the epoch, and the shares of rows and closed form."""
        tasks, closed_form = self.variants.tasks(), self.variants.closed_form()
        added = [] if closed_form is None else [closed_form]
        parts, images = [], list[int]()
        for start in range(0, len(val), self.plan.batch):
            indices = list(range(start, min(start + self.plan.batch, len(val))))
            contexts, indices = self._kept(val, indices)
            parts.append(answers(self.backbone, contexts, [*tasks.values(), *added]))
            images += indices
        logits = torch.cat(parts, dim=1)  # (V + 1, n, K)
        targets, task_type = val.targets[images].to(logits.device), self.plan.task_type
        alone = mean_losses(logits[: len(tasks)], targets, task_type)
        for place, index in enumerate(tasks):
            variant = self.variants.variants[index]
            if variant.has_row and variant.reads_layers and math.isfinite(alone[place]):
                shares = Shares(*fused(logits[-1], logits[place], targets, task_type))
                logits[place] = shares.closed_form * logits[-1] + shares.row * logits[place]
                self._shares[index] = shares
        logits = logits[: len(tasks)]
        losses = mean_losses(logits, targets, task_type)
        scores = score_of(count_hits(logits, targets, task_type), task_type)
        epoch.row_loss, epoch.val_loss, epoch.val_score = (
            self._by_variant(list(tasks), values) for values in (alone, losses, scores)
        )

    def _by_variant(self, run: list[int], values: Tensor) -> list[float]:
        whole = [math.nan] * len(self.variants)
        for index, value in zip(run, values.tolist(), strict=True):
            whole[index] = value
        return whole

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
            shares = self._shares.get(index, EQUAL_SHARES)
            weights = self.variants.weights(index, shares)
            self.best = Best(index, self.step, score, -negative_loss, weights, shares)

    def _tick(self, loss: Tensor, rate: float) -> Tick:
        if self._running.images:
            scores = score_of(self._running.counts, self.plan.task_type).nan_to_num(-torch.inf)
            best = float(scores.max())
        else:
            scored = filter(math.isfinite, self.epochs[-1].train_score)
            best = max(scored, default=math.nan)
        lowest = min(loss.nan_to_num(torch.inf).tolist(), default=math.nan)
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
