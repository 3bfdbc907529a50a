import io
import struct
import threading
import warnings
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from engram_server.errors import ImageError, ImageTooLarge, UnreadableImage
from engram_server.model.preprocessing import ImageHeader, budget, decoding, read_header
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image, ImageFile, ImageOps

from tests.model.image_files import (
    FORMATS,
    claims_size,
    decode,
    deep_png,
    encode,
    grey16,
    heic_files,
    one_of_each,
    png,
    png_chunk,
    random_rgb,
    tiff12,
    with_orientation,
)
from tests.model.preprocessing.configurations import AS_IT_IS, SMALL, pair


def shown(data: bytes) -> np.ndarray:
    """The picture of a file at its own size."""
    return AS_IT_IS(data, max_pixels=None)


# ---------------------------------------------------------------------------------------------
# Every kind of file


@pytest.mark.parametrize("format", FORMATS)
def test_every_format_is_decoded_and_its_header_read(format):
    data = encode(random_rgb(40, 56), format)
    assert read_header(data) == ImageHeader(width=56, height=40, format=format)
    assert np.array_equal(shown(data), np.asarray(decode(data).convert("RGB")))


def test_bytes_and_opened_image_give_the_same_pixels():
    for data in one_of_each(random_rgb(50, 70)).values():
        opened = Image.open(io.BytesIO(data))
        assert np.array_equal(SMALL(data, max_pixels=None), SMALL.from_image(opened))


def test_multi_picture_jpeg_is_read_as_its_first_picture():
    first = random_rgb(40, 56)
    data = encode(first, "MPO", save_all=True, append_images=[ImageOps.invert(first)])
    assert read_header(data).format == "JPEG"
    assert np.array_equal(shown(data), np.asarray(decode(encode(first, "JPEG"))))


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("format", ["PNG", "WEBP", "TIFF", "TIFF lzw", "AVIF", "JPEG"])
def test_exif_orientation_is_applied(format, orientation):
    upright = random_rgb(32, 48).resize((48, 32), box=(0, 0, 12, 8))  # smooth, for lossy formats
    options = {"WEBP": {"lossless": True}, "TIFF lzw": {"compression": "tiff_lzw"}}.get(format, {})
    data = with_orientation(upright, orientation, format.split()[0], **options)
    result = shown(data)
    assert result.shape == (32, 48, 3)
    if format in ("JPEG", "AVIF"):  # lossy: near, and nearer than any other way up
        assert np.abs(result.astype(int) - np.asarray(upright)).mean() < 8
        assert np.array_equal(result, np.asarray(ImageOps.exif_transpose(decode(data))))
    else:
        assert np.array_equal(result, np.asarray(upright))


def test_oriented_image_is_resized_as_the_upright_one():
    upright = random_rgb(60, 90)
    ours, _ = pair("clip")
    for orientation in range(1, 9):
        data = with_orientation(upright, orientation, "PNG")
        assert np.array_equal(ours(data, max_pixels=None), ours.from_image(upright))


@pytest.mark.parametrize(
    "entry",
    [
        struct.pack(">HI4s", 3, 1, b"\0\0\0\0"),
        struct.pack(">HI4s", 3, 1, b"\0\x09\0\0"),
        struct.pack(">HI4s", 3, 2, b"\0\6\0\6"),
        struct.pack(">HI4s", 2, 2, b"6\0\0\0"),
        struct.pack(">HI4s", 7, 4, b"\6\6\6\6"),
    ],
    ids=["zero", "nine", "two numbers", "text", "bytes"],
)
def test_meaningless_orientation_is_taken_as_upright(entry):
    exif = b"Exif\0\0MM\0*\0\0\0\x08" + struct.pack(">HH", 1, 0x0112) + entry + b"\0\0\0\0"
    image = random_rgb(20, 30)
    assert np.array_equal(shown(encode(image, "PNG", exif=exif)), np.asarray(image))


@pytest.mark.filterwarnings("ignore:Corrupt EXIF data")  # Pillow reads it for the resolution too
@pytest.mark.parametrize("exif", [b"Exif\0\0", b"Exif\0\0MM\0*\xff\xff\xff\xff", b"\0" * 40])
def test_broken_exif_is_taken_as_upright(exif):
    data = encode(random_rgb(20, 30), "JPEG", exif=exif)
    assert np.array_equal(shown(data), np.asarray(decode(data)))


def test_opened_image_is_left_as_it_was():
    opened = decode(with_orientation(random_rgb(20, 30), 6, "PNG"))
    before = opened.copy()
    SMALL.from_image(opened)
    assert opened.size == before.size
    assert opened.tobytes() == before.tobytes()


def test_one_bit_and_grey_become_equal_channels():
    for mode in ("1", "L"):
        image = random_rgb(20, 30).convert(mode)
        result = shown(encode(image, "PNG"))
        assert np.array_equal(result, np.stack([np.asarray(image.convert("L"))] * 3, axis=-1))


def test_palette_becomes_its_colours():
    image = random_rgb(20, 30).quantize(16)
    for format in ("PNG", "GIF", "BMP", "TIFF"):
        assert np.array_equal(shown(encode(image, format)), np.asarray(image.convert("RGB")))


def test_transparent_palette_entries_show_white():
    image = Image.new("P", (3, 1))
    image.putpalette([10, 20, 30, 200, 100, 50, 0, 0, 0])
    image.putdata([0, 1, 2])
    one = encode(image, "PNG", transparency=1)
    assert shown(one).tolist() == [[[10, 20, 30], [255, 255, 255], [0, 0, 0]]]
    assert shown(encode(image, "GIF", transparency=1)).tolist() == shown(one).tolist()
    partly = encode(image, "PNG", transparency=bytes([255, 0, 128]))
    assert shown(partly).tolist() == [[[10, 20, 30], [255, 255, 255], [127, 127, 127]]]


def test_alpha_is_laid_over_white():
    cases = {"RGBA": ((10, 20, 30, 0), [255, 255, 255]), "LA": ((50, 255), [50, 50, 50])}
    for mode, (colour, expected) in cases.items():
        data = encode(Image.new(mode, (2, 2), colour), "PNG")
        assert shown(data).tolist() == [[expected] * 2] * 2
    half = encode(Image.new("RGBA", (1, 1), (0, 100, 255, 128)), "WEBP", lossless=True)
    assert shown(half).tolist() == [[[127, 177, 255]]]


def test_transparent_colour_of_a_png_shows_white():
    grey = png(2, 1, 8, 0, b"\0\x07\x90", png_chunk(b"tRNS", b"\0\x07"))
    assert shown(grey).tolist() == [[[255] * 3, [0x90] * 3]]
    rgb = png(2, 1, 8, 2, b"\0\1\2\3\4\5\6", png_chunk(b"tRNS", b"\0\1\0\2\0\3"))
    assert shown(rgb).tolist() == [[[255] * 3, [4, 5, 6]]]
    deep = deep_png(np.array([[[0x1234], [0x1235]]]), 0, png_chunk(b"tRNS", b"\x12\x34"))
    assert shown(deep).tolist() == [[[255] * 3, [0x12] * 3]]


@pytest.mark.parametrize("transform", [0, 2])
def test_cmyk_and_ycck_jpeg_become_rgb(transform):
    cmyk = Image.new("CMYK", (16, 16), (255, 0, 0, 0))
    data = encode(cmyk, "JPEG", quality=100)
    marker = data.index(b"Adobe")
    if transform == 2:
        # Written as plain CMYK, declared as YCCK: the decoder must take it through YCbCr.
        data = data[: marker + 11] + b"\2" + data[marker + 12 :]
    result = shown(data).reshape(-1, 3).astype(int)
    assert (result == result[0]).all()
    expected = np.asarray(decode(data).convert("RGB"))[0, 0]
    assert result[0].tolist() == expected.tolist()
    if transform == 0:
        assert np.abs(result[0] - [0, 255, 255]).max() <= 3  # cyan, not its inverse


@pytest.mark.parametrize("format", ["PNG", "TIFF", "PPM"])
def test_sixteen_bit_grey_keeps_its_shades(format):
    image = random_rgb(20, 30)
    result = shown(encode(grey16(image), format))
    assert np.array_equal(result, np.stack([np.asarray(image.convert("L"))] * 3, axis=-1))


def test_dark_sixteen_bit_grey_stays_dark():
    image = Image.fromarray(np.full((4, 4), 0x0342, dtype=np.uint16))
    for format in ("PNG", "TIFF", "PPM"):
        assert (shown(encode(image, format)) == 3).all()


def test_big_endian_sixteen_bit_grey_is_read():
    image = Image.frombytes("I;16B", (2, 1), bytes([0x12, 0x34, 0xFE, 0xDC]))
    assert AS_IT_IS.from_image(image)[0, :, 0].tolist() == [0x12, 0xFE]


def test_sixteen_bit_rgb_and_alpha_keep_the_high_byte():
    rgb = np.array([[[0x1234, 0x5678, 0x9ABC], [0xFFFF, 0x00FF, 0x0100]]])
    assert shown(deep_png(rgb, 2)).tolist() == [[[0x12, 0x56, 0x9A], [255, 0, 1]]]
    grey_alpha = np.array([[[0x1234, 0xFFFF], [0x8000, 0x0000]]])
    assert shown(deep_png(grey_alpha, 4)).tolist() == [[[0x12] * 3, [255] * 3]]


def test_twelve_bit_tiff_uses_its_whole_range():
    assert shown(tiff12([0, 2048, 4095, 1024]))[0, :, 0].tolist() == [0, 128, 255, 64]


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([0.0, 0.5, 1.0], [0, 128, 255]),
        ([0.0, 128.0, 255.0], [0, 128, 255]),
        ([0.0, 32896.0, 65535.0], [0, 128, 255]),
        ([-5.0, 1e6, 2e6], [0, 128, 255]),
        ([float("nan"), float("inf"), float("-inf")], [0, 255, 0]),
        ([0.0, 0.0, 0.0], [0, 0, 0]),
    ],
)
def test_float_grey_is_scaled_to_its_range(values, expected):
    image = Image.fromarray(np.array([values], dtype=np.float32))
    assert shown(encode(image, "TIFF"))[0, :, 0].tolist() == expected


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([0, 7, 255], [0, 7, 255]),
        ([-9, 257, 65535], [0, 1, 255]),
        ([0, 10**6, 2 * 10**6], [0, 128, 255]),
    ],
)
def test_integer_grey_is_scaled_to_its_range(values, expected):
    image = Image.fromarray(np.array([values], dtype=np.int32))
    assert image.mode == "I"
    assert shown(encode(image, "TIFF"))[0, :, 0].tolist() == expected


@pytest.mark.parametrize("format", ["GIF", "WEBP", "PNG", "TIFF", "AVIF"])
def test_first_of_several_frames_is_used(format):
    red, blue = Image.new("RGB", (16, 16), "red"), Image.new("RGB", (16, 16), "blue")
    data = encode(red, format, save_all=True, append_images=[blue, blue])
    result = shown(data).reshape(-1, 3).astype(int)
    assert np.abs(result - [255, 0, 0]).max() <= 4


def test_separate_still_picture_of_an_animated_png_is_used():
    still, frame = Image.new("RGB", (8, 8), "lime"), Image.new("RGB", (8, 8), "blue")
    data = encode(still, "PNG", save_all=True, append_images=[frame, frame], default_image=True)
    assert (shown(data) == [0, 255, 0]).all()


# ---------------------------------------------------------------------------------------------
# JPEGs that are decoded straight into an array


def jpegs() -> dict[str, bytes]:
    image = random_rgb(75, 101)
    kinds = {"grey": encode(image.convert("L"), "JPEG"), "best": encode(image, "JPEG", quality=100)}
    for subsampling in ("4:4:4", "4:2:2", "4:2:0"):
        kinds[subsampling] = encode(image, "JPEG", subsampling=subsampling)
    kinds["restart markers"] = encode(image, "JPEG", restart_marker_rows=1)
    kinds["RGB"] = encode(image, "JPEG", keep_rgb=True)
    return kinds | {f"{edge} × {edge}": encode(random_rgb(edge, edge), "JPEG") for edge in (1, 3)}


def pixels_of(data: bytes, *, reduce: int, whole: bool) -> np.ndarray:
    with decoding.open_image(data) as image:
        image.draft(None, (image.width // reduce, image.height // reduce))
        if whole:
            pixels = decoding._decode_whole(image)
            assert pixels is not None
            return pixels
        image.load()
        return np.asarray(image.convert("RGB"))


@pytest.mark.parametrize("kind", jpegs())
@pytest.mark.parametrize("reduce", [1, 2, 4, 8])
def test_a_jpeg_decoded_into_an_array_has_the_pixels_of_pillow(kind, reduce):
    if "×" in kind and reduce > 1:
        return  # never reduced
    data = jpegs()[kind]
    expected = pixels_of(data, reduce=reduce, whole=False)
    assert np.array_equal(pixels_of(data, reduce=reduce, whole=True), expected)


def test_pillow_decides_about_damaged_jpegs():
    """Damage in the middle is a warning to libjpeg, and the rest of the picture is used."""
    data = bytearray(encode(random_rgb(60, 80), "JPEG"))
    middle = len(data) // 2
    data[middle : middle + 40] = bytes(40)
    with decoding.open_image(bytes(data)) as image:
        assert decoding._decode_whole(image) is None
    assert np.array_equal(shown(bytes(data)), np.asarray(decode(bytes(data))))


@pytest.mark.parametrize("limit", ["MAX_BLOCK_PIXELS", "MAX_BLOCK_BYTES"])
def test_larger_jpegs_are_decoded_by_pillow_which_can_be_stopped(monkeypatch, limit):
    data = encode(random_rgb(60, 80), "JPEG")
    expected = shown(data)
    monkeypatch.setattr(budget, limit, 1000)
    with decoding.open_image(data) as image:
        assert decoding._decode_whole(image) is None
    assert np.array_equal(shown(data), expected)


@pytest.mark.parametrize("kind", ["progressive", "CMYK"])
def test_other_jpegs_are_decoded_by_pillow(kind):
    image = random_rgb(60, 80)
    progressive = encode(image, "JPEG", progressive=True)
    data = progressive if kind == "progressive" else encode(image.convert("CMYK"), "JPEG")
    with decoding.open_image(data) as opened:
        assert decoding._decode_whole(opened) is None


# ---------------------------------------------------------------------------------------------
# Files that cannot be used


def test_truncated_file_is_refused_unless_every_pixel_is_there():
    for name, data in (one_of_each(random_rgb(60, 80)) | heic_files()).items():
        whole = shown(data)
        refused = 0
        for cut in {int(len(data) * part / 40) for part in range(1, 40)} | {len(data) - 1}:
            try:
                result = shown(data[:cut])
            except UnreadableImage:
                refused += 1
            else:
                assert np.array_equal(result, whole), f"{name} cut at {cut} of {len(data)}"
        assert refused >= 15, name


def test_truncated_file_is_refused_in_words():
    data = encode(random_rgb(60, 80), "JPEG")
    with pytest.raises(
        UnreadableImage, match=r"JPEG image cannot be decoded.*incomplete.*truncated"
    ):
        shown(data[: len(data) // 2])


@pytest.mark.parametrize(
    ("data", "name"),
    [
        (b"", "an empty file"),
        (b"hello, this is not an image", "text"),
        ("prose: déjà vu".encode() * 40, "text"),
        (b'{"images": []}', "text"),
        (b"\n<!DOCTYPE html><html></html>", "an HTML page"),
        (b"<?xml version='1.0'?><svg xmlns='http://www.w3.org/2000/svg'/>", "an SVG drawing"),
        (b"%PDF-1.7\n", "a PDF document"),
        (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 10 10\n", "a PostScript file"),
        (b"\xc5\xd0\xd3\xc6" + b"\0" * 40, "a PostScript file"),
        (b"PK\x03\x04rest", "a ZIP archive"),
        (b"\0\0\1\0\1\0", "an icon"),
        (b"\0\0\0\x18ftyphevc\0\0\0\0msf1hevc", "a HEIC sequence"),
        (b"\0\0\0\x18ftypisom\0\0\0\0isomavc1", "a video"),
        (b"\x80\x04\x95garbage\0\1\2", "an unknown format"),
    ],
)
def test_other_files_are_refused_by_name(data, name):
    with pytest.raises(UnreadableImage, match=name):
        shown(data)
    with pytest.raises(UnreadableImage, match=name):
        read_header(data)


def test_header_without_a_body_is_refused():
    starts = (b"\xff\xd8\xff", b"\x89PNG\r\n\x1a\n", b"GIF89a", b"BM", b"II*\0", b"P6\n")
    for start in (*starts, b"RIFF\0\0\0\0WEBP", b"\0\0\0\x14ftypavif\0\0\0\0avif"):
        with pytest.raises(UnreadableImage, match="cannot be decoded"):
            shown(start)


@pytest.mark.parametrize("format", ["PNG", "GIF", "BMP", "PPM", "WEBP", "JPEG"])
@pytest.mark.parametrize("size", [(12_000, 10_000), (16_000, 15_000)])
def test_too_many_pixels_are_refused_from_the_header(format, size):
    # Pillow warns above the first size and fails above the second.
    with pytest.raises(ImageTooLarge) as caught:
        SMALL(claims_size(format, *size), max_pixels=50_000_000)
    assert str(size[0] * size[1]) in str(caught.value)
    if format != "WEBP" or size[0] == 12_000:  # the larger canvas is refused by Pillow itself
        assert "50000000" in str(caught.value)


def test_pixel_limit_is_inclusive():
    data = encode(random_rgb(10, 20), "PNG")
    assert SMALL(data, max_pixels=200).shape == (24, 32, 3)
    with pytest.raises(ImageTooLarge, match=r"20 × 10 = 200 pixels \(limit 199\)"):
        SMALL(data, max_pixels=199)


def test_limits_and_warnings_of_pillow_play_no_part(monkeypatch):
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 500)  # warns from here, refuses from twice
    for size in ((25, 30), (50, 60)):
        for format in set(FORMATS) - {"WEBP", "TIFF"}:
            data = encode(random_rgb(*size), format)
            assert read_header(data).height == size[0]
            assert SMALL(data, max_pixels=10_000).shape == (24, 32, 3)


@pytest.mark.parametrize(("format", "fits"), [("TIFF", (20, 25)), ("WEBP", (25, 40))])
def test_tiff_and_webp_are_also_bound_by_the_limits_of_pillow(monkeypatch, format, fits):
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 500)
    assert SMALL(encode(random_rgb(*fits), format), max_pixels=None).shape == (24, 32, 3)
    with pytest.raises(ImageTooLarge, match="3000 pixels"):
        SMALL(encode(random_rgb(50, 60), format), max_pixels=10_000)


def test_frame_larger_than_its_gif_screen_is_refused():
    small_screen = bytearray(claims_size("GIF", 60_000, 60_000))
    small_screen[6:10] = b"\x08\0\x08\0"
    with pytest.raises(ImageTooLarge):
        SMALL(bytes(small_screen), max_pixels=50_000_000)


def test_single_pixel_fills_the_output():
    for name in ("vit", "deit", "clip", "dinov2"):
        ours, _ = pair(name)
        result = ours(encode(Image.new("RGB", (1, 1), (9, 8, 7)), "PNG"), max_pixels=1)
        assert (result == [9, 8, 7]).all()


@pytest.mark.parametrize("size", [(1, 5000), (5000, 1)])
def test_elongated_image_is_resized_exactly_or_refused(size):
    data = encode(Image.new("RGB", size, "red"), "PNG")
    assert SMALL(data, max_pixels=None).shape == (24, 32, 3)
    ours, _ = pair("clip")
    with pytest.raises(ImageTooLarge, match="aspect ratio"):
        ours(data, max_pixels=None)


@pytest.mark.filterwarnings("ignore")  # the damaged files warn; the outcome is what counts
@pytest.mark.parametrize("strict", [False, True], ids=["warnings printed", "warnings raised"])
def test_mutated_files_give_an_array_or_an_image_error(strict):
    rng = np.random.default_rng(7)
    for name, original in (one_of_each(random_rgb(24, 20)) | heic_files()).items():
        for _ in range(60):
            data = bytearray(original)
            reach = len(data) if rng.random() < 0.5 else min(len(data), 120)
            for _ in range(int(rng.integers(1, 6))):
                data[int(rng.integers(reach))] = int(rng.integers(256))
            if rng.random() < 0.2:
                del data[int(rng.integers(len(data))) :]
            if strict:
                warnings.simplefilter("error")
            assert_array_or_image_error(bytes(data), name)


def assert_array_or_image_error(data: bytes, name: str = ""):
    try:
        result = SMALL(data, max_pixels=1_000_000)
    except ImageError:
        pass
    else:
        assert result.shape == (24, 32, 3), name
        assert result.dtype == np.uint8


STARTS = [encode(Image.new("RGB", (4, 4)), format)[:64] for format in FORMATS]


@pytest.mark.filterwarnings("ignore")
@settings(max_examples=300, deadline=None, suppress_health_check=list(HealthCheck))
@given(start=st.sampled_from([b"", *STARTS]), keep=st.integers(0, 64), rest=st.binary(max_size=300))
def test_arbitrary_bytes_give_an_array_or_an_image_error(start, keep, rest):
    assert_array_or_image_error(start[:keep] + rest)


def test_threads_share_one_preprocessing():
    ours, _ = pair("clip")
    files = list((one_of_each(random_rgb(60, 80)) | heic_files()).values()) * 4
    expected = [ours(data, max_pixels=None) for data in files]
    barrier = threading.Barrier(4)

    def work(number):
        barrier.wait()
        return [ours(data, max_pixels=None) for data in files[number::4]]

    with ThreadPoolExecutor(4) as pool:
        for number, results in enumerate(pool.map(work, range(4))):
            for result, pixels in zip(results, expected[number::4], strict=True):
                assert np.array_equal(result, pixels)


def test_settings_of_pillow_stay_as_they_come():
    assert ImageFile.LOAD_TRUNCATED_IMAGES is False  # True would let half a picture pass
    assert Image.MAX_IMAGE_PIXELS == 1024**3 // 4 // 3
