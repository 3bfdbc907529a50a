"""The server as a Ray Serve application: `serve run engram_server.ray_app:build`.

Requires the extra `ray`. Ray starts and stops replicas and distributes requests. A replica is an
ordinary server with settings from the environment and tasks from the store. See docs/how-to/ray.md.
"""

import asyncio
import logging
import math
import os
from pathlib import Path

import ray
from fastapi import FastAPI
from pydantic import BaseModel, ConfigDict, Field, field_validator
from ray import serve
from ray.serve import Application

from engram_server.app import create_app
from engram_server.errors import EngineError, SettingsError
from engram_server.observability import logs
from engram_server.runtime import Runtime
from engram_server.settings import PREFIX, Settings, load_settings, unknown_variables

# Twice the default of ENGRAM_QUEUE_IMAGES. The engine batches what waits in its own queue and
# rejects the rest with 429; requests must not pile up in Ray's proxies instead.
MAX_ONGOING_REQUESTS = 512
# Time for a replica to drain before it is killed: more than ENGRAM_DRAIN_SECONDS.
SHUTDOWN_SECONDS = 45.0

_log = logging.getLogger("engram.ray")


class DeploymentOptions(BaseModel):
    """Arguments from `args` in a config file or `name=value` after `serve run`."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    min_replicas: int = Field(1, ge=0)
    max_replicas: int = Field(1, ge=1)
    # Requests in flight per replica above which Ray adds a replica.
    target_ongoing_requests: float = Field(16, gt=0)
    # Resources per replica. Below 1, several replicas share a GPU.
    num_cpus: float = Field(1, gt=0)
    num_gpus: float = Field(0, ge=0)

    @field_validator("num_gpus")
    @classmethod
    def _whole_above_one(cls, value: float) -> float:
        if value > 1 and value != math.floor(value):
            raise ValueError("must be a whole number above 1; Ray splits only single GPUs")
        return value


def build(options: DeploymentOptions) -> Application:
    """Build the application that Ray deploys."""
    deployment = serve.deployment(
        name="engram",
        ray_actor_options={"num_cpus": options.num_cpus, "num_gpus": options.num_gpus},
        autoscaling_config={
            "min_replicas": options.min_replicas,
            "max_replicas": options.max_replicas,
            "target_ongoing_requests": options.target_ongoing_requests,
        },
        max_ongoing_requests=MAX_ONGOING_REQUESTS,
        graceful_shutdown_timeout_s=SHUTDOWN_SECONDS,
    )
    return deployment(serve.ingress(make_app)(Replica)).bind()


def make_app() -> FastAPI:
    """Create the server; Ray calls this in the replica's process."""
    share = ray.get_runtime_context().get_assigned_resources()  # type: ignore[no-untyped-call]
    settings = settings_for(cpus=share.get("CPU", 0), gpus=share.get("GPU", 0))
    logs.configure(settings.log_format, settings.log_level)
    for sentence in unknown_variables(os.environ):
        _log.warning(sentence)
    return create_app(settings)


class Replica:
    """One server. Ray runs the application's lifespan, which starts and drains the engine."""

    app: FastAPI  # set by serve.ingress

    async def check_health(self) -> None:
        """Return when the server is ready. Ray replaces a replica that fails.

        Ray calls this after the application starts and then every ten seconds; it sends no requests
        before the first success.
        """
        runtime: Runtime = self.app.state.runtime
        # Shielded: the engine keeps starting if Ray stops waiting.
        await asyncio.shield(asyncio.wrap_future(runtime.starting))
        if runtime.reasons:
            raise EngineError(f"This replica is not ready: {'; '.join(runtime.reasons)}.")


def settings_for(cpus: float, gpus: float) -> Settings:
    """The settings from the environment; unset ones follow from the replica's resources."""
    threads = max(1, math.floor(cpus))
    fitting: dict[str, object] = {
        # Ray's proxies may listen on any address: 0.0.0.0 makes a key mandatory.
        "host": "0.0.0.0",
        # Ray numbers the GPUs of a replica from 0; a replica without GPUs still sees all.
        "devices": tuple(f"cuda:{index}" for index in range(math.ceil(gpus))) or ("cpu",),
        "torch_threads": threads,
        "decode_threads": threads,
    }
    unset = {name: fitting[name] for name in fitting if PREFIX + name.upper() not in os.environ}
    # Port 0: a replica has no address of its own behind Ray's proxies.
    settings = load_settings(port=0, **unset)
    if settings.grpc_port is not None:
        raise SettingsError(
            f"{PREFIX}GRPC_PORT is not supported on Ray Serve: replicas of one machine would share "
            f"the port. Unset it."
        )
    if settings.processes > 1:
        raise SettingsError(
            f"{PREFIX}PROCESSES is not supported on Ray Serve, which starts replicas itself. Unset "
            f"it, and raise max_replicas."
        )
    if not _is_shared(settings.store):
        raise SettingsError(
            f"{PREFIX}STORE is '{settings.store}', which is a different store on each replica. Set "
            f"it to a URL (s3, gs or az) or to the absolute path of a folder that all nodes share."
        )
    return settings


def _is_shared(store: str) -> bool:
    """Whether every replica resolves a store to the same place."""
    scheme, separator, _ = store.partition("://")
    return scheme != "memory" if separator else Path(store).is_absolute()
