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
from pathlib import Path
from typing import Any, Literal, TypedDict, TypeVar
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
class Ask:
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


class Waiting(TypedDict, total=False):
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
            self._headers["Authorization"] = f"Bearer {_checked_key(api_key)}"
        self._timeout = timeout
        self._patience = patience
        self.now = now
        self._chance = chance
        self._answered_once = False
        self._input: InputSize | None = None
        self._input_known = False

    # --- asking -----------------------------------------------------------------------------------

    def call(self, ask: Ask, deadline: float | None = None) -> Operation[httpx.Response]:
        """The response to a request; by `deadline` on the clock `now`, or an error."""
        give_up, tries = None, 0
        while True:
            outcome = yield Send(self._request(ask, deadline))
            failure, pause = self._judge(ask, outcome, deadline)
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
                waited = f" Gave up after {tries} tries; the next was due in {pause:.1f} s."
                failure.message += waited
                raise failure
            yield Sleep(pause)

    def _request(self, ask: Ask, deadline: float | None) -> httpx.Request:
        seconds = self._timeout + ask.more_seconds
        headers = {**self._headers, **ask.headers}
        if deadline is not None:
            left = deadline - self.now()
            if left <= 0:
                raise DeadlineExceeded("The deadline passed before the request could be sent.")
            seconds = min(seconds, left)
            headers["X-Deadline-Ms"] = f"{min(max(1.0, left * 1000), LONGEST_DEADLINE_MS):.0f}"
        timeout = httpx.Timeout(seconds, connect=min(seconds, CONNECT_SECONDS), pool=None)
        return httpx.Request(
            ask.method,
            f"{self.url}{ask.path}",
            params=httpx.QueryParams(dict(ask.params)) if ask.params else None,
            headers=headers,
            json=ask.json,
            content=ask.content,
            files=ask.files,
            extensions={"timeout": timeout.as_dict()},
        )

    def _judge(
        self, ask: Ask, outcome: object, deadline: float | None
    ) -> tuple[ClientError | None, float | None]:
        """What is wrong, and the pause before another try: None is no more, 0 is the usual one."""
        if isinstance(outcome, httpx.Response):
            self._answered_once = True
            if outcome.is_success:
                return None, None
            again = ask.repeatable and replies.worth_repeating(outcome)
            return replies.refusal(outcome), (
                replies.retry_after(outcome) or 0.0
            ) if again else None
        assert isinstance(outcome, httpx.RequestError)
        # A little early counts: timers of sockets are not exact.
        if deadline is not None and self.now() >= deadline - 0.01:
            return DeadlineExceeded("The deadline passed before there was an answer."), None
        if isinstance(outcome, httpx.ReadTimeout | httpx.WriteTimeout):
            seconds = self._timeout + ask.more_seconds
            return TimedOut(f"{self.url} gave no answer within {seconds:g} s."), None
        connected = not isinstance(outcome, httpx.ConnectError | httpx.ConnectTimeout)
        again = self._answered_once and (ask.repeatable or not connected)
        reason = str(outcome) or type(outcome).__name__
        what = "The connection broke" if connected else "No connection"
        error = CannotReach(f"{what}: {self.url} ({reason}). Is the server running there?")
        return error, 0.0 if again else None

    def input_size(self) -> Operation[InputSize | None]:
        """How the server resizes images, asked once; None where it does not say."""
        if not self._input_known:
            outcome = yield Send(self._request(Ask("GET", "/readyz"), None))
            # Whatever else is wrong, the request that follows will say it.
            if isinstance(outcome, httpx.Response) and outcome.is_success:
                self._input = replies.read(outcome, _input_size)
                self._input_known = True
        return self._input

    # --- tasks ------------------------------------------------------------------------------------

    def tasks(self) -> Operation[tuple[TaskSummary, ...]]:
        response = yield from self.call(Ask("GET", "/tasks"))
        return replies.read(response, replies.tasks)

    def task(self, name: str) -> Operation[TaskDetail]:
        response = yield from self.call(Ask("GET", _path(name)))
        return replies.read(response, replies.task)

    def history(self, name: str, limit: int) -> Operation[tuple[Change, ...]]:
        ask = Ask("GET", _path(name, "history"), {"limit": str(limit)})
        response = yield from self.call(ask)
        return replies.read(response, replies.history)

    def replicas(self) -> Operation[tuple[Replica, ...]]:
        response = yield from self.call(Ask("GET", "/replicas"))
        return replies.read(response, replies.replicas)

    def push(
        self,
        file: str | Path | bytes,
        name: str,
        labels: Sequence[str],
        only_new: bool,
        waiting: Waiting,
    ) -> Operation[Published]:
        data = yield Work(lambda: _read_file(file))
        # Publishing the same bytes again changes nothing, but "only if new" does not hold twice.
        ask = Ask(
            "PUT",
            _path(name),
            {"label": list(labels)} if labels else {},
            {"If-None-Match": "*"} if only_new else {},
            content=data,
            repeatable=not only_new,
        )
        response = yield from self.call(_waiting(ask, waiting))
        return replies.read(response, replies.published)

    def validate(self, file: str | Path | bytes) -> Operation[Verdict]:
        data = yield Work(lambda: _read_file(file))
        response = yield from self.call(Ask("POST", "/tasks/validate", content=data))
        return replies.read(response, replies.verdict)

    def pull(self, reference: str) -> Operation[Bundle]:
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
        response = yield from self.call(Ask("GET", _path(name, "versions", str(version), "bundle")))
        return replies.bundle(response, name, version)

    def label(self, name: str, label: str, version: int, waiting: Waiting) -> Operation[Changed]:
        ask = Ask("PUT", _path(name, "labels", label), json={"version": version})
        return (yield from self._change(ask, waiting))

    def remove_label(self, name: str, label: str, waiting: Waiting) -> Operation[Changed]:
        ask = Ask("DELETE", _path(name, "labels", label), repeatable=False)
        return (yield from self._change(ask, waiting))

    def rollback(self, name: str, label: str, waiting: Waiting) -> Operation[Changed]:
        ask = Ask("POST", _path(name, "rollback"), {"label": label}, repeatable=False)
        return (yield from self._change(ask, waiting))

    def retire(self, name: str, version: int | None, waiting: Waiting) -> Operation[Changed]:
        path = _path(name) if version is None else _path(name, "versions", str(version))
        return (yield from self._change(Ask("DELETE", path, repeatable=False), waiting))

    def restore(self, name: str, version: int | None, waiting: Waiting) -> Operation[Changed]:
        params = {} if version is None else {"version": str(version)}
        ask = Ask("POST", _path(name, "restore"), params, repeatable=False)
        return (yield from self._change(ask, waiting))

    def _change(self, ask: Ask, waiting: Waiting) -> Operation[Changed]:
        response = yield from self.call(_waiting(ask, waiting))
        return replies.read(response, replies.changed)


def _waiting(ask: Ask, waiting: Waiting) -> Ask:
    """The same request, and the server shall answer when all replicas serve the change."""
    wait, seconds = waiting.get("wait"), waiting.get("timeout", WAIT_SECONDS)
    if wait is None:
        return ask
    if wait != "all":
        raise WrongUse(f"wait is 'all' or None, and not {wait!r}.")
    params = {**ask.params, "wait": wait, "timeout": f"{seconds:g}"}
    return replace(ask, params=params, more_seconds=seconds)


def _input_size(document: Mapping[str, object]) -> InputSize | None:
    return InputSize.read(document.get("input"))


def _path(name: str, *further: str) -> str:
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


def _checked_key(key: str) -> str:
    if not key or not key.isascii() or not key.isprintable():
        raise WrongUse("The key has characters that no key has: it is printable ASCII.")
    return key
