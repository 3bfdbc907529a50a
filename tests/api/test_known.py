"""Answers that know their limits: `known`, and `unknown=hide`."""

import dataclasses

import numpy as np
import pytest

from task_store import KnownSpec
from tests.api.test_predict import ask

EVERYTHING, NOTHING = 1e6, 1e-6


@pytest.fixture
def knowing(world, client, fresh):
    """Publishes a task under a fresh name that knows what lies within a distance of nowhere."""

    def publish(threshold: float, **options) -> str:
        made = world.bundle(7, **options)
        width = world.backbone.width
        manifest = made.manifest.model_copy(update={"known": KnownSpec(threshold=threshold)})
        told = dataclasses.replace(
            made,
            manifest=manifest,
            known_means=np.zeros((2, width)),
            known_axes=np.zeros((1, width)),
        )
        response = client.put(f"/tasks/{fresh}", content=told.to_bytes())
        assert response.status_code == 201, response.text
        return fresh

    return publish


@pytest.mark.parametrize(("threshold", "known"), [(EVERYTHING, True), (NOTHING, False)])
@pytest.mark.parametrize("memory", [-1, 2], ids=["head", "memory"])
def test_answers_say_whether_the_task_knows_the_image(
    client, cat, knowing, threshold, known, memory
):
    task = knowing(threshold, memory=memory)
    for _ in ("as it came", "from the cache"):
        answer = ask(client, cat, f"?tasks={task},pets")["images"][0]["tasks"]
        assert answer[task]["known"] is known
        assert len(answer[task]["predictions"]) == 5
        assert "known" not in answer["pets"], "its bundle does not tell"


def test_predictions_of_what_is_unknown_can_be_hidden(client, cat, knowing):
    task = knowing(NOTHING)
    answer = ask(client, cat, f"?tasks={task}&unknown=hide")["images"][0]["tasks"][task]
    assert (answer["known"], answer["predictions"]) == (False, [])
    logits = ask(client, cat, f"?tasks={task}&unknown=hide&return=logits")
    assert len(logits["images"][0]["tasks"][task]["logits"]) == 5


def test_predictions_of_what_is_known_are_never_hidden(client, cat, knowing):
    task = knowing(EVERYTHING)
    answer = ask(client, cat, f"?tasks={task},pets&unknown=hide")["images"][0]["tasks"]
    assert len(answer[task]["predictions"]) == 5
    assert len(answer["pets"]["predictions"]) == 3


def test_numbers_have_a_known_too(client, cat, knowing):
    task = knowing(NOTHING, problem="regression", classes=1)
    answer = ask(client, cat, f"?tasks={task}&unknown=hide")["images"][0]["tasks"][task]
    assert answer["known"] is False
    assert len(answer["values"]) == 1
