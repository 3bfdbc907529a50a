"""The OpenAPI document of the API, as OpenAPI 3.1 and as 3.0.3 for generators that need it."""

import json
import threading
from collections.abc import Iterable, Sequence
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel

from engram_server.api.auth import SECURITY_SCHEMES

Document = dict[str, Any]

_REF = "#/components/schemas/{model}"
_NULL = {"type": "null"}
_LIMITS = (("exclusiveMinimum", "minimum"), ("exclusiveMaximum", "maximum"))


class Documents:
    """The documents of an app as JSON, built when the first is requested.

    `models` are schemas that no signature mentions.
    """

    def __init__(self, app: FastAPI, models: Iterable[type[BaseModel]]) -> None:
        self._app = app
        self._models = tuple(models)
        self._lock = threading.Lock()
        self._built: dict[str, bytes] = {}

    def newest(self) -> Document:
        if self._app.openapi_schema is None:
            self._app.openapi_schema = build(self._app, self._models)
        return self._app.openapi_schema

    def encoded(self, version: str) -> bytes:
        """The document of a version, `3.1` or `3.0`. Building it takes a second, once."""
        with self._lock:
            if not self._built:
                newest = self.newest()
                for name, document in (("3.1", newest), ("3.0", to_3_0(newest))):
                    self._built[name] = json.dumps(document, ensure_ascii=False).encode()
        return self._built[version]


def build(app: FastAPI, models: Iterable[type[BaseModel]]) -> Document:
    """FastAPI's document, with the bodies that routes read themselves, and security schemes.

    Null is in the schemas of those members only that are null in answers. A parameter or a member
    of a request may be left out instead.
    """
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
        requested = {**schema.pop("$defs", {}), model.__name__: schema}
        schemas |= {name: _omit_optional_nulls(each) for name, each in requested.items()}
    # Declared here, because dependencies would slow down every request.
    document["components"]["securitySchemes"] = SECURITY_SCHEMES
    for path in document["paths"].values():
        for operation in path.values():
            for parameter in operation.get("parameters", ()):
                parameter["schema"] = without_null(parameter["schema"])
            if "401" in operation["responses"]:
                operation["security"] = [{name: []} for name in SECURITY_SCHEMES] + [{}]
    return document


def _omit_optional_nulls(schema: Document) -> Document:
    required = schema.get("required", ())
    members = {
        name: each if name in required else without_null(each)
        for name, each in schema.get("properties", {}).items()
    }
    for name, each in members.items():
        if isinstance(default := each.get("default"), dict):
            rest = {key: value for key, value in default.items() if value is not None}
            members[name] = {**each, "default": rest}
    return {**schema, "properties": members} if members else schema


def without_null(schema: Document) -> Document:
    """The schema of a value that is not null."""
    choices = schema.get("anyOf", ())
    if _NULL not in choices:
        return schema
    rest = {name: each for name, each in schema.items() if name != "anyOf"}
    if rest.get("default", ...) is None:
        del rest["default"]
    return rest | _any_of([each for each in choices if each != _NULL])


def _any_of(choices: Sequence[Document]) -> Document:
    return choices[0] if len(choices) == 1 else {"anyOf": list(choices)}


def to_3_0(document: Document) -> Document:
    """The same document as OpenAPI 3.0.3."""
    info = {name: value for name, value in document["info"].items() if name != "summary"}
    summary = document["info"].get("summary")
    if summary:
        info["description"] = f"{summary} {info.get('description', '')}".strip()
    components = document["components"]
    schemas = {name: _schema_3_0(each) for name, each in components["schemas"].items()}
    return {
        **document,
        "openapi": "3.0.3",
        "info": info,
        "paths": _paths_3_0(document["paths"]),
        "components": {**components, "schemas": schemas},
    }


def _paths_3_0(value: Any) -> Any:  # noqa: ANN401 - JSON
    """Paths, or a part of them, with each `schema` converted."""
    if isinstance(value, list):
        return [_paths_3_0(each) for each in value]
    if not isinstance(value, dict):
        return value
    return {
        name: _schema_3_0(each) if name == "schema" else _paths_3_0(each)
        for name, each in value.items()
    }


def _schema_3_0(schema: Document) -> Document:
    """A schema in the dialect of OpenAPI 3.0, which has neither null nor `const`."""
    converted = without_null(schema)
    result = {name: _member_3_0(name, each) for name, each in converted.items()}
    if converted is not schema:
        result["nullable"] = True
    if "const" in result:
        result["enum"] = [result.pop("const")]
    if "examples" in result:
        result["example"] = result.pop("examples")[0]
    for exclusive, limit in _LIMITS:
        if exclusive in result:
            result |= {limit: result[exclusive], exclusive: True}
    # 3.0 ignores what is beside a reference. Strictly, `nullable` has no effect on `allOf`, but
    # this is how generators expect a reference that may be null.
    if "$ref" in result and len(result) > 1:
        result["allOf"] = [{"$ref": result.pop("$ref")}]
    return result


def _member_3_0(name: str, value: Any) -> Any:  # noqa: ANN401 - JSON
    if name == "properties":
        return {member: _schema_3_0(each) for member, each in value.items()}
    if name in ("anyOf", "oneOf", "allOf"):
        return [_schema_3_0(each) for each in value]
    if name in ("items", "additionalProperties") and isinstance(value, dict):
        return _schema_3_0(value)
    return value
