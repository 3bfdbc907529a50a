"""API documentation: `/openapi.json` for programs, `/docs` for people.

Public: they describe the API and hold no data, and a browser that opens a page sends no key.
"""

import base64
import hashlib
import re
from collections.abc import Iterable

from fastapi import APIRouter, FastAPI, Request, Response
from fastapi.openapi.docs import get_swagger_ui_html
from fastapi.staticfiles import StaticFiles
from pydantic import BaseModel

from engram_server.api.auth import requires
from engram_server.api.openapi import Documents

router = APIRouter(include_in_schema=False, dependencies=requires("public"))

# Swagger UI from the package: the page loads nothing from other sites.
_SWAGGER = StaticFiles(packages=[("fastapi_offline", "static")])


# Plain functions, which FastAPI runs in threads: building a document takes a second, once.


@router.get("/openapi.json")
def openapi(request: Request) -> Response:
    return _document(request, "3.1")


@router.get("/openapi-3.0.json")
def openapi_3_0(request: Request) -> Response:
    """The same document for generators that do not read OpenAPI 3.1."""
    return _document(request, "3.0")


def _document(request: Request, version: str) -> Response:
    documents: Documents = request.app.state.documents
    return Response(documents.encoded(version), media_type="application/json")


@router.get("/docs")
async def docs(request: Request) -> Response:
    """Swagger UI."""
    html = get_swagger_ui_html(
        title=f"{request.app.title} API",
        # Relative, so that they work behind a proxy that adds a path prefix.
        openapi_url="openapi.json",
        swagger_js_url="docs/swagger-ui-bundle.js",
        swagger_css_url="docs/swagger-ui.css",
        swagger_favicon_url="docs/favicon.png",
        # The validator would send the document to swagger.io.
        swagger_ui_parameters={"validatorUrl": None},
    )
    (script,) = re.findall(rb"<script>(.*?)</script>", bytes(html.body), re.DOTALL)
    digest = base64.b64encode(hashlib.sha256(script).digest()).decode()
    policy = (
        "default-src 'none'",
        f"script-src 'self' 'sha256-{digest}'",
        "style-src 'self'",
        "img-src 'self' data:",
        "connect-src 'self'",
        "form-action 'none'",
        "base-uri 'none'",
        "frame-ancestors 'none'",
    )
    html.headers["Content-Security-Policy"] = "; ".join(policy)
    html.headers["Referrer-Policy"] = "no-referrer"
    html.headers["Cache-Control"] = "no-store"
    return html


@router.get("/docs/{file}")
async def docs_file(request: Request, file: str) -> Response:
    return await _SWAGGER.get_response(file, request.scope)


def install(app: FastAPI, models: Iterable[type[BaseModel]]) -> None:
    """Give the app its documents. `models` are schemas that no signature mentions."""
    app.state.documents = documents = Documents(app, models)
    app.openapi = documents.newest  # type: ignore[method-assign]  # as FastAPI documents
