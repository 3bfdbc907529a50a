"""The accuracy study: sets drawn from a seed, probes that learn, and a page from results."""

import json

import numpy as np
import pytest
import torch
from engram_server.model import load_backbone
from PIL import Image

from research import accuracy, accuracy_page, accuracy_sets
from research.accuracy_page import FINE_TUNING, LAYERS, Difference, Row
from research.accuracy_sets import collections
from research.probes import logistic_regression


@pytest.fixture(scope="module")
def known(tmp_path_factory):
    """Without the archives: the drawn sets."""
    return collections(tmp_path_factory.mktemp("nowhere"))


@pytest.mark.parametrize("name", ["counting", "angle", "distance"])
def test_drawn_sets_depend_on_the_seed_alone(known, tmp_path, monkeypatch, name):
    monkeypatch.setattr(accuracy_sets, "MOST_IMAGES", 24)
    found = []
    for number, seed in enumerate((0, 0, 1)):
        folder = tmp_path / str(number)
        folder.mkdir()
        drawn = known[name].draw(folder, 3, seed)
        classes = 1 + max(label for _, label in drawn["test"])
        assert {split: len(images) for split, images in drawn.items()} == {
            "train": 2 * classes,
            "val": classes,
            "test": 24 // classes * classes,
        }
        found.append([path.read_bytes() for split in drawn for path, _ in drawn[split]])
    assert found[0] == found[1]
    assert not set(found[0]) & set(found[2])
    assert len(set(found[0])) == len(found[0]), "no picture is in two splits"


def test_as_many_shapes_are_drawn_as_the_class_says(known, tmp_path, monkeypatch):
    """Pixels far from the background, joined into blobs by flooding."""
    monkeypatch.setattr(accuracy_sets, "MOST_IMAGES", 8)
    drawn = known["counting"].draw(tmp_path, 1, 3)
    for path, label in drawn["train"]:
        pixels = np.asarray(Image.open(path).convert("RGB")).astype(int)
        front = (np.abs(pixels - pixels[0, 0]).sum(axis=2) > 120).copy()
        blobs = 0
        while front.any():
            blobs += 1
            waiting = [tuple(np.argwhere(front)[0])]
            while waiting:
                y, x = waiting.pop()
                if 0 <= y < front.shape[0] and 0 <= x < front.shape[1] and front[y, x]:
                    front[y, x] = False
                    waiting += [(y + 1, x), (y - 1, x), (y, x + 1), (y, x - 1)]
        assert blobs in (label + 1, label + 2), "a shape over the corner is its own background"


def gaussian_classes(seed, count=60, classes=3, width=8):
    generator = torch.Generator().manual_seed(seed)
    means = 3 * torch.randn(classes, width, generator=torch.Generator().manual_seed(0))
    targets = torch.arange(count) % classes
    return means[targets] + torch.randn(count, width, generator=generator), targets


def test_logistic_regression_separates_gaussian_classes():
    (rows, targets), (new, expected) = gaussian_classes(1), gaussian_classes(2)
    found = list(logistic_regression(rows, targets, 3))
    assert len({detail for detail, _ in found}) == len(found) > 1
    best = max(float((head(new).argmax(1) == expected).double().mean()) for _, head in found)
    assert best > 0.9


def test_a_cell_is_run_once_and_the_page_follows(folder_of, known, tmp_path, monkeypatch):
    monkeypatch.setattr(accuracy, "RESULTS", tmp_path / "results")
    monkeypatch.setattr(accuracy, "EPOCHS", 1)
    monkeypatch.setattr(accuracy, "FINE_TUNING_EPOCHS", 1)
    monkeypatch.setattr(accuracy_sets, "MOST_IMAGES", 32)
    monkeypatch.setattr(accuracy_page, "PAGE", tmp_path / "accuracy.md")
    monkeypatch.setattr(accuracy_page, "CHART", tmp_path / "accuracy.svg")
    backbone = load_backbone(folder_of("vit"))
    for stage in accuracy.STAGES:
        accuracy.run_cell(accuracy.Cell(known["counting"], None, 0, stage), backbone)
    files = sorted(path.name for path in (tmp_path / "results").iterdir())
    assert files == [f"counting-all-0-{stage}.json" for stage in sorted(accuracy.STAGES)]
    results = [json.loads((tmp_path / "results" / name).read_text()) for name in files]
    runs = [run for result in results for run in result["runs"]]
    assert {run["method"] for run in runs} == set(accuracy_page.METHODS)
    assert {len(run["test"]) for run in runs} == {8}, "32 images in eight hexadecimal digits"
    accuracy_page.write(tmp_path / "results", known)
    page = (tmp_path / "accuracy.md").read_text()
    assert "| counting shapes (8) |" in page
    assert "layers over class token" in page
    shown = len(accuracy_page.COLOURS)
    assert (tmp_path / "accuracy.svg").read_text().count("<circle") == shown + shown


def test_a_difference_counts_images_in_pairs():
    one, other = np.array([1.0, 1, 1, 0] * 50), np.array([1.0, 0, 1, 0] * 50)
    found = Difference.of(one, other)
    assert found.points == 25
    assert 5 < found.margin < 7
    assert Difference.of(one, one).margin > 0, "no evidence is not certainty"


def test_draws_without_fine_tuning_count_for_all_other_methods():
    right, wrong = np.ones(4), np.zeros(4)
    row = Row("set", None, {LAYERS: {0: right, 1: wrong}, FINE_TUNING: {0: right}})
    assert (row.accuracy(LAYERS), row.accuracy(FINE_TUNING)) == (50, 100)
    difference = row.over(FINE_TUNING, LAYERS)
    assert difference is not None
    assert difference.points == 0, "on the draw that both have"
    assert Row("set", None, {FINE_TUNING: {0: right}}).accuracy(FINE_TUNING) == 100
