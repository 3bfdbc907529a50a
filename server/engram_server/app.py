"""The composition root: from settings to an application that starts and stops its engine.

The application answers at once: live but not ready, and predictions get 503 until the engine is
warm. Two applications in one process share nothing.
"""

import asyncio
import gc
import logging
import socket
import threading
from collections.abc import AsyncIterator, Mapping
from concurrent.futures import Future
from contextlib import asynccontextmanager
from dataclasses import fields, replace
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from anyio import to_thread
from engram_store import BundleCache, open_store
from fastapi import FastAPI
from fastapi.telemetry import TelemetryConfig

from engram_server import embedded
from engram_server.access.keys import Keys
from engram_server.api import problems
from engram_server.api.direct import DirectRoutes, add_routes, leave_out_outer_layers
from engram_server.api.middleware import QUIET, RequestMiddleware
from engram_server.api.routes import (
    console,
    docs,
    embeddings,
    examples,
    health,
    predict,
    replicas,
    rollout,
    tasks,
)
from engram_server.api.routes.v2 import infer, models
from engram_server.documentation import OPEN_INFERENCE
from engram_server.edge.cors import allow_origins
from engram_server.edge.proxies import TrustedProxies
from engram_server.engine.engine import Engine
from engram_server.engine.types import EngineConfig
from engram_server.errors import SettingsError
from engram_server.model import load_backbone
from engram_server.model.families.text_tower import open_text_tower
from engram_server.model.kernels.linear import has_int8_linear
from engram_server.observability.audit import AuditLog, Chain
from engram_server.observability.metrics import INFLIGHT_BODY_BYTES, KEYS_FILE_BROKEN, Metrics
from engram_server.processes.process import Process
from engram_server.runtime import Pools, Runtime
from engram_server.settings import Settings

if TYPE_CHECKING:  # the extras `openid`, `tracing` and `grpc` may not be installed
    from engram_server.access.oidc import OpenIdTokens
    from engram_server.api.rpc.server import RpcServer
    from engram_server.observability.tracing import Tracing

DTYPES: Mapping[str, torch.dtype] = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}

# Otherwise FastAPI uses the tracing of its process.
_NO_TELEMETRY: TelemetryConfig = {
    "tracing": False,
    "metrics": False,
    "logs": False,
    "auto_configure": False,
}

# In the order in which requests are matched: the most frequent first.
_ROUTERS = (
    predict.router,
    health.router,
    embeddings.router,
    examples.reading,  # before tasks, whose names may have a slash
    examples.teaching,
    rollout.reading,
    rollout.changing,
    tasks.reading,
    tasks.checking,
    tasks.changing,
    replicas.router,
    infer.router,
    models.router,
    docs.router,
    console.router,
)
# Bodies that routes read themselves, for the OpenAPI document.
_BODIES = (
    predict.PredictBody,
    embeddings.EmbeddingsBody,
    examples.TeachBody,
    examples.CorrectBody,
    rollout.FeedbackBody,
    rollout.PromoteBody,
    tasks.AliasTarget,
    infer.InferRequest,
    models.IndexRequest,
    models.ControlRequest,
    models.ProtocolError,
    problems.ProblemDocument,
)

_START_PAUSE = 0.05  # seconds
_log = logging.getLogger("engram.app")


def create_app(
    settings: Settings,
    engine: Engine | None = None,
    metrics: Metrics | None = None,
    *,
    process: Process | None = None,
) -> FastAPI:
    """Create an application.

    Pass a running engine to embed it; its owner stops it. Pass the metrics that it reports to as
    well, or /metrics has only those of HTTP. `process` says which of several processes this is.
    """
    runtime = build_runtime(settings, metrics or build_metrics(settings), process)
    if runtime.audit is not None:
        runtime.audit.start()  # fails at once if the log cannot be written
    if engine is not None:
        runtime.starting.set_result(engine)
    app = FastAPI(
        title="Engram",
        summary="One frozen Vision Transformer, any number of tasks, one pass.",
        description="The routes below /v2 implement the Open Inference Protocol: see "
        f"{OPEN_INFERENCE}.",
        version=metadata.version("engram-vit-server"),
        lifespan=_lifespan if engine is None else _lifespan_of_external_engine,
        openapi_url=None,
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,  # a redirect would repeat the client's Host header
        telemetry=_NO_TELEMETRY if runtime.tracing is None else runtime.tracing.telemetry,
    )
    app.state.runtime = runtime
    if runtime.tracing is None:
        app.add_middleware(DirectRoutes, host=app)
    app.add_middleware(RequestMiddleware, runtime=runtime)
    if settings.cors_origins:
        allow_origins(app, settings.cors_origins)  # outermost, so errors have the headers too
    problems.install(app)
    docs.install(app, _BODIES)
    add_routes(app, _ROUTERS)
    if runtime.tracing is None:
        leave_out_outer_layers(app)
    return app


def build_runtime(settings: Settings, metrics: Metrics, process: Process | None = None) -> Runtime:
    """Build everything but the engine."""
    if settings.grpc_port is not None:
        _import_rpc_server()  # fails now if the extra is not installed
    keys_file = None if settings.keys_file is None else Path(settings.keys_file)
    runtime = Runtime(
        settings=settings,
        metrics=metrics,
        keys=Keys(settings.api_key, settings.admin_key, keys_file),
        pools=Pools(settings),
        audit=_build_audit_log(settings, metrics, process),
        proxies=TrustedProxies(settings.trusted_proxies) if settings.trusted_proxies else None,
        tracing=_build_tracing() if settings.tracing else None,
        openid=None if settings.oidc_issuer is None else _build_openid(settings),
        process=process,
    )
    metrics.watch(KEYS_FILE_BROKEN, lambda: runtime.keys.error is not None)
    metrics.watch(INFLIGHT_BODY_BYTES, lambda: runtime.pools.body_bytes.used)
    return runtime


def _build_audit_log(
    settings: Settings, metrics: Metrics, process: Process | None
) -> AuditLog | None:
    if settings.audit_log is None:
        return None
    chain = None if process is None else Chain(process.number, process.audit_lock)
    return AuditLog(settings.audit_log, metrics, chain=chain)


def build_metrics(settings: Settings) -> Metrics:
    return Metrics(max_tasks=settings.metric_tasks, device_memory=_device_memory)


def _build_tracing() -> "Tracing":
    try:
        from engram_server.observability.tracing import Tracing
    except ModuleNotFoundError as error:
        raise SettingsError(
            f"ENGRAM_TRACING requires {error.name}, which is not installed. Run "
            f"pip install 'engram-vit[tracing]', or unset it."
        ) from None
    return Tracing(untraced=QUIET)


def _import_rpc_server() -> "type[RpcServer]":
    try:
        from engram_server.api.rpc.server import RpcServer
    except ModuleNotFoundError as error:
        raise SettingsError(
            f"ENGRAM_GRPC_PORT requires {error.name}, which is not installed. Run "
            f"pip install 'engram-vit[grpc]', or unset it."
        ) from None
    return RpcServer


def _build_openid(settings: Settings) -> "OpenIdTokens":
    try:
        from engram_server.access.oidc import OpenIdTokens, Provider
    except ModuleNotFoundError as error:
        raise SettingsError(
            f"ENGRAM_OIDC_ISSUER requires {error.name}, which is not installed. Run "
            f"pip install 'engram-vit[openid]', or unset it."
        ) from None
    # The settings require all three together.
    provider = Provider(
        issuer=settings.oidc_issuer or "",
        audience=settings.oidc_audience or "",
        jwks=settings.oidc_jwks or "",
        algorithms=settings.oidc_algorithms,
        leeway_seconds=settings.oidc_leeway_seconds,
        scope_claim=settings.oidc_scope_claim,
    )
    return OpenIdTokens(provider)


def build_engine(settings: Settings, metrics: Metrics, process: int | None = None) -> Engine:
    """Build the engine without starting it. Blocks while the backbone is loaded."""
    config = replace(engine_config(settings), process=process)
    if settings.torch_threads is not None:
        torch.set_num_threads(settings.torch_threads)
    # The store first: a wrong URL fails before the backbone is loaded.
    keep = settings.bundle_cache_bytes
    cache = BundleCache(settings.bundle_cache, keep) if keep else None
    store = open_store(settings.store, cache=cache)
    if settings.backbone == str(embedded.BACKBONE):
        embedded.publish_demo_tasks(store)
    backbone = load_backbone(settings.backbone, image_size=settings.image_size)
    return Engine(backbone, store, config, metrics, text_tower=open_text_tower(settings.backbone))


def engine_config(settings: Settings) -> EngineConfig:
    """Configure the engine from the settings of the same names, and those that need translation."""
    devices = choose_devices(settings.devices)
    if settings.precision == "int8":
        _check_int8(devices, compiled=settings.compile)
    names = {each.name for each in fields(EngineConfig)} & Settings.model_fields.keys()
    translated = {
        "devices": devices,
        "dtype": _precision(settings.precision, devices),
        "int8": settings.precision == "int8",
        "cache_dtype": DTYPES[settings.cache_precision],
        "cache_device": "cpu" if settings.cache_device == "host" else None,
        "pinned_tasks": frozenset(settings.pinned_tasks),
        "heartbeat_seconds": settings.heartbeat_seconds or None,
        "address": _address(settings),
        "version": metadata.version("engram-vit-server"),
        "compiled": settings.compile,
        "several_callers": settings.several_callers,
    }
    return EngineConfig(**{name: getattr(settings, name) for name in names} | translated)


def _address(settings: Settings) -> str | None:
    """The URL of this server; None if the port is not fixed."""
    host = settings.host
    if host in ("0.0.0.0", "::"):
        host = socket.gethostname()
    if ":" in host:
        host = f"[{host}]"
    scheme = "http" if settings.tls_certificate is None else "https"
    return f"{scheme}://{host}:{settings.port}" if settings.port else None


def choose_devices(named: tuple[str, ...]) -> tuple[str, ...]:
    """Check the devices against this machine, or raise SettingsError."""
    if named == ("auto",):
        return ("cuda:0",) if torch.cuda.is_available() else ("cpu",)
    for name in named:
        try:
            device = torch.device(name)
        except RuntimeError:
            raise SettingsError(
                f"Unknown device '{name}'. Valid devices: cpu, cuda, cuda:N."
            ) from None
        present = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if device.type == "cuda" and (device.index or 0) >= present:
            raise SettingsError(
                f"Device '{name}' does not exist: torch sees {present} CUDA devices. Set "
                f"ENGRAM_DEVICES to one of them, or to cpu."
            )
    return named


def _precision(requested: str, devices: tuple[str, ...]) -> torch.dtype:
    if requested == "int8":
        return torch.float32  # except for the backbone's matrices
    if requested != "auto":
        return DTYPES[requested]
    if any(torch.device(name).type == "cpu" for name in devices):
        return torch.float32
    return (
        torch.bfloat16 if torch.cuda.is_bf16_supported(including_emulation=False) else torch.float16
    )


def _check_int8(devices: tuple[str, ...], *, compiled: bool) -> None:
    """Raise SettingsError if int8 is not supported."""
    if compiled:
        raise SettingsError(
            "ENGRAM_COMPILE and ENGRAM_PRECISION=int8 are mutually exclusive. Unset one of them."
        )
    others = [name for name in devices if torch.device(name).type != "cpu"]
    if others:
        raise SettingsError(
            f"ENGRAM_PRECISION=int8 is for CPUs only; ENGRAM_DEVICES has {', '.join(others)}. Set "
            f"ENGRAM_PRECISION to bfloat16, or ENGRAM_DEVICES to cpu."
        )
    if not has_int8_linear():
        raise SettingsError(
            "ENGRAM_PRECISION=int8 requires an x86-64 processor with AVX2. Set ENGRAM_PRECISION to "
            "float32."
        )


@asynccontextmanager
async def _lifespan_of_external_engine(app: FastAPI) -> AsyncIterator[None]:
    runtime: Runtime = app.state.runtime
    async with _background_services(runtime), _rpc_server(runtime):
        yield


@asynccontextmanager
async def _lifespan(app: FastAPI) -> AsyncIterator[None]:
    runtime: Runtime = app.state.runtime
    async with _background_services(runtime):
        # Not a pool's thread: exit would wait for it, and a download may take minutes.
        threading.Thread(target=_start, args=(runtime,), name="engram-start", daemon=True).start()
        try:
            if runtime.process is not None and not runtime.process.alone:
                await _until_started(runtime)
            async with _rpc_server(runtime):
                yield
        finally:
            runtime.draining = True
            if runtime.started:
                engine = runtime.engine
                if not await engine.predictions.drain(runtime.settings.drain_seconds):
                    pending = engine.predictions.pending_images
                    _log.warning("shutting down with %d images unanswered", pending)
                await to_thread.run_sync(engine.stop)


async def _until_started(runtime: Runtime) -> None:
    """Accept no connections yet: other processes on the port answer them."""
    while not (runtime.starting.done() or runtime.draining):
        await asyncio.sleep(_START_PAUSE)


@asynccontextmanager
async def _rpc_server(runtime: Runtime) -> AsyncIterator[None]:
    """Serve gRPC if it has a port; at the end, wait for the calls in flight."""
    if runtime.settings.grpc_port is None:
        yield
        return
    server = _import_rpc_server()(runtime)
    runtime.grpc_port = await server.start()
    try:
        yield
    finally:
        runtime.draining = True
        await server.stop(runtime.settings.drain_seconds)


@asynccontextmanager
async def _background_services(runtime: Runtime) -> AsyncIterator[None]:
    """Run the audit log, the refresh of OpenID keys, tracing and the exchange of metrics."""
    audit, openid, tracing = runtime.audit, runtime.openid, runtime.tracing
    siblings = runtime.siblings
    if siblings is not None:
        await siblings.start()
    if audit is not None:
        audit.note({"action": "start", "server": metadata.version("engram-vit-server")})
        note = audit.note
        runtime.keys.on_change = lambda ids: note({"action": "change_keys", "keys": ids})
    if openid is not None:
        openid.start()
    try:
        yield
    finally:
        runtime.threads.shutdown()
        runtime.keys.stop()
        if siblings is not None:
            await siblings.stop()
        if openid is not None:
            await to_thread.run_sync(openid.stop)
        if audit is not None:
            audit.note({"action": "stop"})
            await to_thread.run_sync(audit.stop)
        if tracing is not None:
            await to_thread.run_sync(tracing.shutdown)


def _start(runtime: Runtime) -> None:
    outcome: Future[Engine] = runtime.starting
    try:
        number = None if runtime.process is None else runtime.process.number
        engine = build_engine(runtime.settings, runtime.metrics, number)
        engine.start()
    except Exception as error:  # noqa: BLE001 - thread boundary: raised in all waiters
        _log.critical("the server failed to start: %s", error)
        outcome.set_exception(error)
        return
    tune_garbage_collection()
    outcome.set_result(engine)


def tune_garbage_collection() -> None:
    """Keep the collector of cyclic garbage from taking the time of requests.

    What exists now is excluded: a full collection would pause all requests. The others are rarer:
    with Python's thresholds they take a tenth of a small request.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 50, 100)


def _device_memory() -> Mapping[str, int]:
    if not torch.cuda.is_available():
        return {}
    return {
        f"cuda:{index}": torch.cuda.memory_allocated(index)
        for index in range(torch.cuda.device_count())
    }
