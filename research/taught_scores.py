"""Scores of taught tasks on classes that they were not taught: a table of docs.

    python -m research.taught_scores [--draws 8]

Teaches a few classes of a set with a few photos each. Test photos are of these classes, of other
classes of the set, and of other sets. Figures are with the plain class probabilities, and with
those that the server returns. Features are those that `research.layer_heads` keeps below build/.
"""

import argparse
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt
import torch
from engram_server import embedded
from engram_server.engine.taught_bundle import taught_bundle
from engram_server.model import Backbone, load_backbone
from engram_server.model.heads.examples import Examples
from engram_server.model.heads.ood import OodDetector, OodScorer
from engram_training.judging.metrics import calibrate

from research.accuracy import DATA
from research.layer_heads import Features, Labels, archived, read_features

Floats = npt.NDArray[np.float64]

SETS: Final = ("flowers102", "plants", "cifar100")
SIZES: Final = ((4, 10), (3, 20))  # classes, and photos of each
OTHER_CLASSES: Final = 8  # of the same set
OTHER_PHOTOS: Final = 100  # of each other set
COLUMNS: Final = (
    "taught, photos × classes",
    "accuracy",
    "own marked",
    "other classes of the set marked",
    "photos of other sets marked",
    "top score, own",
    "top score, other classes",
    "calibration error",
    "negative log-likelihood",
)


class Taught:
    """A task taught with some photos of a set, and its answers."""

    def __init__(self, backbone: Backbone, examples: Examples) -> None:
        bundle, self._head = taught_bundle(examples, backbone, name="taught")
        ood = bundle.manifest.ood
        assert ood is not None
        self._detector = OodDetector(
            bundle.tensors["ood.means"],
            bundle.tensors["ood.axes"],
            ood.threshold,
            ood.angle,
            ood.softness,
        )
        self._width = backbone.width

    def answers(self, features: Features) -> tuple[Floats, Floats, Floats]:
        """Plain probabilities (n, K), those that are returned, and out-of-distribution scores."""
        logits = features.astype(np.float64) @ self._head.weight.T + self._head.bias
        plain = np.exp(logits - logits.max(axis=1, keepdims=True))
        plain /= plain.sum(axis=1, keepdims=True)
        scores = self._detector.scores(features[:, : self._width].astype(np.float64))
        scorer = OodScorer.of(self._detector, torch.device("cpu"))
        share = np.array([scorer.uniform_share(score) for score in scores])[:, None]
        return plain, (1 - share) * plain + share / plain.shape[1], scores


def figures(
    task: Taught, own: tuple[Features, Labels], others: Features, elsewhere: Features
) -> Floats:
    """The columns of one draw; pairs are before and after mixing."""
    features, truth = own
    plain, returned, scores = task.answers(features)
    plain_others, returned_others, scores_others = task.answers(others)
    cells = [
        (plain.argmax(axis=1) == truth).mean(),
        (scores > 1).mean(),
        (scores_others > 1).mean(),
        (task.answers(elsewhere)[2] > 1).mean(),
    ]
    cells += [each.max(axis=1).mean() for each in (plain, returned)]
    cells += [each.max(axis=1).mean() for each in (plain_others, returned_others)]
    right = plain.argmax(axis=1) == truth
    cells += [calibrate(each.max(axis=1), right.astype(float)).error for each in (plain, returned)]
    rows = np.arange(len(truth))
    cells += [-np.log(np.maximum(each[rows, truth], 1e-12)).mean() for each in (plain, returned)]
    return np.array(cells)


def measure(
    backbone: Backbone, sets: Mapping[str, tuple[Features, Labels, Features, Labels]], draws: int
) -> Iterator[str]:
    for name, (train, labels, test, truth) in sets.items():
        for classes, per_class in SIZES:
            all_cells = []
            for seed in range(draws):
                random = np.random.default_rng([seed, 3])
                order = random.permutation(int(labels.max()) + 1)
                taught, unseen = np.sort(order[:classes]), order[classes : classes + OTHER_CLASSES]
                task = Taught(backbone, draw(train, labels, taught, per_class, random))
                mine = np.flatnonzero(np.isin(truth, taught))
                elsewhere = [
                    random.permutation(other)[:OTHER_PHOTOS]
                    for each, (_, _, other, _) in sets.items()
                    if each != name
                ]
                own = test[mine], np.searchsorted(taught, truth[mine])
                others = test[np.isin(truth, unseen)]
                all_cells.append(figures(task, own, others, np.concatenate(elsewhere)))
            yield row(f"{name}, {per_class} × {classes}", np.mean(all_cells, axis=0))


def draw(
    features: Features,
    labels: Labels,
    classes: Labels,
    per_class: int,
    random: np.random.Generator,
) -> Examples:
    rows = [random.permutation(np.flatnonzero(labels == label))[:per_class] for label in classes]
    indices = np.concatenate(rows)
    targets = np.eye(len(classes), dtype=bool)[np.searchsorted(classes, labels[indices])]
    names = tuple(f"{label:03d}" for label in classes)
    digests = np.zeros((len(indices), 32), np.uint8)
    digests[:, 0] = np.arange(len(indices))  # distinct, as of different photos
    return Examples("single_label", names, features[indices], targets, digests)


def row(name: str, cells: Floats) -> str:
    shares = [f"{cell:.1%}" for cell in cells[:4]]
    pairs = list(zip(cells[4::2], cells[5::2], strict=True))
    tops = [f"{before:.2f} → {after:.2f}" for before, after in pairs[:2]]
    errors = [f"{before:.3f} → {after:.3f}" for before, after in pairs[2:]]
    return "| " + " | ".join([name, *shares, *tops, *errors]) + " |"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--draws", type=int, default=8)
    args = parser.parse_args()
    backbone = load_backbone(embedded.BACKBONE)
    kept = Path("build") / "layer-heads" / backbone.name
    sets = {}
    for name in SETS:
        images = partial(archived, DATA / f"{name}.tar")
        read = {
            split: read_features(backbone, images(split), kept / f"{name}-{split}.npz")
            for split in ("train", "test")
        }
        sets[name] = (*read["train"], *read["test"])
    print("| " + " | ".join(COLUMNS) + " |")
    for line in measure(backbone, sets, args.draws):
        print(line, flush=True)


if __name__ == "__main__":
    main()
