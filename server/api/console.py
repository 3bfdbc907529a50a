"""The web console: its files, as they are.

They hold no data: the page asks the API for it with whatever key its user has, so the files
themselves need none.
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

from server.api.auth import requires
from server.api.http import has_already

router = APIRouter(include_in_schema=False, dependencies=requires("public"))

FOLDER = Path(__file__).resolve().parents[1] / "console"
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
    # Text never becomes markup: the browser refuses innerHTML and the like.
    "require-trusted-types-for 'script'",
    "trusted-types 'none'",
)
_HEADERS = {
    "Content-Security-Policy": "; ".join(_POLICY),
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",  # kept, but asked about: the next version is seen at once
}
# Not the machine's own table: some call a script text/plain, which browsers refuse to run.
_TYPES = {
    ".css": "text/css",
    ".html": "text/html",
    ".jpg": "image/jpeg",
    ".js": "text/javascript",
    ".md": "text/markdown",
    ".svg": "image/svg+xml",
}


class ConsoleFiles(StaticFiles):
    """Files of the types above, with our headers and an ETag of their content."""

    def file_response(
        self,
        full_path: PathLike,
        stat_result: os.stat_result,
        scope: Scope,
        status_code: int = 200,
    ) -> Response:
        path = Path(full_path)
        if path.suffix not in _TYPES:
            raise HTTPException(404)
        headers = {**_HEADERS, "ETag": _etag(path, stat_result.st_mtime_ns)}
        if has_already(Request(scope).headers.get("If-None-Match"), headers["ETag"]):
            return Response(status_code=304, headers=headers)
        return FileResponse(path, status_code, headers, _TYPES[path.suffix])


@lru_cache(maxsize=64)
def _etag(path: Path, modified: int) -> str:
    # Not of its time and size, as StaticFiles has it: those of two releases may be the same.
    return f'"{hashlib.sha256(path.read_bytes()).hexdigest()[:32]}"'


_FILES = ConsoleFiles(directory=FOLDER)


@router.get("/")
async def home(request: Request) -> Response:
    return await _FILES.get_response(INDEX, request.scope)


@router.get("/console/{path:path}")
async def file(request: Request, path: str) -> Response:
    return await _FILES.get_response(path, request.scope)
