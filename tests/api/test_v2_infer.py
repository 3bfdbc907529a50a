"""`/v2` inference: the same answers as `/predict`, in the protocol's tensors, and every mistake."""

import asyncio
import base64
import gzip
import json
import struct
import zlib

import numpy as np
import pytest
import torch
from engram_server.api.routes.v2.tensors import HEADER_LENGTH
from engram_server.errors import BatchFailed
from starlette.testclient import TestClient

from tests.api.conftest import running_world
from tests.api.test_http import Connection, Endless
from tests.api.test_v2_models import assert_error
from tests.serving import photo

INFER = "/v2/models/pets/infer"


def bytes_tensor(*elements: bytes) -> bytes:
    return b"".join(struct.pack("<I", len(each)) + each for each in elements)


def image_input(*images: bytes, **changes) -> tuple[dict, bytes]:
    raw = bytes_tensor(*images)
    head = {
        "name": "image",
        "shape": [len(images), 1],
        "datatype": "BYTES",
        "parameters": {"binary_data_size": len(raw)},
    }
    return {**head, **changes}, raw


def pixel_input(values: np.ndarray, **changes) -> tuple[dict, bytes]:
    raw = np.asarray(values, dtype="<f4").tobytes()
    head = {
        "name": "pixel_values",
        "shape": list(values.shape),
        "datatype": "FP32",
        "parameters": {"binary_data_size": len(raw)},
    }
    return {**head, **changes}, raw


def post(client, tensor_input, url=INFER, headers=(), **members):
    """An inference request in the binary form: one input, and what else the JSON says."""
    tensor, raw = tensor_input
    head = json.dumps({"inputs": [tensor], **members}).encode()
    return client.post(
        url, content=head + raw, headers={HEADER_LENGTH: str(len(head)), **dict(headers)}
    )


def post_json(client, *inputs, url=INFER, **members):
    return client.post(url, json={"inputs": list(inputs), **members})


def read(response) -> dict:
    """The outputs of an answer by name: numpy arrays, or lists of text."""
    assert response.status_code == 200, response.text
    size = int(response.headers.get(HEADER_LENGTH, len(response.content)))
    document, tail = json.loads(response.content[:size]), response.content[size:]
    found = {}
    for output in document["outputs"]:
        length = output.get("parameters", {}).get("binary_data_size")
        if length is None:
            found[output["name"]] = np.array(output["data"]).reshape(output["shape"])
            continue
        raw, tail = tail[:length], tail[length:]
        if output["datatype"] == "FP32":
            found[output["name"]] = np.frombuffer(raw, "<f4").reshape(output["shape"])
        else:
            texts = []
            while raw:
                (size,) = struct.unpack_from("<I", raw)
                texts.append(raw[4 : 4 + size].decode())
                raw = raw[4 + size :]
            found[output["name"]] = np.array(texts).reshape(output["shape"])
    assert not tail
    return found


def predicted(client, image: bytes, tasks: str) -> dict:
    """What `/predict` says: for each task all its numbers in class order."""
    url = f"/predict?tasks={tasks}&top_k=100&threshold=0"
    answer = client.post(url, content=image).json()["images"][0]["tasks"]

    def numbers(task):
        if "predictions" not in task:
            return task.get("values") or task["embedding"]
        return [each["score"] for each in sorted(task["predictions"], key=lambda e: e["index"])]

    return {name: np.array(numbers(task)) for name, task in answer.items()}


def prepared(world, *images: bytes) -> np.ndarray:
    """The pixel values the server itself makes of image files."""
    preprocessing = world.backbone.preprocessing
    decoded = [preprocessing(image, max_pixels=10**8) for image in images]
    return preprocessing.normalise(torch.from_numpy(np.stack(decoded))).numpy()


@pytest.fixture(scope="module")
def uncached(settings):
    """A server that computes every answer: half precision in the cache rounds a little."""
    with (
        running_world(settings.model_copy(update={"cache_bytes": 0})) as world,
        TestClient(world.app()) as client,
    ):
        yield client


# --- answers --------------------------------------------------------------------------------------


def test_scores_are_those_of_predict(uncached, cat):
    response = post(uncached, image_input(cat, photo(3)), id="seven")
    scores = read(response)["scores"]
    assert scores.shape == (2, 3)
    for row, image in zip(scores, (cat, photo(3)), strict=True):
        assert row == pytest.approx(predicted(uncached, image, "pets")["pets"], abs=1e-6)
    body = response.json()
    assert (body["model_name"], body["model_version"], body["id"]) == ("pets", "1", "seven")
    assert body["outputs"][0]["parameters"] == {"version": "1"}
    assert response.headers["content-type"] == "application/json"
    assert "forward;dur=" in response.headers["server-timing"]


def test_json_gives_the_very_digits_of_predict(client, cat):
    post(client, image_input(cat))  # from now on both read the same cached context
    expected = predicted(client, cat, "pets")["pets"].tolist()
    assert read(post(client, image_input(cat)))["scores"][0].tolist() == expected


@pytest.mark.parametrize("task", ["base", "pets", "scene", "age", "face"])
def test_every_kind_of_task_is_a_model(uncached, cat, task):
    (expected,) = predicted(uncached, cat, task).values()
    response = post(uncached, image_input(cat), f"/v2/models/{task}/infer")
    assert read(response)["scores"][0] == pytest.approx(expected, abs=1e-6)
    assert ("model_version" in response.json()) == (task != "base")


def test_multitask_answers_the_requested_tasks_in_their_order(client, cat):
    refs = ["scene", "pets@1", "pets:default", "base", "age"]
    outputs = [{"name": ref} for ref in refs]
    response = post(client, image_input(cat), "/v2/models/multitask/infer", outputs=outputs)
    found = read(response)
    assert list(found) == refs
    for ref, expected in predicted(client, cat, ",".join(refs)).items():
        assert found[ref][0] == pytest.approx(expected, abs=1e-6)
    body = response.json()
    assert body["model_name"] == "multitask"
    assert "model_version" not in body
    assert body["outputs"][1]["parameters"] == {"version": "1"}


@pytest.mark.parametrize("outputs", [None, []])
def test_multitask_without_outputs_answers_every_ready_task(client, world, cat, outputs):
    response = post(client, image_input(cat), "/v2/models/multitask/infer", outputs=outputs)
    assert set(read(response)) == set(world.engine.tasks.snapshot.ready_names)


def test_versions_and_aliases_can_be_used_as_models(client, cat):
    for model in ("pets/versions/1", "pets@1", "pets:default"):
        body = post(client, image_input(cat), f"/v2/models/{model}/infer").json()
        assert body["model_version"] == "1"
        assert body["model_name"] == model.partition("/")[0]


def test_pixel_values_go_to_the_backbone_as_they_are(uncached, world, cat):
    images = (cat, photo(5))
    scores = read(post(uncached, pixel_input(prepared(world, *images))))["scores"]
    for row, image in zip(scores, images, strict=True):
        assert row == pytest.approx(predicted(uncached, image, "pets")["pets"], abs=1e-5)


def test_pixel_values_are_cached_by_their_digest(client, world):
    values = prepared(world, photo(31))
    held = len(world.engine.cache)
    first = read(post(client, pixel_input(values)))["scores"]
    again = read(post(client, pixel_input(values)))["scores"]
    assert len(world.engine.cache) == held + 1
    assert again == pytest.approx(first, abs=2e-3)
    # The same bytes as a file are no image, whatever is cached.
    assert_error(post(client, image_input(values.tobytes())), 422)


def test_json_brings_pixel_values_and_base64(client, world, cat):
    text = base64.b64encode(cat).decode()
    for shape, data in ([1], [text]), ([1, 1], [text]), ([1, 1], [[text]]):
        tensor = {"name": "image", "shape": shape, "datatype": "BYTES", "data": data}
        scores = read(post_json(client, tensor))["scores"]
        assert scores[0] == pytest.approx(predicted(client, cat, "pets")["pets"], abs=1e-6)
    values = prepared(world, photo(8))
    expected = read(post(client, pixel_input(values)))["scores"]
    for data in (values.ravel().tolist(), values.tolist()):
        tensor = {
            "name": "pixel_values",
            "shape": list(values.shape),
            "datatype": "FP32",
            "data": data,
        }
        assert read(post_json(client, tensor))["scores"] == pytest.approx(expected, abs=2e-3)


def test_binary_outputs_are_float32_behind_the_json(client, cat):
    outputs = [{"name": "scores", "parameters": {"binary_data": True}}]
    response = post(client, image_input(cat), outputs=outputs)
    assert response.headers["content-type"] == "application/octet-stream"
    scores = read(response)["scores"]
    assert scores.dtype == np.float32
    assert scores[0] == pytest.approx(predicted(client, cat, "pets")["pets"], abs=1e-6)


def test_output_says_for_itself_what_the_request_says_for_all(client, cat):
    outputs = [{"name": "pets"}, {"name": "scene", "parameters": {"binary_data": False}}]
    url = "/v2/models/multitask/infer"
    parameters = {"binary_data_output": True}
    response = post(client, image_input(cat), url, outputs=outputs, parameters=parameters)
    size = int(response.headers[HEADER_LENGTH])
    pets, scene = json.loads(response.content[:size])["outputs"]
    assert pets["parameters"]["binary_data_size"] == 12
    assert "data" not in pets
    assert len(scene["data"]) == 3
    assert "binary_data_size" not in scene["parameters"]


@pytest.mark.parametrize("binary", [True, False])
@pytest.mark.parametrize(("count", "expected_count"), [(2, 2), (3, 3), (50, 3)])
def test_classification_gives_the_best_as_text(client, cat, binary, count, expected_count):
    parameters = {"classification": count, "binary_data": binary}
    outputs = [{"name": "scores", "parameters": parameters}]
    found = read(post(client, image_input(cat, cat), outputs=outputs))["scores"]
    assert found.shape == (2, expected_count)
    answer = client.post(f"/predict?tasks=pets&top_k={count}", content=cat).json()
    expected = answer["images"][0]["tasks"]["pets"]["predictions"]
    for text, best in zip(found[0], expected, strict=True):
        score, index, label = text.split(":")
        assert (int(index), label) == (best["index"], best["label"])
        assert float(score) == pytest.approx(best["score"], abs=1e-6)


def test_classification_of_nothing_is_all_scores(client, cat):
    outputs = [{"name": "scores", "parameters": {"classification": 0}}]
    assert read(post(client, image_input(cat), outputs=outputs))["scores"].shape == (1, 3)


@pytest.mark.parametrize("task", ["age", "face"])
def test_classification_of_a_task_without_labels_is_rejected(client, cat, task):
    outputs = [{"name": "scores", "parameters": {"classification": 1}}]
    response = post(client, image_input(cat), f"/v2/models/{task}/infer", outputs=outputs)
    assert_error(response, 422, "classification")


def test_unknown_members_and_parameters_and_nulls_are_ignored(client, cat):
    tensor, raw = image_input(cat)
    tensor["parameters"] |= {"content_type": "x", "other": 3}
    response = post(
        client,
        (tensor, raw),
        model_name="whatever",
        extra=[1],
        parameters={"sequence_id": 3, "priority": 1, "headers": None},
        outputs=[{"name": "scores", "parameters": None}],
    )
    assert response.status_code == 200, response.text


@pytest.mark.parametrize(
    ("encoding", "compress"), [("gzip", gzip.compress), ("deflate", zlib.compress)]
)
def test_compressed_body_is_unpacked(client, cat, encoding, compress):
    tensor, raw = image_input(cat)
    head = json.dumps({"inputs": [tensor]}).encode()
    headers = {HEADER_LENGTH: str(len(head)), "Content-Encoding": encoding}
    response = client.post(INFER, content=compress(head + raw), headers=headers)
    assert read(response)["scores"].shape == (1, 3)


def test_shapes_are_those_of_the_metadata(client, world):
    metadata = client.get("/v2/models/pets").json()
    shape = [2 if size == -1 else size for size in metadata["inputs"][1]["shape"]]
    scores = read(post(client, pixel_input(np.zeros(shape, np.float32))))["scores"]
    expected = [2 if size == -1 else size for size in metadata["outputs"][0]["shape"]]
    assert list(scores.shape) == expected


# --- what applies to /predict applies here --------------------------------------------------------


def test_full_queue_is_a_429_with_retry_after(world, monkeypatch, cat):
    monkeypatch.setattr(world.engine.predictions._pending, "used", 10_000)
    with TestClient(world.app()) as client:
        response = post(client, image_input(cat))
    assert_error(response, 429, "limit")
    assert int(response.headers["retry-after"]) >= 1


@pytest.mark.parametrize(
    ("headers", "parameters"),
    [({"X-Deadline-Ms": "0.001"}, {}), ({}, {"timeout": 1})],
)
def test_deadline_of_the_header_or_the_protocols_timeout(client, cat, headers, parameters):
    response = post(client, image_input(cat), headers=headers, parameters=parameters)
    assert_error(response, 504)


def test_long_timeout_is_kept(client, cat):
    response = post(client, image_input(cat), parameters={"timeout": 60_000_000})
    assert response.status_code == 200


def test_sooner_of_two_deadlines_counts(client, cat):
    headers = {"X-Deadline-Ms": "60000"}
    response = post(client, image_input(cat), headers=headers, parameters={"timeout": 1})
    assert_error(response, 504)


def test_disconnect_cancels_the_work(world, monkeypatch, cat):
    tensor, raw = image_input(cat)
    head = json.dumps({"inputs": [tensor]}).encode()

    async def scenario():
        endless, connection = Endless(), Connection(head + raw)
        monkeypatch.setattr(world.engine.predictions, "predict", endless)
        length = (HEADER_LENGTH.lower().encode(), str(len(head)).encode())
        scope = {**connection.scope, "path": INFER, "raw_path": INFER.encode()}
        scope["headers"] = [*scope["headers"], length]
        app = world.app()
        serving = asyncio.ensure_future(app(scope, connection.receive, connection.send))
        await endless.begun.wait()
        connection.leaves.set()
        await serving
        assert endless.cancelled.is_set()
        assert scope["state"]["record"].status == 499

    asyncio.run(scenario())


def test_failed_batch_is_a_500_in_the_protocols_words(world, monkeypatch, cat):
    async def failing(*args, **kwargs):
        raise BatchFailed("the model failed on this batch (RuntimeError)")

    monkeypatch.setattr(world.engine.predictions, "predict", failing)
    with TestClient(world.app()) as client:
        assert_error(post(client, image_input(cat)), 500, "batch")


def test_images_and_tasks_are_counted_and_logged(client, cat, caplog):
    def admitted_images():
        text = client.get("/metrics").text
        line = next(x for x in text.splitlines() if x.startswith("engram_images_admitted_total"))
        return float(line.split()[1])

    before = admitted_images()
    outputs = [{"name": "pets"}, {"name": "base"}]
    with caplog.at_level("INFO", logger="engram.access"):
        post(client, image_input(cat, cat), "/v2/models/multitask/infer", outputs=outputs)
    assert admitted_images() == before + 2
    (line,) = [each for each in caplog.records if each.path == "/v2/models/multitask/infer"]
    assert (line.images, line.tasks, line.status) == (2, 2, 200)


def test_too_many_images_or_tasks_are_rejected(client, world, cat):
    assert_error(post(client, image_input(*[cat[:100]] * 5)), 422, "5 images", "4")
    outputs = [{"name": f"pets@{number}"} for number in range(1, 10)]
    response = post(client, image_input(cat), "/v2/models/multitask/infer", outputs=outputs)
    assert_error(response, 422, "9 tasks", "8")


# --- mistakes -------------------------------------------------------------------------------------


def test_unknown_models_and_outputs(client, cat):
    tensor_input = image_input(cat)
    assert_error(post(client, tensor_input, "/v2/models/pest/infer"), 404, "pest", "pets")
    assert_error(post(client, tensor_input, "/v2/models/pets/versions/9/infer"), 404, "9")
    assert_error(post(client, tensor_input, outputs=[{"name": "logits"}]), 422, "logits", "scores")
    outputs = [{"name": "pets"}, {"name": "pest"}]
    response = post(client, tensor_input, "/v2/models/multitask/infer", outputs=outputs)
    assert_error(response, 404, "pest")
    twice = [{"name": "scores"}, {"name": "scores"}]
    assert_error(post(client, tensor_input, outputs=twice), 422, "more than once")


def test_shared_memory_is_rejected_by_name(client, cat):
    tensor = {"name": "image", "shape": [1], "datatype": "BYTES"}
    region = {"shared_memory_region": "r", "shared_memory_byte_size": 5}
    assert_error(post_json(client, {**tensor, "parameters": region}), 422, "shared memory")
    outputs = [{"name": "scores", "parameters": region}]
    assert_error(post(client, image_input(cat), outputs=outputs), 422, "shared memory")


PIXELS = np.zeros((1, 3, 4, 4), dtype=np.float32)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"name": "pixels"}, ["Unknown input 'pixels'", "image", "pixel_values"]),
        ({"datatype": "UINT8"}, ["UINT8", "BYTES"]),
        ({"shape": []}, ["shape", "[N] or [N, 1]"]),
        ({"shape": [1, 2]}, ["[1, 2]", "[N] or [N, 1]"]),
        ({"shape": [1, 1, 1]}, ["[1, 1, 1]"]),
        ({"shape": [0]}, ["no image"]),
        ({"shape": [2]}, ["Element 1", "four bytes"]),
        ({"shape": [2**62]}, ["limit is 4"]),
        ({"shape": [2**64]}, ["shape"]),
        ({"shape": [1] * 9}, ["shape"]),
        ({"shape": [-1]}, ["shape"]),
        ({"shape": ["1"]}, ["shape"]),
        ({"shape": [1.5]}, ["shape"]),
        ({"shape": [True]}, ["shape"]),
        ({"shape": None}, ["shape"]),
        ({"parameters": {"binary_data_size": 10}}, ["bytes follow"]),
        ({"parameters": {"binary_data_size": 10**9}}, ["only", "binary_data_size"]),
        ({"parameters": {"binary_data_size": -1}}, ["binary_data_size"]),
        ({"parameters": {"binary_data_size": "9"}}, ["binary_data_size"]),
        ({"parameters": {}}, ["bytes follow"]),
        ({"parameters": [1]}, ["parameters"]),
        ({"data": ["x"]}, ["both"]),
    ],
)
def test_the_error_names_what_is_wrong_with_an_image_tensor(client, cat, change, words):
    assert_error(post(client, image_input(cat, **change)), 422, *words)


def test_the_error_names_what_is_wrong_with_pixel_values(client, world):
    height, width = world.backbone.image_size
    good = np.zeros((2, 3, height, width), dtype=np.float32)

    def refused(values=good, words=(), **change):
        assert_error(post(client, pixel_input(values, **change)), 422, *words)

    refused(datatype="FP16", words=["FP16", "FP32"])
    refused(datatype="fp32", words=["FP32"])
    refused(PIXELS, words=[f"[N, 3, {height}, {width}]", "[1, 3, 4, 4]"])
    refused(good[0], words=["shape"])
    refused(good.transpose(0, 2, 3, 1), words=["shape"])
    refused(good[:0], words=["no image"])
    refused(shape=[1, 3, height, width], words=["values", "requires"])
    refused(shape=[3, 3, height, width], words=["values", "requires"])
    for bad in (np.nan, np.inf, -np.inf):
        broken = good.copy()
        broken[1, 2, 3, 3] = bad
        refused(broken, words=["finite", "image 1", str(bad)])
    tensor, raw = pixel_input(good)
    tensor["parameters"]["binary_data_size"] = len(raw) - 1
    assert_error(post(client, (tensor, raw[:-1])), 422, "multiple of four")


@pytest.mark.parametrize(
    "data",
    [
        None,
        3,
        "text",
        {},
        [],
        ["1"],
        [True] * 48,
        [[1, 2], [3]],
        [None],
        [1e39] * 48,
        [10**400] * 48,
        [[[[[[[[1]]]]]]]],
        ["x" * 50_000] + [1] * 47,
    ],
)
def test_wrong_json_values_are_rejected(client, world, data):
    shape = [1, 3, *world.backbone.image_size]
    tensor = {"name": "pixel_values", "shape": shape, "datatype": "FP32", "data": data}
    assert_error(post_json(client, tensor), 422, "pixel_values")


@pytest.mark.parametrize("text", ["NaN", "Infinity", "-Infinity"])
def test_json_values_that_are_not_numbers_are_rejected(client, world, text):
    shape = [1, 3, *world.backbone.image_size]
    count = int(np.prod(shape))
    body = json.dumps(
        {"inputs": [{"name": "pixel_values", "shape": shape, "datatype": "FP32", "data": "HERE"}]}
    ).replace('"HERE"', "[" + ",".join([text] * count) + "]")
    response = client.post(INFER, content=body)
    assert response.status_code in (400, 422)
    assert "error" in response.json()


@pytest.mark.parametrize(
    "data", [None, [], ["not base64!"], ["é"], [3], [["AA=="], ["AA=="]], "AA==", [""], [None]]
)
def test_wrong_base64_is_rejected(client, data):
    tensor = {"name": "image", "shape": [1, 1], "datatype": "BYTES", "data": data}
    assert_error(post_json(client, tensor), 422)


@pytest.mark.parametrize("value", [3e38, -3e38, 255.0, -1e3])
def test_pixel_values_without_normalisation_are_rejected(client, world, value):
    good = prepared(world, photo(41))
    wrong = good.copy()
    wrong[0, 1, 2, 3] = value
    response = post(client, pixel_input(np.concatenate([good, wrong])))
    assert_error(response, 422, "Image 1", f"{value:.6g}", "normalise")


def test_pixel_values_somewhat_beyond_black_and_white_are_answered(client, world):
    values = prepared(world, photo(41)) * 3
    assert post(client, pixel_input(values)).status_code == 200


def test_both_inputs_none_or_twice_are_rejected(client, world, cat):
    image, raw = image_input(cat)
    pixels, values = pixel_input(np.zeros((1, 3, *world.backbone.image_size), np.float32))
    for inputs, tail in (([image, pixels], raw + values), ([image, image], raw + raw), ([], b"")):
        head = json.dumps({"inputs": inputs}).encode()
        response = client.post(INFER, content=head + tail, headers={HEADER_LENGTH: str(len(head))})
        assert_error(response, 422, "either 'image'")


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"null", b"\xff\xfe", b'{"inputs": 3}', b"{}"])
def test_a_body_without_a_request_is_rejected(client, body):
    response = client.post(INFER, content=body)
    assert response.status_code in (400, 422)
    assert list(response.json()) == ["error"]


@pytest.mark.parametrize("length", ["", "x", "-1", "99999999", "9" * 5000, "1.5", "²", "0"])
def test_wrong_header_length_is_rejected(client, cat, length):
    tensor, raw = image_input(cat)
    head = json.dumps({"inputs": [tensor]}).encode()
    headers = [(HEADER_LENGTH.encode(), length.encode())]
    assert_error(client.post(INFER, content=head + raw, headers=headers), 400)


def test_an_unreadable_image_is_rejected_as_by_predict(client, cat):
    assert_error(post(client, image_input(b"no image at all")), 422)
    assert_error(post(client, image_input(b"")), 422, "empty")
    assert_error(post(client, image_input(cat, cat[:200])), 422)


@pytest.mark.parametrize("encoding", ["br", "zstd", "gzip, gzip"])
def test_other_encodings_are_rejected(client, cat, encoding):
    response = post(client, image_input(cat), headers={"Content-Encoding": encoding})
    assert_error(response, 415, encoding)


@pytest.mark.parametrize(
    ("body", "status", "word"),
    [
        (gzip.compress(b"{}", mtime=0)[:-3], 400, "truncated"),
        (gzip.compress(b"{}", mtime=0) + b"more", 400, "followed"),
        (b"no gzip", 400, "cannot be decompressed"),
        (b"", 400, "truncated"),
        (gzip.compress(bytes(50_000_000)), 413, "decompressed"),  # the limit is 200,000
    ],
)
def test_wrong_compression_is_rejected(client, body, status, word):
    response = client.post(INFER, content=body, headers={"Content-Encoding": "gzip"})
    assert_error(response, status, word)


def test_body_beyond_the_limit_is_rejected(client):
    assert_error(client.post(INFER, content=bytes(200_001)), 413, "200,000 bytes")
