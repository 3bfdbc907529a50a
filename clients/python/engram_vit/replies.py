"""Convert server responses to dataclasses and errors."""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from functools import cache, partial
from http import HTTPStatus
from types import UnionType
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

import httpx

from engram_vit import errors
from engram_vit.answers import Bundle, Change, ImageAnswer, TaskAnswer
from engram_vit.errors import ClientError, RequestRejected, UnexpectedResponse

T = TypeVar("T")
Json = Mapping[str, Any]

PROBLEM = "application/problem+json"
_URN = "urn:engram:problem:"
_CLASSES: Mapping[int, type[RequestRejected]] = {
    HTTPStatus.UNAUTHORIZED: errors.AccessDenied,
    HTTPStatus.FORBIDDEN: errors.AccessDenied,
    HTTPStatus.NOT_FOUND: errors.NotFound,
    HTTPStatus.CONFLICT: errors.Conflict,
    HTTPStatus.PRECONDITION_FAILED: errors.Conflict,
    HTTPStatus.TOO_MANY_REQUESTS: errors.ServerBusy,
}
_STARTING = ("not-started", "draining", "store-unavailable")
_GATEWAY = (HTTPStatus.BAD_GATEWAY, HTTPStatus.SERVICE_UNAVAILABLE, HTTPStatus.GATEWAY_TIMEOUT)
# One image is invalid, or the request is too large: smaller requests find out which.
_ABOUT_IMAGES = ("unreadable-image", "image-too-large", "context-not-cached")
_TOO_MUCH = ("too-many-images", "body-too-large")


def error_from(response: httpx.Response) -> ClientError:
    status, problem = response.status_code, _problem(response)
    if problem is None:
        return _foreign_error(response)
    message, kind = str(problem["detail"]), str(problem["type"]).removeprefix(_URN)
    if kind == "deadline-exceeded":
        return errors.DeadlineExceeded(message)
    request_id = problem.get("request_id")
    if status >= HTTPStatus.INTERNAL_SERVER_ERROR and kind not in _STARTING and request_id:
        message += f" Request id in the server's log: {request_id}."
    names = [str(name) for name in problem.get("names") or ()]
    cls = _CLASSES.get(status, errors.Invalid)
    if status >= HTTPStatus.INTERNAL_SERVER_ERROR:
        cls = errors.ServerBusy if kind in _STARTING else errors.ServerError
    return cls(message, status=status, kind=kind, names=names, request_id=request_id)


def retry_after(response: httpx.Response) -> float | None:
    """Parse Retry-After into seconds; None if it is missing."""
    text = response.headers.get("Retry-After", "").strip()
    if text.isdecimal():
        return float(text[:9])
    try:
        when = parsedate_to_datetime(text)
    except ValueError:
        return None
    when = when if when.tzinfo else when.replace(tzinfo=UTC)
    return max(0.0, (when - datetime.now(UTC)).total_seconds())


def is_retryable(response: httpx.Response) -> bool:
    """Whether the same request may succeed later."""
    if response.status_code == HTTPStatus.TOO_MANY_REQUESTS:
        return True
    if _problem(response) is None:  # a gateway without its server
        return response.status_code in _GATEWAY
    unavailable = response.status_code == HTTPStatus.SERVICE_UNAVAILABLE
    return unavailable and retry_after(response) is not None


def is_too_large(error: ClientError) -> bool:
    """Whether a request with fewer images may succeed."""
    return isinstance(error, RequestRejected) and (
        error.kind in _TOO_MUCH or error.status == HTTPStatus.REQUEST_ENTITY_TOO_LARGE
    )


def concerns_images(error: RequestRejected) -> bool:
    """Whether one image, or their number, caused the error."""
    return error.kind in _ABOUT_IMAGES or is_too_large(error)


def _foreign_error(response: httpx.Response) -> ClientError:
    """Convert the error response of a proxy or of another program."""
    status, url = response.status_code, response.request.url
    answer = f"{status} {response.reason_phrase}".strip()
    if response.is_redirect:
        where = response.headers.get("Location", "elsewhere")
        return UnexpectedResponse(f"{url} redirects to {where}. Use that address.")
    if status in _GATEWAY or status == HTTPStatus.TOO_MANY_REQUESTS:
        return errors.ServerBusy(
            f"A proxy in front of the server returned {answer} for {url}.", status=status
        )
    if status in (HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN):
        return errors.AccessDenied(f"{url} returned {answer}.", status=status)
    if status == HTTPStatus.REQUEST_ENTITY_TOO_LARGE:
        return errors.Invalid(f"{url} returned {answer}: the body is too large.", status=status)
    return UnexpectedResponse(f"{url} returned {answer}, which is not an Engram response.")


def _problem(response: httpx.Response) -> Json | None:
    if not response.headers.get("Content-Type", "").startswith(PROBLEM):
        return None
    try:
        document = response.json()
    except ValueError:
        return None
    known = isinstance(document, dict) and {"type", "detail"} <= document.keys()
    return document if known else None


def read(response: httpx.Response, parse: Callable[[Any], T]) -> T:
    """Parse a JSON response, or raise UnexpectedResponse."""
    try:
        return parse(response.json())
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UnexpectedResponse(
            f"{response.request.url} did not return an Engram response ({type(error).__name__}: "
            f"{error}). Check the address."
        ) from error


def images(document: Json, named: Sequence[tuple[int, str]]) -> list[ImageAnswer]:
    generation, backbone = document["generation"], document["backbone"]
    return [
        ImageAnswer(
            image=name,
            index=index,
            digest=one["digest"],
            cache=one["cache"],
            tasks={ref: build(TaskAnswer, answer) for ref, answer in one["tasks"].items()},
            generation=generation,
            backbone=backbone,
        )
        for (index, name), one in zip(named, document["images"], strict=True)
    ]


def history(document: Json) -> tuple[Change, ...]:
    shared = {field.name for field in fields(Change)} | {"task"}
    return tuple(
        build(Change, one, details={key: one[key] for key in one if key not in shared})
        for one in document["entries"]
    )


def bundle(response: httpx.Response, name: str, version: int) -> Bundle:
    """Check a downloaded bundle against the digest in its ETag."""
    data = response.content
    digest = f"sha256:{hashlib.sha256(data).hexdigest()}"
    stated = response.headers.get("ETag", "").strip('"')
    if stated != digest:
        raise UnexpectedResponse(
            f"{response.request.url} returned {len(data)} bytes with digest {digest}, but its "
            f"ETag is '{stated}'. A proxy may have changed the file."
        )
    return Bundle(name, version, digest, data)


def build(cls: type[T], document: Json, **values: object) -> T:
    """Build a dataclass from JSON; ignores unknown members, TypeError for missing ones."""
    parsed = {
        name: read_value(document[name])
        for name, read_value in _readers(cls).items()  # type: ignore[arg-type]  # a class is hashable
        if name in document and name not in values
    }
    return cls(**parsed, **values)


@cache
def _readers(cls: type) -> dict[str, Callable[[Any], Any]]:
    return {name: _reader(hint) for name, hint in get_type_hints(cls).items()}


def _reader(hint: Any) -> Callable[[Any], Any]:  # noqa: ANN401 - any type
    if isinstance(hint, type) and is_dataclass(hint):
        return partial(build, hint)
    arguments = get_args(hint)
    if isinstance(hint, UnionType):  # X | None
        present = _reader(arguments[0])
        return lambda value: None if value is None else present(value)
    if get_origin(hint) is tuple:
        item = _reader(arguments[0])
        return lambda values: tuple(item(value) for value in values)
    if get_origin(hint) is Mapping:
        member = _reader(arguments[1])
        return lambda values: {name: member(value) for name, value in values.items()}
    return lambda value: value
