"""From the responses of a server to dataclasses and errors."""

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

from engram_client.answers import Bundle, Change, ImageAnswer, TaskAnswer
from engram_client.errors import (
    Busy,
    ClientError,
    Conflict,
    DeadlineExceeded,
    Invalid,
    KeyRefused,
    NotFound,
    NotUnderstood,
    Refused,
    ServerFailed,
)

T = TypeVar("T")
Json = Mapping[str, Any]

PROBLEM = "application/problem+json"
_URN = "urn:engram:problem:"
_CLASSES: Mapping[int, type[Refused]] = {
    HTTPStatus.UNAUTHORIZED: KeyRefused,
    HTTPStatus.FORBIDDEN: KeyRefused,
    HTTPStatus.NOT_FOUND: NotFound,
    HTTPStatus.CONFLICT: Conflict,
    HTTPStatus.PRECONDITION_FAILED: Conflict,
    HTTPStatus.TOO_MANY_REQUESTS: Busy,
}
_STARTING = ("not-started", "draining", "store-unavailable")
_GATEWAY = (HTTPStatus.BAD_GATEWAY, HTTPStatus.SERVICE_UNAVAILABLE, HTTPStatus.GATEWAY_TIMEOUT)
# One image of the request is at fault, or the request is too much at once: both are found out by
# asking about fewer.
_ABOUT_IMAGES = ("unreadable-image", "image-too-large", "context-not-cached")
_TOO_MUCH = ("too-many-images", "body-too-large")


# --- refusals -------------------------------------------------------------------------------------


def refusal(response: httpx.Response) -> ClientError:
    """What a response that is no success means."""
    status = response.status_code
    problem = _problem(response)
    if problem is None:
        return _foreign_refusal(response)
    message, kind = str(problem["detail"]), str(problem["type"]).removeprefix(_URN)
    if kind == "deadline-exceeded":
        return DeadlineExceeded(message)
    request_id = problem.get("request_id")
    if status >= HTTPStatus.INTERNAL_SERVER_ERROR and kind not in _STARTING and request_id:
        message += f" The server's log has it as request {request_id}."
    names = [str(name) for name in problem.get("names") or ()]
    cls = _CLASSES.get(status, Invalid)
    if status >= HTTPStatus.INTERNAL_SERVER_ERROR:
        cls = Busy if kind in _STARTING else ServerFailed
    return cls(message, status=status, kind=kind, names=names, request_id=request_id)


def retry_after(response: httpx.Response) -> float | None:
    """Seconds after which to try again, where the server says so."""
    text = response.headers.get("Retry-After", "").strip()
    if text.isdecimal():
        return float(text[:9])
    try:
        when = parsedate_to_datetime(text)
    except ValueError:
        return None
    when = when if when.tzinfo else when.replace(tzinfo=UTC)
    return max(0.0, (when - datetime.now(UTC)).total_seconds())


def worth_repeating(response: httpx.Response) -> bool:
    """Whether the same request may succeed a little later."""
    if response.status_code == HTTPStatus.TOO_MANY_REQUESTS:
        return True
    if _problem(response) is None:  # of a gateway whose server is away
        return response.status_code in _GATEWAY
    unavailable = response.status_code == HTTPStatus.SERVICE_UNAVAILABLE
    return unavailable and retry_after(response) is not None


def asks_too_much(error: Refused) -> bool:
    """Whether fewer images at once would be taken."""
    return error.kind in _TOO_MUCH or error.status == HTTPStatus.REQUEST_ENTITY_TOO_LARGE


def about_images(error: Refused) -> bool:
    """Whether one image of the request is to blame, or their number."""
    return error.kind in _ABOUT_IMAGES or asks_too_much(error)


def _foreign_refusal(response: httpx.Response) -> ClientError:
    """A refusal that no Engram server wrote."""
    status, url = response.status_code, response.request.url
    answer = f"{status} {response.reason_phrase}".strip()
    if response.is_redirect:
        where = response.headers.get("Location", "elsewhere")
        return NotUnderstood(f"{url} sends on to {where}: use that address.")
    if status in _GATEWAY or status == HTTPStatus.TOO_MANY_REQUESTS:
        return Busy(f"{url} answered {answer}, from something before the server.", status=status)
    if status in (HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN):
        return KeyRefused(f"{url} answered {answer}.", status=status)
    if status == HTTPStatus.REQUEST_ENTITY_TOO_LARGE:
        return Invalid(f"{url} answered {answer}: it takes no body of this size.", status=status)
    return NotUnderstood(f"{url} answered {answer}, and not as an Engram server does.")


def _problem(response: httpx.Response) -> Json | None:
    if not response.headers.get("Content-Type", "").startswith(PROBLEM):
        return None
    try:
        document = response.json()
    except ValueError:
        return None
    known = isinstance(document, dict) and {"type", "detail"} <= document.keys()
    return document if known else None


# --- answers --------------------------------------------------------------------------------------


def read(response: httpx.Response, parse: Callable[[Any], T]) -> T:
    """What a response says, or NotUnderstood."""
    try:
        return parse(response.json())
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise NotUnderstood(
            f"{response.request.url} answered what no Engram server does ({type(error).__name__}: "
            f"{error}). Is the address right?"
        ) from error


def images(document: Json, named: Sequence[tuple[int, str]]) -> list[ImageAnswer]:
    """The answers about these images, by place and name."""
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
    """A downloaded file, if it is what the server says it is."""
    data = response.content
    digest = f"sha256:{hashlib.sha256(data).hexdigest()}"
    stated = response.headers.get("ETag", "").strip('"')
    if stated != digest:
        raise NotUnderstood(
            f"{response.request.url} gave {len(data)} bytes with the digest {digest}, and says it "
            f"is '{stated}': something in between has changed them."
        )
    return Bundle(name, version, digest, data)


def build(cls: type[T], document: Json, **given: object) -> T:
    """A dataclass from the members it knows; TypeError where one is missing."""
    values = {
        name: read_value(document[name])
        for name, read_value in _readers(cls).items()  # type: ignore[arg-type]  # a class is hashable
        if name in document and name not in given
    }
    return cls(**values, **given)


@cache
def _readers(cls: type) -> dict[str, Callable[[Any], Any]]:
    """How each field of a dataclass is read from JSON, by its type."""
    return {name: _reader(hint) for name, hint in get_type_hints(cls).items()}


def _reader(hint: Any) -> Callable[[Any], Any]:  # noqa: ANN401 - any type
    if isinstance(hint, type) and is_dataclass(hint):
        return partial(build, hint)
    arguments = get_args(hint)
    if isinstance(hint, UnionType):  # something or None
        given = _reader(arguments[0])
        return lambda value: None if value is None else given(value)
    if get_origin(hint) is tuple:
        item = _reader(arguments[0])
        return lambda values: tuple(item(value) for value in values)
    if get_origin(hint) is Mapping:
        member = _reader(arguments[1])
        return lambda values: {name: member(value) for name, value in values.items()}
    return lambda value: value
