"""The data check: planted label errors, leaks and outliers are found, and can be left out."""

import csv
import io

import numpy as np
import pytest
from engram_server.model import load_backbone
from engram_training.data.issues import COLUMNS, read_excluded
from engram_training.errors import DataError
from engram_training.judging.data_check import far_images, near_duplicates
from engram_training.run import fit
from PIL import Image

from tests.training.pictures import class_folders

QUICK = {"fast": True, "batch": 8}


@pytest.fixture(scope="module")
def backbone(folder_of):
    return load_backbone(folder_of("vit"))


@pytest.fixture
def photos(tmp_path):
    """Photos of three classes with a wrong label, a leak and an outlier."""
    root = tmp_path / "photos"
    colours = ("red", "blue", "green")
    for seed, split in enumerate(("train", "val", "test")):
        class_folders(root / split, each=16 if split == "train" else 6, colours=colours, seed=seed)
    wrong = class_folders(tmp_path / "more", each=1, colours=("red",), seed=9) / "red" / "00.png"
    wrong.rename(root / "train" / "blue" / "wrong.png")
    leak = Image.open(root / "train" / "green" / "03.png").convert("RGB")
    leak.save(root / "test" / "green" / "leak.bmp")
    noise = np.random.default_rng(0).integers(0, 2, (64, 64, 3), dtype=np.uint8) * 255
    Image.fromarray(noise).save(root / "train" / "red" / "noise.png")
    return root


def rows_of(file):
    return list(csv.DictReader(io.StringIO(file.read_text())))


def test_planted_issues_are_found_shown_and_left_out_again(backbone, photos, tmp_path):
    out = tmp_path / "colours.safetensors"
    fitted = fit(photos, name="colours", backbone=backbone, out=out, **QUICK)
    found = {(one.kind, one.path.name): one for one in fitted.issues}
    assert found["label error", "wrong.png"].suggested == "red"
    assert "03.png" in found["duplicate", "leak.bmp"].detail
    assert ("outlier", "noise.png") in found
    others = [kind for kind, _ in found if kind != "duplicate"]  # all squares look alike here
    assert len(others) <= 4
    assert "data check: " in " ".join(fitted.notes)

    file = tmp_path / "colours.issues.csv"
    rows = rows_of(file)
    assert tuple(rows[0]) == COLUMNS
    assert {row["path"] for row in rows} >= {"train/blue/wrong.png", "test/green/leak.bmp"}
    page = out.with_suffix(".html").read_text()
    assert "Suspected label errors: " in page
    assert page.count('<figure class="pair">') == sum(row["issue"] == "duplicate" for row in rows)

    # Edited: the outlier may stay.
    kept = [line for line in file.read_text().splitlines() if "noise.png" not in line]
    file.write_text("\n".join(kept) + "\n")
    again = fit(photos, name="colours", backbone=backbone, out=out, exclude=file, **QUICK)
    assert not {"wrong.png", "leak.bmp"} & {one.path.name for one in again.issues}
    assert f"excluded {len(kept) - 1} images" in " ".join(again.notes)
    images = again.bundle.manifest.training["images"]
    assert sum(images.values()) == sum(fitted.bundle.manifest.training["images"].values()) - (
        len(kept) - 1
    )
    after = {row["path"] for row in rows_of(file)}
    assert "train/blue/wrong.png" in after, "the list that was passed is not lost"


def test_clean_data_has_no_file(backbone, tmp_path):
    photos = class_folders(tmp_path / "photos", each=12)
    out = tmp_path / "colours.safetensors"
    fitted = fit(photos, name="colours", backbone=backbone, out=out, **QUICK)
    assert fitted.issues == []
    assert not (tmp_path / "colours.issues.csv").exists()


def test_the_list_may_be_any_file_with_a_column_path(tmp_path):
    (tmp_path / "list.csv").write_text("note,path\nbad,a/b.png\n,\n")
    assert read_excluded(tmp_path / "list.csv", tmp_path) == {(tmp_path / "a/b.png").resolve()}
    (tmp_path / "list.csv").write_text("a/b.png\n")
    with pytest.raises(DataError, match="no column 'path'"):
        read_excluded(tmp_path / "list.csv", tmp_path)
    with pytest.raises(DataError, match="Cannot read"):
        read_excluded(tmp_path / "none.csv", tmp_path)


def test_only_nearly_equal_features_are_duplicates():
    rng = np.random.default_rng(0)
    train = rng.normal(size=(3000, 40)).astype(np.float16)
    held_out = rng.normal(size=(1200, 40)).astype(np.float16)
    held_out[1100] = train[2500] + 0.1 * rng.normal(size=40)
    assert [(i, j) for i, j, _ in near_duplicates(held_out, train)] == [(1100, 2500)]


def test_only_images_far_from_all_classes_are_outliers():
    rng = np.random.default_rng(0)
    classes = np.arange(400) % 4
    tokens = rng.normal(size=(400, 12)) + 8 * np.eye(4, 12)[classes]
    assert far_images(tokens.astype(np.float16), classes) == []
    tokens[7] += 25
    tokens[8] = tokens[9]  # of another class: wrong, but not far
    assert [index for index, _ in far_images(tokens.astype(np.float16), classes)] == [7]
