"""All errors of the training package. Messages say what is wrong, with which value, and what to do.

TrainingError
├── ImportFailed
│   ├── UnreadableCheckpoint
│   ├── ForeignCheckpoint
│   ├── InconsistentCheckpoint
│   ├── BackboneDiffers
│   ├── WrongLabels
│   └── WrongOutput
├── DataError
├── SettingsConflict
├── CannotResume
└── CannotWrite
"""


class TrainingError(Exception):
    """Base of all errors of this package."""


class ImportFailed(TrainingError):
    """A checkpoint could not be converted to bundles; nothing was written."""


class UnreadableCheckpoint(ImportFailed):
    """The file is missing, damaged, or contains code."""


class ForeignCheckpoint(ImportFailed):
    """The file is not a checkpoint of the public reproduction."""


class InconsistentCheckpoint(ImportFailed):
    """Parts of the checkpoint contradict each other."""


class BackboneDiffers(ImportFailed):
    """The checkpoint was trained on another backbone."""


class WrongLabels(ImportFailed):
    """A labels file is unreadable or does not match its task."""


class WrongOutput(ImportFailed):
    """Names or files of the bundles do not match, or cannot be written."""


class DataError(TrainingError):
    """The images or their labels cannot be trained on or evaluated."""


class SettingsConflict(TrainingError):
    """Options are invalid, or contradict each other, the data or the backbone."""


class CannotResume(TrainingError):
    """A checkpoint is unreadable or belongs to another run."""


class CannotWrite(TrainingError):
    """A file cannot be written; an existing file is unchanged."""
