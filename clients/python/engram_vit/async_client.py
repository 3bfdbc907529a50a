"""The asyncio client."""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Coroutine
from functools import wraps
from typing import TYPE_CHECKING, Concatenate, ParamSpec, TypeVar, Unpack

import httpx

from engram_vit import predicting, teaching
from engram_vit.answers import Answers, ImageAnswer
from engram_vit.client import CONCURRENCY, PATIENCE, TIMEOUT
from engram_vit.core import Core, Effect, Operation, Send, Sleep, signature_of
from engram_vit.errors import ClientError
from engram_vit.predicting import PredictCall, PredictOptions, Tasks

if TYPE_CHECKING:
    from engram_vit.images import Images
    from engram_vit.predicting import Batch

P = ParamSpec("P")
T = TypeVar("T")


def _awaiting(
    operation: Callable[Concatenate[Core, P], Operation[T]],
) -> Callable[Concatenate["AsyncClient", P], Coroutine[object, object, T]]:
    """Turn an operation of the core into a coroutine method."""

    @wraps(operation)
    async def method(client: "AsyncClient", /, *args: P.args, **kwargs: P.kwargs) -> T:
        return await client._run(operation(client._core, *args, **kwargs))

    method.__signature__ = signature_of(operation)  # type: ignore[attr-defined]
    return method


class AsyncClient:
    """An asyncio client with the methods of `Client` as coroutines."""

    def __init__(
        self,
        url: str,
        api_key: str | None = None,
        *,
        timeout: float = TIMEOUT,
        patience: float = PATIENCE,
        concurrency: int = CONCURRENCY,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        self._core = Core(url, api_key, timeout=timeout, patience=patience)
        self._concurrency = max(1, concurrency)
        self._http = httpx.AsyncClient(transport=transport)

    async def __aenter__(self) -> "AsyncClient":
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        await self._http.aclose()

    async def predict(
        self, images: "Images", tasks: Tasks = None, **options: Unpack[PredictOptions]
    ) -> Answers:
        """Predict; see `Client.predict`."""
        answers: list[ImageAnswer] = []
        try:
            async for answer in self.predict_iter(images, tasks, **options):
                answers.append(answer)  # noqa: PERF401 - what came before an error is kept
        except ClientError as error:
            error.answered = Answers((*answers, *error.answered))
            raise
        return Answers(answers)

    def predict_iter(
        self, images: "Images", tasks: Tasks = None, **options: Unpack[PredictOptions]
    ) -> AsyncIterator[ImageAnswer]:
        """Yield answers one by one; reads a list of any length as needed."""
        return self._iterate(PredictCall(self._core, images, tasks, **options))

    # Described in `Core`.
    tasks = _awaiting(Core.tasks)
    task = _awaiting(Core.task)
    history = _awaiting(Core.history)
    replicas = _awaiting(Core.replicas)
    push = _awaiting(Core.push)
    validate = _awaiting(Core.validate)
    pull = _awaiting(Core.pull)
    set_alias = _awaiting(Core.set_alias)
    remove_alias = _awaiting(Core.remove_alias)
    rollback = _awaiting(Core.rollback)
    comparison = _awaiting(Core.comparison)
    feedback = _awaiting(Core.feedback)
    promote = _awaiting(Core.promote)
    retire = _awaiting(Core.retire)
    restore = _awaiting(Core.restore)

    embed = _awaiting(predicting.embed)

    # Described in `teaching`.
    teach = _awaiting(teaching.teach)
    examples = _awaiting(teaching.examples)
    remove_examples = _awaiting(teaching.remove_examples)
    correct = _awaiting(teaching.correct)
    corrections = _awaiting(teaching.corrections)
    remove_corrections = _awaiting(teaching.remove_corrections)

    async def _run(self, operation: Operation[T]) -> T:
        outcome: object = None
        try:
            while True:
                outcome = await self._do(operation.send(outcome))
        except StopIteration as done:
            result: T = done.value
            return result

    async def _do(self, effect: Effect) -> object:
        if isinstance(effect, Send):
            try:
                return await self._http.send(effect.request)
            except httpx.RequestError as error:
                return error
        if isinstance(effect, Sleep):
            await asyncio.sleep(effect.seconds)
            return None
        return await asyncio.to_thread(effect.run)

    async def _iterate(self, call: PredictCall) -> AsyncIterator[ImageAnswer]:
        """Yield answers in order, with up to `concurrency` requests in flight."""
        waiting: deque[tuple[Batch, asyncio.Task[list[ImageAnswer]]]] = deque()
        batches = call.batches()
        try:
            while True:
                while len(waiting) < self._concurrency and (batch := next(batches, None)):
                    waiting.append((batch, asyncio.create_task(self._run(call.run(batch)))))
                if not waiting:
                    return
                batch, task = waiting.popleft()
                try:
                    for answer in call.deliver(await task):
                        yield answer
                except ClientError as error:
                    call.annotate(error, batch, [later for _, later in waiting])
                    raise
        finally:
            for _, task in waiting:
                task.cancel()
            await asyncio.gather(*(task for _, task in waiting), return_exceptions=True)
