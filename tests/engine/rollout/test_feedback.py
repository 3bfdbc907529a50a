"""Feedback scores every version that saw an image."""

import asyncio

import numpy as np
from engram_server.engine.rollout.comparison import Answers
from engram_server.engine.rollout.promotion import gain_of
from engram_server.engine.rollout.recent import RecentAnswers
from engram_server.engine.types import TaskVersion
from engram_store import RemoveAlias

from tests.engine.rollout.conftest import ask_each, pets_store
from tests.serving import photo, predict

LABELS = ("cat", "dog")
ONE, TWO = (TaskVersion("pets", version, "single_label", LABELS) for version in (1, 2))


def answers_of(by, *tops):
    return Answers(by, np.arange(len(tops)), np.eye(2, dtype=np.float32)[list(tops)])


def ask(engine, photos, until):
    return [image.digest for image in ask_each(engine, photos, until)]


def test_every_version_that_saw_an_image_is_scored(backbone, running, until):
    with running(backbone, pets_store(backbone)) as engine:
        digests = ask(engine, [photo(seed) for seed in range(12)], until)
        differing = engine.rollouts.disagreements("pets", (1, 2))
        feedback = {one.digest: one.candidate for one in differing}  # the shadow is right
        outcome = engine.rollouts.score("pets", feedback.items())
        assert (outcome.scored, outcome.unknown) == (len(differing), 0)
        again = engine.rollouts.score("pets", [*feedback.items(), ("sha256:unseen", "label0")])
        assert (again.scored, again.repeated, again.unknown) == (0, len(differing), 1)
        (pair,) = engine.rollouts.evidence("pets")
    assert set(feedback) <= set(digests)
    assert pair.only_candidate_right == len(differing) > 0
    gain = gain_of(pair)
    assert (gain.baseline_accuracy, gain.candidate_accuracy) == (0, 1)


def test_forgotten_image_cannot_be_scored(backbone, running, until):
    with running(backbone, pets_store(backbone)) as engine:
        digests = ask(engine, [photo(seed) for seed in range(12)], until)
        engine.rollouts.forget("pets", digests)
        assert engine.rollouts.disagreements("pets", (1, 2)) == []
        outcome = engine.rollouts.score("pets", [(digest, "label0") for digest in digests])
        assert (outcome.scored, outcome.unknown) == (0, 12)


def test_image_answered_before_there_was_a_shadow_scores_the_default_alone(backbone, running):
    store = pets_store(backbone)
    store.commit(RemoveAlias("pets", "shadow"))
    with running(backbone, store) as engine:
        answer = asyncio.run(predict(engine, [photo(1)], ["pets"]))
        digest = answer.images[0].digest
        while not (outcome := engine.rollouts.score("pets", [(digest, "label0")])).scored:
            assert outcome.unknown  # the worker reports after it has answered
        assert engine.rollouts.evidence("pets") == []


def test_recent_answers_are_bounded_and_drop_the_oldest():
    recent = RecentAnswers(max_images=4, max_answers=100)
    for number in range(5):
        recent.add([f"a{number}", f"b{number}"], [answers_of(ONE, 0, 1)])
    assert recent.answers("pets", "a2") == {}
    assert recent.answers("pets", "b4") == {ONE: "dog"}
    recent = RecentAnswers(max_images=100, max_answers=4)
    for number in range(5):
        recent.add([f"a{number}", f"b{number}"], [answers_of(ONE, 0, 1), answers_of(TWO, 1, 1)])
    assert recent.answers("pets", "a3") == {}
    assert recent.answers("pets", "a4") == {ONE: "cat", TWO: "dog"}


def test_image_requested_again_and_again_displaces_no_other():
    recent = RecentAnswers(max_images=40, max_answers=1000)
    recent.add(["other"], [answers_of(ONE, 1)])
    for _ in range(30):
        recent.add(["hot"] * 100, [answers_of(ONE, *[0] * 100)])
    assert recent.answers("pets", "other") == {ONE: "dog"}
    assert recent.answers("pets", "hot") == {ONE: "cat"}
    assert recent._answers == 31


def test_erasing_a_task_leaves_no_digest_behind():
    recent = RecentAnswers()
    recent.add(["a", "b"], [answers_of(ONE, 0, 1)])
    recent.forget("pets", ["a"])
    assert recent.answers("pets", "a") == {}
    assert recent.answers("pets", "b") == {ONE: "dog"}
    recent.forget("pets")
    assert not recent._found
    assert not recent._batches
