"""The output of a batch run: part files with a fixed range of the source each, and a manifest.

A part appears whole or not at all, so a run that was killed continues with the parts that are
missing. The manifest says what the parts were made from; a run with other inputs is rejected.
"""

import csv
import fcntl
import io
import json
import os
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

from engram_bundle.files import STAGING_SUFFIX, make_directories, write_whole

from engram_server.errors import UnusableOutput
from engram_server.parts.arrow import require_pyarrow
from engram_server.parts.columns import Column, Kind, Row

Format = Literal["parquet", "csv"]
Json = dict[str, Any]

MANIFEST = "_manifest.json"
_SUFFIXES = ("parquet", "csv", "npy")  # of part files, those of kept tensors included
_WRITING = "Parquet output (instead of --format csv)"


class Output:
    """A folder of part files."""

    def __init__(
        self,
        folder: Path,
        file_format: Format,
        columns: Sequence[Column],
        *,
        option: str = "--out",
    ) -> None:
        self.folder = folder
        self._option = option  # that names the folder, for messages
        self._format = file_format
        self._columns = columns
        self._handle: int | None = None  # of the folder, locked during a run
        if file_format == "parquet":
            require_pyarrow(_WRITING)

    def open(self, manifest: Json, *, restart: bool) -> None:
        """Begin or continue a run, or raise UnusableOutput if it has other inputs."""
        try:
            make_directories(self.folder)
            self._lock()
            for staged in self.folder.glob(f".*{STAGING_SUFFIX}"):
                staged.unlink()  # of a run that was killed
            if restart:
                self._delete()
            earlier = read_manifest(self.folder)
            if earlier is None:
                self._check_empty()
                write_whole(self.folder / MANIFEST, json.dumps(manifest, indent=1).encode())
        except OSError as error:
            raise write_failure(self.folder, error) from error
        if earlier is not None and (changes := list(differences(earlier, manifest))):
            raise UnusableOutput(
                f"'{self.folder}' has a run with other inputs: {'; '.join(changes)}. Continue it "
                f"with the same inputs (a version as in --tasks pets@3), choose another "
                f"{self._option}, or begin again with --restart."
            )

    def close(self) -> None:
        """Let another run write to the folder."""
        if self._handle is not None:
            os.close(self._handle)
            self._handle = None

    def finished(self) -> list[int]:
        """The numbers of the parts that are complete."""
        names = (re.fullmatch(r"part-(\d+)", path.stem) for path in self._parts())
        return sorted(int(name[1]) for name in names if name)

    def write(self, number: int, rows: Sequence[Row]) -> None:
        path = self._path(number)
        encode = self._csv if self._format == "csv" else self._parquet
        try:
            write_whole(path, encode(rows))
        except OSError as error:
            raise write_failure(path, error) from error

    def read(self, number: int, columns: Sequence[str]) -> list[Row]:
        """Read some columns of a finished part, all of text, integers, lists of text or flags."""
        path = self._path(number)
        if self._format == "csv":
            with path.open(encoding="utf-8", newline="") as file:
                kinds = {one.name: one.kind for one in self._columns if one.name in columns}
                return [
                    {name: _from_csv(kind, row[name]) for name, kind in kinds.items()}
                    for row in csv.DictReader(file)
                ]
        _, parquet = require_pyarrow(_WRITING)
        rows: list[Row] = parquet.read_table(path, columns=list(columns)).to_pylist()
        return rows

    def _path(self, number: int) -> Path:
        return self.folder / f"part-{number:05}.{self._format}"

    def _parts(self) -> list[Path]:
        return list(self.folder.glob(f"part-*.{self._format}"))

    def _lock(self) -> None:
        """Reject a second run at the same time. The lock ends with the process."""
        self._handle = os.open(self.folder, os.O_RDONLY)
        try:
            fcntl.flock(self._handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UnusableOutput(
                f"Another run is writing to '{self.folder}'. Wait for its end, or choose another "
                f"{self._option}."
            ) from None
        except OSError:
            pass  # a file system without locks on folders, such as NFS

    def _check_empty(self) -> None:
        if self._parts():
            raise UnusableOutput(
                f"'{self.folder}' has part files and no {MANIFEST}. Choose another {self._option}, "
                f"or replace them with --restart."
            )

    def _delete(self) -> None:
        # The manifest last: what is left of a run that is deleted stays a valid one.
        for suffix in _SUFFIXES:
            for path in self.folder.glob(f"part-*.{suffix}"):
                path.unlink()
        (self.folder / MANIFEST).unlink(missing_ok=True)

    def _csv(self, rows: Sequence[Row]) -> bytes:
        text = io.StringIO()
        table = csv.writer(text, lineterminator="\n")
        table.writerow([column.name for column in self._columns])
        for row in rows:
            table.writerow([_to_csv(row.get(column.name)) for column in self._columns])
        return text.getvalue().encode()

    def _parquet(self, rows: Sequence[Row]) -> bytes:
        arrow, parquet = require_pyarrow(_WRITING)
        arrays = [
            arrow.array([row.get(column.name) for row in rows], _arrow_type(arrow, column))
            for column in self._columns
        ]
        table = arrow.table(arrays, names=[column.name for column in self._columns])
        data = io.BytesIO()
        parquet.write_table(table, data, compression="zstd")
        return data.getvalue()


def write_failure(path: Path, error: OSError) -> UnusableOutput:
    return UnusableOutput(
        f"Cannot write '{path}': {error.strerror or error}. Finished parts are kept: fix the "
        f"cause and run the same command again."
    )


def read_manifest(folder: Path) -> Json | None:
    """Return the manifest of an earlier run; None if there is none."""
    path = folder / MANIFEST
    try:
        return dict(json.loads(path.read_bytes()))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise UnusableOutput(f"Cannot read '{path}': {error.strerror or error}.") from error
    except (ValueError, TypeError) as error:
        raise UnusableOutput(f"'{path}' is damaged: {error}. Begin again with --restart.") from None


def _arrow_type(arrow: Any, column: Column) -> Any:  # noqa: ANN401 - pyarrow has no types
    types: dict[Kind, Callable[[], Any]] = {
        "text": arrow.string,
        "integer": arrow.int64,
        "number": arrow.float32,
        "flag": arrow.bool_,
        "texts": lambda: arrow.list_(arrow.string()),
        "numbers": lambda: arrow.list_(arrow.float32()),
        "halves": lambda: arrow.list_(arrow.float16(), column.size),
    }
    return types[column.kind]()


def _to_csv(value: Any) -> object:  # noqa: ANN401 - a cell of any kind
    """Lists and flags are written as JSON, missing values as nothing."""
    if value is None or (isinstance(value, str | int | float) and not isinstance(value, bool)):
        return value
    return json.dumps(value if isinstance(value, list | bool) else value.tolist())


def _from_csv(kind: Kind, text: str) -> object:
    if kind == "text":
        return text or None
    return json.loads(text) if text else None


def differences(earlier: Json, now: Json, prefix: str = "") -> Iterator[str]:
    """Name each value that differs, and both values."""
    for name in dict.fromkeys([*earlier, *now]):
        was, value = earlier.get(name), now.get(name)
        if isinstance(was, dict) and isinstance(value, dict):
            yield from differences(was, value, f"{prefix}{name}.")
        elif was != value:
            yield f"{prefix}{name} was {json.dumps(was)} and is now {json.dumps(value)}"
