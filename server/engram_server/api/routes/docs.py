"""API documentation: `/openapi.json` for programs, `/docs` for people."""

import base64
import hashlib
import re
from collections.abc import Iterable
from typing import Any

from fastapi import APIRouter, FastAPI, Request, Response
from fastapi.openapi.docs import get_swagger_ui_html
from fastapi.openapi.utils import get_openapi
from fastapi.responses import JSONResponse
from fastapi.staticfiles import StaticFiles
from pydantic import BaseModel

from engram_server.api.auth import SECURITY_SCHEMES, requires

router = APIRouter(include_in_schema=False, dependencies=requires("any"))

# Swagger UI from the package: the page loads nothing from other sites.
_SWAGGER = StaticFiles(packages=[("fastapi_offline", "static")])
_REF = "#/components/schemas/{model}"


@router.get("/openapi.json")
def openapi(request: Request) -> Response:
    # In a thread: building it takes a second, once.
    return JSONResponse(request.app.openapi())


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
    """Build the app's document once. `models` are schemas that no signature mentions."""

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            app.openapi_schema = build(app, models)
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign]  # as FastAPI documents


def build(app: FastAPI, models: Iterable[type[BaseModel]]) -> dict[str, Any]:
    """FastAPI's document, with the bodies that routes read themselves, and security schemes."""
    document = get_openapi(
        title=app.title,
        version=app.version,
        summary=app.summary,
        description=app.description,
        routes=app.routes,
        tags=app.openapi_tags,
    )
    schemas = document["components"]["schemas"]
    for model in models:
        schema = model.model_json_schema(ref_template=_REF)
        schemas |= schema.pop("$defs", {})
        schemas[model.__name__] = schema
    # Declared here, because dependencies would slow down every request.
    document["components"]["securitySchemes"] = SECURITY_SCHEMES
    for path in document["paths"].values():
        for operation in path.values():
            if "401" in operation["responses"]:
                operation["security"] = [{name: []} for name in SECURITY_SCHEMES] + [{}]
    return document
