"""Every error the training package raises on purpose, as one tree.

Messages are for people: what was wrong, with which name or value, and what to do.
"""


class TrainingError(Exception):
    """Base of everything this package raises on purpose."""


class ImportFailed(TrainingError):
    """A checkpoint could not be turned into bundles; nothing was written."""


class UnreadableCheckpoint(ImportFailed):
    """No such file, damaged, or holding code instead of tensors."""


class ForeignCheckpoint(ImportFailed):
    """Tensors, but not those of the public reproduction."""


class InconsistentCheckpoint(ImportFailed):
    """Of the public reproduction, with a part that contradicts the rest."""


class BackboneDiffers(ImportFailed):
    """Trained on another backbone than the one given."""


class WrongLabels(ImportFailed):
    """A labels file is unreadable or does not fit its task."""


class WrongOutput(ImportFailed):
    """Names or files for the bundles do not fit, or cannot be written."""


class DataError(TrainingError):
    """The images or their labels cannot be trained on or evaluated."""


class SettingsConflict(TrainingError):
    """Options contradict each other, the data or the backbone."""


class CannotResume(TrainingError):
    """A checkpoint is unreadable or of another run."""


class CannotWrite(TrainingError):
    """The disk refuses; what was there before is untouched."""
