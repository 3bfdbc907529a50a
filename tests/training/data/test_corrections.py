"""Corrections applied to the data of a training."""

import hashlib
from concurrent.futures import ThreadPoolExecutor

import pytest
from engram_training.data.dataset import corrected, read_data
from engram_training.errors import DataError

from tests.training.pictures import brightness, class_folders


@pytest.fixture
def pool():
    with ThreadPoolExecutor(2) as pool:
        yield pool


@pytest.fixture
def data(tmp_path):
    return read_data(class_folders(tmp_path / "photos", each=3, colours=("red", "blue")))


def digest_of(sample):
    return f"sha256:{hashlib.sha256(sample.path.read_bytes()).hexdigest()}"


def test_a_corrected_photo_takes_its_label(data, pool):
    wrong = data.samples[0]
    absent = f"sha256:{'12' * 32}"
    right, note = corrected(data, {digest_of(wrong): ("red",), absent: ("red",)}, pool)
    assert wrong.values == ("blue",)
    assert right.samples[0].values == ("red",)
    assert right.samples[1:] == data.samples[1:]
    assert right.digest != data.digest, "a checkpoint of the other labels is not resumed"
    assert note == (
        "1 of 2 corrections are of images in the data; 1 labels changed; "
        "1 are not used because their images are not in the data"
    )


def test_a_correction_may_bring_a_new_class_and_take_one_away(data, pool):
    blue = [sample for sample in data.samples if sample.values == ("blue",)]
    right, _ = corrected(data, {digest_of(sample): ("sea",) for sample in blue}, pool)
    assert right.labels == ("red", "sea")


def test_what_is_right_already_changes_nothing(data, pool):
    same, note = corrected(data, {digest_of(data.samples[0]): ("blue",)}, pool)
    assert same is data
    assert "0 labels changed" in note


def test_corrections_that_do_not_fit_are_refused(data, pool, tmp_path):
    with pytest.raises(DataError, match="2 labels"):
        corrected(data, {digest_of(data.samples[0]): ("blue", "red")}, pool)
    with pytest.raises(DataError, match="regression task"):
        corrected(read_data(brightness(tmp_path / "numbers")), {}, pool)
