"""Triton's own gRPC client, as it comes from PyPI, against a real server process.

The behaviour is that of test_tritonclient.py, over gRPC.
"""

import asyncio
import json
import queue

import httpx
import numpy as np
import pytest
import tritonclient.grpc as triton
import tritonclient.grpc.aio as triton_aio
from engram_server.embedded import BACKBONE
from engram_server.model import load_backbone
from tritonclient.utils import InferenceServerException

from tests.conftest import PHOTOS, REPOSITORY
from tests.documents import blocks_of, read_page
from tests.e2e.server_process import free_port, serving
from tests.e2e.test_tritonclient import ADMIN, READER, TASKS, predicted
from tests.e2e.test_tritonclient import pixel_input as http_pixel_input
from tests.serving import make_bundle

PAGE = "how-to/grpc.md"
READER_GRPC = {name.lower(): value for name, value in READER.items()}
ADMIN_GRPC = {name.lower(): value for name, value in ADMIN.items()}


def send_key(request) -> None:
    """What the client calls before each request: one that brings no key gets the reader's."""
    request.headers = {**READER_GRPC, **request.headers}


@pytest.fixture(scope="module")
def port() -> int:
    return free_port()


@pytest.fixture(scope="module")
def server(tmp_path_factory, port):
    # Without a cache, which rounds contexts to half precision: answers can then be compared.
    keys = {"api_key": READER["X-API-Key"], "admin_key": ADMIN["X-API-Key"]}
    folder = tmp_path_factory.mktemp("triton-grpc")
    with serving(folder, cache_bytes=0, grpc_port=port, **keys) as server:
        yield server
        assert server.stop() == 0


@pytest.fixture
def client(server, port):
    with triton.InferenceServerClient(f"127.0.0.1:{port}") as client:
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


def pixel_input(backbone, photos) -> triton.InferInput:
    http = http_pixel_input(backbone, photos)
    values = np.frombuffer(http._get_binary_data(), np.float32).reshape(http.shape())
    return triton.InferInput("pixel_values", http.shape(), "FP32").set_data_from_numpy(values)


def refused(code: str, *words: str):
    pattern = rf"^\[StatusCode.{code}\].*{'.*'.join(words)}"
    return pytest.raises(InferenceServerException, match=pattern)


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
    assert server.name == "engram"
    assert "binary_tensor_data" in server.extensions
    model = client.get_model_metadata("cifar10", as_json=True)
    assert (model["name"], model["versions"]) == ("cifar10", ["1"])
    assert [each["name"] for each in model["inputs"]] == ["image", "pixel_values"]
    assert model["inputs"][1]["shape"] == ["-1", "3", "176", "176"]
    (output,) = model["outputs"]
    assert output == {"name": "scores", "datatype": "FP32", "shape": ["-1", "10"]}
    assert client.get_model_metadata("cifar10", "1", as_json=True) == model
    multitask = client.get_model_metadata("multitask")
    assert {each.name for each in multitask.outputs} >= {*TASKS, "base"}


def test_config_of_a_model(client):
    config = client.get_model_config("flowers").config
    assert (config.platform, config.backend, config.max_batch_size) == ("engram", "engram", 64)
    assert [each.optional for each in config.input] == [True, True]
    assert (config.output[0].name, list(config.output[0].dims)) == ("scores", [102])
    assert client.get_model_config("flowers", "1").config == config


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
    assert (response.model_name, response.model_version, response.id) == ("cifar10", "1", "r1")


def test_pixel_values_are_answered_as_predict_answers_the_files(client, server, photos, embedded):
    scores = client.infer("flowers", [pixel_input(embedded, photos)]).as_numpy("scores")
    for row, photo in zip(scores, photos, strict=True):
        assert row == pytest.approx(predicted(server, photo, "flowers"), abs=1e-5)


def test_classification_gives_the_best_labels(client, server, photos):
    output = triton.InferRequestedOutput("scores", class_count=3)
    found = client.infer("cifar10", [image_input(photos)], outputs=[output]).as_numpy("scores")
    assert found.shape == (3, 3)
    for row, photo in zip(found, photos, strict=True):
        scores = predicted(server, photo, "cifar10")
        for text, index in zip(row, np.argsort(-scores)[:3], strict=True):
            value, number, label = text.decode().split(":")
            assert int(number) == index
            assert float(value) == pytest.approx(scores[index], abs=1e-5)
            assert label


def test_multitask_answers_several_tasks_in_one_request(client, server, photos):
    outputs = [
        triton.InferRequestedOutput("flowers"),
        triton.InferRequestedOutput("cifar10@1"),
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
    assert {each.name for each in result.get_response().outputs} >= {*TASKS, "base"}
    assert result.as_numpy("base").shape == (1, 1000)


@pytest.mark.parametrize("algorithm", ["gzip", "deflate"])
def test_compressed_requests_are_read(client, server, photos, algorithm):
    result = client.infer(
        "cifar10",
        [image_input(photos[:1])],
        model_version="1",
        compression_algorithm=algorithm,
    )
    expected = predicted(server, photos[0], "cifar10")
    assert result.as_numpy("scores")[0] == pytest.approx(expected, abs=1e-5)


def test_concurrent_and_asynchronous_requests(client, server, photos, port):
    results = queue.Queue()

    def done(result, error) -> None:
        results.put(error or result)

    for number, photo in enumerate(photos * 3):
        client.async_infer("cifar10", [image_input([photo])], done, request_id=str(number))
    answers = {}
    for _ in photos * 3:
        result = results.get(timeout=60)
        answers[int(result.get_response().id)] = result.as_numpy("scores")[0]
    for number, photo in enumerate(photos * 3):
        expected = predicted(server, photo, "cifar10")
        assert answers[number] == pytest.approx(expected, abs=1e-5)

    async def ask():
        async with triton_aio.InferenceServerClient(f"127.0.0.1:{port}") as client:
            client.register_plugin(send_key)
            assert await client.is_server_ready()
            return await client.infer("cifar10", [image_input(photos[:1])])

    assert asyncio.run(ask()).as_numpy("scores")[0] == pytest.approx(answers[0], abs=1e-5)


def test_timeout_of_the_client_is_a_deadline(client, photos):
    with refused("DEADLINE_EXCEEDED", "deadline of 0.001 ms"):
        client.infer("cifar10", [image_input(photos)], timeout=1)
    with refused("DEADLINE_EXCEEDED"):
        client.infer("cifar10", [image_input(photos)], client_timeout=0.001)


def test_python_of_the_page_runs(server, port, monkeypatch):
    monkeypatch.chdir(REPOSITORY)
    blocks = [each.content for each in blocks_of(read_page(PAGE)) if each.language == "python"]
    connect = 'client = triton.InferenceServerClient("127.0.0.1:8001")'
    assert connect in blocks[0]
    program = "\n".join(blocks).replace("8001", str(port)).replace("…", READER["X-API-Key"])
    connect = connect.replace("8001", str(port))
    program = program.replace(connect, f"{connect}; client.register_plugin(send_key)")
    space: dict = {"send_key": send_key}
    try:
        exec(compile(program, PAGE, "exec"), space)
    finally:
        space["client"].close()


# --- the repository -------------------------------------------------------------------------------


def test_repository_index_lists_the_models(client):
    listed = {each.name: each for each in client.get_model_repository_index().models}
    assert listed.keys() >= {*TASKS, "base", "multitask"}
    cifar10 = listed["cifar10"]
    assert (cifar10.version, cifar10.state, cifar10.reason) == ("1", "READY", "")


def test_unload_and_load(client, photos):
    def state():
        listed = client.get_model_repository_index().models
        return next(each.state for each in listed if each.name == "cifar100")

    with refused("PERMISSION_DENIED"):
        client.unload_model("cifar100")
    client.unload_model("cifar100", headers=ADMIN_GRPC)
    assert not client.is_model_ready("cifar100")
    assert state() == "UNAVAILABLE"
    with refused("UNAVAILABLE", "cifar100", "unloaded"):
        client.infer("cifar100", [image_input(photos)])
    with refused("UNAVAILABLE", "unloaded"):
        client.get_model_metadata("cifar100")
    assert client.infer("multitask", [image_input(photos[:1])]).as_numpy("cifar100") is None

    client.load_model("cifar100", headers=ADMIN_GRPC)
    assert client.is_model_ready("cifar100")
    assert state() == "READY"
    assert client.infer("cifar100", [image_input(photos)]).as_numpy("scores").shape == (3, 100)


def test_task_with_a_slash_and_two_versions(client, server, photos, embedded):
    url = f"{server.url}/tasks/team/birds"
    for seed in (1, 2):
        bundle = make_bundle(embedded, seed, classes=3 + seed)
        httpx.put(url, content=bundle.to_bytes(), headers=ADMIN).raise_for_status()
    assert list(client.get_model_metadata("team/birds").versions) == ["1", "2"]
    assert client.is_model_ready("team/birds", "1")
    for version, classes in (("", 5), ("1", 4), ("2", 5)):
        result = client.infer("team/birds", [image_input(photos[:1])], version)
        assert result.as_numpy("scores").shape == (1, classes)
        assert result.get_response().model_version == (version or "2")
    client.unload_model("team/birds", headers=ADMIN_GRPC)
    assert not client.is_model_ready("team/birds", "1")
    httpx.delete(url, headers=ADMIN).raise_for_status()


# --- mistakes -------------------------------------------------------------------------------------


def test_mistakes_are_clear_errors(client, photos, embedded):
    good = image_input(photos[:1])
    with refused("NOT_FOUND", "cifar11", "cifar10"):
        client.infer("cifar11", [good])
    with refused("NOT_FOUND", "9"):
        client.infer("cifar10", [good], model_version="9")
    with refused("NOT_FOUND", "cifar11"):
        client.infer("multitask", [good], outputs=[triton.InferRequestedOutput("cifar11")])
    with refused("INVALID_ARGUMENT", "logits", "scores"):
        client.infer("cifar10", [good], outputs=[triton.InferRequestedOutput("logits")])
    with refused("INVALID_ARGUMENT", "either 'image'"):
        client.infer("cifar10", [])
    with refused("INVALID_ARGUMENT", "either 'image'"):
        client.infer("cifar10", [good, pixel_input(embedded, photos[:1])])
    with refused("NOT_FOUND", "nothing"):
        client.get_model_metadata("nothing")
    with refused("NOT_FOUND", "nothing"):
        client.load_model("nothing", headers=ADMIN_GRPC)
    with refused("INVALID_ARGUMENT", "always loaded"):
        client.unload_model("multitask", headers=ADMIN_GRPC)
    with refused("INVALID_ARGUMENT", "publish"):
        client.load_model("cifar10", headers=ADMIN_GRPC, config=json.dumps({}))
    with refused("UNIMPLEMENTED"):
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
    with refused("INVALID_ARGUMENT", words):
        client.infer("cifar10", [tensor])


def test_shared_memory_is_refused(client):
    tensor = triton.InferInput("image", [1], "BYTES")
    tensor.set_shared_memory("region", 100)
    with refused("INVALID_ARGUMENT", "shared memory"):
        client.infer("cifar10", [tensor])
