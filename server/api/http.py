"""What all resources share: the running server, reading a request, and the base of their schemas.

Headers, bodies with their limits in force, and whether the client still waits.
"""

import asyncio
import base64
import binascii
import math
import os
import tempfile
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Iterator
from contextlib import aclosing, asynccontextmanager, contextmanager
from pathlib import Path
from typing import Annotated, Any, BinaryIO, TypeVar

from anyio import CapacityLimiter, WouldBlock, to_thread
from fastapi import Depends, Header, Request
from fastapi.params import Depends as Dependency
from fastapi.routing import APIRoute
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Receive, Send
from starlette.types import Scope as AsgiScope

from server.api.auth import requires
from server.api.middleware import RequestRecord
from server.api.problems import (
    BodyTooLarge,
    InvalidRequest,
    MalformedRequest,
    RequestTooSlow,
    TooManyValues,
    UnsupportedMedia,
    UploadNotKept,
)
from server.engine.engine import Engine
from server.errors import DeadlineExceeded, Overloaded
from server.identity import Scope
from server.runtime import Runtime
from server.settings import Settings

T = TypeVar("T")
Model = TypeVar("Model", bound=BaseModel)

DEADLINE = "X-Deadline-Ms"
LONGEST_DEADLINE_MS = 86_400_000
MIN_GENERATION = "X-Min-Generation"
MIN_GENERATION_TEXT = "Answer from this generation of the catalog or a later one."
# Versions and generations have at most 18 digits.
LARGEST_NUMBER = 10**18 - 1
# For the OpenAPI document of routes that read their headers and bodies by themselves.
HEADER_PARAMETERS = [
    {
        "in": "header",
        "name": DEADLINE,
        "description": "Answer within this many milliseconds, or not at all (504).",
        "schema": {"type": "number", "exclusiveMinimum": 0, "maximum": LONGEST_DEADLINE_MS},
    },
    {
        "in": "header",
        "name": MIN_GENERATION,
        "description": MIN_GENERATION_TEXT,
        "schema": {"type": "integer", "minimum": 0, "maximum": LARGEST_NUMBER},
    },
]
BINARY: dict[str, Any] = {"schema": {"type": "string", "format": "binary"}}

# For bodies that say a word or two.
SMALL_BODY_BYTES = 64 * 1024
SMALL_JSON_VALUES = 4096
# Parsing more than this takes long enough for other requests to notice.
INLINE_BYTES = 64 * 1024
_WRITE_BYTES = 1024 * 1024
_SCAN_BYTES = 256 * 1024
_BASE64_PIECE = 1024 * 1024  # a multiple of four
# What a JSON parser takes for each mark, in times of a number: measured.
_CONTAINER_COST = 5
_JSON_COSTS = ((b",", 1), *((mark, _CONTAINER_COST) for mark in (b"[", b"{", b":")))
_MAX_ESCAPES = 4_000_000
# So long a request is worked on before anybody looks whether its client still waits.
_UNWATCHED_SECONDS = 0.05


class DirectRoute(APIRoute):
    """A route whose dependencies and function take the request and nothing else.

    FastAPI then has nothing to solve and nothing to clean up, which was about a seventh of the
    event loop's time for a prediction (a profile of `benchmarks.capacity`). The OpenAPI document is
    the same.
    """

    async def handle(self, scope: AsgiScope, receive: Receive, send: Send) -> None:
        if scope["method"] not in (self.methods or ()):
            await super().handle(scope, receive, send)  # which refuses it
            return
        request = Request(scope, receive, send)
        for each in self.dependencies:
            assert each.dependency is not None, "as `requires` makes them"
            await each.dependency(request)
        response: Response = await self.endpoint(request)
        await response(scope, receive, send)


class Strict(BaseModel):
    """The base of requests and answers: no members but those that are declared."""

    model_config = ConfigDict(extra="forbid")


def left_out_if_none(description: str | None = None) -> Any:  # noqa: ANN401 - as Field has it
    """A field that an answer does not have when it is None."""
    return Field(None, description=description, exclude_if=lambda value: value is None)


def json_content(model: type[BaseModel], **more: object) -> dict[str, Any]:
    schema = {"$ref": f"#/components/schemas/{model.__name__}"}
    return {"application/json": {"schema": schema, **more}}


def request_body(
    content: dict[str, Any], description: str | None = None, *, required: bool = True
) -> dict[str, Any]:
    """What the OpenAPI document says of a body that a route reads by itself."""
    about = {} if description is None else {"description": description}
    return {"requestBody": {"required": required, **about, "content": content}}


def short_name(backbone: str) -> str:
    """The last part of a folder or hub name: where a model lies on this machine is nobody's."""
    return backbone.rstrip("/").rpartition("/")[2] or backbone


# The running server. Asynchronous, though they wait for nothing: FastAPI sends plain functions
# through its thread pool.


async def get_runtime(request: Request) -> Runtime:
    runtime: Runtime = request.app.state.runtime
    return runtime


async def get_engine(request: Request) -> Engine:
    engine: Engine = request.app.state.runtime.engine
    return engine


async def get_record(request: Request) -> RequestRecord:
    record: RequestRecord = request.state.record
    return record


RuntimeDep = Annotated[Runtime, Depends(get_runtime)]
EngineDep = Annotated[Engine, Depends(get_engine)]
RecordDep = Annotated[RequestRecord, Depends(get_record)]


async def catch_up(
    request: Request,
    engine: EngineDep,
    x_min_generation: Annotated[
        int | None, Header(ge=0, le=LARGEST_NUMBER, description=MIN_GENERATION_TEXT)
    ] = None,
) -> None:
    """Reach the generation the caller knows of, and the version in the path, if there is one."""
    path = request.path_params
    name, version = path.get("task") or path.get("name"), path.get("version")
    await engine.snapshot_for(None if version is None else [f"{name}@{version}"], x_min_generation)


def requires_caught_up(*scopes: Scope) -> list[Dependency]:
    """In this order: who may not read makes nobody look at the store."""
    return [*requires(*scopes), Depends(catch_up)]


# Headers


def read_deadline_ms(request: Request) -> float | None:
    """How long the caller will wait, or InvalidRequest."""
    text = request.headers.get(DEADLINE)
    if text is None:
        return None
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value <= LONGEST_DEADLINE_MS:  # nor is NaN
        raise InvalidRequest(
            f"{DEADLINE} is a number of milliseconds above 0 and at most {LONGEST_DEADLINE_MS}."
        )
    return value


def deadline_of(
    record: RequestRecord, allowed_ms: float | None, settings: Settings
) -> float | None:
    """When the answer must be there, counted from the request's arrival."""
    allowed_ms = settings.default_deadline_ms if allowed_ms is None else allowed_ms
    if allowed_ms is None:
        return None
    deadline = record.started + allowed_ms / 1000
    if time.monotonic() >= deadline:
        raise _read_too_late(allowed_ms)
    return deadline


def read_min_generation(request: Request) -> int | None:
    """The generation the caller knows of, or InvalidRequest."""
    text = request.headers.get(MIN_GENERATION)
    if text is None:
        return None
    if not (text.isascii() and text.isdecimal() and len(text) <= 18):
        raise InvalidRequest(f"{MIN_GENERATION} is the number of a generation, such as 118.")
    return int(text)


def read_etags(header: str) -> frozenset[str]:
    """The strong ETags of an If-Match or If-None-Match header, quoted; `*` as it is."""
    if header.strip() == "*":
        return frozenset({"*"})
    tags = (tag.strip() for tag in header.split(","))  # ours have no comma in them
    return frozenset(tag for tag in tags if len(tag) > 1 and tag[0] == tag[-1] == '"')


def has_already(if_none_match: str | None, etag: str) -> bool:
    """Whether a caller has what this ETag stands for: 304."""
    return not {etag, "*"}.isdisjoint(read_etags(if_none_match or ""))


def media_type(request: Request) -> str:
    """The content type without its parameters, in lower case; empty when none was given."""
    return request.headers.get("Content-Type", "").partition(";")[0].strip().lower()


def content_encoding(request: Request) -> str | None:
    """None for a body that is sent as it is."""
    encoding = request.headers.get("Content-Encoding", "").strip().lower()
    return None if encoding in ("", "identity") else encoding


def refuse_encoded(request: Request) -> None:
    if encoding := content_encoding(request):
        raise UnsupportedMedia(f"Content-Encoding '{encoding}' is not read here: send it as it is.")


# The body


async def read_body(request: Request, limit: int, deadline_ms: float | None = None) -> bytes:
    """The whole body; BodyTooLarge as soon as it is, and in the time that bodies have."""
    return await in_time(request, _read_body(request, limit), deadline_ms=deadline_ms)


async def in_time(
    request: Request,
    reading: Coroutine[Any, Any, T],
    *,
    seconds: float | None = None,
    deadline_ms: float | None = None,
) -> T:
    """What `reading` reads of the body; RequestTooSlow or DeadlineExceeded, whichever is first.

    Both count from the request's first byte.
    """
    record: RequestRecord = request.state.record
    runtime: Runtime = request.app.state.runtime
    allowed = seconds or runtime.settings.body_seconds
    by_deadline = deadline_ms is not None and deadline_ms / 1000 < allowed
    if deadline_ms is not None and by_deadline:
        allowed = deadline_ms / 1000
    try:
        async with asyncio.timeout(record.started + allowed - time.monotonic()):
            return await reading
    except TimeoutError:
        runtime.metrics.rejected("deadline" if by_deadline else "body_time")
        if by_deadline:
            raise _read_too_late(allowed * 1000) from None
        raise RequestTooSlow(
            f"The body was not whole {allowed:g} seconds after the request's first byte."
        ) from None


def _read_too_late(allowed_ms: float) -> DeadlineExceeded:
    return DeadlineExceeded(f"The {allowed_ms:g} ms passed while the request was being read.")


async def _read_body(request: Request, limit: int) -> bytes:
    chunks = []
    async with aclosing(bounded_stream(request, limit)) as stream:
        async for chunk in stream:
            chunks.append(chunk)  # noqa: PERF401 - an async comprehension would not close it
    return chunks[0] if len(chunks) == 1 else b"".join(chunks)


async def bounded_stream(request: Request, limit: int) -> AsyncGenerator[bytes, None]:
    """The body as it arrives; BodyTooLarge by what it declares, or by what really came.

    Overloaded when the bodies of all requests together are too large.
    """
    too_large = BodyTooLarge(f"The body has more than the {limit} bytes allowed here.")
    declared = request.headers.get("Content-Length", "")
    if declared.isdecimal() and int(declared[:20]) > limit:
        raise too_large
    record: RequestRecord = request.state.record
    runtime: Runtime = request.app.state.runtime
    bodies = runtime.bodies
    received, more = 0, True
    while more:
        message = await request.receive()
        if message["type"] == "http.disconnect":
            raise ClientDisconnect
        chunk, more = message.get("body", b""), message.get("more_body", False)
        received += len(chunk)
        if received > limit:
            raise too_large
        if bodies.nbytes + len(chunk) > bodies.limit:
            runtime.metrics.rejected("inflight_body_bytes")
            raise Overloaded(
                f"The bodies of all requests together have the {bodies.limit} bytes they may "
                f"have; try again later",
                retry_after=1,
            )
        record.body_bytes += len(chunk)  # until the request ends
        bodies.nbytes += len(chunk)
        if chunk:
            yield chunk


@asynccontextmanager
async def received_file(request: Request, limit: int) -> AsyncIterator[Path]:
    """The body in a temporary file, which is gone afterwards."""
    if media_type(request).startswith("multipart/"):
        raise UnsupportedMedia("Send the bundle itself as the body, not a form: curl -T <file>.")
    refuse_encoded(request)
    runtime: Runtime = request.app.state.runtime
    with _kept_on_disk():
        path, file = await to_thread.run_sync(_new_file)
    try:
        with _kept_on_disk(), file:
            receiving = _receive_into(file, request, limit)
            await in_time(request, receiving, seconds=runtime.settings.bundle_seconds)
        yield path
    finally:
        path.unlink(missing_ok=True)


@contextmanager
def _kept_on_disk() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise UploadNotKept(
            f"The server cannot keep the bundle while it looks at it: {error.strerror}."
        ) from error


def _new_file() -> tuple[Path, BinaryIO]:
    handle, name = tempfile.mkstemp(".safetensors", "engram-upload-")
    return Path(name), os.fdopen(handle, "wb")


async def _receive_into(file: BinaryIO, request: Request, limit: int) -> None:
    pending = bytearray()
    async with aclosing(bounded_stream(request, limit)) as stream:
        async for chunk in stream:
            pending += chunk
            if len(pending) >= _WRITE_BYTES:
                await to_thread.run_sync(file.write, bytes(pending))
                pending.clear()
    await to_thread.run_sync(file.write, bytes(pending))


def parse_json(body: bytes, model: type[Model], most_values: int = SMALL_JSON_VALUES) -> Model:
    """A JSON body as a model; MalformedRequest if it is no JSON, InvalidRequest if it is wrong.

    TooManyValues before it is parsed: a parser lets nothing else run, in whatever thread.
    """
    _check_values(body, most_values)
    try:
        return model.model_validate_json(body)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        reason = first["msg"].removeprefix("Value error, ").rstrip(".")
        if first["type"] == "json_invalid":
            raise MalformedRequest(f"The body is not valid JSON: {reason}.") from None
        where = ".".join(str(part) for part in first["loc"])
        what = f"'{where}' of the body" if where else "The body"
        raise InvalidRequest(f"{what} is wrong: {reason}.") from None


def _check_values(body: bytes, most: int) -> None:
    values = escapes = 0
    for start in range(0, len(body), _SCAN_BYTES):
        end = start + _SCAN_BYTES
        values += sum(cost * body.count(mark, start, end) for mark, cost in _JSON_COSTS)
        escapes += body.count(b"\\", start, end)
        if values > most or escapes > _MAX_ESCAPES:
            raise TooManyValues(
                f"The JSON has more than the {most} values (lists, objects and members count "
                f"{_CONTAINER_COST}), or {_MAX_ESCAPES} escapes, that are read here. Images and "
                f"many numbers are sent better as they are: as a form, or in the binary-data "
                f"extension of /v2."
            )


def decode_base64(text: str) -> bytes:
    """Strictly, and a piece at a time: the decoder lets nothing else run."""
    data = text.encode("ascii")
    if b"=" in data[:-2]:
        raise binascii.Error("Excess data after padding")
    starts = range(0, len(data), _BASE64_PIECE)
    return b"".join(
        base64.b64decode(data[start : start + _BASE64_PIECE], validate=True) for start in starts
    )


async def off_loop(work: Callable[[], T], *, size: int) -> T:
    """Run at once if it is little, else in a thread."""
    return work() if size <= INLINE_BYTES else await to_thread.run_sync(work)


# Places for what takes much memory or many cores


@asynccontextmanager
async def place(runtime: Runtime, limiter: CapacityLimiter, what: str) -> AsyncIterator[None]:
    """One of the places for what is limited in number, or Overloaded at once."""
    try:
        limiter.acquire_on_behalf_of_nowait(token := object())
    except WouldBlock:
        runtime.metrics.rejected(what)
        raise Overloaded(
            f"There are {limiter.total_tokens:g} {what} at once already; try again later",
            retry_after=2,
        ) from None
    try:
        yield
    finally:
        limiter.release_on_behalf_of(token)


# The client


async def while_connected(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`, which is cancelled when the client goes away: ClientDisconnect.

    Only after the body was read: what arrives then can be nothing but the disconnect.
    """
    serving = asyncio.current_task()
    assert serving is not None, "there is always one"
    watching: asyncio.Task[None] | None = None

    def watch() -> None:
        nonlocal watching
        watching = asyncio.ensure_future(_disconnected(request))
        watching.add_done_callback(leave)

    def leave(watched: asyncio.Task[None]) -> None:
        if watched is watching and not watched.cancelled():
            serving.cancel()

    # Most are answered before a watch would be worth its task.
    timer = asyncio.get_running_loop().call_later(_UNWATCHED_SECONDS, watch)
    try:
        return await work
    except asyncio.CancelledError:
        # By the watch, which is over then, or by somebody else, or by both.
        if watching is not None and watching.done() and serving.uncancel() == 0:
            raise ClientDisconnect from None
        raise
    finally:
        timer.cancel()
        watched, watching = watching, None
        if watched is not None:
            watched.cancel()


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
