"""What a client does, without doing it: every call as a generator of effects.

A generator yields what it needs done — a request sent, a pause made, a file read — and gets back
what came of it. `Client` and `AsyncClient` each are a loop that does these things, one blocking and
one not; building requests, reading answers, repeating and giving up are here and nowhere else.

Repeating: 429, and 503 with Retry-After, are waited out as long as the server asks; a connection
that breaks, and a gateway whose server is away, with growing pauses. After `patience` seconds
without success the call gives up, and before a pause that would outlast patience or the deadline. A
server that has never answered is not waited for: most likely its address is wrong.
"""

import random
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypedDict, TypeVar, Unpack
from urllib.parse import quote

import httpx

from engram_client import __version__, replies
from engram_client.answers import (
    Bundle,
    Change,
    Changed,
    Published,
    Replica,
    TaskDetail,
    TaskSummary,
    Verdict,
)
from engram_client.errors import (
    CannotReach,
    ClientError,
    DeadlineExceeded,
    NotFound,
    TimedOut,
    WrongUse,
)
from engram_client.images import InputSize

T = TypeVar("T")

FIRST_PAUSE, LONGEST_PAUSE = 0.25, 5.0
CONNECT_SECONDS = 10.0
WAIT_SECONDS = 30.0  # for all replicas to serve a change
LONGEST_DEADLINE_MS = 86_400_000  # that a server takes


@dataclass(frozen=True, slots=True)
class Send:
    """Comes back as a response that was read, or as the httpx.RequestError it ended in."""

    request: httpx.Request


@dataclass(frozen=True, slots=True)
class Sleep:
    """Comes back as None."""

    seconds: float


@dataclass(frozen=True, slots=True)
class Work:
    """Something that takes a while, such as reading files; comes back as its result."""

    run: Callable[[], Any]


Effect = Send | Sleep | Work
Operation = Generator[Effect, Any, T]


@dataclass(frozen=True, slots=True)
class Request:
    """A request before it is sent, maybe several times."""

    method: str
    path: str
    params: Mapping[str, str | Sequence[str]] = field(default_factory=dict)
    headers: Mapping[str, str] = field(default_factory=dict)
    json: object = None
    content: bytes | None = None
    files: Sequence[tuple[str, tuple[str, bytes, str]]] | None = None
    # Doing it twice is as good as once, so it may be repeated when nobody knows if it was done.
    repeatable: bool = True
    # Beyond the client's own timeout: the server waits for something that long.
    more_seconds: float = 0.0


class WaitOptions(TypedDict, total=False):
    """`wait="all"`: return when every live replica serves a change, or after `timeout` seconds."""

    wait: Literal["all"] | None
    timeout: float


class Core:
    """One server as a client sees it."""

    def __init__(
        self,
        url: str,
        api_key: str | None = None,
        *,
        timeout: float,
        patience: float,
        now: Callable[[], float] = time.monotonic,
        chance: Callable[[], float] = random.random,
    ) -> None:
        self.url = _checked_url(url)
        self._headers = {"User-Agent": f"engram-client/{__version__}"}
        if api_key is not None:
            if not api_key or not api_key.isascii() or not api_key.isprintable():
                raise WrongUse("The key has characters that no key has: it is printable ASCII.")
            self._headers["Authorization"] = f"Bearer {api_key}"
        self._timeout = timeout
        self._patience = patience
        self.now = now
        self._chance = chance
        self._answered_once = False
        self._input: InputSize | None = None
        self._input_known = False

    # --- sending ----------------------------------------------------------------------------------

    def call(self, request: Request, deadline: float | None = None) -> Operation[httpx.Response]:
        """The response to a request; by `deadline` on the clock `now`, or an error."""
        give_up, tries = None, 0
        while True:
            outcome = yield Send(self._request(request, deadline))
            failure, pause = self._judge(request, outcome, deadline)
            if failure is None:
                response: httpx.Response = outcome
                return response
            if pause is None:
                raise failure
            now = self.now()
            give_up = now + self._patience if give_up is None else give_up
            pause = pause or min(FIRST_PAUSE * 2**tries, LONGEST_PAUSE)
            pause *= 1 + 0.1 * self._chance()  # so that clients refused at once do not return so
            tries += 1
            if deadline is not None and now + pause >= deadline:
                raise DeadlineExceeded(f"The deadline passed while waiting: {failure}") from failure
            if now + pause > give_up:
                gave_up = f" Gave up after {tries} tries; the next was due in {pause:.1f} s."
                failure.message += gave_up
                raise failure
            yield Sleep(pause)

    def _request(self, request: Request, deadline: float | None) -> httpx.Request:
        seconds = self._timeout + request.more_seconds
        headers = {**self._headers, **request.headers}
        if deadline is not None:
            left = deadline - self.now()
            if left <= 0:
                raise DeadlineExceeded("The deadline passed before the request could be sent.")
            seconds = min(seconds, left)
            headers["X-Deadline-Ms"] = f"{min(max(1.0, left * 1000), LONGEST_DEADLINE_MS):.0f}"
        timeout = httpx.Timeout(seconds, connect=min(seconds, CONNECT_SECONDS), pool=None)
        return httpx.Request(
            request.method,
            f"{self.url}{request.path}",
            params=httpx.QueryParams(dict(request.params)) if request.params else None,
            headers=headers,
            json=request.json,
            content=request.content,
            files=request.files,
            extensions={"timeout": timeout.as_dict()},
        )

    def _judge(
        self, request: Request, outcome: object, deadline: float | None
    ) -> tuple[ClientError | None, float | None]:
        """What is wrong, and the pause before another try: None is no more, 0 is the usual one."""
        if isinstance(outcome, httpx.Response):
            self._answered_once = True
            if outcome.is_success:
                return None, None
            again = request.repeatable and replies.worth_repeating(outcome)
            pause = (replies.retry_after(outcome) or 0.0) if again else None
            return replies.refusal(outcome), pause
        assert isinstance(outcome, httpx.RequestError)
        # A little early counts: timers of sockets are not exact.
        if deadline is not None and self.now() >= deadline - 0.01:
            return DeadlineExceeded("The deadline passed before there was an answer."), None
        if isinstance(outcome, httpx.ReadTimeout | httpx.WriteTimeout):
            seconds = self._timeout + request.more_seconds
            return TimedOut(f"{self.url} gave no answer within {seconds:g} s."), None
        connected = not isinstance(outcome, httpx.ConnectError | httpx.ConnectTimeout)
        again = self._answered_once and (request.repeatable or not connected)
        reason = str(outcome) or type(outcome).__name__
        what = "The connection broke" if connected else "No connection"
        error = CannotReach(f"{what}: {self.url} ({reason}). Is the server running there?")
        return error, 0.0 if again else None

    def input_size(self) -> Operation[InputSize | None]:
        """How the server resizes images, asked once; None where it does not say."""
        if not self._input_known:
            outcome = yield Send(self._request(Request("GET", "/readyz"), None))
            # Whatever else is wrong, the request that follows will say it.
            if isinstance(outcome, httpx.Response) and outcome.is_success:
                self._input = replies.read(outcome, lambda it: InputSize.read(it.get("input")))
                self._input_known = True
        return self._input

    # --- what a client offers ---------------------------------------------------------------------

    def tasks(self) -> Operation[tuple[TaskSummary, ...]]:
        """All tasks and whether they are ready."""
        return self._list(TaskSummary, "tasks")

    def task(self, name: str) -> Operation[TaskDetail]:
        """One task with its labels and versions."""
        return self._build(TaskDetail, Request("GET", task_path(name)))

    def history(self, name: str, limit: int = 50) -> Operation[tuple[Change, ...]]:
        """Who changed what about a task, newest first."""
        request = Request("GET", task_path(name, "history"), {"limit": str(limit)})
        response = yield from self.call(request)
        return replies.read(response, replies.history)

    def replicas(self) -> Operation[tuple[Replica, ...]]:
        """The live servers of the store, and which generation each serves."""
        return self._list(Replica, "replicas")

    def push(
        self,
        file: str | Path | bytes,
        name: str,
        labels: Sequence[str] = (),
        *,
        only_new: bool = False,
        **waiting: Unpack[WaitOptions],
    ) -> Operation[Published]:
        """Publish a bundle; it is being served when this returns.

        Without `labels`, `default` moves to it. `only_new` refuses a task that exists already.
        `wait="all"`, here and in every change below, returns when all replicas serve it, or after
        `timeout` seconds (30); `replicas` of the answer says which do.
        """
        data = yield Work(lambda: _read_file(file))
        # Publishing the same bytes again changes nothing, but "only if new" does not hold twice.
        request = Request(
            "PUT",
            task_path(name),
            {"label": list(labels)} if labels else {},
            {"If-None-Match": "*"} if only_new else {},
            content=data,
            repeatable=not only_new,
        )
        return (yield from self._build(Published, waiting_for(request, waiting)))

    def validate(self, file: str | Path | bytes) -> Operation[Verdict]:
        """Whether the server could serve a bundle; nothing is stored."""
        data = yield Work(lambda: _read_file(file))
        return (yield from self._build(Verdict, Request("POST", "/tasks/validate", content=data)))

    def pull(self, reference: str) -> Operation[Bundle]:
        """The bundle of `birds`, `birds@3` or `birds:canary`."""
        name, version, label = read_reference(reference)
        if version is None:
            label = label or "default"
            labels = (yield from self.task(name)).labels
            if label not in labels:
                raise NotFound(
                    f"Task '{name}' has no label '{label}'; it has {', '.join(labels) or 'none'}.",
                    status=404,
                    names=[reference],
                )
            version = labels[label]
        path = task_path(name, "versions", str(version), "bundle")
        response = yield from self.call(Request("GET", path))
        return replies.bundle(response, name, version)

    def label(
        self, name: str, label: str, version: int, **waiting: Unpack[WaitOptions]
    ) -> Operation[Changed]:
        """Point a label to a version."""
        request = Request("PUT", task_path(name, "labels", label), json={"version": version})
        return self._build(Changed, waiting_for(request, waiting))

    def remove_label(
        self, name: str, label: str, **waiting: Unpack[WaitOptions]
    ) -> Operation[Changed]:
        """Take a label away, other than `default`."""
        request = Request("DELETE", task_path(name, "labels", label), repeatable=False)
        return self._build(Changed, waiting_for(request, waiting))

    def rollback(
        self, name: str, label: str = "default", **waiting: Unpack[WaitOptions]
    ) -> Operation[Changed]:
        """Undo the last move of a label."""
        request = Request("POST", task_path(name, "rollback"), {"label": label}, repeatable=False)
        return self._build(Changed, waiting_for(request, waiting))

    def retire(
        self, name: str, version: int | None = None, **waiting: Unpack[WaitOptions]
    ) -> Operation[Changed]:
        """Take a task, or one version of it, out of service. Bundles are kept."""
        path = task_path(name) if version is None else task_path(name, "versions", str(version))
        request = Request("DELETE", path, repeatable=False)
        return self._build(Changed, waiting_for(request, waiting))

    def restore(
        self, name: str, version: int | None = None, **waiting: Unpack[WaitOptions]
    ) -> Operation[Changed]:
        """Bring back a version, or what the retirement of the whole task took."""
        params = {} if version is None else {"version": str(version)}
        request = Request("POST", task_path(name, "restore"), params, repeatable=False)
        return self._build(Changed, waiting_for(request, waiting))

    def _build(self, cls: type[T], request: Request) -> Operation[T]:
        """The answer to a request as one of `answers`."""
        response = yield from self.call(request)
        return replies.read(response, partial(replies.build, cls))

    def _list(self, cls: type[T], name: str) -> Operation[tuple[T, ...]]:
        """All that the server lists below this name."""
        response = yield from self.call(Request("GET", f"/{name}"))
        build = partial(replies.build, cls)
        return replies.read(response, lambda document: tuple(map(build, document[name])))


def waiting_for(request: Request, waiting: WaitOptions) -> Request:
    """The same request, and the server shall answer when all replicas serve the change."""
    wait, seconds = waiting.get("wait"), waiting.get("timeout", WAIT_SECONDS)
    if wait is None:
        return request
    if wait != "all":
        raise WrongUse(f"wait is 'all' or None, and not {wait!r}.")
    params = {**request.params, "wait": wait, "timeout": f"{seconds:g}"}
    return replace(request, params=params, more_seconds=seconds)


def task_path(name: str, *further: str) -> str:
    """Where a task is; its name may have one slash."""
    if not name.strip("/ "):
        raise WrongUse("The task has no name.")
    return "/".join(["/tasks", quote(name), *(quote(part, safe="") for part in further)])


def read_reference(text: str) -> tuple[str, int | None, str | None]:
    """`birds`, `birds@3` or `birds:canary` as its name, and its version or its label."""
    name, at, number = text.partition("@")
    if at:
        if not (number.isascii() and number.isdecimal()):
            raise WrongUse(f"'{text}' has no version after '@': write for example 'birds@3'.")
        return name, int(number), None
    name, _, label = text.partition(":")
    return name, None, label or None


def _read_file(file: str | Path | bytes) -> bytes:
    if isinstance(file, bytes):
        return file
    try:
        return Path(file).read_bytes()
    except OSError as error:
        raise WrongUse(f"'{file}' cannot be read: {error.strerror or error}.") from None


def _checked_url(text: str) -> str:
    """The address without a slash at its end; http where it does not say."""
    whole = text if "://" in text else f"http://{text}"
    try:
        url = httpx.URL(whole)
    except (httpx.InvalidURL, ValueError) as error:
        raise WrongUse(f"'{text}' is no address of a server: {error}.") from None
    if url.scheme not in ("http", "https") or not url.host:
        raise WrongUse(
            f"'{text}' is no address of a server: write for example http://127.0.0.1:8000."
        )
    return whole.rstrip("/")
