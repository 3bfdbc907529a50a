"""The port of gRPC: TLS, connections, and settings that cannot work."""

import socket
import sys

import grpc
import pytest
import tritonclient.grpc.model_config_pb2
import tritonclient.grpc.service_pb2
from engram_server.api.rpc.protocol import pool
from engram_server.errors import SettingsError
from starlette.testclient import TestClient

from tests.api.certificates import Authority
from tests.api.rpc.service import SECONDS, serving_grpc

LIVE = "/inference.GRPCInferenceService/ServerLive"


@pytest.fixture
def authority(tmp_path):
    return Authority(tmp_path)


def ask(port: int, root, pair=(None, None)) -> bool:
    """Whether a client with these certificates is answered."""
    key, certificate = (None if each is None else each.read_bytes() for each in pair)
    credentials = grpc.ssl_channel_credentials(root.read_bytes(), key, certificate)
    options = [("grpc.use_local_subchannel_pool", 1)]
    with grpc.secure_channel(f"127.0.0.1:{port}", credentials, options) as channel:
        call = channel.unary_unary(LIVE).future(b"", timeout=SECONDS)
        assert call.code() in (grpc.StatusCode.OK, grpc.StatusCode.UNAVAILABLE)
        return call.code() == grpc.StatusCode.OK


@pytest.mark.parametrize("password", [None, b"open sesame"])
def test_tls_with_the_certificates_of_https(world, authority, tmp_path, password):
    certificate, key = authority.certificate("127.0.0.1", password=password)
    settings = {"tls_certificate": str(certificate), "tls_key": str(key)}
    if password is not None:
        (tmp_path / "password").write_bytes(password)
        settings["tls_key_password_file"] = str(tmp_path / "password")
    with serving_grpc(world, **settings) as service:
        assert ask(service.port, authority.file)
        assert not ask(service.port, Authority(tmp_path, "other").file)
        with pytest.raises(grpc.RpcError):
            service.ask("ServerLive")  # without TLS


@pytest.mark.parametrize("clients", ["required", "optional"])
def test_client_certificates(world, authority, tmp_path, clients):
    certificate, key = authority.certificate("127.0.0.1")
    ours, strangers = Authority(tmp_path, "clients"), Authority(tmp_path, "strangers")
    with serving_grpc(
        world,
        tls_certificate=str(certificate),
        tls_key=str(key),
        tls_client_ca=str(ours.file),
        tls_client_certificates=clients,
    ) as service:
        assert ask(service.port, authority.file, ours.certificate("127.0.0.2")[::-1])
        assert ask(service.port, authority.file) == (clients == "optional")
        stranger = strangers.certificate("127.0.0.3")[::-1]
        assert ask(service.port, authority.file, stranger) == (clients == "optional")


def test_connections_are_limited(world):
    with serving_grpc(world, connections=2) as service:
        held = [socket.create_connection(("127.0.0.1", service.port)) for _ in range(2)]
        with pytest.raises(grpc.RpcError) as error:
            service.ask("ServerLive")
        assert error.value.code() == grpc.StatusCode.UNAVAILABLE
        for each in held:
            each.close()


def test_a_port_in_use_is_a_clear_error(world):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with (
            pytest.raises(SettingsError, match=f"port {port} for gRPC.*ENGRAM_GRPC_PORT"),
            TestClient(world.app(grpc_port=port)),
        ):
            pass


def test_a_missing_extra_is_a_clear_error(world, monkeypatch):
    monkeypatch.setitem(sys.modules, "grpc_health.v1", None)
    for name in [each for each in sys.modules if each.startswith("engram_server.api.rpc.")]:
        monkeypatch.delitem(sys.modules, name)
    with (
        pytest.raises(SettingsError, match=r"ENGRAM_GRPC_PORT requires .*engram-vit\[grpc\]"),
        TestClient(world.app(grpc_port=0)),
    ):
        pass


def test_numbers_and_types_are_those_of_tritons_client():
    """A field with another number or type would be read as another field."""
    theirs = {
        name: each
        for module in (tritonclient.grpc.service_pb2, tritonclient.grpc.model_config_pb2)
        for name, each in module.DESCRIPTOR.message_types_by_name.items()
    }
    ours = pool().FindFileByName("open_inference.proto")

    def check(mine, other):
        for name, field in mine.fields_by_name.items():
            same = other.fields_by_name[name]
            assert (field.number, field.type, field.is_repeated) == (
                same.number,
                same.type,
                same.is_repeated,
            ), field.full_name
        for name, nested in mine.nested_types_by_name.items():
            check(nested, other.nested_types_by_name[name])

    for name, mine in ours.message_types_by_name.items():
        check(mine, theirs[name])
    service = tritonclient.grpc.service_pb2.DESCRIPTOR.services_by_name["GRPCInferenceService"]
    for name, method in ours.services_by_name["GRPCInferenceService"].methods_by_name.items():
        same = service.methods_by_name[name]
        assert method.input_type.full_name == same.input_type.full_name
