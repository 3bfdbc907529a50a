"""Which closed form? `python -m research.closed_form SETS --backbone DIR`: the tables of the docs.

SETS is a folder with `cifar100/`, `flowers102/` and `plants/`, each of `{train,test}/<class>/`: the
tars of the shared folder, unpacked. Class tokens are read once and kept in `--kept`; after that all
of it takes a minute. `--few OUT` instead writes folders of 1, 5 and 20 flowers a class, for
`engram train`.

Estimators, at 1, 2, 5, 20 and 100 photos a class (the mean of three draws below 20): the nearest
class mean, by distance and by angle; ridge regression on 0 and 1; linear discriminant analysis with
a fixed shrinkage, as it is usually done; and ours, whose shrinkage follows the number of examples
and whose means are drawn to the middle of all. Several labels: plant and disease of `plants`.
"""

import argparse
import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt
from engram_server.model import load_backbone
from engram_server.model.heads.lda import (
    ClassIndices,
    Floats,
    LdaStatistics,
    RidgeRegression,
    log_softmax,
    solve_lda,
    solve_ridge,
)
from engram_training.judging.metrics import average_precision, calibrate

from research.measure_backbone import class_tokens

SETS: Final = ("flowers102", "cifar100", "plants")
COUNTS: Final = (1, 2, 5, 20, 100)
TEST_IMAGES: Final = 20  # of each class
DRAWS: Final = 3

Head = tuple[Floats, Floats]  # weights (K, D) and biases (K,)
Tokens = dict[str, npt.NDArray[np.float32]]


def by_distance(statistics: LdaStatistics) -> Head:
    means = statistics.means
    return means, -0.5 * (means**2).sum(axis=1) - means @ statistics.centre


def by_angle(statistics: LdaStatistics) -> Head:
    means = statistics.means / np.linalg.norm(statistics.means, axis=1, keepdims=True)
    return means, -means @ statistics.centre


def usual_discriminant(shrinkage: float) -> Callable[[LdaStatistics], Head]:
    def solve(statistics: LdaStatistics) -> Head:
        centre = statistics.means[statistics.classes] if statistics.counts.max() > 1 else 0.0
        away = statistics.points - centre
        spread = away.T @ away / len(away)
        sphere = np.eye(len(spread)) * np.trace(spread) / len(spread)
        drawn = (1 - shrinkage) * spread + shrinkage * sphere
        weight = np.linalg.solve(drawn, statistics.means.T).T
        return weight, -0.5 * (statistics.means * weight).sum(axis=1) - weight @ statistics.centre

    return solve


def ridge(shrinkage: float) -> Callable[[LdaStatistics], Head]:
    def solve(statistics: LdaStatistics) -> Head:
        truth = np.eye(len(statistics.counts))[statistics.classes]
        return RidgeRegression.of(statistics.points + statistics.centre, truth).solve(shrinkage)

    return solve


ESTIMATORS: Final[dict[str, Callable[[LdaStatistics], Head]]] = {
    "nearest mean": by_distance,
    "nearest angle": by_angle,
    "ridge 0.1": ridge(0.1),
    "ridge 0.3": ridge(0.3),
    "LDA 0.1": usual_discriminant(0.1),
    "LDA 0.3": usual_discriminant(0.3),
    "LDA 0.7": usual_discriminant(0.7),
    "ours": LdaStatistics.discriminant,
}


def read_tokens(backbone: Path, folder: Path, kept: Path) -> Tokens:
    """Class tokens, class numbers and whether an image is a test image."""
    place = kept / f"{backbone.name}-{folder.name}.npz"
    if not place.exists():
        names = sorted(path.name for path in (folder / "train").iterdir())
        photos = [
            (path, number, split == "test")
            for split, most in (("train", max(COUNTS)), ("test", TEST_IMAGES))
            for number, name in enumerate(names)
            for path in sorted((folder / split / name).iterdir())[:most]
        ]
        tokens = class_tokens(load_backbone(backbone), [path for path, _, _ in photos])
        np.savez(
            place,
            readout=tokens.half().numpy(),
            label=np.array([number for _, number, _ in photos]),
            split=np.array([test for _, _, test in photos]),
            names=np.array(names),
        )
    with np.load(place) as file:
        return dict(file)


def draws(tokens: Tokens, count: int) -> Iterator[ClassIndices]:
    """Indices of this many training images of each class."""
    labels, train = tokens["label"], np.flatnonzero(~tokens["split"].astype(bool))
    for seed in range(DRAWS if count < 20 else 1):
        random = np.random.default_rng(seed)
        yield np.concatenate(
            [random.permutation(train[labels[train] == k])[:count] for k in np.unique(labels)]
        )


def measure_single(tokens: Tokens, count: int) -> dict[str, float]:
    features, labels = tokens["readout"].astype(np.float64), tokens["label"].astype(np.int64)
    test = np.flatnonzero(tokens["split"])
    found: dict[str, list[float]] = {}
    for chosen in draws(tokens, count):
        statistics = LdaStatistics.of(features[chosen], labels[chosen])
        for name, solve in ESTIMATORS.items():
            weight, bias = solve(statistics)
            predictions = (features[test] @ weight.T + bias).argmax(axis=1)
            found.setdefault(name, []).append(float((predictions == labels[test]).mean()))
        solved = solve_lda(features[chosen], labels[chosen])
        scores = np.exp(log_softmax(features[test] @ solved.weight.T + solved.bias))
        right = (scores.argmax(axis=1) == labels[test]).astype(np.float64)
        found.setdefault("calibration error", []).append(calibrate(scores.max(axis=1), right).error)
        judged = solved.leave_one_out.accuracy
        found.setdefault("left out", []).append(np.nan if judged is None else judged)
    return {name: round(float(np.mean(values)), 4) for name, values in found.items()}


def measure_several(tokens: Tokens, count: int) -> dict[str, float]:
    """Plant and disease as labels of their own."""
    parts = [str(name).split("___") for name in tokens["names"]]
    names = sorted({part for each in parts for part in each})
    truth = np.array([[name in each for name in names] for each in parts])[tokens["label"]]
    features, test = tokens["readout"].astype(np.float64), np.flatnonzero(tokens["split"])
    found: dict[str, list[float]] = {}
    for chosen in draws(tokens, count):
        solved = solve_ridge(features[chosen], truth[chosen])
        logits = features[test] @ solved.weight.T + solved.bias
        predictions, true = logits > 0, truth[test]
        figures = {
            "mean average precision": float(
                np.mean([average_precision(logits[:, k], true[:, k]) for k in range(len(names))])
            ),
            "micro F1": 2 * (predictions & true).sum() / (predictions.sum() + true.sum()),
            "all labels right": (predictions == true).all(axis=1).mean(),
            "calibration error": calibrate(
                1 / (1 + np.exp(-logits.reshape(-1))), true.reshape(-1).astype(np.float64)
            ).error,
        }
        for name, value in figures.items():
            found.setdefault(name, []).append(float(value))
    return {name: round(float(np.mean(values)), 4) for name, values in found.items()}


def write_few(flowers: Path, out: Path) -> None:
    """Folders of the first so many training photos of each class, with all test photos."""
    for count in (1, 5, 20):
        for split, most in (("train", count), ("test", None)):
            for path in sorted((flowers / split).iterdir()):
                folder = out / f"flowers-{count}" / split / path.name
                folder.mkdir(parents=True, exist_ok=True)
                for photo in sorted(path.iterdir())[:most]:
                    shutil.copy(photo, folder)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("sets", type=Path)
    parser.add_argument(
        "--backbone", type=Path, default=Path("server/engram_server/embedded/engram-mini")
    )
    parser.add_argument("--few", type=Path, metavar="OUT")
    parser.add_argument("--kept", type=Path, default=Path("build/closed-form"))
    args = parser.parse_args()
    if args.few is not None:
        write_few(args.sets / "flowers102", args.few)
        return
    args.kept.mkdir(parents=True, exist_ok=True)
    present = [name for name in SETS if (args.sets / name).is_dir()]
    for name in present:
        tokens = read_tokens(args.backbone, args.sets / name, args.kept)
        most = int(np.bincount(tokens["label"][~tokens["split"].astype(bool)]).max())
        for count in (each for each in COUNTS if each <= most):
            print(json.dumps({"set": name, "photos": count, **measure_single(tokens, count)}))
        for count in COUNTS if name == "plants" else ():
            print(json.dumps({"set": "several", "photos": count, **measure_several(tokens, count)}))


if __name__ == "__main__":
    main()
