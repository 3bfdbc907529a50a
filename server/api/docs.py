"""This API, described: `/openapi.json` for programs, `/docs` for people."""

import base64
import hashlib
import re
from collections.abc import Iterable
from typing import Any

from fastapi import APIRouter, FastAPI, Request, Response
from fastapi.openapi.docs import get_swagger_ui_html
from fastapi.openapi.utils import get_openapi
from fastapi.responses import HTMLResponse, JSONResponse
from fastapi.staticfiles import StaticFiles
from pydantic import BaseModel

from server.api.auth import SECURITY_SCHEMES, requires

router = APIRouter(include_in_schema=False, dependencies=requires("any"))

# Swagger UI as the package carries it: the page asks nothing of another site.
_SWAGGER = StaticFiles(packages=[("fastapi_offline", "static")])
_REF = "#/components/schemas/{model}"


@router.get("/openapi.json")
def openapi(request: Request) -> Response:
    # In a thread: to build it takes a second, once.
    return JSONResponse(request.app.openapi())


@router.get("/docs")
async def docs(request: Request) -> Response:
    """Swagger UI: every operation can be read about, and tried."""
    return page(request.app.title)


@router.get("/docs/{file}")
async def docs_file(request: Request, file: str) -> Response:
    return await _SWAGGER.get_response(file, request.scope)


def page(title: str) -> HTMLResponse:
    html = get_swagger_ui_html(
        title=f"{title} API",
        # Relative, so that they are found behind a proxy that serves us below some path.
        openapi_url="openapi.json",
        swagger_js_url="docs/swagger-ui-bundle.js",
        swagger_css_url="docs/swagger-ui.css",
        swagger_favicon_url="docs/favicon.png",
        swagger_ui_parameters={"validatorUrl": None},  # it would send the document to swagger.io
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


def install(app: FastAPI, models: Iterable[type[BaseModel]]) -> None:
    """Have the app describe itself by `build`, once. `models` are those no signature shows."""

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            app.openapi_schema = build(app, models)
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign]  # as FastAPI documents it


def build(app: FastAPI, models: Iterable[type[BaseModel]]) -> dict[str, Any]:
    """FastAPI's document, with the bodies that routes read by themselves, and the keys."""
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
    # Declared here and not as dependencies, which would cost every request a little.
    document["components"]["securitySchemes"] = SECURITY_SCHEMES
    for path in document["paths"].values():
        for operation in path.values():
            if "401" in operation["responses"]:
                operation["security"] = [{name: []} for name in SECURITY_SCHEMES] + [{}]
    return document
