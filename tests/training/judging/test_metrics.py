"""Figures, against values worked out by hand or by another formula."""

import math

import numpy as np
import pytest
import torch
from engram_server.model.heads.lda import wilson
from engram_training.fitting.losses import count_hits, mean_losses, score_of
from engram_training.judging.metrics import average_precision, calibrate, figures


@pytest.mark.parametrize(
    ("right", "count", "low", "high"),
    [(0, 10, 0.0, 0.2775), (10, 10, 0.7225, 1.0), (50, 100, 0.4038, 0.5962), (0, 0, 0.0, 1.0)],
)
def test_wilson_intervals(right, count, low, high):
    assert wilson(right, count) == pytest.approx((low, high), abs=1e-4)


def test_average_precision_by_hand():
    assert average_precision(np.array([0.9, 0.8, 0.7]), np.array([True, False, True])) == (
        pytest.approx((1 + 2 / 3) / 2)
    )
    assert math.isnan(average_precision(np.array([0.5]), np.array([False])))


def test_calibration_error_of_a_task_that_is_too_sure():
    found = calibrate(np.full(10, 0.9), np.array([1.0] * 5 + [0.0] * 5))
    assert found.error == pytest.approx(0.4)
    assert sum(found.count) == 10


def test_single_label_figures():
    logits = torch.tensor([[3.0, 0, 0], [0, 3, 0], [0, 3, 0], [0, 0, 3]])
    found = figures(logits, torch.tensor([0, 1, 2, 2]), "single_label", ("a", "b", "c"))
    assert found.values["accuracy"] == 0.75
    assert found.interval == wilson(3, 4)
    assert found.confusion.tolist() == [[1, 0, 0], [0, 1, 0], [0, 1, 1]]
    assert [c.recall for c in found.classes] == [1, 1, 0.5]
    assert [c.precision for c in found.classes] == [1, 0.5, 1]
    assert found.headline == ("accuracy", 0.75)


def test_multi_label_figures():
    logits = torch.tensor([[1.0, -1], [1, 1], [-1, 1]])
    targets = torch.tensor([[1.0, 0], [0, 1], [0, 1]])
    found = figures(logits, targets, "multi_label", ("a", "b"))
    assert found.values["micro_f1"] == pytest.approx(2 * 3 / (4 + 3))
    assert found.values["exact_match"] == pytest.approx(2 / 3)
    assert found.values["mean_average_precision"] == pytest.approx(1.0)


def test_regression_figures():
    targets = torch.tensor([[1.0], [2], [3]])
    found = figures(targets + torch.tensor([[0.0], [0], [1]]), targets, "regression", ())
    assert found.values["r2"] == pytest.approx(0.5)
    assert found.values["mean_absolute_error"] == pytest.approx(1 / 3)


@pytest.mark.parametrize("task_type", ["single_label", "multi_label", "regression"])
def test_counts_of_batches_add_up_to_those_of_the_whole(task_type):
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(3, 10, 4, generator=generator)
    targets = {
        "single_label": torch.randint(0, 4, (10,), generator=generator),
        "multi_label": torch.randint(0, 2, (10, 4), generator=generator).float(),
        "regression": torch.randn(10, 4, generator=generator),
    }[task_type]
    parts = [slice(0, 7), slice(7, 10)]
    counts = sum(count_hits(logits[:, p], targets[p], task_type) for p in parts)
    whole = count_hits(logits, targets, task_type)
    torch.testing.assert_close(
        score_of(counts, task_type), score_of(whole, task_type), rtol=0, atol=1e-6
    )
    first, second = (mean_losses(logits[:, p], targets[p], task_type) for p in parts)
    mean = (7 * first + 3 * second) / 10
    torch.testing.assert_close(mean, mean_losses(logits, targets, task_type))


def test_scores_are_those_of_the_figures():
    logits = torch.randn(1, 20, 3, generator=torch.Generator().manual_seed(1))
    targets = torch.arange(20) % 3
    score = float(score_of(count_hits(logits, targets, "single_label"), "single_label")[0])
    assert score == pytest.approx(
        figures(logits[0], targets, "single_label", ("a", "b", "c")).values["accuracy"]
    )
