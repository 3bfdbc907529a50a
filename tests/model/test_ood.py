"""What a task knows: near what it was made of, and nothing else."""

import dataclasses
import math

import numpy as np
import pytest
import torch
from engram_server.model.heads.lda import LdaStatistics
from engram_server.model.heads.ood import FALSE_ALARM_RATE, OodDetector, fit_ood_detector
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
    ratio = detector.distances(features) / exact  # all axes but one are kept
    assert ratio == pytest.approx(ratio.mean(), rel=0.01)


@pytest.mark.parametrize("counts", [[5, 5, 5], [60, 60, 60]], ids=str)
@pytest.mark.parametrize("grouped", [True, False], ids=["by class", "one middle"])
def test_new_images_of_the_same_kind_are_in_distribution_and_others_are_not(counts, grouped):
    features, classes = features_of([count + 200 for count in counts])
    chosen = np.concatenate([np.flatnonzero(classes == k)[:n] for k, n in enumerate(counts)])
    detector = fit_ood_detector(features[chosen], classes[chosen] if grouped else None)
    assert detector is not None
    others = np.delete(features, chosen, axis=0)
    assert (detector.distances(others) > detector.threshold).mean() < 0.12
    assert (detector.distances(others + 12) > detector.threshold).all()


def test_the_false_alarm_rate_is_as_configured():
    features, classes = features_of([400, 400])
    detector = fit_ood_detector(features[::2], classes[::2])
    assert detector is not None
    rejected = (detector.distances(features[1::2]) > detector.threshold).mean()
    assert rejected == pytest.approx(FALSE_ALARM_RATE, abs=0.025)


@pytest.mark.parametrize("counts", [[3, 3], [1] * 20], ids=str)
def test_too_few_photos_tell_nothing(counts):
    assert fit_ood_detector(*features_of(counts)) is None


def test_identical_images_are_in_distribution():
    features = np.full((12, 24), 1.5)
    detector = fit_ood_detector(features, np.arange(12) % 2)
    assert detector is not None
    assert (detector.distances(features) <= detector.threshold).all()
    assert (detector.distances(features + 1) > detector.threshold).all()


@pytest.mark.parametrize("memory", [-1, 0, 2], ids=["head", "class token", "memory"])
@pytest.mark.parametrize("warm", [False, True], ids=["cold", "warm"])
def test_a_pass_tells_by_the_backbones_class_token(backbone_of, memory, warm):
    backbone = backbone_of("vit")
    generator = torch.Generator().manual_seed(memory + 1)
    pixels = torch.rand(3, 3, *backbone.image_size, generator=generator)
    contexts = encode(backbone, pixels)
    tokens = contexts.readout[:, : backbone.width].double().numpy()
    middle = tokens[:1].astype(np.float16)
    region = OodDetector(middle, np.zeros((1, backbone.width), np.float16), math.inf)
    distances = region.distances(tokens)
    weights = TaskWeights.from_bundle(make_bundle(backbone, 1, memory=memory, golden=False))
    # Between the second and the third of them.
    detector = dataclasses.replace(region, threshold=float(np.sort(distances)[1:].mean()))
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
    answers = {each.task: each.in_distribution for each in result.logits}
    assert answers[task].tolist() == (distances <= detector.threshold).tolist()
    assert sum(answers[task].tolist()) == 2
    assert answers[other] is None
