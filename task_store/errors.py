"""Every error the task store raises on purpose, as one tree.

TaskStoreError
├── BundleError              one bundle file cannot be used
│   ├── UnreadableBundle         the file cannot be opened or written at all
│   ├── MalformedBundle          its bytes are not a valid bundle
│   └── IncompatibleBundle       a valid bundle, made for another backbone
└── StoreError               the store refuses or cannot carry out a request
    ├── InvalidName              a task name, label or reference that nobody could publish
    ├── NotFound                 the name is fine, nothing is there
    │   ├── UnknownTask
    │   ├── UnknownVersion
    │   └── UnknownLabel
    ├── Conflict                 the request does not fit the present state
    │   ├── AlreadyExists            it was to be created, and the task is there
    │   ├── MissingParent            an extended bundle is not published, or retired
    │   ├── StillExtended            a live child extends it
    │   ├── StillLabelled            a label points to it
    │   ├── NothingToRollBack        the label has no earlier version
    │   ├── NothingToRestore         nothing of it is retired
    │   └── PreconditionFailed       the condition of a change does not hold
    ├── StoreUnavailable         the object store cannot be reached, read or written
    ├── CorruptStore             what is stored is not what was acknowledged
    └── UnsupportedFormat        written by a newer Engram than this one

Messages are for people: what was wrong, with which name or value, and what to do. `names` repeats
the offending names for programs that build their own answer.
"""


class TaskStoreError(Exception):
    """Base of everything this package raises on purpose."""

    def __init__(self, message: str, *, names: list[str] | tuple[str, ...] = ()) -> None:
        super().__init__(message)
        self.names = tuple(names)


class BundleError(TaskStoreError):
    """One bundle file cannot be used."""


class UnreadableBundle(BundleError):
    """The file cannot be opened or written at all."""


class MalformedBundle(BundleError):
    """The bytes are not a valid bundle."""


class IncompatibleBundle(BundleError):
    """A valid bundle, made for another backbone."""


class StoreError(TaskStoreError):
    """The store refuses or cannot carry out a request."""


class InvalidName(StoreError):
    """A task name, label or reference that nobody could publish."""


class NotFound(StoreError):
    """The name is fine, nothing is there."""


class UnknownTask(NotFound):
    """No such task, or all of it is retired."""


class UnknownVersion(NotFound):
    """No such version of the task, or it is retired."""


class UnknownLabel(NotFound):
    """The task has no such label."""


class Conflict(StoreError):
    """The request does not fit the present state."""


class AlreadyExists(Conflict):
    """It was to be created, and the task is there."""


class MissingParent(Conflict):
    """An extended bundle is not published, or retired."""


class StillExtended(Conflict):
    """A live child extends it."""


class StillLabelled(Conflict):
    """A label points to it."""


class NothingToRollBack(Conflict):
    """The label has no earlier version."""


class NothingToRestore(Conflict):
    """Nothing of it is retired."""


class PreconditionFailed(Conflict):
    """The condition of a change does not hold."""


class StoreUnavailable(StoreError):
    """The object store cannot be reached, read or written."""


class CorruptStore(StoreError):
    """What is stored is not what was acknowledged."""


class UnsupportedFormat(StoreError):
    """Written by a newer Engram than this one."""
