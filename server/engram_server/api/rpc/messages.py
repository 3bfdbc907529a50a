"""Messages to the schemas of `/v2`, and its results to messages."""

import json
from collections.abc import Mapping
from typing import Any

import numpy as np
from pydantic import ValidationError

from engram_server.api import bodies
from engram_server.api.routes.v2 import infer, models, tensors
from engram_server.api.rpc import wire
from engram_server.api.rpc.protocol import message, parse
from engram_server.engine import types
from engram_server.errors import InvalidRequest


def parse_version(text: str) -> int | None:
    """The version in a message, where an empty text is the default version."""
    return models.parse_version(text) if text else None


def read_request(
    data: bytes, model: types.ModelInfo, max_images: int
) -> tuple[infer.ParsedRequest, bool]:
    """Parse a ModelInferRequest; also whether its data is in `raw_input_contents`."""
    parts = wire.split_request(data)
    sent = parse(message("ModelInferRequest"), parts.head)
    document = {
        "id": sent.id or None,
        "inputs": [
            {
                "name": each.name,
                "shape": list(each.shape),
                "datatype": each.datatype,
                "parameters": _read_parameters(each.parameters),
            }
            for each in sent.inputs
        ],
        "outputs": [
            {"name": each.name, "parameters": _read_parameters(each.parameters)}
            for each in sent.outputs
        ],
        "parameters": _read_parameters(sent.parameters),
    }
    try:
        request = infer.InferRequest.model_validate(document)
    except ValidationError as error:
        raise bodies.invalid_value("The request", error) from None
    binary = _binary_data(request.inputs, parts)
    images = infer.read_images(request.inputs, binary, model, max_images)
    name = sent.model_name
    ref = models.reference(name, parse_version(sent.model_version))
    tasks = infer.check_outputs(request, ref)
    return infer.ParsedRequest(name, ref, request, images, tasks), bool(parts.raw)


def _binary_data(
    inputs: list[tensors.InputTensor], parts: wire.SplitRequest
) -> dict[str, memoryview]:
    """The data of each input by name, in the format of `raw_input_contents`."""
    if not parts.raw:
        joined = (
            (each.name, wire.join_contents(each.name, each.datatype, contents))
            for each, contents in zip(inputs, parts.contents, strict=True)
        )
        return {name: data for name, data in joined if data is not None}
    if any(parts.contents):
        raise InvalidRequest("The request has both contents and raw_input_contents: send one.")
    if len(parts.raw) != len(inputs):
        raise InvalidRequest(
            f"The request has {len(inputs)} inputs and {len(parts.raw)} raw_input_contents: send "
            f"one for each input."
        )
    return {each.name: data for each, data in zip(inputs, parts.raw, strict=True)}


def _read_parameters(parameters: Any) -> dict[str, object]:  # noqa: ANN401 - a map of messages
    return {
        name: getattr(value, choice)
        for name, value in parameters.items()
        if (choice := value.WhichOneof("parameter_choice")) is not None
    }


def write_result(parsed: infer.ParsedRequest, answer: types.PredictAnswer, *, raw: bool) -> bytes:
    """A ModelInferResponse, with raw data or typed contents."""
    response = message("ModelInferResponse")()
    head = infer.result_head(parsed, answer)
    _write_parameters(response, head.pop("parameters", {}))
    for name, value in head.items():
        setattr(response, name, value)
    for output in infer.write_outputs(parsed.request, answer, parsed.ref):
        tensor = response.outputs.add(name=output.name, datatype=output.datatype)
        tensor.shape.extend(output.shape)
        _write_parameters(tensor, output.parameters)
        values = output.values
        if raw:
            response.raw_output_contents.append(output.to_bytes())
        elif isinstance(values, np.ndarray):
            tensor.contents.fp32_contents.extend(values.ravel())
        else:
            texts = (text.encode() for row in values for text in row)
            tensor.contents.bytes_contents.extend(texts)
    written: bytes = response.SerializeToString()
    return written


def _write_parameters(target: Any, parameters: object) -> None:  # noqa: ANN401 - a message
    """Parameters as text; lists and objects, which the protocol does not have, as JSON."""
    assert isinstance(parameters, Mapping)
    for name, value in parameters.items():
        text = value if isinstance(value, str) else json.dumps(value)
        target.parameters[name].string_param = text


def write_metadata(metadata: models.ModelMetadata) -> Any:  # noqa: ANN401 - a message
    """A ModelMetadataResponse. The protocol has no parameters here, and so no labels."""
    response = message("ModelMetadataResponse")(
        name=metadata.name, versions=metadata.versions, platform=metadata.platform
    )
    for tensors_of, target in (
        (metadata.inputs, response.inputs),
        (metadata.outputs, response.outputs),
    ):
        for each in tensors_of:
            target.add(name=each.name, datatype=each.datatype, shape=each.shape)
    return response


def write_config(config: models.ModelConfig) -> Any:  # noqa: ANN401 - a message
    return message("ModelConfigResponse")(config=config.model_dump(exclude_none=True))
