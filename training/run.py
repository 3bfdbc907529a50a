"""One training run, from options to a bundle and its report: `engram train` for programs.

    from training import fit

    fitted = fit("photos", name="flowers", backbone="models/vit", out="flowers.safetensors")
    fitted.bundle, fitted.figures["test"].values["accuracy"]

`fit` tells the whole story: read, train, judge, write. The steps are in the rooms beside this file.
"""

import os
import signal
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import FrameType
from typing import Any, Final

import torch

from server.model import Backbone, load_backbone
from server.model.golden import golden_pixels
from server.model.known import Known
from server.model.tasks import StackCache, Task, prepare
from task_store import check_task_name
from task_store.limits import DEFAULT_LIMITS
from training.bundles import LoadedTasks, load_tasks, make_bundle, rounded_adapter, write_whole
from training.data.augment import Augmentation
from training.data.corrections import Corrections, corrected
from training.data.dataset import (
    SPLITS,
    DataSet,
    Fractions,
    Problem,
    SplitName,
    read_data,
    split_data,
)
from training.data.images import PreparedData, read_images, suited_augmentation
from training.data.workspace import Workspace
from training.errors import DataError, SettingsConflict
from training.fitting.checkpoint import Checkpoint, CheckpointFile, checkpoint_path
from training.fitting.loop import Best, Loop, Plan, steps_within
from training.fitting.losses import SCORE_NAMES
from training.fitting.parts import Part, Scaling, make_parts, starting_bias
from training.fitting.solving import class_tokens, row_features, solved_head, what_is_known
from training.fitting.variants import (
    AUTO_RANKS,
    AUTO_REGIMES,
    RECIPES,
    Regime,
    SolvedHead,
    Start,
    Variant,
    Variants,
    need_rows,
    suited,
    sweep,
)
from training.judging.calibration import fit_temperature, tempered
from training.judging.cost import cost_of
from training.judging.evaluation import answer, predict
from training.judging.metrics import Figures, figures, manifest_metrics
from training.judging.report import Fitted, Mistake, most_confident_mistakes, render
from training.progress import Watcher

DEFAULT_EPOCHS = 15
# What a manifest keeps of the options: all that decides what is learned, and from which images.
KEPT_OPTIONS: Final = (
    "memory",
    "ranks",
    "rates",
    "regimes",
    "starts",
    "seeds",
    "seed",
    "epochs",
    "batch",
    "augment",
    "split",
    "problem",
    "any_image",
)
DEFAULT_FRACTIONS: Fractions = (0.8, 0.1, 0.1)


@dataclass(frozen=True, slots=True)
class Options:
    """How to train, checked before a run begins."""

    memory: tuple[int, ...] = (10,)
    ranks: tuple[int, ...] = AUTO_RANKS
    rates: tuple[float, ...] | None = None  # None: those that suit each regime
    regimes: tuple[Regime, ...] | None = None  # None: all but `class` are compared
    starts: tuple[Start, ...] | None = None  # None: those that suit each regime
    seeds: int = 1
    seed: int = 0
    epochs: int | None = None
    minutes: float | None = None
    batch: int = 32
    augment: Augmentation | None = "none"  # None: by the size of the images
    split: Fractions = DEFAULT_FRACTIONS
    problem: Problem | None = None  # None: by the labels
    any_image: bool = False  # what the task tells has nothing to do with what an image shows
    keep_bytes: int = 8 * 2**30
    description: str = ""
    license: str | None = None
    corrections: Corrections | None = None
    like: str | None = None  # the digest of the bundle whose training this one repeats

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
        # The manifest's limits, checked now and not when the trained bundle is written.
        _check_length("description", self.description, DEFAULT_LIMITS.max_description_chars)
        _check_length("license", self.license or "", DEFAULT_LIMITS.max_text_chars)

    def kept(self, epochs: int) -> dict[str, Any]:
        """As a manifest keeps them: those that are not left to the program, and how long it took.

        Minutes are another number of epochs on another machine.
        """
        values = {name: getattr(self, name) for name in KEPT_OPTIONS} | {"epochs": epochs}
        return {
            name: list(value) if isinstance(value, tuple) else value
            for name, value in values.items()
            if value is not None
        }

    def variants(self, *, extends: bool = False) -> list[Variant]:
        """The candidates; by default none that could not extend another task, where that is asked.

        A head alone has no row that could attend to a parent's.
        """
        regimes: Sequence[Regime] = self.regimes or AUTO_REGIMES
        if self.regimes is None and extends:
            regimes = AUTO_REGIMES[1:]  # a head alone cannot extend a task
        seeds = range(self.seed, self.seed + self.seeds)
        return sweep(regimes, self.memory, self.rates, list(seeds), self.ranks, self.starts)


def _check_length(what: str, text: str, most: int) -> None:
    if len(text) > most:
        raise SettingsConflict(f"the {what} has {len(text)} characters, and {most} are allowed")


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
    options = replace(options or Options(), **changes)
    candidates = options.variants(extends=bool(extends))
    target = None if out is None else _checked_target(Path(out).expanduser())
    if resume and target is None:
        raise SettingsConflict("to resume, a run needs the file it was to write")
    if not isinstance(backbone, Backbone):
        backbone = load_backbone(backbone)
    folder = None if target is None else target.parent
    with Workspace(options.keep_bytes, folder=folder, watcher=watcher) as workspace:
        run = _Run(name, backbone, options, candidates, target, workspace)
        parents = load_tasks(backbone, extends).youngest()
        prepared = run.read(data)
        chosen = suited(candidates, prepared.data.problem, extends=bool(parents.tasks))
        run = replace(run, candidates=chosen)
        loop, best, known = run.train(prepared, parents, resume)
        fitted = run.judge(prepared, parents, loop, best, known)
        return run.write(fitted)


def _checked_target(path: Path) -> Path:
    """Refuse before training what could not be written after it."""
    if path.suffix != ".safetensors":
        raise SettingsConflict(f"the bundle '{path}' must be named *.safetensors")
    if path.is_dir() or not os.access(path.parent, os.W_OK):
        reason = "is a folder" if path.is_dir() else "lies in no folder that can be written to"
        raise SettingsConflict(f"the bundle '{path}' {reason}")
    return path


@dataclass(frozen=True, slots=True)
class _Run:
    """The four steps of a run, in their order."""

    name: str
    backbone: Backbone
    options: Options
    candidates: list[Variant]
    target: Path | None
    workspace: Workspace
    started: float = field(default_factory=time.perf_counter)

    def read(self, source: str | Path) -> PreparedData:
        """Labels, splits, and every image once."""
        options = self.options
        data = read_data(source, options.problem)
        if options.corrections is not None:
            data, note = corrected(data, options.corrections, self.workspace.pool)
            self.workspace.note(note)
        data = split_data(data, options.split, options.seed)
        augmentation = options.augment or suited_augmentation(data)
        return read_images(data, augmentation, self.backbone.preprocessing, self.workspace)

    def train(
        self, prepared: PreparedData, parents: LoadedTasks, resume: bool
    ) -> tuple[Loop, Best, Known | None]:
        """All variants in the same passes, until the last step or Ctrl-C; and what they know.

        The best variant has its weights in the units of the data.
        """
        data, workspace = prepared.data, self.workspace
        targets = torch.from_numpy(data.part("train").targets())
        scaling = Scaling.of(targets, data.problem)
        checkpoint = CheckpointFile(self.target, self._identity(prepared, parents))
        saved = checkpoint.read() if resume else None
        if resume and saved is None:
            workspace.note("there is no checkpoint to resume from: started from the beginning")
        with Interruption() as interruption:
            parts = make_parts(
                prepared,
                scaling,
                self.backbone,
                workspace,
                batch=self.options.batch,
                rows=need_rows(self.candidates),
                stop=interruption.requested,
            )
            if interruption.requested():  # nothing to keep
                raise KeyboardInterrupt
            tokens = class_tokens(self.backbone, parts["train"], self.options.batch)
            variants = Variants(
                self.backbone,
                self.candidates,
                data.outputs,
                head_bias=starting_bias(targets, data.problem),
                solved=solved_head(tokens, targets.numpy(), data.problem, data.outputs),
                solved_row=self._solved_row(parts["train"], data),
                parents=parents.tasks,
            )
            plan = self._plan(prepared, parts, variants, saved)
            train, val = parts["train"], parts.get("val")
            loop = Loop(self.backbone, variants, train, val, plan, workspace.pool)
            if saved is not None:
                loop.load(saved.loop, saved.tensors)
            on_step = workspace.watcher.training(plan.steps, SCORE_NAMES[plan.problem])
            loop.run(interruption.requested, on_step, lambda: checkpoint.save_if_due(loop))
            if not loop.done:
                checkpoint.save(loop)
                workspace.note(f"interrupted at step {loop.step} of {plan.steps}")
                loop.find_best()
        best = loop.best
        if best is None and not loop.done:  # stopped before the first step: nothing to keep
            raise KeyboardInterrupt
        if best is None:
            raise DataError("every variant went to infinity; try smaller learning rates")
        known = None
        if not self.options.any_image:
            known = what_is_known(tokens, targets.numpy(), data.problem)
        return loop, replace(best, weights=rounded_adapter(scaling.undo(best.weights))), known

    def _solved_row(self, train: Part, data: DataSet) -> SolvedHead | None:
        """What rows start from, where a new row does not read what a head alone reads."""
        if self.backbone.feature == "class" or not need_rows(self.candidates):
            return None
        features = row_features(self.backbone, train, self.options.batch)
        targets = data.part("train").targets()
        return solved_head(features, targets, data.problem, data.outputs)

    def _plan(
        self,
        prepared: PreparedData,
        parts: Mapping[SplitName, Part],
        variants: Variants,
        saved: Checkpoint | None,
    ) -> Plan:
        """How many steps: as planned before, as many as the minutes allow, or the epochs."""
        options, data = self.options, prepared.data
        plan = Plan(data.problem, 0, options.batch, options.seed, prepared.augmentation)
        if saved is not None:
            return replace(plan, steps=saved.steps)
        if options.minutes is not None:
            left = options.minutes * 60 - (time.perf_counter() - self.started)
            return steps_within(left, self.backbone, variants, parts, plan, self.workspace.pool)
        epoch = plan.steps_per_epoch(len(parts["train"]))
        return replace(plan, steps=epoch * (options.epochs or DEFAULT_EPOCHS))

    def _identity(self, prepared: PreparedData, parents: LoadedTasks) -> dict[str, Any]:
        """What makes two runs the same: the same of all this gives the same bundle."""
        options = self.options
        return {
            "data": prepared.data.digest,
            "problem": prepared.data.problem,
            "images": {split: len(prepared.images[split]) for split in SPLITS},
            "backbone": self.backbone.fingerprint,
            "variants": [variant.name for variant in self.candidates],
            "epochs": options.epochs,
            "minutes": options.minutes,
            "batch": options.batch,
            "seed": options.seed,
            "split": list(options.split),
            "augment": prepared.augmentation,
            "extends": [parent.digest for parent in parents.bundles],
        }

    def judge(
        self,
        prepared: PreparedData,
        parents: LoadedTasks,
        loop: Loop,
        best: Best,
        known: Known | None,
    ) -> Fitted:
        """The best variant as a bundle, calibrated, and judged by the pass that the server runs."""
        backbone, data = self.backbone, prepared.data
        weights = replace(best.weights, known=known)
        temperature = self._temperature(prepared, prepare(backbone, weights, parents.tasks))
        weights = weights if temperature is None else tempered(weights, temperature)
        task = prepare(backbone, weights, parents.tasks)
        by_split, mistakes = self._figures(prepared, task)
        pixels = golden_pixels(backbone.image_size)
        (logits,) = answer(backbone, torch.from_numpy(pixels), [task], StackCache())
        bundle = make_bundle(
            backbone,
            weights,
            (pixels, logits),
            temperature=temperature,
            problem=data.problem,
            labels=data.labels,
            extends=tuple(parent.digest for parent in parents.bundles),
            metrics=manifest_metrics(by_split),
            training=self._provenance(prepared, loop, best),
            description=self.options.description,
            license=self.options.license,
        )
        return Fitted(
            name=self.name,
            bundle=bundle,
            backbone=backbone.name,
            parameters=[
                cost_of(backbone, loop.variants.weights(place)).parameters
                for place in range(len(self.candidates))
            ],
            variant=self.candidates[best.variant],
            variants=self.candidates,
            epochs=loop.epochs,
            figures=by_split,
            cost=cost_of(backbone, weights),
            mistakes=mistakes,
            skipped=prepared.skipped,
            notes=self.workspace.notes,
            interrupted=not loop.done,
            seconds=time.perf_counter() - self.started,
        )

    def _temperature(self, prepared: PreparedData, task: Task) -> float | None:
        """Fitted on validation images, which the head was not trained on."""
        images, data = prepared.images["val"], prepared.data
        if not len(images) or data.problem == "regression":
            return None
        on_progress = self.workspace.watcher.stage("calibrating on val images")
        batch, pool = self.options.batch, self.workspace.pool
        (logits,) = predict(self.backbone, images, [task], batch, pool, on_progress)
        targets = torch.from_numpy(data.part("val").targets())
        return fit_temperature(logits, targets, data.problem)

    def _figures(
        self, prepared: PreparedData, task: Task
    ) -> tuple[dict[str, Figures], list[Mistake]]:
        """By split, and the mistakes of the split that speaks for new images best."""
        data, by_split = prepared.data, dict[str, Figures]()
        mistakes: list[Mistake] = []
        for split in SPLITS[1:]:
            images = prepared.images[split]
            if not len(images):
                continue
            on_progress = self.workspace.watcher.stage(f"judging on {split} images")
            batch, pool = self.options.batch, self.workspace.pool
            (logits,) = predict(self.backbone, images, [task], batch, pool, on_progress)
            targets = torch.from_numpy(data.part(split).targets())
            by_split[split] = figures(logits, targets, data.problem, data.labels)
            if data.problem == "single_label":
                mistakes = most_confident_mistakes(images, logits, targets, data.labels)
        return by_split, mistakes

    def _provenance(self, prepared: PreparedData, loop: Loop, best: Best) -> dict[str, Any]:
        """No times and no paths: the same run gives the same bytes on any day and machine."""
        data, options, plan = prepared.data, self.options, loop.plan
        variant = self.candidates[best.variant]
        return {
            "tool": "engram train",
            "data": {"name": data.name, "digest": data.digest, "skipped": len(prepared.skipped)},
            "images": {split: len(prepared.images[split]) for split in SPLITS},
            "split": list(options.split),
            "seed": options.seed,
            "variant": {
                "regime": variant.regime,
                "memory": variant.memory,
                "rank": variant.rank,
                "learning_rate": variant.rate,
                "seed": variant.seed,
                "start": variant.start,
            },
            "variants": len(self.candidates),
            "selected_on": "val" if len(prepared.images["val"]) else "train",
            "steps": plan.steps,
            "best_step": best.step,
            "batch": plan.batch,
            "augment": plan.augmentation,
            "optimiser": RECIPES[variant.optimiser],
            "interrupted": not loop.done,
            "options": options.kept(
                plan.steps // plan.steps_per_epoch(len(prepared.images["train"]))
            ),
        } | ({} if options.like is None else {"like": options.like})

    def write(self, fitted: Fitted) -> Fitted:
        """The bundle and its report beside it, where the run has a file to write."""
        if self.target is None:
            return fitted
        page = self.target.with_suffix(".html")
        write_whole(self.target, fitted.bundle.to_bytes())
        write_whole(page, render(fitted).encode("utf-8", "replace"))
        if not fitted.interrupted:
            checkpoint_path(self.target).unlink(missing_ok=True)
        return replace(fitted, path=self.target, report=page)


class Interruption:
    """While open, the first SIGINT sets `requested`; the next one interrupts as usual.

    Signals belong to the main thread; in any other this does nothing.
    """

    _requested = False

    def requested(self) -> bool:
        return self._requested

    def __enter__(self) -> "Interruption":
        main = threading.current_thread() is threading.main_thread()
        if main and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            signal.signal(signal.SIGINT, self._on_signal)
        return self

    def __exit__(self, *error: object) -> None:
        if signal.getsignal(signal.SIGINT) == self._on_signal:
            signal.signal(signal.SIGINT, signal.default_int_handler)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self._requested:
            raise KeyboardInterrupt
        self._requested = True
