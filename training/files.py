"""Files of a run: the bundle, its report and its checkpoint."""

from pathlib import Path

from task_store import BundleError
from task_store.bundle import write_atomically
from training.errors import CannotWrite


def write_whole(path: Path, data: bytes) -> None:
    """Write a file whole or not at all; raises CannotWrite."""
    try:
        write_atomically(path, data)
    except BundleError as error:
        cause = error.__cause__
        reason = cause.strerror if isinstance(cause, OSError) else None
        raise CannotWrite(f"'{path}' cannot be written: {reason or error}") from error
