"""CORS: which pages of other sites may read responses in a browser (`ENGRAM_CORS_ORIGINS`)."""

from collections.abc import Sequence

from starlette.applications import Starlette
from starlette.middleware.cors import CORSMiddleware

METHODS = ("GET", "POST", "PUT", "DELETE")
# What pages may send, besides what every page may.
REQUEST_HEADERS = (
    "Authorization",
    "Content-Type",
    "If-Match",
    "If-None-Match",
    "Inference-Header-Content-Length",
    "traceparent",
    "tracestate",
    "X-API-Key",
    "X-Deadline-Ms",
    "X-Min-Generation",
    "X-Request-Id",
)
# What pages may read, besides what every page may.
RESPONSE_HEADERS = (
    "Content-Disposition",
    "ETag",
    "Inference-Header-Content-Length",
    "Location",
    "RateLimit",
    "RateLimit-Policy",
    "Retry-After",
    "Server-Timing",
    "WWW-Authenticate",
    "X-Request-Id",
    "X-Tasks-Omitted",
)


def allow_origins(app: Starlette, origins: Sequence[str]) -> None:
    """Let pages of these origins read responses; `*` stands for every origin.

    Browsers send neither cookies nor stored passwords along: a page must know a key.
    """
    app.add_middleware(
        CORSMiddleware,
        allow_origins=origins,
        allow_methods=METHODS,
        allow_headers=REQUEST_HEADERS,
        expose_headers=RESPONSE_HEADERS,
    )
