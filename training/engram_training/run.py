"""One training run, from options to a bundle and its report: `engram train` for programs.

`fit` shows the whole run: read, train, judge, write.
"""

import os
import signal
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from engram_bundle import check_task_name
from engram_server.model import Backbone, TaskWeights, load_backbone
from engram_server.model.heads.examples import FeatureLayout
from engram_server.model.preprocessing.pipeline import golden_pixels
from engram_server.model.tasks import StackCache, Task, feature_layout, prepare
from engram_server.parts.kept import KeptFolder

from engram_training.bundles import LoadedTasks, load_tasks, make_bundle, rounded, write_whole
from engram_training.data.dataset import (
    SPLITS,
    DataSet,
    SplitName,
    corrected,
    read_data,
    split_data,
)
from engram_training.data.images import PreparedData, read_images, suited_augmentation
from engram_training.data.issues import Issue, read_excluded, read_lines, write_issues
from engram_training.data.workspace import Watcher, Workspace
from engram_training.errors import DataError, SettingsConflict
from engram_training.fitting import closed_form
from engram_training.fitting.checkpoint import Checkpoint, CheckpointFile, checkpoint_path
from engram_training.fitting.loop import Best, Loop, Plan, steps_within
from engram_training.fitting.losses import SCORE_NAMES
from engram_training.fitting.parts import Part, Scaling, make_parts, starting_bias
from engram_training.fitting.variants import (
    RECIPES,
    ClosedForm,
    Variant,
    Variants,
    need_rows,
    need_training,
)
from engram_training.judging.data_check import check_data, describe
from engram_training.judging.evaluation import answer, predict
from engram_training.judging.metrics import Figures, cost_of, figures, manifest_metrics
from engram_training.judging.report import Fitted, Mistake, most_confident_mistakes, render
from engram_training.options import DEFAULT_EPOCHS, TrainOptions

MIN_VALIDATION = 50  # images; with fewer, the closed form is not compared with training


def fit(
    data: str | Path,
    *,
    name: str,
    backbone: Backbone | str | Path,
    out: str | Path | None = None,
    extends: Sequence[str | Path] = (),
    kept: str | Path | None = None,
    resume: bool = False,
    watcher: Watcher | None = None,
    options: TrainOptions | None = None,
    **changes: Any,  # noqa: ANN401 - fields of TrainOptions, checked by it
) -> Fitted:
    """Train a task on a folder or a table of images; the best variant becomes the bundle.

    With `kept`, a folder that `engram batch --keep` wrote, `data` is a table of paths in it, and
    the photos are not needed.

    With `out`, the bundle and its report are written there. Keywords are fields of `TrainOptions`.
    """
    started = time.perf_counter()
    check_task_name(name)
    options = replace(options or TrainOptions(), **changes)
    options.variants(extends=bool(extends))  # raises for invalid options before data is read
    target = None if out is None else _checked_target(Path(out).expanduser())
    if resume and target is None:
        raise SettingsConflict("resume needs `out`, the file of the interrupted run.")
    if not isinstance(backbone, Backbone):
        backbone = load_backbone(backbone)
    folder = None if target is None else target.parent
    with Workspace(round(options.keep_gb * 2**30), folder=folder, watcher=watcher) as workspace:
        parents = load_tasks(backbone, extends).youngest()
        folder_kept = None if kept is None else _open_kept(Path(kept), options, backbone)
        prepared = _read(data, options, backbone, workspace, folder_kept)
        variants = options.variants(prepared.data.task_type, extends=bool(parents.tasks))
        if folder_kept is not None:
            variants = _servable(variants, folder_kept, options, workspace)
        untrained = [one for one in variants if not one.rate]
        if options.regimes is None and untrained and len(prepared.images["val"]) < MIN_VALIDATION:
            variants = untrained
            workspace.note(
                f"closed form only: fewer than {MIN_VALIDATION} validation images do not show "
                "whether training helps; use --regime to train anyway"
            )
        run = _Run(name, backbone, options, target, workspace, parents, prepared, variants, started)
        return run.write(run.judge(*run.train(resume)))


def issues_path(bundle: Path) -> Path:
    return bundle.with_suffix(".issues.csv")


def _checked_target(path: Path) -> Path:
    """Check before training that the bundle can be written afterwards."""
    if path.suffix != ".safetensors":
        raise SettingsConflict(f"The bundle '{path}' must be named *.safetensors.")
    if path.is_dir() or not os.access(path.parent, os.W_OK):
        reason = "is a folder" if path.is_dir() else "is not in a writable folder"
        raise SettingsConflict(f"The bundle '{path}' {reason}. Choose another file.")
    return path


def _open_kept(folder: Path, options: TrainOptions, backbone: Backbone) -> KeptFolder:
    if options.corrections is not None or options.augment not in (None, "none"):
        raise SettingsConflict("Corrections and augmentation need the photos. Omit --kept.")
    kept = KeptFolder.open(folder)
    kept.check_backbone(backbone)
    if kept.level == "embeddings":
        raise SettingsConflict(
            f"'{folder}' has embeddings, but training reads summaries or contexts. Train on the "
            f"photos, or keep more: engram batch PHOTOS --keep summaries DIR."
        )
    return kept


def _servable(
    variants: list[Variant], kept: KeptFolder, options: TrainOptions, workspace: Workspace
) -> list[Variant]:
    """Return the variants that kept tensors suffice for, or raise SettingsConflict."""
    if kept.level == "contexts" or not need_rows(variants):
        return variants
    chosen = [variant for variant in variants if not variant.has_row]
    if options.regimes is not None or not chosen:
        raise SettingsConflict(
            f"'{kept.name}' has summaries, but tasks with a row read contexts. Use --regime head "
            f"or layers, train on the photos, or keep contexts: engram batch PHOTOS --keep "
            f"contexts DIR."
        )
    workspace.note(f"no task rows: '{kept.name}' has summaries and no contexts")
    return chosen


def _read(
    source: str | Path,
    options: TrainOptions,
    backbone: Backbone,
    workspace: Workspace,
    kept: KeptFolder | None,
) -> PreparedData:
    """Read labels, split the data, and decode every image once, or find it in `kept`."""
    data = read_data(source, options.task_type)
    if options.corrections is not None:
        data, note = corrected(data, options.corrections, workspace.pool)
        workspace.note(note)
    data = split_data(data, options.split, options.seed)
    if options.exclude is not None:
        data = _without_excluded(data, options.exclude, workspace)
    augmentation = options.augment or ("none" if kept else suited_augmentation(data))
    prepared = read_images(data, augmentation, backbone, workspace, kept)
    if options.strict and prepared.skipped:
        bad = "\n".join(f"  {one.path}: {one.reason}" for one in prepared.skipped)
        raise DataError(f"{len(prepared.skipped)} images cannot be read (--strict):\n{bad}")
    return prepared


def _without_excluded(data: DataSet, file: Path, workspace: Workspace) -> DataSet:
    """Leave out the images that a file of issues lists.

    After splitting, so that every other image stays in its split.
    """
    excluded = read_excluded(file, data.root)
    paths = {sample.path for sample in data.samples if sample.path.resolve() in excluded}
    workspace.note(f"excluded {len(paths)} images of {len(excluded)} in '{file}'")
    return data.without(paths)


@dataclass(frozen=True, slots=True)
class _Run:
    """The steps of a run after reading, in order: train, judge, write."""

    name: str
    backbone: Backbone
    options: TrainOptions
    target: Path | None
    workspace: Workspace
    parents: LoadedTasks
    prepared: PreparedData
    variants: list[Variant]
    started: float
    issues: list[Issue] = field(default_factory=list)

    def train(self, resume: bool) -> tuple[Loop, Best, TaskWeights]:
        """Train all variants in the same passes, until the last step or Ctrl-C.

        The best is returned in the units of the data, with an OOD detector, as it was validated and
        as it is published: with the closed form solved again from training and validation images.
        """
        data, workspace = self.prepared.data, self.workspace
        targets = torch.from_numpy(data.part("train").targets())
        scaling = Scaling.of(targets) if data.task_type == "regression" else None
        checkpoint = CheckpointFile(self.target, self._identity())
        saved = checkpoint.read() if resume else None
        if resume and saved is None:
            workspace.note("no checkpoint to resume from; starting from the beginning")
        with Interruption() as interruption:
            parts = make_parts(
                self.prepared,
                scaling,
                self.backbone,
                workspace,
                batch=self.options.batch,
                rows=need_rows(self.variants),
                stop=interruption.requested,
            )
            if interruption.requested():  # nothing to keep
                raise KeyboardInterrupt
            features = closed_form.example_features(
                self.backbone, parts["train"], self.options.batch
            )
            variants = self._initial_variants(features, targets, parts)
            plan = self._plan(parts, variants, saved)
            train, val = parts["train"], parts.get("val")
            loop = Loop(self.backbone, variants, train, val, plan, workspace.pool)
            if saved is not None:
                loop.load(saved.loop, saved.tensors)
            on_step = workspace.watcher.training(plan.steps, SCORE_NAMES[plan.task_type])
            loop.run(interruption.requested, on_step, lambda: checkpoint.save_if_due(loop))
            if not loop.done:
                checkpoint.save(loop)
                workspace.note(f"interrupted at step {loop.step} of {plan.steps}")
                loop.find_best()
        best = loop.best
        if best is None and not loop.done:  # stopped before the first step: nothing to keep
            raise KeyboardInterrupt
        if best is None:
            raise DataError("All variants diverged. Use smaller learning rates.")
        weights = best.weights if scaling is None else scaling.undo(best.weights)
        tokens, kind = features[:, : self.backbone.width], data.task_type
        ood = None
        if not self.options.any_image:
            small = self.prepared.are_small(self.backbone.image_size)
            ood = closed_form.fit_detector(tokens, targets.numpy(), kind, small)
        drift = closed_form.fit_reference(tokens, targets.numpy(), kind, len(data.labels), ood)
        final = self._solved_again(weights, best, variants, features, parts)
        final = rounded(replace(final, ood=ood, drift=drift))
        weights = rounded(replace(weights, ood=ood, drift=drift))
        return loop, replace(best, weights=weights), final

    def _check_data(
        self,
        features: npt.NDArray[np.float16],
        parts: Mapping[SplitName, Part],
        head: closed_form.SolvedHead | None,
    ) -> None:
        """Look for label errors, leaks and outliers, and write them next to the bundle."""
        data, batch = self.prepared.data, self.options.batch
        by_split: dict[SplitName, npt.NDArray[np.float16]] = {"train": features}
        for split in SPLITS[1:]:
            images = self.prepared.images[split]
            if len(images):
                targets = torch.from_numpy(data.part(split).targets())
                part = parts.get(split) or Part(images, targets, None)
                by_split[split] = closed_form.example_features(self.backbone, part, batch)
        self.issues.extend(check_data(self.prepared, by_split, head, self.backbone.width))
        if not self.issues:
            return
        found = describe(self.issues)
        if self.target is None:
            self.workspace.note(f"data check: {found}")
            return
        file, exclude = issues_path(self.target), self.options.exclude
        again = exclude is not None and file.exists() and exclude.samefile(file)
        kept = read_lines(file) if again else []
        write_issues(file, self.issues, data.root, kept)
        self.workspace.note(
            f"data check: {found}; review '{file}' and pass it with --exclude to leave them out"
        )

    def _initial_variants(
        self,
        features: npt.NDArray[np.float16],
        targets: torch.Tensor,
        parts: Mapping[SplitName, Part],
    ) -> Variants:
        """Solve the closed-form heads, check the data with them, and start from them."""
        data = self.prepared.data
        solved = self._solved_head(features[:, : self.backbone.width])
        every_layer = self._solved_on_layers(features)
        self._check_data(features, parts, every_layer or solved)
        return Variants(
            self.backbone,
            self.variants,
            data.outputs,
            head_bias=starting_bias(targets, data.task_type),
            solved=solved,
            solved_row=self._solved_row(parts["train"]),
            every_layer=every_layer,
            parents=self.parents.tasks,
        )

    def _solved_again(
        self,
        weights: TaskWeights,
        best: Best,
        variants: Variants,
        features: npt.NDArray[np.float16],
        parts: Mapping[SplitName, Part],
    ) -> TaskWeights:
        """Solve the closed form again, from training and validation images."""
        variant, val = self.variants[best.variant], parts.get("val")
        if val is None or not variant.reads_layers:
            return weights
        more = closed_form.example_features(self.backbone, val, self.options.batch)
        data = self.prepared.data
        targets = np.concatenate([data.part(split).targets() for split in SPLITS[:2]])
        head = closed_form.solved_head(
            np.concatenate([features, more]),
            targets,
            data.task_type,
            data.outputs,
            feature_layout(self.backbone),
        )
        if head is None:  # of a single class
            return weights
        whole = ClosedForm.of(self.backbone, head)
        return whole.in_place_of(variants.every_layer, weights, variant, best.shares)

    def _solved_head(
        self, features: npt.NDArray[np.floating], layout: FeatureLayout | None = None
    ) -> closed_form.SolvedHead | None:
        data = self.prepared.data
        targets = data.part("train").targets()
        return closed_form.solved_head(features, targets, data.task_type, data.outputs, layout)

    def _solved_on_layers(self, features: npt.NDArray[np.float16]) -> closed_form.SolvedHead | None:
        """Solve the head on every layer, if a variant reads it, and note how accurate it is."""
        if not any(variant.reads_layers for variant in self.variants):
            return None
        head = self._solved_head(features, feature_layout(self.backbone))
        if head is not None and head.leave_one_out and head.leave_one_out.images:
            seconds = time.perf_counter() - self.started
            share = f"{head.leave_one_out.accuracy:.1%}"
            self.workspace.note(
                f"closed form on every layer: {share} leave-one-out accuracy after {seconds:.0f} s"
            )
        return head

    def _solved_row(self, train: Part) -> closed_form.SolvedHead | None:
        """Solve the initial head of task rows, if a new row does not read the class token."""
        if self.backbone.feature == "class" or not need_rows(self.variants):
            return None
        features = closed_form.row_features(self.backbone, train, self.options.batch)
        return self._solved_head(features)

    def _plan(
        self, parts: Mapping[SplitName, Part], variants: Variants, saved: Checkpoint | None
    ) -> Plan:
        """Plan the number of steps: from the checkpoint, the minutes or the epochs."""
        options, task_type = self.options, self.prepared.data.task_type
        plan = Plan(task_type, 0, options.batch, options.seed, self.prepared.augmentation)
        if saved is not None:
            return replace(plan, steps=saved.steps)
        if options.minutes is not None and need_training(self.variants):
            left = options.minutes * 60 - (time.perf_counter() - self.started)
            return steps_within(left, self.backbone, variants, parts, plan, self.workspace.pool)
        epoch = plan.steps_per_epoch(len(parts["train"]))
        epochs = (options.epochs or DEFAULT_EPOCHS) if need_training(self.variants) else 1
        return replace(plan, steps=epoch * epochs)

    def _identity(self) -> dict[str, Any]:
        """Return everything that determines the bundle, to recognise the same run."""
        options, prepared = self.options, self.prepared
        return {
            "data": prepared.data.digest,
            "task_type": prepared.data.task_type,
            "images": self._image_counts(),
            "backbone": self.backbone.fingerprint,
            "variants": [variant.name for variant in self.variants],
            "epochs": options.epochs,
            "minutes": options.minutes,
            "batch": options.batch,
            "seed": options.seed,
            "split": list(options.split),
            "augment": prepared.augmentation,
            "extends": [parent.digest for parent in self.parents.bundles],
        } | ({} if prepared.kept is None else {"kept": prepared.kept.manifest})

    def _image_counts(self) -> dict[str, int]:
        return {split: len(self.prepared.images[split]) for split in SPLITS}

    def judge(self, loop: Loop, best: Best, weights: TaskWeights) -> Fitted:
        """Calibrate the best variant, evaluate it in the server's pass, and make the bundle.

        It is calibrated and evaluated on validation images as it was validated, and tested as it is
        published, with `weights`.
        """
        backbone, data, parents = self.backbone, self.prepared.data, self.parents
        validated = best.weights
        temperature = self._temperature(prepare(backbone, validated, parents.tasks))
        if temperature is not None:
            validated, weights = (
                rounded(closed_form.with_temperature(one, temperature))
                for one in (validated, weights)
            )
        task = prepare(backbone, weights, parents.tasks)
        tasks: dict[SplitName, Task] = {
            "val": prepare(backbone, validated, parents.tasks),
            "test": task,
        }
        by_split, mistakes = self._figures(tasks)
        pixels = golden_pixels(backbone.image_size)
        (logits,) = answer(backbone, torch.from_numpy(pixels), [task], StackCache())
        bundle = make_bundle(
            backbone,
            weights,
            (pixels, logits),
            name=self.name,
            temperature=temperature,
            task_type=data.task_type,
            labels=data.labels,
            extends=tuple(parent.digest for parent in parents.bundles),
            metrics=manifest_metrics(by_split),
            training=self._provenance(loop, best),
            description=self.options.description,
            license=self.options.license,
        )
        return Fitted(
            name=self.name,
            bundle=bundle,
            backbone=backbone.name,
            parameters=[
                cost_of(backbone, loop.variants.weights(index)).parameters
                for index in range(len(self.variants))
            ],
            variant=self.variants[best.variant],
            variants=self.variants,
            epochs=loop.epochs,
            figures=by_split,
            cost=cost_of(backbone, weights),
            mistakes=mistakes,
            skipped=self.prepared.skipped,
            issues=self.issues,
            notes=self.workspace.notes,
            interrupted=not loop.done,
            seconds=time.perf_counter() - self.started,
        )

    def _temperature(self, task: Task) -> float | None:
        data = self.prepared.data
        if not len(self.prepared.images["val"]) or data.task_type == "regression":
            return None
        logits, targets = self._predict(task, "val", "calibrating")
        return closed_form.fit_temperature(logits, targets, data.task_type)

    def _figures(self, tasks: Mapping[SplitName, Task]) -> tuple[dict[str, Figures], list[Mistake]]:
        """Evaluate on val and test; return the figures, and the mistakes of the last split."""
        data, by_split = self.prepared.data, dict[str, Figures]()
        mistakes: list[Mistake] = []
        for split, task in tasks.items():
            images = self.prepared.images[split]
            if not len(images):
                continue
            logits, targets = self._predict(task, split, "evaluating")
            by_split[split] = figures(logits, targets, data.task_type, data.labels)
            if data.task_type == "single_label":
                mistakes = most_confident_mistakes(images, logits, targets, data.labels)
        return by_split, mistakes

    def _predict(
        self, task: Task, split: SplitName, what: str
    ) -> tuple[torch.Tensor, torch.Tensor]:
        images, workspace = self.prepared.images[split], self.workspace
        on_progress = workspace.watcher.stage(f"{what} on {split}")
        batch, pool = self.options.batch, workspace.pool
        (logits,) = predict(self.backbone, images, [task], batch, pool, on_progress)
        return logits, torch.from_numpy(self.prepared.data.part(split).targets())

    def _provenance(self, loop: Loop, best: Best) -> dict[str, Any]:
        """Describe the run without times and paths, so that the same run gives the same bytes."""
        data, options, plan = self.prepared.data, self.options, loop.plan
        variant, images = self.variants[best.variant], self._image_counts()
        epochs = plan.steps // plan.steps_per_epoch(images["train"])
        return {
            "tool": "engram train",
            "data": {
                "name": data.name,
                "digest": data.digest,
                "skipped": len(self.prepared.skipped),
            },
            "images": images,
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
            "variants": len(self.variants),
            "selected_on": "val" if images["val"] else "train",
            "steps": plan.steps,
            "best_step": best.step,
            "batch": plan.batch,
            "augment": plan.augmentation,
            "optimiser": RECIPES[variant.optimiser] if variant.rate else "closed form",
            "interrupted": not loop.done,
            "options": options.to_manifest(epochs),
        } | ({} if options.like is None else {"like": options.like})

    def write(self, fitted: Fitted) -> Fitted:
        if self.target is None:
            return fitted
        page = self.target.with_suffix(".html")
        write_whole(self.target, fitted.bundle.to_bytes())
        write_whole(page, render(fitted).encode("utf-8", "replace"))
        if not fitted.interrupted:
            checkpoint_path(self.target).unlink(missing_ok=True)
        return replace(fitted, path=self.target, report=page)


class Interruption:
    """While open, the first SIGINT sets `requested` and the next one interrupts as usual.

    Does nothing outside the main thread, which handles signals.
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
