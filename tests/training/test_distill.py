"""Distillation: what is left out, that views repeat, that the student learns and can be served."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from PIL import Image
from transformers import ViTConfig, ViTForImageClassification

from server.model import MultiTaskViT, load_backbone
from training import distill
from training.errors import DataError, SettingsConflict

NAMES = {0: "stripes", 1: "spots", 2: "plain"}


def draw(seed: int, size: int = 48) -> Image.Image:
    """A smooth picture that no other seed gives."""
    small = np.random.default_rng(seed).integers(0, 256, (5, 5, 3), dtype=np.uint8)
    return Image.fromarray(small).resize((size, size), Image.Resampling.BICUBIC)


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    folder = tmp_path / "photos"
    (folder / "deep" / "er").mkdir(parents=True)
    for seed in range(40):
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
    distill.save_preprocessing(folder, 32)
    return folder


@pytest.fixture
def alone() -> Iterator[None]:
    """A group of one process, so that a stage can run in the test's own."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def small_recipe(**changes: object) -> distill.Recipe:
    sizes = {"teacher_pixels": 32, "student_pixels": 32, "patch": 4, "layers": 2}
    shape = {"width": 16, "heads": 2, "batch": 12, "views": 40, "minutes": 0.1}
    pace = {"learning_rate": 1e-3, "stages": distill.read_stages("0:0.5,0.5:1")}
    return distill.Recipe(**{**sizes, **shape, **pace, **changes})  # type: ignore[arg-type]


@pytest.mark.parametrize("text", ["", "0.5:1", "0:0", "0:2", "0", "0:half"])
def test_stages_that_make_no_sense_are_refused(text: str) -> None:
    with pytest.raises(SettingsConflict, match="no stages"):
        distill.read_stages(text)


def test_photos_are_found_below_a_folder_and_drawn_by_the_seed(photos: Path) -> None:
    rng = np.random.default_rng
    assert len(distill.find_photos(photos, None, rng(0))) == 40
    some = distill.find_photos(photos, 7, rng(0))
    assert len(some) == 7
    assert some == distill.find_photos(photos, 7, rng(0))
    with pytest.raises(DataError, match="no photo"):
        distill.find_photos(photos / "deep" / "nowhere", None, rng(0))


def test_a_photo_that_looks_like_an_excluded_one_is_left_out(photos: Path, tmp_path: Path) -> None:
    # The same picture, smaller and compressed, as another data set would have it.
    taken = tmp_path / "test-image.jpg"
    draw(3).resize((30, 30)).save(taken, quality=80)
    found = distill.find_photos(photos, None, np.random.default_rng(0))
    kept = distill.leave_out(found, [taken])
    assert {path.name for path in found} - {path.name for path in kept} == {"3.png"}


def test_a_view_is_the_same_cut_in_every_size_and_every_time(photos: Path) -> None:
    path = photos / "deep" / "er" / "5.png"
    large, small = distill.cut_view(path, 9, (64, 32), seed=0)
    assert (large.size, small.size) == ((64, 64), (32, 32))
    again = distill.cut_view(path, 9, (64, 32), seed=0)[0]
    assert np.array_equal(np.asarray(large), np.asarray(again))
    other = distill.cut_view(path, 10, (64, 32), seed=0)[0]
    assert not np.array_equal(np.asarray(large), np.asarray(other))
    shrunk = np.asarray(large.resize((32, 32), Image.Resampling.BOX), dtype=float)
    assert np.abs(shrunk - np.asarray(small, dtype=float)).mean() < 4


@pytest.mark.usefixtures("alone")
def test_the_student_comes_to_answer_like_the_teacher(
    photos: Path, teacher: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = small_recipe()
    found = distill.find_photos(photos, None, np.random.default_rng(0))
    work, out = tmp_path / "work", tmp_path / "student"
    work.mkdir()
    distill.teach(0, 1, str(teacher), found, work, recipe)
    distill.learn(0, 1, str(teacher), work, out, None, recipe)
    told = [line for line in capsys.readouterr().out.splitlines() if "held out" in line]
    first, last = (_held_out(line) for line in (told[0], told[-1]))
    assert last["class"] < 0.8 * first["class"]
    assert last["patches"] < first["patches"]
    assert last["logits"] < first["logits"]


def _held_out(line: str) -> dict[str, float]:
    words = line.split("held out:")[1].split()
    return dict(zip(words[::2], map(float, words[1::2]), strict=True))


@pytest.mark.long
def test_the_command_gives_a_backbone_that_can_be_served(
    photos: Path, teacher: Path, tmp_path: Path
) -> None:
    work, out = tmp_path / "work", tmp_path / "student"
    command = [sys.executable, "-m", "training.distill", f"{photos}:30"]
    options = {"teacher": teacher, "out": out, "work": work, "minutes": "0.02", "processes": "2"}
    for name, value in options.items():
        command += [f"--{name}", str(value)]
    said = subprocess.run(command, capture_output=True, text=True, check=False)
    assert said.returncode == 0, said.stderr
    assert "30 photos" in said.stdout
    assert sum(file.stat().st_size for file in out.iterdir()) < 12e6
    backbone = load_backbone(out)
    logits = MultiTaskViT(backbone)(torch.zeros(1, 3, 128, 128), tasks=["base"])["base"]
    assert logits.shape == (1, 3)


def test_views_of_another_run_are_not_mistaken_for_these(tmp_path: Path) -> None:
    distill.Views(tmp_path, small_recipe(), 24, 3)
    with pytest.raises(SettingsConflict, match="another run"):
        distill.Views(tmp_path, small_recipe(views=41), 24, 3)
