"""Every error about bundles and names, as one tree.

TaskStoreError               also the root of the errors in engram_store.errors
├── InvalidName              an invalid task name, alias or reference
└── BundleError              one bundle file cannot be used
    ├── UnreadableBundle         the file cannot be opened or written
    ├── MalformedBundle          its bytes are not a valid bundle
    └── IncompatibleBundle       a valid bundle, made for another backbone

Messages are for people: what is wrong, with which value, and what to do. `names` repeats the
affected names for programs that build their own answer. `public_message` is for the clients
of a server. It does not contain the location of the store.
"""

from typing import ClassVar


class TaskStoreError(Exception):
    """Base of every error that the bundle and store packages raise on purpose."""

    # Replaces a message that may have paths, bucket URLs or texts of a backend.
    public: ClassVar[str | None] = None

    def __init__(self, message: str, *, names: list[str] | tuple[str, ...] = ()) -> None:
        super().__init__(message)
        self.names = tuple(names)

    @property
    def public_message(self) -> str:
        return self.public or str(self)


class InvalidName(TaskStoreError):
    """An invalid task name, alias or reference."""


class BundleError(TaskStoreError):
    """One bundle file cannot be used."""


class UnreadableBundle(BundleError):
    """The file cannot be opened or written."""

    public = "The server cannot read or write the bundle; its log says why."


class MalformedBundle(BundleError):
    """The bytes are not a valid bundle."""


class IncompatibleBundle(BundleError):
    """A valid bundle, made for another backbone."""
