"""The accuracy study: sets drawn from a seed, probes that learn, and a page from results."""

import json

import numpy as np
import pytest
import torch
from engram_server.model import load_backbone
from engram_training.fitting.variants import AUTO_REGIMES
from engram_training.options import TrainOptions
from PIL import Image

from research import accuracy, accuracy_page
from research.accuracy_page import Difference
from research.accuracy_sets import Sizes, collections
from research.probes import AttentiveProbe, discriminant, logistic_regression

TINY = Sizes(classes=4, train=3, val=2, test=2)


@pytest.fixture(scope="module")
def known(tmp_path_factory):
    """Without the archives: the drawn sets."""
    return collections(tmp_path_factory.mktemp("nowhere"), None)


@pytest.mark.parametrize("name", ["counting", "angle", "distance"])
def test_drawn_sets_depend_on_the_seed_alone(known, tmp_path, name):
    found = []
    for number, seed in enumerate((0, 0, 1)):
        folder = tmp_path / str(number)
        folder.mkdir()
        drawn = known[name].draw(folder, TINY, seed)
        assert {split: len(images) for split, images in drawn.items()} == {
            "train": 12,
            "val": 8,
            "test": 8,
        }
        found.append([path.read_bytes() for split in drawn for path, _ in drawn[split]])
    assert found[0] == found[1]
    assert not set(found[0]) & set(found[2])
    assert len(set(found[0])) == 28, "no picture is in two splits"


def test_as_many_shapes_are_drawn_as_the_class_says(known, tmp_path):
    """Pixels far from the background, joined into blobs by flooding."""
    drawn = known["counting"].draw(tmp_path, Sizes(8, 1, 1, 1), 3)
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


@pytest.mark.parametrize("fit", [logistic_regression, discriminant])
def test_heads_on_features_separate_gaussian_classes(fit):
    (rows, targets), (new, expected) = gaussian_classes(1), gaussian_classes(2)
    found = list(fit(rows, targets, 3))
    assert len({detail for detail, _ in found}) == len(found) > 1
    best = max(float((head(new).argmax(1) == expected).double().mean()) for _, head in found)
    assert best > 0.9


def test_an_attentive_probe_learns_where_to_look():
    """The class is in one of the tokens, and the others are noise."""
    rows, targets = gaussian_classes(1)
    tokens = torch.randn(60, 5, 8, generator=torch.Generator().manual_seed(3))
    tokens[:, 2] = rows
    probe = AttentiveProbe(8, 3, seed=0)
    probe.learn(tokens, targets, rate=0.01, epochs=40, batch=16, seed=0)
    assert (probe.answer(tokens).argmax(1) == targets).double().mean() > 0.9


def test_the_study_trains_each_regime_as_training_does():
    by_method = {}
    for stage in ("frozen", "lora"):
        for method, variant in accuracy.candidates(stage):
            by_method.setdefault(method, []).append(variant)
    assert by_method.keys() == set(AUTO_REGIMES)
    studied = {variant for variants in by_method.values() for variant in variants}
    trained = {variant for variant in TrainOptions().variants() if variant.regime != "layers"}
    assert studied > trained
    assert {one.rank for one in studied - trained} == set(accuracy.OTHER_RANKS)
    (by_sgd,) = {method for method, _ in accuracy.candidates("optimisers")}
    assert by_sgd == accuracy_page.BY_SGD


def test_a_cell_is_run_once_and_the_page_follows(folder_of, known, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(accuracy, "RESULTS", tmp_path / "results")
    monkeypatch.setattr(accuracy, "EPOCHS", 1)
    monkeypatch.setattr(accuracy, "FINE_TUNING_EPOCHS", 1)
    monkeypatch.setattr(accuracy_page, "PAGE", tmp_path / "accuracy.md")
    monkeypatch.setattr(accuracy_page, "CHART", tmp_path / "accuracy.svg")
    monkeypatch.setattr(accuracy_page, "DIFFERENCES", tmp_path / "differences.svg")
    backbone = load_backbone(folder_of("vit"))
    for stage in accuracy.STAGES:
        accuracy.run_cell(accuracy.Cell(known["counting"], TINY, 0, stage), backbone)
    files = sorted(path.name for path in (tmp_path / "results").iterdir())
    assert files == [f"counting-3-0-{stage}.json" for stage in sorted(accuracy.STAGES)]
    runs = json.loads((tmp_path / "results" / files[1]).read_text())["runs"]
    assert {len(run["test"]) for run in runs} == {2}, "eight images in two hexadecimal digits"
    accuracy_page.write(tmp_path / "results", known)
    page = (tmp_path / "accuracy.md").read_text()
    assert "counting shapes, 1 to 8, 3 a class" in page
    assert "lora over head" in page
    assert (tmp_path / "accuracy.svg").read_text().count("<circle") == 6 + 6
    assert (tmp_path / "differences.svg").read_text().count("<circle") == 3 + 3


def test_a_difference_counts_images_in_pairs():
    one, other = np.array([1.0, 1, 1, 0] * 50), np.array([1.0, 0, 1, 0] * 50)
    found = Difference.of(one, other)
    assert found.points == 25
    assert 5 < found.margin < 7
    assert Difference.of(one, one).margin > 0, "no evidence is not certainty"
