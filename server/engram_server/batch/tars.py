"""Images in tar files, as webdataset stores them. Each is read at its offset, without a scan."""

import os
import tarfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from engram_vit.images import is_photo_name

from engram_server.errors import SourceError


class _Member(NamedTuple):
    file: int  # descriptor
    offset: int
    size: int


def read_tars(paths: Sequence[Path]) -> tuple[list[str], Callable[[int], bytes]]:
    """Return the keys of all images in the order of the files, and a function that reads one."""
    keys: list[str] = []
    members: list[_Member] = []
    for path in paths:
        try:
            with tarfile.open(path, "r:") as archive:
                # Open until the process ends: any thread may read at any time.
                file = os.open(path, os.O_RDONLY)
                for member in archive:
                    hidden = Path(member.name).name.startswith(".")
                    if member.isfile() and is_photo_name(member.name) and not hidden:
                        keys.append(f"{path}/{member.name}")
                        members.append(_Member(file, member.offset_data, member.size))
        except (tarfile.TarError, OSError) as error:
            raise SourceError(
                f"'{path}' cannot be read as a tar file: {error}. Compressed tar files are not "
                f"supported: decompress it first."
            ) from error

    def read(index: int) -> bytes:
        member = members[index]
        data = os.pread(member.file, member.size, member.offset)
        if len(data) < member.size:
            raise OSError("the tar file is truncated")
        return data

    return keys, read
