"""What a client sends decides what it gets, never how long everybody else waits."""

import base64
import gzip
import json
import time
import tracemalloc
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
from engram_bundle import MalformedBundle
from engram_bundle.manifest import Manifest
from engram_bundle.names import MAX_SUGGESTIONS, closest_name
from engram_server.api import bodies
from engram_server.api.dependencies import read_etags
from engram_server.api.inference import Inference, task_bytes
from engram_server.api.routes.predict import PredictBody
from engram_server.api.routes.v2.infer import InferRequest
from engram_server.errors import InvalidRequest, TooManyValues
from pydantic import ValidationError
from starlette.testclient import TestClient

from tests.api.conftest import assert_problem
from tests.serving import photo

JSON = {"Content-Type": "application/json"}


@contextmanager
def quick(seconds: float = 1.5):
    """Far longer than it takes, and far shorter than what each of these took once."""
    started = time.process_time()  # not that of a busy machine
    yield
    assert time.process_time() - started < seconds


# Headers


def test_etags_are_read_in_linear_time():
    with quick():
        assert read_etags('"' + " " * 20_000 + "x") == frozenset()
        assert read_etags("x" + " " * 100_000 + "x") == frozenset()
        assert len(read_etags(",".join(f'"{n}"' for n in range(10_000)))) == 10_000


def test_etags_are_what_they_were():
    assert read_etags(' "a" ,W/"b", "c"') == {'"a"', '"c"'}
    assert read_etags(" * ") == {"*"}
    assert read_etags('"') == read_etags("a") == read_etags("") == frozenset()


def test_a_page_with_a_hostile_condition_is_answered_at_once(client):
    with quick():
        response = client.get("/", headers={"If-None-Match": "x" + " " * 20_000 + "x"})
    assert response.status_code == 200


@pytest.mark.parametrize(
    "accept",
    [
        "application/openmetrics-text; version=x",
        "text/plain; version=x",
        "text/plain; version=1.x.0; escaping=no",
        "application/openmetrics-text; version=" + "9" * 5000,
        ";;;=,,,",
    ],
    ids=lambda accept: accept[:50],
)
def test_metrics_are_returned_for_any_accept_header(client, accept):
    response = client.get("/metrics", headers={"Accept": accept})
    assert response.status_code == 200
    assert "9" * 100 not in response.headers["content-type"]


@pytest.mark.parametrize("path", ["/predict/", "/tasks/", "/v2/", "/livez/"])
def test_no_redirect_goes_to_the_host_that_a_client_names(client, path):
    response = client.get(path, headers={"Host": "evil.example"}, follow_redirects=False)
    assert response.status_code >= 400
    assert "location" not in response.headers


def test_a_query_with_thousands_of_parameters_names_a_few_of_them(client):
    query = "&".join(f"x{number}=1" for number in range(3000))
    document = assert_problem(client.post(f"/predict?{query}"), 422, "invalid-request")
    assert len(document["errors"]) <= 16


# JSON


def wrong_list(count: int) -> bytes:
    return b"[" + b",".join([b"1"] * count) + b"]"


@pytest.mark.parametrize(
    ("model", "body"),
    [
        (PredictBody, b'{"images":' + wrong_list(2000) + b"}"),
        (PredictBody, b'{"images":[{"b64":"AA=="}],"tasks":' + wrong_list(2000) + b"}"),
        (InferRequest, b'{"inputs":' + wrong_list(400_000) + b"}"),
        (InferRequest, b'{"inputs":[],"outputs":' + wrong_list(400_000) + b"}"),
        (
            InferRequest,
            b'{"inputs":[{"name":"a","datatype":"FP32","shape":["x",'
            + wrong_list(400_000)[1:]
            + b"}]}",
        ),
    ],
    ids=["images", "tasks", "inputs", "outputs", "shape"],
)
def test_a_list_of_wrong_values_is_one_error(model, body):
    with pytest.raises(ValidationError) as caught:
        model.model_validate_json(body)
    assert caught.value.error_count() == 1
    with pytest.raises(InvalidRequest):
        bodies.parse_json(body, model, 500_000)


@pytest.mark.parametrize(
    "body",
    [
        wrong_list(500_001),
        b"[" * 100_001,
        b"{" * 100_001,
        b"{" + b",".join(b'"%d":0' % number for number in range(90_000)) + b"}",
        b"[" + b",".join([b"[]"] * 90_000) + b"]",
        b'["' + b"\\n" * 4_000_001 + b'"]',
    ],
    ids=["numbers", "lists in lists", "objects in objects", "members", "empty lists", "escapes"],
)
def test_too_many_values_are_counted_and_not_parsed(body, monkeypatch):
    def parsed(*_):
        raise AssertionError("the body reached the parser")

    monkeypatch.setattr(InferRequest, "model_validate_json", parsed)
    with quick(), pytest.raises(TooManyValues):
        bodies.parse_json(body, InferRequest, 500_000)


def test_four_kilobytes_of_gzip_are_rejected_without_gigabytes(world):
    body = gzip.compress(b'{"inputs":[' + b"1," * 1_000_000 + b"1]}")
    assert len(body) < 5000
    headers = {**JSON, "Content-Encoding": "gzip"}
    with TestClient(world.app(body_bytes=32 * 2**20)) as client:
        tracemalloc.start()
        try:
            response = client.post("/v2/models/pets/infer", content=body, headers=headers)
            peak = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
    assert response.status_code == 422
    assert "binary-data extension" in response.json()["error"]
    assert peak < 64 * 2**20


@pytest.mark.parametrize(
    "path", ["/predict", "/tasks/pets/aliases/default", "/v2/repository/index"]
)
def test_small_requests_have_few_values(client, world, path):
    def refused() -> float:
        labels = {"reason": "json_values"}
        return world.metrics.registry.get_sample_value("engram_rejections_total", labels) or 0.0

    before = refused()
    body = b"{" + b",".join(b'"k%d":1' % number for number in range(5000)) + b"}"
    method = client.put if "aliases" in path else client.post
    response = method(path, content=body, headers=JSON)
    assert response.status_code == 422
    assert "values" in response.text
    assert refused() == before + 1


def test_as_many_images_as_are_allowed_are_few_values(client, cat):
    body = {"images": [{"b64": base64.b64encode(cat).decode()}] * 4, "tasks": ["pets"] * 8}
    assert client.post("/predict", json=body).status_code == 200


@pytest.mark.parametrize("size", [0, 1, 2, 3, 786_432, 1_000_000, 2_000_001])
def test_base64_in_chunks_is_base64(size):
    data = bytes(range(256)) * (size // 256 + 1)
    data = data[:size]
    assert bodies.decode_base64(base64.b64encode(data).decode()) == data


@pytest.mark.parametrize(
    "text", ["QQ==QQ==", "QQ=", "Q", "Q=QQ", "====", "A" * (2**20 - 2) + "==AAAA", "QQ\n=="]
)
def test_invalid_base64_is_invalid_in_chunks_too(text):
    with pytest.raises(ValueError):
        bodies.decode_base64(text)


# Bundles


def manifest(**changes) -> str:
    """A complete manifest with some members replaced."""
    values = {
        "format": 1,
        "task_type": "single_label",
        "backbone": {"name": "b", "fingerprint": "sha256:" + "0" * 64},
        "preprocessing": {
            "resize": 8,
            "resample": "bilinear",
            "crop": None,
            "rescale": 1.0,
            "mean": [0.0, 0.0, 0.0],
            "std": [1.0, 1.0, 1.0],
        },
    }
    return json.dumps(values | changes, separators=(",", ":"))


@pytest.mark.parametrize(
    "changes",
    [
        {"labels": [1] * 500_000},
        {"extends": [1] * 500_000},
        {"metrics": {f"m{number}": "x" for number in range(200_000)}},
        {f"k{number}": 1 for number in range(200_000)},
        {"backbone": {f"k{number}": 1 for number in range(200_000)}},
        {"training": {"x": [1] * 1_000_001}},
    ],
    ids=["labels", "extends", "metrics", "unknown keys", "unknown keys below", "training"],
)
def test_a_manifest_of_wrong_values_is_one_sentence(changes):
    Manifest.from_json(manifest())
    text = manifest(**changes)
    tracemalloc.start()
    try:
        with pytest.raises(MalformedBundle) as caught:
            Manifest.from_json(text)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert len(str(caught.value)) < 400
    assert "more like it" not in str(caught.value)
    assert peak < 32 * len(text) + 2**20


# Names


def test_suggestions_among_thousands_of_tasks_take_milliseconds():
    known = [f"team-{number % 7}/species-{number:05d}" for number in range(5000)]
    with quick():
        for number in range(10):
            assert closest_name(f"team-{number % 7}/spceies-{number:05d}", known) is not None
        assert closest_name("x" * 1000, known) is None


@pytest.mark.parametrize(
    ("typed", "meant"), [("cifr", "cifar"), ("pest", "pets"), ("scenes", "scene"), ("pts", "pets")]
)
def test_slips_of_the_pen_are_understood(typed, meant):
    known = ["age", "cifar", "pets", "scene", *(f"other-{number}" for number in range(1000))]
    assert closest_name(typed, known) == meant


def test_all_unknown_names_are_listed_and_the_first_few_get_suggestions(world):
    names = [f"petz{letter}" for letter in "abcdefghijkl"]
    with TestClient(world.app(max_tasks=20)) as client:
        response = client.post(f"/predict?tasks={','.join(names)}", content=photo(1))
    document = assert_problem(response, 404, "unknown-task")
    assert document["names"] == names
    assert len(document["suggestions"]) == MAX_SUGGESTIONS


# Answers


def test_an_answer_that_would_be_too_large_is_rejected_before_it_is_computed(world, monkeypatch):
    images = [photo(number) for number in range(4)]
    with TestClient(world.app(answer_bytes=1024)) as client:
        small = client.post("/predict?tasks=pets&top_k=1", content=images[0])
        assert small.status_code == 200
        monkeypatch.setattr(world.engine.predictions, "predict", None)  # must not be called
        files = [("image", ("a.png", image, "image/png")) for image in images]
        response = client.post("/predict?tasks=pets,scene&top_k=65536", files=files)
        document = assert_problem(response, 422, "answer-too-large")
        assert "top_k" in document["detail"]
        digest = small.json()["images"][0]["digest"]
        repeated = {"images": [{"digest": digest}] * 4, "return": "logits"}
        assert_problem(client.post("/predict", json=repeated), 422, "answer-too-large")
        assert 'engram_rejections_total{reason="answer_bytes"}' in client.get("/metrics").text
        data = [base64.b64encode(images[0]).decode()] * 4
        tensor = {"name": "image", "datatype": "BYTES", "shape": [4], "data": data}
        response = client.post("/v2/models/multitask/infer", json={"inputs": [tensor]})
        assert response.status_code == 422
        assert "fewer" in response.json()["error"]


@pytest.mark.parametrize(
    ("options", "tasks"),
    [
        ("top_k=65536", "base,pets,scene,age,face"),
        ("return=logits", "base,pets,scene,age,face"),
        ("return=embedding", "base,pets,scene,age,face"),
        ("explain=attention", "base,pets"),
        ("top_k=1", "pets"),
    ],
)
def test_the_size_of_an_answer_is_estimated_well(world, cat, monkeypatch, options, tasks):
    estimated = []

    def note(self, size):
        estimated.append(size)

    monkeypatch.setattr(Inference, "check_answer_size", note)
    with TestClient(world.app()) as client:
        response = client.post(f"/predict?tasks={tasks}&{options}", content=cat)
    assert response.status_code == 200
    assert len(response.content) / 2 < estimated[0] + 200 < 4 * len(response.content) + 200


def test_labels_of_many_predictions_count_by_their_length():
    short, long = (
        SimpleNamespace(task_type="single_label", classes=1000, labels=(label,) * 1000)
        for label in ("a", "a" * 250)
    )
    assert task_bytes(long, 1000) - task_bytes(short, 1000) == 249_000


def test_large_answers_are_written_in_parts_and_are_the_same(world, cat, monkeypatch):
    data = [base64.b64encode(cat).decode()]
    tensor = {"name": "image", "datatype": "BYTES", "shape": [1], "data": data}
    request = {"inputs": [tensor], "outputs": [{"name": "pets"}, {"name": "face"}]}

    def ask() -> list[dict]:
        with TestClient(world.app()) as client:
            predicted = client.post(
                "/predict?tasks=pets,face&explain=attention", content=cat
            ).json()
            inferred = client.post("/v2/models/multitask/infer", json=request).json()
        del predicted["timings_ms"]
        return [predicted, inferred]

    ask()  # from now on the image is cached
    whole = ask()
    monkeypatch.setattr(bodies, "INLINE_BYTES", 0)
    monkeypatch.setattr("engram_server.api.routes.v2.tensors.ENCODED_AT_ONCE", 2)
    assert ask() == whole
