"""The web console: the files of clients/console, read once and served as they are.

`server/console` is a link to that folder, which a wheel holds as a copy. The pages hold no data:
they ask the API for it with whatever key their user has, so they themselves need none.
"""

import hashlib
from pathlib import Path

from fastapi import HTTPException, Response

from server.api.changes import read_etags

FOLDER = Path(__file__).resolve().parents[1] / "console"
INDEX = "index.html"

_POLICY = "; ".join(
    (
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
)
_HEADERS = {
    "Content-Security-Policy": _POLICY,
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


class Console:
    """The files by their path; there are no others to be had through it."""

    def __init__(self, folder: Path = FOLDER) -> None:
        self._files = {
            path.relative_to(folder).as_posix(): path.read_bytes()
            for path in folder.rglob("*")
            if path.suffix in _TYPES
        }

    def answer(self, path: str, if_none_match: str | None) -> Response:
        """A file, 304 for a caller who has it, or 404."""
        content = self._files.get(path)
        if content is None:
            raise HTTPException(404)
        headers = {**_HEADERS, "ETag": f'"{hashlib.sha256(content).hexdigest()[:32]}"'}
        if {headers["ETag"], "*"} & read_etags(if_none_match or ""):
            return Response(status_code=304, headers=headers)
        return Response(content, headers=headers, media_type=_TYPES[Path(path).suffix])
