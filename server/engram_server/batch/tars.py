"""Images in tar files, as webdataset stores them. Each is read at its offset, without a scan."""

import tarfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from engram_vit.images import is_photo_name

from engram_server.errors import UnreadableSource

SUFFIXES = (".tar", ".tar.gz", ".tgz")  # compressed ones are rejected with the reason


class _Member(NamedTuple):
    path: Path
    offset: int
    size: int


def read_tars(paths: Sequence[Path]) -> tuple[list[str], Callable[[int], bytes]]:
    """Return the keys of all images in the order of the files, and a function that reads one."""
    keys: list[str] = []
    members: list[_Member] = []
    for path in paths:
        try:
            with tarfile.open(path, "r:") as archive:
                for member in archive:
                    hidden = Path(member.name).name.startswith(".")
                    if member.isfile() and is_photo_name(member.name) and not hidden:
                        keys.append(f"{path}/{member.name}")
                        members.append(_Member(path, member.offset_data, member.size))
        except (tarfile.TarError, OSError) as error:
            raise UnreadableSource(
                f"'{path}' is not a complete, uncompressed tar file: {error}. Decompress it, or "
                f"download it again."
            ) from error

    def read(index: int) -> bytes:
        member = members[index]
        try:
            with member.path.open("rb") as file:
                file.seek(member.offset)
                return file.read(member.size)
        except OSError as error:
            raise UnreadableSource(f"Cannot read '{member.path}': {error.strerror}.") from error

    return keys, read
