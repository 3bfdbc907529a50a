"""The reference statistics of a task, and their limit for images that have not changed."""

import numpy as np
import pytest
from engram_server.model.heads.drift import MAX_CLASSES, class_shares, fit_drift_reference
from engram_server.model.heads.ood import fit_ood_detector

WIDTH = 48
SCALES = np.linspace(0.2, 2, WIDTH)


def features(seed, count, shift=0.0):
    return np.random.default_rng(seed).normal(size=(count, WIDTH)) * SCALES + 3 + shift


def distance(reference, images):
    return float(np.sqrt((reference.project(images.astype(np.float32)).mean(axis=0) ** 2).mean()))


@pytest.mark.parametrize("training", [40, 200, 2000])
def test_windows_of_the_same_kind_stay_below_the_limit(training):
    reference = fit_drift_reference(features(0, training))
    limit = reference.limit(200)
    beyond = sum(distance(reference, features(seed, 200)) > limit for seed in range(1, 201))
    assert beyond <= 1


def test_a_small_shift_is_beyond_the_limit_for_many_images_and_not_for_few():
    reference = fit_drift_reference(features(0, 2000))
    shift = 0.3 * SCALES
    assert distance(reference, features(1, 400, shift)) > reference.limit(400)
    assert reference.limit(5) > 0.4


def test_reference_is_small_and_fits_few_images():
    wide = np.random.default_rng(0).normal(size=(300, 1024))
    reference = fit_drift_reference(wide, class_shares(np.arange(300) % MAX_CLASSES, MAX_CLASSES))
    assert sum(array.nbytes for array in reference.arrays().values()) <= 64_000
    assert len(fit_drift_reference(features(0, 40)).centre) == 10
    assert fit_drift_reference(features(0, 19)) is None


def test_equal_images_have_a_finite_reference():
    reference = fit_drift_reference(np.ones((30, WIDTH)))
    assert np.isfinite(reference.axes).all()
    assert np.isfinite(reference.centre).all()


def test_tasks_with_very_many_classes_have_no_class_shares():
    shares = class_shares(np.arange(30), MAX_CLASSES + 1)
    assert fit_drift_reference(features(0, 30), shares).shares is None


def test_images_of_other_classes_with_the_same_mean_are_drift():
    """Classes at ±a; later images are at ±b, so the mean stays and no class is near."""
    random = np.random.default_rng(0)
    sides = random.choice([-1, 1], 800)
    own = random.normal(size=(800, WIDTH)) + sides[:, None] * 4 * (np.arange(WIDTH) == 0)
    detector = fit_ood_detector(own, (sides > 0).astype(np.int64))
    reference = fit_drift_reference(own, scores=detector.typical)
    later = random.choice([-1, 1], 200)
    others = random.normal(size=(200, WIDTH)) + later[:, None] * 4 * (np.arange(WIDTH) == 40)
    for images, drifting in ((own[:200], False), (others, True)):
        projected = reference.project(images.astype(np.float32), detector.scores(images))
        found = float(np.sqrt((projected.mean(axis=0) ** 2).mean()))
        assert (found > reference.limit(200)) is drifting
