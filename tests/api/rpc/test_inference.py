"""gRPC gives the answers of `/v2`, and the same mistakes the same messages."""

import json

import grpc
import numpy as np
import pytest
from engram_server.api.rpc.protocol import message

from tests.api.rpc.service import infer_request, serving_grpc
from tests.api.test_v2_infer import image_input, pixel_input, post
from tests.serving import photo


@pytest.fixture(scope="module")
def service(world):
    with serving_grpc(world) as service:
        yield service


def scores(response, output: int = 0) -> np.ndarray:
    tensor = response.outputs[output]
    if response.raw_output_contents:
        flat = np.frombuffer(response.raw_output_contents[output], dtype="<f4")
    else:
        flat = np.array(tensor.contents.fp32_contents, dtype=np.float32)
    return flat.reshape(tensor.shape)


def over_http(service, tensor, **options) -> np.ndarray:
    (output,) = post(service.http, tensor, **options).json()["outputs"]
    return np.array(output["data"], dtype=np.float32).reshape(output["shape"])


@pytest.mark.parametrize("typed", [False, True])
def test_image_files_are_answered_as_over_http(service, typed):
    photos = [photo(1), photo(2)]
    response = service.ask("ModelInfer", infer_request(*photos, typed=typed, id="r1"))
    assert (response.model_name, response.model_version, response.id) == ("pets", "1", "r1")
    # Outputs come as inputs do. Cached contexts are half precision, hence the tolerance.
    assert bool(response.raw_output_contents) != typed
    assert scores(response) == pytest.approx(over_http(service, image_input(*photos)), abs=1e-4)


@pytest.mark.parametrize("typed", [False, True])
def test_pixel_values_are_answered_as_over_http(service, world, typed):
    shape = (2, 3, *world.engine.model.image_size)
    values = np.random.default_rng(0).uniform(-1, 1, shape).astype(np.float32)
    request = message("ModelInferRequest")(model_name="pets")
    tensor = request.inputs.add(name="pixel_values", datatype="FP32", shape=shape)
    if typed:
        tensor.contents.fp32_contents.extend(values.ravel())
    else:
        request.raw_input_contents.append(values.tobytes())
    response = service.ask("ModelInfer", request)
    assert scores(response) == pytest.approx(over_http(service, pixel_input(values)), abs=1e-4)


def test_several_tasks_with_labels(service):
    request = infer_request(photo(1), model="multitask")
    request.outputs.add(name="pets").parameters["classification"].int64_param = 2
    request.outputs.add(name="age")
    response = service.ask("ModelInfer", request)
    assert [each.name for each in response.outputs] == ["pets", "age"]
    assert (response.outputs[0].datatype, list(response.outputs[0].shape)) == ("BYTES", [1, 2])
    assert response.outputs[0].parameters["version"].string_param == "1"
    best = response.raw_output_contents[0][4:].split(b":")
    assert int(best[1]) == over_http(service, image_input(photo(1))).argmax()
    assert scores(response, 1).shape == (1, 1)


def test_labels_as_typed_contents(service):
    request = infer_request(photo(1), typed=True)
    request.outputs.add(name="scores").parameters["classification"].int64_param = 1
    (output,) = service.ask("ModelInfer", request).outputs
    (text,) = output.contents.bytes_contents
    assert text.rpartition(b":")[2] in (b"cat", b"dog", b"rabbit")


@pytest.mark.parametrize("compression", [grpc.Compression.Gzip, grpc.Compression.Deflate])
def test_compressed_messages_are_read(service, compression):
    response = service.ask("ModelInfer", infer_request(photo(1)), compression=compression)
    assert scores(response).shape == (1, 3)


def test_ready_metadata_and_config(service):
    model = message("ModelReadyRequest")
    assert service.ask("ServerLive").live
    assert service.ask("ServerReady").ready
    assert service.ask("ServerMetadata").name == "engram"
    assert service.ask("ModelReady", model(name="pets")).ready
    assert service.ask("ModelReady", model(name="pets", version="1")).ready
    assert not service.ask("ModelReady", model(name="pets", version="7")).ready
    assert not service.ask("ModelReady", model(name="nothing")).ready
    metadata = service.ask("ModelMetadata", message("ModelMetadataRequest")(name="pets"))
    assert [each.name for each in metadata.inputs] == ["image", "pixel_values"]
    assert list(metadata.outputs[0].shape) == [-1, 3]
    config = service.ask("ModelConfig", message("ModelConfigRequest")(name="pets")).config
    assert config.max_batch_size == 4
    assert list(config.output[0].dims) == [3]
    listed = service.ask("RepositoryIndex").models
    assert {each.name for each in listed} >= {"pets", "scene", "age", "face", "multitask"}


def changed(**members):
    request = infer_request(photo(1))
    for name, value in members.items():
        setattr(request, name, value)
    return request


def with_input(**changes):
    request = infer_request(photo(1))
    for name, value in changes.items():
        if name == "shape":
            request.inputs[0].shape[:] = value
        else:
            setattr(request.inputs[0], name, value)
    return request


def with_output(name: str, **parameters):
    request = infer_request(photo(1))
    output = request.outputs.add(name=name)
    for key, value in parameters.items():
        output.parameters[key].int64_param = value
    return request


def with_timeout(microseconds: int):
    request = infer_request(photo(1))
    request.parameters["timeout"].int64_param = microseconds
    return request


def two_inputs():
    request = infer_request(photo(1))
    request.inputs.add(name="image", datatype="BYTES", shape=[1, 1])
    return request


def both_forms():
    request = infer_request(photo(1))
    request.inputs[0].contents.bytes_contents.append(photo(1))
    return request


def wrong_field():
    request = infer_request(photo(1), typed=True)
    request.inputs[0].contents.int_contents.append(1)
    return request


@pytest.mark.parametrize(
    ("request_", "code", "words"),
    [
        (changed(model_name="pest"), "NOT_FOUND", "Did you mean 'pets'"),
        (changed(model_version="9"), "NOT_FOUND", "9"),
        (changed(model_version="x"), "INVALID_ARGUMENT", "'x' is not the number of a version"),
        (infer_request(b"no image"), "INVALID_ARGUMENT", "looks like text"),
        (infer_request(*[photo(1)] * 5), "INVALID_ARGUMENT", "5 images, and the limit is 4"),
        (infer_request(b""), "INVALID_ARGUMENT", "empty element"),
        (with_input(datatype="FP32"), "INVALID_ARGUMENT", "must have BYTES"),
        (with_input(name="input__0"), "INVALID_ARGUMENT", "Unknown input 'input__0'"),
        (with_input(shape=[2, 1]), "INVALID_ARGUMENT", "ends beyond"),
        (with_input(shape=[-1, 1]), "INVALID_ARGUMENT", "inputs.0.shape.0"),
        (with_output("logits"), "INVALID_ARGUMENT", "its only output is 'scores'"),
        (with_output("scores", classification=-1), "INVALID_ARGUMENT", "classification"),
        (with_timeout(1), "DEADLINE_EXCEEDED", "deadline of 0.001 ms"),
        (two_inputs(), "INVALID_ARGUMENT", "2 inputs and 1 raw_input_contents"),
        (both_forms(), "INVALID_ARGUMENT", "both contents and raw_input_contents"),
        (wrong_field(), "INVALID_ARGUMENT", "send its data in bytes_contents"),
    ],
)
def test_mistakes_are_clear_errors(service, request_, code, words):
    with pytest.raises(grpc.RpcError) as error:
        service.ask("ModelInfer", request_)
    assert error.value.code() == grpc.StatusCode[code]
    assert words in error.value.details()


def test_messages_of_mistakes_are_those_of_http(service):
    over_http = post(service.http, image_input(photo(1)), url="/v2/models/pest/infer")
    with pytest.raises(grpc.RpcError) as error:
        service.ask("ModelInfer", changed(model_name="pest"))
    assert error.value.details() == over_http.json()["error"]


def test_a_message_that_is_none_is_a_clear_error(service):
    for data in (b"\xff" * 20, b"", b"\x0a\xff\xff\xff\xff\x0f"):
        with pytest.raises(grpc.RpcError) as error:
            service.method("ModelInfer")(data, timeout=20)
        assert error.value.code() == grpc.StatusCode.INVALID_ARGUMENT, data


def test_an_unknown_method_is_unimplemented(service):
    with pytest.raises(grpc.RpcError) as error:
        service.method("ModelStatistics")(b"", timeout=20)
    assert error.value.code() == grpc.StatusCode.UNIMPLEMENTED


def test_tasks_without_finite_answers_are_named(service, world, monkeypatch):
    request = infer_request(photo(3), model="multitask")
    response = service.ask("ModelInfer", request)
    assert "errors" not in response.parameters

    def broken(answer):
        return {"pets": "image 0: the answer is not finite"}

    monkeypatch.setattr("engram_server.api.routes.v2.infer.failed_tasks", broken)
    response = service.ask("ModelInfer", request)
    assert json.loads(response.parameters["errors"].string_param) == broken(None)
    assert "pets" not in [each.name for each in response.outputs]
