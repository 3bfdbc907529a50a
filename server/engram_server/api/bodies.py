"""Reading request bodies, within limits on size, time and parsing cost.

Routes read their bodies with these functions instead of FastAPI's parameters, because FastAPI reads
a whole body before any limit applies.
"""

import asyncio
import base64
import binascii
import os
import tempfile
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterator
from contextlib import aclosing, asynccontextmanager, contextmanager
from pathlib import Path
from typing import Annotated, BinaryIO, NamedTuple, Self, TypeVar

from anyio import to_thread
from engram_bundle.limits import readable_size
from fastapi import Request
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from starlette.datastructures import FormData, UploadFile
from starlette.formparsers import MultiPartException, MultiPartParser
from starlette.requests import ClientDisconnect

from engram_server import errors
from engram_server.api.problems import describe_invalid
from engram_server.edge.connections import BODY_ARRIVED
from engram_server.engine.shares import Pool
from engram_server.runtime import CURRENT, RequestRecord, Runtime
from engram_server.settings import Settings

T = TypeVar("T")
Model = TypeVar("Model", bound=BaseModel)

# For the OpenAPI document: sky over grass, 4 x 4 pixels.
EXAMPLE_IMAGE = (
    "iVBORw0KGgoAAAANSUhEUgAAAAQAAAAECAIAAAAmkwkpAAAAGElEQVR42mPMW3CHAQaYGJAAy7k3CdhlAJNcBA6o1AvqAAAA"
    "AElFTkSuQmCC"
)
# Limits for bodies with a few members.
SMALL_BODY_BYTES = 64 * 1024
SMALL_JSON_VALUES = 4096
# Larger work runs in a thread, or other requests would notice.
INLINE_BYTES = 64 * 1024
_WRITE_BYTES = 1024 * 1024
_SCAN_BYTES = 256 * 1024
_FORM_CHUNK = 32 * 1024
_BASE64_CHUNK = 1024 * 1024  # a multiple of four
# The measured cost of parsing each JSON token, relative to a number.
_CONTAINER_COST = 5
_JSON_COSTS = ((b",", 1), *((token, _CONTAINER_COST) for token in (b"[", b"{", b":")))
_MAX_ESCAPES = 4_000_000


def media_type(request: Request) -> str:
    """The content type without its parameters, in lower case; empty if there is none."""
    return request.headers.get("Content-Type", "").partition(";")[0].strip().lower()


def content_encoding(request: Request) -> str | None:
    encoding = request.headers.get("Content-Encoding", "").strip().lower()
    return None if encoding in ("", "identity") else encoding


def reject_encoded(request: Request) -> None:
    if encoding := content_encoding(request):
        raise errors.UnsupportedMedia(
            f"Content-Encoding '{encoding}' is not supported: send the body uncompressed."
        )


# Streams


async def read_body(request: Request, limit: int, deadline_ms: float | None = None) -> bytes:
    """Read the body; BodyTooLarge, RequestTooSlow or DeadlineExceeded as soon as a limit is hit."""
    body = _BoundedBody(request, limit)
    return await _within_body_time(request, body.read_all(), deadline_ms=deadline_ms)


async def _within_body_time(
    request: Request,
    reading: Awaitable[T],
    *,
    seconds: float | None = None,
    deadline_ms: float | None = None,
) -> T:
    """Apply the time limit for bodies and the deadline, both from the request's first byte."""
    if request.scope["state"].get(BODY_ARRIVED):
        return await reading
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
            raise errors.DeadlineExceeded(
                f"The deadline of {deadline_ms:g} ms passed while the request was being read."
            ) from None
        raise errors.RequestTooSlow(
            f"The body was not complete {allowed:g} seconds after the request's first byte."
        ) from None


class _BoundedBody:
    """A body as it arrives; BodyTooLarge, or Overloaded if the caller gets no more of the pool.

    The default pool is that of bodies in memory.
    """

    def __init__(self, request: Request, limit: int, pool: Pool | None = None) -> None:
        self._request = request
        self._limit = limit
        self._runtime, self._record = CURRENT.get()
        self._pool = self._runtime.pools.body_bytes if pool is None else pool
        self._received = 0
        self.more = True
        declared = request.headers.get("Content-Length", "")
        if declared.isdecimal() and int(declared[:20]) > limit:
            raise self._too_large()

    async def read(self) -> bytes:
        """The next chunk, which may be empty; `more` then says whether another follows."""
        message = await self._request.receive()
        if message["type"] == "http.disconnect":
            raise ClientDisconnect
        chunk: bytes = message.get("body", b"")
        self.more = message.get("more_body", False)
        self._received += len(chunk)
        if self._received > self._limit:
            raise self._too_large()
        record = self._record
        if not record.hold(self._pool, len(chunk)):
            self._runtime.metrics.rejected("inflight_body_bytes")
            raise errors.Overloaded(
                f"{self._pool.describe('bytes of request bodies', record.caller)}; try again later",
                retry_after=1,
            )
        return chunk

    async def read_all(self) -> bytes:
        chunks = []
        while self.more:
            chunks.append(await self.read())
        return chunks[0] if len(chunks) == 1 else b"".join(chunks)

    async def stream(self) -> AsyncGenerator[bytes, None]:
        while self.more:
            if chunk := await self.read():
                yield chunk

    def _too_large(self) -> errors.BodyTooLarge:
        return errors.BodyTooLarge(f"The body exceeds the limit of {readable_size(self._limit)}.")


@asynccontextmanager
async def received_file(request: Request, limit: int) -> AsyncIterator[Path]:
    """The body in a temporary file, which is deleted afterwards."""
    if media_type(request).startswith("multipart/"):
        raise errors.UnsupportedMedia(
            "Send the bundle itself as the body, not a form: curl -T <file>."
        )
    reject_encoded(request)
    runtime: Runtime = request.app.state.runtime
    with _disk_errors():
        path, file = await to_thread.run_sync(_new_file)
    try:
        with _disk_errors(), file:
            seconds = runtime.settings.bundle_seconds
            await _within_body_time(request, _receive_into(file, request, limit), seconds=seconds)
        yield path
    finally:
        path.unlink(missing_ok=True)


@asynccontextmanager
async def _minimum_rate(runtime: Runtime) -> AsyncIterator[Callable[[int], None]]:
    """Require a minimum rate of the bytes that are counted, in every period of `body_seconds`."""
    rate, seconds = runtime.settings.min_bytes_per_second, runtime.settings.body_seconds
    loop, received = asyncio.get_running_loop(), 0

    def count(nbytes: int) -> None:
        nonlocal received
        received += nbytes
        if received >= rate * seconds:
            received = 0
            period.reschedule(loop.time() + seconds)

    try:
        async with asyncio.timeout(seconds) as period:
            yield count
    except TimeoutError:
        runtime.metrics.rejected("body_time")
        raise errors.RequestTooSlow(
            f"The upload brought less than {rate:d} bytes per second for {seconds:g} seconds."
        ) from None


@contextmanager
def _disk_errors() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise errors.UploadNotKept(
            f"The server cannot write the bundle to its disk: {error.strerror}."
        ) from error


def _new_file() -> tuple[Path, BinaryIO]:
    handle, name = tempfile.mkstemp(".safetensors", "engram-upload-")
    return Path(name), os.fdopen(handle, "wb")


async def _receive_into(file: BinaryIO, request: Request, limit: int) -> None:
    pending = bytearray()
    runtime: Runtime = request.app.state.runtime
    stream = _BoundedBody(request, limit, runtime.pools.bundle_bytes).stream()
    async with _minimum_rate(runtime) as count, aclosing(stream):
        async for chunk in stream:
            count(len(chunk))
            pending += chunk
            if len(pending) >= _WRITE_BYTES:
                await to_thread.run_sync(file.write, bytes(pending))
                pending.clear()
    await to_thread.run_sync(file.write, bytes(pending))


# JSON


def parse_json(body: bytes, model: type[Model], max_values: int = SMALL_JSON_VALUES) -> Model:
    """Parse a JSON body; MalformedRequest for a syntax error, InvalidRequest for a wrong value."""
    _check_values(body, max_values)  # first, because the parser holds the interpreter lock
    try:
        return model.model_validate_json(body)
    except ValidationError as error:
        raise invalid_value("The body", error) from None


def invalid_value(what: str, error: ValidationError) -> errors.RequestError:
    """Convert pydantic's error to MalformedRequest or InvalidRequest, about the first reason."""
    first = error.errors(include_url=False, include_input=False)[0]
    reason = describe_invalid(first)
    if first["type"] == "json_invalid":
        return errors.MalformedRequest(f"{what} is not valid JSON: {reason}")
    where = ".".join(str(part) for part in first["loc"])
    where = f"'{where}' in {what[0].lower()}{what[1:]}" if where else what
    return errors.InvalidRequest(f"{where} is not valid: {reason}")


def _check_values(body: bytes, limit: int) -> None:
    if _CONTAINER_COST * len(body) <= limit:
        return
    values = escapes = 0
    for start in range(0, len(body), _SCAN_BYTES):
        end = start + _SCAN_BYTES
        values += sum(cost * body.count(token, start, end) for token, cost in _JSON_COSTS)
        escapes += body.count(b"\\", start, end)
        if values > limit or escapes > _MAX_ESCAPES:
            raise errors.TooManyValues(
                f"The JSON exceeds the limit of {limit} values (lists, objects and members count "
                f"{_CONTAINER_COST}) or {_MAX_ESCAPES} escapes. Send images and long lists of "
                f"numbers as a form, or with the binary-data extension of /v2."
            )


async def read_json(
    request: Request, model: type[Model], limit: int = SMALL_BODY_BYTES, *, empty: bytes = b""
) -> Model:
    """Read a JSON body with few values; `empty` replaces an empty one."""
    content = await read_body(request, limit) or empty
    return await off_loop(request, lambda: parse_json(content, model), size=len(content))


async def off_loop(request: Request, work: Callable[[], T], *, size: int) -> T:
    """Run small work at once, and larger work in a thread."""
    if size <= INLINE_BYTES:
        return work()
    return await run_sized(request.app.state.runtime, request.state.record, work, size)


async def run_sized(runtime: Runtime, record: RequestRecord, work: Callable[[], T], size: int) -> T:
    if size <= INLINE_BYTES:
        return work()
    return await runtime.threads.json.run(record.caller, work)


# Images


Digest = Annotated[str, Field(pattern=r"^sha256:[0-9a-f]{64}$")]


class ImageInput(BaseModel):
    """One image of a JSON request: its bytes in base64, or the digest of a cached image."""

    model_config = ConfigDict(
        extra="forbid",
        json_schema_extra={"oneOf": [{"required": ["b64"]}, {"required": ["digest"]}]},
    )

    b64: str = Field("", description="The image's bytes in base64.")
    digest: Digest | None = Field(
        None, description="The `digest` of an image in an earlier answer, while it is cached."
    )

    @model_validator(mode="after")
    def _check_one_source(self) -> Self:
        if len(self.model_fields_set & {"b64", "digest"}) != 1:
            raise ValueError("an image has either b64 or digest")
        if self.digest is None and "digest" in self.model_fields_set:
            raise ValueError("a digest is 'sha256:' and 64 hexadecimal digits")
        return self

    def read(self) -> bytes | str:
        if self.digest is not None:
            return self.digest
        try:
            data = decode_base64(self.b64)
        except (binascii.Error, UnicodeEncodeError) as error:
            raise errors.InvalidRequest(
                f"The b64 of an image is not valid base64: {error}."
            ) from None
        if not data:
            raise errors.InvalidRequest("The b64 of an image is empty.")
        return data


def decode_base64(text: str) -> bytes:
    """Decode strictly, in chunks: the decoder holds the interpreter lock, a copy takes memory."""
    if text.find("=", 0, max(0, len(text) - 2)) >= 0:
        raise binascii.Error("Excess data after padding")
    starts = range(0, len(text), _BASE64_CHUNK)
    chunks = (text[start : start + _BASE64_CHUNK].encode("ascii") for start in starts)
    return b"".join(base64.b64decode(chunk, validate=True) for chunk in chunks)


def check_image_count(count: int, limit: int) -> None:
    if count > limit:
        raise errors.TooManyImages(f"The request has {count} images, and the limit is {limit}.")


# Forms


class FormFile(NamedTuple):
    field: str
    name: str
    content: bytes


async def read_form(
    request: Request, settings: Settings, deadline_ms: float | None
) -> list[FormFile]:
    """Read the files of a form, at least one; InvalidRequest for a text field."""
    reading = _read_form(request, settings)
    files = await _within_body_time(request, reading, deadline_ms=deadline_ms)
    check_image_count(len(files), settings.max_images)
    return files


async def _read_form(request: Request, settings: Settings) -> list[FormFile]:
    try:
        async with aclosing(_in_chunks(request, settings.body_bytes)) as stream:
            limit = settings.max_images + 1  # one more, so that our own check reports it
            parser = _FormParser(request.headers, stream, max_fields=16, max_files=limit)
            form = await parser.parse()
    except MultiPartException as error:
        raise errors.MalformedRequest(f"The form cannot be parsed: {error.message}") from None
    try:
        files: list[FormFile] = []
        for field, value in form.multi_items():
            if not isinstance(value, UploadFile):
                raise errors.InvalidRequest(
                    f"The field {field!r} is text, not a file: use curl -F {field}=@<file>."
                )
            files.append(FormFile(field, value.filename or "", await value.read()))
    finally:
        await form.close()
    if not files:
        raise errors.InvalidRequest("The form has no files: send at least one.")
    return files


class _FormParser(MultiPartParser):
    """Keeps files in memory, since the body is bounded, and rejects incomplete forms."""

    spool_max_size = 2**31
    _ended = False

    def on_end(self) -> None:
        self._ended = True

    async def parse(self) -> FormData:
        """Parse all parts; Starlette would drop a part that is cut off."""
        form = await super().parse()
        if not self._ended:
            for file in self._files_to_close_on_error:
                file.close()
            raise MultiPartException("It ends before its last boundary.")
        return form


async def _in_chunks(request: Request, limit: int) -> AsyncGenerator[bytes, None]:
    """The body in chunks that are parsed within milliseconds."""
    async with aclosing(_BoundedBody(request, limit).stream()) as stream:
        async for chunk in stream:
            for start in range(0, len(chunk), _FORM_CHUNK):
                yield chunk[start : start + _FORM_CHUNK]
                await asyncio.sleep(0)
