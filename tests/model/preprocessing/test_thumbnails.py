"""Thumbnails of examples."""

import io
from contextlib import nullcontext

import numpy as np
import pytest
from engram_bundle.limits import DEFAULT_LIMITS
from PIL import Image

from tests.model.image_files import encode, random_rgb
from tests.model.preprocessing.configurations import CONFIGS, pair


def read(preprocessing, data, *, thumbnail=True):
    return preprocessing.read(
        data, max_pixels=None, reserve=nullcontext, stop=lambda: None, thumbnail=thumbnail
    )


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize(
    ("size", "small"),
    [((600, 300), (96, 48)), ((30, 50), (30, 50)), ((97, 96), (96, 95)), ((900, 30), (96, 3))],
)
def test_a_thumbnail_has_the_proportions_of_the_photo_and_the_pixels_stay_the_same(
    name, size, small
):
    preprocessing, _ = pair(name)
    data = encode(random_rgb(size[1], size[0]), "PNG")
    pixels, thumbnail = read(preprocessing, data)
    picture = Image.open(io.BytesIO(thumbnail))
    assert (picture.format, picture.size) == ("WEBP", small)
    assert len(thumbnail) < DEFAULT_LIMITS.max_thumbnail_bytes
    assert np.array_equal(pixels, preprocessing(data, max_pixels=None))
    assert read(preprocessing, data)[1] == thumbnail, "the same bytes every time"
    assert read(preprocessing, data, thumbnail=False)[1] == b""


@pytest.mark.parametrize("orientation", range(1, 9))
def test_a_thumbnail_is_upright(orientation):
    preprocessing, _ = pair(next(iter(CONFIGS)))
    picture = Image.new("RGB", (200, 100), "white")
    picture.paste("red", (0, 0, 100, 100))
    exif = Image.Exif()
    exif[0x0112] = orientation
    out = io.BytesIO()
    picture.save(out, "JPEG", exif=exif)
    small = Image.open(io.BytesIO(read(preprocessing, out.getvalue())[1])).convert("RGB")
    assert small.size == ((96, 48) if orientation <= 4 else (48, 96))
    # Where the left half of the stored picture is after turning it.
    x, y = {1: (5, 24), 2: (90, 24), 3: (90, 24), 4: (5, 24)}.get(orientation) or (
        (24, 5) if orientation in (5, 6) else (24, 90)
    )
    red, green, _ = small.getpixel((x, y))
    assert red > 200 > 60 > green
