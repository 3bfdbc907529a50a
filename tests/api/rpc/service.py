"""A gRPC service in a thread of this process, and clients of it."""

import contextlib
import socket
import struct
import time
from collections.abc import Iterator
from dataclasses import dataclass

import grpc
from engram_server.api.rpc.protocol import SERVICE, message
from engram_server.runtime import Runtime
from starlette.testclient import TestClient

from tests.api.conftest import World

SECONDS = 20


@dataclass
class Service:
    port: int
    http: TestClient
    channel: grpc.Channel

    @property
    def runtime(self) -> Runtime:
        return self.http.app.state.runtime

    def method(self, name: str, service: str = SERVICE):
        return self.channel.unary_unary(f"/{service}/{name}")

    def ask(self, name: str, request=None, key: dict[str, str] | None = None, **options):
        """Call a method of the inference service; its answer as a message."""
        request = message(f"{name}Request")() if request is None else request
        metadata = [(header.lower(), value) for header, value in (key or {}).items()]
        content = self.method(name)(
            request.SerializeToString(), metadata=metadata, timeout=SECONDS, **options
        )
        return message(f"{name}Response").FromString(content)

    def await_value(self, read, expected) -> None:
        deadline = time.monotonic() + SECONDS
        while (found := read()) != expected:
            assert time.monotonic() < deadline, f"{found} is not {expected}"
            time.sleep(0.01)

    def rejected(self, reason: str) -> float:
        name, labels = "engram_rejections_total", {"reason": reason}
        return self.runtime.metrics.registry.get_sample_value(name, labels) or 0.0


@contextlib.contextmanager
def serving_grpc(world: World, **settings) -> Iterator[Service]:
    """The world's engine over HTTP and gRPC."""
    with TestClient(world.app(grpc_port=0, **settings)) as http:
        port = http.app.state.runtime.grpc_port
        options = [("grpc.use_local_subchannel_pool", 1)]
        with grpc.insecure_channel(f"127.0.0.1:{port}", options) as channel:
            yield Service(port, http, channel)


class Wire:
    """One HTTP/2 connection, written by hand, that never takes what it is sent."""

    def __init__(self, port: int):
        self.socket = socket.create_connection(("127.0.0.1", port), timeout=SECONDS)
        # No bytes of an answer: a window of none.
        none = struct.pack(">HI", 4, 0)
        self.socket.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + _frame(4, 0, 0, none))

    def call(self, stream: int, path: str, data: bytes, key: dict[str, str] | None = None) -> None:
        """Begin a call with some bytes of its message, and leave it open."""
        headers = {
            ":method": "POST",
            ":scheme": "http",
            ":path": path,
            ":authority": "127.0.0.1",
            "te": "trailers",
            "content-type": "application/grpc",
            **{name.lower(): value for name, value in (key or {}).items()},
        }
        block = b"".join(map(_header, headers, headers.values()))
        self.socket.sendall(_frame(1, 4, stream, block) + _frame(0, 0, stream, data))

    def close(self) -> None:
        self.socket.close()


def _frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    head = struct.pack(">I", len(payload))[1:] + bytes([kind, flags]) + struct.pack(">I", stream)
    return head + payload


def _header(name: str, value: str) -> bytes:
    """A header as a literal without index and without Huffman coding."""
    return b"\0" + bytes([len(name)]) + name.encode() + bytes([len(value)]) + value.encode()


def infer_request(*images: bytes, model: str = "pets", typed: bool = False, **members):
    """A request for the answers about image files."""
    request = message("ModelInferRequest")(model_name=model, **members)
    tensor = request.inputs.add(name="image", datatype="BYTES", shape=[len(images), 1])
    if typed:
        tensor.contents.bytes_contents.extend(images)
    else:
        elements = (struct.pack("<I", len(each)) + each for each in images)
        request.raw_input_contents.append(b"".join(elements))
    return request
