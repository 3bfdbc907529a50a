"""The blocking client."""

import threading
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError, Future
from functools import wraps
from typing import TYPE_CHECKING, Concatenate, ParamSpec, TypeVar, Unpack

import httpx

from engram_vit import DEFAULT_SERVER, predicting, teaching
from engram_vit.answers import Answers, ImageAnswer, TeachResult
from engram_vit.core import Core, Effect, Operation, Send, Sleep, signature_of
from engram_vit.errors import ClientError
from engram_vit.predicting import PredictCall, PredictOptions, Tasks
from engram_vit.teaching import TeachOptions

if TYPE_CHECKING:
    from engram_vit.images import Images
    from engram_vit.predicting import Batch
    from engram_vit.teaching import Photos

P = ParamSpec("P")
T = TypeVar("T")

CONCURRENCY = 4
TIMEOUT = 60.0
PATIENCE = 60.0


def _blocking(
    operation: Callable[Concatenate[Core, P], Operation[T]],
) -> Callable[Concatenate["Client", P], T]:
    """Turn an operation of the core into a blocking method."""

    @wraps(operation)
    def method(client: "Client", /, *args: P.args, **kwargs: P.kwargs) -> T:
        return client._run(operation(client._core, *args, **kwargs))

    method.__signature__ = signature_of(operation)  # type: ignore[attr-defined]
    return method


class Client:
    """A blocking, thread-safe client of one server.

    `timeout`: seconds per response. `patience`: seconds to retry while the server is busy or
    unreachable. `concurrency`: parallel requests for one list of images.
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

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._http.close()

    def predict(
        self, images: "Images", tasks: Tasks = None, **options: Unpack[PredictOptions]
    ) -> Answers:
        """Predict for images: paths, bytes, Pillow images, numpy arrays or digests.

        Without `tasks` every ready task answers. `PredictOptions` lists the keywords. An error
        carries the answers received before it (`answered`).
        """
        answers: list[ImageAnswer] = []
        try:
            answers.extend(self.predict_iter(images, tasks, **options))
        except ClientError as error:
            error.answered = Answers((*answers, *error.answered))
            raise
        return Answers(answers)

    def predict_iter(
        self, images: "Images", tasks: Tasks = None, **options: Unpack[PredictOptions]
    ) -> Iterator[ImageAnswer]:
        """Yield answers one by one; reads a list of any length as needed."""
        return self._iterate(PredictCall(self._core, images, tasks, **options))

    # Described in `Core`.
    tasks = _blocking(Core.tasks)
    task = _blocking(Core.task)
    history = _blocking(Core.history)
    replicas = _blocking(Core.replicas)
    push = _blocking(Core.push)
    validate = _blocking(Core.validate)
    pull = _blocking(Core.pull)
    set_alias = _blocking(Core.set_alias)
    remove_alias = _blocking(Core.remove_alias)
    rollback = _blocking(Core.rollback)
    comparison = _blocking(Core.comparison)
    feedback = _blocking(Core.feedback)
    promote = _blocking(Core.promote)
    retire = _blocking(Core.retire)
    restore = _blocking(Core.restore)

    embed = _blocking(predicting.embed)

    # Described in `teaching`.
    teach = _blocking(teaching.teach)
    examples = _blocking(teaching.examples)
    remove_examples = _blocking(teaching.remove_examples)
    correct = _blocking(teaching.correct)
    corrections = _blocking(teaching.corrections)
    remove_corrections = _blocking(teaching.remove_corrections)

    def _run(self, operation: Operation[T], stop: threading.Event | None = None) -> T:
        stop = stop or threading.Event()
        outcome: object = None
        try:
            while not stop.is_set():
                outcome = self._do(operation.send(outcome), stop)
        except StopIteration as done:
            result: T = done.value
            return result
        operation.close()
        raise CancelledError

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

    def _iterate(self, call: PredictCall) -> Iterator[ImageAnswer]:
        """Yield answers in order, with up to `concurrency` requests in flight."""
        stop = threading.Event()
        waiting: deque[tuple[Batch, Future[list[ImageAnswer]]]] = deque()
        batches = call.batches()
        try:
            while True:
                while len(waiting) < self._concurrency and (batch := next(batches, None)):
                    waiting.append((batch, self._start(call.run(batch), stop)))
                if not waiting:
                    return
                batch, future = waiting.popleft()
                try:
                    yield from call.deliver(future.result())
                except ClientError as error:
                    call.annotate(error, batch, [later for _, later in waiting])
                    raise
        finally:
            stop.set()

    def _start(self, operation: Operation[T], stop: threading.Event) -> "Future[T]":
        future: Future[T] = Future()

        def run() -> None:
            try:
                future.set_result(self._run(operation, stop))
            except BaseException as error:  # noqa: BLE001 - raised in the caller
                future.set_exception(error)

        # Daemon threads: an interrupted caller must not wait for a slow server.
        threading.Thread(target=run, name="engram-vit", daemon=True).start()
        return future


def teach(
    name: str,
    photos: "Photos",
    *,
    server: str = DEFAULT_SERVER,
    api_key: str | None = None,
    **options: Unpack[TeachOptions],
) -> TeachResult:
    """Teach one task with a temporary client; see `Client.teach`."""
    with Client(server, api_key) as client:
        return client.teach(name, photos, **options)
