"""Adapting a backbone to a smaller size: the photos, their cuts, and that the student learns."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from engram_server.embedded import BACKBONE
from engram_server.model import MultiTaskViT, load_backbone
from engram_training.errors import DataError
from PIL import Image
from transformers import ViTConfig, ViTForImageClassification

from research import adapt_backbone as adapt
from research.label_names import READABLE, readable

NAMES = {0: "stripes", 1: "spots", 2: "plain"}


def draw(seed: int, size: int = 48) -> Image.Image:
    """A smooth picture that no other seed gives."""
    small = np.random.default_rng(seed).integers(0, 256, (5, 5, 3), dtype=np.uint8)
    return Image.fromarray(small).resize((size, size), Image.Resampling.BICUBIC)


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    folder = tmp_path / "photos"
    (folder / "deep" / "er").mkdir(parents=True)
    for seed in range(24):
        draw(seed).save(folder / "deep" / "er" / f"{seed}.png")
    return folder


@pytest.fixture
def teacher(tmp_path: Path) -> Path:
    torch.manual_seed(1)
    config = ViTConfig(
        hidden_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=48,
        image_size=32,
        patch_size=8,
        id2label=NAMES,
        label2id={name: number for number, name in NAMES.items()},
    )
    folder = tmp_path / "teacher"
    ViTForImageClassification(config).save_pretrained(folder)
    prepared = {
        "image_processor_type": "ViTImageProcessor",
        "size": {"shortest_edge": 36},
        "do_center_crop": True,
        "crop_size": 32,
        "resample": 3,
    }
    (folder / "preprocessor_config.json").write_text(json.dumps(prepared))
    return folder


def test_photos_are_found_below_a_folder_and_drawn_by_the_seed(photos: Path) -> None:
    rng = np.random.default_rng
    assert len(adapt.find_photos(photos, None, rng(0))) == 24
    some = adapt.find_photos(photos, 7, rng(0))
    assert len(some) == 7
    assert some == adapt.find_photos(photos, 7, rng(0))
    with pytest.raises(DataError, match="no photo"):
        adapt.find_photos(photos / "deep" / "nowhere", None, rng(0))


def test_a_photo_that_looks_like_an_excluded_one_is_left_out(photos: Path, tmp_path: Path) -> None:
    # The same picture, smaller and compressed, as another data set would have it.
    test_image = tmp_path / "test-image.jpg"
    draw(3).resize((30, 30)).save(test_image, quality=80)
    found = adapt.find_photos(photos, None, np.random.default_rng(0))
    kept = adapt.leave_out(found, [test_image])
    assert {path.name for path in found} - {path.name for path in kept} == {"3.png"}


def test_a_view_is_the_same_cut_in_every_size(photos: Path) -> None:
    path = photos / "deep" / "er" / "5.png"
    large, small = adapt.cut_view(path, np.random.default_rng(9), (64, 32), 0.35)
    assert (large.shape, small.shape) == ((64, 64, 3), (32, 32, 3))
    shrunk = Image.fromarray(large).resize((32, 32), Image.Resampling.BOX)
    assert np.abs(np.asarray(shrunk, dtype=float) - small).mean() < 4
    other = adapt.cut_view(path, np.random.default_rng(10), (64, 32), 0.35)[0]
    assert not np.array_equal(large, other)


def test_resampled_tensors_answer_as_transformers_answers_at_that_size(teacher: Path) -> None:
    model = ViTForImageClassification.from_pretrained(teacher).eval()
    pixels = torch.randn(2, 3, 24, 24)
    with torch.no_grad():
        expected = model(pixels, interpolate_pos_encoding=True).logits
        outputs = adapt.answer(adapt.resampled(model, 24).eval(), pixels)
    torch.testing.assert_close(outputs.logits, expected)
    assert outputs.patches.shape == (2, 24, 3, 3)


@pytest.mark.long
def test_the_student_comes_closer_to_the_teacher_and_can_be_served(
    photos: Path, teacher: Path, tmp_path: Path
) -> None:
    out = tmp_path / "student"
    command = [sys.executable, "-m", "research.adapt_backbone", str(photos)]
    options = {"teacher": teacher, "out": out, "pixels": 16, "minutes": 0.05, "rate": 1e-3}
    for name, value in (options | {"processes": 2}).items():
        command += [f"--{name}", str(value)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "24 photos" in done.stdout
    reports = [
        line.split("held out:")[1].split() for line in done.stdout.splitlines() if "%" in line
    ]
    first, last = (
        dict(zip(words[::2], map(float, words[1::2]), strict=True))
        for words in (reports[0], reports[-1])
    )
    assert last["class"] < first["class"]
    assert last["patches"] < first["patches"]
    backbone = load_backbone(out)
    assert backbone.preprocessing.resize == 18
    logits = MultiTaskViT(backbone)(torch.zeros(1, 3, 16, 16), tasks=["base"])["base"]
    assert logits.shape == (1, 3)


def test_every_class_of_the_embedded_backbone_has_a_name_of_its_own() -> None:
    base = load_backbone(BACKBONE).base
    assert base is not None
    assert len(set(map(str.lower, base.labels))) == len(base.labels) == 1000
    assert [base.labels[number] for number in READABLE] == [name for _, name in READABLE.values()]


def test_labels_that_are_not_those_of_imagenet_keep_their_names() -> None:
    assert readable({7: "hat", 8: "hen"}) == {7: "hat", 8: "hen"}
    assert readable({7: "cock"}) == {7: "rooster"}
