"""How much heads gain by reading every layer: the table of docs/explanation/teaching.md.

    python -m research.layer_heads [--backbone FOLDER] [--draws 3]

Closed-form heads of some training photos a class, or of up to 1,000 in all, on the class token
alone and on every layer. Photos are those of the archives beside the repository; the last sets are
drawn.
The features of each set are computed once and kept below build/.
"""

import argparse
import tarfile
import tempfile
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt
import torch
from engram_server import embedded
from engram_server.model import Backbone, load_backbone
from engram_server.model.heads.closed_form import solve
from engram_server.model.heads.examples import Examples
from engram_server.model.masked_pass import encode
from engram_server.model.tasks import feature_layout
from PIL import Image

from research.accuracy import DATA
from research.accuracy_sets import angle_of_bar, count_shapes, distance_of_discs
from research.paper_images import list_images

Labels = npt.NDArray[np.int64]
Features = npt.NDArray[np.float16]
Images = Iterator[tuple[Image.Image, int]]

ARCHIVES: Final = ("cifar100", "flowers102", "plants", "dtd10", "gtsrb", "tile")
DRAWN: Final[Mapping[str, tuple[Callable[..., Image.Image], int]]] = {
    "counting": (count_shapes, 8),
    "distance": (distance_of_discs, 8),
    "angle": (angle_of_bar, 12),
}
COUNTS: Final = (2, 5, 10, None)  # photos a class; None: up to MOST_PHOTOS in all
MOST_PHOTOS: Final = 1000
MOST_TESTED: Final = 1000
MOST_READ: Final = {"train": 30, "test": 20}  # of a class of CIFAR-100, which has many
DRAWN_IMAGES: Final = {"train": 200, "test": 60}  # of a class
BATCH: Final = 64


def archived(archive: Path, split: str) -> Images:
    with tempfile.TemporaryDirectory() as folder, tarfile.open(archive) as tar:
        listing = list_images(archive)[split]
        random = np.random.default_rng(0)
        for label, names in enumerate(listing.values()):
            most = MOST_READ[split] if archive.stem == "cifar100" else len(names)
            for place in random.permutation(len(names))[:most]:
                tar.extract(names[place], folder, filter="data")
                yield Image.open(Path(folder) / names[place]), label


def painted(paint: Callable[..., Image.Image], classes: int, split: str) -> Images:
    random = np.random.default_rng([7, classes, split == "test"])
    for label in range(classes):
        for _ in range(DRAWN_IMAGES[split]):
            yield paint(random, label, classes), label


def read_features(backbone: Backbone, images: Images, kept: Path) -> tuple[Features, Labels]:
    """The features of examples, (n, F), and the class of each."""
    if not kept.exists():
        features: list[Features] = []
        labels: list[int] = []
        batch: list[Image.Image] = []

        def flush() -> None:
            with ThreadPoolExecutor(torch.get_num_threads()) as pool:
                pixels = pool.map(backbone.preprocessing.from_image, batch)
                readout = encode(backbone, torch.from_numpy(np.stack(list(pixels)))).readout
            features.append(backbone.features_of(readout.numpy()).astype(np.float16))
            batch.clear()

        for image, label in images:
            image.load()
            batch.append(image)
            labels.append(label)
            if len(batch) == BATCH:
                flush()
        if batch:
            flush()
        kept.parent.mkdir(parents=True, exist_ok=True)
        np.savez(kept, features=np.concatenate(features), labels=np.array(labels))
    with np.load(kept) as file:
        return file["features"], file["labels"]


def choose(labels: Labels, count: int | None, seed: int) -> Labels:
    order = np.random.default_rng([seed, 5]).permutation(len(labels))
    if count is None:
        return order[:MOST_PHOTOS]
    chosen = [order[labels[order] == label][:count] for label in np.unique(labels)]
    return np.concatenate(chosen)


def predict(backbone: Backbone, train: Features, classes: Labels, test: Features) -> Labels:
    """The classes that a head predicts for test photos."""
    targets = np.eye(int(classes.max()) + 1, dtype=bool)[classes]
    names = tuple(map(str, range(targets.shape[1])))
    digests = np.zeros((len(train), 32), np.uint8)
    examples = Examples("single_label", names, train, targets, digests)
    head = solve(examples, None, feature_layout(backbone))
    logits = test.astype(np.float32) @ head.weight.T + head.bias
    return np.asarray(logits.argmax(axis=1))


def measure(
    backbone: Backbone, sets: Mapping[str, Callable[[str], Images]], kept: Path, draws: int
) -> Iterator[str]:
    width = backbone.width
    for count in COUNTS:
        cells, gains = [], []
        for name, images in sets.items():
            read = partial(read_features, backbone)
            train, labels = read(images("train"), kept / f"{name}-train.npz")
            test, truth = read(images("test"), kept / f"{name}-test.npz")
            right = np.zeros(2)
            for seed in range(draws):
                chosen = choose(labels, count, seed)
                tested = np.random.default_rng([seed, 9]).permutation(len(truth))[:MOST_TESTED]
                for column, used in enumerate((slice(width), slice(None))):
                    predicted = predict(
                        backbone, train[chosen, used], labels[chosen], test[tested, used]
                    )
                    right[column] += 100 * (predicted == truth[tested]).mean() / draws
            cells.append(f"{right[0]:.1f} → {right[1]:.1f}")
            gains.append(right[1] - right[0])
        mean = np.mean(gains[: len(sets) - 1])
        yield " | ".join([f"| {count or 'all'}", *cells, f"{mean:+.1f} |"])


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--backbone", type=Path, default=embedded.BACKBONE)
    parser.add_argument("--draws", type=int, default=3)
    args = parser.parse_args()
    backbone = load_backbone(args.backbone)
    sets: dict[str, Callable[[str], Images]] = {
        name: partial(archived, DATA / f"{name}.tar") for name in ARCHIVES
    }
    sets |= {name: partial(painted, *how) for name, how in DRAWN.items()}
    print("| photos a class | " + " | ".join([*sets, "mean gain without the last"]) + " |")
    for line in measure(backbone, sets, Path("build") / "layer-heads" / backbone.name, args.draws):
        print(line, flush=True)


if __name__ == "__main__":
    main()
