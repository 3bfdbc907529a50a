"""What training sees of an image."""

from dataclasses import replace

import numpy as np
import pytest
from engram_server.model import Preprocessing
from engram_training.data.augment import augment, choose

VIEW = Preprocessing((16, 16), "bilinear", None, 1 / 255, (0.5, 0.5, 0.5), (0.5, 0.5, 0.5))
CROPPED = replace(VIEW, resize=18, crop=(16, 16))


def gradient(height, width):
    """Red encodes the row and green the column, so a view shows its position."""
    rows = np.linspace(0, 255, height)[:, None] * np.ones(width)
    columns = np.linspace(0, 255, width) * np.ones(height)[:, None]
    return np.stack([rows, columns, rows * 0], axis=2).astype(np.uint8)


def shown(view):
    """Height and width of the part that a view shows, as shares of the image."""
    spread = view.astype(int).max(axis=(0, 1)) - view.astype(int).min(axis=(0, 1))
    return spread[:2] / 255


@pytest.mark.parametrize("how", ["inception", "clip"])
@pytest.mark.parametrize("view", [VIEW, CROPPED], ids=["exact", "cropped"])
@pytest.mark.parametrize("size", [(16, 16), (40, 30), (7, 300), (1, 1)])
def test_every_image_becomes_a_view_of_the_right_size(how, view, size):
    for seed in range(5):
        pixels = augment(gradient(*size), how, view, np.random.default_rng(seed))
        assert pixels.shape == (16, 16, 3)
        assert pixels.dtype == np.uint8


@pytest.mark.parametrize("how", ["inception", "clip"])
def test_a_draw_depends_on_its_seed_alone(how):
    image = gradient(60, 80)
    one = [augment(image, how, VIEW, np.random.default_rng([0, n])) for n in range(4)]
    two = [augment(image, how, VIEW, np.random.default_rng([0, n])) for n in range(4)]
    assert np.array_equal(one, two)
    assert not np.array_equal(one[0], one[1])


def test_clipping_shows_nearly_all_and_cropping_any_part():
    image = gradient(200, 200)
    clipped = [shown(augment(image, "clip", VIEW, np.random.default_rng(n))) for n in range(40)]
    assert 0.7 < np.min(clipped) < np.max(clipped) < 0.9
    cropped = [
        np.prod(shown(augment(image, "inception", VIEW, np.random.default_rng(n))))
        for n in range(200)
    ]
    assert min(cropped) < 0.2
    assert max(cropped) > 0.75


def test_half_of_the_views_are_flipped():
    image = gradient(50, 50)
    views = [augment(image, "clip", VIEW, np.random.default_rng(n)).astype(int) for n in range(200)]
    flipped = sum(view[0, 0, 1] > view[0, -1, 1] for view in views)
    assert 70 < flipped < 130


def test_a_view_that_keeps_shapes_is_clipped_to_its_own_shape():
    heights, widths = zip(
        *(
            shown(augment(gradient(100, 200), "clip", CROPPED, np.random.default_rng(n)))
            for n in range(20)
        ),
        strict=True,
    )
    assert np.allclose(np.array(heights) / np.array(widths), 2, atol=0.15)


def test_small_images_are_clipped_and_large_ones_cropped():
    assert choose(np.array([32, 32, 400])) == "clip"
    assert choose(np.array([500, 300, 32])) == "inception"
    assert choose(np.array([], dtype=np.int64)) == "inception"
