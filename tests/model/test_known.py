"""What a task knows: near what it was made of, and nothing else."""

import dataclasses
import math

import numpy as np
import pytest
import torch

from server.model.closed_form import Clouds
from server.model.known import OWN_UNKNOWN, Known, fit_known
from server.model.masked_pass import encode, masked_pass
from server.model.multitask import weights_of
from server.model.tasks import StackCache, prepare
from tests.model.test_closed_form import some
from tests.serving import make_bundle


def features_of(counts: list[int], *, apart: float = 3.0, width: int = 24) -> tuple:
    features = np.stack([one.feature for one in some(counts, width, apart=apart)])
    return features.astype(np.float64), np.repeat(np.arange(len(counts)), counts)


def test_distances_are_those_of_mahalanobis_but_for_a_factor():
    features, classes = features_of([30, 30, 30], width=8)
    known = fit_known(features, classes)
    assert known is not None
    clouds = Clouds.of(features, classes)
    away = (features - clouds.centre)[:, None] - clouds.middles
    inverse = np.linalg.inv(clouds.spread())
    exact = np.einsum("nkd,de,nke->nk", away, inverse, away).min(axis=1)
    ratio = known.distances(features) / exact  # all axes but one are kept
    assert ratio == pytest.approx(ratio.mean(), rel=0.01)


@pytest.mark.parametrize("counts", [[5, 5, 5], [60, 60, 60]], ids=str)
@pytest.mark.parametrize("grouped", [True, False], ids=["by class", "one middle"])
def test_new_photos_of_the_same_kind_are_known_and_others_are_not(counts, grouped):
    features, classes = features_of([count + 200 for count in counts])
    chosen = np.concatenate([np.flatnonzero(classes == k)[:n] for k, n in enumerate(counts)])
    known = fit_known(features[chosen], classes[chosen] if grouped else None)
    assert known is not None
    others = np.delete(features, chosen, axis=0)
    assert (known.distances(others) > known.threshold).mean() < 0.12
    assert (known.distances(others + 12) > known.threshold).all()


def test_about_the_wanted_share_of_its_own_photos_is_unknown():
    features, classes = features_of([400, 400])
    known = fit_known(features[::2], classes[::2])
    assert known is not None
    unknown = (known.distances(features[1::2]) > known.threshold).mean()
    assert unknown == pytest.approx(OWN_UNKNOWN, abs=0.025)


@pytest.mark.parametrize("counts", [[3, 3], [1] * 20], ids=str)
def test_too_few_photos_tell_nothing(counts):
    assert fit_known(*features_of(counts)) is None


def test_photos_that_are_all_the_same_are_known_again():
    features = np.full((12, 24), 1.5)
    known = fit_known(features, np.arange(12) % 2)
    assert known is not None
    assert (known.distances(features) <= known.threshold).all()
    assert (known.distances(features + 1) > known.threshold).all()


@pytest.mark.parametrize("memory", [-1, 0, 2], ids=["head", "class token", "memory"])
@pytest.mark.parametrize("warm", [False, True], ids=["cold", "warm"])
def test_a_pass_tells_by_the_backbones_class_token(backbone_of, memory, warm):
    backbone = backbone_of("vit")
    pixels = torch.rand(3, 3, *backbone.image_size)
    contexts = encode(backbone, pixels)
    tokens = contexts.readout[:, : backbone.width].double().numpy()
    middle = tokens[:1].astype(np.float16)
    region = Known(middle, np.zeros((1, backbone.width), np.float16), math.inf)
    distances = region.distances(tokens)
    weights = weights_of(make_bundle(backbone, 1, memory=memory, golden=False))
    # As far as the second of the three lies, and no further.
    known = dataclasses.replace(region, threshold=float(np.median(distances)) * 1.001)
    task = prepare(backbone, dataclasses.replace(weights, known=known))
    other = prepare(backbone, weights)
    with torch.no_grad():
        result = masked_pass(
            backbone,
            None if warm else pixels,
            contexts if warm else None,
            [[task, other]] * 3,
            StackCache(),
        )
    answers = {each.task: each.known for each in result.logits}
    assert answers[task].tolist() == (distances <= known.threshold).tolist()
    assert sum(answers[task].tolist()) == 2
    assert answers[other] is None
