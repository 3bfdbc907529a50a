"""Options of a prediction: the query and the deadline.

Read here and not by FastAPI's own machinery, whose work for these five parameters was a quarter of
all that HTTP adds to a prediction.
"""

import math
from typing import Any

from fastapi import Request
from fastapi.exceptions import RequestValidationError
from pydantic import ValidationError

from server.api.errors import InvalidRequest
from server.api.schemas import PredictQuery

DEADLINE = "X-Deadline-Ms"
LONGEST_DEADLINE_MS = 86_400_000


def read_query(request: Request) -> PredictQuery:
    """The options in the query, or RequestValidationError."""
    given: dict[str, object] = dict(request.query_params)
    if "tasks" in given:
        given["tasks"] = request.query_params.getlist("tasks")
    try:
        return PredictQuery.model_validate(given)
    except ValidationError as error:
        found = error.errors(include_url=False, include_input=False, include_context=False)
        raise RequestValidationError(
            [{**each, "loc": ("query", *each["loc"])} for each in found]
        ) from None


def read_deadline_ms(request: Request) -> float | None:
    """How long the caller will wait, or InvalidRequest."""
    text = request.headers.get(DEADLINE)
    if text is None:
        return None
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value <= LONGEST_DEADLINE_MS:  # nor is NaN
        raise InvalidRequest(
            f"{DEADLINE} is a number of milliseconds above 0 and at most {LONGEST_DEADLINE_MS}."
        )
    return value


def parameters() -> list[dict[str, Any]]:
    """The same for the OpenAPI document."""
    schema = PredictQuery.model_json_schema()
    query = [
        {
            "name": name,
            "in": "query",
            "required": False,
            "description": each.pop("description"),
            "schema": each,
        }
        for name, each in schema["properties"].items()
    ]
    deadline = {
        "name": DEADLINE,
        "in": "header",
        "required": False,
        "description": "Answer within this many milliseconds, or not at all (504).",
        "schema": {"type": "number", "exclusiveMinimum": 0, "maximum": LONGEST_DEADLINE_MS},
    }
    return [*query, deadline]
