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
import tempfile
from collections.abc import Mapping
from concurrent.futures import Future
from pathlib import Path
from types import FrameType
from typing import Annotated, Any, NoReturn

import torch
import typer
import uvicorn
from engram_bundle import TaskStoreError
from fastapi import FastAPI
from rich.console import Console
from rich.markup import escape

from engram_server.api.problems import problem_response
from engram_server.app import create_app
from engram_server.documentation import CONFIGURATION
from engram_server.edge.connections import Connections
from engram_server.engine.engine import Engine
from engram_server.errors import EngramError, SettingsError
from engram_server.observability import logs
from engram_server.observability.audit import STREAM
from engram_server.processes.accepting import Acceptor, ConnectionCounts
from engram_server.processes.process import Process
from engram_server.processes.supervisor import Plan
from engram_server.runtime import Runtime
from engram_server.settings import PREFIX, Settings, load_settings, unknown_variables

# A pass takes the interpreter lock hundreds of times, and each time may wait this long for another
# thread that is busy. Python's default is 5 ms; much less slows down ordinary requests.
SWITCH_SECONDS = 0.002
_FORCED = 130
_OWN_FILES = 512
_LONGEST_FOLDER = 80  # the path of a Unix socket has about a hundred characters


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
    processes: Annotated[
        int | None, typer.Option(help="Server processes that share the port (default: 1).")
    ] = None,
    process: Annotated[str | None, typer.Option(hidden=True)] = None,  # from the supervisor
) -> None:
    """Serve a backbone and the tasks of a store over HTTP."""
    options = {
        "backbone": backbone,
        "store": store,
        "host": host,
        "port": port,
        "devices": device,
        "processes": processes,
    }
    settings = load_settings(**options)
    if process is not None:
        _serve_process(settings, Process.parse(process))
        return
    logs.configure(settings.log_format, settings.log_level)
    errors = Console(stderr=True)
    for sentence in unknown_variables(os.environ):
        errors.print(f"[yellow]warning:[/] {sentence}", highlight=False, soft_wrap=True)
    if settings.processes > 1:
        _become_supervisor(settings, options)
    if settings.grpc_port:  # grpc opens it later, and would not say why it cannot
        listen(settings.host, settings.grpc_port, "ENGRAM_GRPC_PORT").close()
    _run(settings, listen(settings.host, settings.port))


def _become_supervisor(settings: Settings, options: Mapping[str, object]) -> NoReturn:
    """Open the ports, and replace this program by a supervisor, which holds them."""
    ports = {"port": listen(settings.host, settings.port)}
    if settings.grpc_port is not None:
        if settings.grpc_port:
            listen(settings.host, settings.grpc_port, "ENGRAM_GRPC_PORT").close()
        ports["grpc_port"] = _reserve(settings.host, settings.grpc_port)
    for each in ports.values():
        each.set_inheritable(True)
    given = {name: value for name, value in options.items() if value is not None}
    given |= {name: each.getsockname()[1] for name, each in ports.items()}
    variables = {PREFIX + name.upper(): str(value) for name, value in given.items()}
    listener, folder = ports["port"].fileno(), _make_private_folder()
    plan = Plan(settings.processes, listener, folder, settings.log_format, settings.log_level)
    command = plan.command()
    os.execve(command[0], command, {**os.environ, **variables})


def _make_private_folder() -> str:
    """A folder for the sockets of the processes."""
    try:
        folder = tempfile.mkdtemp(prefix="engram-")
    except OSError as error:
        raise SettingsError(
            f"Several processes need a folder for temporary files: {error.strerror}. Set TMPDIR."
        ) from None
    if len(folder) > _LONGEST_FOLDER:
        os.rmdir(folder)
        raise SettingsError(
            f"The folder for temporary files, '{folder}', is too long for sockets (limit "
            f"{_LONGEST_FOLDER} characters). Set TMPDIR to a shorter one."
        )
    return folder


def _reserve(host: str, port: int) -> socket.socket:
    """Hold a port that every process listens on by itself. Port 0 selects a free one."""
    family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    reserved = socket.socket(family, socket.SOCK_STREAM)
    reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    reserved.bind(address)
    return reserved


def _serve_process(settings: Settings, process: Process) -> None:
    """Serve as one of several processes."""
    settings = settings.for_one_process(torch.get_num_threads())
    logs.configure(settings.log_format, settings.log_level, process=process.number)
    process.follow_supervisor(settings.drain_notice_seconds + settings.drain_seconds)
    _run(settings, process.open_listener(), process)


def _run(settings: Settings, listener: socket.socket, process: Process | None = None) -> None:
    """Serve until a signal ends it."""
    # Replace port 0 by the real port, for heartbeats.
    settings = settings.model_copy(update={"port": listener.getsockname()[1]})
    app = create_app(settings, process=process)
    runtime: Runtime = app.state.runtime
    allow_open_files(settings.connections)
    sys.setswitchinterval(SWITCH_SECONDS)
    shared = None if process is None else listener
    server = DrainingServer(uvicorn_config(app, settings), runtime, shared)
    runtime.starting.add_done_callback(lambda done: _announce(done, server, settings, listener))
    server.run(sockets=[listener] if process is None else [])
    _explain_failure(runtime)
    if server.force_exit:
        raise typer.Exit(_FORCED)


# The help text; a docstring cannot name a constant.
serve.__doc__ = (
    f"{serve.__doc__}\n\nAll other settings are environment variables: see {CONFIGURATION}."
)


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

    def __init__(
        self, config: uvicorn.Config, runtime: Runtime, shared: socket.socket | None = None
    ) -> None:
        super().__init__(config)
        self.runtime = runtime
        self._shared = shared  # the listening socket, if other processes have it too
        self._notice_seconds = 0.0

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        # Overrides uvicorn, which re-raises the signal at the end, so the exit code is never 0.
        if self.should_exit and sig == signal.SIGINT:
            self.force_exit = True
            return
        self.runtime.draining = True
        if sig == signal.SIGTERM and not self.should_exit:
            # Load balancers must first see that readiness fails.
            self._notice_seconds = self.runtime.settings.drain_notice_seconds
        self.should_exit = True

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        process = self.runtime.process
        if process is not None and self._shared is not None:
            acceptor = Acceptor(
                self._shared,
                ConnectionCounts(process.connection_counts),
                process.number,
                make_protocol=self._make_protocol,
                connections=lambda: len(self.server_state.connections),
                context=self.config.ssl,
            )
            self.servers.append(acceptor)  # type: ignore[arg-type]  # what uvicorn uses of one
            self.runtime.starting.add_done_callback(self._report_ready)

    def _report_ready(self, done: Future[Engine]) -> None:
        process = self.runtime.process
        if process is not None and done.exception() is None:
            process.report_ready()
            process.replace_when(lambda: self.runtime.broken)

    def _make_protocol(self) -> asyncio.Protocol:
        return self.config.http_protocol_class(  # type: ignore[call-arg]  # as uvicorn does it
            config=self.config,
            server_state=self.server_state,
            app_state=self.lifespan.state,
        )

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        if self.runtime.started:
            await self._give_notice()
        await super().shutdown(sockets)

    async def _give_notice(self) -> None:
        """Keep serving while /readyz fails; a second ^C ends it."""
        loop = asyncio.get_running_loop()
        until = loop.time() + self._notice_seconds
        while not self.force_exit and loop.time() < until:
            await asyncio.sleep(min(0.1, until - loop.time()))


def listen(host: str, port: int, setting: str = "--port or ENGRAM_PORT") -> socket.socket:
    """Open the listening socket, or raise SettingsError."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        return socket.create_server(address[:2], family=family, backlog=2048)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise SettingsError(
                f"Port {port} on {host} is in use by another program. Stop it, or choose another "
                f"port with {setting}."
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
    process = server.runtime.process
    if process is not None and not process.announce:
        return
    host, port = listener.getsockname()[:2]
    scheme = "http" if settings.tls_certificate is None else "https"
    url = f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}"
    grpc_port = server.runtime.grpc_port
    text = banner(
        done.result(),
        url,
        with_key=settings.has_keys,
        grpc_port=grpc_port,
        processes=settings.processes,
    )
    # Not wrapped: users copy the last line. To stderr if the audit log is on stdout.
    Console(stderr=settings.audit_log == STREAM).print(text, highlight=False, soft_wrap=True)


def banner(
    engine: Engine,
    url: str,
    *,
    with_key: bool,
    grpc_port: int | None = None,
    processes: int = 1,
) -> str:
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
    if processes > 1:
        lines.append(f"  processes {processes}; this is the first one that is ready")
    if grpc_port is not None:
        lines.append(f"  gRPC      port {grpc_port}")
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
