"""What a task knows: near what it was made of, and nothing else."""

import dataclasses

import numpy as np
import pytest
import torch
from engram_server.model.heads.lda import LdaStatistics
from engram_server.model.heads.ood import (
    FALSE_ALARM_RATE,
    OodDetector,
    OodScorer,
    fit_ood_detector,
)
from engram_server.model.masked_pass import encode, masked_pass
from engram_server.model.tasks import StackCache, TaskWeights, prepare

from tests.model.test_lda import some
from tests.serving import make_bundle


def features_of(counts: list[int], *, apart: float = 3.0, width: int = 24) -> tuple:
    features = np.stack([one.feature for one in some(counts, width, apart=apart)])
    return features.astype(np.float64), np.repeat(np.arange(len(counts)), counts)


def test_distances_are_those_of_mahalanobis_but_for_a_factor():
    features, classes = features_of([30, 30, 30], width=8)
    detector = fit_ood_detector(features, classes)
    assert detector is not None
    statistics = LdaStatistics.of(features, classes)
    away = (features - statistics.centre)[:, None] - statistics.shrunk_means
    inverse = np.linalg.inv(statistics.covariance())
    exact = np.einsum("nkd,de,nke->nk", away, inverse, away).min(axis=1)
    distances, _ = detector.distances_and_angles(features)
    ratio = distances / exact  # all axes but one are kept
    assert ratio == pytest.approx(ratio.mean(), rel=0.01)


@pytest.mark.parametrize("counts", [[5, 5, 5], [60, 60, 60]], ids=str)
@pytest.mark.parametrize("grouped", [True, False], ids=["by class", "one middle"])
def test_new_images_of_the_same_kind_are_in_distribution_and_others_are_not(counts, grouped):
    features, classes = features_of([count + 200 for count in counts])
    chosen = np.concatenate([np.flatnonzero(classes == k)[:n] for k, n in enumerate(counts)])
    detector = fit_ood_detector(features[chosen], classes[chosen] if grouped else None)
    assert detector is not None
    others = np.delete(features, chosen, axis=0)
    assert (detector.scores(others) > 1).mean() < 0.12
    assert (detector.scores(others + 12) > 1).all()


def test_the_false_alarm_rate_is_as_configured():
    features, classes = features_of([800, 800])
    detector = fit_ood_detector(features[::2], classes[::2])
    assert detector is not None
    distances, angles = detector.distances_and_angles(features[1::2])
    for values, limit in ((distances, detector.distance), (angles, detector.angle)):
        assert (values > limit).mean() == pytest.approx(FALSE_ALARM_RATE, abs=0.02)


def test_images_of_the_classes_are_in_distribution_in_another_style():
    """A style moves all images alike, and away from all that a task was trained on."""
    features, classes = features_of([60] * 6, apart=0.8, width=96)
    deviations, random = np.linspace(0.3, 2.0, 96), np.random.default_rng(5)
    shifted = features + 0.9 * deviations * np.sign(random.normal(size=96))
    of_photos = fit_ood_detector(features, classes)
    of_small_images = fit_ood_detector(features, classes, small_images=True)
    assert of_photos is not None
    assert of_small_images is not None
    assert of_small_images.distance is None
    assert (of_photos.scores(shifted) > 1).mean() > 0.5
    assert (of_small_images.scores(shifted) > 1).mean() < 0.2
    unknown = features.mean(axis=0) + deviations * random.normal(size=features.shape)
    assert (of_small_images.scores(unknown) > 1).mean() > 0.9


def test_probabilities_of_classes_that_a_taught_task_lacks_are_not_certain():
    features, classes = features_of([20] * 8, apart=1.5, width=48)
    seen = classes < 4
    detector = fit_ood_detector(features[seen], classes[seen], soft=True)
    assert detector is not None
    scorer = OodScorer.of(detector, torch.device("cpu"))
    own, other = (
        np.mean([scorer.uniform_share(score) for score in detector.scores(features[of])])
        for of in (seen, ~seen)
    )
    assert own < 0.02
    assert other > 0.4
    assert scorer.uniform_share(100.0) < 0.8  # the best class stays visible


@pytest.mark.parametrize("counts", [[3, 3], [1] * 20], ids=str)
def test_too_few_photos_tell_nothing(counts):
    assert fit_ood_detector(*features_of(counts)) is None


def test_identical_images_are_in_distribution():
    features = np.full((12, 24), 1.5)
    detector = fit_ood_detector(features, np.arange(12) % 2)
    assert detector is not None
    assert (detector.scores(features) <= 1).all()
    assert (detector.scores(features + 1) > 1).all()


@pytest.mark.parametrize("memory", [-1, 0, 2], ids=["head", "class token", "memory"])
@pytest.mark.parametrize("warm", [False, True], ids=["cold", "warm"])
def test_a_pass_tells_by_the_backbones_class_token(backbone_of, memory, warm):
    backbone = backbone_of("vit")
    generator = torch.Generator().manual_seed(memory + 1)
    pixels = torch.rand(3, 3, *backbone.image_size, generator=generator)
    contexts = encode(backbone, pixels)
    tokens = contexts.readout[:, : backbone.width].double().numpy()
    middle = tokens[:1].astype(np.float16)
    region = OodDetector(middle, np.zeros((1, backbone.width), np.float16), 1.0)
    distances = region.scores(tokens)
    weights = TaskWeights.from_bundle(make_bundle(backbone, 1, memory=memory, golden=False))
    # Between the second and the third of them.
    detector = dataclasses.replace(region, distance=float(np.sort(distances)[1:].mean()))
    task = prepare(backbone, dataclasses.replace(weights, ood=detector))
    other = prepare(backbone, weights)
    with torch.no_grad():
        result = masked_pass(
            backbone,
            None if warm else pixels,
            contexts if warm else None,
            [[task, other]] * 3,
            StackCache(),
        )
    answers = {each.task: each.ood_scores for each in result.logits}
    assert answers[task].tolist() == pytest.approx(distances / detector.distance, rel=0.01)
    assert (answers[task] <= 1).sum() == 2
    assert answers[other] is None
