"""Tensors on the wire: what Triton's own client writes and reads, and whatever else may come."""

import gzip
import json
import zlib

import numpy as np
import pytest
from engram_server.api.routes.v2.tensors import (
    HEADER_LENGTH,
    InputTensor,
    OutputTensor,
    assign_binary,
    decompress,
    read_elements,
    read_floats,
    split_body,
    write_body,
)
from engram_server.errors import BodyTooLarge, MalformedRequest, RequestError
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from tritonclient.http import InferResult
from tritonclient.utils import serialize_byte_tensor

from tests.api.test_v2_infer import INFER, image_input, pixel_input
from tests.serving import photo

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner),
    max_leaves=12,
)
FLOATS = arrays.arrays(
    np.float32,
    arrays.array_shapes(min_dims=1, max_dims=4, max_side=5),
    elements=st.floats(width=32, allow_nan=False, allow_infinity=False),
)


def tensor(**members) -> InputTensor:
    return InputTensor.model_validate({"name": "x", "datatype": "BYTES", **members})


# --- what is written is what is read --------------------------------------------------------------


@given(st.lists(st.binary(max_size=40), min_size=1, max_size=8))
def test_elements_that_tritons_client_writes_are_read(elements):
    written = serialize_byte_tensor(np.array([*elements, None], dtype=np.object_)[:-1]).item()
    input_tensor = tensor(shape=[len(elements), 1])
    assert read_elements(input_tensor, memoryview(written)) == elements


@given(FLOATS)
def test_floats_are_read_as_they_were_in_bytes_and_in_json(values):
    input_tensor = tensor(shape=list(values.shape), datatype="FP32")
    binary = read_floats(input_tensor, memoryview(values.tobytes()))
    np.testing.assert_array_equal(binary, values)
    for data in (values.tolist(), values.ravel().tolist()):
        text = tensor(shape=list(values.shape), datatype="FP32", data=data)
        np.testing.assert_array_equal(read_floats(text, None), values)


@given(
    numbers=arrays.arrays(
        np.float32,
        arrays.array_shapes(min_dims=2, max_dims=2, max_side=6),
        elements=st.floats(width=32, allow_nan=False, allow_infinity=False),
    ),
    texts=st.integers(1, 4).flatmap(
        lambda width: st.lists(st.lists(st.text(), min_size=width, max_size=width), min_size=1)
    ),
    binary=st.tuples(st.booleans(), st.booleans()),
)
def test_outputs_are_what_tritons_client_reads(numbers, texts, binary):
    outputs = [
        OutputTensor("numbers", numbers, binary[0], {"version": "3"}),
        OutputTensor("texts", texts, binary[1], {}),
    ]
    body, head = write_body({"model_name": "m"}, outputs)
    assert (head is not None) == any(binary)
    result = InferResult.from_response_body(body, header_length=head)
    np.testing.assert_allclose(result.as_numpy("numbers"), numbers, rtol=1e-6)
    if binary[0]:
        np.testing.assert_array_equal(result.as_numpy("numbers"), numbers)
    got = result.as_numpy("texts").tolist()
    assert got == ([[text.encode() for text in row] for row in texts] if binary[1] else texts)


@given(st.lists(st.binary(max_size=20), max_size=5), st.binary(max_size=20))
def test_body_is_taken_apart_as_it_was_put_together(parts, head):
    body, rest = split_body(head + b"".join(parts), str(len(head)))
    assert body == head
    inputs = [
        tensor(name=str(number), shape=[], parameters={"binary_data_size": len(part)})
        for number, part in enumerate(parts)
    ]
    found = assign_binary(inputs, rest)
    assert [bytes(found[str(number)]) for number in range(len(parts))] == parts


@given(st.binary(max_size=500))
def test_compressed_bytes_are_unpacked_within_the_limit(data):
    for compress in (gzip.compress, zlib.compress):
        assert decompress(compress(data), len(data)) == data
        if data:
            with pytest.raises(BodyTooLarge):
                decompress(compress(data), len(data) - 1)
            with pytest.raises(MalformedRequest):
                decompress(compress(data)[:-1], len(data))


# --- whatever else comes --------------------------------------------------------------------------


@given(st.binary(max_size=60), st.lists(st.integers(0, 2**63 - 1), max_size=8))
@example(b"\xff\xff\xff\xff", [1])
@example(b"\0\0\0\0" * 10, [10])
@example(b"", [0, 2**62])
def test_any_bytes_are_elements_or_rejected(data, shape):
    try:
        elements = read_elements(tensor(shape=shape), memoryview(data))
    except RequestError:
        return
    assert len(elements) == np.prod(shape, dtype=object)
    assert sum(len(each) + 4 for each in elements) == len(data)


@given(st.binary(max_size=60), st.lists(st.integers(0, 2**63 - 1), max_size=8))
@example(np.array([np.nan], "<f4").tobytes(), [1])
@example(b"", [0])
@example(b"", [0, 351, 382878, 17157823909])
def test_any_bytes_are_finite_floats_or_rejected(data, shape):
    try:
        values = read_floats(tensor(shape=shape, datatype="FP32"), memoryview(data))
    except RequestError:
        return
    assert values.shape == tuple(shape)
    assert np.isfinite(values).all()


@given(JSON, st.lists(st.integers(0, 3), max_size=4), st.sampled_from(["FP32", "BYTES"]))
def test_any_json_is_a_tensor_or_rejected(data, shape, datatype):
    input_tensor = tensor(shape=shape, datatype=datatype, data=data)
    try:
        found = (read_floats if datatype == "FP32" else read_elements)(input_tensor, None)
    except RequestError:
        return
    assert np.size(found) == np.prod(shape)


MUTATION = st.tuples(st.sampled_from(["flip", "cut", "insert"]), st.integers(0, 2**16), st.binary())


def mutated(body: bytes, changes) -> bytes:
    for kind, place, data in changes:
        place %= len(body) + 1
        if kind == "flip":
            body = body[:place] + data + body[place + len(data) :]
        elif kind == "cut":
            body = body[:place]
        else:
            body = body[:place] + data + body[place:]
    return body


def is_no_failure(response) -> None:
    assert response.status_code < 500, response.text
    if response.status_code != 200:
        assert list(response.json()) == ["error"]
        assert response.json()["error"]


@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_no_damage_to_a_request_makes_the_server_fail(client, world, data):
    zeros = np.zeros((1, 3, *world.backbone.image_size), np.float32)
    good = data.draw(st.sampled_from([image_input(photo(1)), pixel_input(zeros)]))
    head = json.dumps({"inputs": [good[0]], "outputs": [{"name": "scores"}]}).encode()
    changes = data.draw(st.lists(MUTATION, min_size=1, max_size=3))
    body = mutated(head + good[1], changes)
    length = len(head) + data.draw(st.sampled_from([0, 0, 0, 1, -1, 7]))
    is_no_failure(client.post(INFER, content=body, headers={HEADER_LENGTH: str(length)}))


def some(*values):
    return st.sampled_from(values) | JSON


INPUT = st.fixed_dictionaries(
    {"name": some("image", "pixel_values"), "datatype": some("BYTES", "FP32")},
    optional={
        "shape": some([1], [1, 1], [1, 3, 32, 32]),
        "data": JSON | st.just(["AAAA"]),
        "parameters": JSON | st.fixed_dictionaries({"binary_data_size": some(0, 8, 2**40)}),
    },
)
OUTPUT = st.fixed_dictionaries(
    {"name": some("scores", "pets", "pets@1", "base")},
    optional={
        "parameters": JSON
        | st.fixed_dictionaries({"classification": some(1, 10**9), "binary_data": some(True)})
    },
)
# None that could pass: running out of time is rightly a 504.
TIMEOUT = st.sampled_from([0, 10**9, -1, True, "1", [1], float("nan")])
REQUEST = st.fixed_dictionaries(
    {"inputs": JSON | st.lists(INPUT, max_size=2)},
    optional={
        "id": some("x"),
        "outputs": JSON | st.lists(OUTPUT, max_size=3),
        "parameters": JSON | st.fixed_dictionaries({"timeout": TIMEOUT}),
    },
)


@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(request=REQUEST | JSON, tail=st.binary(max_size=16), multitask=st.booleans())
def test_no_request_makes_the_server_fail(client, request, tail, multitask):
    head = json.dumps(request).encode()
    url = "/v2/models/multitask/infer" if multitask else INFER
    headers = {HEADER_LENGTH: str(len(head))}
    is_no_failure(client.post(url, content=head + tail, headers=headers))
