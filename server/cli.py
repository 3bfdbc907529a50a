"""`engram serve`: listens at once, says when it is ready, and leaves without dropping a request."""

import asyncio
import errno
import math
import os
import resource
import signal
import socket
import ssl
from concurrent.futures import Future
from pathlib import Path
from types import FrameType
from typing import Annotated, Any

import typer
import uvicorn
from fastapi import FastAPI
from rich.console import Console
from rich.markup import escape

from server import logs
from server.api.http import short_name
from server.app import create_app
from server.audit import STREAM
from server.connections import Connections
from server.engine.engine import Engine
from server.errors import EngramError, SettingsError
from server.runtime import Runtime
from server.settings import Settings, load_settings, misspelt_variables
from task_store import TaskStoreError

_FORCED = 130
_OWN_FILES = 512


def serve(
    backbone: Annotated[
        str | None, typer.Option(help="The backbone: a folder or a Hugging Face name.")
    ] = None,
    store: Annotated[
        str | None, typer.Option(metavar="URL", help="The task store: a folder or a URL.")
    ] = None,
    host: Annotated[str | None, typer.Option(help="Address to listen on.")] = None,
    port: Annotated[int | None, typer.Option(help="Port to listen on; 0 takes a free one.")] = None,
    device: Annotated[
        str | None, typer.Option(help="Devices, one worker each: cpu, or cuda:0,cuda:1.")
    ] = None,
) -> None:
    """Serve a backbone and all the tasks of a store over HTTP.

    Every other setting is an environment variable: see docs/reference/configuration.md.
    """
    settings = load_settings(backbone=backbone, store=store, host=host, port=port, devices=device)
    logs.configure(settings.log_format, settings.log_level)
    errors = Console(stderr=True)
    for sentence in misspelt_variables(os.environ):
        errors.print(f"[yellow]warning:[/] {sentence}", highlight=False, soft_wrap=True)
    listener = listen(settings.host, settings.port)
    # Port 0 has become one that other replicas may be told.
    settings = settings.model_copy(update={"port": listener.getsockname()[1]})
    app = create_app(settings)
    runtime: Runtime = app.state.runtime
    allow_open_files(settings.connections)
    server = DrainingServer(uvicorn_config(app, settings), runtime)
    runtime.starting.add_done_callback(lambda done: _announce(done, server, settings, listener))
    server.run(sockets=[listener])
    _explain_failure(runtime)
    if server.force_exit:
        raise typer.Exit(_FORCED)


def uvicorn_config(app: FastAPI, settings: Settings) -> uvicorn.Config:
    """How uvicorn serves the application: HTTP/1.1 with our limits, and no WebSockets."""
    runtime: Runtime = app.state.runtime
    connections = Connections(settings, runtime.metrics)
    config = uvicorn.Config(
        app,
        http=connections.protocol,  # type: ignore[arg-type]  # called as a class would be
        ws="none",
        proxy_headers=False,  # ENGRAM_TRUSTED_PROXIES says whose headers are believed
        log_config=None,
        access_log=False,
        server_header=False,
        lifespan="on",
        timeout_graceful_shutdown=max(1, math.ceil(settings.drain_seconds)),
        **_tls_options(settings),
    )
    try:
        config.load()
    except OSError as error:  # of which ssl.SSLError is one
        reason = error.strerror or error
        raise SettingsError(
            f"TLS cannot be set up with ENGRAM_TLS_CERTIFICATE and the settings beside it: "
            f"{reason}."
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
                f"ENGRAM_TLS_KEY_PASSWORD_FILE cannot be read: {error.strerror}."
            ) from None
    required = settings.tls_client_certificates == "required"
    asked = ssl.CERT_REQUIRED if required else ssl.CERT_OPTIONAL
    return {
        "ssl_certfile": settings.tls_certificate,
        "ssl_keyfile": settings.tls_key,
        "ssl_keyfile_password": password or "",  # never asked for at a prompt
        "ssl_ca_certs": settings.tls_client_ca,
        "ssl_cert_reqs": ssl.CERT_NONE if settings.tls_client_ca is None else asked,
    }


def allow_open_files(connections: int) -> None:
    """Room for so many connections beside our own files, as far as this process may have it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = connections + _OWN_FILES
    if soft < needed:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(needed, hard), hard))


class DrainingServer(uvicorn.Server):
    """Leaves in order: readiness falls, connections end, requests in flight finish, exit 0."""

    def __init__(self, config: uvicorn.Config, runtime: Runtime) -> None:
        super().__init__(config)
        self._runtime = runtime
        self._notice_seconds = 0.0

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        # Not the inherited one: that raises the signal again at the end, and no exit code is 0.
        if self.should_exit and sig == signal.SIGINT:
            self.force_exit = True
            return
        self._runtime.draining = True
        if sig == signal.SIGTERM and not self.should_exit:
            # An orchestrator's signal: its load balancers first have to see that we are leaving.
            self._notice_seconds = self._runtime.settings.drain_notice_seconds
        self.should_exit = True

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        if self._runtime.started:
            await self._give_notice()
        await super().shutdown(sockets)

    async def _give_notice(self) -> None:
        """Go on as usual for a moment while /readyz says otherwise; a second ^C ends it."""
        loop = asyncio.get_running_loop()
        until = loop.time() + self._notice_seconds
        while not self.force_exit and loop.time() < until:
            await asyncio.sleep(min(0.1, until - loop.time()))


def listen(host: str, port: int) -> socket.socket:
    """A listening socket, or SettingsError in one sentence."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        return socket.create_server(address[:2], family=family, backlog=2048)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise SettingsError(
                f"Port {port} on {host} is in use by another program: stop it, or choose another "
                f"port with --port or ENGRAM_PORT."
            ) from None
        reason = error.strerror or error
        raise SettingsError(f"Cannot listen on {host} port {port}: {reason}.") from None


def _announce(
    done: Future[Engine], server: DrainingServer, settings: Settings, listener: socket.socket
) -> None:
    """In the starting thread: say what is served, or end the server that cannot."""
    if done.exception() is not None:
        server.should_exit = True
        return
    host, port = listener.getsockname()[:2]
    scheme = "http" if settings.tls_certificate is None else "https"
    url = f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}"
    text = banner(done.result(), url, with_key=settings.has_keys)
    # Never wrapped: the last line is there to be copied. Beside the audit log, if that is stdout.
    Console(stderr=settings.audit_log == STREAM).print(text, highlight=False, soft_wrap=True)


def banner(engine: Engine, url: str, *, with_key: bool) -> str:
    """What is served, where, and the line to try next, in rich's markup."""
    names = engine.snapshot.ready_names
    states = engine.snapshot.states()
    failed = sorted({state.name for state in states if state.status == "failed"})
    shown = ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")
    lines = [
        "",
        f"  [bold]Engram[/] is ready at [bold]{url}[/]",
        f"  backbone  {escape(short_name(engine.backbone.name))}",
        f"  device    {', '.join(engine.config.devices)} ({engine.backbone.precision})",
        f"  store     {escape(engine.store_url)}",
        f"  tasks     {len(names)} ready" + (f": {shown}" if names else "; publish one to begin"),
    ]
    if failed:
        lines.append(f"  [red]failed    {', '.join(failed)}[/] (GET /tasks says why)")
    key = "-H 'X-API-Key: …' " if with_key else ""
    query = "?tasks=" + ",".join(names[:2]) if names else ""
    return "\n".join([*lines, "", f"  curl {key}-T cat.jpg '{url}/predict{query}'", ""])


def _explain_failure(runtime: Runtime) -> None:
    """Raise what stopped the engine: the command line shows messages meant for people."""
    if not runtime.starting.done():
        return
    error = runtime.starting.exception()
    if isinstance(error, EngramError | TaskStoreError):
        raise error
    if error is not None:
        raise SettingsError(f"The server could not start: {error}") from error
