"""JPEGs much larger than what they are resized to are decoded at a fraction."""

from contextlib import nullcontext

import numpy as np
import pytest
from engram_server.errors import ImageTooLarge, UnreadableImage
from engram_server.model.preprocessing import Preprocessing
from engram_server.model.preprocessing.decoding import GAP, decoding_bytes, open_image
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image, ImageOps

from tests.model.image_files import (
    assert_same_pixels,
    constant_jpeg,
    decode,
    encode,
    one_of_each,
    random_rgb,
    with_orientation,
)
from tests.model.preprocessing.configurations import AS_IT_IS, CONFIGS, pair

EXACT = Preprocessing((40, 56), "bicubic", None, 1 / 255, (0.5,) * 3, (0.5,) * 3)
SHORTEST = Preprocessing(40, "bilinear", (32, 36), 1 / 255, (0.5,) * 3, (0.5,) * 3)
VIEWS = pytest.mark.parametrize("view", [EXACT, SHORTEST], ids=["exact size", "shortest edge"])


def theirs(processor, data: bytes) -> np.ndarray:
    """What Hugging Face makes of the whole picture, upright."""
    upright = ImageOps.exif_transpose(decode(data)).convert("RGB")
    options = {"do_rescale": False, "do_normalize": False, "return_tensors": "np"}
    return processor(images=upright, **options)["pixel_values"][0].transpose(1, 2, 0)


def whole(view: Preprocessing, data: bytes) -> np.ndarray:
    return view.from_image(decode(data))


def reserved(view: Preprocessing, data: bytes) -> int:
    """Return the number of bytes that decoding reserves."""
    reserved = []
    view(data, max_pixels=None, reserve=lambda nbytes: reserved.append(nbytes) or nullcontext())
    return reserved[0]


def is_scaled(view: Preprocessing, data: bytes) -> bool:
    """Less than the whole picture takes; not for progressive files, which keep all coefficients."""
    with open_image(data) as image:
        return reserved(view, data) < decoding_bytes(image)


def assert_near(result: np.ndarray, expected: np.ndarray, case: object = "") -> None:
    """Within what docs/explanation/precision.md states of the worst pictures."""
    assert result.shape == expected.shape, case
    difference = np.abs(result.astype(int) - expected)
    assert difference.mean() <= 2, (case, difference.mean())
    assert difference.max() <= 20, (case, difference.max())


# ---------------------------------------------------------------------------------------------
# What is scaled


@pytest.mark.parametrize("orientation", range(1, 9))
@VIEWS
def test_every_orientation_is_near_the_whole_picture(view, orientation):
    data = with_orientation(random_rgb(363, 531), orientation, "JPEG", quality=90)
    assert is_scaled(view, data)
    assert_near(view(data, max_pixels=None), whole(view, data))


@pytest.mark.parametrize("name", ["vit list", "siglip edge", "clip square", "bit hamming"])
@pytest.mark.parametrize("size", [(701, 1151), (1201, 1000)])
def test_large_pictures_are_near_what_hugging_face_sees(name, size):
    ours, processor = pair(name)
    data = encode(random_rgb(*size), "JPEG")
    assert is_scaled(ours, data)
    assert_near(ours(data, max_pixels=None), theirs(processor, data))


def test_a_photo_of_twelve_megapixels_is_near_what_hugging_face_sees():
    # Neither edge is a multiple of eight, and it lies on its side.
    data = with_orientation(random_rgb(4031, 3023), 6, "JPEG", quality=90)
    for name in ("vit", "clip"):
        ours, processor = pair(name)
        assert reserved(ours, data) < 10_000_000
        assert_near(ours(data, max_pixels=None), theirs(processor, data), name)


@VIEWS
def test_every_kind_of_jpeg_is_near_the_whole_picture(view):
    image = random_rgb(403, 507)
    cmyk = encode(image.convert("CMYK"), "JPEG", quality=95)
    transform = cmyk.index(b"Adobe") + 11
    kinds = {
        "4:2:0": encode(image, "JPEG", subsampling="4:2:0"),
        "4:2:2": encode(image, "JPEG", subsampling="4:2:2"),
        "4:4:4": encode(image, "JPEG", subsampling="4:4:4"),
        "grey": encode(image.convert("L"), "JPEG"),
        "CMYK": cmyk,
        "YCCK": cmyk[:transform] + b"\2" + cmyk[transform + 1 :],
        "restart markers": encode(image, "JPEG", restart_marker_rows=1),
        "several pictures": encode(image, "MPO", save_all=True, append_images=[image]),
    }
    for kind, data in kinds.items():
        assert is_scaled(view, data), kind
        assert_near(view(data, max_pixels=None), whole(view, data), kind)
    for options in ({}, {"subsampling": "4:4:4"}):
        progressive = encode(image, "JPEG", progressive=True, **options)
        result = view(progressive, max_pixels=None)
        assert_near(result, whole(view, progressive), "progressive")
        assert not np.array_equal(result, whole(view, progressive))


@pytest.mark.parametrize("orientation", range(1, 9))
def test_a_partly_filled_last_column_and_row_do_not_stretch_the_picture(orientation):
    # 385 × 389 pixels are 48 1/8 × 48 5/8 at an eighth, in 49 × 49.
    down, right = np.meshgrid(np.linspace(0, 255, 389), np.linspace(0, 255, 385), indexing="ij")
    ramp = Image.fromarray(np.stack([right, down, 255 - right], axis=-1).astype(np.uint8))
    view = Preprocessing((16, 16), "bilinear", None, 1.0, (0.0,) * 3, (1.0,) * 3)
    data = with_orientation(ramp, orientation, "JPEG", quality=95, subsampling="4:4:4")
    difference = np.abs(view(data, max_pixels=None).astype(int) - whole(view, data))
    assert is_scaled(view, data)
    assert difference.max() <= 2


@settings(max_examples=150, deadline=None)
@given(
    width=st.integers(1, 900),
    height=st.integers(1, 900),
    resize=st.integers(1, 60) | st.tuples(st.integers(1, 60), st.integers(1, 60)),
    orientation=st.integers(1, 8),
    progressive=st.booleans(),
)
def test_scaling_never_changes_the_size_of_a_result(
    width, height, resize, orientation, progressive
):
    upright = Image.new("RGB", (width, height), (200, 90, 30))
    data = with_orientation(upright, orientation, "JPEG", progressive=progressive)
    view = Preprocessing(resize, "bicubic", None, 1.0, (0.0,) * 3, (1.0,) * 3)
    try:
        expected = whole(view, data)
    except ImageTooLarge:
        return
    result = view(data, max_pixels=None)
    assert result.shape == expected.shape
    assert np.abs(result.astype(int) - expected).max() <= 1


# ---------------------------------------------------------------------------------------------
# What is not


@pytest.mark.parametrize("name", CONFIGS)
def test_small_jpegs_are_what_hugging_face_sees(name):
    ours, processor = pair(name)
    for size in ((431, 640), (120, 161)):
        data = encode(random_rgb(*size), "JPEG")
        if ours.resize is not None and min(size) >= 2 * GAP * np.min(ours.resize):
            continue
        assert_same_pixels(ours(data, max_pixels=None), theirs(processor, data), ours.resample)


def test_scaling_begins_where_half_of_each_edge_is_a_gap_above_the_result():
    for size, scaled in (((240, 336), True), ((239, 336), False), ((240, 335), False)):
        data = encode(random_rgb(*size), "JPEG")
        assert is_scaled(EXACT, data) == scaled
        same = np.array_equal(EXACT(data, max_pixels=None), whole(EXACT, data))
        assert same != scaled


def test_nothing_but_jpegs_is_scaled():
    for kind, data in one_of_each(random_rgb(363, 531)).items():
        if "JPEG" not in kind:
            assert np.array_equal(EXACT(data, max_pixels=None), whole(EXACT, data)), kind


def test_nearest_and_no_resizing_take_the_whole_picture():
    nearest = Preprocessing((40, 56), "nearest", None, 1.0, (0.0,) * 3, (1.0,) * 3)
    data = encode(random_rgb(363, 531), "JPEG")
    for view in (nearest, AS_IT_IS):
        assert np.array_equal(view(data, max_pixels=None), whole(view, data))


def test_an_opened_jpeg_is_decoded_whole_and_stays_as_it_is():
    data = encode(random_rgb(363, 531), "JPEG")
    opened = decode(data)
    EXACT.from_image(opened)
    assert opened.size == (531, 363)
    assert opened.tobytes() == decode(data).tobytes()


@pytest.mark.parametrize("kind", ["lossless", "a scan for each channel"])
@pytest.mark.parametrize("channels", [3, 4])
def test_files_that_cannot_be_scaled_or_need_all_memory_are_decoded_whole(kind, channels):
    data = constant_jpeg(531, 363, channels, lossless=kind == "lossless")
    assert not is_scaled(EXACT, data)
    assert np.array_equal(EXACT(data, max_pixels=None), whole(EXACT, data))


# ---------------------------------------------------------------------------------------------
# Limits


@pytest.mark.parametrize("progressive", [False, True])
def test_truncated_large_jpeg_is_refused_unless_every_pixel_is_there(progressive):
    data = encode(random_rgb(363, 531), "JPEG", progressive=progressive)
    expected = EXACT(data, max_pixels=None)
    refused = 0
    for cut in {len(data) * part // 60 for part in range(1, 60)} | {len(data) - 1, len(data) - 2}:
        try:
            result = EXACT(data[:cut], max_pixels=None)
        except UnreadableImage:
            refused += 1
        else:
            assert np.array_equal(result, expected), cut
    assert refused >= 58


def test_the_pixels_allowed_are_those_of_the_file():
    data = encode(random_rgb(363, 531), "JPEG")
    assert EXACT(data, max_pixels=363 * 531).shape == (40, 56, 3)
    with pytest.raises(ImageTooLarge, match=r"531 × 363 = 192753 pixels \(limit 192752\)"):
        EXACT(data, max_pixels=363 * 531 - 1)


@pytest.mark.parametrize(
    ("options", "least", "most"),
    [
        # Seven bytes for a pixel of the reduced image, which has a sixteenth of them.
        ({}, 7 / 16, 8 / 16 + 0.15),
        (
            {"exif": b"Exif\0\0MM\0*\0\0\0\x08\0\1\1\x12\0\3\0\0\0\1\0\6\0\0\0\0\0\0"},
            7 / 16,
            8 / 16 + 0.15,
        ),
        # And all coefficients, two bytes each.
        ({"progressive": True, "subsampling": "4:4:4"}, 6.0, 6.8),
    ],
    ids=["upright", "on its side", "progressive"],
)
def test_reserved_memory_matches_what_decoding_takes(options, least, most):
    view = Preprocessing(80, "bicubic", None, 1.0, (0.0,) * 3, (1.0,) * 3)
    data = encode(random_rgb(1000, 1500), "JPEG", **options)
    assert least <= reserved(view, data) / (1000 * 1500) <= most


def test_all_coefficients_are_counted_where_channels_come_one_after_the_other():
    data = constant_jpeg(531, 363, 3, lossless=False)
    assert reserved(EXACT, data) > (4 + 2 * 3) * 531 * 363
