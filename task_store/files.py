"""Writing a file whole or not at all: the one function for it."""

import contextlib
import os
import secrets
from pathlib import Path

# Of the names that files have while they are written.
STAGING_SUFFIX = ".part"


def write_whole(
    target: Path,
    data: bytes,
    *,
    staged: Path | None = None,
    replace: bool = True,
    durable: bool = True,
) -> bool:
    """Readers see the old file or the new one, and a crash leaves one of the two.

    The bytes are first written to `staged`, in the same folder. Without `replace` a target that
    exists is left as it is, and the answer is False. With `durable` the file survives power loss
    once this has returned. Raises OSError.
    """
    name = f".{target.name}.{secrets.token_hex(6)}{STAGING_SUFFIX}"
    staged = staged or target.with_name(name)
    try:
        with staged.open("xb") as file:
            file.write(data)
            if durable:
                file.flush()
                os.fsync(file.fileno())
        if replace:
            os.replace(staged, target)
        else:
            try:
                # A link never replaces: among racing writers exactly one succeeds.
                os.link(staged, target)
            except FileExistsError:
                return False
    finally:
        # Gone already when it was renamed.
        with contextlib.suppress(OSError):
            staged.unlink()
    if durable:
        sync_directory(target.parent)
    return True


def make_directories(path: Path) -> None:
    """Create a folder and its parents, each name synced into the folder above it."""
    if path.is_dir():
        return
    make_directories(path.parent)
    # Another writer may be making the same folder right now.
    with contextlib.suppress(FileExistsError):
        path.mkdir()
    if not path.is_dir():
        raise NotADirectoryError(f"{path} is not a folder")
    sync_directory(path.parent)


def sync_directory(path: Path) -> None:
    """Make the names in a directory survive power loss."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
