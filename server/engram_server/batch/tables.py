"""Tables with a column of paths, URLs or bytes: CSV, JSON lines and Parquet."""

import csv
import json
import threading
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

from engram_server.errors import UnreadableSource
from engram_server.parts.arrow import require_pyarrow

SUFFIXES = (".csv", ".jsonl", ".parquet")
COLUMNS = ("path", "image", "bytes", "file_name", "filename", "file", "url")
_GROUPS_KEPT = 2  # rows are read in order, by threads that are at most a group apart


class Table(NamedTuple):
    keys: Sequence[str]  # paths or URLs; names of rows if there is `read`
    read: Callable[[int], bytes] | None  # of a column of bytes


def read_table(path: Path, column: str | None) -> Table:
    """Read the column of images; by default, the first of COLUMNS that exists."""
    try:
        if path.suffix == ".parquet":
            return _parquet(path, column)
        with path.open(encoding="utf-8-sig", newline="") as file:
            if path.suffix == ".csv":
                rows = csv.DictReader(file)
                name = _choose(path, column, rows.fieldnames or ())
                return Table([row[name] or "" for row in rows], None)
            return Table(_json_lines(path, column, file), None)
    except (OSError, ValueError, csv.Error) as error:
        raise UnreadableSource(f"'{path}' cannot be read as a table: {error}.") from error


def _json_lines(path: Path, column: str | None, lines: Iterable[str]) -> list[str]:
    keys: list[str] = []
    name = column
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        row = json.loads(line)
        if not isinstance(row, dict):
            raise UnreadableSource(f"'{path}': line {number} is not a JSON object.")
        name = name or _choose(path, None, list(row))
        if not isinstance(value := row.get(name), str):
            raise UnreadableSource(f"'{path}': line {number} has no text in '{name}'.")
        keys.append(value)
    return keys


def _choose(path: Path, column: str | None, names: Sequence[str]) -> str:
    wanted = COLUMNS if column is None else (column,)
    found = next((name for name in wanted if name in names), None)
    if found is None:
        missing = f"no column '{column}'" if column else "no column with a usual name"
        raise UnreadableSource(
            f"'{path}' has {missing}; its columns are {', '.join(names)}. Select one with --column."
        )
    return found


def _parquet(path: Path, column: str | None) -> Table:
    arrow, parquet = require_pyarrow(f"Reading '{path}'")
    try:
        file = parquet.ParquetFile(path)
        schema = file.schema_arrow
        name = _choose(path, column, schema.names)
        kind = schema.field(name).type
        if arrow.types.is_string(kind) or arrow.types.is_large_string(kind):
            return Table([text or "" for text in file.read([name])[name].to_pylist()], None)
        if arrow.types.is_struct(kind) and kind.get_field_index("bytes") >= 0:
            member: str | None = "bytes"  # as Hugging Face's datasets store images
        elif arrow.types.is_binary(kind) or arrow.types.is_large_binary(kind):
            member = None
        else:
            raise UnreadableSource(f"Column '{name}' of '{path}' has {kind}, not paths or bytes.")
    except arrow.ArrowException as error:
        raise UnreadableSource(f"'{path}' cannot be read as Parquet: {error}.") from error
    keys = [f"{path}#{row}" for row in range(file.metadata.num_rows)]
    return Table(keys, _ParquetBytes(file, name, member).read)


class _ParquetBytes:
    """Bytes by row; keeps the row groups read last."""

    def __init__(self, file: Any, column: str, member: str | None) -> None:  # noqa: ANN401
        self._file = file
        self._column = column
        self._member = member
        groups = range(file.metadata.num_row_groups)
        counts = (file.metadata.row_group(group).num_rows for group in groups)
        self._starts = list(accumulate(counts, initial=0))
        self._kept: OrderedDict[int, Any] = OrderedDict()
        self._lock = threading.Lock()

    def read(self, row: int) -> bytes:
        group = bisect_right(self._starts, row) - 1
        value = self._group(group)[row - self._starts[group]].as_py()
        if self._member is not None and value is not None:
            value = value[self._member]
        if value is None:
            raise OSError("the cell is empty")
        return bytes(value)

    def _group(self, group: int) -> Any:  # noqa: ANN401 - pyarrow has no types
        with self._lock:
            if group not in self._kept:
                self._kept[group] = self._file.read_row_group(group, [self._column])[self._column]
                if len(self._kept) > _GROUPS_KEPT:
                    self._kept.popitem(last=False)
            return self._kept[group]
