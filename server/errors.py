"""Every error the server package raises on purpose, as one tree.

EngramError
├── BackboneError            the model folder or name cannot be used as a backbone
│   ├── NotAVisionTransformer    its architecture is not one of the families we read
│   ├── NoClassToken             a vision transformer without a class token to read from
│   └── BrokenCheckpoint         weights missing, of the wrong shape, or not finite
├── ImageError               the bytes of an image cannot be used
│   ├── UnreadableImage          not an image, truncated, or of an unsupported format
│   └── ImageTooLarge            more pixels than allowed, told from the header
└── TaskError                a task cannot join or run on this backbone
    ├── TaskMismatch             shapes, placement or backbone do not fit
    ├── UnknownTask              no such task is loaded
    └── ExtensionError           a parent is missing, or tasks extend each other in a circle

Messages are for people: what was wrong, with which name or value, and what to do.
"""


class EngramError(Exception):
    """Base of everything this package raises on purpose."""


class BackboneError(EngramError):
    """The model folder or name cannot be used as a backbone."""


class NotAVisionTransformer(BackboneError):
    """The architecture is not one of the families we read."""


class NoClassToken(BackboneError):
    """A vision transformer without a class token to read from."""


class BrokenCheckpoint(BackboneError):
    """Weights are missing, of the wrong shape, or not finite."""


class ImageError(EngramError):
    """The bytes of an image cannot be used."""


class UnreadableImage(ImageError):
    """Not an image, truncated, or of an unsupported format."""


class ImageTooLarge(ImageError):
    """More pixels than allowed, told from the header before decoding."""


class TaskError(EngramError):
    """A task cannot join or run on this backbone."""


class TaskMismatch(TaskError):
    """Shapes, placement or backbone do not fit."""


class UnknownTask(TaskError):
    """No such task is loaded."""


class ExtensionError(TaskError):
    """A parent is missing, or tasks extend each other in a circle."""
