"""The sets of the accuracy study: archives of photos beside the repository, and drawn pictures.

Every set gives a seeded draw of training, validation and test images. Drawn sets ask what no name
of a thing answers: how many, at which angle, how far apart.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
from PIL import Image, ImageDraw

from research.paper_images import Split, find_data, list_images, unpack

LabelledPaths = list[tuple[Path, int]]
Random = np.random.Generator
Paint = Callable[[Random, int, int], Image.Image]
# Write images below a folder: some of each class, or `MOST_IMAGES` in all if None; from a seed.
Draw = Callable[[Path, int | None, int], dict[Split, LabelledPaths]]

MOST_IMAGES: Final = 1000  # of training and validation together, and of test images
HELD_OUT: Final = 10  # one in so many images of a class is for validation, but at least one
SIDE = 224  # of a drawn picture
SMOOTH = 2  # drawn so many times larger, then reduced


@dataclass(frozen=True, slots=True)
class ImageCollection:
    name: str
    title: str
    draw: Draw


# --- archives -------------------------------------------------------------------------------------


def from_data(source: Path) -> Draw:
    def draw(folder: Path, per_class: int | None, seed: int) -> dict[Split, LabelledPaths]:
        listing = list_images(source)
        rng = np.random.default_rng([seed, 0xACC])
        labels = {label: place for place, label in enumerate(sorted(listing["train"]))}
        chosen: dict[str, list[tuple[str, int]]] = {}
        for split, of_class in (("train", per_class), ("test", None)):
            named = [(n, labels[label]) for label in labels for n in listing[split][label]]
            chosen[split] = _sample([named[i] for i in rng.permutation(len(named))], of_class)
        root = unpack(source, {name for named in chosen.values() for name, _ in named}, folder)
        paths = {
            split: [(root / name, label) for name, label in named]
            for split, named in chosen.items()
        }
        return {**_held_out(paths["train"]), "test": paths["test"]}

    return draw


def _sample(named: Sequence[tuple[str, int]], per_class: int | None) -> list[tuple[str, int]]:
    """Take the first images, of each class or in all."""
    if per_class is None:
        return list(named[:MOST_IMAGES])
    labels = sorted({label for _, label in named})
    return [
        one for label in labels for one in [each for each in named if each[1] == label][:per_class]
    ]


def _held_out(images: LabelledPaths) -> dict[Split, LabelledPaths]:
    """Split training images; a class of one or two has none for validation."""
    train: LabelledPaths = []
    val: LabelledPaths = []
    for label in sorted({label for _, label in images}):
        of_class = [one for one in images if one[1] == label]
        count = max(1, len(of_class) // HELD_OUT) if len(of_class) > 2 else 0
        val += of_class[:count]
        train += of_class[count:]
    return {"train": train, "val": val}


# --- drawn ----------------------------------------------------------------------------------------


def drawn(paint: Paint, classes: int) -> Draw:
    """`paint(rng, class, classes)` gives one picture of a class."""

    def draw(folder: Path, per_class: int | None, seed: int) -> dict[Split, LabelledPaths]:
        found: dict[str, LabelledPaths] = {"train": [], "test": []}
        for number, (split, of_class) in enumerate((("train", per_class), ("test", None))):
            for label in range(classes):
                rng = np.random.default_rng([seed, number, label])
                for index in range(of_class or MOST_IMAGES // classes):
                    path = folder / f"{split}-{label}-{index}.png"
                    paint(rng, label, classes).save(path, compress_level=1)
                    found[split].append((path, label))
        return {**_held_out(found["train"]), "test": found["test"]}

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


ARCHIVES: Final[Mapping[str, tuple[str, str]]] = {
    "cifar100": ("CIFAR-100", "cifar100"),
    "flowers": ("Flowers-102", "flowers102"),
    "leaves": ("leaf diseases (38)", "plants"),
    "textures": ("textures (10)", "dtd10"),
    "signs": ("traffic signs (43)", "gtsrb"),
    "tiles": ("tile defects (6)", "tile"),
}
DRAWN: Final[Mapping[str, tuple[str, Paint, int]]] = {
    "counting": ("counting shapes (8)", count_shapes, 8),
    "distance": ("distance of two discs (8)", distance_of_discs, 8),
    "angle": ("angle of a bar (12)", angle_of_bar, 12),
}


def collections(data: Path) -> Mapping[str, ImageCollection]:
    """The collections whose images are available, by name."""
    found = [
        ImageCollection(name, title, from_data(find_data(data, file)))
        for name, (title, file) in ARCHIVES.items()
        if find_data(data, file).exists()
    ]
    found += [
        ImageCollection(name, title, drawn(paint, classes))
        for name, (title, paint, classes) in DRAWN.items()
    ]
    return {one.name: one for one in found}
