"""Issues of a data set as a CSV file, which people edit and `engram train --exclude` reads back."""

import csv
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

from engram_training.errors import CannotWrite, DataError

IssueKind = Literal["label error", "duplicate", "outlier"]
COLUMNS: Final = ("path", "issue", "detail", "suggested label", "score")


@dataclass(frozen=True, slots=True)
class Issue:
    path: Path
    kind: IssueKind
    detail: str
    score: float  # label error: probability of the label; duplicate: cosine; outlier: distance
    suggested: str = ""
    thumbnails: tuple[bytes, ...] = ()  # JPEG: the image, and of a duplicate the other one


def write_issues(file: Path, issues: Iterable[Issue], root: Path, kept: Sequence[str] = ()) -> None:
    """Write the issues, after the lines in `kept`; paths are relative to the data."""
    try:
        with file.open("w", newline="", encoding="utf-8", errors="surrogateescape") as out:
            table = csv.writer(out, lineterminator="\n")
            table.writerow(COLUMNS)
            out.writelines(f"{line}\n" for line in kept)
            for one in issues:
                path = _relative(one.path, root)
                table.writerow((path, one.kind, one.detail, one.suggested, f"{one.score:.4g}"))
    except OSError as error:
        raise CannotWrite(f"Cannot write '{file}': {error.strerror or error}") from error


def read_lines(file: Path) -> list[str]:
    """The lines of a file of issues, without its header."""
    try:
        text = file.read_text(encoding="utf-8-sig", errors="surrogateescape")
    except OSError as error:
        raise DataError(f"Cannot read '{file}': {error.strerror or error}") from error
    header, *lines = text.splitlines() or [""]
    if "path" not in next(csv.reader([header]), []):
        raise DataError(f"'{file}' has no column 'path' in its first line.")
    return lines


def read_excluded(file: Path, root: Path) -> set[Path]:
    """The images that a file of issues lists; other columns than `path` are not needed."""
    read_lines(file)  # checks it
    with file.open(newline="", encoding="utf-8-sig", errors="surrogateescape") as lines:
        rows = csv.DictReader(lines)
        return {(root / row["path"]).resolve() for row in rows if row["path"]}


def _relative(path: Path, root: Path) -> str:
    return os.path.relpath(path.resolve(), root.resolve())
