"""Tokens of an OpenID provider as identities. Needs the extra `oidc`.

A token is good if one of the issuer's keys signed it and its claims are for us and for now. The
keys come from a file or a URL, read by a thread of their own: a provider that is slow or away
delays no request, and the keys it gave last stay good. docs/how-to/openid.md has the rest.
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

from server.errors import IssuerUnavailable
from server.identity import ANY_TASK, SCOPES, Identity, Scope

# The kind of key that each family of algorithms needs. None of them takes a shared secret, so
# nobody signs with what is public.
_KEY_TYPES = {"RS": "RSA", "PS": "RSA", "ES": "EC", "Ed": "OKP"}
SCOPE_PREFIX = "engram:"
TASKS_CLAIM = "engram_tasks"

FILE_SECONDS = 1.0
URL_SECONDS = 300.0
# Unknown keys make the keys be read again, but no more often than this.
UNKNOWN_KEY_SECONDS = 10.0
_FETCH_SECONDS = 5.0
_LARGEST_KEYS = 1024 * 1024
_CACHED_TOKENS = 4096
_LONGEST_SUBJECT = 255
_LONGEST_SCOPES = 256

_log = logging.getLogger("engram.oidc")


class InvalidToken(ValueError):
    """A token that is not good; the message says why."""


@dataclass(frozen=True, slots=True)
class Provider:
    """Whose tokens are good, and what must be in them."""

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
    algorithm: str | None  # the only one it is for, if it says so
    public: Any  # cryptography's own


class OpenIdTokens:
    """Tells who a token is of."""

    def __init__(self, provider: Provider, now: Callable[[], float] = time.time) -> None:
        self._provider = provider
        self._now = now
        self._keys: tuple[_SigningKey, ...] = ()
        self._raw: bytes | None = None
        # Tokens that were good when they came, by their hash: a signature takes 100 µs to check.
        self._known: OrderedDict[bytes, tuple[Identity, float]] = OrderedDict()
        self._wake = threading.Event()
        self._stopping = False
        self._asked_at = -UNKNOWN_KEY_SECONDS
        self._thread: threading.Thread | None = None
        self.error: str | None = None  # why the keys could not be read last time

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
            # A provider that is away is asked again sooner.
            self._wake.wait(min(seconds, UNKNOWN_KEY_SECONDS) if self.error else seconds)
            self._wake.clear()

    def refresh(self) -> None:
        """Read the keys. If that fails, those of before stay."""
        try:
            raw = _read(self._provider.jwks)
            if raw != self._raw:
                self._keys = _parse_keys(raw, self._provider.algorithms)
                self._raw = raw
                self._known = OrderedDict()  # some may have been signed by a key that is gone
                _log.info("the issuer has %d keys", len(self._keys))
        except (OSError, ValueError) as error:
            if self.error is None:
                _log.warning("the keys of the issuer cannot be read: %s", error)
            self.error = str(error)
        else:
            self.error = None

    # Tokens, on the event loop

    def identify(self, token: str) -> Identity:
        """Whose token this is, or InvalidToken."""
        digest = hashlib.sha256(token.encode()).digest()
        # The thread may put another in its place, after it has changed the keys.
        known = self._known
        identity, expires = known.get(digest, (None, 0.0))
        if identity is not None and self._now() < expires:
            return identity
        if not self._keys:
            raise IssuerUnavailable("The keys of the OpenID provider have not been read yet.")
        claims = self._verify(token)
        identity = identity_of(claims, self._provider.scope_claim)
        known[digest] = (identity, claims["exp"] + self._provider.leeway_seconds)
        while len(known) > _CACHED_TOKENS:
            known.popitem(last=False)
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
                algorithms=[header["alg"]],  # one of ours: `_key_for` has looked
                issuer=provider.issuer,
                audience=provider.audience,
                leeway=provider.leeway_seconds,
                options=options,
            )
            claims["exp"] = float(claims["exp"])  # which may be a whole number in text
            return claims
        except InvalidToken:
            raise
        except jwt.ExpiredSignatureError:
            raise InvalidToken("The token has expired: ask the provider for another.") from None
        except jwt.ImmatureSignatureError:
            raise InvalidToken("The token is not valid yet.") from None
        except jwt.InvalidIssuerError:
            raise InvalidToken("The token is of another issuer.") from None
        except (jwt.InvalidAudienceError, jwt.MissingRequiredClaimError) as error:
            raise InvalidToken(f"The token is not for this server: {error}.") from None
        except (jwt.PyJWTError, ValueError, TypeError, ArithmeticError, RecursionError):
            # Whatever a stranger's base64 and JSON do to the parser.
            raise InvalidToken("The token cannot be read, or its signature is wrong.") from None

    def _key_for(self, header: Mapping[str, Any]) -> _SigningKey:
        algorithm, key_id = header.get("alg"), header.get("kid")
        if algorithm not in self._provider.algorithms:
            raise InvalidToken(
                f"The token must be signed by {' or '.join(self._provider.algorithms)}."
            )
        fitting = [
            key
            for key in self._keys
            if key.type == _KEY_TYPES[algorithm[:2]] and key.algorithm in (None, algorithm)
        ]
        named = fitting if key_id is None else [key for key in fitting if key.id == key_id]
        if len(named) == 1:
            return named[0]
        self._ask_for_keys()
        raise InvalidToken("The token is signed by a key that is not known (yet).")

    def _ask_for_keys(self) -> None:
        """Have the thread look for new keys, unless somebody made it do so a moment ago."""
        now = time.monotonic()
        if now - self._asked_at >= UNKNOWN_KEY_SECONDS:
            self._asked_at = now
            self._wake.set()


def identity_of(claims: Mapping[str, Any], scope_claim: str) -> Identity:
    """What the claims of a verified token allow: its scopes, and no others, in our words."""
    subject = claims["sub"]
    if not (isinstance(subject, str) and subject.isprintable()):
        raise InvalidToken("The token's subject is no text.")
    if not 0 < len(subject) <= _LONGEST_SUBJECT:
        raise InvalidToken(f"The token's subject has 1 to {_LONGEST_SUBJECT} characters.")
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
    """Of a claim that is text with spaces, or a list of text."""
    values: Sequence[object] = claim.split() if isinstance(claim, str) else ()
    if isinstance(claim, list):
        values = claim
    return [each for each in values[:_LONGEST_SCOPES] if isinstance(each, str)]


def is_url(jwks: str) -> bool:
    return jwks.startswith(("https://", "http://"))


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """Keys come from where the operator said: a redirect could lead to plain http, or anywhere."""

    def redirect_request(
        self,
        req: urllib.request.Request,
        fp: IO[bytes],
        code: int,
        msg: str,
        headers: HTTPMessage,
        newurl: str,
    ) -> None:
        raise urllib.error.URLError(f"the address redirects to {newurl!r}: name the right one")


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
        raise ValueError(f"they have more than {_LARGEST_KEYS} bytes")
    return raw


def _parse_keys(raw: bytes, algorithms: Iterable[str]) -> tuple[_SigningKey, ...]:
    """The keys of a JWKS document that can check a signature; ValueError if there are none."""
    types = {_KEY_TYPES[algorithm[:2]] for algorithm in algorithms}
    document = json.loads(raw)
    listed = document.get("keys") if isinstance(document, dict) else None
    keys = []
    for each in listed if isinstance(listed, list) else ():
        if not isinstance(each, dict) or each.get("kty") not in types:
            continue
        if each.get("use", "sig") != "sig" or "d" in each:
            continue  # for encryption, or a private key, which nobody should have given us
        try:
            public = jwt.PyJWK(each).key
        except jwt.PyJWTError:
            continue  # a curve or a form that is not known here
        keys.append(_SigningKey(each.get("kid"), each["kty"], each.get("alg"), public))
    if not keys:
        raise ValueError("there is no key in them that could check a signature")
    return tuple(keys)
