"""Liveness, readiness and metrics."""

from fastapi import APIRouter, Request, Response
from pydantic import Field

from engram_server.api.auth import requires
from engram_server.api.dependencies import RuntimeDep, Strict
from engram_server.api.problems import responses
from engram_server.runtime import Runtime

router = APIRouter(tags=["health"])


class Liveness(Strict):
    alive: bool
    reasons: list[str] = Field(
        default=[], description="Failures that require a restart; empty when alive."
    )


class InputSize(Strict):
    """The first step of preprocessing. Clients may resize images themselves before sending."""

    resize: int | list[int] | None = Field(
        description="The shortest edge, or height and width, after resizing."
    )
    resample: str = Field(description="The Pillow filter.", examples=["bilinear"])


class StoreHealth(Strict):
    generation_seen: int
    seconds_since_read: float | None = Field(description="Grows while the store is unavailable.")
    error: str | None


class AuditHealth(Strict):
    error: str | None = Field(description="While it cannot be written, changes are rejected.")


class TaskCounts(Strict):
    ready: int
    failed: int


class Readiness(Strict):
    ready: bool
    reasons: list[str] = Field(description="Why not; empty when ready.", examples=[[]])
    backbone: str | None = None
    input: InputSize | None = None
    reads_names: bool | None = Field(
        default=None, description="Whether tasks can be taught by class names."
    )
    generation: int | None = Field(default=None, description="The served generation.")
    store: StoreHealth | None = None
    audit: AuditHealth | None = Field(default=None, description="If there is an audit log.")
    tasks: TaskCounts | None = None
    pending_images: int | None = None


@router.get(
    "/livez",
    dependencies=requires("public"),
    responses={503: {"model": Liveness, "description": "Restart this process; see `reasons`"}},
)
async def livez(runtime: RuntimeDep, response: Response) -> Liveness:
    """Liveness: 503 if the process must be restarted.

    Failures of tasks, batches or the store do not require a restart.
    """
    reasons = list(runtime.broken)
    response.headers["Cache-Control"] = "no-store"
    response.status_code = 503 if reasons else 200
    return Liveness(alive=not reasons, reasons=reasons)


@router.get(
    "/readyz",
    dependencies=requires("public"),
    responses={503: {"model": Readiness, "description": "Not ready; see `reasons`"}},
)
async def readyz(runtime: RuntimeDep, response: Response) -> Readiness:
    """Readiness: warmed up, store read, device working, not shutting down."""
    reasons = list(runtime.reasons)
    response.headers["Cache-Control"] = "no-store"
    response.status_code = 503 if reasons else 200
    if not runtime.started:
        return Readiness(ready=False, reasons=reasons)
    engine = runtime.engine
    model, status = engine.model, engine.status
    since = status.seconds_since_read
    return Readiness(
        ready=not reasons,
        reasons=reasons,
        backbone=model.name,
        input=InputSize.model_validate({"resize": model.resize, "resample": model.resample}),
        reads_names=engine.teaching.reads_class_names,
        generation=status.generation,
        store=StoreHealth(
            generation_seen=status.generation_seen,
            seconds_since_read=None if since is None else round(since, 3),
            # This route is public, and the message may reveal where the store is.
            error=status.store_error and "the task store cannot be read; see the server log",
        ),
        audit=_audit_health(runtime),
        tasks=TaskCounts(ready=status.tasks_ready, failed=status.versions_failed),
        pending_images=status.pending_images,
    )


def _audit_health(runtime: Runtime) -> AuditHealth | None:
    if runtime.audit is None:
        return None
    failed = runtime.audit.error is not None
    return AuditHealth(error="it cannot be written; see the server log" if failed else None)


@router.get(
    "/metrics",
    dependencies=requires("metrics"),
    response_class=Response,
    responses={200: {"content": {"text/plain": {"schema": {"type": "string"}}}}, **responses(401)},
)
async def metrics(request: Request, runtime: RuntimeDep) -> Response:
    """Metrics in Prometheus format, of all processes of the server."""
    body, content_type = await runtime.render_metrics(request.headers.get("Accept", ""))
    return Response(body, headers={"Content-Type": content_type})
