"""Every error the client raises on purpose, as one tree.

ClientError
├── UsageError           an invalid argument, for example an address or an image type
├── ImageError           one image cannot be read, here or by the server, or is no longer cached
│   └── UnreadablePhotos     photos to teach: some with `strict`, or all of them
├── ConnectionFailed     no connection, or it broke before the response arrived
├── ResponseTimeout      no response within the client's `timeout`
├── DeadlineExceeded     the deadline of a call passed
├── UnexpectedResponse   not an Engram response: another program or a proxy answered
└── RequestRejected      an error response: `status`, `kind`, `names`, `request_id`
    ├── AccessDenied         no key, a wrong key, or a key without the needed scope
    ├── NotFound             no such task, version or alias
    ├── Conflict             the request conflicts with the current state; nothing changed
    ├── Invalid              a value, bundle or body that the server does not accept
    ├── ServerBusy           the server is overloaded, starting or shutting down
    └── ServerError          the server failed

An error that ends a list of images names the first image without an answer (`image`, `index`) and
carries the answers that were received and not yet delivered (`answered`).
"""

from collections.abc import Sequence
from typing import ClassVar

from engram_vit.answers import Answers, Unreadable

# Exit codes of the command line; docs/reference/cli.md lists them.
FAILED, USAGE, LATER, KEY, NOT_FOUND = 1, 2, 3, 4, 5
_SHOWN = 20


class ClientError(Exception):
    """Base of the errors that this package raises on purpose."""

    exit_code: ClassVar[int] = FAILED

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message
        self.image: str | None = None  # the first image without an answer
        self.index: int | None = None
        self.answered = Answers()

    def __str__(self) -> str:
        if self.image is None or self.index is None:
            return self.message
        before = f"; the {self.index} before it were answered" if self.index else ""
        return f"{self.message} The first image without an answer is '{self.image}'{before}."


class UsageError(ClientError):
    exit_code = USAGE


class ImageError(ClientError):
    def __str__(self) -> str:
        return self.message if self.image is None else f"{self.image}: {self.message}"


class UnreadablePhotos(ImageError):
    def __init__(self, unreadable: Sequence[Unreadable]) -> None:
        count = "1 photo" if len(unreadable) == 1 else f"{len(unreadable)} photos"
        shown = [f"{each.photo}: {each.reason}" for each in unreadable[:_SHOWN]]
        more = [f"And {len(unreadable) - _SHOWN} more."] if len(unreadable) > _SHOWN else []
        super().__init__(" ".join([f"{count} cannot be read.", *shown, *more]))
        self.unreadable = tuple(unreadable)


class ConnectionFailed(ClientError):
    exit_code = LATER


class ResponseTimeout(ClientError):
    exit_code = LATER


class DeadlineExceeded(ClientError):
    exit_code = LATER


class UnexpectedResponse(ClientError):
    """Not an Engram response: another program or a proxy answered."""


class RequestRejected(ClientError):
    def __init__(
        self,
        message: str,
        *,
        status: int,
        kind: str = "",
        names: Sequence[str] = (),
        request_id: str | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.kind = kind  # for example `unknown-task`
        self.names = tuple(names)
        self.request_id = request_id


class AccessDenied(RequestRejected):
    exit_code = KEY


class NotFound(RequestRejected):
    exit_code = NOT_FOUND


class Conflict(RequestRejected):
    """The request conflicts with the current state; nothing changed."""


class Invalid(RequestRejected):
    """A value, bundle or body that the server does not accept."""


class ServerBusy(RequestRejected):
    exit_code = LATER


class ServerError(RequestRejected):
    """The server failed."""
