"""What the routes share: FastAPI dependencies, schemas, ETags, and limits on concurrency."""

import base64
import functools
import inspect
from collections.abc import Awaitable, Callable
from typing import Annotated, Any, TypeVar

from fastapi import Depends, Header, Request
from fastapi.params import Depends as Dependency
from fastapi.routing import APIRoute
from pydantic import BaseModel, ConfigDict, Field

from engram_server.access.identity import Scope
from engram_server.api.audit import begin_audit
from engram_server.api.auth import requires
from engram_server.api.openapi import without_null
from engram_server.engine.engine import Engine
from engram_server.engine.shares import Pool
from engram_server.errors import InvalidRequest, Overloaded
from engram_server.runtime import CURRENT, RequestRecord, Runtime

T = TypeVar("T")

IF_MATCH, IF_NONE_MATCH = "If-Match", "If-None-Match"
SLOT_SECONDS = 1.0  # that a request waits for a slot
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
    return [*requires(*scopes), Depends(limit_reads), Depends(catch_up)]


class FairRoute(APIRoute):
    """Runs a plain endpoint in threads that callers use in turn.

    FastAPI's own threads are first come, first served, and forty of them would leave a pass little
    of the interpreter lock.
    """

    def __init__(self, path: str, endpoint: Callable[..., Any], **options: Any) -> None:  # noqa: ANN401
        if not inspect.iscoroutinefunction(endpoint):
            endpoint = _in_turn(endpoint)
        super().__init__(path, endpoint, **options)


def _in_turn(endpoint: Callable[..., T]) -> Callable[..., Awaitable[T]]:
    @functools.wraps(endpoint)
    async def run(*args: Any, **members: Any) -> T:  # noqa: ANN401
        runtime, record = CURRENT.get()
        return await runtime.threads.reads.run(
            record.caller, functools.partial(endpoint, *args, **members)
        )

    return run


def requires_audited(*scopes: Scope) -> list[Dependency]:
    """As `requires`, for routes that change something."""
    return [*requires(*scopes), Depends(begin_audit)]


class Strict(BaseModel):
    """The base of request and response schemas: no undeclared members."""

    model_config = ConfigDict(extra="forbid")


def omit_if_none(description: str | None = None) -> Any:  # noqa: ANN401 - like pydantic's Field
    """A member that an answer omits instead of sending null, which its schema says too."""
    return Field(
        None,
        description=description,
        exclude_if=lambda value: value is None,
        json_schema_extra=_drop_null,
    )


def _drop_null(schema: dict[str, Any]) -> None:
    converted = without_null(schema)
    schema.clear()
    schema.update(converted)


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


def reject_conditions(request: Request, *names: str) -> None:
    """InvalidRequest for a conditional header that has no meaning here: it must not be ignored."""
    for name in names:
        if name in request.headers:
            raise InvalidRequest(f"{request.method} {request.url.path} takes no {name}: omit it.")


async def unconditional(request: Request) -> None:
    """A dependency of changes that take no condition."""
    reject_conditions(request, IF_MATCH, IF_NONE_MATCH)


def etag_matches(if_none_match: str | None, etag: str) -> bool:
    return not {etag, "*"}.isdisjoint(read_etags(if_none_match or ""))


def hold(request: Request, pool: Pool, amount: int, what: str) -> None:
    """Take an amount of a pool until the request ends, or raise Overloaded."""
    record: RequestRecord = request.state.record
    if not record.hold(pool, amount):
        raise pool_exhausted(request.app.state.runtime, record, pool, what)


def pool_exhausted(runtime: Runtime, record: RequestRecord, pool: Pool, what: str) -> Overloaded:
    """The error for a caller that gets no more of a pool; it is counted."""
    runtime.metrics.rejected(what.replace(" ", "_"))
    return Overloaded(f"{pool.describe(what, record.caller)}; try again later", retry_after=2)


async def take_slot(request: Request, pool: Pool, what: str) -> None:
    """Take a slot until the request ends; wait a little for one, then raise Overloaded.

    Rejecting at once would cost the server more than waiting, if the client tries again at once.
    """
    await wait_for_slot(request.app.state.runtime, request.state.record, pool, what)


async def wait_for_slot(runtime: Runtime, record: RequestRecord, pool: Pool, what: str) -> None:
    if not await record.wait_for(pool, 1, SLOT_SECONDS):
        raise pool_exhausted(runtime, record, pool, what)


async def limit_reads(request: Request) -> None:
    """Limit the reads of one caller at the same time."""
    await take_slot(request, request.app.state.runtime.pools.reads, "reads")


def data_url(webp: bytes) -> str:
    """Return a thumbnail as a URL that contains it."""
    return f"data:image/webp;base64,{base64.b64encode(webp).decode()}"
