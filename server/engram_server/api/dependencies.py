"""What the routes share: FastAPI dependencies, schemas, ETags, and limits on concurrency."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Annotated, Any

from anyio import CapacityLimiter, WouldBlock
from fastapi import Depends, Header, Request
from fastapi.params import Depends as Dependency
from pydantic import BaseModel, ConfigDict, Field

from engram_server.access.identity import Scope
from engram_server.api.audit import begin_audit
from engram_server.api.auth import requires
from engram_server.engine.engine import Engine
from engram_server.errors import Overloaded
from engram_server.runtime import Runtime

MIN_GENERATION_TEXT = "Answer from this generation of the catalog or a later one."
# Versions and generations have at most 18 digits.
LARGEST_NUMBER = 10**18 - 1
BINARY: dict[str, Any] = {"schema": {"type": "string", "format": "binary"}}


# The running server. Async, because FastAPI runs plain functions in its thread pool.


async def get_runtime(request: Request) -> Runtime:
    runtime: Runtime = request.app.state.runtime
    return runtime


async def get_engine(request: Request) -> Engine:
    engine: Engine = request.app.state.runtime.engine
    return engine


RuntimeDep = Annotated[Runtime, Depends(get_runtime)]
EngineDep = Annotated[Engine, Depends(get_engine)]


async def catch_up(
    request: Request,
    engine: EngineDep,
    x_min_generation: Annotated[
        int | None, Header(ge=0, le=LARGEST_NUMBER, description=MIN_GENERATION_TEXT)
    ] = None,
) -> None:
    """Reach the generation in the header, and the version in the path if there is one."""
    path = request.path_params
    name, version = path.get("task") or path.get("name"), path.get("version")
    refs = None if version is None else [f"{name}@{version}"]
    await engine.tasks.snapshot_for(refs, x_min_generation)


def requires_caught_up(*scopes: Scope) -> list[Dependency]:
    """As `requires`, and catch up with the store afterwards."""
    return [*requires(*scopes), Depends(catch_up)]


def requires_audited(*scopes: Scope) -> list[Dependency]:
    """As `requires`, for routes that change something."""
    return [*requires(*scopes), Depends(begin_audit)]


class Strict(BaseModel):
    """The base of request and response schemas: no undeclared members."""

    model_config = ConfigDict(extra="forbid")


def omit_if_none(description: str | None = None) -> Any:  # noqa: ANN401 - like pydantic's Field
    return Field(None, description=description, exclude_if=lambda value: value is None)


def json_content(model: type[BaseModel], **more: object) -> dict[str, Any]:
    schema = {"$ref": f"#/components/schemas/{model.__name__}"}
    return {"application/json": {"schema": schema, **more}}


def request_body(
    content: dict[str, Any], description: str | None = None, *, required: bool = True
) -> dict[str, Any]:
    """The OpenAPI description of a body that a route reads itself."""
    about = {} if description is None else {"description": description}
    return {"requestBody": {"required": required, **about, "content": content}}


def read_etags(header: str) -> frozenset[str]:
    """The strong ETags of an If-Match or If-None-Match header, quoted; `*` unchanged."""
    if header.strip() == "*":
        return frozenset({"*"})
    tags = (tag.strip() for tag in header.split(","))  # our tags contain no comma
    return frozenset(tag for tag in tags if len(tag) > 1 and tag[0] == tag[-1] == '"')


def etag_matches(if_none_match: str | None, etag: str) -> bool:
    return not {etag, "*"}.isdisjoint(read_etags(if_none_match or ""))


@asynccontextmanager
async def limit_concurrency(
    runtime: Runtime, limiter: CapacityLimiter, what: str
) -> AsyncIterator[None]:
    """Take a slot for an expensive operation, or raise Overloaded if none is free."""
    try:
        limiter.acquire_on_behalf_of_nowait(token := object())
    except WouldBlock:
        runtime.metrics.rejected(what)
        raise Overloaded(
            f"Too many {what} at once (limit {limiter.total_tokens:g}); try again later",
            retry_after=2,
        ) from None
    try:
        yield
    finally:
        limiter.release_on_behalf_of(token)
