"""Asking the engine, the same for every protocol: the access log and the trace learn of it."""

from fastapi import Request

from server.api.deps import Runtime
from server.api.disconnects import while_connected
from server.api.middleware import RequestRecord
from server.engine.types import PredictAnswer, PredictRequest


async def ask_engine(
    request: Request, runtime: Runtime, record: RequestRecord, asked: PredictRequest
) -> PredictAnswer:
    """The engine's answer, as long as the client waits for it."""
    record.images = len(asked.images)
    try:
        answer = await while_connected(request, runtime.engine.predict(asked))
    except BaseException as error:
        if runtime.tracing is not None:
            runtime.tracing.predicted(asked, error)
        raise
    record.tasks = len(answer.images[0].tasks)
    if runtime.tracing is not None:
        runtime.tracing.predicted(asked, answer)
    return answer
