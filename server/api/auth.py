"""Who may do what: one key to predict and read, one to change tasks."""

import hmac
from urllib.parse import urlsplit

from fastapi import Depends, Request
from pydantic import SecretStr

from server.api.problems import CrossOrigin, KeyRequired, NotPermitted
from server.settings import Settings

# For the OpenAPI document: either way to send the key will do, and none where no key is set.
SECURITY_SCHEMES: dict[str, dict[str, str]] = {
    "bearer": {"type": "http", "scheme": "bearer", "description": "The key as a token."},
    "header": {"type": "apiKey", "in": "header", "name": "X-API-Key"},
}


# Asynchronous, though they wait for nothing: FastAPI sends plain functions through its thread pool.


async def require_reader(request: Request) -> None:
    """The key for predicting and reading, if one is set. The admin key does too."""
    settings = _settings(request)
    if settings.api_key is None:
        return
    if not _matches(request, settings.api_key, settings.admin_key):
        raise KeyRequired(_how_to_send("predicting and reading"))


async def require_admin(request: Request) -> None:
    """The key for changing tasks; where only one key is set, that one."""
    _refuse_other_sites(request)
    settings = _settings(request)
    key = settings.admin_key or settings.api_key
    if key is None or _matches(request, key):
        return
    if _matches(request, settings.api_key):
        raise NotPermitted("This key predicts and reads; changing tasks needs the admin key.")
    raise KeyRequired(_how_to_send("changing tasks"))


READER = [Depends(require_reader)]
ADMIN = [Depends(require_admin)]


def _settings(request: Request) -> Settings:
    settings: Settings = request.app.state.runtime.settings
    return settings


def _how_to_send(purpose: str) -> str:
    return f"For {purpose} send the key as 'Authorization: Bearer …' or 'X-API-Key: …'."


def _matches(request: Request, *keys: SecretStr | None) -> bool:
    """Whether the key of the request is one of these; how long it takes says nothing about it."""
    scheme, _, token = request.headers.get("Authorization", "").partition(" ")
    key = token.strip() if scheme.lower() == "bearer" else request.headers.get("X-API-Key", "")
    secrets = (each.get_secret_value().encode() for each in keys if each is not None)
    same = [hmac.compare_digest(key.encode(), secret) for secret in secrets]  # never cut short
    return any(same)


def _refuse_other_sites(request: Request) -> None:
    """A page elsewhere may make a browser send requests here, but none that changes tasks."""
    origin = request.headers.get("Origin")
    if origin is not None and urlsplit(origin).netloc != request.headers.get("Host"):
        raise CrossOrigin("Tasks are not changed on behalf of pages from other sites.")
