"""Bodies of requests, read with their limits in force: images, JSON and bundles."""

import base64
import binascii
import os
import tempfile
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from anyio import to_thread
from fastapi import Request
from pydantic import BaseModel, ValidationError
from starlette.datastructures import UploadFile
from starlette.formparsers import MultiPartException, MultiPartParser

from server.api.errors import (
    BodyTooLarge,
    InvalidRequest,
    MalformedRequest,
    TooManyImages,
    UnsupportedMedia,
)
from server.api.schemas import ImageInput, PredictBody
from server.settings import Settings

T = TypeVar("T")
Model = TypeVar("Model", bound=BaseModel)

# `curl --data-binary` calls everything a form; `curl -T` says nothing at all.
_CURL_DEFAULT = "application/x-www-form-urlencoded"
_RAW = ("", "application/octet-stream", _CURL_DEFAULT)
_ACCEPTED = "an image, multipart/form-data with 'image' files, or application/json"
# Decoding more than this takes long enough for other requests to notice.
_INLINE_BYTES = 64 * 1024
_WRITE_BYTES = 1024 * 1024
SMALL_BODY_BYTES = 64 * 1024


@dataclass(frozen=True, slots=True)
class Images:
    """What a prediction request brought: images, and what its JSON says beside them."""

    images: list[bytes | str]
    said: PredictBody | None = None


async def read_images(request: Request, settings: Settings) -> Images:
    """The images of a prediction request, in whichever of the three forms it came."""
    kind = media_type(request)
    _refuse_encoded(request)
    if kind == "multipart/form-data":
        found = Images(await _read_form(request, settings))
    elif kind == "application/json":
        body = await read_body(request, settings.body_bytes)
        found = await off_loop(lambda: _parse_images(body), size=len(body))
    elif kind in _RAW or kind.startswith("image/"):
        found = Images([await _read_raw(request, settings, kind)])
    else:
        raise UnsupportedMedia(f"'{kind}' is not read here: send {_ACCEPTED}.")
    if len(found.images) > settings.max_images:
        raise TooManyImages(
            f"The request has {len(found.images)} images, and at most {settings.max_images} may be "
            f"sent at once."
        )
    return found


def media_type(request: Request) -> str:
    """The content type without its parameters, in lower case; empty when none was given."""
    return request.headers.get("Content-Type", "").partition(";")[0].strip().lower()


async def read_body(request: Request, limit: int) -> bytes:
    """The whole body, or BodyTooLarge as soon as it is."""
    chunks = []
    async with aclosing(bounded_stream(request, limit)) as stream:
        async for chunk in stream:
            chunks.append(chunk)  # noqa: PERF401 - an async comprehension would not close it
    return chunks[0] if len(chunks) == 1 else b"".join(chunks)


async def bounded_stream(request: Request, limit: int) -> AsyncGenerator[bytes, None]:
    """The body as it arrives; BodyTooLarge by what it declares, or by what really came."""
    declared = request.headers.get("Content-Length", "")
    if declared.isdecimal() and int(declared[:20]) > limit:
        raise _too_large(limit)
    received = 0
    async with aclosing(request.stream()) as stream:
        async for chunk in stream:
            received += len(chunk)
            if received > limit:
                raise _too_large(limit)
            if chunk:
                yield chunk


@asynccontextmanager
async def received_file(request: Request, limit: int) -> AsyncIterator[Path]:
    """The body in a temporary file, which is gone afterwards."""
    if media_type(request).startswith("multipart/"):
        raise UnsupportedMedia("Send the bundle itself as the body, not a form: curl -T <file>.")
    _refuse_encoded(request)
    handle, name = await to_thread.run_sync(tempfile.mkstemp, ".safetensors", "engram-upload-")
    path = Path(name)
    try:
        with os.fdopen(handle, "wb") as file:
            pending = bytearray()
            async with aclosing(bounded_stream(request, limit)) as stream:
                async for chunk in stream:
                    pending += chunk
                    if len(pending) >= _WRITE_BYTES:
                        await to_thread.run_sync(file.write, bytes(pending))
                        pending.clear()
            await to_thread.run_sync(file.write, bytes(pending))
        yield path
    finally:
        path.unlink(missing_ok=True)


def parse_json(body: bytes, model: type[Model]) -> Model:
    """What a JSON body says; MalformedRequest if it is no JSON, InvalidRequest if it is another."""
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


async def _read_raw(request: Request, settings: Settings, kind: str) -> bytes:
    body = await read_body(request, settings.body_bytes)
    if not body:
        raise InvalidRequest(f"The body is empty: send {_ACCEPTED}.")
    if kind == _CURL_DEFAULT and body.lstrip()[:1] == b"{":
        raise UnsupportedMedia("This looks like JSON: send it with Content-Type: application/json.")
    return body


class _InMemoryParser(MultiPartParser):
    """Keeps files in memory: the whole body is bounded already."""

    spool_max_size = 2**31


async def _read_form(request: Request, settings: Settings) -> list[bytes | str]:
    try:
        async with aclosing(bounded_stream(request, settings.body_bytes)) as stream:
            form = await _InMemoryParser(request.headers, stream, max_fields=16).parse()
    except MultiPartException as error:
        raise MalformedRequest(f"The form cannot be read: {error.message}") from None
    try:
        images: list[bytes | str] = []
        for name, value in form.multi_items():
            if name != "image":
                raise InvalidRequest(f"The form has a field {name!r}: send the files as 'image'.")
            if not isinstance(value, UploadFile):
                raise InvalidRequest("The field 'image' is text, not a file: curl -F image=@….")
            images.append(await value.read())
    finally:
        await form.close()
    if not images:
        raise InvalidRequest("The form has no file: send at least one as 'image'.")
    return images


def _parse_images(body: bytes) -> Images:
    said = parse_json(body, PredictBody)
    return Images([_image(each) for each in said.images], said)


def _image(given: ImageInput) -> bytes | str:
    if given.digest is not None:
        return given.digest
    try:
        data = base64.b64decode((given.b64 or "").encode("ascii"), validate=True)
    except (binascii.Error, UnicodeEncodeError) as error:
        raise InvalidRequest(f"An image's b64 is not valid base64: {error}.") from None
    if not data:
        raise InvalidRequest("An image's b64 is empty.")
    return data


async def off_loop(work: Callable[[], T], *, size: int) -> T:
    """Run at once if it is little, else in a thread."""
    return work() if size <= _INLINE_BYTES else await to_thread.run_sync(work)


def _refuse_encoded(request: Request) -> None:
    encoding = request.headers.get("Content-Encoding", "identity").strip().lower()
    if encoding not in ("", "identity"):
        raise UnsupportedMedia(f"Content-Encoding '{encoding}' is not read here: send it as it is.")


def _too_large(limit: int) -> BodyTooLarge:
    return BodyTooLarge(f"The body has more than the {limit} bytes allowed here.")
