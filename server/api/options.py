"""Options of a prediction: the query, the deadline, and how much may be asked.

Read here and not by FastAPI's own machinery, whose work for these parameters was a quarter of
all that HTTP adds to a prediction.
"""

import math
import time
from collections.abc import Sequence
from typing import Any

from fastapi import Request
from fastapi.exceptions import RequestValidationError
from pydantic import ValidationError

from server.api.errors import InvalidRequest, TooManyTasks
from server.api.middleware import RequestRecord
from server.api.schemas import PredictQuery
from server.engine.engine import Engine
from server.errors import DeadlineExceeded
from server.settings import Settings

DEADLINE = "X-Deadline-Ms"
MIN_GENERATION = "X-Min-Generation"
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


def read_min_generation(request: Request) -> int | None:
    """The generation the caller knows of, or InvalidRequest."""
    text = request.headers.get(MIN_GENERATION)
    if text is None:
        return None
    if not (text.isascii() and text.isdecimal() and len(text) <= 18):
        raise InvalidRequest(f"{MIN_GENERATION} is the number of a generation, such as 118.")
    return int(text)


def deadline_of(
    record: RequestRecord, allowed_ms: float | None, settings: Settings
) -> float | None:
    """When the answer must be there, counted from the request's arrival."""
    allowed_ms = settings.default_deadline_ms if allowed_ms is None else allowed_ms
    if allowed_ms is None:
        return None
    deadline = record.started + allowed_ms / 1000
    if time.monotonic() >= deadline:
        raise DeadlineExceeded(f"The {allowed_ms:g} ms passed while the request was being read.")
    return deadline


def check_task_count(engine: Engine, tasks: Sequence[str] | None, most: int) -> None:
    """TooManyTasks if more are asked than one request may; None asks every ready task."""
    count = len(engine.snapshot.ready_names if tasks is None else tasks)
    if count > most:
        hint = "" if tasks is not None else " There are that many ready tasks: name some of them."
        raise TooManyTasks(
            f"The request asks {count} tasks, and at most {most} may be asked at once.{hint}"
        )


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
    generation = {
        "name": MIN_GENERATION,
        "in": "header",
        "required": False,
        "description": "Answer from this generation of the catalog or a later one.",
        "schema": {"type": "integer", "minimum": 0, "maximum": 10**18 - 1},
    }
    return [*query, deadline, generation]
