"""The server as a Ray Serve application: `serve run server.ray_app:build`. Needs `engram[ray]`.

Ray starts and stops replicas and shares the requests out. It holds no state: a replica is a server
like any other, with its settings from the environment and its tasks from the store.
docs/how-to/ray.md says how to deploy it.
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

from server import logs
from server.app import create_app
from server.errors import EngineError, SettingsError
from server.runtime import Runtime
from server.settings import PREFIX, Settings, load_settings, misspelt_variables

# Twice what an engine admits by default (ENGRAM_QUEUE_IMAGES). The engine makes batches of what
# waits inside it, so Ray must let requests in, not line them up outside; and it is the engine's
# queue that ends, with 429 and Retry-After at once, where Ray's in the proxies would grow.
MAX_ONGOING_REQUESTS = 512
# How long a leaving replica may take before it is killed: more than ENGRAM_DRAIN_SECONDS.
LEAVING_SECONDS = 45.0

_log = logging.getLogger("engram.ray")


class Options(BaseModel):
    """What `args` in a config file, or `name=value` after `serve run`, may say; in Ray's words."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    min_replicas: int = Field(1, ge=0)
    max_replicas: int = Field(1, ge=1)
    # Requests per replica, being answered or waiting: more are a reason for another replica.
    target_ongoing_requests: float = Field(16, gt=0)
    # The share of a node that each replica takes. Below 1, several replicas share a GPU.
    num_cpus: float = Field(1, gt=0)
    num_gpus: float = Field(0, ge=0)

    @field_validator("num_gpus")
    @classmethod
    def _whole_above_one(cls, value: float) -> float:
        if value > 1 and value != math.floor(value):
            raise ValueError("only below 1 does Ray give parts of a GPU; above it, whole ones")
        return value


def build(options: Options) -> Application:
    """The application that Ray deploys."""
    deployment = serve.deployment(
        name="engram",
        ray_actor_options={"num_cpus": options.num_cpus, "num_gpus": options.num_gpus},
        autoscaling_config={
            "min_replicas": options.min_replicas,
            "max_replicas": options.max_replicas,
            "target_ongoing_requests": options.target_ongoing_requests,
        },
        max_ongoing_requests=MAX_ONGOING_REQUESTS,
        graceful_shutdown_timeout_s=LEAVING_SECONDS,
    )
    return deployment(serve.ingress(make_app)(Replica)).bind()


def make_app() -> FastAPI:
    """The server of this replica, called by Ray in the replica's process."""
    share = ray.get_runtime_context().get_assigned_resources()  # type: ignore[no-untyped-call]
    settings = settings_for(cpus=share.get("CPU", 0), gpus=share.get("GPU", 0))
    logs.configure(settings.log_format, settings.log_level)
    for sentence in misspelt_variables(os.environ):
        _log.warning(sentence)
    return create_app(settings)


class Replica:
    """One server. Ray runs the lifespan of its application, and so starts and drains its engine."""

    app: FastAPI  # given by serve.ingress

    async def check_health(self) -> None:
        """Return when requests may come. Ray sends none before, and replaces a replica that fails.

        Ray asks once after the application has begun to start, and every ten seconds from then on.
        """
        runtime: Runtime = self.app.state.runtime
        # Shielded: if Ray stops waiting, the engine goes on starting.
        await asyncio.shield(asyncio.wrap_future(runtime.starting))
        if runtime.reasons:
            raise EngineError(f"This replica cannot answer: {'; '.join(runtime.reasons)}.")


def settings_for(cpus: float, gpus: float) -> Settings:
    """The settings of the environment, and for what it leaves open those that fit the share."""
    threads = max(1, math.floor(cpus))
    fitting: dict[str, object] = {
        # Ray's proxies listen, and nothing here tells where: the cautious guess demands a key.
        "host": "0.0.0.0",
        # Ray shows a replica its own GPUs as the first ones; one that has none still sees all.
        "devices": tuple(f"cuda:{index}" for index in range(math.ceil(gpus))) or ("cpu",),
        "torch_threads": threads,
        "decode_threads": threads,
    }
    left_open = {name: fitting[name] for name in fitting if PREFIX + name.upper() not in os.environ}
    # No port, and so no address for other replicas: nobody can reach just this one.
    settings = load_settings(port=0, **left_open)
    if not _is_shared(settings.store):
        raise SettingsError(
            f"{PREFIX}STORE is '{settings.store}', which would be another store for each replica: "
            f"set it to a URL (s3, gs or az), or to the absolute path of a folder that all nodes "
            f"of the cluster see."
        )
    return settings


def _is_shared(store: str) -> bool:
    """Whether a store means the same in every replica, as far as its name tells."""
    scheme, separator, _ = store.partition("://")
    return scheme != "memory" if separator else Path(store).is_absolute()
