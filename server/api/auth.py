"""Who makes a request, and whether a route lets them in.

Every route says what it requires: `dependencies=requires("publish")`. `check_routes` refuses to
make an application of a route that says nothing.
"""

from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Annotated, Literal

from fastapi import Depends, Request
from fastapi.params import Depends as Dependency
from fastapi.routing import APIRoute
from starlette.routing import BaseRoute

from server.api.middleware import RequestRecord
from server.api.problems import CrossOrigin, HostNotAllowed, KeyRequired, NotPermitted
from server.errors import EngramError
from server.identity import SCOPES, Identity, Scope
from server.runtime import Runtime
from server.settings import is_loopback

# For the OpenAPI document: either way to send the key will do, and none where no key is set.
SECURITY_SCHEMES: dict[str, dict[str, str]] = {
    "bearer": {"type": "http", "scheme": "bearer", "description": "The key as a token."},
    "header": {"type": "apiKey", "in": "header", "name": "X-API-Key"},
}
# The name of the protocol's model that is all tasks, in the place of a task's name.
MULTITASK = "multitask"

_CHANGING = frozenset({"publish", "admin"})
_HOW = "send the key as 'Authorization: Bearer …' or 'X-API-Key: …'."


class Requires:
    """What a route requires: one of these scopes, for the task in its path if there is one.

    `public` lets everybody in, `any` everybody with a good key.
    """

    def __init__(self, *scopes: Scope | Literal["public", "any"]) -> None:
        self.public = scopes == ("public",)
        self.scopes: tuple[Scope, ...] = (
            SCOPES if scopes == ("any",) else tuple(each for each in SCOPES if each in scopes)
        )
        self.text = " or ".join(scopes)  # as the documentation has it
        self._changes = _CHANGING.issuperset(scopes)

    # Asynchronous, though it seldom waits: FastAPI sends plain functions through its thread pool.
    async def __call__(self, request: Request) -> None:
        runtime: Runtime = request.app.state.runtime
        anonymous = runtime.anonymous
        if anonymous is not None:
            _check_host(request, runtime)
        if self.public:
            return
        if self._changes:
            _refuse_other_sites(request)
        record: RequestRecord = request.state.record
        identity = anonymous or await self._authenticate(request, runtime)
        record.identity = identity
        if identity.quota is not None:
            identity.quota.take_request()
        if not identity.has_any(self.scopes):
            held = ", ".join(identity.grants) or "none"
            # The one key that has fewer scopes because there is another.
            other = " The admin key has it." if identity.id == "api-key" else ""
            raise NotPermitted(
                f"This needs the scope {self.text}, and the key '{identity.name}' has "
                f"{held}.{other}"
            )
        task = _task_of(request)
        if task is not None:
            permit(identity, self.scopes, [task])

    async def _authenticate(self, request: Request, runtime: Runtime) -> Identity:
        token = _token(request)
        if not token:
            which = "a good key" if self.scopes == SCOPES else f"a key with the scope {self.text}"
            raise KeyRequired(f"This needs {which}: {_HOW}")
        found = await runtime.keys.identify(token)
        if isinstance(found, Identity):
            return found
        if runtime.openid is not None and token.count(".") == 2:  # as tokens have
            try:
                return runtime.openid.identify(token)
            except ValueError as error:
                raise KeyRequired(str(error)) from None
        raise KeyRequired(_REFUSED[found.reason].format(found.key_id))


_REFUSED: dict[str, str] = {
    "unknown": "This key is not known here.",
    "expired": "The key {} has expired: ask for another.",
    "revoked": "The key {} has been revoked: ask for another.",
}


def requires(*scopes: Scope | Literal["public", "any"]) -> list[Dependency]:
    """The `dependencies` of a route, or of a router whose routes all require the same."""
    return [Depends(Requires(*scopes))]


def check_routes(routes: Iterable[BaseRoute]) -> None:
    """EngramError for a route that does not say what it requires: nothing is open by mistake."""
    for route in routes:
        if not isinstance(route, APIRoute) or len(required_by(route)) != 1:
            raise EngramError(
                f"The route {getattr(route, 'path', route)} does not say, once, what it requires: "
                f"give it dependencies=requires(…)."
            )


def required_by(route: APIRoute) -> list[Requires]:
    found = (each.dependency for each in route.dependencies)
    return [each for each in found if isinstance(each, Requires)]


def permit(identity: Identity, scopes: Sequence[Scope], refs: Iterable[str]) -> None:
    """NotPermitted unless one of the scopes is held for each task, whether it exists or not."""
    refused = [ref for ref in refs if not identity.may(scopes, task_name(ref))]
    if refused:
        named = ", ".join(f"'{ref}'" for ref in refused[:8])
        raise NotPermitted(
            f"The key '{identity.name}' has no scope {' or '.join(scopes)} for {named}.",
            names=refused,
        )


def task_name(ref: str) -> str:
    """The task of a reference, if it is one."""
    return ref.partition("@")[0].partition(":")[0]


async def get_identity(request: Request) -> Identity:
    record: RequestRecord = request.state.record
    return identity_of(record)


IdentityDep = Annotated[Identity, Depends(get_identity)]


def identity_of(record: RequestRecord) -> Identity:
    """Who makes a request of a route that is not public."""
    assert record.identity is not None, "the route requires one"
    return record.identity


def _task_of(request: Request) -> str | None:
    path = request.path_params
    if "task" in path:
        task: str = path["task"]
        return task
    name: str | None = path.get("name")
    return None if name == MULTITASK and "version" not in path else name


def _token(request: Request) -> str:
    scheme, _, token = request.headers.get("Authorization", "").partition(" ")
    return token.strip() if scheme.lower() == "bearer" else request.headers.get("X-API-Key", "")


def _refuse_other_sites(request: Request) -> None:
    """A page elsewhere may make a browser send requests here, but none that changes tasks."""
    origin = request.headers.get("Origin")
    if origin is not None and origin.partition("://")[2] != request.headers.get("Host"):
        raise CrossOrigin("Tasks are not changed on behalf of pages from other sites.")


def _check_host(request: Request, runtime: Runtime) -> None:
    """Where nobody has a key, a page must not reach us by pointing its own name to this machine.

    The browser then takes us for a part of its site (DNS rebinding). No browser leaves Host out.
    """
    host = request.headers.get("Host")
    if host is None:
        return
    name = _without_port(host)
    settings = runtime.settings
    if not (_is_loopback(name) or name == settings.host or name in settings.allowed_hosts):
        raise HostNotAllowed(
            "A server without keys answers to the names of its own machine alone. If this name is "
            "meant, list it in ENGRAM_ALLOWED_HOSTS, or set keys."
        )


def _without_port(host: str) -> str:
    """The name or address in a Host header, in lower case."""
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host.partition(":")[0].lower()


_is_loopback = lru_cache(maxsize=64)(is_loopback)
