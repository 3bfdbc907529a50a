"""Drift of the images that a version receives."""

import numpy as np
import pytest
from engram_server.engine.rollout.comparison import Answers
from engram_server.engine.rollout.drift import MIN_IMAGES, POINTS, DriftMeter
from engram_server.engine.types import TaskVersion
from engram_server.model.heads.drift import class_shares, fit_drift_reference

WIDTH = 24
BY = TaskVersion("pets", 1, "single_label", ("cat", "dog"))


def training(seed, count, shift=0.0):
    return np.random.default_rng(seed).normal(size=(count, WIDTH)) + shift


@pytest.fixture(scope="module")
def reference():
    return fit_drift_reference(training(0, 1000), class_shares(np.arange(1000) % 2, 2))


def feed(meter, reference, features, *, dogs=0.5, unknown=0.0, step=8):
    """Let a meter see features; the first shares of each step are dogs and out of distribution."""
    for start in range(0, len(features), step):
        part = features[start : start + step].astype(np.float32)
        count = len(part)
        tops = (np.arange(count) < dogs * count).astype(int)
        scores = np.where(np.arange(count) < unknown * count, 2.0, 0.5)
        logits = np.eye(2, dtype=np.float32)[tops]
        meter.add(Answers(BY, np.arange(count), logits, scores, reference), part)
    return meter.report()


def test_images_like_the_training_are_no_drift(reference):
    found = [feed(DriftMeter(), reference, training(seed, 200)) for seed in range(1, 41)]
    assert sum(report.drifting for report in found) <= 1
    assert all(report.class_divergence < 0.1 for report in found)


def test_changed_images_are_flagged_within_200_images(reference):
    meter = DriftMeter()
    assert not feed(meter, reference, training(1, 400)).drifting
    report = feed(meter, reference, training(2, 200, 0.5), unknown=0.75, dogs=1)
    assert report.drifting
    assert report.out_of_distribution > 0.5
    assert report.class_divergence > 0.3
    assert not feed(meter, reference, training(3, 1000)).drifting  # it recovers


def test_nothing_is_reported_for_few_images(reference):
    report = feed(DriftMeter(), reference, training(1, MIN_IMAGES - 10))
    assert (report.distance, report.limit, report.drifting) == (None, None, False)
    assert report.images == MIN_IMAGES - 10


def test_old_bundles_have_no_distance():
    report = feed(DriftMeter(), None, training(1, 200), unknown=0.25)
    assert (report.distance, report.class_divergence) == (None, None)
    assert report.out_of_distribution == pytest.approx(0.25, abs=0.05)


def test_batches_of_any_size_give_the_same_figures(reference):
    one = feed(DriftMeter(), reference, training(1, 200), step=1, dogs=1)
    many = feed(DriftMeter(), reference, training(1, 200), step=50, dogs=1)
    assert one.distance == pytest.approx(many.distance, rel=1e-5)
    assert one.limit == pytest.approx(many.limit, rel=1e-5)


def test_the_course_is_bounded(reference):
    meter = DriftMeter()
    feed(meter, reference, training(1, 5000), step=50)
    assert len(meter.points) <= POINTS
    times = [point.time for point in meter.points]
    assert times == sorted(times)
