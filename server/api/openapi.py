"""What the OpenAPI document says beyond the signatures: bodies, problems and real examples."""

import json
from collections.abc import Mapping
from importlib import resources
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi

from server.api import problems as problem_documents
from server.api.schemas import LabelTarget, PredictBody, ProblemDocument

Schema = dict[str, Any]

_BINARY: Schema = {"schema": {"type": "string", "format": "binary"}}

PREDICT_BODY: Schema = {
    "required": True,
    "description": "An image as it is, a form with any number of files called `image`, or JSON.",
    "content": {
        "application/json": {"schema": {"$ref": "#/components/schemas/PredictBody"}},
        "multipart/form-data": {
            "schema": {
                "type": "object",
                "required": ["image"],
                "properties": {
                    "image": {"type": "array", "items": {"type": "string", "format": "binary"}}
                },
            }
        },
        "image/*": _BINARY,
        "application/octet-stream": _BINARY,
    },
}
LABEL_BODY: Schema = {
    "required": True,
    "content": {"application/json": {"schema": {"$ref": "#/components/schemas/LabelTarget"}}},
}
BUNDLE_BODY: Schema = {
    "required": True,
    "description": "A bundle: one .safetensors file, described in docs/reference/bundle-format.md.",
    "content": {"application/octet-stream": _BINARY},
}

# Either will do, and none where no key is set.
SECURITY_SCHEMES: Schema = {
    "bearer": {"type": "http", "scheme": "bearer", "description": "The key as a token."},
    "header": {"type": "apiKey", "in": "header", "name": "X-API-Key"},
}

_TITLES = {
    400: "The body cannot be parsed",
    401: "A key is required",
    403: "The key may not do this",
    404: "No such task, version, label or cached image",
    409: "It does not fit the present state",
    412: "The condition of the request does not hold",
    413: "The body or the image is too large",
    415: "A content type that is not read here",
    422: "Something in the request is not valid",
    429: "Too many requests at once; Retry-After says when to come back",
    500: "The server failed",
    503: "Starting, shutting down, or the task store is away",
    504: "The deadline passed",
}


def problems(*statuses: int) -> dict[int | str, Schema]:
    """The `responses` of a route that answers these problems."""
    content = {
        problem_documents.MEDIA_TYPE: {"schema": {"$ref": "#/components/schemas/ProblemDocument"}}
    }
    return {status: {"description": _TITLES[status], "content": content} for status in statuses}


def load_examples() -> dict[str, Any]:
    """Real answers by operation; a test makes them anew and compares."""
    text = resources.files("server.api").joinpath("examples.json").read_text(encoding="utf-8")
    examples: dict[str, Any] = json.loads(text)
    return examples


def install(app: FastAPI) -> None:
    """Have the app describe itself by `build`, once."""

    def openapi() -> Schema:
        if app.openapi_schema is None:
            app.openapi_schema = build(app, load_examples())
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign]  # as FastAPI documents it


def build(app: FastAPI, examples: Mapping[str, Any]) -> Schema:
    """The document: FastAPI's, with the schemas it cannot see and the examples."""
    document = get_openapi(
        title=app.title,
        version=app.version,
        summary=app.summary,
        description=app.description,
        routes=app.routes,
        tags=app.openapi_tags,
    )
    schemas = document["components"]["schemas"]
    for model in (PredictBody, LabelTarget, ProblemDocument):
        schema = model.model_json_schema(ref_template="#/components/schemas/{model}")
        schemas |= schema.pop("$defs", {})
        schemas[model.__name__] = schema
    # Declared here and not as dependencies, which would cost every request a little.
    document["components"]["securitySchemes"] = SECURITY_SCHEMES
    for path in document["paths"].values():
        for operation in path.values():
            if "401" in operation["responses"]:
                operation["security"] = [{name: []} for name in SECURITY_SCHEMES] + [{}]
            _refine(operation, examples.get(operation["operationId"], {}))
    for unused in ("HTTPValidationError", "ValidationError"):
        schemas.pop(unused, None)
    return document


def _refine(operation: Schema, examples: Mapping[str, Any]) -> None:
    """FastAPI's own 422 is replaced by ours; the examples are put where they belong."""
    responses: Schema = operation["responses"]
    if "HTTPValidationError" in json.dumps(responses.get("422", {})):
        responses |= {str(status): value for status, value in problems(422).items()}
    for status, example in examples.get("responses", {}).items():
        for content in responses[status]["content"].values():
            content["example"] = example
    for media, example in examples.get("request", {}).items():
        operation["requestBody"]["content"][media]["example"] = example
