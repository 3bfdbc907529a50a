"""A standard generator makes a client of the OpenAPI documents that compiles and predicts."""

import contextlib
import json
import shutil

import httpx
import pytest
from engram_server.api.routes.predict import EXAMPLE_ANSWER

from tests.api.test_docs import shape
from tests.conftest import PHOTOS
from tests.e2e.browser import DESKTOP, WAIT_MS
from tests.e2e.typescript import GENERATED, TSC, package, run_node


@pytest.fixture(scope="module")
def server(embedded_server):
    return embedded_server


@pytest.mark.parametrize("document", ["openapi.json", "openapi-3.0.json"])
def test_a_generated_client_predicts(server, tmp_path, document):
    generator = package("@hey-api/openapi-ts/bin/run.js", of=GENERATED)
    for name in ("program.ts", "declarations.d.ts", "tsconfig.json", "package.json"):
        shutil.copy(GENERATED / name, tmp_path)
    (tmp_path / document).write_bytes(httpx.get(f"{server.url}/{document}").content)
    run_node(generator, "-i", document, "-o", "client", folder=tmp_path)
    run_node(package(TSC), "--project", tmp_path, folder=tmp_path)
    program = tmp_path / "dist" / "program.js"
    printed = json.loads(run_node(program, server.url, PHOTOS / "cat.jpg", folder=tmp_path))
    assert printed["etag"].startswith('"')
    assert printed | {"etag": None} == {
        "label": "cat",
        "known": 1,
        "suggested": "cifar10",
        "status": 404,
        "tasks": ["flowers"],
        "etag": None,
        "classes": 10,
    }


def test_the_example_of_the_document_works_on_a_new_server(server):
    document = httpx.get(f"{server.url}/openapi.json").json()
    operation = document["paths"]["/predict"]["post"]
    first = next(iter(operation["requestBody"]["content"]))
    assert first == "application/json"  # what Swagger UI offers first
    example = operation["requestBody"]["content"][first]["example"]
    query = {
        parameter["name"]: value
        for parameter in operation["parameters"]
        for value in parameter["schema"].get("examples", ())[:1]
    }
    answer = httpx.post(f"{server.url}/predict", params=query, json=example)
    assert answer.status_code == 200, answer.text
    assert shape(answer.json()) == shape(EXAMPLE_ANSWER)


def test_the_first_try_it_out_is_answered(server, browser):
    with contextlib.closing(browser.new_context(**DESKTOP)) as context:
        page = context.new_page()
        page.set_default_timeout(WAIT_MS)
        page.goto(f"{server.url}/docs")
        predict = page.locator("#operations-predict-predict")
        predict.locator(".opblock-summary-control").click()
        predict.locator(".try-out__btn").click()
        with page.expect_response(lambda response: "/predict" in response.url) as answered:
            predict.locator(".execute").click()
        assert answered.value.status == 200, answered.value.text()
        assert answered.value.json()["images"][0]["tasks"]["cifar10"]["predictions"]
