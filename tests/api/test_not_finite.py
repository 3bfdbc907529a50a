"""Tasks with answers that are not finite: rejected when published, an error of the task later."""

import json
import math

import numpy as np
import pytest
from engram_server.api.routes.predict import PredictResult
from engram_server.engine.tasks import loader
from engram_server.errors import TaskMismatch
from engram_store import Retire
from engram_vit.answers import Answers
from engram_vit.replies import images as read_images
from starlette.testclient import TestClient

from tests.api.conftest import assert_problem
from tests.api.test_v2_infer import image_input, post
from tests.api.test_v2_models import assert_error
from tests.bundles import with_tensors
from tests.serving import photo

HUGE = 3e38


def with_weights(bundle, value, **changes):
    """The bundle with nothing but one value in its head, and no golden examples."""
    head = np.full_like(bundle.tensors["head.weight"], value)
    nothing = {"golden.pixels": None, "golden.logits": None}
    return with_tensors(bundle, {"head.weight": head, **nothing, **changes})


@pytest.fixture
def poisonous(world):
    return with_weights(world.bundle(50, classes=3), HUGE)


@pytest.fixture
def sick(world, monkeypatch):
    """A task in service that passed for whatever reason, and has no finite answer."""
    monkeypatch.setattr(loader, "check_finite", lambda logits: None)
    world.store.publish("sick", with_weights(world.bundle(51, classes=3), HUGE))
    world.engine.tasks.sync()
    yield "sick"
    world.store.commit(Retire("sick"))
    world.engine.tasks.sync()


def strict(response):
    """The JSON of an answer; NaN and Infinity are no JSON."""

    def refuse(text):
        raise AssertionError(f"{text} in JSON")

    return json.loads(response.content, parse_constant=refuse)


# Publishing


def test_finite_weights_with_infinite_answers_are_rejected(client, poisonous, fresh):
    response = client.put(f"/tasks/{fresh}", content=poisonous.to_bytes())
    problem = assert_problem(response, 422, "task-mismatch")
    assert "not finite" in problem["detail"]
    assert client.get(f"/tasks/{fresh}").status_code == 404


def test_golden_pictures_of_ones_own_choice_do_not_help(client, world, fresh):
    """Black pictures, for which it answers 0, do not stand for all others."""
    bundle = world.bundle(52, classes=3, memory=-1)
    size = world.backbone.image_size
    golden = {
        "golden.pixels": np.zeros((1, *size, 3), np.uint8),
        "golden.logits": np.zeros((1, 3), np.float32),
    }
    poisonous = with_tensors(with_weights(bundle, HUGE), golden)
    response = client.put(f"/tasks/{fresh}", content=poisonous.to_bytes())
    assert "not finite" in assert_problem(response, 422, "task-mismatch")["detail"]


def test_a_validation_says_so_too(client, poisonous):
    verdict = client.post("/tasks/validate", content=poisonous.to_bytes()).json()
    assert not verdict["valid"]
    assert "not finite" in verdict["problems"][0]


def test_a_bundle_that_another_writer_published_is_not_loaded(client, world, poisonous):
    world.store.publish("smuggled", poisonous)
    world.engine.tasks.sync()
    try:
        state = client.get("/tasks/smuggled").json()
        assert state["status"] == "failed"
        assert "not finite" in state["reason"]
        assert client.post("/predict", content=photo(1)).status_code == 200
    finally:
        world.store.commit(Retire("smuggled"))
        world.engine.tasks.sync()


def test_large_values_of_a_regression_are_no_reason_to_refuse(client, world, fresh):
    """A head that answers in Angstroms, in stars of a galaxy, in nanoseconds since 1970."""
    bundle = with_weights(world.bundle(53, classes=1, task_type="regression"), 1e18)
    response = client.put(f"/tasks/{fresh}", content=bundle.to_bytes())
    assert response.status_code == 201


@pytest.mark.parametrize("value", [2e30, 3e38, -3e38])
def test_absurd_answers_are_rejected_although_finite(value):
    with pytest.raises(TaskMismatch, match="limit of 1e"):
        loader.check_finite(np.array([[1.0, value]], np.float32))


# Serving


@pytest.mark.parametrize("returned", ["scores", "logits", "embedding"])
def test_others_answer_beside_a_task_that_cannot(client, world, sick, returned):
    image = photo(60)
    query = {"return": returned, "explain": "attention", "tasks": f"pets,scene,age,face,{sick}"}
    before = client.post(
        "/predict", params={**query, "tasks": "pets,scene,age,face"}, content=image
    )
    response = client.post("/predict", params=query, content=image)
    assert response.status_code == 200
    document = strict(response)
    PredictResult.model_validate(document)
    tasks = document["images"][0]["tasks"]
    failed = tasks.pop(sick)
    assert set(failed) == {"version", "error"}
    assert failed["version"] >= 1
    assert "not finite" in failed["error"]
    expected = before.json()["images"][0]["tasks"]
    for name, answer in expected.items():
        kind = next(iter(set(answer) - {"version", "attention"}))
        assert np.shape(answer[kind]) == np.shape(tasks[name][kind])


def test_a_request_for_every_ready_task_is_still_answered(client, sick):
    document = strict(client.post("/predict", content=photo(61)))
    tasks = document["images"][0]["tasks"]
    assert "error" in tasks[sick]
    assert all("error" not in answer for name, answer in tasks.items() if name != sick)


def test_the_client_reads_the_error(client, sick):
    document = client.post(f"/predict?tasks=pets,{sick}", content=photo(62)).json()
    (answer,) = Answers(read_images(document, [(0, "cat.jpg")]))
    assert "finite" in answer[sick].error
    assert answer["pets"].error is None
    assert answer[sick].top is None
    rows = [row for row in answer.rows() if row["task"] == sick]
    assert [row["error"] for row in rows] == [answer[sick].error]


def test_it_is_counted_by_task(client, world, sick):
    client.post(f"/predict?tasks={sick}", content=photo(63))
    text = client.get("/metrics").text
    samples = [line for line in text.splitlines() if "answers_not_finite_total{" in line]
    assert any(f'task="{sick}"' in line and float(line.split()[-1]) >= 1 for line in samples)


# The Open Inference Protocol


@pytest.mark.parametrize("binary", [True, False])
def test_a_model_without_a_finite_answer_is_an_error_there(client, sick, binary):
    response = post(
        client,
        image_input(photo(64)),
        url=f"/v2/models/{sick}/infer",
        parameters={"binary_data_output": binary},
    )
    assert_error(response, 422, sick, "image 0", "finite")


def test_a_named_output_without_a_finite_answer_is_an_error_there(client, sick):
    outputs = [{"name": "pets"}, {"name": sick}]
    response = post(
        client, image_input(photo(65)), url="/v2/models/multitask/infer", outputs=outputs
    )
    assert_error(response, 422, sick, "finite")


def test_failed_outputs_that_were_not_requested_are_omitted_and_reported(client, sick):
    response = post(client, image_input(photo(66)), url="/v2/models/multitask/infer")
    assert response.status_code == 200
    document = strict(response)
    assert sick not in {output["name"] for output in document["outputs"]}
    assert {"pets", "scene"} <= {output["name"] for output in document["outputs"]}
    assert "finite" in document["parameters"]["errors"][sick]
    numbers = [value for output in document["outputs"] for value in output["data"]]
    assert all(math.isfinite(value) for value in numbers)


def test_pixel_values_at_the_limit_are_answered_or_rejected_and_never_nan(world):
    """The largest accepted values, in every sign."""
    size = (1, 3, *world.backbone.image_size)
    limit = 10 * world.backbone.preprocessing.largest_value
    with TestClient(world.app()) as client:
        for values in (np.full(size, limit), np.full(size, -limit)):
            tensor = {"name": "pixel_values", "shape": list(size), "datatype": "FP32"}
            tensor["data"] = values.ravel().tolist()
            response = client.post(
                "/v2/models/multitask/infer", content=json.dumps({"inputs": [tensor]})
            )
            assert response.status_code == 200
            strict(response)
