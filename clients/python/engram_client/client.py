"""The blocking client."""

import threading
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from functools import wraps
from typing import TYPE_CHECKING, Concatenate, ParamSpec, TypeVar, Unpack

import httpx

from engram_client import DEFAULT_SERVER, teaching
from engram_client.answers import Answers, ImageAnswer, Taught
from engram_client.core import Core, Effect, Operation, Send, Sleep
from engram_client.errors import ClientError
from engram_client.predicting import Predicting, PredictOptions, Tasks
from engram_client.teaching import TeachOptions

if TYPE_CHECKING:
    from engram_client.images import Images
    from engram_client.predicting import Batch
    from engram_client.teaching import Photos

P = ParamSpec("P")
T = TypeVar("T")

CONCURRENCY = 4
TIMEOUT = 60.0
PATIENCE = 60.0


def _blocking(
    operation: Callable[Concatenate[Core, P], Operation[T]],
) -> Callable[Concatenate["Client", P], T]:
    """An operation of the core as a method that does it."""

    @wraps(operation)
    def method(client: "Client", /, *args: P.args, **kwargs: P.kwargs) -> T:
        return client._run(operation(client._core, *args, **kwargs))

    return method


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

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._http.close()

    # --- predicting -------------------------------------------------------------------------------

    def predict(
        self, images: "Images", tasks: Tasks = None, **options: Unpack[PredictOptions]
    ) -> Answers:
        """Ask tasks about images: paths, bytes, Pillow images, numpy arrays or digests.

        Without `tasks` every ready task answers. Keywords are those of
        `engram_client.predicting.PredictOptions`. An error brings along what was answered.
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
        """The same, answer by answer: for lists of any length, which are read as needed."""
        return self._iterate(Predicting(self._core, images, tasks, **options))

    # --- tasks: described in `Core` ---------------------------------------------------------------

    tasks = _blocking(Core.tasks)
    task = _blocking(Core.task)
    history = _blocking(Core.history)
    replicas = _blocking(Core.replicas)
    push = _blocking(Core.push)
    validate = _blocking(Core.validate)
    pull = _blocking(Core.pull)
    label = _blocking(Core.label)
    remove_label = _blocking(Core.remove_label)
    rollback = _blocking(Core.rollback)
    retire = _blocking(Core.retire)
    restore = _blocking(Core.restore)

    # --- teaching: described in `teaching` --------------------------------------------------------

    teach = _blocking(teaching.teach)
    examples = _blocking(teaching.examples)
    remove_examples = _blocking(teaching.remove_examples)
    correct = _blocking(teaching.correct)
    corrections = _blocking(teaching.corrections)

    # --- doing it ---------------------------------------------------------------------------------

    def _run(self, operation: Operation[T], stop: threading.Event | None = None) -> T:
        """Do what an operation asks for until it is through, or until nobody waits for it."""
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
                    call.ended(error, batch, [later for _, later in waiting])
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


def teach(
    name: str,
    photos: "Photos",
    *,
    server: str = DEFAULT_SERVER,
    api_key: str | None = None,
    **options: Unpack[TeachOptions],
) -> Taught:
    """Teach one task and be done: `Client.teach` with a client of its own."""
    with Client(server, api_key) as client:
        return client.teach(name, photos, **options)
