"""The client for asyncio."""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Coroutine
from functools import wraps
from typing import TYPE_CHECKING, Concatenate, ParamSpec, TypeVar, Unpack

import httpx

from engram_client import teaching
from engram_client.answers import Answers, ImageAnswer
from engram_client.client import CONCURRENCY, PATIENCE, TIMEOUT
from engram_client.core import Core, Effect, Operation, Send, Sleep
from engram_client.errors import ClientError
from engram_client.predicting import Predicting, PredictOptions, Tasks

if TYPE_CHECKING:
    from engram_client.images import Images
    from engram_client.predicting import Batch

P = ParamSpec("P")
T = TypeVar("T")


def _awaited(
    operation: Callable[Concatenate[Core, P], Operation[T]],
) -> Callable[Concatenate["AsyncClient", P], Coroutine[object, object, T]]:
    """An operation of the core as a method that does it."""

    @wraps(operation)
    async def method(client: "AsyncClient", /, *args: P.args, **kwargs: P.kwargs) -> T:
        return await client._run(operation(client._core, *args, **kwargs))

    return method


class AsyncClient:
    """A server of tasks, asked from asyncio. All is as in `Client`, and awaited."""

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

    # --- predicting -------------------------------------------------------------------------------

    async def predict(
        self, images: "Images", tasks: Tasks = None, **options: Unpack[PredictOptions]
    ) -> Answers:
        """Ask tasks about images; see `Client.predict`."""
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
        """The same, answer by answer: for lists of any length, which are read as needed."""
        return self._iterate(Predicting(self._core, images, tasks, **options))

    # --- tasks: described in `Core` ---------------------------------------------------------------

    tasks = _awaited(Core.tasks)
    task = _awaited(Core.task)
    history = _awaited(Core.history)
    replicas = _awaited(Core.replicas)
    push = _awaited(Core.push)
    validate = _awaited(Core.validate)
    pull = _awaited(Core.pull)
    label = _awaited(Core.label)
    remove_label = _awaited(Core.remove_label)
    rollback = _awaited(Core.rollback)
    retire = _awaited(Core.retire)
    restore = _awaited(Core.restore)

    # --- teaching: described in `teaching` --------------------------------------------------------

    teach = _awaited(teaching.teach)
    examples = _awaited(teaching.examples)
    remove_examples = _awaited(teaching.remove_examples)
    correct = _awaited(teaching.correct)
    corrections = _awaited(teaching.corrections)

    # --- doing it ---------------------------------------------------------------------------------

    async def _run(self, operation: Operation[T]) -> T:
        """Do what an operation asks for until it is through."""
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

    async def _iterate(self, call: Predicting) -> AsyncIterator[ImageAnswer]:
        """Answers in order, while up to `concurrency` requests are under way."""
        waiting: deque[tuple[Batch, asyncio.Task[list[ImageAnswer]]]] = deque()
        batches = call.batches()
        try:
            while True:
                while len(waiting) < self._concurrency and (batch := next(batches, None)):
                    waiting.append((batch, asyncio.create_task(self._run(call.ask(batch)))))
                if not waiting:
                    return
                batch, task = waiting.popleft()
                try:
                    for answer in call.hand_out(await task):
                        yield answer
                except ClientError as error:
                    call.ended(error, batch, [later for _, later in waiting])
                    raise
        finally:
            for _, task in waiting:
                task.cancel()
            await asyncio.gather(*(task for _, task in waiting), return_exceptions=True)
