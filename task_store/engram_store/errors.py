"""All errors that the task store raises on purpose.

TaskStoreError               (engram_bundle.errors)
└── StoreError               the store rejects or cannot carry out a request
    ├── NotFound                 a valid name of something that does not exist
    │   ├── UnknownTask              no such task, or it was purged
    │   │   └── RetiredTask              all of it is retired
    │   ├── UnknownVersion           no such version, or it is retired
    │   ├── UnknownAlias             the task has no such alias
    │   └── UnknownUpload            no such upload: aborted, purged or expired
    ├── Conflict                 the request does not fit the current state
    │   ├── AlreadyExists            the task already exists
    │   ├── MissingParent            an extended bundle is not published, or retired
    │   ├── StillExtended            a child extends the version
    │   ├── StillAliased             an alias points to the version
    │   ├── NothingToRollBack        the alias has no earlier version
    │   ├── NothingToRestore         the task or version is not retired, or purged
    │   ├── CorrectionsFull          the task has as many corrections as it may have
    │   ├── TooManyUploads           the caller has as many unpublished uploads as it may have
    │   └── PreconditionFailed       the condition of a change does not hold
    ├── StoreUnavailable         the object store cannot be reached, read or written
    ├── CorruptStore             stored objects differ from what was acknowledged
    └── UnsupportedFormat        written by a newer Engram
"""

from engram_bundle.errors import TaskStoreError


class StoreError(TaskStoreError):
    """The store rejects or cannot carry out a request."""


class NotFound(StoreError):
    """A valid name of something that does not exist."""


class UnknownTask(NotFound):
    """No such task, or it was purged."""


class RetiredTask(UnknownTask):
    """All versions of the task are retired: restore it to use it."""


class UnknownVersion(NotFound):
    """No such version, or it is retired."""


class UnknownAlias(NotFound):
    """The task has no such alias."""


class UnknownUpload(NotFound):
    """No such upload, or it was aborted, purged or expired."""


class Conflict(StoreError):
    """The request does not fit the current state."""


class AlreadyExists(Conflict):
    """The task already exists."""


class MissingParent(Conflict):
    """An extended bundle is not published, or retired."""


class StillExtended(Conflict):
    """A child extends the version."""


class StillAliased(Conflict):
    """An alias points to the version."""


class NothingToRollBack(Conflict):
    """The alias has no earlier version."""


class NothingToRestore(Conflict):
    """The task or version is not retired, or was purged."""


class CorrectionsFull(Conflict):
    """The task has as many corrections as the server's limits allow."""


class TooManyUploads(Conflict):
    """The caller has as many unpublished uploads, or bytes of them, as the limits allow."""


class PreconditionFailed(Conflict):
    """The condition of a change does not hold."""


class StoreUnavailable(StoreError):
    """The object store cannot be reached, read or written."""

    public = "The task store cannot be reached, read or written. Try again later."


class CorruptStore(StoreError):
    """Stored objects differ from what was acknowledged."""

    public = "A bundle in the task store is missing, or was damaged or replaced. Publish it again."


class UnsupportedFormat(StoreError):
    """Written by a newer Engram."""

    public = "A newer Engram wrote the task store. Upgrade this server."
