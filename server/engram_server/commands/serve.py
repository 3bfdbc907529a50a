"""`engram serve`: listen, load, serve, and drain on shutdown."""

import asyncio
import errno
import math
import os
import resource
import signal
import socket
import ssl
import sys
from concurrent.futures import Future
from pathlib import Path
from types import FrameType
from typing import Annotated, Any

import typer
import uvicorn
from engram_bundle import TaskStoreError
from fastapi import FastAPI
from rich.console import Console
from rich.markup import escape

from engram_server.api.problems import problem_response
from engram_server.app import create_app
from engram_server.edge.connections import Connections
from engram_server.engine.engine import Engine
from engram_server.errors import EngramError, SettingsError
from engram_server.observability import logs
from engram_server.observability.audit import STREAM
from engram_server.runtime import Runtime
from engram_server.settings import Settings, load_settings, unknown_variables

# A pass takes the interpreter lock hundreds of times, and each time may wait this long for another
# thread that is busy. Python's default is 5 ms; much less slows down ordinary requests.
SWITCH_SECONDS = 0.002
_FORCED = 130
_OWN_FILES = 512


def serve(
    backbone: Annotated[
        str | None, typer.Option(help="Backbone: a folder or a Hugging Face model name.")
    ] = None,
    store: Annotated[
        str | None, typer.Option(metavar="URL", help="Task store: a folder or a URL.")
    ] = None,
    host: Annotated[str | None, typer.Option(help="Address to listen on.")] = None,
    port: Annotated[
        int | None, typer.Option(help="Port to listen on; 0 selects a free port.")
    ] = None,
    device: Annotated[
        str | None, typer.Option(help="Devices, one worker each: cpu, or cuda:0,cuda:1.")
    ] = None,
) -> None:
    """Serve a backbone and the tasks of a store over HTTP.

    All other settings are environment variables: see docs/reference/configuration.md.
    """
    settings = load_settings(backbone=backbone, store=store, host=host, port=port, devices=device)
    logs.configure(settings.log_format, settings.log_level)
    errors = Console(stderr=True)
    for sentence in unknown_variables(os.environ):
        errors.print(f"[yellow]warning:[/] {sentence}", highlight=False, soft_wrap=True)
    listener = listen(settings.host, settings.port)
    # Replace port 0 by the real port, for heartbeats.
    settings = settings.model_copy(update={"port": listener.getsockname()[1]})
    app = create_app(settings)
    runtime: Runtime = app.state.runtime
    allow_open_files(settings.connections)
    sys.setswitchinterval(SWITCH_SECONDS)
    server = DrainingServer(uvicorn_config(app, settings), runtime)
    runtime.starting.add_done_callback(lambda done: _announce(done, server, settings, listener))
    server.run(sockets=[listener])
    _explain_failure(runtime)
    if server.force_exit:
        raise typer.Exit(_FORCED)


def uvicorn_config(app: FastAPI, settings: Settings) -> uvicorn.Config:
    """Configure uvicorn: HTTP/1.1 with our limits, no WebSockets."""
    runtime: Runtime = app.state.runtime
    connections = Connections(settings, runtime.metrics, problem_response)
    config = uvicorn.Config(
        app,
        http=connections.protocol,  # type: ignore[arg-type]  # a factory instead of a class
        ws="none",
        proxy_headers=False,  # see ENGRAM_TRUSTED_PROXIES
        log_config=None,
        access_log=False,
        server_header=False,
        lifespan="on",
        timeout_graceful_shutdown=max(1, math.ceil(settings.drain_seconds)),
        **_tls_options(settings),
    )
    try:
        config.load()
    except OSError as error:  # includes ssl.SSLError
        reason = error.strerror or error
        raise SettingsError(
            f"Cannot set up TLS with ENGRAM_TLS_CERTIFICATE and the related settings: {reason}."
        ) from None
    return config


def _tls_options(settings: Settings) -> dict[str, Any]:
    if settings.tls_certificate is None:
        return {}
    password = None
    if settings.tls_key_password_file is not None:
        try:
            password = Path(settings.tls_key_password_file).read_text().strip()
        except OSError as error:
            raise SettingsError(
                f"Cannot read ENGRAM_TLS_KEY_PASSWORD_FILE: {error.strerror}."
            ) from None
    required = settings.tls_client_certificates == "required"
    client_mode = ssl.CERT_REQUIRED if required else ssl.CERT_OPTIONAL
    return {
        "ssl_certfile": settings.tls_certificate,
        "ssl_keyfile": settings.tls_key,
        "ssl_keyfile_password": password or "",  # never prompt
        "ssl_ca_certs": settings.tls_client_ca,
        "ssl_cert_reqs": ssl.CERT_NONE if settings.tls_client_ca is None else client_mode,
    }


def allow_open_files(connections: int) -> None:
    """Raise the limit of open files for this many connections, up to the hard limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = connections + _OWN_FILES
    if soft < needed:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(needed, hard), hard))


class DrainingServer(uvicorn.Server):
    """Drains on shutdown: readiness fails, requests in flight finish, connections close, exit 0."""

    def __init__(self, config: uvicorn.Config, runtime: Runtime) -> None:
        super().__init__(config)
        self._runtime = runtime
        self._notice_seconds = 0.0

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        # Overrides uvicorn, which re-raises the signal at the end, so the exit code is never 0.
        if self.should_exit and sig == signal.SIGINT:
            self.force_exit = True
            return
        self._runtime.draining = True
        if sig == signal.SIGTERM and not self.should_exit:
            # Load balancers must first see that readiness fails.
            self._notice_seconds = self._runtime.settings.drain_notice_seconds
        self.should_exit = True

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        if self._runtime.started:
            await self._give_notice()
        await super().shutdown(sockets)

    async def _give_notice(self) -> None:
        """Keep serving while /readyz fails; a second ^C ends it."""
        loop = asyncio.get_running_loop()
        until = loop.time() + self._notice_seconds
        while not self.force_exit and loop.time() < until:
            await asyncio.sleep(min(0.1, until - loop.time()))


def listen(host: str, port: int) -> socket.socket:
    """Open the listening socket, or raise SettingsError."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        return socket.create_server(address[:2], family=family, backlog=2048)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise SettingsError(
                f"Port {port} on {host} is in use by another program. Stop it, or choose another "
                f"port with --port or ENGRAM_PORT."
            ) from None
        reason = error.strerror or error
        raise SettingsError(f"Cannot listen on {host} port {port}: {reason}.") from None


def _announce(
    done: Future[Engine], server: DrainingServer, settings: Settings, listener: socket.socket
) -> None:
    """Print the banner, or stop the server if the engine failed. Runs in the starting thread."""
    if done.exception() is not None:
        server.should_exit = True
        return
    host, port = listener.getsockname()[:2]
    scheme = "http" if settings.tls_certificate is None else "https"
    url = f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}"
    text = banner(done.result(), url, with_key=settings.has_keys)
    # Not wrapped: users copy the last line. To stderr if the audit log is on stdout.
    Console(stderr=settings.audit_log == STREAM).print(text, highlight=False, soft_wrap=True)


def banner(engine: Engine, url: str, *, with_key: bool) -> str:
    """The startup message in rich markup."""
    names = engine.tasks.snapshot.ready_names
    states = engine.tasks.snapshot.states()
    failed = sorted({state.name for state in states if state.status == "failed"})
    shown = ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")
    lines = [
        "",
        f"  [bold]Engram[/] is ready at [bold]{url}[/]",
        f"  backbone  {escape(engine.model.name)}",
        f"  device    {', '.join(engine.config.devices)} ({engine.model.precision})",
        f"  store     {escape(engine.store_url)}",
        f"  tasks     {len(names)} ready" + (f": {shown}" if names else "; publish one to start"),
    ]
    if failed:
        lines.append(f"  [red]failed    {', '.join(failed)}[/] (see GET /tasks)")
    key = "-H 'X-API-Key: …' " if with_key else ""
    query = "?tasks=" + ",".join(names[:2]) if names else ""
    return "\n".join([*lines, "", f"  curl {key}-T cat.jpg '{url}/predict{query}'", ""])


def _explain_failure(runtime: Runtime) -> None:
    """Raise the error that stopped the engine."""
    if not runtime.starting.done():
        return
    error = runtime.starting.exception()
    if isinstance(error, EngramError | TaskStoreError):
        raise error
    if error is not None:
        raise SettingsError(f"The server failed to start: {error}") from error
