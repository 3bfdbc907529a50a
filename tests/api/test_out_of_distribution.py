"""Answers that know their limits: `known`, and `unknown=hide`."""

import base64

import numpy as np
import pytest
from engram_bundle import OodSpec

from tests.api.test_predict import ask
from tests.bundles import with_tensors

EVERYTHING, NOTHING = 1e6, 1e-6


@pytest.fixture
def knowing(world, client, fresh):
    """Publishes a task under a fresh name that knows what lies within a distance of nowhere."""

    def publish(threshold: float, **options) -> str:
        made = world.bundle(7, **options)
        width = world.backbone.width
        manifest = made.manifest.model_copy(update={"ood": OodSpec(threshold=threshold)})
        tensors = {"ood.means": np.zeros((2, width)), "ood.axes": np.zeros((1, width))}
        bundle = with_tensors(made, tensors, manifest)
        response = client.put(f"/tasks/{fresh}", content=bundle.to_bytes())
        assert response.status_code == 201, response.text
        return fresh

    return publish


@pytest.mark.parametrize(("threshold", "known"), [(EVERYTHING, True), (NOTHING, False)])
@pytest.mark.parametrize("memory", [-1, 2], ids=["head", "memory"])
def test_answers_say_whether_the_image_is_in_distribution(
    client, cat, knowing, threshold, known, memory
):
    task = knowing(threshold, memory=memory)
    for _ in ("as it came", "from the cache"):
        answer = ask(client, cat, f"?tasks={task},pets")["images"][0]["tasks"]
        assert answer[task]["in_distribution"] is known
        assert len(answer[task]["predictions"]) == 5
        assert "in_distribution" not in answer["pets"], "its bundle does not tell"


def test_predictions_for_out_of_distribution_images_can_be_hidden(client, cat, knowing):
    task = knowing(NOTHING)
    answer = ask(client, cat, f"?tasks={task}&unknown=hide")["images"][0]["tasks"][task]
    assert (answer["in_distribution"], answer["predictions"]) == (False, [])
    logits = ask(client, cat, f"?tasks={task}&unknown=hide&return=logits")
    assert len(logits["images"][0]["tasks"][task]["logits"]) == 5


def test_predictions_for_in_distribution_images_are_never_hidden(client, cat, knowing):
    task = knowing(EVERYTHING)
    answer = ask(client, cat, f"?tasks={task},pets&unknown=hide")["images"][0]["tasks"]
    assert len(answer[task]["predictions"]) == 5
    assert len(answer["pets"]["predictions"]) == 3


@pytest.mark.parametrize(("threshold", "known"), [(EVERYTHING, True), (NOTHING, False)])
def test_the_protocol_has_in_distribution_for_each_image(client, cat, knowing, threshold, known):
    task = knowing(threshold)
    image = {"name": "image", "datatype": "BYTES", "shape": [2]}
    image["data"] = [base64.b64encode(cat).decode()] * 2
    body = {"inputs": [image], "outputs": [{"name": task}, {"name": "pets"}]}
    outputs = client.post("/v2/models/multitask/infer", json=body).json()["outputs"]
    parameters = {each["name"]: each["parameters"] for each in outputs}
    assert parameters[task]["in_distribution"] == [known, known]
    assert "in_distribution" not in parameters["pets"], "its bundle does not tell"


def test_logits_have_in_distribution_too(client, cat, knowing):
    task = knowing(NOTHING, task_type="regression", classes=1)
    answer = ask(client, cat, f"?tasks={task}&unknown=hide")["images"][0]["tasks"][task]
    assert answer["in_distribution"] is False
    assert len(answer["values"]) == 1
