"""The pictures that tell whether a task answers here as it did where it was trained."""

import numpy as np

from server.model.preprocessing.decoding import Pixels

GOLDEN_SEED = 2022


def golden_pixels(size: tuple[int, int]) -> Pixels:
    """Two images (2, H, W, 3), the same for every bundle: coarse patches of colour, and noise.

    A server replays them when it loads a bundle, so that one on a wrong backbone, or with answers
    that are no numbers, is refused instead of answering nonsense. They are never photos of the
    training data: whoever has a bundle can look at what is in it.
    """
    height, width = size
    random = np.random.default_rng(GOLDEN_SEED)
    patches = random.integers(0, 256, (8, 8, 3), dtype=np.uint8)
    rows, columns = np.arange(height) * 8 // height, np.arange(width) * 8 // width
    noise = random.integers(0, 256, (height, width, 3), dtype=np.uint8)
    return np.stack([patches[rows][:, columns], noise])
