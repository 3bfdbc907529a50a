"""The hot path around FastAPI: everything that `/predict` does without it, and why.

Measured with `benchmarks.capacity` on a request for four tasks:

| instead of                            | this                   | saves                          |
|---------------------------------------|------------------------|--------------------------------|
| FastAPI's dependency solving          | `DirectRoute`          | 1/7 of the event loop's time   |
| FastAPI's query parameters            | `read_query`           | 1/4 of what HTTP adds          |
| response models                       | `encode`, from dicts   | 0.2 ms (2 to 3 times faster)   |
| `include_router`, which matches twice | `add_routes`           | a second match of each route   |
| four middlewares, and the router      | `DirectRoutes`         | 1/12 of the event loop's time  |

The OpenAPI document is the same. All other routes use FastAPI as its documentation shows.
"""

from collections.abc import Awaitable, Callable, Iterable, Mapping
from functools import lru_cache
from typing import Any, TypeVar
from urllib.parse import parse_qsl

import orjson
from fastapi import APIRouter, FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from pydantic import BaseModel, ValidationError
from starlette.datastructures import Headers
from starlette.middleware.errors import ServerErrorMiddleware
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from engram_server.api.auth import check_routes

Json = dict[str, object]
Model = TypeVar("Model", bound=BaseModel)

_SHORT_QUERY = 1024  # bytes
_PART_BYTES = 256 * 1024


class DirectRoute(APIRoute):
    """A route whose dependencies and endpoint take the request and nothing else."""

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["method"] not in (self.methods or ()):
            await super().handle(scope, receive, send)  # which returns 405
            return
        request = _Request(scope, receive, send)
        for each in self.dependencies:
            assert each.dependency is not None, "as `requires` makes them"
            await each.dependency(request)
        response: Response = await self.endpoint(request)
        await response(scope, receive, send)


class DirectRoutes:
    """Middleware that calls direct routes without parameters at once.

    Other requests take the framework's way, and so do those of a server that traces: FastAPI notes
    the route in its spans.
    """

    def __init__(self, app: ASGIApp, host: FastAPI) -> None:
        self._app = app
        self._handlers: Mapping[type[BaseException], Callable[..., Awaitable[Response]]] = dict(
            host.exception_handlers
        )
        self._routes = {
            (method, route.path): route
            for route in reversed(host.router.routes)  # the first route of a path wins
            if isinstance(route, DirectRoute) and not route.param_convertors
            for method in route.methods or ()
        }

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        route = None
        if scope["type"] == "http":
            route = self._routes.get((scope["method"], scope["path"]))
        if route is None:
            await self._app(scope, receive, send)
            return
        scope["route"] = route
        try:
            await route.handle(scope, receive, send)
        except Exception as error:
            handler = next(filter(None, map(self._handlers.get, type(error).__mro__)), None)
            if handler is None or scope["state"]["record"].status is not None:
                raise
            response: Response = await handler(Request(scope, receive, send), error)
            await response(scope, receive, send)


def leave_out_outer_layers(app: FastAPI) -> None:
    """Leave out FastAPI's two outermost middlewares. Call it when the app is complete.

    They handle unexpected errors, as `RequestMiddleware` does, and note them for tracing.
    """
    outermost: Any = app.build_middleware_stack()
    assert isinstance(outermost, ServerErrorMiddleware), "as Starlette has it"
    app.middleware_stack = outermost.app.app  # type: ignore[attr-defined]


class _Headers(Headers):
    """Finds a header in a dictionary, not in the list of all."""

    def __init__(self, scope: Scope) -> None:
        super().__init__(raw=scope["headers"])
        self._first = dict(reversed(self.raw))

    def get(self, key: str, default: Any = None) -> Any:  # noqa: ANN401 - as inherited
        value = self._first.get(key.lower().encode("latin-1"))
        return default if value is None else value.decode("latin-1")

    def __contains__(self, key: object) -> bool:
        return isinstance(key, str) and key.lower().encode("latin-1") in self._first


class _Request(Request):
    """The request of a direct route."""

    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        super().__init__(scope, receive, send)
        self._headers = _Headers(scope)


class PartedResponse(Response):
    """Sends a large body in parts, each after the client has taken most of the one before.

    The server would otherwise buffer the whole body, and the request would end before it is sent.
    """

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if len(self.body) <= _PART_BYTES:
            await super().__call__(scope, receive, send)
            return
        status, headers = self.status_code, self.raw_headers
        await send({"type": "http.response.start", "status": status, "headers": headers})
        for start in range(0, len(self.body), _PART_BYTES):
            end = start + _PART_BYTES
            part = bytes(self.body[start:end])
            more = end < len(self.body)
            await send({"type": "http.response.body", "body": part, "more_body": more})


def read_query(request: Request, model: type[Model]) -> Model:
    """Parse the query as a model, or raise RequestValidationError.

    `tasks` may be repeated or separated by commas. Clients repeat the same query for every image,
    so the results of short queries are cached: the model must be frozen.
    """
    query: bytes = request.scope["query_string"]
    parse = _cached_query if len(query) <= _SHORT_QUERY else _parse_query
    options = parse(query, model)
    assert isinstance(options, model)
    return options


def _parse_query(query: bytes, model: type[BaseModel]) -> BaseModel:
    values: dict[str, object] = {}
    tasks: list[str] = []
    for name, value in parse_qsl(query.decode("latin-1"), keep_blank_values=True):
        if name == "tasks":
            tasks += [part.strip() for part in value.split(",") if part.strip()]
        values[name] = tasks if name == "tasks" else value
    try:
        return model.model_validate(values)
    except ValidationError as error:
        errors = error.errors(include_url=False, include_input=False, include_context=False)
        raise RequestValidationError(
            [{**each, "loc": ("query", *each["loc"])} for each in errors]
        ) from None


_cached_query = lru_cache(maxsize=256)(_parse_query)

encode: Callable[[object], bytes] = orjson.dumps


def encode_in_parts(
    head: Json, name: str, parts: Iterable[bytes], tail: Json | None = None
) -> bytes:
    """Encode an object in parts: at once, a large answer would hold the interpreter lock."""
    end = b"," + encode(tail)[1:] if tail else b"}"
    return b'%b,"%b":[%b]%b' % (encode(head)[:-1], name.encode(), b",".join(parts), end)


def add_routes(app: FastAPI, routers: Iterable[APIRouter]) -> None:
    """Add routes to an app unchanged; each must declare what it requires."""
    routes = [route for router in routers for route in router.routes]
    check_routes(routes)
    for route in routes:
        assert isinstance(route, APIRoute), "as `check_routes` checks"
        route.operation_id = route.name
    app.state.routes = routes
    app.router.routes.extend(routes)
