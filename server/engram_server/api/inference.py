"""The inference path that `/predict`, `/v2`, gRPC and teaching share.

inference = Inference(request)                # reject early: capacity, quota, headers
…                                             # read the body
plan = await inference.resolve(references)    # permissions, limits, one snapshot
inference.check_answer_size(bytes)
answer = await inference.predict(plan, images)
"""

import asyncio
import math
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, Final, TypeVar

from engram_bundle.limits import readable_size
from fastapi import Request
from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect

from engram_server.access.identity import LOCAL, Scope
from engram_server.api.auth import check_permitted, identity_of
from engram_server.api.bodies import INLINE_BYTES, check_image_count
from engram_server.api.dependencies import (
    LARGEST_NUMBER,
    MIN_GENERATION_TEXT,
    pool_exhausted,
)
from engram_server.engine.tasks.snapshot import Plan, ResolvedTask
from engram_server.engine.types import Image, PredictAnswer, RunOptions, Timeline, Timings
from engram_server.errors import AnswerTooLarge, DeadlineExceeded, InvalidRequest
from engram_server.runtime import CURRENT, RequestRecord, Runtime
from engram_server.settings import Settings

T = TypeVar("T")

PREDICT: Final[tuple[Scope, ...]] = ("predict",)
# Task types whose answers are labels, not numbers.
CLASSIFICATION: Final = ("single_label", "multi_label")
DEADLINE: Final = "X-Deadline-Ms"
LONGEST_DEADLINE_MS: Final = 86_400_000
MIN_GENERATION: Final = "X-Min-Generation"
# Of an answer to a request without tasks, if more are ready than one request may have.
TASKS_OMITTED: Final = "X-Tasks-Omitted"
# For the OpenAPI document of routes that read these headers themselves.
HEADER_PARAMETERS: Final = [
    {
        "in": "header",
        "name": DEADLINE,
        "description": "Answer within this many milliseconds, or fail with 504.",
        "schema": {"type": "number", "exclusiveMinimum": 0, "maximum": LONGEST_DEADLINE_MS},
    },
    {
        "in": "header",
        "name": MIN_GENERATION,
        "description": MIN_GENERATION_TEXT,
        "schema": {"type": "integer", "minimum": 0, "maximum": LARGEST_NUMBER},
    },
]
# Approximate bytes of JSON: a number; a prediction without its label; a typical label.
NUMBER_BYTES: Final = 13
_PREDICTION_BYTES, _LABEL_BYTES = 48, 24
_FEW = 32  # predictions, for which the typical label is accurate enough
# Most requests are answered before watching for a disconnect is worth a task.
_UNWATCHED_SECONDS = 0.05
_UNLIMITED: Final = nullcontext()


class InferenceCall:
    """One inference request of any transport.

    Creating it, before the body is read, rejects what has no room now.
    """

    def __init__(self, runtime: Runtime, record: RequestRecord, headers: Headers) -> None:
        self.runtime = runtime
        self.engine = runtime.engine
        self.settings = runtime.settings
        self.record = record
        self.identity = identity_of(record)
        self.engine.predictions.check_capacity(self.identity.id)
        if self.identity.quota is not None:
            record.releases.append(self.identity.quota.begin())
        self.deadline_ms = _read_deadline_ms(headers, self.settings)  # or the default
        self._has_deadline = DEADLINE in headers
        self.at_least = read_min_generation(headers)

    def limit_deadline(self, timeout_ms: float) -> None:
        """Apply a timeout from the body: the shorter of it and the header; it beats the default."""
        if self._has_deadline and self.deadline_ms is not None:
            timeout_ms = min(timeout_ms, self.deadline_ms)
        self.deadline_ms, self._has_deadline = timeout_ms, True

    async def resolve(self, references: Sequence[str] | None) -> Plan:
        """Check permissions and limits, and resolve tasks; None: every ready task allowed."""
        allowed = None
        if references is not None:
            check_permitted(self.identity, PREDICT, references)
        elif not self.identity.allows_all_tasks(PREDICT):
            allowed = partial(self.identity.allowed_tasks, "predict")
        return await self.engine.predictions.resolve(
            references, at_least=self.at_least, allowed=allowed, max_tasks=self.settings.max_tasks
        )

    def check_answer_size(self, size: int) -> None:
        limit = self.settings.answer_bytes
        if size > limit:
            raise AnswerTooLarge(
                f"The answer would have about {readable_size(size)}, and the limit is "
                f"{readable_size(limit)}: send fewer images, or request fewer tasks or predictions "
                f"(top_k)."
            )
        pool = self.runtime.pools.answer_bytes
        # Smaller ones are covered by the limit on images.
        if size > INLINE_BYTES and not self.record.hold(pool, size):
            raise pool_exhausted(self.runtime, self.record, pool, "bytes of responses")

    async def predict(
        self,
        plan: Plan,
        images: Sequence[Image],
        *,
        features: bool = False,
        attention: bool = False,
        canaries: bool = False,
    ) -> PredictAnswer:
        """Run a plan within the quota, while the client is connected; report to log and trace."""
        options = self._options(features=features, attention=attention, canaries=canaries)
        timelines = [Timeline() for _ in images]
        tracing = self.runtime.tracing
        try:
            with self._charge_quota(images, len(plan.tasks)):
                answer = await self._running(
                    self.engine.predictions.predict(plan, images, options, timelines=timelines)
                )
        except BaseException as error:
            if tracing is not None:
                tracing.predicted(plan, timelines, error)
            raise
        self.record.tasks = len(plan.tasks)
        if tracing is not None:
            tracing.predicted(plan, timelines, answer)
        return answer

    async def read(
        self,
        images: Sequence[bytes | str],
        work: Callable[[RunOptions], Coroutine[Any, Any, T]],
        *,
        features: bool,
        thumbnails: bool = False,
    ) -> T:
        """Run other work on images the same way; without features it runs no pass."""
        options = self._options(features=features)._replace(thumbnails=thumbnails)
        with self._charge_quota(images, 1 if features else 0):
            return await self._running(work(options))

    def _running(self, work: Coroutine[Any, Any, T]) -> Coroutine[Any, Any, T]:
        """The work; a transport that does not cancel its requests itself overrides this."""
        return work

    def _options(
        self, *, features: bool = False, attention: bool = False, canaries: bool = False
    ) -> RunOptions:
        deadline = None
        if self.deadline_ms is not None:
            deadline = self.record.started + self.deadline_ms / 1000
            if time.monotonic() >= deadline:
                raise DeadlineExceeded(
                    f"The deadline of {self.deadline_ms:g} ms passed while the request was being "
                    f"read."
                )
        shared = self.settings.share_contexts or self.identity is LOCAL
        caller = self.identity.id
        return RunOptions(
            features,
            attention,
            deadline,
            owner=None if shared else caller,
            caller=caller,
            canaries=canaries,
        )

    def _charge_quota(self, images: Sequence[Image], tasks: int) -> AbstractContextManager[None]:
        """Charge the token rows of a request, as the worker counts them.

        An image that is sent as a digest has only the rows of its tasks. Without tasks there is no
        pass, and no rows.
        """
        self.record.images = len(images)
        quota = self.identity.quota
        if quota is None:
            return _UNLIMITED
        limit = quota.limits.concurrent_images
        if limit is not None:
            check_image_count(len(images), limit)
        new = sum(not isinstance(image, str) for image in images)
        rows = new * self.engine.model.tokens + len(images) * tasks if tasks else 0
        return quota.use(len(images), rows)


class Inference(InferenceCall):
    """One inference request over HTTP."""

    def __init__(self, request: Request) -> None:
        super().__init__(*CURRENT.get(), request.headers)
        self.request = request

    def _running(self, work: Coroutine[Any, Any, T]) -> Coroutine[Any, Any, T]:
        return while_connected(self.request, work)


def _read_deadline_ms(headers: Headers, settings: Settings) -> float | None:
    text = headers.get(DEADLINE)
    if text is None:
        return settings.default_deadline_ms
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value <= LONGEST_DEADLINE_MS:  # also rejects NaN
        raise InvalidRequest(
            f"{DEADLINE} must be a number of milliseconds above 0 and at most "
            f"{LONGEST_DEADLINE_MS}."
        )
    return value


def read_min_generation(headers: Headers) -> int | None:
    text = headers.get(MIN_GENERATION)
    if text is None:
        return None
    if not (text.isascii() and text.isdecimal() and len(text) <= 18):
        raise InvalidRequest(f"{MIN_GENERATION} must be the number of a generation, such as 118.")
    return int(text)


def task_bytes(task: ResolvedTask, top_k: int) -> int:
    """Approximate bytes of a task's answer: predictions, or all its numbers if `top_k` is 0."""
    if not top_k or task.task_type not in CLASSIFICATION:
        return NUMBER_BYTES * task.classes
    count, label = min(top_k, task.classes), _LABEL_BYTES
    if count > _FEW and (labels := task.labels):
        label = sum(map(len, labels)) // len(labels)
    return count * (_PREDICTION_BYTES + label)


def timings_ms(timings: Timings) -> dict[str, float]:
    return {
        "queue": round(timings.queue * 1000, 3),
        "decode": round(timings.decode * 1000, 3),
        "forward": round(timings.forward * 1000, 3),
        "total": round(timings.total * 1000, 3),
    }


def response_headers(plan: Plan, milliseconds: Mapping[str, float]) -> dict[str, str]:
    """The headers of an answer with these timings; browsers draw Server-Timing."""
    stages = [f"{name};dur={value}" for name, value in milliseconds.items()]
    headers = {"Server-Timing": ", ".join(stages), "Cache-Control": "no-store"}
    if plan.omitted:
        headers[TASKS_OMITTED] = str(plan.omitted)
    return headers


def rounded(value: float) -> float:
    """A float32 as a float without the digits that the conversion adds."""
    return float(f"{value:.7g}")


async def while_connected(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """Await `work`; cancel it and raise ClientDisconnect when the client disconnects.

    Call it after the body was read: only then is the next message the disconnect.
    """
    serving = asyncio.current_task()
    assert serving is not None, "called in a task"
    watching: asyncio.Task[None] | None = None

    def watch() -> None:
        nonlocal watching
        watching = asyncio.ensure_future(_disconnected(request))
        watching.add_done_callback(cancel)

    def cancel(watched: asyncio.Task[None]) -> None:
        if watched is watching and not watched.cancelled():
            serving.cancel()

    timer = asyncio.get_running_loop().call_later(_UNWATCHED_SECONDS, watch)
    try:
        return await work
    except asyncio.CancelledError:
        # Cancelled by the watch, which is done then, by something else, or by both.
        if watching is not None and watching.done() and serving.uncancel() == 0:
            raise ClientDisconnect from None
        raise
    finally:
        timer.cancel()
        watched, watching = watching, None
        if watched is not None:
            watched.cancel()


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
