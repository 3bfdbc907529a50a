"""Files that need far more work than their pixels are refused, or stopped."""

import struct
import sys
from unittest.mock import Mock

import pytest
from engram_server.errors import ImageTooLarge, UnreadableImage
from engram_server.model.preprocessing import budget
from engram_server.model.preprocessing.decoding import DECODERS, decoding_bytes, open_image
from PIL import Image, ImageFile

from tests.model.image_files import (
    encode,
    heic_files,
    jpeg_in_tiff,
    jpeg_of_scans,
    one_of_each,
    png,
    png_chunk,
    random_rgb,
    run_length_bmp,
    tiff_of_one_tile,
    tiff_of_strips,
)
from tests.model.preprocessing.configurations import AS_IT_IS

MAX_PIXELS = 64_000_000


def decode(data: bytes, **options):
    return AS_IT_IS(data, max_pixels=MAX_PIXELS, **options)


# JPEG


def test_a_jpeg_of_thousands_of_scans_is_refused():
    """633 kB that would take Pillow 12 seconds."""
    with pytest.raises(ImageTooLarge, match=r"more than 64 scans.*baseline"):
        decode(jpeg_of_scans(8000, 8000, 4000))


def test_a_progressive_jpeg_of_64_megapixels_is_decoded():
    assert decode(jpeg_of_scans(8000, 8000, 10)).shape == (8000, 8000, 3)


def test_as_many_scans_as_allowed_are_decoded():
    assert decode(jpeg_of_scans(16, 16, budget.MAX_SCANS)).shape == (16, 16, 3)
    with pytest.raises(ImageTooLarge):
        decode(jpeg_of_scans(16, 16, budget.MAX_SCANS + 1))


@pytest.mark.parametrize("between", [b"\xff\xff\xff", b"garbage\xff\x00", b"\xff\xd0", b"\xff\x01"])
def test_what_libjpeg_skips_hides_no_scans(between):
    data = jpeg_of_scans(16, 16, 100)
    with pytest.raises(ImageTooLarge, match="scans"):
        decode(data.replace(b"\xff\xda", between + b"\xff\xda"))


def test_bytes_behind_the_image_are_not_scans():
    """Phones append a short video."""
    jpeg = encode(random_rgb(30, 40), "JPEG")
    assert decode(jpeg + b"\xff\xda" * 1000).shape == (30, 40, 3)


def test_bytes_in_metadata_are_not_scans():
    jpeg = encode(random_rgb(30, 40), "JPEG", comment=b"\xff\xda" * 1000)
    assert decode(jpeg).shape == (30, 40, 3)


def test_segments_without_end_are_refused():
    jpeg = encode(random_rgb(30, 40), "JPEG")
    with pytest.raises(ImageTooLarge, match="segments"):
        decode(jpeg[:2] + b"\xff\xfe\x00\x02" * 100_000 + jpeg[2:])


@pytest.mark.parametrize("code", [0xC9, 0xCA])
def test_arithmetic_coding_is_refused(code):
    with pytest.raises(UnreadableImage, match=r"arithmetic coding.*baseline"):
        decode(jpeg_of_scans(16, 16, 2, code))


# Decoders in Python


@pytest.mark.parametrize("compression", [1, 2])
def test_a_run_length_bmp_is_refused(compression):
    """32 kB that took 9 seconds."""
    with pytest.raises(UnreadableImage, match=r"run-length.*without compression"):
        decode(run_length_bmp(7900, 7900, compression))


@pytest.mark.parametrize("kind", [b"P1", b"P2", b"P3"])
def test_a_plain_ppm_is_refused(kind):
    with pytest.raises(UnreadableImage, match="Plain-text"):
        decode(kind + b"\n2 2\n1\n1 1 1 1 1 1 1 1 1 1 1 1\n")


def test_a_ppm_that_is_scaled_in_python_is_small():
    assert decode(b"P6\n20 20\n100\n" + bytes(1200)).shape == (20, 20, 3)
    with pytest.raises(ImageTooLarge, match=r"limited to 400000 pixels.*has 401000"):
        decode(b"P6\n1000 401\n100\n" + bytes(3 * 401_000))


def test_every_decoder_in_python_has_a_limit():
    """A new version of Pillow may have more of them."""
    modules = {decoder.__module__ for decoder in DECODERS.values()}
    in_python = {name for name, decoder in Image.DECODERS.items() if decoder.__module__ in modules}
    assert in_python == set(budget.PYTHON_PIXELS)
    for module in modules:
        for each in vars(sys.modules[module]).values():
            if isinstance(each, type) and issubclass(each, ImageFile.PyDecoder):
                assert each in Image.DECODERS.values() or each is ImageFile.PyDecoder


# TIFF


def test_a_tiff_of_many_strips_is_refused_before_they_are_listed():
    assert decode(tiff_of_strips(1000)).shape == (1000, 8, 3)
    with pytest.raises(ImageTooLarge, match="65537 strips"):
        decode(tiff_of_strips(budget.MAX_STRIPS + 1))


@pytest.mark.parametrize("start", [b"II*\0", b"II+\0", b"MM\0*", b"MM\0+"])
@pytest.mark.parametrize("rest", [b"", b"\xff" * 4, b"\xff" * 100, struct.pack("<QQ", 8, 8)])
def test_a_tiff_without_tags_is_unreadable(start, rest):
    with pytest.raises((UnreadableImage, ImageTooLarge)):
        decode(start + rest)


def test_a_tile_larger_than_the_image_is_part_of_its_memory():
    with open_image(tiff_of_one_tile(16, 4000)) as image:
        assert decoding_bytes(image) > 4000 * 4000


def test_a_jpeg_in_a_tiff_has_the_same_limits():
    assert decode(jpeg_in_tiff(16, 16, jpeg_of_scans(16, 16, 10))).shape == (16, 16, 3)
    with pytest.raises(ImageTooLarge, match="scans"):
        decode(jpeg_in_tiff(16, 16, jpeg_of_scans(16, 16, 100)))
    with pytest.raises(UnreadableImage, match="arithmetic"):
        decode(jpeg_in_tiff(16, 16, jpeg_of_scans(16, 16, 2, 0xC9)))


# Reads


def test_reads_are_limited(monkeypatch):
    monkeypatch.setattr(budget, "MAX_READS", 10_000)
    rows = b"".join(b"\0" + bytes(30) for _ in range(30))
    texts = png_chunk(b"tEXt", b"a\0b")
    assert decode(png(30, 30, 8, 0, rows, texts * 100)).shape == (30, 30, 3)
    with pytest.raises(ImageTooLarge, match="too many parts"):
        decode(png(30, 30, 8, 0, rows, texts * 10_000))
    with pytest.raises(ImageTooLarge, match="too many parts"):
        decode(b"P6\n#" + b"x" * 10_000 + b"\n10 10\n255\n" + bytes(300))


def test_decoding_stops_at_the_next_read():
    class Stopped(Exception):
        pass

    for kind, data in (one_of_each(random_rgb(24, 30)) | heic_files()).items():
        reads = 0

        def stop():
            nonlocal reads
            reads += 1

        decode(data, stop=stop)
        assert 1 <= reads < 200, kind
        for last in range(reads):
            with pytest.raises(Stopped):
                decode(data, stop=Mock(side_effect=[*[None] * last, Stopped]))
