"""`/predict`: every asked task's answer for every image."""

import time
from collections.abc import Sequence

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse

from server.api.answers import Wanted, predict_json, server_timing
from server.api.bodies import read_images
from server.api.deps import READER, RecordDep, RuntimeDep
from server.api.disconnects import while_connected
from server.api.errors import TooManyTasks
from server.api.middleware import RequestRecord
from server.api.openapi import PREDICT_BODY, problems
from server.api.options import parameters, read_deadline_ms, read_query
from server.api.schemas import PredictBody, PredictQuery, PredictResult
from server.engine.engine import Engine
from server.engine.types import PredictRequest
from server.errors import DeadlineExceeded

router = APIRouter(tags=["predict"], dependencies=READER)


@router.post(
    "/predict",
    operation_id="predict",
    responses={
        200: {"model": PredictResult},
        **problems(400, 401, 404, 413, 415, 422, 429, 500, 503, 504),
    },
    openapi_extra={"requestBody": PREDICT_BODY, "parameters": parameters()},
)
@router.put("/predict", include_in_schema=False)  # what `curl -T` sends
async def predict(
    request: Request,
    runtime: RuntimeDep,
    record: RecordDep,
) -> JSONResponse:
    """Ask tasks about images.

    The body is an image, a form with files called `image`, or JSON. `PUT` does the same, so that
    `curl -T cat.jpg` works.
    """
    engine, settings = runtime.engine, runtime.settings
    engine.check_room()  # before the body is read: a full server answers at once
    query, deadline_ms = read_query(request), read_deadline_ms(request)
    given = await read_images(request, settings)
    wanted, tasks = _options(query, given.said)
    _check_count(engine, tasks, settings.max_tasks)
    allowed_ms = settings.default_deadline_ms if deadline_ms is None else deadline_ms
    asked = PredictRequest(
        images=given.images,
        tasks=tasks,
        features=wanted.returned == "embedding",
        deadline=_deadline(record, allowed_ms),
    )
    record.images = len(given.images)
    answer = await while_connected(request, engine.predict(asked))
    record.tasks = len(answer.images[0].tasks)
    headers = {"Server-Timing": server_timing(answer.timings), "Cache-Control": "no-store"}
    return JSONResponse(predict_json(answer, wanted), headers=headers)


def _deadline(record: RequestRecord, allowed_ms: float | None) -> float | None:
    """When the answer must be there, counted from the request's arrival."""
    if allowed_ms is None:
        return None
    deadline = record.started + allowed_ms / 1000
    if time.monotonic() >= deadline:
        raise DeadlineExceeded(f"The {allowed_ms:g} ms passed while the request was being read.")
    return deadline


def _options(query: PredictQuery, said: PredictBody | None) -> tuple[Wanted, list[str] | None]:
    """The query's options, and over them what a JSON body says."""
    top_k, threshold, returned, tasks = query.top_k, query.threshold, query.returned, query.tasks
    if said is not None:
        top_k = top_k if said.top_k is None else said.top_k
        threshold = threshold if said.threshold is None else said.threshold
        returned = returned if said.returned is None else said.returned
        tasks = tasks if said.tasks is None else said.tasks
    distinct = None if tasks is None else list(dict.fromkeys(tasks))
    return Wanted(top_k, threshold, returned), distinct


def _check_count(engine: Engine, tasks: Sequence[str] | None, most: int) -> None:
    count = len(engine.bank.snapshot.ready_names if tasks is None else tasks)
    if count > most:
        hint = "" if tasks is not None else " There are that many ready tasks: name some of them."
        raise TooManyTasks(
            f"The request asks {count} tasks, and at most {most} may be asked at once.{hint}"
        )
