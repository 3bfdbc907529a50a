"""The OpenAPI document: its examples are real answers, and the API does what it says.

ENGRAM_UPDATE_EXAMPLES=1 writes the examples anew.
"""

import base64
import contextlib
import json
import os
import re
from http import HTTPStatus

import hypothesis
import pytest
import schemathesis
from hypothesis import HealthCheck
from hypothesis.errors import Unsatisfiable
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)
from starlette.testclient import TestClient

from server.api import schemas
from tests.api.conftest import running_world
from tests.conftest import REPOSITORY

EXAMPLES = REPOSITORY / "server" / "api" / "examples.json"


def real_answers(client, world, cat) -> dict:
    """One good answer of each operation that gives JSON, and a problem."""
    canary = world.bundle(900, classes=3, description="Which pet? A second try.")
    publish = client.put("/tasks/pets?label=canary", content=canary.to_bytes())
    url = "/predict?tasks=pets,scene&top_k=2&explain=attention"
    first = client.post(url, content=cat)
    body = {"images": [{"digest": first.json()["images"][0]["digest"]}], "tasks": ["age"]}
    assert client.post("/predict", json=body).status_code == 200
    label = {"version": 2}
    answers = {
        "predict": [first, client.post("/predict?tasks=pest", content=cat)],
        "list_tasks": [client.get("/tasks")],
        "describe_task": [client.get("/tasks/pets"), client.get("/tasks/pest")],
        "list_versions": [client.get("/tasks/pets/versions")],
        "describe_version": [client.get("/tasks/pets/versions/1")],
        "read_manifest": [client.get("/tasks/pets/versions/1/manifest")],
        "publish": [publish],
        "validate_bundle": [client.post("/tasks/validate", content=canary.to_bytes())],
        "move_label": [client.put("/tasks/pets/labels/default", json=label)],
        "roll_back": [client.post("/tasks/pets/rollback")],
        "task_history": [client.get("/tasks/pets/history?limit=2")],
        "livez": [client.get("/livez")],
        "readyz": [client.get("/readyz")],
    }
    found = {
        operation: {"responses": {str(each.status_code): each.json() for each in responses}}
        for operation, responses in answers.items()
    }
    found["predict"]["request"] = {"application/json": body}
    found["move_label"]["request"] = {"application/json": label}
    return found


def shape(value):
    """A value without what differs between machines and moments: hashes, times, digits."""
    if isinstance(value, dict):
        return {key: shape(each) for key, each in value.items()}
    if isinstance(value, list):
        return [shape(each) for each in value]
    if isinstance(value, float):
        return "a number"
    if isinstance(value, str):
        value = re.sub(r"[0-9a-f]{32,64}", "a hash", value)
        return re.sub(r"\d{4}-\d\d-\d\dT[\d:.]+Z", "a time", value)
    return value


@pytest.fixture(scope="module")
def answers(settings, cat):
    with running_world(settings) as world, TestClient(world.app()) as client:
        return real_answers(client, world, cat)


@pytest.fixture(scope="module")
def document(client):
    return client.get("/openapi.json").json()


def test_examples_are_what_the_server_answers(answers):
    if os.environ.get("ENGRAM_UPDATE_EXAMPLES"):
        EXAMPLES.write_text(json.dumps(answers, indent=1, ensure_ascii=False) + "\n")
    kept = json.loads(EXAMPLES.read_text(encoding="utf-8"))
    assert shape(kept) == shape(answers)


def test_scores_of_the_example_are_those_of_the_example_image(answers):
    kept = json.loads(EXAMPLES.read_text(encoding="utf-8"))

    def scores(examples):
        tasks = examples["predict"]["responses"]["200"]["images"][0]["tasks"]
        return [each["score"] for task in tasks.values() for each in task["predictions"]]

    assert scores(kept) == pytest.approx(scores(answers), abs=1e-3)


def test_document_is_valid_and_shows_the_examples(document):
    schemathesis.openapi.from_dict(document).validate()
    predict = document["paths"]["/predict"]["post"]
    example = predict["responses"]["200"]["content"]["application/json"]["example"]
    schemas.PredictResult.model_validate(example)
    assert "example" in predict["requestBody"]["content"]["application/json"]
    assert "HTTPValidationError" not in json.dumps(document)


def test_every_problem_in_the_document_is_a_problem_document(document):
    for operations in document["paths"].values():
        for name, operation in operations.items():
            for status, response in operation["responses"].items():
                if int(status) >= HTTPStatus.BAD_REQUEST and operation["operationId"] != "readyz":
                    assert list(response["content"]) == ["application/problem+json"], name


# --- whatever the document allows, and what it does not -------------------------------------------


@pytest.mark.parametrize("mode", list(GenerationMode), ids=lambda mode: mode.value)
def test_no_request_makes_the_server_fail(settings, mode):
    # An engine of its own: what is thrown at it changes its tasks.
    with running_world(settings) as world, TestClient(world.app()) as client:
        api = schemathesis.openapi.from_asgi("/openapi.json", client.app)
        operations = [each.ok() for each in api.get_all_operations()]
        assert len(operations) > 15
        for operation in operations:
            throw_at(operation, mode)


def throw_at(operation, mode: GenerationMode) -> None:
    @hypothesis.settings(
        max_examples=8,
        database=None,
        derandomize=True,
        suppress_health_check=list(HealthCheck),
    )
    @hypothesis.given(case=operation.as_strategy(generation_mode=mode))
    def check(case):
        case.headers.pop("X-Deadline-Ms", None)  # a deadline nobody can meet is rightly a 504
        response = case.call()
        case.validate_response(
            response,
            checks=[
                not_a_server_error,
                status_code_conformance,
                content_type_conformance,
                response_schema_conformance,
            ],
        )

    # Operations that take nothing can be given nothing wrong.
    with contextlib.suppress(*[Unsatisfiable] if mode is GenerationMode.NEGATIVE else []):
        check()


def test_images_in_base64_are_what_the_example_shows(client, cat):
    body = {"images": [{"b64": base64.b64encode(cat).decode()}], "tasks": ["age"]}
    assert client.post("/predict", json=body).status_code == 200
