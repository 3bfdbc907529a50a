"""The API described: the document says what the server answers, and the page shows it."""

import base64
import contextlib
import hashlib
import json
import re
from http import HTTPStatus

import hypothesis
import jsonschema
import openapi_schema_validator
import openapi_spec_validator
import pytest
import schemathesis
from engram_server.api.routes.predict import (
    EXAMPLE_ANSWER,
    EXAMPLE_REQUEST,
    PredictBody,
    PredictResult,
)
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

from scripts import openapi
from tests.api.conftest import assert_problem, running_world
from tests.api.keys import make_key, write_keys


def real_answers(client, world, cat) -> dict:
    """One good answer of each operation that gives JSON, and a problem."""
    canary = world.bundle(900, classes=3, description="Which pet? A second try.")
    publish = client.put("/tasks/pets?alias=canary", content=canary.to_bytes())
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
        "move_alias": [client.put("/tasks/pets/aliases/default", json=label)],
        "roll_back": [client.post("/tasks/pets/rollback")],
        "task_history": [client.get("/tasks/pets/history?limit=2")],
        "list_replicas": [client.get("/replicas")],
        "livez": [client.get("/livez")],
        "readyz": [client.get("/readyz")],
        "server_metadata": [client.get("/v2")],
        "server_ready": [client.get("/v2/health/ready")],
        "model_metadata": [client.get("/v2/models/pets"), client.get("/v2/models/pest")],
        "model_config": [client.get("/v2/models/multitask/config")],
        "repository_index": [client.post("/v2/repository/index")],
    }
    return {
        operation: [(each.status_code, each.json()) for each in responses]
        for operation, responses in answers.items()
    }


def shape(value):
    """The members of an answer, whatever they hold."""
    if isinstance(value, dict):
        return {key: shape(each) for key, each in value.items()}
    if isinstance(value, list):
        return [shape(each) for each in value[:1]]
    return type(value)


@pytest.fixture(scope="module")
def answers(settings, cat):
    with running_world(settings) as world, TestClient(world.app()) as client:
        return real_answers(client, world, cat)


@pytest.fixture(scope="module")
def document(client):
    return client.get("/openapi.json").json()


def operations(document):
    return {
        operation["operationId"]: (path, operation)
        for path, methods in document["paths"].items()
        for operation in methods.values()
    }


def test_schemas_are_what_the_server_answers(answers, document):
    described = operations(document)
    for name, responses in answers.items():
        for status, body in responses:
            (content,) = described[name][1]["responses"][str(status)]["content"].values()
            schema = {**content["schema"], "components": document["components"]}
            jsonschema.Draft202012Validator(schema).validate(body)


def test_examples_of_a_prediction_are_in_the_document(document):
    PredictBody.model_validate(EXAMPLE_REQUEST)
    PredictResult.model_validate(EXAMPLE_ANSWER)
    predict = document["paths"]["/predict"]["post"]
    assert predict["requestBody"]["content"]["application/json"]["example"] == EXAMPLE_REQUEST
    shown = predict["responses"]["200"]["content"]["application/json"]["example"]
    assert shown == EXAMPLE_ANSWER


def test_null_is_in_the_schemas_of_members_that_are_null_in_answers_only(document):
    for _, operation in operations(document).values():
        for parameter in operation.get("parameters", ()):
            assert {"type": "null"} not in parameter["schema"].get("anyOf", ()), parameter
    schemas = document["components"]["schemas"]
    for name in ("PredictBody", "ImageInput", "TeachBody", "ExampleInput", "PromoteBody"):
        assert '"null"' not in json.dumps(schemas[name]), name
    result = schemas["TaskResult"]
    nullable = [name for name, each in result["properties"].items() if "null" in json.dumps(each)]
    assert nullable == result["required"] == ["version"]


def test_the_documents_are_the_same_for_every_server(world, client, tmp_path):
    keys = write_keys(tmp_path / "keys.json", make_key("ann", scopes={"predict": ["secret/*"]}))
    with TestClient(world.app(keys_file=str(keys), max_tasks=2)) as other:
        for path in ("/openapi.json", "/openapi-3.0.json"):
            assert other.get(path).content == client.get(path).content


def test_the_older_document_is_valid_and_has_the_same_operations(client, document):
    older = client.get("/openapi-3.0.json").json()
    assert older["openapi"] == "3.0.3"
    openapi_spec_validator.OpenAPIV30SpecValidator(older).validate()
    assert operations(older).keys() == operations(document).keys()
    text = json.dumps(older)
    assert '"null"' not in text
    assert '"const"' not in text
    result = older["components"]["schemas"]["TaskResult"]["properties"]
    assert result["version"]["type"] == "integer"
    assert result["version"]["nullable"] is True
    assert "nullable" not in result["predictions"]


def test_answers_fit_the_older_document_too(client, answers):
    older = client.get("/openapi-3.0.json").json()
    described = operations(older)
    for name in ("predict", "list_tasks", "describe_task", "publish", "list_versions"):
        for status, body in answers[name]:
            (content,) = described[name][1]["responses"][str(status)]["content"].values()
            schema = {**content["schema"], "components": older["components"]}
            openapi_schema_validator.OAS30Validator(schema).validate(body)


def test_examples_of_members_are_valid(document):
    for schema in document["components"]["schemas"].values():
        for member in schema.get("properties", {}).values():
            for example in member.get("examples", ()):
                resolved = {**member, "components": document["components"]}
                jsonschema.Draft202012Validator(resolved).validate(example)


def test_document_is_valid_and_whole(document):
    schemathesis.openapi.from_dict(document).validate()
    assert "HTTPValidationError" not in json.dumps(document)
    paths = document["paths"]
    assert {"/predict", "/tasks/{task}", "/v2/models/{name}/infer", "/v2/repository/index"} <= set(
        paths
    )


def test_every_error_in_the_document_has_its_schema(document):
    for name, (path, operation) in operations(document).items():
        media = "application/json" if path.startswith("/v2") else "application/problem+json"
        for status, response in operation["responses"].items():
            if int(status) >= HTTPStatus.BAD_REQUEST and name not in ("livez", "readyz"):
                assert list(response["content"]) == [media], name


# --- the page -------------------------------------------------------------------------------------


def test_the_page_loads_nothing_from_elsewhere(client):
    response = client.get("/docs")
    assert response.status_code == 200
    assert response.headers["content-type"].startswith("text/html")
    assert not re.search(r"(src|href)=.?(https?:)?//", response.text)
    assert "https://" not in response.text
    named = re.findall(r'(?:src|href)="([^"]+)"', response.text)
    assert len(named) == 3
    for file in (*named, re.search(r"url: '([^']+)'", response.text)[1]):
        assert client.get(f"/{file}").status_code == 200, file


def test_the_page_allows_its_own_script_and_no_other(client):
    response = client.get("/docs")
    policy = dict(
        part.split(" ", 1) for part in response.headers["content-security-policy"].split("; ")
    )
    assert policy["default-src"] == "'none'"
    (script,) = re.findall(r"<script>(.*?)</script>", response.text, re.DOTALL)
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert policy["script-src"] == f"'self' 'sha256-{digest}'"
    assert policy["connect-src"] == "'self'"


def test_there_are_no_other_pages(client):
    for path in ("/redoc", "/docs/oauth2-redirect", "/docs/../app.py"):
        assert_problem(client.get(path), 404, "not-found")


# --- whatever the document allows, and what it does not -------------------------------------------


@pytest.mark.long
@pytest.mark.parametrize("mode", list(GenerationMode), ids=lambda mode: mode.value)
def test_no_request_makes_the_server_fail(settings, mode):
    # An engine of its own: what is thrown at it changes its tasks.
    with running_world(settings) as world, TestClient(world.app()) as client:
        api = schemathesis.openapi.from_asgi("/openapi.json", client.app)
        operations = [each.ok() for each in api.get_all_operations()]
        described = client.get("/openapi.json").json()["paths"]
        assert {each.path for each in operations} == set(described)
        assert "/v2/models/{name}/infer" in described
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
        case.headers.pop("X-Deadline-Ms", None)  # an impossible deadline is correctly a 504
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

    # Operations without parameters have no invalid input.
    with contextlib.suppress(*[Unsatisfiable] if mode is GenerationMode.NEGATIVE else []):
        check()


def test_images_in_base64_are_what_the_example_shows(client, cat):
    body = {"images": [{"b64": base64.b64encode(cat).decode()}], "tasks": ["age"]}
    assert client.post("/predict", json=body).status_code == 200


def test_the_script_writes_what_a_server_answers(client, tmp_path):
    openapi.write(tmp_path / "site")
    for name in openapi.FILES:
        assert (tmp_path / "site" / name).read_bytes() == client.get(f"/{name}").content
