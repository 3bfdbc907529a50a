"""OpenID Connect tokens as identities. Requires the extra `openid`.

A token is valid if one of the issuer's keys signed it and its issuer, audience and times match. A
background thread reads the keys from a file or URL, so a slow provider delays no request and the
last keys stay valid. See docs/how-to/openid.md.
"""

import hashlib
import json
import logging
import threading
import time
import urllib.error
import urllib.request
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from http.client import HTTPMessage
from pathlib import Path
from typing import IO, Any

import jwt
from jwt.types import Options

from engram_server.access.identity import ANY_TASK, SCOPES, Identity, Scope
from engram_server.errors import IssuerUnavailable

# The key type of each algorithm family. All are asymmetric: a public key cannot sign.
_KEY_TYPES = {"RS": "RSA", "PS": "RSA", "ES": "EC", "Ed": "OKP"}
SCOPE_PREFIX = "engram:"
TASKS_CLAIM = "engram_tasks"

FILE_SECONDS = 1.0
URL_SECONDS = 300.0
# An unknown key id triggers a reload, at most this often.
UNKNOWN_KEY_SECONDS = 10.0
_FETCH_SECONDS = 5.0
_LARGEST_KEYS = 1024 * 1024
_CACHED_TOKENS = 4096
_LONGEST_SUBJECT = 255
_LONGEST_SCOPES = 256

_log = logging.getLogger("engram.oidc")


class InvalidToken(ValueError):
    """An invalid token; the message says why."""


@dataclass(frozen=True, slots=True)
class Provider:
    """The accepted issuer and the required claims."""

    issuer: str
    audience: str
    jwks: str  # a file or a URL
    algorithms: tuple[str, ...]
    leeway_seconds: float
    scope_claim: str


@dataclass(frozen=True, slots=True)
class _SigningKey:
    id: str | None
    type: str
    algorithm: str | None  # None: any of its type
    public: Any  # a `cryptography` key


class OpenIdTokens:
    """Maps tokens to identities."""

    def __init__(self, provider: Provider, now: Callable[[], float] = time.time) -> None:
        self._provider = provider
        self._now = now
        self._keys: tuple[_SigningKey, ...] = ()
        self._raw: bytes | None = None
        # Valid tokens by hash: checking a signature takes 100 µs.
        self._cache: OrderedDict[bytes, tuple[Identity, float]] = OrderedDict()
        self._wake = threading.Event()
        self._stopping = False
        self._requested_at = -UNKNOWN_KEY_SECONDS
        self._thread: threading.Thread | None = None
        self.error: str | None = None  # why the last read failed

    # The keys, in the thread

    def start(self) -> None:
        self._thread = threading.Thread(target=self._follow, name="engram-oidc", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._stopping = True
        self._wake.set()
        if self._thread is not None:
            self._thread.join(_FETCH_SECONDS)

    def _follow(self) -> None:
        seconds = URL_SECONDS if is_url(self._provider.jwks) else FILE_SECONDS
        while not self._stopping:
            self.refresh()
            # Retry an unreachable provider sooner.
            self._wake.wait(min(seconds, UNKNOWN_KEY_SECONDS) if self.error else seconds)
            self._wake.clear()

    def refresh(self) -> None:
        """Read the keys; keep the previous ones on failure."""
        try:
            raw = _read(self._provider.jwks)
            if raw != self._raw:
                self._keys = _parse_keys(raw, self._provider.algorithms)
                self._raw = raw
                self._cache = OrderedDict()  # a cached token may use a removed key
                _log.info("read %d keys of the issuer", len(self._keys))
        except (OSError, ValueError) as error:
            if self.error is None:
                _log.warning("cannot read the keys of the issuer: %s", error)
            self.error = str(error)
        else:
            self.error = None

    # Tokens, on the event loop

    def identify(self, token: str) -> Identity:
        """Find the identity of a token, or raise InvalidToken."""
        digest = hashlib.sha256(token.encode()).digest()
        # One reference: the thread replaces the cache when the keys change.
        cache = self._cache
        identity, expires = cache.get(digest, (None, 0.0))
        if identity is not None and self._now() < expires:
            return identity
        if not self._keys:
            raise IssuerUnavailable("The keys of the OpenID provider are not available yet.")
        claims = self._verify(token)
        identity = identity_of(claims, self._provider.scope_claim)
        cache[digest] = (identity, claims["exp"] + self._provider.leeway_seconds)
        while len(cache) > _CACHED_TOKENS:
            cache.popitem(last=False)
        return identity

    def _verify(self, token: str) -> dict[str, Any]:
        provider = self._provider
        options: Options = {
            "require": ["exp", "iss", "aud", "sub"],
            "verify_signature": True,
            "strict_aud": False,
        }
        try:
            header = jwt.get_unverified_header(token)
            key = self._key_for(header)
            claims = jwt.decode(
                token,
                key.public,
                algorithms=[header["alg"]],  # checked by `_key_for`
                issuer=provider.issuer,
                audience=provider.audience,
                leeway=provider.leeway_seconds,
                options=options,
            )
            claims["exp"] = float(claims["exp"])  # may be a numeric string
            return claims
        except InvalidToken:
            raise
        except jwt.ExpiredSignatureError:
            raise InvalidToken(
                "The token has expired. Request a new one from the provider."
            ) from None
        except jwt.ImmatureSignatureError:
            raise InvalidToken("The token is not valid yet.") from None
        except jwt.InvalidIssuerError:
            raise InvalidToken("The token has a different issuer.") from None
        except (jwt.InvalidAudienceError, jwt.MissingRequiredClaimError) as error:
            raise InvalidToken(f"The token is not for this server: {error}.") from None
        except (jwt.PyJWTError, ValueError, TypeError, ArithmeticError, RecursionError):
            raise InvalidToken("The token is malformed or its signature is invalid.") from None

    def _key_for(self, header: Mapping[str, Any]) -> _SigningKey:
        algorithm, key_id = header.get("alg"), header.get("kid")
        if algorithm not in self._provider.algorithms:
            raise InvalidToken(
                f"The token must be signed with {' or '.join(self._provider.algorithms)}."
            )
        fitting = [
            key
            for key in self._keys
            if key.type == _KEY_TYPES[algorithm[:2]] and key.algorithm in (None, algorithm)
        ]
        named = fitting if key_id is None else [key for key in fitting if key.id == key_id]
        if len(named) == 1:
            return named[0]
        self._request_refresh()
        raise InvalidToken("The token is signed with an unknown key.")

    def _request_refresh(self) -> None:
        """Wake the thread to read the keys, at most every UNKNOWN_KEY_SECONDS."""
        now = time.monotonic()
        if now - self._requested_at >= UNKNOWN_KEY_SECONDS:
            self._requested_at = now
            self._wake.set()


def identity_of(claims: Mapping[str, Any], scope_claim: str) -> Identity:
    """Build the identity of a verified token from its scope claims."""
    subject = claims["sub"]
    if not (isinstance(subject, str) and subject.isprintable()):
        raise InvalidToken("The token's subject is not printable text.")
    if not 0 < len(subject) <= _LONGEST_SUBJECT:
        raise InvalidToken(f"The token's subject must have 1 to {_LONGEST_SUBJECT} characters.")
    tasks = tuple(_words(claims.get(TASKS_CLAIM, ANY_TASK)))
    grants: dict[Scope, tuple[str, ...]] = {}
    for word in _words(claims.get(scope_claim, "")):
        if not word.startswith(SCOPE_PREFIX):
            continue
        name, _, pattern = word.removeprefix(SCOPE_PREFIX).partition(":")
        for scope in SCOPES:
            if scope == name:
                grants[scope] = (*grants.get(scope, ()), *((pattern,) if pattern else tasks))
    return Identity(f"openid:{subject}", subject, grants)


def _words(claim: object) -> Iterable[str]:
    """The words of a claim: space-separated text or a list of strings."""
    values: Sequence[object] = claim.split() if isinstance(claim, str) else ()
    if isinstance(claim, list):
        values = claim
    return [each for each in values[:_LONGEST_SCOPES] if isinstance(each, str)]


def is_url(jwks: str) -> bool:
    return jwks.startswith(("https://", "http://"))


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """Reject redirects: they could lead to plain http or another host."""

    def redirect_request(
        self,
        req: urllib.request.Request,
        fp: IO[bytes],
        code: int,
        msg: str,
        headers: HTTPMessage,
        newurl: str,
    ) -> None:
        raise urllib.error.URLError(f"the URL redirects to {newurl!r}; configure that URL instead")


_keys_of_url = urllib.request.build_opener(_NoRedirects)


def _read(jwks: str) -> bytes:
    if not is_url(jwks):
        with Path(jwks).open("rb") as file:
            return _not_too_large(file.read(_LARGEST_KEYS + 1))
    request = urllib.request.Request(jwks, headers={"Accept": "application/json"})
    with _keys_of_url.open(request, timeout=_FETCH_SECONDS) as response:
        return _not_too_large(response.read(_LARGEST_KEYS + 1))


def _not_too_large(raw: bytes) -> bytes:
    if len(raw) > _LARGEST_KEYS:
        raise ValueError(f"the key set is larger than {_LARGEST_KEYS} bytes")
    return raw


def _parse_keys(raw: bytes, algorithms: Iterable[str]) -> tuple[_SigningKey, ...]:
    """Parse the signing keys of a JWKS document; ValueError if there are none."""
    types = {_KEY_TYPES[algorithm[:2]] for algorithm in algorithms}
    document = json.loads(raw)
    listed = document.get("keys") if isinstance(document, dict) else None
    keys = []
    for each in listed if isinstance(listed, list) else ():
        if not isinstance(each, dict) or each.get("kty") not in types:
            continue
        if each.get("use", "sig") != "sig" or "d" in each:
            continue  # an encryption key or a private key
        try:
            public = jwt.PyJWK(each).key
        except jwt.PyJWTError:
            continue  # an unsupported curve or format
        keys.append(_SigningKey(each.get("kid"), each["kty"], each.get("alg"), public))
    if not keys:
        raise ValueError("the key set has no usable signing key")
    return tuple(keys)
