"""`/replicas`: which servers share the store, and what each serves."""

from anyio import to_thread
from fastapi import APIRouter, Response
from fastapi.responses import JSONResponse

from server.api.answers import Json, short_name
from server.api.deps import READER, EngineDep
from server.api.openapi import problems
from server.api.schemas import ReplicaList
from server.engine.engine import Engine
from server.engine.replicas import Replica
from task_store import TaskStoreError

router = APIRouter(tags=["replicas"], dependencies=READER)


@router.get(
    "/replicas",
    operation_id="list_replicas",
    responses={200: {"model": ReplicaList}, **problems(401, 503)},
)
async def list_replicas(engine: EngineDep) -> Response:
    """The live servers of this store and the generation each serves."""
    body = await to_thread.run_sync(_list_json, engine)
    return JSONResponse(body, headers={"Cache-Control": "no-store"})


def _list_json(engine: Engine) -> Json:
    alone = [Replica(engine.heartbeat(), 0.0, me=True)]
    error = None
    try:
        live = alone if engine.replicas is None else engine.replicas.live()
    except TaskStoreError:
        live, error = alone, "the task store cannot be asked who is there; the log says why"
    return {
        "generation": engine.status.generation_seen,
        "heartbeats": engine.replicas is not None,
        "error": error,
        "replicas": [_replica_json(each) for each in live],
    }


def _replica_json(replica: Replica) -> Json:
    beat = replica.beat
    return {
        "id": beat.id,
        "this": replica.me,
        "generation": beat.generation,
        "age_seconds": round(replica.age_seconds, 3),
        "hostname": beat.hostname,
        "address": beat.address,
        "started": beat.started,
        "version": beat.version,
        "backbone": short_name(beat.backbone),
        "fingerprint": beat.fingerprint,
    }
