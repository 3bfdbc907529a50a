from dataclasses import replace
from pathlib import Path

import engram_server
import numpy as np
import pytest
import torch
from engram_server.errors import BackboneError
from engram_server.model.preprocessing import Preprocessing
from engram_server.model.preprocessing.huggingface import from_huggingface
from PIL import Image

from tests.model.image_files import assert_same_pixels, decode, encode, random_rgb
from tests.model.preprocessing.configurations import (
    AS_IT_IS,
    CONFIGS,
    PROCESSORS,
    SMALL,
    pair,
)

PHOTOS = sorted((Path(engram_server.__file__).parent / "console" / "samples").glob("*.jpg"))
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


def theirs(processor, image, **options):
    return processor(images=image, return_tensors="np", **options)["pixel_values"][0]


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
        expected = expected.transpose(1, 2, 0)
        assert_same_pixels(result, expected, ours.resample, (height, width))


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("photo", PHOTOS, ids=lambda path: path.stem)
def test_photos_are_within_a_level_of_hugging_face(name, photo):
    """400 × 300 pixels. A few values in a million differ by two."""
    ours, processor = pair(name)
    data = photo.read_bytes()
    expected = theirs(processor, decode(data), do_rescale=False, do_normalize=False)
    difference = np.abs(ours(data, max_pixels=None).astype(int) - expected.transpose(1, 2, 0))
    assert difference.max() <= 2
    assert (difference > 1).sum() <= 5
    assert difference.mean() <= 0.02


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
def test_the_whole_pipeline_is_within_a_level_of_hugging_face(name):
    ours, processor = pair(name)
    data = encode(random_rgb(431, 640), "JPEG")
    result = ours.normalise(torch.from_numpy(ours(data, max_pixels=None))[None])
    assert result.shape == (1, 3, *ours.output_size)
    level = (ours.rescale / torch.tensor(ours.std)).numpy()[:, None, None]
    difference = np.abs(result[0].numpy() - theirs(processor, decode(data))) / level
    assert difference.max() <= 1 + 1e-3
    assert difference.mean() <= 0.1


@pytest.mark.parametrize(
    ("rescale", "normalise"), [(False, True), (True, False), (False, False), (True, True)]
)
def test_steps_turned_off_are_left_out_like_hugging_face(rescale, normalise):
    keys = {"do_rescale": rescale, "do_normalize": normalise, "image_mean": 0.25, "image_std": 0.5}
    ours = from_huggingface({"image_processor_type": "ViTImageProcessor", **keys})
    image = random_rgb(224, 224)
    expected = theirs(PROCESSORS["ViTImageProcessor"](**keys), image)
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
    assert_same_pixels(ours.from_image(image), expected.transpose(1, 2, 0), ours.resample)


# ---------------------------------------------------------------------------------------------
# The description itself


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
    [{"resample": "sinc"}, {"resize": "224"}, {"crop": (0, 9)}, {"std": (1, 1, 0)}, {"rescale": 0}],
)
def test_values_that_make_no_sense_are_refused(change):
    with pytest.raises(BackboneError):
        replace(SMALL, **change)


def test_fingerprint_tells_every_field_apart_and_is_stable():
    changes = [
        {},
        {"resize": 24},
        {"resize": None},
        {"resample": "box"},
        {"crop": (9, 9)},
        {"rescale": 1.0},
        {"mean": (0, 0, 0)},
        {"std": (1, 1, 1)},
    ]
    prints = {replace(SMALL, **change).fingerprint for change in changes}
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
        with pytest.raises(BackboneError, match="no fixed output size"):
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
    with pytest.raises(BackboneError, match=r"resize.0: .* greater than or equal to 1"):
        vit.with_size(0)
    with pytest.raises(BackboneError, match="no fixed output size"):
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
