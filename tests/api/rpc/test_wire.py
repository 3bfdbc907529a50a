"""Payloads are separated from requests exactly as protobuf reads them."""

import numpy as np
import pytest
from engram_server.api.rpc import wire
from engram_server.api.rpc.protocol import message
from engram_server.errors import InvalidRequest, MalformedRequest
from google.protobuf.message import DecodeError
from hypothesis import given, settings
from hypothesis import strategies as st

NAMES = st.text(max_size=8)
SHAPES = st.lists(st.integers(-(2**63), 2**63 - 1), max_size=4)


@st.composite
def requests(draw):
    request = message("ModelInferRequest")(model_name=draw(NAMES), id=draw(NAMES))
    for _ in range(draw(st.integers(0, 3))):
        tensor = request.inputs.add(name=draw(NAMES), datatype="BYTES", shape=draw(SHAPES))
        tensor.parameters[draw(NAMES)].int64_param = draw(st.integers(-5, 5))
        tensor.contents.bytes_contents.extend(draw(st.lists(st.binary(max_size=300), max_size=3)))
    for _ in range(draw(st.integers(0, 3))):
        request.outputs.add(name=draw(NAMES)).parameters[draw(NAMES)].bool_param = True
    request.raw_input_contents.extend(draw(st.lists(st.binary(max_size=300), max_size=3)))
    return request


@given(requests())
def test_head_and_payloads_are_the_request(request):
    found = wire.split_request(request.SerializeToString())
    assert [bytes(each) for each in found.raw] == list(request.raw_input_contents)
    head = message("ModelInferRequest").FromString(found.head)
    for tensor, sent, parts in zip(head.inputs, request.inputs, found.contents, strict=True):
        assert not tensor.HasField("contents")
        joined = wire.join_contents(sent.name, "BYTES", parts)
        assert bytes(joined) == b"".join(
            len(each).to_bytes(4, "little") + each for each in sent.contents.bytes_contents
        )
        tensor.contents.CopyFrom(sent.contents)
    head.raw_input_contents.extend(request.raw_input_contents)
    assert head == request


@settings(max_examples=300)
@given(requests(), st.data())
def test_damaged_requests_are_rejected_as_protobuf_rejects_them(request, data):
    damaged = bytearray(request.SerializeToString())
    for _ in range(data.draw(st.integers(1, 3))):
        if damaged:
            damaged[data.draw(st.integers(0, len(damaged) - 1))] = data.draw(st.integers(0, 255))
    try:
        found = wire.split_request(bytes(damaged))
        head = message("ModelInferRequest").FromString(found.head)
    except (MalformedRequest, InvalidRequest, DecodeError):
        return
    assert len(head.inputs) == len(found.contents)


def test_floats_are_read_packed_and_not():
    values = np.arange(5, dtype="<f4")
    packed = message("InferTensorContents")(fp32_contents=values).SerializeToString()
    single = b"".join(b"\x35" + value.tobytes() for value in values)
    for contents in (packed, single):
        joined = wire.join_contents("x", "FP32", [memoryview(contents)])
        assert np.array_equal(np.frombuffer(joined, "<f4"), values)


@pytest.mark.parametrize(
    "data",
    [
        b"\x32\x00" * 1_000_000,  # outputs without a name
        b"\x2a\x00" * 1_000_000,  # inputs without a name
        b"\x0a\xa0\x8d\x06" + b"x" * 100_000 + b"\x1a\xc0\x9a\x0c" + b"x" * 200_000,
        b"\x2a\xa0\x8d\x06" + b"\x18\x01" * 50_000,  # a shape, one value at a time
    ],
)
def test_what_protobuf_would_expand_is_limited(data):
    with pytest.raises(InvalidRequest, match="more than"):
        wire.split_request(data)


def test_a_shape_of_many_numbers_is_limited():
    request = message("ModelInferRequest")()
    request.inputs.add(name="x", datatype="BYTES", shape=[1] * 1_000_000)
    with pytest.raises(InvalidRequest, match="more than"):
        wire.split_request(request.SerializeToString())
