"""HEIC, the photos of phones: decoded once upright, and under the limits of every format."""

import time
import tracemalloc

import numpy as np
import pytest
from engram_server.errors import ImageTooLarge, UnreadableImage
from engram_server.model.preprocessing import decoding
from engram_server.model.preprocessing.decoding import open_image, read_header
from PIL import Image

from tests.model.image_files import HEIC, box, grid_of, heic, heic_picture
from tests.model.preprocessing.configurations import AS_IT_IS

PICTURE = (b"hvc1", (96, 64))


def shown(data: bytes) -> np.ndarray:
    return AS_IT_IS(data, max_pixels=None).astype(int)


def difference(one: np.ndarray, other: Image.Image) -> float:
    return float(np.abs(one - np.asarray(other)).mean())


def test_rotation_and_exif_orientation_together_rotate_once():
    data = HEIC.read_bytes()
    assert b"irot" in data
    assert data.rfind(b"Exif\0\0") > 0
    upright = heic_picture().transpose(Image.Transpose.ROTATE_270)
    assert (read_header(data).format, read_header(data).width) == ("HEIC", 64)
    assert difference(shown(data), upright) < 2


def test_transparency_is_laid_over_white():
    result = shown(HEIC.with_name("alpha.heic").read_bytes())
    assert (result[:20] > 250).all()
    assert difference(result[22:], heic_picture().crop((0, 22, 96, 64))) < 2


def test_a_grid_of_tiles_is_one_image():
    data = heic(
        [(b"grid", (192, 64)), PICTURE, PICTURE],
        [(b"dimg", 1, [2, 3])],
        payloads={1: grid_of(1, 2, 192, 64)},
    )
    result = shown(data)
    assert result.shape == (64, 192, 3)
    assert difference(result[:, 96:], heic_picture()) < 2


def test_the_primary_image_is_used():
    assert difference(shown(heic([PICTURE, (b"hvc1", (7, 7))])), heic_picture()) < 2


@pytest.mark.parametrize(
    ("data", "error", "message"),
    [
        (heic([(b"hvc1", (960, 640))]), UnreadableImage, "size signaled"),
        (heic([(b"hvc1", (9, 6))]), UnreadableImage, "exceeds the maximum"),
        (heic([(b"iovl", (96, 64)), PICTURE], [(b"dimg", 1, [2])]), UnreadableImage, "kind 'iovl'"),
        (heic([(b"mime", (96, 64))]), UnreadableImage, "kind 'mime'"),
        (heic([(b"grid", (96, 64))], [(b"dimg", 1, [1])]), UnreadableImage, "kind 'grid'"),
        (heic([PICTURE]) + box(b"meta", bytes(4)), UnreadableImage, "two parts meta"),
        (heic([PICTURE], more=box(b"iprp")), UnreadableImage, "two parts iprp"),
        (heic([PICTURE]) + box(b"moov"), UnreadableImage, "sequences are not supported"),
        (heic([PICTURE]).replace(b"pitm", b"free"), UnreadableImage, "damaged or incomplete"),
        (heic([PICTURE]) + box(b"free") * 70_000, ImageTooLarge, "more than 65536 parts"),
        (heic([PICTURE], [(b"cdsc", 1, [1] * 60_000)] * 2), ImageTooLarge, "65536 parts"),
    ],
)
def test_misleading_files_are_refused_in_words(data, error, message):
    with pytest.raises(error, match=message):
        shown(data)


@pytest.mark.parametrize("reference", ["dimg", "auxl"])
def test_a_small_image_made_of_large_pictures_is_refused_before_decoding(monkeypatch, reference):
    large = (b"hvc1", (9600, 6400))
    data = heic([PICTURE, large], [(b"auxl", 2, [1])])
    if reference == "dimg":
        tile = {1: grid_of(1, 1, 96, 64)}
        data = heic([(b"grid", (96, 64)), large], [(b"dimg", 1, [2])], payloads=tile)
    monkeypatch.setattr(decoding.heif, "HeicImageFile", None)  # not even opened
    with pytest.raises(ImageTooLarge, match="made of pictures with 6144"):
        open_image(data)


def test_metadata_of_any_size_is_not_copied():
    """Each of a hundred images could name the same megabytes as its metadata."""
    count, payload = 90, bytes(4_000_000)
    items = [PICTURE] * count + [(b"mime", (1, 1))]
    references = [(b"cdsc", count + 1, list(range(1, count + 1)))]
    data = heic(
        items, references, payloads={count + 1: payload} | dict.fromkeys(range(2, count), b"")
    )
    tracemalloc.start()
    started = time.process_time()
    try:
        with open_image(data) as image:
            assert image.size == (96, 64)
        assert tracemalloc.get_traced_memory()[1] < 20 * 1024 * 1024
    finally:
        tracemalloc.stop()
    assert time.process_time() - started < 1


def test_too_many_pixels_are_refused_from_the_header():
    with pytest.raises(ImageTooLarge, match="64 × 96 = 6144 pixels"):
        AS_IT_IS(HEIC.read_bytes(), max_pixels=6000)
