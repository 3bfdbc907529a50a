"""How well planted label errors are found: a table of docs/explanation/teaching.md.

    python -m research.label_errors [--draws 5]

Gives 5 % of the photos of a set another label, solves the closed-form head, and counts the
suspected label errors; then the same with all labels right. Features are those that
`research.layer_heads` keeps below build/.
"""

import argparse
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Final

import numpy as np
from engram_server import embedded
from engram_server.model import Backbone, load_backbone
from engram_server.model.heads.closed_form import solve
from engram_server.model.heads.examples import Examples
from engram_server.model.tasks import feature_layout

from research.accuracy import DATA
from research.layer_heads import Features, Labels, archived, read_features

SHARE: Final = 0.05
# Set, classes, photos of each.
CASES: Final = (
    ("flowers102", 20, 10),
    ("plants", 10, 20),
    ("cifar100", 20, 10),
    ("plants", 38, 20),
    ("cifar100", 100, 10),
)


def draw(features: Features, labels: Labels, classes: int, per_class: int, seed: int) -> Examples:
    random = np.random.default_rng(seed)
    chosen = np.sort(random.choice(int(labels.max()) + 1, classes, replace=False))
    rows = [random.permutation(np.flatnonzero(labels == label))[:per_class] for label in chosen]
    indices = np.concatenate(rows)
    targets = np.eye(classes, dtype=bool)[np.searchsorted(chosen, labels[indices])]
    names = tuple(f"{label:03d}" for label in chosen)
    digests = np.zeros((len(indices), 32), np.uint8)
    return Examples("single_label", names, features[indices], targets, digests)


def plant(examples: Examples, seed: int) -> tuple[Examples, set[int]]:
    """Give some examples another label, and return which."""
    random = np.random.default_rng([seed, 1])
    count, classes = examples.targets.shape
    wrong = random.choice(count, max(1, round(SHARE * count)), replace=False)
    labels = examples.targets.argmax(axis=1)
    labels[wrong] = (labels[wrong] + random.integers(1, classes, len(wrong))) % classes
    targets = np.eye(classes, dtype=bool)[labels]
    names, digests = examples.labels, examples.digests
    planted = Examples("single_label", names, examples.features, targets, digests)
    return planted, set(wrong.tolist())


def suspected(backbone: Backbone, examples: Examples) -> set[int]:
    solved = solve(examples, None, feature_layout(backbone))
    return set(solved.leave_one_out.most_suspicious(len(examples)))


def measure(backbone: Backbone, kept: Path, draws: int) -> Iterator[str]:
    for name, classes, per_class in CASES:
        images = partial(archived, DATA / f"{name}.tar")
        features, labels = read_features(backbone, images("train"), kept / f"{name}-train.npz")
        hits = found = planted = doubted = photos = 0
        for seed in range(draws):
            clean = draw(features, labels, classes, per_class, seed)
            wrong_examples, wrong = plant(clean, seed)
            suspects = suspected(backbone, wrong_examples)
            hits, found = hits + len(suspects & wrong), found + len(suspects)
            planted, photos = planted + len(wrong), photos + len(clean)
            doubted += len(suspected(backbone, clean))
        shares = f"{hits / max(1, found):.2f} | {hits / planted:.2f} | {doubted / photos:.1%}"
        yield f"| {name} | {per_class} × {classes} | {shares} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--draws", type=int, default=5)
    args = parser.parse_args()
    backbone = load_backbone(embedded.BACKBONE)
    print("| | photos × classes | precision | recall | doubted, all labels right |")
    for line in measure(backbone, Path("build") / "layer-heads" / backbone.name, args.draws):
        print(line, flush=True)


if __name__ == "__main__":
    main()
