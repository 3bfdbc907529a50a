"""The message classes of the protocol, made from its compiled description."""

from functools import cache
from importlib import resources
from typing import Any, Final

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.message import DecodeError
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2

from engram_server.errors import MalformedRequest

SERVICE: Final = "inference.GRPCInferenceService"
HEALTH: Final = "grpc.health.v1.Health"
REFLECTION: Final = "grpc.reflection.v1alpha.ServerReflection"
REFLECTION_V1: Final = "grpc.reflection.v1.ServerReflection"

_COMPILED = "open_inference.binpb"


@cache
def pool() -> descriptor_pool.DescriptorPool:
    """All descriptions. Not protobuf's default pool, which has those of clients in this process."""
    described = descriptor_pool.DescriptorPool()
    compiled = resources.files(__package__).joinpath(_COMPILED).read_bytes()
    for file in descriptor_pb2.FileDescriptorSet.FromString(compiled).file:
        described.Add(file)
    for module in (health_pb2, reflection_pb2):
        described.AddSerializedFile(module.DESCRIPTOR.serialized_pb)
    return described


@cache
def message(name: str) -> Any:  # noqa: ANN401 - a class that protobuf makes
    """The class of a message of the inference service."""
    return message_factory.GetMessageClass(pool().FindMessageTypeByName(f"inference.{name}"))


def parse(message_class: Any, data: bytes) -> Any:  # noqa: ANN401
    """Parse a message; MalformedRequest if it is not one of this class."""
    try:
        return message_class.FromString(data)
    except DecodeError:
        name = message_class.DESCRIPTOR.name
        raise MalformedRequest(f"The message is not a valid {name}.") from None
