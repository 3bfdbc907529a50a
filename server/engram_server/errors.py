"""Every error that the server package raises on purpose, as one tree.

EngramError
├── BackboneError: NotAVisionTransformer, BrokenCheckpoint
├── BatchError: UnreadableSource, UnusableOutput
├── KeysError
├── SettingsError
├── EngineError: BatchFailed
├── ImageError: UnreadableImage, ImageTooLarge
├── TaskError: TaskMismatch, UnteachableExamples, AnswerNotFinite
├── NotFoundError: UnknownTask, UnknownExample, ContextNotCached
├── ConflictError: ExtensionError, NoTextTower, NotTaught, IsTaught, NotEnoughEvidence,
│   StorageQuotaExceeded
├── UnavailableError: TaskUnavailable, NotStarted, Draining, DeviceFailed, AuditUnavailable,
│   IssuerUnavailable, TooManyConnections, UploadNotKept
├── Overloaded: QuotaExceeded
├── DeadlineExceeded
├── GenerationNotReached
└── RequestError: MalformedRequest, BodyTooLarge, HeadersTooLarge, UnsupportedMedia, RequestTooSlow
    ├── InvalidRequest: TooManyImages, TooManyTasks, TooManyValues, AnswerTooLarge
    └── AccessError: KeyRequired, NotPermitted, CrossOrigin, HostNotAllowed

To add an error, add one class and its name to the tree. Its problem type is the class name in kebab
case without `Error`, its title the same in words, its meaning the first line of its docstring. Its
HTTP status is that of its nearest base class in `api/problems.py`.

Messages are for people: what is wrong, with which value, and what to do.
"""

from collections.abc import Mapping, Sequence
from types import MappingProxyType


class EngramError(Exception):
    """The server failed."""

    retry_after: float | None = None  # seconds after which the client may try again
    rejection: str | None = None  # the `reason` under which `engram_rejections_total` counts it

    def __init__(self, message: str = "", names: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.names = tuple(names)  # from the request


class BackboneError(EngramError):
    """A model folder or name cannot be used as a backbone."""


class NotAVisionTransformer(BackboneError):
    """The architecture is not supported."""


class BrokenCheckpoint(BackboneError):
    """Weights are missing, misshapen or not finite."""


class BatchError(EngramError):
    """A batch run cannot start or continue."""


class UnreadableSource(BatchError):
    """The images of a batch run cannot be listed or read."""


class UnusableOutput(BatchError):
    """The output of a batch run cannot be written or continued."""


class KeysError(EngramError):
    """The keys file cannot be read or changed."""


class SettingsError(EngramError):
    """The settings contradict each other or the machine."""


class EngineError(EngramError):
    """The engine failed."""


class BatchFailed(EngineError):
    """The model failed on this image, also in a batch of one."""


class ImageError(EngramError):
    """An image cannot be used."""

    # With several images in a request: each that cannot be used, with index, name and reason.
    unreadable: Sequence[Mapping[str, object]] = ()


class UnreadableImage(ImageError):
    """The bytes are not an image, are truncated, or have an unsupported format."""


class ImageTooLarge(ImageError):
    """The image has too many pixels, or takes too many bytes or too long to decode."""


class TaskError(EngramError):
    """A task cannot run on this backbone."""


class TaskMismatch(TaskError):
    """The task's shapes, memory placement, backbone or golden answers do not match."""


class UnteachableExamples(TaskError):
    """The examples do not define a task: too few classes, or contradicting labels."""


class AnswerNotFinite(TaskError):
    """A task's answer is NaN or infinite."""


class NotFoundError(EngramError):
    """A name in the request refers to nothing; `names` lists it."""


class UnknownTask(NotFoundError):
    """There is no such task; `suggestions` has similar names."""

    def __init__(
        self,
        message: str,
        names: Sequence[str] = (),
        suggestions: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        super().__init__(message, names)
        self.suggestions = dict(suggestions)


class UnknownExample(NotFoundError):
    """The task has no such example."""


class ContextNotCached(NotFoundError):
    """The image behind a digest is not cached: send its bytes again."""


class ConflictError(EngramError):
    """The request does not fit the present state."""


class ExtensionError(ConflictError):
    """A parent is missing, or extensions form a cycle."""


class NoTextTower(ConflictError):
    """The request has class names, and the backbone has no text tower."""


class NotTaught(ConflictError):
    """The task was trained, not taught from examples: it cannot be updated with examples."""


class IsTaught(ConflictError):
    """The task is taught from examples: send its corrections as examples."""


class NotEnoughEvidence(ConflictError):
    """The evidence about a version does not allow its promotion."""


class UnavailableError(EngramError):
    """The server cannot do this now."""

    retry_after: float | None = 5.0


class TaskUnavailable(UnavailableError):
    """The bundle of the task could not be loaded."""

    retry_after = None


class NotStarted(UnavailableError):
    """The server is starting, or failed to start."""

    retry_after = 2.0


class Draining(UnavailableError):
    """The server is starting up or shutting down and accepts no requests."""

    retry_after = 2.0


class DeviceFailed(UnavailableError):
    """No worker is running, or the worker ended while it processed this image."""


class AuditUnavailable(UnavailableError):
    """The audit log cannot be written, so changes are rejected."""


class IssuerUnavailable(UnavailableError):
    """The server could not read the keys of the OpenID provider yet."""


class TooManyConnections(UnavailableError):
    """The connection limit is reached."""

    retry_after = 1.0


class UploadNotKept(UnavailableError):
    """The server has no disk space for the bundle."""


class Overloaded(EngramError):
    """Too much work is waiting; retry after `retry_after` seconds."""

    def __init__(self, message: str, retry_after: float) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class QuotaExceeded(Overloaded):
    """A key has used up one of its limits: requests, rows or images."""

    def __init__(self, message: str, retry_after: float, limit: str) -> None:
        super().__init__(message, retry_after)
        self.rejection = f"key_{limit}"


class StorageQuotaExceeded(ConflictError):
    """A key has published as many tasks, versions or bytes as it may."""


class DeadlineExceeded(EngramError):
    """The deadline passed before the answer was ready."""


class GenerationNotReached(EngramError):
    """The task store has no such generation yet."""


class RequestError(EngramError):
    """The request itself is not acceptable."""


class MalformedRequest(RequestError):
    """The body is not the JSON or the form that its content type announces."""


class InvalidRequest(RequestError):
    """A value in the request is not allowed."""


class TooManyImages(InvalidRequest):
    """The request has more images than allowed."""


class TooManyTasks(InvalidRequest):
    """The request names more tasks than allowed."""


class TooManyValues(InvalidRequest):
    """The JSON body has more values than allowed."""

    rejection = "json_values"


class AnswerTooLarge(InvalidRequest):
    """The answer would exceed the size limit."""

    rejection = "answer_bytes"


class BodyTooLarge(RequestError):
    """The body exceeds the size limit."""


class HeadersTooLarge(RequestError):
    """The headers exceed the size or count limit."""


class UnsupportedMedia(RequestError):
    """The content type or encoding is not supported."""


class RequestTooSlow(RequestError):
    """A header or body did not arrive in time."""


class AccessError(RequestError):
    """The caller may not do this."""


class KeyRequired(AccessError):
    """The request has no key, or an invalid, expired or revoked one."""

    rejection = "key"


class NotPermitted(AccessError):
    """The key does not have the scope for this, or not for the tasks in `names`."""

    rejection = "permission"


class CrossOrigin(AccessError):
    """A page of another site requested a change."""

    rejection = "origin"


class HostNotAllowed(AccessError):
    """A server without keys was addressed by a host name that it does not accept."""

    rejection = "host"
