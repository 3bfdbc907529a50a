"""`/predict`: every asked task's answer for every image."""

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse

from server.api.answers import Wanted, predict_json, server_timing, view_json
from server.api.bodies import read_images
from server.api.deps import READER, RecordDep, RuntimeDep
from server.api.openapi import PREDICT_BODY, problems
from server.api.options import (
    check_task_count,
    deadline_of,
    parameters,
    read_deadline_ms,
    read_min_generation,
    read_query,
)
from server.api.predicting import ask_engine
from server.api.schemas import PredictBody, PredictQuery, PredictResult
from server.engine.types import PredictRequest

router = APIRouter(tags=["predict"], dependencies=READER)


@router.post(
    "/predict",
    operation_id="predict",
    responses={
        200: {"model": PredictResult},
        **problems(400, 401, 404, 412, 413, 415, 422, 429, 500, 503, 504),
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
    at_least = read_min_generation(request)
    given = await read_images(request, settings)
    wanted, tasks = _options(query, given.said)
    check_task_count(engine, tasks, settings.max_tasks)
    asked = PredictRequest(
        images=given.images,
        tasks=tasks,
        at_least=at_least,
        features=wanted.returned == "embedding",
        attention=wanted.explain == "attention",
        deadline=deadline_of(record, deadline_ms, settings),
    )
    answer = await ask_engine(request, runtime, record, asked)
    body = predict_json(answer, wanted)
    if asked.attention:
        body["view"] = view_json(engine)
    headers = {"Server-Timing": server_timing(answer.timings), "Cache-Control": "no-store"}
    return JSONResponse(body, headers=headers)


def _options(query: PredictQuery, said: PredictBody | None) -> tuple[Wanted, list[str] | None]:
    """The query's options, and over them what a JSON body says."""
    tasks = query.tasks
    wanted = Wanted(query.top_k, query.threshold, query.returned, query.explain)
    if said is not None:
        tasks = tasks if said.tasks is None else said.tasks
        wanted = Wanted(
            wanted.top_k if said.top_k is None else said.top_k,
            wanted.threshold if said.threshold is None else said.threshold,
            wanted.returned if said.returned is None else said.returned,
            wanted.explain if said.explain is None else said.explain,
        )
    distinct = None if tasks is None else list(dict.fromkeys(tasks))
    return wanted, distinct
