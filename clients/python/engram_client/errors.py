"""Every error the client raises on purpose, as one tree.

ClientError
├── WrongUse             an argument that cannot be used: an address, an image of no known kind
├── BadImage             one image cannot be read, here or by the server, or is no longer cached
├── CannotReach          no connection, or it broke before the answer was there
├── TimedOut             no answer within the client's `timeout`
├── DeadlineExceeded     the time given to a call is over
├── NotUnderstood        an answer that is not Engram's: another program, or a proxy in between
└── Refused              the server says no: `status`, `kind`, `names`, `request_id`
    ├── KeyRefused           no key, a wrong one, or one that may not do this
    ├── NotFound             no such task, version or label
    ├── Conflict             it does not fit the present state; nothing was changed
    ├── Invalid              a value, a bundle or a body that the server does not take
    ├── Busy                 too much is waiting, or the server starts or leaves
    └── ServerFailed         something went wrong in the server

An error that ends a list of images says which image had no answer (`image`, `index`), and brings
along what had been answered and not been handed out (`answered`). Messages are for people: what was
wrong, with which name or value, and what to do.
"""

from collections.abc import Sequence
from typing import ClassVar

from engram_client.answers import Answers

# Exit codes of the command line; docs/reference/cli.md lists them.
FAILED, USAGE, LATER, KEY, NOT_FOUND = 1, 2, 3, 4, 5


class ClientError(Exception):
    """Base of everything this package raises on purpose."""

    exit_code: ClassVar[int] = FAILED

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message
        self.image: str | None = None  # the first without an answer
        self.index: int | None = None
        self.answered = Answers()

    def __str__(self) -> str:
        if self.image is None or self.index is None:
            return self.message
        before = f"; the {self.index} before it were answered" if self.index else ""
        return f"{self.message} The first image without an answer is '{self.image}'{before}."


class WrongUse(ClientError):
    exit_code = USAGE


class BadImage(ClientError):
    def __str__(self) -> str:
        return self.message if self.image is None else f"{self.image}: {self.message}"


class CannotReach(ClientError):
    exit_code = LATER


class TimedOut(ClientError):
    exit_code = LATER


class DeadlineExceeded(ClientError):
    exit_code = LATER


class NotUnderstood(ClientError):
    """An answer that is not Engram's: another program, or a proxy in between."""


class Refused(ClientError):
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
        self.kind = kind  # such as `unknown-task`: docs/reference/http-api.md lists them
        self.names = tuple(names)
        self.request_id = request_id


class KeyRefused(Refused):
    exit_code = KEY


class NotFound(Refused):
    exit_code = NOT_FOUND


class Conflict(Refused):
    """It does not fit the present state; nothing was changed."""


class Invalid(Refused):
    """A value, a bundle or a body that the server does not take."""


class Busy(Refused):
    exit_code = LATER


class ServerFailed(Refused):
    """Something went wrong in the server."""
