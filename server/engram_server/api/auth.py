"""Authentication of requests, and the permissions that routes require.

Every route declares its requirement: `dependencies=requires("publish")`. `check_routes` rejects an
application with a route that declares none.
"""

from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Annotated, Literal

from fastapi import Depends, Request
from fastapi.params import Depends as Dependency
from fastapi.routing import APIRoute
from starlette.datastructures import Headers
from starlette.routing import BaseRoute

from engram_server.access.identity import SCOPES, Identity, Scope
from engram_server.errors import CrossOrigin, EngramError, HostNotAllowed, KeyRequired, NotPermitted
from engram_server.runtime import CURRENT, RequestRecord, Runtime
from engram_server.settings import is_loopback

# For the OpenAPI document: a key is sent one way or the other, or not at all on open servers.
SECURITY_SCHEMES: dict[str, dict[str, str]] = {
    "bearer": {"type": "http", "scheme": "bearer", "description": "The key as a bearer token."},
    "header": {"type": "apiKey", "in": "header", "name": "X-API-Key"},
}
# The model name under which /v2 runs several tasks at once.
MULTITASK = "multitask"

_CHANGING = frozenset({"publish", "admin"})
_HOW = "send the key as 'Authorization: Bearer …' or 'X-API-Key: …'."
_REJECTIONS: dict[str, str] = {
    "unknown": "Unknown key.",
    "expired": "The key {} has expired: request a new one.",
    "revoked": "The key {} has been revoked: request a new one.",
}


class Requires:
    """Requires one of the scopes, for the task in the path if there is one.

    `public` accepts every request, `any` every valid key.
    """

    def __init__(self, *scopes: Scope | Literal["public", "any"]) -> None:
        self.public = scopes == ("public",)
        self.scopes: tuple[Scope, ...] = (
            SCOPES if scopes == ("any",) else tuple(each for each in SCOPES if each in scopes)
        )
        self.text = " or ".join(scopes)  # for the documentation
        self._changes = _CHANGING.issuperset(scopes)

    # Async, though it rarely waits: FastAPI runs plain functions in its thread pool.
    async def __call__(self, request: Request) -> None:
        runtime, record = CURRENT.get()
        if runtime.anonymous is not None:
            _check_host(request, runtime)
        if self.public:
            return
        if self._changes:
            _reject_other_sites(request, runtime.settings.cors_origins)
        await self.admit(runtime, record, token_of(request.headers))
        task = _task_of(request)
        if task is not None:
            check_permitted(identity_of(record), self.scopes, [task])

    async def admit(self, runtime: Runtime, record: RequestRecord, token: str) -> None:
        """Authenticate a request, count it, and check its scopes."""
        identity = runtime.anonymous or await self._authenticate(token, runtime)
        record.identity = identity
        if identity.quota is not None:
            identity.quota.take_request()
        if not identity.has_scope(self.scopes):
            held = ", ".join(identity.grants) or "none"
            # The key of ENGRAM_API_KEY has fewer scopes when there is an admin key.
            other = " Use the admin key." if identity.id == "api-key" else ""
            raise NotPermitted(
                f"This requires the scope {self.text}; the key '{identity.name}' has the scopes "
                f"{held}.{other}"
            )

    async def _authenticate(self, token: str, runtime: Runtime) -> Identity:
        if not token:
            which = "a key" if self.scopes == SCOPES else f"a key with the scope {self.text}"
            raise KeyRequired(f"This requires {which}: {_HOW}")
        found = await runtime.keys.identify(token)
        if isinstance(found, Identity):
            return found
        if runtime.openid is not None and token.count(".") == 2:  # the form of a JWT
            try:
                return runtime.openid.identify(token)
            except ValueError as error:
                raise KeyRequired(str(error)) from None
        raise KeyRequired(_REJECTIONS[found.reason].format(found.key_id))


def requires(*scopes: Scope | Literal["public", "any"]) -> list[Dependency]:
    """The `dependencies` of a route, or of a router whose routes all require the same."""
    return [Depends(Requires(*scopes))]


def check_routes(routes: Iterable[BaseRoute]) -> None:
    """EngramError for a route without exactly one requirement, so none is open by mistake."""
    for route in routes:
        if not isinstance(route, APIRoute) or len(required_by(route)) != 1:
            raise EngramError(
                f"The route {getattr(route, 'path', route)} does not declare one requirement: set "
                f"dependencies=requires(…)."
            )


def required_by(route: APIRoute) -> list[Requires]:
    found = (each.dependency for each in route.dependencies)
    return [each for each in found if isinstance(each, Requires)]


def check_permitted(identity: Identity, scopes: Sequence[Scope], refs: Iterable[str]) -> None:
    """NotPermitted unless the caller has one of the scopes for each task, existing or not."""
    rejected = [ref for ref in refs if not identity.allows(scopes, task_name(ref))]
    if rejected:
        named = ", ".join(f"'{ref}'" for ref in rejected[:8])
        raise NotPermitted(
            f"The key '{identity.name}' does not have the scope {' or '.join(scopes)} for {named}.",
            names=rejected,
        )


def task_name(ref: str) -> str:
    return ref.partition("@")[0].partition(":")[0]


async def get_identity(request: Request) -> Identity:
    return identity_of(request.state.record)


IdentityDep = Annotated[Identity, Depends(get_identity)]


def identity_of(record: RequestRecord) -> Identity:
    assert record.identity is not None, "the route requires an identity"
    return record.identity


def _task_of(request: Request) -> str | None:
    path = request.path_params
    if "task" in path:
        task: str = path["task"]
        return task
    name: str | None = path.get("name")
    return None if name == MULTITASK and "version" not in path else name


def token_of(headers: Headers) -> str:
    scheme, _, token = headers.get("Authorization", "").partition(" ")
    return token.strip() if scheme.lower() == "bearer" else headers.get("X-API-Key", "")


def _reject_other_sites(request: Request, allowed: Sequence[str]) -> None:
    """Reject changes from pages of other sites, which can make a browser send requests here.

    Sites that are listed by name are allowed; `*` allows none to change anything.
    """
    origin = request.headers.get("Origin")
    if origin is None or origin.partition("://")[2] == request.headers.get("Host"):
        return
    if origin not in allowed or origin == "*":
        raise CrossOrigin(
            "Pages of other sites may not change tasks. ENGRAM_CORS_ORIGINS lists sites that may."
        )


def _check_host(request: Request, runtime: Runtime) -> None:
    """Reject unknown host names on a server without keys (protection against DNS rebinding).

    A page could point its own name to this machine, and the browser would treat us as part of its
    site. Browsers always send Host.
    """
    host = request.headers.get("Host")
    if host is None:
        return
    name = _without_port(host)
    settings = runtime.settings
    if not (_is_loopback(name) or name == settings.host or name in settings.allowed_hosts):
        raise HostNotAllowed(
            "A server without keys accepts only the host names of the machine it runs on. Add this "
            "name to ENGRAM_ALLOWED_HOSTS, or set keys."
        )


def _without_port(host: str) -> str:
    """The name or address in a Host header, in lower case."""
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host.partition(":")[0].lower()


_is_loopback = lru_cache(maxsize=64)(is_loopback)
