"""The client's logic without I/O: every call is a generator of effects.

A generator yields an effect (send a request, sleep, read files) and receives its result. `Client`
and `AsyncClient` run the effects, blocking or not; requests, responses and retries live here.

Retries: 429, and 503 with Retry-After, wait as long as the server says. Broken connections and
gateway errors back off exponentially. A call fails after `patience` seconds, or before a pause that
would exceed patience or the deadline. If the server has never answered, the call fails at once: the
address is probably wrong.
"""

import inspect
import random
import time
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypedDict, TypeVar, Unpack, get_args
from urllib.parse import quote

import httpx

from engram_vit import __version__, answers, errors, replies
from engram_vit.answers import ChangeResult
from engram_vit.errors import ClientError, ConnectionFailed, DeadlineExceeded, UsageError
from engram_vit.images import InputSize, needs_input_size

if TYPE_CHECKING:
    from engram_vit.images import Image

T = TypeVar("T")

FIRST_PAUSE, LONGEST_PAUSE = 0.25, 5.0
CONNECT_SECONDS = 10.0
WAIT_SECONDS = 30.0  # for all replicas to serve a change
LONGEST_DEADLINE_MS = 86_400_000  # the server's limit


@dataclass(frozen=True, slots=True)
class Send:
    """Send a request; the result is the response or the httpx.RequestError."""

    request: httpx.Request


@dataclass(frozen=True, slots=True)
class Sleep:
    """Pause; the result is None."""

    seconds: float


@dataclass(frozen=True, slots=True)
class Work:
    """Run slow work such as reading files; the result is its return value."""

    run: Callable[[], Any]


Effect = Send | Sleep | Work
Operation = Generator[Effect, Any, T]


@dataclass(frozen=True, slots=True)
class Request:
    """A request, which may be sent several times."""

    method: str
    path: str
    params: Mapping[str, str | Sequence[str]] = field(default_factory=dict)
    headers: Mapping[str, str] = field(default_factory=dict)
    json: object = None
    content: bytes | None = None
    files: Sequence[tuple[str, tuple[str, bytes, str]]] | None = None
    repeatable: bool = True  # idempotent: safe to send again if the response was lost
    more_seconds: float = 0.0  # added to the timeout, because the server waits this long


class WaitOptions(TypedDict, total=False):
    """`wait="all"`: return when every live replica serves a change, or after `timeout` seconds."""

    wait: Literal["all"] | None
    timeout: float


class Core:
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
        self._headers = {"User-Agent": f"engram-vit/{__version__}"}
        if api_key is not None:
            if not api_key or not api_key.isascii() or not api_key.isprintable():
                raise UsageError("The API key must be printable ASCII.")
            self._headers["Authorization"] = f"Bearer {api_key}"
        self._timeout = timeout
        self._patience = patience
        self.now = now
        self._chance = chance
        self._answered_once = False
        self._input: InputSize | None = None
        self._input_known = False

    def call(self, request: Request, deadline: float | None = None) -> Operation[httpx.Response]:
        """Send a request, with retries, until `deadline` on the clock `now`."""
        give_up, tries = None, 0
        while True:
            outcome = yield Send(self._request(request, deadline))
            failure, pause = self._outcome(request, outcome, deadline)
            if failure is None:
                response: httpx.Response = outcome
                return response
            if pause is None:
                raise failure
            now = self.now()
            give_up = now + self._patience if give_up is None else give_up
            pause = pause or min(FIRST_PAUSE * 2**tries, LONGEST_PAUSE)
            pause *= 1 + 0.1 * self._chance()  # jitter: rejected clients must not return together
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

    def _outcome(
        self, request: Request, outcome: object, deadline: float | None
    ) -> tuple[ClientError | None, float | None]:
        """The error, and the pause before a retry: None for no retry, 0 for the default backoff."""
        if isinstance(outcome, httpx.Response):
            self._answered_once = True
            if outcome.is_success:
                return None, None
            again = request.repeatable and replies.is_retryable(outcome)
            pause = (replies.retry_after(outcome) or 0.0) if again else None
            return replies.error_from(outcome), pause
        assert isinstance(outcome, httpx.RequestError)
        # Socket timers may fire slightly early.
        if deadline is not None and self.now() >= deadline - 0.01:
            return DeadlineExceeded("The deadline passed before the response arrived."), None
        if isinstance(outcome, httpx.ReadTimeout | httpx.WriteTimeout):
            seconds = self._timeout + request.more_seconds
            reason = f"No response from {self.url} within {seconds:g} s."
            return errors.ResponseTimeout(reason), None
        connected = not isinstance(outcome, httpx.ConnectError | httpx.ConnectTimeout)
        again = self._answered_once and (request.repeatable or not connected)
        reason = str(outcome) or type(outcome).__name__
        what = "The connection broke" if connected else "No connection"
        error = ConnectionFailed(f"{what}: {self.url} ({reason}). Is the server running there?")
        return error, 0.0 if again else None

    def input_size(
        self, images: "Iterable[Image]", shrink: bool = False
    ) -> Operation[InputSize | None]:
        """Return the server's resizing, read once; None if no image needs it or it is unknown."""
        if not any(needs_input_size(image, shrink) for image in images):
            return None
        if not self._input_known:
            outcome = yield Send(self._request(Request("GET", "/readyz"), None))
            # The request that follows reports any other error.
            if isinstance(outcome, httpx.Response) and outcome.is_success:
                self._input = replies.read(outcome, lambda it: InputSize.read(it.get("input")))
                self._input_known = True
        return self._input

    def tasks(
        self, *, search: str | None = None, team: str | None = None, retired: bool = False
    ) -> Operation[tuple[answers.TaskSummary, ...]]:
        """List tasks and their status, by name; reads all pages.

        `search`: part of the name or description. `team`: tasks whose name starts with `team/`.
        `retired`: the retired tasks instead of the live ones.
        """
        query = {"q": search, "team": team, "retired": "true" if retired else None}
        params = {name: value for name, value in query.items() if value is not None}
        found: list[answers.TaskSummary] = []
        while True:
            response = yield from self.call(Request("GET", "/tasks", params))
            page = replies.read(response, partial(replies.build, answers.TaskPage))
            found += page.tasks
            if page.next is None:
                return tuple(found)
            params["cursor"] = page.next

    def task(self, name: str) -> Operation[answers.TaskDetail]:
        """Describe one task with its aliases and versions."""
        return self.build(answers.TaskDetail, Request("GET", task_path(name)))

    def history(self, name: str, limit: int = 50) -> Operation[tuple[answers.Change, ...]]:
        """List the changes of a task, newest first."""
        request = Request("GET", task_path(name, "history"), {"limit": str(limit)})
        response = yield from self.call(request)
        return replies.read(response, replies.history)

    def replicas(self) -> Operation[tuple[answers.Replica, ...]]:
        """List the live replicas and the generation each serves."""
        response = yield from self.call(Request("GET", "/replicas"))
        build = partial(replies.build, answers.Replica)
        return replies.read(response, lambda document: tuple(map(build, document["replicas"])))

    def push(
        self,
        file: str | Path | bytes,
        name: str,
        aliases: Sequence[str] = (),
        *,
        only_new: bool = False,
        **waiting: Unpack[WaitOptions],
    ) -> Operation[answers.PublishResult]:
        """Publish a bundle; the server serves it when this returns.

        Without `aliases`, `default` moves to it. `only_new` rejects an existing task. With
        `wait="all"`, here and in every change below, the call returns when all replicas serve the
        change, or after `timeout` seconds (30); `replicas` of the result lists them.
        """
        data = yield Work(lambda: read_file(file))
        # Publishing the same bytes twice changes nothing, but If-None-Match fails the second time.
        request = Request(
            "PUT",
            task_path(name),
            {"alias": list(aliases)} if aliases else {},
            {"If-None-Match": "*"} if only_new else {},
            content=data,
            repeatable=not only_new,
        )
        return (yield from self.build(answers.PublishResult, waiting_for(request, waiting)))

    def validate(self, file: str | Path | bytes) -> Operation[answers.ValidationResult]:
        """Check whether the server can serve a bundle; stores nothing."""
        data = yield Work(lambda: read_file(file))
        request = Request("POST", "/tasks/validate", content=data)
        return (yield from self.build(answers.ValidationResult, request))

    def pull(self, reference: str) -> Operation[answers.Bundle]:
        """Download the bundle of `birds`, `birds@3` or `birds:canary`."""
        name, version, alias = read_reference(reference)
        if version is None:
            alias = alias or "default"
            aliases = (yield from self.task(name)).aliases
            if alias not in aliases:
                raise errors.NotFound(
                    f"Task '{name}' has no alias '{alias}'; it has {', '.join(aliases) or 'none'}.",
                    status=404,
                    names=[reference],
                )
            version = aliases[alias]
        path = task_path(name, "versions", str(version), "bundle")
        response = yield from self.call(Request("GET", path))
        return replies.bundle(response, name, version)

    def set_alias(
        self,
        name: str,
        alias: str,
        version: int,
        *,
        share: float | None = None,
        **waiting: Unpack[WaitOptions],
    ) -> Operation[ChangeResult]:
        """Point an alias to a version.

        With `share` the alias stays, and sends this share of its images to the version; 0 ends it.
        """
        body = {"version": version} if share is None else {"version": version, "share": share}
        request = Request("PUT", task_path(name, "aliases", alias), json=body)
        return self.build(ChangeResult, waiting_for(request, waiting))

    def remove_alias(
        self, name: str, alias: str, **waiting: Unpack[WaitOptions]
    ) -> Operation[ChangeResult]:
        """Remove an alias other than `default`."""
        request = Request("DELETE", task_path(name, "aliases", alias), repeatable=False)
        return self.build(ChangeResult, waiting_for(request, waiting))

    def rollback(
        self, name: str, alias: str = "default", **waiting: Unpack[WaitOptions]
    ) -> Operation[ChangeResult]:
        """Undo the last move of an alias."""
        request = Request("POST", task_path(name, "rollback"), {"alias": alias}, repeatable=False)
        return self.build(ChangeResult, waiting_for(request, waiting))

    def comparison(self, name: str) -> Operation[answers.Comparison]:
        """Compare the versions of a task that answered the same images."""
        return self.build(answers.Comparison, Request("GET", task_path(name, "comparison")))

    def feedback(self, name: str, labels: Mapping[str, str]) -> Operation[answers.FeedbackResult]:
        """Score every version that answered an image; `labels` has true labels by digest."""
        body = [{"digest": digest, "label": label} for digest, label in labels.items()]
        request = Request("POST", task_path(name, "feedback"), json={"feedback": body})
        return self.build(answers.FeedbackResult, request)

    def promote(
        self,
        name: str,
        source: str = "shadow",
        *,
        min_agreement: float | None = None,
        min_images: int = 1,
        min_gain: float | None = None,
        confidence: float = 0.95,
        **waiting: Unpack[WaitOptions],
    ) -> Operation[ChangeResult]:
        """Move `default` to the version under an alias, if the evidence about it holds.

        Raises Conflict otherwise, which names the figure that is missing.
        """
        body: dict[str, object] = {"from": source, "min_images": min_images}
        body |= {"min_agreement": min_agreement, "min_gain": min_gain, "confidence": confidence}
        request = Request("POST", task_path(name, "promote"), json=body, repeatable=False)
        return self.build(ChangeResult, waiting_for(request, waiting))

    def retire(
        self,
        name: str,
        version: int | None = None,
        *,
        purge: bool = False,
        **waiting: Unpack[WaitOptions],
    ) -> Operation[ChangeResult]:
        """Retire a task or one version. Bundles are kept, unless `purge` deletes it for good."""
        path = task_path(name) if version is None else task_path(name, "versions", str(version))
        # A purge can be repeated: what was purged before is left out.
        request = Request("DELETE", path, {"purge": "true"} if purge else {}, repeatable=purge)
        return self.build(ChangeResult, waiting_for(request, waiting))

    def restore(
        self, name: str, version: int | None = None, **waiting: Unpack[WaitOptions]
    ) -> Operation[ChangeResult]:
        """Restore a version, or the versions that retiring the task removed."""
        params = {} if version is None else {"version": str(version)}
        request = Request("POST", task_path(name, "restore"), params, repeatable=False)
        return self.build(ChangeResult, waiting_for(request, waiting))

    def build(self, cls: type[T], request: Request) -> Operation[T]:
        response = yield from self.call(request)
        return replies.read(response, partial(replies.build, cls))


def signature_of(operation: Callable[..., Operation[Any]]) -> inspect.Signature:
    """The signature of the method that runs an operation: it returns the result, not effects."""
    signature = inspect.signature(operation)
    *_, result = get_args(signature.return_annotation)
    return signature.replace(return_annotation=result)


def waiting_for(request: Request, waiting: WaitOptions) -> Request:
    wait, seconds = waiting.get("wait"), waiting.get("timeout", WAIT_SECONDS)
    if wait is None:
        return request
    if wait != "all":
        raise UsageError(f"Unknown value for wait: {wait!r}. Use 'all' or None.")
    params = {**request.params, "wait": wait, "timeout": f"{seconds:g}"}
    return replace(request, params=params, more_seconds=seconds)


def task_path(name: str, *further: str) -> str:
    """The path of a task; its name may contain one slash."""
    if not name.strip("/ "):
        raise UsageError("The task name is empty.")
    return "/".join(["/tasks", quote(name), *(quote(part, safe="") for part in further)])


def read_reference(text: str) -> tuple[str, int | None, str | None]:
    """Split `birds`, `birds@3` or `birds:canary` into name, version and alias."""
    name, at, number = text.partition("@")
    if at:
        if not (number.isascii() and number.isdecimal()):
            raise UsageError(f"'{text}' has no version number after '@'. Example: birds@3.")
        return name, int(number), None
    name, _, alias = text.partition(":")
    return name, None, alias or None


def read_file(file: str | Path | bytes) -> bytes:
    if isinstance(file, bytes):
        return file
    try:
        return Path(file).read_bytes()
    except OSError as error:
        raise UsageError(f"Cannot read '{file}': {error.strerror or error}.") from None


def _checked_url(text: str) -> str:
    """Check a server address; adds http:// and removes a trailing slash."""
    whole = text if "://" in text else f"http://{text}"
    try:
        url = httpx.URL(whole)
    except (httpx.InvalidURL, ValueError) as error:
        raise UsageError(f"Invalid server address '{text}': {error}.") from None
    if url.scheme not in ("http", "https") or not url.host:
        raise UsageError(f"Invalid server address '{text}'. Example: http://127.0.0.1:8000.")
    return whole.rstrip("/")
