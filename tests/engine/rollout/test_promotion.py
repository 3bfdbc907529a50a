"""What evidence must show before a version becomes the default."""

import math

import pytest
from engram_server.engine.rollout.promotion import Criteria, gain_of, plan_promotion
from engram_server.errors import NotEnoughEvidence
from engram_store import MoveAlias, PairEvidence, PreconditionFailed, Publish, open_store

from tests.bundles import bundle


def store_of_two():
    store = open_store("memory://")
    store.commit(Publish("pets", bundle(1)))
    store.commit(Publish("pets", bundle(2), aliases=("shadow",)))
    return store


def plan(pair, **criteria):
    catalog = store_of_two().catalog()
    evidence = [] if pair is None else [pair]
    return plan_promotion(catalog, "pets", "shadow", Criteria(**criteria), evidence)


def pair(**counts):
    return PairEvidence(baseline=1, candidate=2, **counts)


@pytest.mark.parametrize(
    ("evidence", "criteria", "missing"),
    [
        (None, {"min_agreement": 0.9}, "compared on 0 images, and 1 are required"),
        (
            pair(images=1999, agreed=1999),
            {"min_agreement": 0.9, "min_images": 2000},
            "compared on 1,999 images, and 2,000 are required",
        ),
        (
            pair(images=100, agreed=96),
            {"min_agreement": 0.97},
            "agreement is 0.96, and 0.97 is required",
        ),
        (pair(images=100, agreed=100), {"min_gain": 0.01}, "no feedback"),
        (
            pair(both_right=50, only_candidate_right=3),
            {"min_gain": 0.01},
            "must start at 0.01 or higher",
        ),
    ],
)
def test_promotion_names_the_figure_that_is_missing(evidence, criteria, missing):
    with pytest.raises(NotEnoughEvidence, match=missing):
        plan(evidence, **criteria)


def test_promotion_moves_default_and_records_its_evidence():
    move, _ = plan(
        pair(images=2000, agreed=1990, both_right=300, only_candidate_right=40, both_wrong=10),
        min_agreement=0.97,
        min_images=2000,
        min_gain=0.05,
    )
    assert (move.alias, move.version) == ("default", 2)
    assert move.evidence["agreement"] == 0.995
    assert move.evidence["required"]["min_gain"] == 0.05
    assert move.evidence["feedback"]["images"] == 350


def test_of_two_promotions_at_once_one_wins():
    store = store_of_two()
    evidence = [pair(images=10, agreed=10)]
    plans = [
        plan_promotion(store.catalog(), "pets", "shadow", Criteria(min_agreement=0.9), evidence)
        for _ in range(2)
    ]
    store.commit(plans[0][0], condition=plans[0][1])
    with pytest.raises(PreconditionFailed, match="by now 'default' is version 2"):
        store.commit(plans[1][0], condition=plans[1][1])
    assert [entry.event.kind for entry in store.history("pets")] == ["alias", "publish", "publish"]


def test_evidence_about_other_versions_does_not_count():
    store = store_of_two()
    store.commit(Publish("pets", bundle(3), aliases=("shadow",)))
    with pytest.raises(NotEnoughEvidence, match="compared on 0 images"):
        plan_promotion(
            store.catalog(),
            "pets",
            "shadow",
            Criteria(min_agreement=0.5),
            [pair(images=9, agreed=9)],
        )


def test_default_is_not_promoted_over_itself():
    store = store_of_two()
    store.commit(MoveAlias("pets", "default", 2))
    with pytest.raises(NotEnoughEvidence, match="is the default already"):
        plan_promotion(store.catalog(), "pets", "shadow", Criteria(min_agreement=0), [])


def test_interval_of_the_gain_covers_the_truth_about_as_often_as_it_says():
    """All outcomes of 60 images, of which 10 % get better and 5 % worse."""
    up, down, images = 0.10, 0.05, 60
    covered = 0.0
    for better in range(images + 1):
        for worse in range(images + 1 - better):
            same = images - better - worse
            ways = math.comb(images, better) * math.comb(images - better, worse)
            chance = ways * up**better * down**worse * (1 - up - down) ** same
            gain = gain_of(
                pair(both_right=same, only_candidate_right=better, only_baseline_right=worse)
            )
            covered += chance * (gain.low <= up - down <= gain.high)
    assert 0.94 < covered < 0.99


def test_evidence_in_the_log_survives_reading_it_again(tmp_path):
    store = open_store(tmp_path)
    store.commit(Publish("pets", bundle(1)))
    store.commit(Publish("pets", bundle(2), aliases=("shadow",)))
    move, check = plan_promotion(
        store.catalog(),
        "pets",
        "shadow",
        Criteria(min_agreement=0.9),
        [pair(images=10, agreed=10)],
    )
    store.commit(move, condition=check)
    entry = open_store(tmp_path).history("pets", 1)[0]
    assert entry.event.evidence["images"] == 10
