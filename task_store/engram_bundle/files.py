"""Atomic and durable file writes."""

import contextlib
import os
import secrets
from pathlib import Path

STAGING_SUFFIX = ".part"  # of files that are being written


def write_whole(
    target: Path,
    data: bytes,
    *,
    staged: Path | None = None,
    replace: bool = True,
    durable: bool = True,
) -> bool:
    """Write a file atomically: readers and a crash see the old file or the new one.

    The bytes are first written to `staged`, in the same folder. Without `replace`, an existing
    target stays as it is and the result is False. With `durable`, the file survives power loss
    once this returns. Raises OSError.
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
        # Already gone if it was renamed.
        with contextlib.suppress(OSError):
            staged.unlink()
    if durable:
        sync_directory(target.parent)
    return True


def make_directories(path: Path, *, within: Path | None = None) -> None:
    """Create a folder and its parents, and sync each name to disk.

    `within` itself is never created: without it, FileNotFoundError.
    """
    if path.is_dir():
        return
    if path == within:
        raise FileNotFoundError(f"the folder {path} does not exist")
    make_directories(path.parent, within=within)
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
