"""Alive, ready, and measured."""

from fastapi import APIRouter, Request, Response
from pydantic import Field

from server.api.auth import requires
from server.api.http import RuntimeDep, Strict, short_name
from server.api.problems import responses
from server.runtime import Runtime

router = APIRouter(tags=["health"])


class Liveness(Strict):
    alive: bool
    reasons: list[str] = Field(
        default=[], description="What only a new process repairs; empty when alive."
    )


class InputSize(Strict):
    """What happens first to an image; whoever does it before sending gets the same answer."""

    resize: int | list[int] | None = Field(
        description="Its shortest edge, or height and width, are brought to this."
    )
    resample: str = Field(description="By this filter of Pillow.", examples=["bilinear"])


class StoreHealth(Strict):
    generation_seen: int
    seconds_since_read: float | None = Field(description="Grows while the store is away.")
    error: str | None


class AuditHealth(Strict):
    error: str | None = Field(description="While it cannot be written, changes are refused.")


class TaskCounts(Strict):
    ready: int
    failed: int


class Readiness(Strict):
    ready: bool
    reasons: list[str] = Field(description="Why not; empty when ready.", examples=[[]])
    backbone: str | None = None
    input: InputSize | None = None
    reads_names: bool | None = Field(
        default=None, description="Whether tasks may be taught by the names of their classes."
    )
    generation: int | None = Field(default=None, description="Of the catalog being served.")
    store: StoreHealth | None = None
    audit: AuditHealth | None = Field(default=None, description="Where there is an audit log.")
    tasks: TaskCounts | None = None
    pending_images: int | None = None


@router.get(
    "/livez",
    dependencies=requires("public"),
    responses={503: {"model": Liveness, "description": "Restart this process; `reasons` says why"}},
)
async def livez(runtime: RuntimeDep, response: Response) -> Liveness:
    """Whether the process is worth keeping: 503 when a part of it cannot be brought back.

    A task, a store or a batch that fails is no reason.
    """
    reasons = list(runtime.broken)
    response.headers["Cache-Control"] = "no-store"
    response.status_code = 503 if reasons else 200
    return Liveness(alive=not reasons, reasons=reasons)


@router.get(
    "/readyz",
    dependencies=requires("public"),
    responses={
        503: {"model": Readiness, "description": "Send no traffic here; `reasons` says why"}
    },
)
async def readyz(runtime: RuntimeDep, response: Response) -> Readiness:
    """Whether traffic may be sent here: warm, store read, device answering, not shutting down."""
    reasons = list(runtime.reasons)
    response.headers["Cache-Control"] = "no-store"
    response.status_code = 503 if reasons else 200
    if not runtime.started:
        return Readiness(ready=False, reasons=reasons)
    backbone, status = runtime.engine.backbone, runtime.engine.status
    since = status.seconds_since_read
    return Readiness(
        ready=not reasons,
        reasons=reasons,
        backbone=short_name(backbone.name),
        input=InputSize.model_validate(
            {name: backbone.preprocessing.to_json()[name] for name in InputSize.model_fields}
        ),
        reads_names=runtime.engine.text_tower is not None,
        generation=status.generation,
        store=StoreHealth(
            generation_seen=status.generation_seen,
            seconds_since_read=None if since is None else round(since, 3),
            # This route is open to all, and the reason may say where the store is.
            error=status.store_error and "the task store cannot be read; the log says why",
        ),
        audit=_audit_health(runtime),
        tasks=TaskCounts(ready=status.tasks_ready, failed=status.versions_failed),
        pending_images=status.pending_images,
    )


def _audit_health(runtime: Runtime) -> AuditHealth | None:
    if runtime.audit is None:
        return None
    failed = runtime.audit.error is not None
    return AuditHealth(error="it cannot be written; the log says why" if failed else None)


@router.get(
    "/metrics",
    dependencies=requires("metrics"),
    response_class=Response,
    responses={200: {"content": {"text/plain": {"schema": {"type": "string"}}}}, **responses(401)},
)
async def metrics(request: Request, runtime: RuntimeDep) -> Response:
    """Everything counted, for Prometheus."""
    body, content_type = runtime.metrics.render(request.headers.get("Accept", ""))
    return Response(body, headers={"Content-Type": content_type})
