"""Resizing is Pillow's, within a tolerance and for a fraction of its time."""

import subprocess
import sys

import numpy as np
import pytest
from engram_server.model.preprocessing.resizing import FILTERS, resize, resizing_bytes
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from tests.model.image_files import assert_same_pixels, random_rgb

EDGES = st.integers(1, 90)


@settings(max_examples=300, deadline=None)
@given(
    height=EDGES, width=EDGES, rows=EDGES, columns=EDGES, resample=st.sampled_from(sorted(FILTERS))
)
def test_any_size_is_resized_as_pillow_does(height, width, rows, columns, resample):
    image = random_rgb(height, width)
    result = resize(np.array(image), (columns, rows), resample)
    expected = np.asarray(image.resize((columns, rows), FILTERS[resample])).astype(int)
    assert_same_pixels(result, expected, resample, (height, width, rows, columns))


@pytest.mark.parametrize("resample", FILTERS)
@pytest.mark.parametrize(
    "size", [(60, 20), (20, 60), (100, 20), (20, 100), (119, 20), (200, 20), (20, 200), (100, 80)]
)
def test_an_axis_that_pillow_resizes_first_is_the_first(resample, size):
    """Black and white noise overshoots, so that another order changes it by up to 30 levels."""
    noise = np.random.default_rng(0).integers(0, 2, (80, 120, 3), dtype=np.uint8) * 255
    for pixels in (noise, np.ascontiguousarray(noise.swapaxes(0, 1))):
        expected = np.asarray(Image.fromarray(pixels).resize(size, FILTERS[resample])).astype(int)
        assert_same_pixels(resize(pixels, size, resample), expected, resample)


@pytest.mark.parametrize("resample", FILTERS)
@pytest.mark.parametrize("size", [(60, 20), (20, 60), (200, 20), (50, 130)])
def test_a_picture_on_its_side_is_resized_as_the_upright_one(resample, size):
    upright = np.array(random_rgb(80, 120))
    expected = resize(upright, size, resample)
    stored = np.ascontiguousarray(upright.swapaxes(0, 1))
    result = resize(stored, (size[1], size[0]), resample, sideways=True)
    assert np.array_equal(result.swapaxes(0, 1), expected)


@pytest.mark.parametrize("resample", sorted(set(FILTERS) - {"nearest"}))
@pytest.mark.parametrize("size", [(30, 20), (20, 30), (30, 2), (2, 39)])
@pytest.mark.parametrize("extent", [(119.5, 79.125), (120.0, 79.25), (119.25, 80.0)])
def test_an_extent_may_end_within_a_pixel(resample, size, extent):
    image = random_rgb(80, 120)
    expected = np.asarray(image.resize(size, FILTERS[resample], (0, 0, *extent))).astype(int)
    result = resize(np.array(image), size, resample, extent=extent)
    assert_same_pixels(result, expected, resample)


def test_memory_of_a_long_strip_is_that_of_the_pass_that_shrinks_it():
    assert resizing_bytes((1, 10**6), (224, 224), "bicubic", sideways=False) < 10**6
    assert resizing_bytes((10**6, 1), (224, 224), "bicubic", sideways=True) < 10**6
    assert resizing_bytes((1000, 1000), (100, 100), "lanczos", sideways=False) > 4 * 10**6


THREADS = """
import threading
import numpy as np, torch
from pathlib import Path
from engram_server.model.preprocessing.resizing import resize
torch.set_num_threads(4)
pixels = np.zeros((1000, 1500, 3), dtype=np.uint8)
def work():
    before = len(list(Path("/proc/self/task").iterdir()))
    resize(pixels, (1400, 900), "bicubic"), resize(pixels, (200, 990), "bilinear")
    print(before, len(list(Path("/proc/self/task").iterdir())))
thread = threading.Thread(target=work)
thread.start(), thread.join()
"""


@pytest.mark.skipif(sys.platform != "linux", reason="counts the threads in /proc")
def test_a_decoding_thread_starts_no_threads_of_torch():
    run = subprocess.run(
        [sys.executable, "-c", THREADS], capture_output=True, text=True, check=True, timeout=120
    )
    before, after = run.stdout.split()
    assert before == after
