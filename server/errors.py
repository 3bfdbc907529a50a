"""Every error the server package raises on purpose, as one tree.

Messages are for people: what was wrong, with which name or value, and what to do.
"""

from collections.abc import Mapping, Sequence
from types import MappingProxyType


class EngramError(Exception):
    """Base of everything this package raises on purpose."""


class BackboneError(EngramError):
    """The model folder or name cannot be used as a backbone."""


class NotAVisionTransformer(BackboneError):
    """The architecture is not one of the families we read."""


class BrokenCheckpoint(BackboneError):
    """Weights are missing, of the wrong shape, or not finite."""


class ImageError(EngramError):
    """The bytes of an image cannot be used."""


class UnreadableImage(ImageError):
    """Not an image, truncated, or of an unsupported format."""


class ImageTooLarge(ImageError):
    """More pixels than allowed: refused by its header, before decoding."""


class TaskError(EngramError):
    """A task cannot join or run on this backbone."""


class TaskMismatch(TaskError):
    """Shapes, placement, backbone or golden answers do not fit."""


class UnknownTask(TaskError):
    """No such task is loaded: `names`, and for some of them a suggestion."""

    def __init__(
        self,
        message: str,
        names: Sequence[str] = (),
        suggestions: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        super().__init__(message)
        self.names = tuple(names)
        self.suggestions = dict(suggestions)


class UnteachableExamples(TaskError):
    """Examples that no task can be made of: too few classes, or labels that contradict."""


class UnknownExample(TaskError):
    """No such example in the task: `names` has the digests."""

    def __init__(self, message: str, names: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.names = tuple(names)


class NoTextTower(TaskError):
    """Class names were given, and the backbone's folder has nothing that reads them."""


class NotTaught(TaskError):
    """The task was trained, and has no examples that it could be solved from anew."""


class IsTaught(TaskError):
    """The task was taught: a correction of it is an example."""


class ExtensionError(TaskError):
    """A parent is missing, or tasks extend each other in a circle."""


class TaskUnavailable(TaskError):
    """The task exists, but its bundle could not be loaded."""


class EngineError(EngramError):
    """A request could not be carried out."""


class Overloaded(EngineError):
    """Too much is waiting already; try again after `retry_after` seconds."""

    def __init__(self, message: str, retry_after: float) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class QuotaExceeded(Overloaded):
    """A key has used what it may: its `limit` of requests, rows or images."""

    def __init__(self, message: str, retry_after: float, limit: str) -> None:
        super().__init__(message, retry_after)
        self.limit = limit


class DeadlineExceeded(EngineError):
    """The answer would have come too late."""


class ContextNotCached(EngineError):
    """An image given by a digest that we no longer hold."""


class GenerationNotReached(EngineError):
    """A generation that the task store does not have."""


class Draining(EngineError):
    """The server is shutting down."""


class BatchFailed(EngineError):
    """The model failed on this image, also when it was asked alone."""


class DeviceFailed(EngineError):
    """No worker is there to run the model, or it ended with this image at hand."""


class AnswerNotFinite(EngineError):
    """A task's answer is no number, and the protocol has no place to say so."""


class NotStarted(EngramError):
    """The server is still starting, or could not."""


class KeysError(EngramError):
    """The keys file cannot be read, or cannot be changed as asked."""


class SettingsError(EngramError):
    """The settings contradict each other or the machine."""


class AuditUnavailable(EngramError):
    """The audit log cannot be written, so nothing is done that it would have to show."""


class IssuerUnavailable(EngramError):
    """The keys of the OpenID provider could not be read so far."""
