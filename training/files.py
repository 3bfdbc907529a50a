"""Files of a run: the bundle, its report and its checkpoint."""

from pathlib import Path

from task_store import files
from training.errors import CannotWrite


def write_whole(path: Path, data: bytes) -> None:
    """Write a file whole or not at all; raises CannotWrite."""
    try:
        files.write_whole(path, data)
    except OSError as error:
        raise CannotWrite(f"'{path}' cannot be written: {error.strerror or error}") from error
