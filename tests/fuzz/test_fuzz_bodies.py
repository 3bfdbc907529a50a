"""Mutated bodies: the JSON and the forms of `/predict`, and the tensors of `/v2` in both forms."""

import base64
import gzip
import json
import zlib

import numpy as np
import pytest
from engram_server.api.routes.v2.tensors import HEADER_LENGTH

from tests.api.test_v2_infer import bytes_tensor, image_input, pixel_input
from tests.fuzz.conftest import Case, run_cases
from tests.fuzz.mutator import VALUES, Mutator
from tests.serving import photo

pytestmark = [pytest.mark.long, pytest.mark.timeout(3600)]
JSON = {"Content-Type": "application/json"}
IMAGE = photo(1, size=(16, 16))
B64 = base64.b64encode(IMAGE).decode()
PARAMETERS = ("tasks", "top_k", "return", "explain", "labels", "x", "")
# Models, and an output of each.
MODELS = {
    "pets": "scores",
    "multitask": "pets",
    "scene": "scores",
    "face": "scores",
    "pets/versions/1": "scores",
    "pest": "scores",
}


def predict_body() -> dict:
    return {
        "images": [{"b64": B64}, {"b64": B64}],
        "tasks": ["pets", "scene", "age@1", "face:default"],
        "top_k": 2,
        "return": "scores",
    }


def query(mutator: Mutator) -> str:
    if mutator.dice.random() < 0.7:
        return ""
    value = mutator.dice.choice(VALUES).strip('"')[:500]
    safe = "".join(f"%{byte:02x}" for byte in value.encode())
    return f"?{mutator.dice.choice(PARAMETERS)}={safe}"


def form(mutator: Mutator) -> Case:
    parts = [
        b'Content-Disposition: form-data; name="image"; filename="a.png"\r\n\r\n' + IMAGE,
        b'Content-Disposition: form-data; name="tasks"\r\n\r\npets,scene',
        b'Content-Disposition: form-data; name="top_k"\r\n\r\n2',
    ]
    whole = b"".join(b"--edge\r\n" + part + b"\r\n" for part in parts) + b"--edge--\r\n"
    boundary = mutator.dice.choice(("edge", "edge", "edge", "", '"', "é", "e" * 200))
    kind = f"multipart/form-data; boundary={boundary}".encode().decode("latin-1")
    content = mutator.damaged(whole)
    return Case("POST", "/predict", content, {"Content-Type": kind.encode("latin-1")})


def test_mutated_bodies_are_answered_or_refused(send):
    whole = json.dumps(predict_body()).encode()
    assert send(Case("POST", "/predict", whole, JSON)).status_code == 200
    small = {"aliases/default": {"version": 1}, "rollback": {"alias": "default"}}

    def run_one(number: int) -> tuple[int, object]:
        mutator = Mutator(f"body {number}")
        if number % 8 == 1:
            case = form(mutator)
        elif number % 8 == 2:
            name, document = mutator.dice.choice(list(small.items()))
            method = "PUT" if name.startswith("labels") else "POST"
            case = Case(method, f"/tasks/pets/{name}", mutator.damaged_json(document), JSON)
        else:
            body = mutator.damaged_json(predict_body())
            case = Case("POST", f"/predict{query(mutator)}", body, JSON)
        return send(case).status_code, case

    run_cases("bodies", run_one)


def pixels(world) -> np.ndarray:
    height, width = world.backbone.image_size
    return np.random.default_rng(0).standard_normal((2, 3, height, width)).astype(np.float32)


def json_document(mutator: Mutator, model: str, world) -> dict:
    if mutator.dice.random() < 0.5:
        tensor = {"name": "image", "datatype": "BYTES", "shape": [2, 1], "data": [B64, B64]}
    else:
        values = pixels(world)
        data = values.ravel().round(3).tolist() if mutator.dice.random() < 0.5 else values.tolist()
        shape = list(values.shape)
        tensor = {"name": "pixel_values", "datatype": "FP32", "shape": shape, "data": data}
    return with_outputs(mutator, model, tensor)


def with_outputs(mutator: Mutator, model: str, tensor: dict) -> dict:
    output = {"name": MODELS[model], "parameters": {"binary_data": mutator.dice.random() < 0.5}}
    document = {"id": "a", "inputs": [tensor], "parameters": {"binary_data_output": True}}
    return document | ({"outputs": [output]} if mutator.dice.random() < 0.7 else {})


def binary(mutator: Mutator, model: str, world) -> tuple[bytes, dict[str, str]]:
    """The binary form, damaged in its head, its tail, its lengths, or where they meet."""
    values = pixels(world)
    values.flat[mutator.dice.randrange(values.size)] = mutator.dice.choice((3e38, np.nan, 0.0))
    tensor, raw = image_input(IMAGE, IMAGE) if mutator.dice.random() < 0.5 else pixel_input(values)
    how = mutator.dice.randrange(4)
    document = with_outputs(mutator, model, tensor)
    head = mutator.damaged_json(document) if how == 0 else json.dumps(document).encode()
    if how == 1:
        raw = mutator.damaged(raw, [bytes_tensor(IMAGE)])
    length = str(
        len(head) if how != 2 else mutator.dice.choice((0, -1, 10**12, len(head) - 1, "x"))
    )
    whole = head + raw
    return (mutator.damaged(whole) if how == 3 else whole), {HEADER_LENGTH: length}


def test_mutated_tensors_are_answered_or_refused(send, world):
    for model in MODELS:
        whole = json.dumps(json_document(Mutator(model), model, world)).encode()
        answer = send(Case("POST", f"/v2/models/{model}/infer", whole, JSON))
        assert answer.status_code == (404 if model == "pest" else 200), answer.text

    def run_one(number: int) -> tuple[int, object]:
        mutator = Mutator(f"tensor {number}")
        model, headers = mutator.dice.choice(list(MODELS)), dict(JSON)
        if number % 2:
            content, more = binary(mutator, model, world)
            headers |= more
        else:
            content = mutator.damaged_json(json_document(mutator, model, world))
        if number % 8 >= 6:
            packed = gzip.compress(content, 1) if number % 8 == 6 else zlib.compress(content, 1)
            content = mutator.damaged(packed) if mutator.dice.random() < 0.5 else packed
            headers["Content-Encoding"] = "gzip" if number % 8 == 6 else "deflate"
        case = Case("POST", f"/v2/models/{model}/infer", content, headers)
        return send(case).status_code, case

    run_cases("tensors", run_one)
