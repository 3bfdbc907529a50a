"""For how many photos a class name should count: a stand-in, since weights of CLIP are not at hand.

    python -m research.text_prior

The "text" of a class is the middle of photos that are used for nothing else, with noise that makes
it as good as names are: about as good as a head of one, of some and of many photos a class. Its
scale is the one that fits validation images best, as CLIP's is learned to be. Names and photos are
then mixed as the server mixes them, with every weight of the names.
"""

import argparse
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Final
from unittest.mock import patch

import numpy as np
import numpy.typing as npt
import torch

from research.accuracy import BATCH, SHARED, Cell, read_images
from research.accuracy_sets import Sizes, collections
from research.paper_images import SPLITS, Split
from server import embedded
from server.model import Backbone, load_backbone, text_head
from server.model.closed_form import log_softmax, solve_discriminant
from server.model.masked_pass import encode
from server.model.text_head import TextHead

FOR_TEXT: Final = 8  # photos a class that become its "text"
SIZES: Final = {"cifar100": Sizes(50, FOR_TEXT + 8, 4, 16), "flowers": Sizes(51, 16, 3, 8)}
PULLS: Final = (1.0, 2.0, 4.0, 8.0, 16.0)
PHOTOS: Final = (1, 2, 4, 8)
NOISES: Final = (0.5, 1.0, 2.0)
SCALES: Final = (4.0, 8.0, 16.0, 32.0, 64.0, 128.0)

Floats = npt.NDArray[np.float64]
Classes = npt.NDArray[np.int64]
Units = dict[Split, tuple[Floats, Classes]]


def read(backbone: Backbone, name: str, seed: int) -> Units:
    """Class tokens divided by their length, and the classes of the images."""
    known, found = collections(SHARED, None), {}
    with ExitStack() as stack:
        images = read_images(Cell(known[name], SIZES[name], seed, "frozen"), backbone, stack)
        for split in SPLITS:
            places = torch.split(torch.arange(len(images.sets[split])), BATCH)
            views = (images.sets[split].batch(some.tolist()) for some in places)
            rows = [
                encode(backbone, backbone.preprocessing.normalise(one)).readout for one in views
            ]
            features = torch.cat(rows)[:, : backbone.width].double().numpy()
            units = features / np.linalg.norm(features, axis=1, keepdims=True)
            found[split] = units, images.targets[split].numpy()
    return found


def some_of_each(classes: Classes, first: int, last: int) -> Classes:
    """The places of the first to the last photos of every class."""
    return np.concatenate([np.flatnonzero(classes == k)[first:last] for k in np.unique(classes)])


def text_of(units: Units, noise: float, seed: int) -> TextHead:
    rows, classes = units["train"]
    chosen = some_of_each(classes, 0, FOR_TEXT)
    labels = np.unique(classes)
    middles = np.stack([rows[chosen][classes[chosen] == k].mean(axis=0) for k in labels])
    apart = middles - middles.mean(axis=0)
    drawn = np.random.default_rng(seed).standard_normal(apart.shape)
    length = np.linalg.norm(apart, axis=1).mean() / apart.shape[1] ** 0.5
    said = apart + noise * length * drawn
    said /= np.linalg.norm(said, axis=1, keepdims=True)
    validated, right = units["val"]

    def fit(scale: float) -> float:
        told = log_softmax(scale * validated @ said.T)
        return float(told[np.arange(len(right)), right].mean())

    weight = (max(SCALES, key=fit) * said).astype(np.float32)
    return TextHead(tuple(f"{k:03}" for k in labels), weight, None, None)


def accuracy(units: Units, photos: int, text: TextHead | None) -> float:
    rows, classes = units["train"]
    chosen = some_of_each(classes, FOR_TEXT, FOR_TEXT + photos)
    told = None if text is None else text.centred()
    solved = solve_discriminant(rows[chosen], classes[chosen], told)
    tested, right = units["test"]
    answers = (tested @ solved.weight.T + solved.bias).argmax(axis=1)
    return 100 * float((answers == right).mean())


def _names_alone(units: Units, text: TextHead) -> float:
    tested, right = units["test"]
    return 100 * float(((tested @ text.weight.T).argmax(axis=1) == right).mean())


def table(name: str, draws: Sequence[Units]) -> None:
    def mean(values: Sequence[float]) -> str:
        return f"{np.mean(values):.1f}"

    alone = [mean([accuracy(one, n, None) for one in draws]) for n in PHOTOS]
    print(f"{name}, photos alone: {', '.join(alone)} with {', '.join(map(str, PHOTOS))} a class")
    for noise in NOISES:
        texts = [text_of(units, noise, seed) for seed, units in enumerate(draws)]
        right = [_names_alone(one, text) for one, text in zip(draws, texts, strict=True)]
        print(f"  names alone {mean(right)}; then by weight, with so many photos a class:")
        for pull in PULLS:
            with patch.object(text_head, "TEXT_PULL", pull):
                mixed = [
                    mean([accuracy(one, n, text) for one, text in zip(draws, texts, strict=True)])
                    for n in PHOTOS
                ]
            print(f"    {pull:g}: {', '.join(mixed)}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--backbone", type=Path, default=embedded.BACKBONE)
    parser.add_argument("--seeds", type=int, default=2)
    given = parser.parse_args()
    backbone = load_backbone(given.backbone)
    for name in SIZES:
        table(name, [read(backbone, name, seed) for seed in range(given.seeds)])


if __name__ == "__main__":
    main()
