"""Triton's own HTTP client, as it comes from PyPI, against a real server process."""

import asyncio
import json

import httpx
import numpy as np
import pytest
import torch
import tritonclient.http as triton
import tritonclient.http.aio as triton_aio
from engram_server.embedded import BACKBONE
from engram_server.model import load_backbone
from tritonclient.utils import InferenceServerException

from tests.conftest import PHOTOS
from tests.e2e.server_process import serving
from tests.serving import make_bundle

TASKS = ("cifar10", "cifar100", "flowers")
READER, ADMIN = {"X-API-Key": "reader-key"}, {"X-API-Key": "admin-key"}


def send_key(request) -> None:
    """What the client calls before each request: one that brings no key gets the reader's."""
    request.headers = {**READER, **request.headers}


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    # Without a cache, which rounds contexts to half precision: answers can then be compared.
    keys = {"api_key": READER["X-API-Key"], "admin_key": ADMIN["X-API-Key"]}
    with serving(tmp_path_factory.mktemp("triton"), cache_bytes=0, **keys) as server:
        yield server
        assert server.stop() == 0


@pytest.fixture
def client(server):
    with triton.InferenceServerClient(server.url.removeprefix("http://")) as client:
        client.register_plugin(send_key)
        yield client


@pytest.fixture(scope="module")
def photos() -> list[bytes]:
    return [(PHOTOS / f"{name}.jpg").read_bytes() for name in ("rocket", "cat", "coffee")]


@pytest.fixture(scope="module")
def embedded():
    return load_backbone(BACKBONE)


def image_input(photos, shape=None) -> triton.InferInput:
    array = np.array([*photos, None], dtype=np.object_)[:-1].reshape(shape or (len(photos), 1))
    return triton.InferInput("image", list(array.shape), "BYTES").set_data_from_numpy(array)


def pixel_input(backbone, photos, binary=True) -> triton.InferInput:
    decoded = [backbone.preprocessing(photo, max_pixels=10**8) for photo in photos]
    values = backbone.preprocessing.normalise(torch.from_numpy(np.stack(decoded))).numpy()
    tensor = triton.InferInput("pixel_values", list(values.shape), "FP32")
    return tensor.set_data_from_numpy(values, binary_data=binary)


def predicted(server, photo: bytes, task: str) -> np.ndarray:
    """All scores that `/predict` gives, in class order."""
    url = f"{server.url}/predict?tasks={task}&top_k=1000&threshold=0"
    answer = httpx.post(url, content=photo, headers=READER).json()["images"][0]["tasks"][task]
    best = sorted(answer["predictions"], key=lambda each: each["index"])
    return np.array([each["score"] for each in best])


def refused(status: int, *words: str):
    return pytest.raises(InferenceServerException, match=rf"^\[{status}\].*{'.*'.join(words)}")


# --- health and metadata --------------------------------------------------------------------------


def test_server_and_models_are_live_and_ready(client):
    assert client.is_server_live()
    assert client.is_server_ready()
    for name in (*TASKS, "base", "multitask"):
        assert client.is_model_ready(name)
    assert client.is_model_ready("cifar10", "1")
    assert not client.is_model_ready("cifar10", "2")
    assert not client.is_model_ready("nothing")


def test_metadata_of_the_server_and_of_models(client):
    server = client.get_server_metadata()
    assert server["name"] == "engram"
    assert "binary_tensor_data" in server["extensions"]
    model = client.get_model_metadata("cifar10")
    assert (model["name"], model["versions"]) == ("cifar10", ["1"])
    assert [each["name"] for each in model["inputs"]] == ["image", "pixel_values"]
    assert model["inputs"][1]["shape"] == [-1, 3, 176, 176]
    (output,) = model["outputs"]
    assert (output["name"], output["datatype"], output["shape"]) == ("scores", "FP32", [-1, 10])
    assert output["parameters"]["labels"][0] == "airplane"
    assert client.get_model_metadata("cifar10", "1") == model
    multitask = client.get_model_metadata("multitask")
    assert {each["name"] for each in multitask["outputs"]} >= {*TASKS, "base"}


def test_config_of_a_model(client):
    config = client.get_model_config("flowers")
    assert config["max_batch_size"] == 64
    assert config["output"] == [{"name": "scores", "data_type": "TYPE_FP32", "dims": [102]}]
    assert client.get_model_config("flowers", "1") == config


# --- inference ------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(3, 1), (3,)])
def test_image_files_are_answered_as_predict_answers_them(client, server, photos, shape):
    result = client.infer("cifar10", [image_input(photos, shape)], request_id="r1")
    scores = result.as_numpy("scores")
    assert scores.dtype == np.float32
    assert scores.shape == (3, 10)
    for row, photo in zip(scores, photos, strict=True):
        assert row == pytest.approx(predicted(server, photo, "cifar10"), abs=1e-5)
    response = result.get_response()
    assert (response["model_name"], response["model_version"]) == ("cifar10", "1")
    assert response["id"] == "r1"


@pytest.mark.parametrize("binary", [True, False])
def test_pixel_values_are_answered_as_predict_answers_the_files(
    client, server, photos, embedded, binary
):
    photos = photos[: 3 if binary else 1]
    scores = client.infer("flowers", [pixel_input(embedded, photos, binary)]).as_numpy("scores")
    for row, photo in zip(scores, photos, strict=True):
        assert row == pytest.approx(predicted(server, photo, "flowers"), abs=1e-5)


@pytest.mark.parametrize("binary", [True, False])
def test_classification_gives_the_best_labels(client, server, photos, binary):
    metadata = client.get_model_metadata("cifar10")
    labels = metadata["outputs"][0]["parameters"]["labels"]
    output = triton.InferRequestedOutput("scores", class_count=3, binary_data=binary)
    found = client.infer("cifar10", [image_input(photos)], outputs=[output]).as_numpy("scores")
    assert found.shape == (3, 3)
    for row, photo in zip(found, photos, strict=True):
        scores = predicted(server, photo, "cifar10")
        texts = [text.decode() if binary else text for text in row]
        for text, index in zip(texts, np.argsort(-scores)[:3], strict=True):
            value, number, label = text.split(":")
            assert int(number) == index
            assert float(value) == pytest.approx(scores[index], abs=1e-5)
            assert label == labels[index]


def test_multitask_answers_several_tasks_in_one_request(client, server, photos):
    outputs = [
        triton.InferRequestedOutput("flowers"),
        triton.InferRequestedOutput("cifar10@1", binary_data=False),
        triton.InferRequestedOutput("cifar100:default", class_count=2),
        triton.InferRequestedOutput("base"),
    ]
    result = client.infer("multitask", [image_input(photos[:2])], outputs=outputs)
    for row, photo in enumerate(photos[:2]):
        for task, output in (("flowers", "flowers"), ("cifar10", "cifar10@1"), ("base", "base")):
            expected = predicted(server, photo, task)
            assert result.as_numpy(output)[row] == pytest.approx(expected, abs=1e-5)
    assert result.as_numpy("cifar100:default").shape == (2, 2)
    assert result.as_numpy("cifar100") is None


def test_multitask_answers_every_ready_task_by_default(client, photos):
    result = client.infer("multitask", [image_input(photos[:1])])
    assert {each["name"] for each in result.get_response()["outputs"]} >= {*TASKS, "base"}
    assert result.as_numpy("base").shape == (1, 1000)


@pytest.mark.parametrize("algorithm", ["gzip", "deflate"])
def test_compressed_requests_are_read(client, server, photos, algorithm):
    result = client.infer(
        "cifar10",
        [image_input(photos[:1])],
        model_version="1",
        request_compression_algorithm=algorithm,
        response_compression_algorithm=algorithm,
    )
    expected = predicted(server, photos[0], "cifar10")
    assert result.as_numpy("scores")[0] == pytest.approx(expected, abs=1e-5)


def test_concurrent_and_asynchronous_requests(server, photos):
    address = server.url.removeprefix("http://")
    with triton.InferenceServerClient(address, concurrency=4) as client:
        client.register_plugin(send_key)
        requests = [client.async_infer("cifar10", [image_input([photo])]) for photo in photos * 3]
        answers = [each.get_result().as_numpy("scores")[0] for each in requests]
    for row, photo in zip(answers, photos * 3, strict=True):
        assert row == pytest.approx(predicted(server, photo, "cifar10"), abs=1e-5)

    async def ask():
        async with triton_aio.InferenceServerClient(address) as client:
            client.register_plugin(send_key)
            assert await client.is_server_ready()
            return await client.infer("cifar10", [image_input(photos[:1])])

    assert asyncio.run(ask()).as_numpy("scores")[0] == pytest.approx(answers[0], abs=1e-5)


def test_timeout_of_the_client_is_a_deadline(client, photos):
    with refused(504):
        client.infer("cifar10", [image_input(photos)], timeout=1)


# --- the repository -------------------------------------------------------------------------------


def test_repository_index_lists_the_models(client):
    listed = client.get_model_repository_index()
    assert {"name": "cifar10", "version": "1", "state": "READY", "reason": ""} in listed
    assert {each["name"] for each in listed} >= {*TASKS, "base", "multitask"}


def test_unload_and_load(client, server, photos):
    def state():
        listed = client.get_model_repository_index()
        return next(each["state"] for each in listed if each["name"] == "cifar100")

    with refused(403):
        client.unload_model("cifar100")
    client.unload_model("cifar100", headers=ADMIN)
    assert not client.is_model_ready("cifar100")
    assert state() == "UNAVAILABLE"
    with refused(503, "cifar100", "unloaded"):
        client.infer("cifar100", [image_input(photos)])
    with refused(503, "unloaded"):
        client.get_model_metadata("cifar100")
    everything = client.infer("multitask", [image_input(photos[:1])])
    assert everything.as_numpy("cifar100") is None
    url = f"{server.url}/predict?tasks=cifar100"
    assert httpx.post(url, content=photos[0], headers=READER).status_code == 503

    client.load_model("cifar100", headers=ADMIN)
    assert client.is_model_ready("cifar100")
    assert state() == "READY"
    assert client.infer("cifar100", [image_input(photos)]).as_numpy("scores").shape == (3, 100)


def test_task_with_a_slash_and_two_versions(client, server, photos, embedded):
    url = f"{server.url}/tasks/team/birds"
    for seed in (1, 2):
        bundle = make_bundle(embedded, seed, classes=3 + seed)
        httpx.put(url, content=bundle.to_bytes(), headers=ADMIN).raise_for_status()
    assert client.get_model_metadata("team/birds")["versions"] == ["1", "2"]
    assert client.is_model_ready("team/birds", "1")
    for version, classes in (("", 5), ("1", 4), ("2", 5)):
        result = client.infer("team/birds", [image_input(photos[:1])], version)
        assert result.as_numpy("scores").shape == (1, classes)
        assert result.get_response()["model_version"] == (version or "2")
    client.unload_model("team/birds", headers=ADMIN)
    assert not client.is_model_ready("team/birds", "1")
    httpx.delete(url, headers=ADMIN).raise_for_status()


# --- mistakes -------------------------------------------------------------------------------------


def test_mistakes_are_clear_errors(client, photos, embedded):
    good = image_input(photos[:1])
    with refused(404, "cifar11", "cifar10"):
        client.infer("cifar11", [good])
    with refused(404, "9"):
        client.infer("cifar10", [good], model_version="9")
    with refused(404, "cifar11"):
        client.infer("multitask", [good], outputs=[triton.InferRequestedOutput("cifar11")])
    with refused(422, "logits", "scores"):
        client.infer("cifar10", [good], outputs=[triton.InferRequestedOutput("logits")])
    with refused(422, "either 'image'"):
        client.infer("cifar10", [])
    with refused(422, "either 'image'"):
        client.infer("cifar10", [good, pixel_input(embedded, photos[:1])])
    with refused(404, "nothing"):
        client.get_model_metadata("nothing")
    with refused(404, "nothing"):
        client.load_model("nothing", headers=ADMIN)
    with refused(422, "always loaded"):
        client.unload_model("multitask", headers=ADMIN)
    with refused(422, "publish"):
        client.load_model("cifar10", headers=ADMIN, config=json.dumps({}))
    with refused(404):
        client.get_inference_statistics("cifar10")


@pytest.mark.parametrize(
    ("name", "array", "words"),
    [
        ("image", np.array([b"no image"], dtype=np.object_), "looks like text"),
        ("image", np.zeros((1, 3, 176, 176), np.float32), "BYTES"),
        ("pixel_values", np.zeros((1, 3, 176, 176), np.float64), "FP32"),
        ("pixel_values", np.zeros((1, 176, 176, 3), np.float32), "shape"),
        ("pixel_values", np.full((1, 3, 176, 176), np.nan, np.float32), "finite"),
        ("pixel_values", np.full((1, 3, 176, 176), 3e38, np.float32), "outside ±10"),
        ("input__0", np.zeros((1, 3, 176, 176), np.float32), "Unknown input 'input__0'"),
    ],
)
def test_wrong_tensors_are_refused(client, name, array, words):
    datatype = {"O": "BYTES", "f": f"FP{array.dtype.itemsize * 8}"}[array.dtype.kind]
    tensor = triton.InferInput(name, list(array.shape), datatype).set_data_from_numpy(array)
    with refused(422, words):
        client.infer("cifar10", [tensor])


def test_shared_memory_is_refused(client):
    tensor = triton.InferInput("image", [1], "BYTES").set_shared_memory("region", 100)
    with refused(422, "shared memory"):
        client.infer("cifar10", [tensor])
