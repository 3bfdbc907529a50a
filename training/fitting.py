"""From images to a bundle: `fit` is `engram train` for programs and notebooks.

    from training import fit

    fitted = fit("photos", name="flowers", backbone="models/vit", out="flowers.safetensors")
    fitted.bundle, fitted.figures["test"].values["accuracy"]

Every step is a module of its own: reading (`data`, `images`), training (`variants`, `loop`),
judging (`predict`, `metrics`), writing (`export`, `report`). Here is only their order.
"""

import os
import time
from collections.abc import Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from server.errors import ImageError
from server.model import Backbone, load_backbone
from server.model.masked_pass import masked_pass
from server.model.preprocessing import read_header
from server.model.tasks import StackCache, Task, prepare
from task_store import TaskBundle, check_task_name
from task_store.codec import ByteArray
from task_store.limits import DEFAULT_LIMITS
from training import export
from training.augment import Augmentation, choose
from training.checkpoint import (
    Checkpoint,
    checkpoint_path,
    read_checkpoint,
    write_checkpoint,
    write_whole,
)
from training.contexts import KeptContexts
from training.cost import Cost, cost_of
from training.data import (
    DEFAULT_FRACTIONS,
    DataSet,
    Fractions,
    Problem,
    SplitName,
    lonely_classes,
    read_data,
    split_data,
    untrained_classes,
)
from training.errors import DataError, SettingsConflict
from training.golden import golden_pixels
from training.images import ImageSet, Unreadable
from training.interruption import Interruption
from training.lineage import load_tasks
from training.loop import Epoch, Loop, Part, Plan
from training.metrics import SCORE_NAMES, Figures, figures
from training.planning import steps_within
from training.predict import predict
from training.report import Mistake, Report, most_confident_mistakes, write_report
from training.scratch import Scratch
from training.variants import AUTO_RATES, Regime, Variant, Variants, sweep
from training.watching import Watcher

DEFAULT_EPOCHS = 20
DEFAULT_KEEP_BYTES = 8 * 2**30
CHECKPOINT_SECONDS = 20.0
HEADERS_READ = 64


@dataclass(frozen=True, slots=True)
class Options:
    """How to train; the defaults are the paper's recipe."""

    memory: tuple[int, ...] = (1, 5, 10)
    rates: tuple[float, ...] = AUTO_RATES
    regimes: tuple[Regime, ...] = ("memory",)
    seeds: int = 1
    seed: int = 0
    epochs: int | None = None
    minutes: float | None = None
    batch: int = 32
    augment: Augmentation | None = None  # None: by the size of the images
    split: Fractions = DEFAULT_FRACTIONS
    problem: Problem | None = None  # None: by the labels
    keep_bytes: int = DEFAULT_KEEP_BYTES
    description: str = ""
    license: str | None = None

    def __post_init__(self) -> None:
        if self.epochs is not None and self.minutes is not None:
            raise SettingsConflict("give epochs or minutes, not both")
        if self.epochs is not None and self.epochs < 1:
            raise SettingsConflict(f"{self.epochs} epochs are too few; train for one or more")
        if self.minutes is not None and not self.minutes > 0:
            raise SettingsConflict(f"{self.minutes:g} minutes are too few")
        if self.batch < 1 or self.seeds < 1:
            raise SettingsConflict("a batch has one image or more, and a sweep one seed or more")
        if min(self.split) < 0 or self.split[0] <= 0:
            raise SettingsConflict("the shares of a split are not negative, and training has one")
        # Said now, not when the trained bundle is written.
        _check_length("description", self.description, DEFAULT_LIMITS.max_description_chars)
        _check_length("license", self.license or "", DEFAULT_LIMITS.max_text_chars)

    def variants(self) -> list[Variant]:
        seeds = range(self.seed, self.seed + self.seeds)
        return sweep(self.regimes, self.memory, self.rates, list(seeds))


def _check_length(what: str, text: str, most: int) -> None:
    if len(text) > most:
        raise SettingsConflict(f"the {what} has {len(text)} characters, and {most} are allowed")


@dataclass(frozen=True, slots=True)
class Fitted:
    """What a run gave."""

    bundle: TaskBundle
    variant: Variant
    variants: list[Variant]
    epochs: list[Epoch]
    figures: dict[str, Figures]  # by split: val, test
    cost: Cost
    skipped: list[Unreadable]
    notes: list[str]
    interrupted: bool
    seconds: float
    path: Path | None = None
    report: Path | None = None


def fit(
    data: str | Path,
    *,
    name: str,
    backbone: Backbone | str | Path,
    out: str | Path | None = None,
    extends: Sequence[str | Path] = (),
    resume: bool = False,
    watcher: Watcher | None = None,
    options: Options | None = None,
    **changes: Any,  # noqa: ANN401 - fields of Options, checked by it
) -> Fitted:
    """Train a task on a folder or a table of images; the best variant becomes the bundle.

    With `out` the bundle and its report are written there. Keywords are fields of `Options`.
    """
    check_task_name(name)
    settings = replace(options or Options(), **changes)
    target = None if out is None else _checked_target(Path(out).expanduser())
    if resume and target is None:
        raise SettingsConflict("to resume, a run needs the file it was to write")
    if not isinstance(backbone, Backbone):
        backbone = load_backbone(backbone)
    workers = ThreadPoolExecutor(max_workers=min(4, os.cpu_count() or 1))
    scratch = Scratch(settings.keep_bytes, None if target is None else target.parent)
    try:
        run = _Run(name, settings, backbone, target, watcher or Watcher(), workers, scratch)
        return run.fit(read_data(data, settings.problem), extends, resume)
    finally:
        workers.shutdown(cancel_futures=True)
        scratch.close()


def _checked_target(path: Path) -> Path:
    """Refuse before training what could not be written after it."""
    if path.suffix != ".safetensors":
        raise SettingsConflict(f"the bundle '{path}' must be named *.safetensors")
    if path.is_dir() or not os.access(path.parent, os.W_OK):
        reason = "is a folder" if path.is_dir() else "lies in no folder that can be written to"
        raise SettingsConflict(f"the bundle '{path}' {reason}")
    return path


@dataclass(frozen=True, slots=True)
class _Scaling:
    """Regression trains on numbers of mean zero and variance one; elsewhere this is neutral."""

    mean: Tensor
    spread: Tensor

    @classmethod
    def of(cls, targets: Tensor, problem: Problem) -> "_Scaling":
        if problem != "regression":
            return cls(torch.zeros(1), torch.ones(1))
        spread = targets.std(dim=0, correction=0)
        return cls(targets.mean(dim=0), torch.where(spread > 0, spread, 1.0))

    def apply(self, targets: Tensor, problem: Problem) -> Tensor:
        return (targets - self.mean) / self.spread if problem == "regression" else targets


class _Run:
    """One run, step by step."""

    def __init__(
        self,
        name: str,
        options: Options,
        backbone: Backbone,
        target: Path | None,
        watcher: Watcher,
        pool: Executor,
        scratch: Scratch,
    ) -> None:
        self._name = name
        self._options = options
        self._backbone = backbone
        self._target = target
        self._watcher = watcher
        self._pool = pool
        self._scratch = scratch
        self._started = time.perf_counter()
        self._notes: list[str] = []
        self._skipped: list[Unreadable] = []
        self._sets: dict[SplitName, ImageSet] = {}

    def fit(self, data: DataSet, extends: Sequence[str | Path], resume: bool) -> Fitted:
        parents = load_tasks(self._backbone, list(extends)) if extends else None
        digests, tasks = parents.youngest if parents is not None else ([], [])
        candidates = self._options.variants()
        data = split_data(data, self._options.split, self._options.seed)
        augmentation = self._options.augment or self._suited(data)
        data = self._read_images(data, augmentation)
        targets = torch.from_numpy(data.part("train").targets())
        scaling = _Scaling.of(targets, data.problem)
        variants = Variants(
            self._backbone,
            candidates,
            data.outputs,
            head_bias=_prior(targets, data),
            parents=tasks,
        )
        run = self._identity(data, candidates, digests, augmentation)
        before = self._checkpoint(run) if resume else None
        with Interruption() as interruption:
            parts = self._parts(data, scaling, variants, augmentation, interruption)
            loop = self._loop(data, variants, parts, augmentation, before)
            stopped = self._train(loop, run, interruption)
        return self._finish(data, loop, scaling, candidates, tasks, digests, run, stopped)

    # --- before training --------------------------------------------------------------------------

    def _suited(self, data: DataSet) -> Augmentation:
        """By the size of some training images, told by their headers."""
        paths = [sample.path for sample in data.part("train").samples]
        sides = []
        for path in paths[:: max(1, len(paths) // HEADERS_READ)]:
            # Unreadable ones are told later, all at once.
            with suppress(OSError, ImageError):
                header = read_header(path.read_bytes())
                sides.append(min(header.width, header.height))
        return choose(np.array(sides, dtype=np.int64))

    def _read_images(self, data: DataSet, augmentation: Augmentation) -> DataSet:
        view = self._backbone.preprocessing
        for split in ("val", "test", "train"):
            paths = [sample.path for sample in data.part(split).samples]
            cropped = split == "train" and augmentation != "none"
            images = ImageSet(paths, view, self._scratch, sources=cropped)
            told = self._watcher.stage(f"reading {split} images")
            self._skipped += images.read_all(self._pool, told)
            self._sets[split] = images
        data = data.without(one.path for one in self._skipped)
        return self._without_lost_classes(data)

    def _without_lost_classes(self, data: DataSet) -> DataSet:
        if self._skipped:
            first = self._skipped[0]
            self._note(
                f"{len(self._skipped)} images were skipped, first '{first.path}': {first.reason}"
            )
        if not len(data.part("train")):
            raise DataError(f"no training image of '{data.name}' can be read")
        if data.problem != "regression":
            present = {value for sample in data.samples for value in sample.values}
            gone = [label for label in data.labels if label not in present]
            if gone:
                self._note(f"no image of {_listed(gone)} can be read: left out of the task")
                data = replace(data, labels=tuple(sorted(map(str, present))))
            if data.problem == "single_label" and len(data.labels) < 2:
                raise DataError("images of one class only can be read; a task needs two or more")
            if untrained := untrained_classes(data):
                self._note(f"training has no image of {_listed(untrained)}")
        if not len(data.part("val")):
            self._note(
                "no image is left to validate on, so the best variant is the one that fits the "
                "training images best, which says little about new ones"
            )
        elif data.problem == "single_label" and (lonely := lonely_classes(data)):
            self._note(f"no image to validate {_listed(lonely)} on: too few images")
        return data

    def _parts(
        self,
        data: DataSet,
        scaling: _Scaling,
        variants: Variants,
        augmentation: Augmentation,
        interruption: Interruption,
    ) -> dict[str, Part]:
        parts: dict[str, Part] = {}
        splits: tuple[SplitName, ...] = ("val", "train")
        for split in splits:
            images, kept = self._sets[split], None
            if split == "val" or augmentation == "none":
                rows = variants.need_rows
                kept = KeptContexts(self._backbone, images, self._scratch, rows=rows)
                told = self._watcher.stage(f"encoding {split} images")
                kept.fill(self._options.batch, told, interruption.asked)
            targets = torch.from_numpy(data.part(split).targets(data.labels))
            if len(images):
                parts[split] = Part(images, scaling.apply(targets, data.problem), kept)
        return parts

    def _loop(
        self,
        data: DataSet,
        variants: Variants,
        parts: dict[str, Part],
        augmentation: Augmentation,
        before: Checkpoint | None,
    ) -> Loop:
        options, train = self._options, parts["train"]
        per_epoch = -(-len(train) // options.batch)
        steps = per_epoch * (options.epochs or DEFAULT_EPOCHS)
        plan = Plan(data.problem, steps, options.batch, options.seed, augmentation)
        if before is not None:
            plan = replace(plan, steps=before.progress["steps"])
        elif options.minutes is not None:
            left = options.minutes * 60 - (time.perf_counter() - self._started)
            plan = steps_within(left, self._backbone, variants, parts, plan, self._pool)
        loop = Loop(self._backbone, variants, train, parts.get("val"), plan, self._pool)
        if before is not None:
            loop.load(before.progress["loop"], before.tensors)
        self._plan = plan
        return loop

    # --- training ---------------------------------------------------------------------------------

    def _identity(
        self,
        data: DataSet,
        candidates: Sequence[Variant],
        digests: Sequence[str],
        augmentation: Augmentation,
    ) -> dict[str, Any]:
        """What makes two runs the same: the same of all this gives the same bundle."""
        options = self._options
        return {
            "data": data.digest,
            "problem": data.problem,
            "images": {split: len(self._sets[split]) for split in ("train", "val", "test")},
            "backbone": self._backbone.fingerprint,
            "variants": [variant.name for variant in candidates],
            "epochs": options.epochs,
            "minutes": options.minutes,
            "batch": options.batch,
            "seed": options.seed,
            "split": list(options.split),
            "augment": augmentation,
            "extends": list(digests),
        }

    def _checkpoint(self, run: dict[str, Any]) -> Checkpoint | None:
        assert self._target is not None
        found = read_checkpoint(checkpoint_path(self._target), run)
        if found is None:
            self._note("there is no checkpoint to resume from: started from the beginning")
        return found

    def _train(self, loop: Loop, run: dict[str, Any], interruption: Interruption) -> bool:
        last = time.perf_counter()

        def checkpoint() -> None:
            nonlocal last
            if loop.done or time.perf_counter() - last > CHECKPOINT_SECONDS:
                self._save(loop, run)
                last = time.perf_counter()

        told = self._watcher.training(self._plan.steps, SCORE_NAMES[self._plan.problem])
        loop.run(interruption.asked, told, checkpoint)
        if not loop.done:
            self._save(loop, run)
            self._note(f"interrupted at step {loop.progress.step} of {self._plan.steps}")
            if loop.progress.best is None:
                loop.validate_now()
        return not loop.done

    def _save(self, loop: Loop, run: dict[str, Any]) -> None:
        if self._target is not None:
            numbers, tensors = loop.state()
            progress = {"steps": self._plan.steps, "loop": numbers}
            write_checkpoint(checkpoint_path(self._target), Checkpoint(run, progress, tensors))

    # --- after training ---------------------------------------------------------------------------

    def _finish(
        self,
        data: DataSet,
        loop: Loop,
        scaling: _Scaling,
        candidates: list[Variant],
        parents: Sequence[Task],
        digests: Sequence[str],
        run: dict[str, Any],
        stopped: bool,
    ) -> Fitted:
        best = loop.progress.best
        if best is None:
            if stopped:  # before the first step: there is nothing to keep
                raise KeyboardInterrupt
            raise DataError("every variant went to infinity; try smaller learning rates")
        weights = best.weights
        if data.problem == "regression":
            weights = export.scale_head(weights, scaling.mean, scaling.spread)
        task = prepare(self._backbone, weights, parents)
        found, mistakes = self._judge(data, task)
        variant = candidates[best.variant]
        training = self._provenance(data, run, variant, best.step, stopped)
        bundle = export.make_bundle(
            self._backbone,
            weights,
            problem=data.problem,
            labels=data.labels,
            extends=digests,
            metrics=export.manifest_metrics(found),
            training=training,
            description=self._options.description,
            license=self._options.license,
            golden=self._golden(task),
        )
        fitted = Fitted(
            bundle=bundle,
            variant=variant,
            variants=candidates,
            epochs=loop.progress.epochs,
            figures=found,
            cost=cost_of(self._backbone, weights),
            skipped=self._skipped,
            notes=self._notes,
            interrupted=stopped,
            seconds=time.perf_counter() - self._started,
        )
        return fitted if self._target is None else self._write(self._target, fitted, mistakes)

    def _judge(self, data: DataSet, task: Task) -> tuple[dict[str, Figures], list[Mistake]]:
        """Figures by split, and the mistakes of the split that speaks for new images best."""
        found: dict[str, Figures] = {}
        mistakes: list[Mistake] = []
        splits: tuple[SplitName, ...] = ("val", "test")
        for split in splits:
            images = self._sets[split]
            if not len(images):
                continue
            told = self._watcher.stage(f"judging on {split} images")
            batch = self._options.batch
            (logits,) = predict(self._backbone, images, [task], batch, self._pool, told)
            targets = torch.from_numpy(data.part(split).targets(data.labels))
            found[split] = figures(logits, targets, data.problem, data.labels)
            if data.problem == "single_label":
                mistakes = most_confident_mistakes(images, logits, targets, data.labels)
        return found, mistakes

    def _golden(self, task: Task) -> tuple[ByteArray, Tensor]:
        pixels = golden_pixels(self._backbone.image_size)
        normalised = self._backbone.preprocessing.normalise(
            torch.from_numpy(pixels).to(self._backbone.device), self._backbone.dtype
        )
        with torch.no_grad():
            passed = masked_pass(self._backbone, normalised, None, [[task]] * 2, StackCache())
        return pixels, passed.logits[0].values.cpu()

    def _provenance(
        self, data: DataSet, run: dict[str, Any], variant: Variant, step: int, stopped: bool
    ) -> dict[str, Any]:
        """No times and no paths: the same run gives the same bytes on any day and machine."""
        return {
            "tool": "engram train",
            "data": {"name": data.name, "digest": data.digest, "skipped": len(self._skipped)},
            "images": run["images"],
            "split": run["split"],
            "seed": run["seed"],
            "variant": {
                "regime": variant.regime,
                "memory": variant.memory,
                "learning_rate": variant.rate,
                "seed": variant.seed,
            },
            "variants": len(run["variants"]),
            "selected_on": "val" if len(self._sets["val"]) else "train",
            "steps": self._plan.steps,
            "best_step": step,
            "batch": self._plan.batch,
            "augment": self._plan.augmentation,
            "optimiser": "SGD, momentum 0.9, clipped at 1.0, 5 steps of warm-up, cosine",
            "interrupted": stopped,
        }

    def _write(self, target: Path, fitted: Fitted, mistakes: list[Mistake]) -> Fitted:
        write_whole(target, fitted.bundle.to_bytes())
        page = target.with_suffix(".html")
        report = Report(
            name=self._name,
            bundle=fitted.bundle,
            backbone=self._backbone.name,
            layers=self._backbone.layers,
            variant=fitted.variant,
            variants=fitted.variants,
            epochs=fitted.epochs,
            figures=fitted.figures,
            cost=fitted.cost,
            mistakes=mistakes,
            skipped=fitted.skipped,
            notes=fitted.notes,
            seconds=fitted.seconds,
        )
        write_report(page, report)
        if not fitted.interrupted:
            checkpoint_path(target).unlink(missing_ok=True)
        return replace(fitted, path=target, report=page)

    def _note(self, text: str) -> None:
        self._notes.append(text)
        self._watcher.note(text)


def _prior(targets: Tensor, data: DataSet) -> Tensor | None:
    """Where biases start: for several labels at how frequent each is, else at zero."""
    if data.problem != "multi_label":
        return None
    share = (targets.sum(dim=0) + 1) / (len(targets) + 2)
    return torch.log(share / (1 - share))


def _listed(names: Sequence[str], most: int = 5) -> str:
    shown = ", ".join(f"'{name[:60]}'" for name in names[:most])
    return shown if len(names) <= most else f"{shown} and {len(names) - most} more"
