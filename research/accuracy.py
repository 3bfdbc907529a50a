"""How accurate tasks are, and what they are compared with, cell by cell.

    python -m research.accuracy                       # what is missing, cell after cell
    python -m research.accuracy --sets leaves --seeds 1 --stage trained
    python -m research.accuracy --page                # the page and its chart from what is there

A cell is one set, one number of photos, one seed and one stage: `closed form` needs no training,
`trained` has task rows of several kinds in the same passes, `fine-tuning` trains a whole model. All
methods of a set and seed have the same photos. Those that need validation hold out a tenth. The
results of a cell are a JSON file below research/results/accuracy; a cell that has its file is not
run again. Photos come from the archives beside the repository.
"""

import argparse
import json
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from engram_server import embedded
from engram_server.model import Backbone, TaskWeights, load_backbone
from engram_server.model.tasks import feature_layout, prepare
from engram_training.bundles import rounded, write_whole
from engram_training.data.contexts import KeptContexts
from engram_training.data.images import ImageSet, encode
from engram_training.data.workspace import Scratch
from engram_training.fitting.closed_form import SolvedHead, example_features, solved_head
from engram_training.fitting.loop import Loop, Plan
from engram_training.fitting.parts import Part
from engram_training.fitting.stopping import Epoch, has_stalled
from engram_training.fitting.variants import (
    AUTO_REGIMES,
    EQUAL_SHARES,
    ClosedForm,
    Regime,
    Shares,
    Variant,
    Variants,
)
from engram_training.judging.evaluation import predict
from engram_training.options import DEFAULT_EPOCHS, TrainOptions
from engram_training.run import MIN_VALIDATION
from torch import Tensor

from research import accuracy_page, comparison
from research.accuracy_page import CLASS_TOKEN, DEFAULT, FINE_TUNING, LAYERS, REGRESSION, ROWS
from research.accuracy_sets import ImageCollection, collections
from research.comparison import Recipe, full_fine_tuning
from research.paper_images import SPLITS, Images, Split
from research.probes import logistic_regression

REPOSITORY = Path(__file__).resolve().parents[1]
DATA = REPOSITORY.parent / "shared" / "datasets"
RESULTS = REPOSITORY / "research" / "results" / "accuracy"
KEEP_BYTES: Final = 8 * 2**30
BATCH: Final = 32
EPOCHS = DEFAULT_EPOCHS
FINE_TUNING_EPOCHS = 8
FINE_TUNING_RATE: Final = 0.0002
COUNTS: Final = (None, 10, 5)  # photos a class; None: 1,000 in all
STAGES: Final = ("closed-form", "trained", "fine-tuning")

Run = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Cell:
    collection: ImageCollection
    per_class: int | None
    seed: int
    stage: str

    @property
    def name(self) -> str:
        return f"{self.collection.name}-{self.per_class or 'all'}-{self.seed}-{self.stage}"

    @property
    def path(self) -> Path:
        return RESULTS / f"{self.name}.json"


# --- without training -----------------------------------------------------------------------------


def solve(backbone: Backbone, images: Images) -> list[Run]:
    """Heads in closed form, and logistic regression on the class token."""
    features = {split: _features(backbone, images.sets[split]) for split in SPLITS}
    train, val = features["train"], features["val"]
    both = np.concatenate([train, val])
    labels = torch.cat([images.targets["train"], images.targets["val"]])
    classes, width = images.classes, backbone.width
    tokens = {split: torch.from_numpy(of[:, :width]).float() for split, of in features.items()}
    alone = solved_head(both[:, :width], labels.numpy(), "single_label", classes)
    layers = solved_head(both, labels.numpy(), "single_label", classes, feature_layout(backbone))
    assert alone is not None
    assert layers is not None
    # The strength is chosen on validation images, and the regression fitted again on all.
    candidates = logistic_regression(tokens["train"], images.targets["train"], classes)
    losses = [F.cross_entropy(head(tokens["val"]), images.targets["val"]) for _, head in candidates]
    every = list(logistic_regression(torch.from_numpy(both[:, :width]).float(), labels, classes))
    detail, regression = every[int(torch.stack(losses).argmin())]
    return [
        judged(images, CLASS_TOKEN, "", _apply(alone, features["test"][:, :width])),
        judged(images, LAYERS, "", _apply(layers, features["test"])),
        judged(images, REGRESSION, detail, regression(tokens["test"])),
    ]


def _features(backbone: Backbone, images: ImageSet) -> np.ndarray[Any, np.dtype[np.float16]]:
    parts = []
    for start in range(0, len(images), BATCH):
        pixels = images.batch(range(start, min(start + BATCH, len(images))))
        readout = encode(backbone, pixels, rows=False).readout
        parts.append(backbone.features_of(readout.cpu().half().numpy()))
    return np.concatenate(parts)


def _apply(head: SolvedHead, features: np.ndarray[Any, np.dtype[np.float16]]) -> Tensor:
    return torch.from_numpy(features).float() @ head.weight.T + head.bias


# --- trained task rows ----------------------------------------------------------------------------


class Kept(NamedTuple):
    rank: tuple[float, float]
    variant: Variant
    weights: TaskWeights
    shares: Shares


@dataclass(eq=False)
class StudyLoop(Loop):
    """The loop of `engram train` that keeps the best of each method, and drops no variant."""

    kept: dict[str, Kept] = field(default_factory=dict)

    def _keep_best(self, losses: Sequence[float], scores: Sequence[float]) -> None:
        super()._keep_best(losses, scores)
        for index, variant in enumerate(self.variants.variants):
            rank = (scores[index], -losses[index])
            for method in methods_of(variant.regime):
                if method not in self.kept or rank > self.kept[method].rank:
                    shares = self._shares.get(index, EQUAL_SHARES)
                    weights = self.variants.weights(index, shares)
                    self.kept[method] = Kept(rank, variant, weights, shares)

    def _stop_early(self, epochs: Sequence[Epoch]) -> None:
        self._stalled = has_stalled(epochs)


def methods_of(regime: Regime) -> Iterator[str]:
    """The columns for which a variant competes."""
    if regime in ROWS:
        yield ROWS[regime]
    if regime in AUTO_REGIMES:
        yield DEFAULT


def train_rows(backbone: Backbone, images: Images, seed: int) -> list[Run]:
    """Rows of all kinds in the same passes, each tuned on validation images."""
    alone = [regime for regime in ROWS if regime not in AUTO_REGIMES]
    studied = [
        *TrainOptions(seed=seed).variants(),
        *TrainOptions(seed=seed, regimes=tuple(alone)).variants(),
    ]
    parts = {}
    for split in SPLITS[:2]:
        kept = KeptContexts(backbone, images.sets[split], images.scratch, rows=True)
        kept.fill(BATCH)
        parts[split] = Part(images.sets[split], images.targets[split], kept)
    labels = images.targets["train"].numpy()
    features = example_features(backbone, parts["train"], BATCH)
    layers = solved_head(features, labels, "single_label", images.classes, feature_layout(backbone))
    variants = Variants(backbone, studied, images.classes, every_layer=layers)
    plan = Plan("single_label", 0, BATCH, seed, "none")
    plan = replace(plan, steps=EPOCHS * plan.steps_per_epoch(len(parts["train"])))
    loop = StudyLoop(backbone, variants, parts["train"], parts["val"], plan, images.pool)
    loop.run()
    # As `engram train` does: the closed form of all photos, and nothing else with few of them.
    more = np.concatenate([features, example_features(backbone, parts["val"], BATCH)])
    labels = np.concatenate([labels, images.targets["val"].numpy()])
    whole = solved_head(more, labels, "single_label", images.classes, feature_layout(backbone))
    assert whole is not None
    closed_form = ClosedForm.of(backbone, whole)
    if len(parts["val"]) < MIN_VALIDATION:
        untrained = next(one for one in studied if not one.rate)
        loop.kept[DEFAULT] = loop.kept[DEFAULT]._replace(variant=untrained)
    tasks = []
    for one in loop.kept.values():
        weights = one.weights
        if one.variant.reads_layers:
            old = variants.every_layer
            weights = closed_form.in_place_of(old, weights, one.variant, one.shares)
        tasks.append(prepare(backbone, rounded(weights)))
    logits = predict(backbone, images.sets["test"], tasks, BATCH, images.pool)
    return [
        judged(images, method, one.variant.name, of) | {"epochs": len(loop.epochs)}
        for (method, one), of in zip(loop.kept.items(), logits, strict=True)
    ]


def train_whole(backbone: Backbone, images: Images, seed: int) -> list[Run]:
    """The whole model for one task."""
    candidate = full_fine_tuning(backbone, images.classes)
    recipe = Recipe(FINE_TUNING_EPOCHS, BATCH, FINE_TUNING_RATE, seed, "AdamW")
    comparison.train(candidate, images.sets["train"], images.targets["train"], recipe)
    test = comparison.predict(candidate, images.sets["test"], BATCH)
    return [judged(images, FINE_TUNING, f"rate {FINE_TUNING_RATE:g}", test)]


def judged(images: Images, method: str, detail: str, test: Tensor) -> Run:
    """Of every test image, whether it was right."""
    right = test.argmax(dim=1) == images.targets["test"]
    return {
        "method": method,
        "detail": detail,
        "test": np.packbits(right.numpy()).tobytes().hex(),
    }


# --- cells ----------------------------------------------------------------------------------------


def read_images(cell: Cell, backbone: Backbone, stack: ExitStack) -> Images:
    folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
    scratch = stack.enter_context(closing(Scratch(KEEP_BYTES)))
    pool = stack.enter_context(ThreadPoolExecutor(1))
    found = cell.collection.draw(folder, cell.per_class, cell.seed)
    sets: dict[Split, ImageSet] = {}
    targets: dict[Split, Tensor] = {}
    for split in SPLITS:
        sets[split] = ImageSet([path for path, _ in found[split]], backbone.preprocessing, scratch)
        if bad := sets[split].read_all(pool):
            raise SystemExit(f"'{bad[0].path.name}' of {cell.name}: {bad[0].reason}")
        targets[split] = torch.tensor([label for _, label in found[split]])
    classes = 1 + max(int(of.max()) for of in targets.values())
    return Images(sets, targets, classes, scratch, pool)


def run_cell(cell: Cell, backbone: Backbone) -> None:
    started = time.perf_counter()
    with ExitStack() as stack:
        images = read_images(cell, backbone, stack)
        if cell.stage == "closed-form":
            runs = solve(backbone, images)
        elif cell.stage == "trained":
            runs = train_rows(backbone, images, cell.seed)
        else:
            runs = train_whole(backbone, images, cell.seed)
        result = {
            "set": cell.collection.name,
            "photos": cell.per_class,
            "seed": cell.seed,
            "fingerprint": backbone.fingerprint,
            "images": {split: len(images.sets[split]) for split in SPLITS},
            "runs": runs,
        }
    cell.path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(cell.path, json.dumps(result, indent=1).encode())
    print(f"{cell.name}: {time.perf_counter() - started:.0f} s", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--data", type=Path, default=DATA, help="folder of research/DATA.md")
    parser.add_argument("--backbone", type=Path, default=embedded.BACKBONE)
    parser.add_argument("--sets", help="comma-separated names (default: all)")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--stage", choices=STAGES, help="one stage (default: all)")
    parser.add_argument("--page", action="store_true", help="only write the page")
    args = parser.parse_args()
    known = collections(args.data)
    if not args.page:
        backbone = load_backbone(args.backbone)
        names = args.sets.split(",") if args.sets else list(known)
        for seed in range(args.seeds):
            for stage in [args.stage] if args.stage else STAGES:
                # A whole model is trained on all photos only.
                for per_class in COUNTS[:1] if stage == "fine-tuning" else COUNTS:
                    for collection in (known[name] for name in names):
                        cell = Cell(collection, per_class, seed, stage)
                        if not cell.path.exists():
                            run_cell(cell, backbone)
    accuracy_page.write(RESULTS, known)


if __name__ == "__main__":
    main()
