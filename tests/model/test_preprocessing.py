import io
import json
import struct
import threading
import warnings
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image, ImageFile, ImageOps
from transformers.models.bit.image_processing_pil_bit import BitImageProcessorPil
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil
from transformers.models.deit.image_processing_pil_deit import DeiTImageProcessorPil
from transformers.models.vit.image_processing_pil_vit import ViTImageProcessorPil

from server.errors import BackboneError, ImageError, ImageTooLarge, UnreadableImage
from server.model.preprocessing import ImageHeader, Preprocessing, read_header
from tests.model.image_files import (
    FORMATS,
    claims_size,
    decode,
    deep_png,
    encode,
    grey16,
    one_of_each,
    png,
    png_chunk,
    random_rgb,
    tiff12,
    with_orientation,
)

PROCESSORS = {
    "ViTImageProcessor": ViTImageProcessorPil,
    "DeiTImageProcessor": DeiTImageProcessorPil,
    "CLIPImageProcessor": CLIPImageProcessorPil,
    "BitImageProcessor": BitImageProcessorPil,
}
# What is on the hub: a name, the class, and the keys of the file.
CONFIGS = {
    "vit": ("ViTImageProcessor", {}),
    "vit old": ("ViTImageProcessor", {"size": 224, "resample": 2, "image_mean": [0.5, 0.4, 0.3]}),
    "vit list": ("ViTImageProcessor", {"size": [96, 160], "resample": 1}),
    "vit timm": (
        "ViTImageProcessor",
        {
            "size": {"shortest_edge": 248},
            "resample": 3,
            "do_center_crop": True,
            "crop_size": {"height": 224, "width": 224},
        },
    ),
    "vit nearest": ("ViTImageProcessor", {"size": {"height": 65, "width": 64}, "resample": 0}),
    "deit": ("DeiTImageProcessor", {}),
    "deit imagenet": (
        "DeiTImageProcessor",
        {
            "size": 438,
            "crop_size": 384,
            "image_mean": [0.485, 0.456, 0.406],
            "image_std": [0.229, 0.224, 0.225],
        },
    ),
    "clip": ("CLIPImageProcessor", {}),
    "clip old": ("CLIPImageProcessor", {"size": 224, "crop_size": 224, "resample": 3}),
    "clip square": ("CLIPImageProcessor", {"size": 100, "default_to_square": True}),
    "clip smaller than crop": ("CLIPImageProcessor", {"size": 90, "crop_size": 101}),
    "clip crop only": ("CLIPImageProcessor", {"do_resize": False, "crop_size": [75, 50]}),
    "dinov2": (
        "BitImageProcessor",
        {
            "size": {"shortest_edge": 256},
            "image_mean": [0.485, 0.456, 0.406],
            "image_std": [0.229, 0.224, 0.225],
        },
    ),
    "dinov2 518": ("BitImageProcessor", {"size": {"shortest_edge": 518}, "crop_size": 518}),
    "bit box": ("BitImageProcessor", {"size": 61, "crop_size": 48, "resample": 4}),
    "bit hamming": ("BitImageProcessor", {"size": 61, "crop_size": 49, "resample": 5}),
}
SIZES = [
    (1, 1),
    (1, 2),
    (3, 1),
    (2, 7),
    (1, 30),
    (64, 64),
    (224, 224),
    (256, 256),
    (224, 225),
    (100, 75),
    (101, 77),
    (37, 211),
    (480, 640),
    (641, 479),
    (333, 500),
    (19, 400),
    (399, 26),
]
SMALL = Preprocessing(
    resize=(24, 32), resample="bicubic", crop=None, rescale=1 / 255, mean=(0.5,) * 3, std=(0.5,) * 3
)
AS_IT_IS = Preprocessing(
    resize=None, resample="bicubic", crop=None, rescale=1 / 255, mean=(0.0,) * 3, std=(1.0,) * 3
)


def pair(name):
    """Our preprocessing and Hugging Face's processor of one configuration."""
    kind, keys = CONFIGS[name]
    ours = Preprocessing.from_huggingface({"image_processor_type": kind, **keys})
    return ours, PROCESSORS[kind](**keys)


def theirs(processor, image, **options):
    return processor(images=image, return_tensors="np", **options)["pixel_values"][0]


def shown(data: bytes) -> np.ndarray:
    """The picture of a file at its own size."""
    return AS_IT_IS(data, max_pixels=None)


# ---------------------------------------------------------------------------------------------
# Equal to Hugging Face


@pytest.mark.parametrize("name", CONFIGS)
def test_pixels_equal_hugging_face(name):
    ours, processor = pair(name)
    rng = np.random.default_rng(len(name))
    sizes = SIZES + [tuple(map(int, rng.integers(20, 700, 2))) for _ in range(5)]
    for number, (height, width) in enumerate(sizes):
        image = random_rgb(height, width, seed=number)
        expected = theirs(processor, image, do_rescale=False, do_normalize=False)
        result = ours(encode(image, "PNG"), max_pixels=None)
        assert result.dtype == np.uint8
        assert result.flags.c_contiguous
        assert np.array_equal(result, expected.transpose(1, 2, 0)), (height, width)


@pytest.mark.parametrize("name", CONFIGS)
def test_normalised_values_equal_hugging_face_for_every_byte(name):
    ours, processor = pair(name)
    every_byte = np.repeat(np.arange(256, dtype=np.uint8).reshape(16, 16, 1), 3, axis=2)
    options = {"do_resize": False, "do_center_crop": False}
    expected = theirs(processor, Image.fromarray(every_byte), **options)
    result = ours.normalise(torch.from_numpy(every_byte)[None])
    assert result.dtype == torch.float32
    assert result.is_contiguous()
    assert np.abs(result[0].numpy() - expected).max() <= 1e-6


@pytest.mark.parametrize("name", ["vit", "deit", "clip", "dinov2"])
def test_whole_pipeline_equals_hugging_face(name):
    ours, processor = pair(name)
    data = encode(random_rgb(431, 640), "JPEG")
    result = ours.normalise(torch.from_numpy(ours(data, max_pixels=None))[None])
    assert result.shape == (1, 3, *ours.output_size)
    assert np.abs(result[0].numpy() - theirs(processor, decode(data))).max() <= 1e-6


@pytest.mark.parametrize(
    ("rescale", "normalise"), [(False, True), (True, False), (False, False), (True, True)]
)
def test_steps_turned_off_are_left_out_like_hugging_face(rescale, normalise):
    keys = {"do_rescale": rescale, "do_normalize": normalise, "image_mean": 0.25, "image_std": 0.5}
    ours = Preprocessing.from_huggingface({"image_processor_type": "ViTImageProcessor", **keys})
    image = random_rgb(224, 224)
    expected = theirs(ViTImageProcessorPil(**keys), image)
    result = ours.normalise(torch.from_numpy(ours.from_image(image))[None])[0].numpy()
    assert np.allclose(result, expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "PA", "RGBA", "CMYK", "YCbCr", "LAB"])
def test_colour_modes_equal_hugging_face(mode):
    ours, processor = pair("clip")
    image = random_rgb(90, 120)
    alpha = image.getchannel("G")
    if mode in ("LA", "RGBA"):
        image = image.convert(mode)
        image.putalpha(alpha)
    elif mode == "PA":
        image = image.quantize(64).convert("PA")
        image.putalpha(alpha)
    elif mode == "LAB":
        image = Image.frombytes("LAB", image.size, image.tobytes())
    else:
        image = image.convert(mode)
    assert image.mode == mode
    expected = theirs(processor, image, do_rescale=False, do_normalize=False)
    assert np.array_equal(ours.from_image(image), expected.transpose(1, 2, 0))


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
# Files that cannot be used


def test_truncated_file_is_refused_unless_every_pixel_is_there():
    for name, data in one_of_each(random_rgb(60, 80)).items():
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
        (b"", "no bytes"),
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
        (b"\0\0\0\x18ftypheic\0\0\0\0mif1heic", "a HEIC image"),
        (b"\0\0\0\x18ftypisom\0\0\0\0isomavc1", "a video"),
        (b"\x80\x04\x95garbage\0\1\2", "no image format known here"),
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
    # The first size is where Pillow warns, the second where it fails, by limits of its own.
    with pytest.raises(ImageTooLarge) as caught:
        SMALL(claims_size(format, *size), max_pixels=50_000_000)
    assert str(size[0] * size[1]) in str(caught.value)
    if format != "WEBP" or size[0] == 12_000:  # the larger canvas is refused by Pillow itself
        assert "50000000" in str(caught.value)


def test_pixel_limit_is_inclusive():
    data = encode(random_rgb(10, 20), "PNG")
    assert SMALL(data, max_pixels=200).shape == (24, 32, 3)
    with pytest.raises(ImageTooLarge, match=r"20 × 10 = 200 pixels; at most 199"):
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
    with pytest.raises(ImageTooLarge, match="too elongated"):
        ours(data, max_pixels=None)


@pytest.mark.filterwarnings("ignore")  # the damaged files warn; the outcome is what counts
@pytest.mark.parametrize("strict", [False, True], ids=["warnings printed", "warnings raised"])
def test_mutated_files_give_an_array_or_an_image_error(strict):
    rng = np.random.default_rng(7)
    for name, original in one_of_each(random_rgb(24, 20)).items():
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
    files = list(one_of_each(random_rgb(60, 80)).values()) * 4
    expected = [ours(data, max_pixels=None) for data in files]
    barrier = threading.Barrier(4)

    def work(number):
        barrier.wait()
        return [ours(data, max_pixels=None) for data in files[number::4]]

    with ThreadPoolExecutor(4) as pool:
        for number, results in enumerate(pool.map(work, range(4))):
            for result, wanted in zip(results, expected[number::4], strict=True):
                assert np.array_equal(result, wanted)


def test_settings_of_pillow_stay_as_they_come():
    assert ImageFile.LOAD_TRUNCATED_IMAGES is False  # True would let half a picture pass
    assert Image.MAX_IMAGE_PIXELS == 1024**3 // 4 // 3


# ---------------------------------------------------------------------------------------------
# Reading configurations


@pytest.mark.parametrize(
    "name",
    [
        "CLIPImageProcessor",
        "CLIPImageProcessorFast",
        "CLIPImageProcessorPil",
        "CLIPFeatureExtractor",
    ],
)
def test_old_and_new_class_names_mean_the_same(name):
    for key in ("image_processor_type", "feature_extractor_type"):
        assert Preprocessing.from_huggingface({key: name}) == pair("clip")[0]


def test_null_means_the_default():
    nothing = dict.fromkeys(("size", "resample", "image_mean", "image_std", "rescale_factor"))
    config = {"image_processor_type": "ViTImageProcessor", **nothing}
    assert Preprocessing.from_huggingface(config) == pair("vit")[0]


def test_missing_keys_take_the_defaults_of_the_class():
    vit, deit, clip, bit = (
        Preprocessing.from_huggingface({"image_processor_type": name}) for name in PROCESSORS
    )
    assert (vit.resize, vit.crop, vit.resample) == ((224, 224), None, "bilinear")
    assert (deit.resize, deit.crop, deit.resample) == ((256, 256), (224, 224), "bicubic")
    assert (clip.resize, clip.crop, clip.resample) == (224, (224, 224), "bicubic")
    assert bit == clip
    assert vit.mean == deit.std == (0.5, 0.5, 0.5)
    assert clip.rescale == 1 / 255


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"image_processor_type": "ConvNextImageProcessor"}, "ConvNextImageProcessor"),
        ({"image_processor_type": None}, "names no image_processor_type"),
        ({"do_pad": True}, "do_pad"),
        ({"use_square_size": True}, "use_square_size"),
        ({"size": {"longest_edge": 300}}, "longest_edge"),
        ({"size": {"shortest_edge": 200, "longest_edge": 300}}, "longest_edge"),
        ({"size": {"height": 224}}, "height"),
        ({"size": {}}, "size"),
        ({"size": "224"}, "size is '224'"),
        ({"size": [1, 2, 3]}, "height and a width"),
        ({"size": 0}, "resize"),
        ({"size": True}, "size"),
        ({"size": 10**9}, "1 to 4096"),
        ({"size": 224.5}, "size"),
        ({"do_center_crop": True}, "no crop_size"),
        ({"do_center_crop": True, "crop_size": {"shortest_edge": 3}}, "crop_size"),
        ({"resample": 9}, "resample is 9"),
        ({"resample": "bicubic"}, "resample is 'bicubic'"),
        ({"image_mean": [0.5, 0.5]}, "image_mean.*three numbers"),
        ({"image_mean": "grey"}, "image_mean"),
        ({"image_mean": [0.5, 0.5, float("nan")]}, "mean"),
        ({"image_std": [0.5, 0.0, 0.5]}, "std"),
        ({"image_std": [0.5, None, 0.5]}, "image_std"),
        ({"rescale_factor": 0}, "rescale"),
        ({"rescale_factor": 10**400}, "rescale_factor"),
    ],
)
def test_unsupported_configuration_is_refused_in_words(keys, words):
    with pytest.raises(BackboneError, match=words):
        Preprocessing.from_huggingface({"image_processor_type": "ViTImageProcessor", **keys})


def test_folder_is_read(tmp_path):
    assert Preprocessing.from_folder(tmp_path) is None
    config = {"image_processor_type": "DeiTImageProcessor"}
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(config))
    assert Preprocessing.from_folder(tmp_path) == pair("deit")[0]
    nested = {"image_processor": {"image_processor_type": "CLIPImageProcessor"}}
    (tmp_path / "processor_config.json").write_text(json.dumps(nested))
    assert Preprocessing.from_folder(tmp_path) == pair("clip")[0]


def test_folder_without_a_class_name_asks_the_model_type(tmp_path):
    (tmp_path / "preprocessor_config.json").write_text(json.dumps({"size": 98}))
    with pytest.raises(BackboneError, match="names no image_processor_type"):
        Preprocessing.from_folder(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "dinov2"}))
    found = Preprocessing.from_folder(tmp_path)
    assert (found.resize, found.crop, found.resample) == (98, (224, 224), "bicubic")


@pytest.mark.parametrize("text", ["{", "[]", "\x00"])
def test_broken_file_in_a_folder_is_named(tmp_path, text):
    (tmp_path / "preprocessor_config.json").write_text(text)
    with pytest.raises(BackboneError, match=r"preprocessor_config\.json"):
        Preprocessing.from_folder(tmp_path)


@pytest.mark.parametrize("name", CONFIGS)
def test_saved_by_hugging_face_reads_back_the_same(name, tmp_path):
    ours, processor = pair(name)
    processor.save_pretrained(tmp_path)
    assert Preprocessing.from_folder(tmp_path) == ours


# ---------------------------------------------------------------------------------------------
# The description itself


@pytest.mark.parametrize("name", CONFIGS)
def test_json_survives_a_round_trip(name):
    ours, _ = pair(name)
    again = Preprocessing.from_json(json.loads(json.dumps(ours.to_json())))
    assert again == ours
    assert again.fingerprint == ours.fingerprint
    assert hash(again) == hash(ours)


def test_json_has_exactly_the_fields():
    assert SMALL.to_json() == {
        "resize": [24, 32],
        "resample": "bicubic",
        "crop": None,
        "rescale": 1 / 255,
        "mean": [0.5, 0.5, 0.5],
        "std": [0.5, 0.5, 0.5],
    }


@pytest.mark.parametrize(
    "change",
    [
        {"extra": 1},
        {"resample": "sinc"},
        {"resample": ["bicubic"]},
        {"resize": [1]},
        {"resize": "224"},
        {"resize": True},
        {"crop": 224},
        {"mean": 0.5},
        {"std": [1, 1, "1"]},
        {"rescale": None},
    ],
)
def test_json_that_does_not_fit_is_refused(change):
    with pytest.raises(BackboneError):
        Preprocessing.from_json({**SMALL.to_json(), **change})


def test_json_with_a_field_missing_is_refused():
    for name in SMALL.to_json():
        rest = {key: value for key, value in SMALL.to_json().items() if key != name}
        with pytest.raises(BackboneError, match="has the fields"):
            Preprocessing.from_json(rest)
    with pytest.raises(BackboneError, match="got list"):
        Preprocessing.from_json([])


def test_fingerprint_tells_every_field_apart_and_is_stable():
    changes = [
        {},
        {"resize": 24},
        {"resize": None},
        {"resample": "box"},
        {"crop": [9, 9]},
        {"rescale": 1.0},
        {"mean": [0, 0, 0]},
        {"std": [1, 1, 1]},
    ]
    prints = {
        Preprocessing.from_json({**SMALL.to_json(), **change}).fingerprint for change in changes
    }
    assert len(prints) == len(changes)
    assert SMALL.fingerprint == "6468b03800e8b169"


def test_whole_numbers_and_floats_have_one_fingerprint():
    whole = Preprocessing(8, "box", None, 1, (0, 0, 0), (1, 1, 1))
    parts = Preprocessing(8, "box", None, 1.0, (0.0, 0.0, 0.0), (1.0, 1.0, 1.0))
    assert whole == parts
    assert whole.fingerprint == parts.fingerprint


def test_output_size_is_the_crop_or_the_exact_size():
    assert pair("clip")[0].output_size == (224, 224)
    assert pair("vit list")[0].output_size == (96, 160)
    for resize in (224, None):
        with pytest.raises(BackboneError, match="different sizes"):
            _ = Preprocessing(resize, "box", None, 1.0, (0.0,) * 3, (1.0,) * 3).output_size


def test_other_size_keeps_the_proportions():
    deit, clip, vit = (pair(name)[0] for name in ("deit", "dinov2", "vit"))
    assert deit.with_size(384).to_json() == {
        **deit.to_json(),
        "resize": [439, 439],
        "crop": [384, 384],
    }
    assert (clip.with_size(112).resize, clip.with_size(112).crop) == (128, (112, 112))
    assert vit.with_size((96, 64)).resize == (96, 64)
    assert clip.with_size((112, 448)).resize == 512
    assert clip.with_size(224) == clip
    with pytest.raises(BackboneError, match="1 to 4096"):
        vit.with_size(0)
    with pytest.raises(BackboneError, match="different sizes"):
        AS_IT_IS.with_size(224)


def test_other_size_never_needs_padding():
    ours = pair("clip")[0].with_size((96, 160))
    white = Image.new("RGB", (300, 300), "white")
    assert (ours.from_image(white) == 255).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_lower_precision_is_rounded_once(dtype):
    ours, _ = pair("dinov2")
    pixels = torch.randint(0, 256, (2, 8, 6, 3), dtype=torch.uint8)
    result = ours.normalise(pixels, dtype)
    assert result.shape == (2, 3, 8, 6)
    assert result.dtype == dtype
    assert result.is_contiguous()
    assert torch.equal(result, ours.normalise(pixels).to(dtype))


def test_result_can_be_wrapped_and_written_to():
    result = SMALL(encode(random_rgb(10, 10), "PNG"), max_pixels=None)
    torch.from_numpy(result).zero_()
    assert not result.any()
