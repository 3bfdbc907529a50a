"""The composition root: from settings to an application that starts and stops its engine.

The application answers from the first moment: alive, but not ready, and predictions refused with
503, until the engine is warm. Nothing is shared between two applications of one process.
"""

import gc
import logging
import socket
import threading
from collections.abc import AsyncIterator, Mapping
from concurrent.futures import Future
from contextlib import asynccontextmanager
from importlib import metadata
from typing import TYPE_CHECKING

import torch
from anyio import to_thread
from fastapi import FastAPI
from fastapi.telemetry import TelemetryConfig

from server import embedded
from server.api import auth, console, docs, examples, health, predict, problems, replicas, tasks
from server.api.middleware import QUIET, RequestMiddleware
from server.api.v2 import infer, models
from server.engine.engine import Engine, EngineConfig
from server.errors import SettingsError
from server.metrics import Metrics
from server.model import load_backbone
from server.model.linear import has_int8
from server.model.text import open_text_tower
from server.runtime import Runtime
from server.settings import Settings
from task_store import BundleCache, open_store

if TYPE_CHECKING:  # need the extras `oidc` and `otel`, which may not be installed
    from server.oidc import OpenIdTokens
    from server.tracing import Tracing

DTYPES: Mapping[str, torch.dtype] = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}

# Without this FastAPI joins in whatever tracing its process has.
_NO_TELEMETRY: TelemetryConfig = {
    "tracing": False,
    "metrics": False,
    "logs": False,
    "auto_configure": False,
}

_ROUTERS = (
    predict.router,
    examples.reading,  # before the tasks, whose names may have a slash
    examples.teaching,
    tasks.reading,
    tasks.checking,
    tasks.changing,
    replicas.router,
    health.router,
    infer.router,
    models.router,
    docs.router,
    console.router,
)
# What the OpenAPI document shows and no signature does: bodies that routes read by themselves.
_BODIES = (
    predict.PredictBody,
    examples.TeachBody,
    examples.CorrectBody,
    tasks.LabelTarget,
    infer.InferRequest,
    models.IndexRequest,
    models.ControlRequest,
    models.ProtocolError,
    problems.ProblemDocument,
)

_log = logging.getLogger("engram.app")


def create_app(
    settings: Settings, engine: Engine | None = None, metrics: Metrics | None = None
) -> FastAPI:
    """An application. An engine that is given must run already, and stays its owner's to stop.

    Give the metrics too that such an engine reports to, or /metrics knows of the requests alone.
    """
    tracing = _build_tracing() if settings.tracing else None
    openid = None if settings.oidc_issuer is None else _build_openid(settings)
    runtime = Runtime(settings, metrics or build_metrics(settings), tracing, openid)
    if runtime.audit is not None:
        runtime.audit.start()  # at once: nobody is served where it cannot be written
    if engine is not None:
        runtime.starting.set_result(engine)
    app = FastAPI(
        title="Engram",
        summary="One frozen Vision Transformer, any number of tasks, one pass.",
        description="Below /v2 the server speaks the Open Inference Protocol, for the tools that "
        "speak it already; docs/reference/open-inference.md says what every part means here.",
        version=metadata.version("engram"),
        lifespan=_external if engine is not None else _owned,
        openapi_url=None,
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,  # the redirect would say whatever Host the client said
        telemetry=_NO_TELEMETRY if tracing is None else tracing.telemetry,
    )
    app.state.runtime = runtime
    app.add_middleware(RequestMiddleware, runtime=runtime)
    problems.install(app)
    docs.install(app, _BODIES)
    app.state.routes = [route for router in _ROUTERS for route in router.routes]
    auth.check_routes(app.state.routes)
    for route in app.state.routes:
        route.operation_id = route.name
    # As they are: what is included is matched a second time, behind a copy of each route.
    app.router.routes.extend(app.state.routes)
    return app


def build_metrics(settings: Settings) -> Metrics:
    """What an engine of these settings reports to."""
    return Metrics(max_tasks=settings.metric_tasks, device_memory=_device_memory)


def _build_tracing() -> "Tracing":
    try:
        from server.tracing import Tracing
    except ModuleNotFoundError as error:
        raise SettingsError(
            f"ENGRAM_TRACING needs OpenTelemetry's SDK, and {error.name} is not installed: "
            f"pip install 'engram[otel]', or leave it off."
        ) from None
    return Tracing(untraced=QUIET)


def _build_openid(settings: Settings) -> "OpenIdTokens":
    try:
        from server.oidc import OpenIdTokens, Provider
    except ModuleNotFoundError as error:
        raise SettingsError(
            f"ENGRAM_OIDC_ISSUER needs PyJWT, and {error.name} is not installed: "
            f"pip install 'engram[oidc]', or leave it unset."
        ) from None
    assert settings.oidc_issuer is not None, "or nobody would ask"
    assert settings.oidc_audience is not None, "as the settings have checked"
    assert settings.oidc_jwks is not None, "likewise"
    provider = Provider(
        issuer=settings.oidc_issuer,
        audience=settings.oidc_audience,
        jwks=settings.oidc_jwks,
        algorithms=settings.oidc_algorithms,
        leeway_seconds=settings.oidc_leeway_seconds,
        scope_claim=settings.oidc_scope_claim,
    )
    return OpenIdTokens(provider)


def build_engine(settings: Settings, metrics: Metrics) -> Engine:
    """The engine these settings describe, not started. Blocks while the backbone is read."""
    config = engine_config(settings)
    if settings.torch_threads is not None:
        torch.set_num_threads(settings.torch_threads)
    # The store first: a wrong address should not cost the time a backbone takes.
    keep = settings.bundle_cache_bytes
    cache = BundleCache(settings.bundle_cache, keep) if keep else None
    store = open_store(settings.store, cache=cache)
    if settings.backbone == str(embedded.BACKBONE):
        embedded.publish_demo_tasks(store)
    backbone = load_backbone(settings.backbone, image_size=settings.image_size)
    return Engine(backbone, store, config, metrics, text_tower=open_text_tower(settings.backbone))


def engine_config(settings: Settings) -> EngineConfig:
    """What the settings mean on this machine."""
    devices = choose_devices(settings.devices)
    if settings.precision == "int8":
        _check_int8(devices, compiled=settings.compile)
    return EngineConfig(
        devices=devices,
        dtype=_precision(settings.precision, devices),
        int8=settings.precision == "int8",
        budget_rows=settings.budget_rows,
        queue_images=settings.queue_images,
        decode_threads=settings.decode_threads,
        max_pixels=settings.max_pixels,
        decoded_bytes=settings.decoded_bytes,
        cache_bytes=settings.cache_bytes,
        cache_dtype=DTYPES[settings.cache_precision],
        cache_device="cpu" if settings.cache_device == "host" else None,
        resident_bytes=settings.resident_bytes,
        pinned_tasks=frozenset(settings.pinned_tasks),
        poll_seconds=settings.poll_seconds,
        heartbeat_seconds=settings.heartbeat_seconds or None,
        address=_address(settings),
        version=metadata.version("engram"),
        compiled=settings.compile,
    )


def _address(settings: Settings) -> str | None:
    """Where this server listens, if that can be told from its settings."""
    host = settings.host
    if host in ("0.0.0.0", "::"):
        host = socket.gethostname()
    if ":" in host:
        host = f"[{host}]"
    scheme = "http" if settings.tls_certificate is None else "https"
    return f"{scheme}://{host}:{settings.port}" if settings.port else None


def choose_devices(named: tuple[str, ...]) -> tuple[str, ...]:
    """The devices of this machine that are meant, or SettingsError."""
    if named == ("auto",):
        return ("cuda:0",) if torch.cuda.is_available() else ("cpu",)
    for name in named:
        try:
            device = torch.device(name)
        except RuntimeError:
            raise SettingsError(
                f"'{name}' is no device: write cpu, or cuda:0, cuda:1 and so on."
            ) from None
        present = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if device.type == "cuda" and (device.index or 0) >= present:
            raise SettingsError(
                f"There is no device '{name}' here: torch sees {present} CUDA devices. Set "
                f"ENGRAM_DEVICES to one that exists, or to cpu."
            )
    return named


def _precision(requested: str, devices: tuple[str, ...]) -> torch.dtype:
    if requested == "int8":
        return torch.float32  # of all but the backbone's matrices
    if requested != "auto":
        return DTYPES[requested]
    if any(torch.device(name).type == "cpu" for name in devices):
        return torch.float32
    return (
        torch.bfloat16 if torch.cuda.is_bf16_supported(including_emulation=False) else torch.float16
    )


def _check_int8(devices: tuple[str, ...], *, compiled: bool) -> None:
    """SettingsError where there are no kernels for it."""
    if compiled:
        raise SettingsError(
            "ENGRAM_COMPILE does nothing for ENGRAM_PRECISION=int8, which has kernels of its own: "
            "leave one of them out."
        )
    others = [name for name in devices if torch.device(name).type != "cpu"]
    if others:
        raise SettingsError(
            f"ENGRAM_PRECISION=int8 is for CPUs, and ENGRAM_DEVICES has {', '.join(others)}: set "
            f"ENGRAM_PRECISION to bfloat16, or ENGRAM_DEVICES to cpu."
        )
    if not has_int8():
        raise SettingsError(
            "ENGRAM_PRECISION=int8 needs an x86-64 processor with AVX2, and this one has not got "
            "it: set ENGRAM_PRECISION to float32."
        )


@asynccontextmanager
async def _external(app: FastAPI) -> AsyncIterator[None]:
    async with _attended(app.state.runtime):
        yield


@asynccontextmanager
async def _owned(app: FastAPI) -> AsyncIterator[None]:
    runtime: Runtime = app.state.runtime
    async with _attended(runtime):
        # Not a pool's thread: those are waited for at exit, and a download may take minutes.
        threading.Thread(target=_start, args=(runtime,), name="engram-start", daemon=True).start()
        try:
            yield
        finally:
            runtime.draining = True
            if runtime.started:
                engine = runtime.engine
                if not await engine.drain(runtime.settings.drain_seconds):
                    _log.warning("shutting down with %d images unanswered", engine.pending_images)
                await to_thread.run_sync(engine.stop)


@asynccontextmanager
async def _attended(runtime: Runtime) -> AsyncIterator[None]:
    """With what goes on beside the engine: the audit log, the provider's keys, traces."""
    audit, openid, tracing = runtime.audit, runtime.openid, runtime.tracing
    if audit is not None:
        audit.note({"action": "start", "server": metadata.version("engram")})
        note = audit.note
        runtime.keys.on_change = lambda ids: note({"action": "change_keys", "keys": ids})
    if openid is not None:
        openid.start()
    try:
        yield
    finally:
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
        engine = build_engine(runtime.settings, runtime.metrics)
        engine.start()
    except Exception as error:  # noqa: BLE001 - the boundary of the thread: told to all who wait
        _log.critical("the server could not start: %s", error)
        outcome.set_exception(error)
        return
    # What is there now stays. Else every full collection walks through all of it, which stops
    # everybody for a large part of a second.
    gc.collect()
    gc.freeze()
    outcome.set_result(engine)


def _device_memory() -> Mapping[str, int]:
    if not torch.cuda.is_available():
        return {}
    return {
        f"cuda:{index}": torch.cuda.memory_allocated(index)
        for index in range(torch.cuda.device_count())
    }
