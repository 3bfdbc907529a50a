"""The gRPC server: its port, TLS, and the limits that grpc enforces itself."""

from pathlib import Path
from typing import Any, Final

import grpc
from cryptography.hazmat.primitives import serialization

from engram_server.api.rpc.calls import Call, Context, Method
from engram_server.api.rpc.services import methods
from engram_server.engine.shares import Pool
from engram_server.errors import SettingsError
from engram_server.runtime import Runtime
from engram_server.settings import Settings

# Calls of one connection at the same time; further ones wait in the client.
_CALLS_PER_CONNECTION: Final = 100
_FRAME_BYTES: Final = 1024 * 1024
# Then a connection is closed in an orderly way, and clients open a new one: a client that does not
# read its answers keeps them no longer than this.
_CONNECTION_SECONDS: Final = 600


class RpcServer:
    """Serves a runtime over gRPC."""

    def __init__(self, runtime: Runtime) -> None:
        settings = runtime.settings
        # As many calls as connections over HTTP, with a share for each address.
        calls = Pool(settings.connections, shared=True)
        self._settings = settings
        self._server = grpc.aio.server(
            handlers=[_Handlers(runtime, calls)],
            options=[
                *_options(settings).items(),
                # A second server on the port is an error, unless it is a process of this one.
                ("grpc.so_reuseport", int(runtime.process is not None)),
            ],
        )

    async def start(self) -> int:
        """Listen; returns the port."""
        host, port = self._settings.host, self._settings.grpc_port
        address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        try:
            if self._settings.tls_certificate is None:
                bound: int = self._server.add_insecure_port(address)
            else:
                bound = self._server.add_secure_port(address, _credentials(self._settings))
        except RuntimeError:
            raise SettingsError(
                f"Cannot listen on {host} port {port} for gRPC. Choose another port with "
                f"ENGRAM_GRPC_PORT, and check the TLS settings."
            ) from None
        await self._server.start()
        return bound

    async def stop(self, seconds: float) -> None:
        """Reject new calls, and wait for those in flight; cancel them after this time."""
        await self._server.stop(seconds)


class _Handlers(grpc.GenericRpcHandler):  # type: ignore[misc]  # grpc has no types
    """Finds the method of a call."""

    def __init__(self, runtime: Runtime, calls: Pool) -> None:
        self._runtime = runtime
        self._calls = calls
        self._methods = methods()

    def service(self, details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler | None:
        method = self._methods.get(details.method)
        if method is None:
            return None  # UNIMPLEMENTED
        # All as streams, which look the same on the wire: the method decides when a message is
        # read, and knows when its answer was taken.
        return grpc.stream_stream_rpc_method_handler(self._handler(method))

    def _handler(self, method: Method) -> Any:  # noqa: ANN401 - grpc has no types
        async def handle(_: object, context: Context) -> None:
            await Call(self._runtime, method, context).handle(self._calls)

        return handle


def _options(settings: Settings) -> dict[str, int]:
    """grpc's names for our limits."""
    grace = settings.body_seconds + settings.send_seconds
    return {
        "grpc.max_allowed_incoming_connections": settings.connections,
        "grpc.max_concurrent_streams": _CALLS_PER_CONNECTION,
        "grpc.max_metadata_size": settings.header_bytes,
        "grpc.absolute_max_metadata_size": settings.header_bytes,
        "grpc.server_handshake_timeout_ms": _milliseconds(settings.header_seconds),
        "grpc.max_connection_idle_ms": _milliseconds(settings.idle_seconds),
        "grpc.max_connection_age_ms": _milliseconds(_CONNECTION_SECONDS),
        "grpc.max_connection_age_grace_ms": _milliseconds(grace),
        "grpc.max_receive_message_length": settings.body_bytes,
        "grpc.max_send_message_length": -1,  # ENGRAM_ANSWER_BYTES is checked in advance
        # Otherwise grpc decompresses without a limit, and buffers more of calls that wait.
        "grpc.per_message_decompression": 0,
        "grpc.http2.bdp_probe": 0,
        # grpc joins the frames of a message on the event loop: a few large ones in a fifth of the
        # time of many small ones.
        "grpc.http2.max_frame_size": _FRAME_BYTES,
    }


def _milliseconds(seconds: float) -> int:
    return round(seconds * 1000)


def _credentials(settings: Settings) -> grpc.ServerCredentials:
    """The same certificates as HTTPS.

    Optional client certificates are not requested: grpc would not verify them.
    """
    try:
        certificate = Path(settings.tls_certificate or "").read_bytes()
        key = Path(settings.tls_key or settings.tls_certificate or "").read_bytes()
        if settings.tls_key_password_file is not None:
            password = Path(settings.tls_key_password_file).read_text().strip()
            key = _decrypted(key, password)
        authorities = None
        required = settings.tls_client_certificates == "required"
        if settings.tls_client_ca is not None and required:
            authorities = Path(settings.tls_client_ca).read_bytes()
    except (OSError, ValueError) as error:
        raise SettingsError(f"Cannot set up TLS for gRPC: {error}.") from None
    return grpc.ssl_server_credentials(
        [(key, certificate)], authorities, require_client_auth=authorities is not None
    )


def _decrypted(key: bytes, password: str) -> bytes:
    return serialization.load_pem_private_key(key, password.encode()).private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )
