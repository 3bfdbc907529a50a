"""The blocking client."""

import threading
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future
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
from engram_client.core import Core, Effect, Operation, Send, Sleep, Waiting
from engram_client.errors import ClientError
from engram_client.predicting import Asked, Batch, Options, Predicting

if TYPE_CHECKING:
    from engram_client.images import Image

T = TypeVar("T")

CONCURRENCY = 4
TIMEOUT = 60.0
PATIENCE = 60.0


class Client:
    """A server of tasks, asked from ordinary code and from any thread.

    `timeout`: seconds for one answer. `patience`: seconds for which a busy or vanished server is
    asked again. `concurrency`: requests of one list at a time.
    """

    def __init__(
        self,
        url: str,
        api_key: str | None = None,
        *,
        timeout: float = TIMEOUT,
        patience: float = PATIENCE,
        concurrency: int = CONCURRENCY,
        transport: httpx.BaseTransport | None = None,
    ) -> None:
        self._core = Core(url, api_key, timeout=timeout, patience=patience)
        self._concurrency = max(1, concurrency)
        self._http = httpx.Client(transport=transport)

    def __enter__(self) -> "Client":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the connections."""
        self._http.close()

    # --- predicting -------------------------------------------------------------------------------

    def predict(
        self,
        images: "Image | Iterable[Image]",
        tasks: str | Sequence[str] | None = None,
        **asked: Unpack[Asked],
    ) -> Answers:
        """Ask tasks about images: paths, bytes, Pillow images, numpy arrays or digests.

        Without `tasks` every ready task answers. Keywords are the fields of
        `engram_client.predicting.Options`. An error brings along what was answered (`answered`).
        """
        answers: list[ImageAnswer] = []
        try:
            answers.extend(self.predict_iter(images, tasks, **asked))
        except ClientError as error:
            error.answered = Answers((*answers, *error.answered))
            raise
        return Answers(answers)

    def predict_iter(
        self,
        images: "Image | Iterable[Image]",
        tasks: str | Sequence[str] | None = None,
        **asked: Unpack[Asked],
    ) -> Iterator[ImageAnswer]:
        """The same, answer by answer: for lists of any length, which are read as needed."""
        return self._iterate(Predicting(self._core, images, Options(tasks, **asked)))

    # --- tasks ------------------------------------------------------------------------------------

    def tasks(self) -> tuple[TaskSummary, ...]:
        """All tasks and whether they are ready."""
        return self._run(self._core.tasks())

    def task(self, name: str) -> TaskDetail:
        """One task with its labels and versions."""
        return self._run(self._core.task(name))

    def history(self, name: str, limit: int = 50) -> tuple[Change, ...]:
        """Who changed what about a task, newest first."""
        return self._run(self._core.history(name, limit))

    def replicas(self) -> tuple[Replica, ...]:
        """The live servers of the store, and which generation each serves."""
        return self._run(self._core.replicas())

    def push(
        self,
        file: str | Path | bytes,
        name: str,
        labels: Sequence[str] = (),
        *,
        only_new: bool = False,
        **waiting: Unpack[Waiting],
    ) -> Published:
        """Publish a bundle; it is being served when this returns.

        Without `labels`, `default` moves to it. `only_new` refuses a task that exists already.
        `wait="all"`, here and in every change below, returns when all replicas serve it, or after
        `timeout` seconds (30); `replicas` of the answer says which do.
        """
        return self._run(self._core.push(file, name, labels, only_new, waiting))

    def validate(self, file: str | Path | bytes) -> Verdict:
        """Whether the server could serve a bundle; nothing is stored."""
        return self._run(self._core.validate(file))

    def pull(self, reference: str) -> Bundle:
        """The bundle of `birds`, `birds@3` or `birds:canary`."""
        return self._run(self._core.pull(reference))

    def label(self, name: str, label: str, version: int, **waiting: Unpack[Waiting]) -> Changed:
        """Point a label to a version."""
        return self._run(self._core.label(name, label, version, waiting))

    def remove_label(self, name: str, label: str, **waiting: Unpack[Waiting]) -> Changed:
        """Take a label away, other than `default`."""
        return self._run(self._core.remove_label(name, label, waiting))

    def rollback(self, name: str, label: str = "default", **waiting: Unpack[Waiting]) -> Changed:
        """Undo the last move of a label."""
        return self._run(self._core.rollback(name, label, waiting))

    def retire(self, name: str, version: int | None = None, **waiting: Unpack[Waiting]) -> Changed:
        """Take a task, or one version of it, out of service. Bundles are kept."""
        return self._run(self._core.retire(name, version, waiting))

    def restore(self, name: str, version: int | None = None, **waiting: Unpack[Waiting]) -> Changed:
        """Bring back a version, or what the retirement of the whole task took."""
        return self._run(self._core.restore(name, version, waiting))

    # --- doing it ---------------------------------------------------------------------------------

    def _run(self, operation: Operation[T], stop: threading.Event | None = None) -> T:
        """Do what an operation wants until it is through, or until nobody waits for it."""
        stop = stop or threading.Event()
        outcome: object = None
        try:
            while not stop.is_set():
                outcome = self._do(operation.send(outcome), stop)
        except StopIteration as done:
            result: T = done.value
            return result
        operation.close()
        raise _Abandoned

    def _do(self, effect: Effect, stop: threading.Event) -> object:
        if isinstance(effect, Send):
            try:
                return self._http.send(effect.request)
            except httpx.RequestError as error:
                return error
        if isinstance(effect, Sleep):
            stop.wait(effect.seconds)
            return None
        return effect.run()

    def _iterate(self, call: Predicting) -> Iterator[ImageAnswer]:
        """Answers in order, while up to `concurrency` requests are under way."""
        stop = threading.Event()
        waiting: deque[tuple[Batch, Future[list[ImageAnswer]]]] = deque()
        batches = call.batches()
        try:
            while True:
                while len(waiting) < self._concurrency and (batch := next(batches, None)):
                    waiting.append((batch, self._start(call.ask(batch), stop)))
                if not waiting:
                    return
                batch, future = waiting.popleft()
                try:
                    yield from call.hand_out(future.result())
                except ClientError as error:
                    done = (other for _, other in waiting if other.done() and not other.exception())
                    call.ended(error, batch, [other.result() for other in done])
                    raise
        finally:
            stop.set()

    def _start(self, operation: Operation[T], stop: threading.Event) -> "Future[T]":
        future: Future[T] = Future()

        def run() -> None:
            try:
                future.set_result(self._run(operation, stop))
            except BaseException as error:  # noqa: BLE001 - the caller's to see, not the thread's
                future.set_exception(error)

        # A daemon: when the caller is interrupted, nothing should wait for a slow server.
        threading.Thread(target=run, name="engram-client", daemon=True).start()
        return future


class _Abandoned(Exception):
    """Whoever asked has gone; nobody sees this."""
