"""Data augmentation: a random crop and flip of each image in every epoch.

`inception` crops 8 to 100 % of the area with a nearly square shape. `clip` crops most of the image,
for small images such as CIFAR's. Both flip half of the images. `none` is the view of the server, so
contexts can be kept.
"""

import math
from typing import Final, Literal, get_args

import numpy as np
import numpy.typing as npt
from engram_server.model.preprocessing import FILTERS, Preprocessing
from PIL import Image

Augmentation = Literal["inception", "clip", "none"]
AUGMENTATIONS: Final[tuple[Augmentation, ...]] = get_args(Augmentation)
Pixels = npt.NDArray[np.uint8]
Box = tuple[float, float, float, float]  # left, top, right, bottom

SMALL_EDGE = 96  # images with a shorter side below this use `clip`
AREA = (0.08, 1.0)
RATIO = (3 / 4, 4 / 3)
CLIPPED = 7 / 8


def choose(shorter_sides: npt.NDArray[np.int64]) -> Augmentation:
    small = len(shorter_sides) > 0 and float(np.median(shorter_sides)) < SMALL_EDGE
    return "clip" if small else "inception"


def augment(
    image: Pixels, how: Augmentation, view: Preprocessing, rng: np.random.Generator
) -> Pixels:
    height, width = view.output_size
    rows, columns, _ = image.shape
    if how == "clip":
        box = _clip_box(columns, rows, view, rng)
    else:
        box = _inception_box(columns, rows, rng)
    picture = Image.fromarray(image).resize((width, height), FILTERS[view.resample], box=box)
    pixels = np.asarray(picture)
    return np.ascontiguousarray(pixels[:, ::-1]) if rng.random() < 0.5 else pixels


def _inception_box(width: int, height: int, rng: np.random.Generator) -> Box:
    for _ in range(10):
        area = width * height * rng.uniform(*AREA)
        ratio = math.exp(rng.uniform(math.log(RATIO[0]), math.log(RATIO[1])))
        w, h = math.sqrt(area * ratio), math.sqrt(area / ratio)
        if w <= width and h <= height:
            return _random_box(w, h, width, height, rng)
    # The aspect ratio is too extreme: use the largest centre crop.
    w, h = min(width, height * RATIO[1]), min(height, width / RATIO[0])
    left, top = (width - w) / 2, (height - h) / 2
    return left, top, left + w, top + h


def _clip_box(width: int, height: int, view: Preprocessing, rng: np.random.Generator) -> Box:
    w, h = CLIPPED * width, CLIPPED * height
    if view.crop is not None:
        # This view keeps the aspect ratio, so the crop has the shape of the view.
        rows, columns = view.output_size
        scale = CLIPPED * min(width / columns, height / rows)
        w, h = scale * columns, scale * rows
    return _random_box(w, h, width, height, rng)


def _random_box(w: float, h: float, width: int, height: int, rng: np.random.Generator) -> Box:
    left, top = rng.uniform(0, width - w), rng.uniform(0, height - h)
    return left, top, min(left + w, width), min(top + h, height)
