"""The memory reserved for decoding comes from the header and is never too small."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from engram_server.model.preprocessing import decoding
from engram_server.model.preprocessing.decoding import decoding_bytes, open_image
from PIL import Image

from tests.model.image_files import (
    constant_jpeg,
    deep_png,
    encode,
    grey16,
    one_of_each,
    png,
    png_chunk,
    random_rgb,
)
from tests.model.preprocessing.configurations import AS_IT_IS

MPIXEL = 1_000_000


def every_kind(height: int, width: int) -> dict[str, bytes]:
    image = random_rgb(height, width)
    alpha = image.copy()
    alpha.putalpha(image.convert("L"))
    deep = grey16(image)
    rotated = Image.Exif()
    rotated[0x0112] = 6
    return {
        **one_of_each(image),
        "JPEG rotated": encode(image, "JPEG", exif=rotated),
        "JPEG 4:4:4": encode(image, "JPEG", progressive=True, subsampling=0),
        "JPEG grey": encode(image.convert("L"), "JPEG"),
        "JPEG CMYK": encode(image.convert("CMYK"), "JPEG", progressive=True),
        "JPEG scans": constant_jpeg(width, height, 3, lossless=False),
        "JPEG lossless": constant_jpeg(width, height, 3, lossless=True),
        "PNG RGBA": encode(alpha, "PNG", compress_level=1),
        "PNG rotated": encode(alpha, "PNG", exif=rotated, compress_level=1),
        "PNG LA": encode(alpha.convert("LA"), "PNG", compress_level=1),
        "PNG 1": encode(image.convert("1"), "PNG"),
        "PNG transparent entry": encode(image.quantize(16), "PNG", transparency=3),
        "PNG transparent colour": encode(image, "PNG", transparency=(1, 2, 3), compress_level=1),
        "PNG deep RGB": deep_png(np.asarray(image).astype(np.uint16) * 257, 2),
        "TIFF float": encode(Image.fromarray(np.asarray(deep).astype(np.float32)), "TIFF"),
        "TIFF integer": encode(Image.fromarray(np.asarray(deep).astype(np.int32)), "TIFF"),
        "TIFF one strip": encode(image, "TIFF", compression="tiff_adobe_deflate", strip_size=2**30),
        "TIFF CMYK": encode(image.convert("CMYK"), "TIFF", compression="tiff_lzw"),
        "WEBP alpha": encode(alpha, "WEBP", method=0),
        "WEBP lossless": encode(image, "WEBP", lossless=True, method=0, quality=0),
        "AVIF alpha": encode(alpha, "AVIF", speed=10),
        "PGM deep": encode(Image.fromarray(np.asarray(deep).astype(np.int32)), "PPM"),
    }


def test_a_picture_converted_in_tiles_is_the_one_converted_at_once(monkeypatch):
    for kind, data in every_kind(40, 56).items():
        monkeypatch.setattr(decoding, "TILE_PIXELS", 1 << 20)
        whole = AS_IT_IS(data, max_pixels=None)
        for pixels in (1, 50, 100):  # parts of a row, a row, some rows
            monkeypatch.setattr(decoding, "TILE_PIXELS", pixels)
            assert np.array_equal(AS_IT_IS(data, max_pixels=None), whole), kind


@pytest.mark.parametrize(
    ("depth", "colour", "most"),
    [(8, 2, 8), (16, 2, 8), (16, 0, 6), (8, 6, 8), (16, 6, 8), (8, 4, 8), (8, 3, 5)],
)
def test_the_largest_png_allowed_takes_less_than_a_gigabyte(depth, colour, most):
    palette = [] if colour != 3 else [png_chunk(b"PLTE", b"abc")]
    header = png(8000, 8000, depth, colour, b"", *palette)
    with open_image(header) as image:
        assert decoding_bytes(image) == most * 64 * MPIXEL < 2**30


@pytest.mark.parametrize("rotated", [False, True])
def test_a_phone_photo_needs_little_memory(rotated):
    exif = Image.Exif()
    exif[0x0112] = 6 if rotated else 1
    with open_image(encode(random_rgb(300, 400), "JPEG", exif=exif)) as image:
        each = decoding_bytes(image) / (300 * 400)
    # Ten of 12 megapixels, or two of 48, are decoded at once in the gigabyte of the default.
    assert each == 8


MEASURE = """
import gc, json, sys
from contextlib import nullcontext
from pathlib import Path
from engram_server.model.preprocessing import Preprocessing

def status(field):
    line = next(l for l in open("/proc/self/status") if l.startswith(field + ":"))
    return int(line.split()[1]) * 1024

found = {}
for edge in (224, 40):  # at the smaller one JPEGs are decoded at a quarter
    small = Preprocessing((edge, edge), "bilinear", None, 1 / 255, (0.5,) * 3, (0.5,) * 3)
    for path in sorted(Path(sys.argv[1]).iterdir()):
        data = path.read_bytes()
        reserved = []
        reserve = lambda nbytes: reserved.append(nbytes) or nullcontext()
        for _ in range(2):  # the first one also loads the codec
            gc.collect()
            Path("/proc/self/clear_refs").write_text("5")
            before = status("VmRSS")
            small(data, max_pixels=None, reserve=reserve)
            used = status("VmHWM") - before
        found[f"{path.name} to {edge}"] = used, reserved[0]
print(json.dumps(found))
"""


@pytest.mark.long
@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="reads memory from /proc")
def test_no_image_takes_more_than_was_reserved(tmp_path):
    for kind, data in every_kind(1000, 1500).items():
        (tmp_path / kind.replace("/", "-").replace(":", "")).write_bytes(data)
    run = [sys.executable, "-c", MEASURE, str(tmp_path)]
    found = json.loads(subprocess.run(run, capture_output=True, check=True, timeout=300).stdout)
    assert len(found) > 50
    small = 8 * 1024 * 1024  # tiles, and the allocator's own
    too_much = {kind: pair for kind, pair in found.items() if pair[0] > pair[1] + small}
    assert not too_much
