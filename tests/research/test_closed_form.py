"""The measurements behind docs/explanation/teaching.md."""

import numpy as np

from research.closed_form import ESTIMATORS, draws, measure_several, measure_single


def tokens(each: int = 6, width: int = 16) -> dict[str, np.ndarray]:
    """Four kinds, clearly apart, half of each for testing."""
    random = np.random.default_rng(0)
    labels = np.repeat(np.arange(4), each)
    means = 4 * random.standard_normal((4, width))
    return {
        "readout": (means[labels] + random.standard_normal((len(labels), width))).astype("f2"),
        "label": labels,
        "split": np.arange(len(labels)) % 2 == 1,
        "names": np.array(["Apple___scab", "Apple___rot", "Corn___scab", "Corn___rot"]),
    }


def test_every_estimator_tells_clear_classes_apart():
    found = measure_single(tokens(), 3)
    assert {name: found[name] for name in ESTIMATORS} == dict.fromkeys(ESTIMATORS, 1.0)
    assert found["left out"] == 1
    assert found["calibration error"] < 0.2


def test_plant_and_disease_are_labels_of_their_own():
    assert measure_several(tokens(20), 10)["mean average precision"] > 0.9


def test_draws_take_so_many_training_images_of_each_class():
    for chosen in draws(tokens(), 2):
        assert np.bincount(tokens()["label"][chosen]).tolist() == [2, 2, 2, 2]
        assert not tokens()["split"][chosen].any()
