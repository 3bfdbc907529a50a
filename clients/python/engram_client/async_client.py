"""The client for asyncio."""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Iterable, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, TypeVar, Unpack

import httpx

from engram_client.answers import (
    Answers,
    Bundle,
    Change,
    Changed,
    ImageAnswer,
    Published,
    Replica,
    TaskDetail,
    TaskSummary,
    Verdict,
)
from engram_client.client import CONCURRENCY, PATIENCE, TIMEOUT
from engram_client.core import Core, Effect, Operation, Send, Sleep, Waiting
from engram_client.errors import ClientError
from engram_client.predicting import Asked, Batch, Options, Predicting

if TYPE_CHECKING:
    from engram_client.images import Image

T = TypeVar("T")


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

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connections."""
        await self._http.aclose()

    # --- predicting -------------------------------------------------------------------------------

    async def predict(
        self,
        images: "Image | Iterable[Image]",
        tasks: str | Sequence[str] | None = None,
        **asked: Unpack[Asked],
    ) -> Answers:
        """Ask tasks about images; see `Client.predict`."""
        answers: list[ImageAnswer] = []
        try:
            async for answer in self.predict_iter(images, tasks, **asked):
                answers.append(answer)  # noqa: PERF401 - what came before an error is kept
        except ClientError as error:
            error.answered = Answers((*answers, *error.answered))
            raise
        return Answers(answers)

    def predict_iter(
        self,
        images: "Image | Iterable[Image]",
        tasks: str | Sequence[str] | None = None,
        **asked: Unpack[Asked],
    ) -> AsyncIterator[ImageAnswer]:
        """The same, answer by answer: for lists of any length, which are read as needed."""
        return self._iterate(Predicting(self._core, images, Options(tasks, **asked)))

    # --- tasks ------------------------------------------------------------------------------------

    async def tasks(self) -> tuple[TaskSummary, ...]:
        """All tasks and whether they are ready."""
        return await self._run(self._core.tasks())

    async def task(self, name: str) -> TaskDetail:
        """One task with its labels and versions."""
        return await self._run(self._core.task(name))

    async def history(self, name: str, limit: int = 50) -> tuple[Change, ...]:
        """Who changed what about a task, newest first."""
        return await self._run(self._core.history(name, limit))

    async def replicas(self) -> tuple[Replica, ...]:
        """The live servers of the store, and which generation each serves."""
        return await self._run(self._core.replicas())

    async def push(
        self,
        file: str | Path | bytes,
        name: str,
        labels: Sequence[str] = (),
        *,
        only_new: bool = False,
        **waiting: Unpack[Waiting],
    ) -> Published:
        """Publish a bundle; it is being served when this returns."""
        return await self._run(self._core.push(file, name, labels, only_new, waiting))

    async def validate(self, file: str | Path | bytes) -> Verdict:
        """Whether the server could serve a bundle; nothing is stored."""
        return await self._run(self._core.validate(file))

    async def pull(self, reference: str) -> Bundle:
        """The bundle of `birds`, `birds@3` or `birds:canary`."""
        return await self._run(self._core.pull(reference))

    async def label(
        self, name: str, label: str, version: int, **waiting: Unpack[Waiting]
    ) -> Changed:
        """Point a label to a version."""
        return await self._run(self._core.label(name, label, version, waiting))

    async def remove_label(self, name: str, label: str, **waiting: Unpack[Waiting]) -> Changed:
        """Take a label away, other than `default`."""
        return await self._run(self._core.remove_label(name, label, waiting))

    async def rollback(
        self, name: str, label: str = "default", **waiting: Unpack[Waiting]
    ) -> Changed:
        """Undo the last move of a label."""
        return await self._run(self._core.rollback(name, label, waiting))

    async def retire(
        self, name: str, version: int | None = None, **waiting: Unpack[Waiting]
    ) -> Changed:
        """Take a task, or one version of it, out of service. Bundles are kept."""
        return await self._run(self._core.retire(name, version, waiting))

    async def restore(
        self, name: str, version: int | None = None, **waiting: Unpack[Waiting]
    ) -> Changed:
        """Bring back a version, or what the retirement of the whole task took."""
        return await self._run(self._core.restore(name, version, waiting))

    # --- doing it ---------------------------------------------------------------------------------

    async def _run(self, operation: Operation[T]) -> T:
        """Do what an operation wants until it is through."""
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
                    done = (other for _, other in waiting if other.done() and not other.exception())
                    call.ended(error, batch, [other.result() for other in done])
                    raise
        finally:
            for _, task in waiting:
                task.cancel()
            await asyncio.gather(*(task for _, task in waiting), return_exceptions=True)
