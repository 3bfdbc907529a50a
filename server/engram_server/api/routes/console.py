"""The web console: static files.

They contain no data, so they need no key: the page requests data from the API with its user's key.
"""

import hashlib
import os
from functools import lru_cache
from pathlib import Path

from fastapi import APIRouter, Request, Response
from fastapi.responses import FileResponse
from fastapi.staticfiles import StaticFiles
from starlette.exceptions import HTTPException
from starlette.staticfiles import PathLike
from starlette.types import Scope

from engram_server.api.auth import requires
from engram_server.api.dependencies import etag_matches

router = APIRouter(include_in_schema=False, dependencies=requires("public"))

FOLDER = Path(__file__).resolve().parents[2] / "console"
INDEX = "index.html"

_POLICY = (
    "default-src 'none'",
    "script-src 'self'",
    "style-src 'self'",
    "img-src 'self'",
    "connect-src 'self'",
    "form-action 'self'",
    "base-uri 'none'",
    "frame-ancestors 'none'",
    # The browser rejects innerHTML and similar, so text never becomes markup.
    "require-trusted-types-for 'script'",
    "trusted-types 'none'",
)
_HEADERS = {
    "Content-Security-Policy": "; ".join(_POLICY),
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",  # revalidate, so that a new version is used at once
}
# Not the machine's table, which may map scripts to text/plain: browsers do not run those.
_TYPES = {
    ".css": "text/css",
    ".html": "text/html",
    ".jpg": "image/jpeg",
    ".js": "text/javascript",
    ".md": "text/markdown",
    ".svg": "image/svg+xml",
}


class ConsoleFiles(StaticFiles):
    """Serves files of the types above, with our headers and an ETag of their content."""

    def file_response(
        self, full_path: PathLike, stat_result: os.stat_result, scope: Scope, status_code: int = 200
    ) -> Response:
        path = Path(full_path)
        if path.suffix not in _TYPES:
            raise HTTPException(404)
        headers = {**_HEADERS, "ETag": _etag(path, stat_result.st_mtime_ns)}
        if etag_matches(Request(scope).headers.get("If-None-Match"), headers["ETag"]):
            return Response(status_code=304, headers=headers)
        return FileResponse(path, status_code, headers, _TYPES[path.suffix])


@lru_cache(maxsize=64)
def _etag(path: Path, modified: int) -> str:
    # Not of time and size, as StaticFiles does: they may be equal for two releases.
    return f'"{hashlib.sha256(path.read_bytes()).hexdigest()[:32]}"'


_FILES = ConsoleFiles(directory=FOLDER)


@router.get("/")
async def home(request: Request) -> Response:
    return await _FILES.get_response(INDEX, request.scope)


@router.get("/console/{path:path}")
async def file(request: Request, path: str) -> Response:
    return await _FILES.get_response(path, request.scope)
