"""Alive, ready, measured, described, and shown."""

from typing import Annotated

from fastapi import APIRouter, Header, Request, Response
from fastapi.responses import JSONResponse

from server.api.answers import Json, short_name
from server.api.console import INDEX, Console
from server.api.deps import READER, Runtime, RuntimeDep
from server.api.openapi import problems
from server.api.pages import Pages
from server.api.schemas import Liveness, Readiness

router = APIRouter()


@router.get("/livez", tags=["health"], operation_id="livez", responses={200: {"model": Liveness}})
async def livez() -> Response:
    """The process answers. Nothing else is looked at, so nothing else can have it restarted."""
    return JSONResponse({"alive": True})


@router.get(
    "/readyz",
    tags=["health"],
    operation_id="readyz",
    responses={
        200: {"model": Readiness},
        503: {"model": Readiness, "description": "Send no traffic here; `reasons` says why"},
    },
)
async def readyz(runtime: RuntimeDep) -> Response:
    """Whether traffic may be sent here: backbone warm, store read, not shutting down."""
    body = _readiness(runtime)
    headers = {"Cache-Control": "no-store"}
    return JSONResponse(body, 200 if body["ready"] else 503, headers)


@router.get(
    "/metrics",
    tags=["health"],
    operation_id="metrics",
    dependencies=READER,
    response_class=Response,
    responses={200: {"content": {"text/plain": {"schema": {"type": "string"}}}}, **problems(401)},
)
async def metrics(request: Request, runtime: RuntimeDep) -> Response:
    """Everything counted, for Prometheus."""
    body, content_type = runtime.metrics.render(request.headers.get("Accept", ""))
    return Response(body, headers={"Content-Type": content_type})


@router.get("/openapi.json", include_in_schema=False, dependencies=READER)
async def openapi(request: Request) -> Response:
    """This API, described for programs."""
    return JSONResponse(request.app.openapi())


@router.get("/docs", include_in_schema=False, dependencies=READER)
async def docs(request: Request) -> Response:
    """The same for people, without anything from elsewhere."""
    pages: Pages = request.app.state.pages
    return pages.docs(request.app.openapi())


@router.get("/", include_in_schema=False)
async def home(request: Request, if_none_match: Annotated[str | None, Header()] = None) -> Response:
    """The web console."""
    console: Console = request.app.state.console
    return console.answer(INDEX, if_none_match)


@router.get("/console/{path:path}", include_in_schema=False)
async def console_file(
    request: Request, path: str, if_none_match: Annotated[str | None, Header()] = None
) -> Response:
    """What the console is made of."""
    console: Console = request.app.state.console
    return console.answer(path, if_none_match)


def _readiness(runtime: Runtime) -> Json:
    reasons = list(runtime.reasons)
    if not runtime.started:
        empty = ("backbone", "input", "generation", "store", "tasks", "pending_images")
        return {"ready": False, "reasons": reasons, **dict.fromkeys(empty)}
    engine = runtime.engine
    status = engine.status
    preprocessing = engine.backbone.preprocessing.to_json()
    since = status.seconds_since_read
    return {
        "ready": not reasons,
        "reasons": reasons,
        "backbone": short_name(engine.backbone.name),
        "input": {name: preprocessing[name] for name in ("resize", "resample")},
        "generation": status.generation,
        "store": {
            "generation_seen": status.generation_seen,
            "seconds_since_read": None if since is None else round(since, 3),
            # This route is open to all, and the reason may say where the store is.
            "error": status.store_error and "the task store cannot be read; the log says why",
        },
        "tasks": {"ready": status.tasks_ready, "failed": status.versions_failed},
        "pending_images": status.pending_images,
    }
