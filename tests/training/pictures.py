"""Small pictures whose class anyone can see: coloured squares on a noisy ground."""

import csv
from pathlib import Path

import numpy as np
from PIL import Image

COLOURS = {
    "blue": (40, 60, 220),
    "green": (30, 180, 60),
    "red": (220, 50, 40),
    "yellow": (230, 210, 40),
}


def picture(colours, seed: int, size: int = 24) -> Image.Image:
    """Noise with one square for each colour."""
    rng = np.random.default_rng(seed)
    pixels = rng.integers(100, 150, (size, size, 3))
    noise = rng.integers(-20, 20, (size, size, 3))
    side = size // 2
    for place, colour in enumerate(colours):
        left, top = (place % 2) * side, (place // 2) * side
        pixels[top : top + side, left : left + side] = COLOURS[colour]
    return Image.fromarray((pixels + noise).clip(0, 255).astype(np.uint8))


def whole_picture(colour: str, seed: int, size: int = 24) -> Image.Image:
    return picture([colour] * 4, seed, size)


def class_folders(root: Path, each: int = 8, colours=tuple(COLOURS), seed: int = 0) -> Path:
    """root/<colour>/NN.png"""
    for number, colour in enumerate(colours):
        folder = root / colour
        folder.mkdir(parents=True)
        for place in range(each):
            image = whole_picture(colour, seed * 100_000 + number * 1000 + place)
            image.save(folder / f"{place:02}.png")
    return root


def several_labels(root: Path, count: int = 30) -> Path:
    """A CSV in which every picture has none, one or two colours."""
    root.mkdir(parents=True)
    rng = np.random.default_rng(3)
    names = list(COLOURS)
    with (root / "labels.csv").open("w", newline="") as file:
        table = csv.writer(file)
        table.writerow(["path", "labels"])
        for place in range(count):
            chosen = [name for name in names[:3] if rng.random() < 0.5]
            picture(chosen, place).save(root / f"{place}.png")
            table.writerow([f"{place}.png", ";".join(chosen)])
    return root / "labels.csv"


def brightness(root: Path, count: int = 40) -> Path:
    """A CSV of grey pictures and how bright they are, in a unit far from one."""
    root.mkdir(parents=True)
    lines = ["path,value"]
    for place in range(count):
        share = place / (count - 1)
        rng = np.random.default_rng(place)
        noise = rng.integers(0, 20, (16, 16, 3))
        pixels = np.clip(235 * share + noise, 0, 255).astype(np.uint8)
        Image.fromarray(pixels).save(root / f"{place}.png")
        lines.append(f"{place}.png,{1000 + 500 * share:.2f}")
    (root / "values.csv").write_text("\n".join(lines))
    return root / "values.csv"
