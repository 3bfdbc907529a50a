"""What requests of the protocol say. Members and parameters that are not known here are ignored."""

from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, BeforeValidator, Field

T = TypeVar("T")

Size = Annotated[int, Field(strict=True, ge=0, lt=2**63)]
Text = Annotated[str, Field(max_length=1024)]


def _null_is_nothing(value: object) -> object:
    return {} if value is None else value


# Some clients write `"parameters": null`.
OrNull = Annotated[T, BeforeValidator(_null_is_nothing)]


class InputParameters(BaseModel):
    """`binary_data_size`: the data follows the JSON and has this many bytes."""

    binary_data_size: Size | None = None
    shared_memory_region: Any = None


class InputTensor(BaseModel):
    """One input; its data is here or, with `binary_data_size`, behind the JSON."""

    name: Text
    shape: Annotated[list[Size], Field(max_length=8)]
    datatype: Text
    parameters: OrNull[InputParameters] = InputParameters()
    data: Any = None


class OutputParameters(BaseModel):
    """`classification`: the best so many labels as text, not all numbers."""

    binary_data: bool | None = None
    classification: Size = 0
    shared_memory_region: Any = None


class RequestedOutput(BaseModel):
    """One output and how it is wanted."""

    name: Text
    parameters: OrNull[OutputParameters] = OutputParameters()


class InferParameters(BaseModel):
    """Of the whole request."""

    binary_data_output: bool = False
    timeout: Annotated[float, Field(strict=True, ge=0, allow_inf_nan=False)] = (
        0  # microseconds; 0: none
    )


class InferRequest(BaseModel):
    """A question to a model."""

    id: Annotated[str, Field(max_length=1024)] | None = None
    inputs: list[InputTensor]
    outputs: list[RequestedOutput] | None = None
    parameters: OrNull[InferParameters] = InferParameters()


class IndexRequest(BaseModel):
    """`ready`: list only what can be asked."""

    ready: bool = False


class ControlRequest(BaseModel):
    """What a `load` or `unload` says beside the name."""

    parameters: OrNull[dict[str, Any]] = {}
