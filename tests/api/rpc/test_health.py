"""Health checks and reflection, with their official clients."""

import grpc
import pytest
from engram_server.api.rpc.protocol import HEALTH, REFLECTION, SERVICE
from google.protobuf.descriptor_pool import DescriptorPool
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import (
    ProtoReflectionDescriptorDatabase,
)
from pydantic import SecretStr

from tests.api.rpc.service import SECONDS, serving_grpc

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
UNKNOWN = health_pb2.HealthCheckResponse.SERVICE_UNKNOWN


@pytest.fixture
def service(world):
    # With keys: probes have none.
    with serving_grpc(world, api_key=SecretStr("some secret key")) as service:
        yield service


def test_health_is_readiness(service, monkeypatch):
    health = health_pb2_grpc.HealthStub(service.channel)
    for name in ("", SERVICE):
        request = health_pb2.HealthCheckRequest(service=name)
        assert health.Check(request, timeout=SECONDS).status == SERVING
    monkeypatch.setattr(service.runtime, "draining", True)
    assert health.Check(health_pb2.HealthCheckRequest(), timeout=SECONDS).status == NOT_SERVING


def test_health_of_an_unknown_service(service):
    health = health_pb2_grpc.HealthStub(service.channel)
    request = health_pb2.HealthCheckRequest(service="nothing")
    with pytest.raises(grpc.RpcError) as error:
        health.Check(request, timeout=SECONDS)
    assert error.value.code() == grpc.StatusCode.NOT_FOUND
    watching = health.Watch(request, timeout=SECONDS)
    assert next(watching).status == UNKNOWN
    watching.cancel()


def test_health_can_be_watched(service, monkeypatch):
    monkeypatch.setattr("engram_server.api.rpc.services._WATCH_SECONDS", 0.01)
    watching = health_pb2_grpc.HealthStub(service.channel).Watch(
        health_pb2.HealthCheckRequest(), timeout=SECONDS
    )
    assert next(watching).status == SERVING
    monkeypatch.setattr(service.runtime, "draining", True)
    assert next(watching).status == NOT_SERVING
    watching.cancel()


class WithKey(grpc.StreamStreamClientInterceptor):
    def intercept_stream_stream(self, continuation, details, requests):
        details = details._replace(metadata=[("x-api-key", "some secret key")])
        return continuation(details, requests)


def test_services_are_described_by_reflection(service):
    database = ProtoReflectionDescriptorDatabase(grpc.intercept_channel(service.channel, WithKey()))
    assert set(database.get_services()) == {SERVICE, HEALTH, REFLECTION}
    pool = DescriptorPool(database)
    methods = pool.FindServiceByName(SERVICE).methods_by_name
    assert methods["ModelInfer"].input_type.full_name == "inference.ModelInferRequest"
    assert not methods["ModelInfer"].server_streaming
    assert pool.FindServiceByName(HEALTH).methods_by_name["Check"]


def test_reflection_requires_a_key(service):
    with pytest.raises(grpc.RpcError) as error:
        ProtoReflectionDescriptorDatabase(service.channel).get_services()
    assert error.value.code() == grpc.StatusCode.UNAUTHENTICATED
