"""Read tables of paths and labels, CSV or JSONL; every error names the line.

CSV: `path,label` with or without that header; further columns and `;` within a cell are further
labels; a column `split` has train, val or test. JSONL: `{"path": …, "label": …}`, where the label
(or `labels`) is a text, a number or a list of them. Paths are relative to the table.
"""

import csv
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from engram_bundle.untrusted import printable

from engram_training.errors import DataError

TABLE_SUFFIXES: Final = (".csv", ".tsv", ".jsonl")
PATH_NAMES: Final = ("path", "file", "filename", "image")
LABEL_NAMES: Final = ("label", "labels", "class", "classes", "target", "value")


@dataclass(frozen=True, slots=True)
class Row:
    path: Path
    values: tuple[str, ...]  # as written
    split: str | None
    where: str  # location, for messages
    several: bool = False  # the format allows several labels


def read_table(path: Path) -> list[Row]:
    try:
        # The byte order mark of spreadsheets is not part of the first cell.
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise DataError(f"'{path}' is not UTF-8 text.") from error
    except OSError as error:
        raise DataError(f"Cannot read '{path}': {error.strerror}") from error
    lines = text.splitlines()
    if path.suffix.lower() == ".jsonl":
        return list(_json_rows(path, lines))
    return list(_csv_rows(path, lines, "\t" if path.suffix.lower() == ".tsv" else ","))


def _csv_rows(table: Path, lines: list[str], delimiter: str) -> Iterator[Row]:
    reader = csv.reader(lines, delimiter=delimiter, skipinitialspace=True)
    path_column, split_column, several = 0, None, False
    labels: list[int] | None = None
    for cells in _checked(reader, table):
        if not any(cell.strip() for cell in cells):
            continue
        where = f"line {reader.line_num} of '{table}'"
        names = [cell.strip().lower() for cell in cells]
        if labels is None:
            labels = list(range(1, len(cells)))
            path_column = next((i for i, name in enumerate(names) if name in PATH_NAMES), -1)
            if path_column >= 0:
                split_column = names.index("split") if "split" in names else None
                named = [i for i, name in enumerate(names) if name in LABEL_NAMES]
                others = {path_column, split_column}
                labels = named or [i for i in range(len(names)) if i not in others]
                several = "labels" in names or "classes" in names or len(labels) > 1
                continue
            path_column = 0
            several = len(labels) > 1
        if len(cells) <= path_column or not cells[path_column].strip():
            raise DataError(f"{where} has no path")
        cut = [part.strip() for i in labels if i < len(cells) for part in cells[i].split(";")]
        found = [part for part in cut if part]
        if not found and not several:
            raise DataError(f"{where} has no label")
        split = cells[split_column].strip().lower() if split_column is not None else None
        several_here = several or any(";" in cells[i] for i in labels if i < len(cells))
        path = table.parent / cells[path_column].strip()
        yield Row(path, tuple(found), split or None, where, several_here)


def _checked(reader: Iterator[list[str]], table: Path) -> Iterator[list[str]]:
    try:
        yield from reader
    except csv.Error as error:
        raise DataError(f"'{table}' is not valid CSV: {printable(str(error), 120)}") from error


def _json_rows(table: Path, lines: list[str]) -> Iterator[Row]:
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        where = f"line {number} of '{table}'"
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise DataError(f"{where} is not valid JSON: {printable(str(error), 120)}") from error
        if not isinstance(row, dict):
            raise DataError(f"{where} is not a JSON object")
        path = next((row[name] for name in PATH_NAMES if isinstance(row.get(name), str)), None)
        if not path:
            raise DataError(f"{where} has no path")
        label = next((row[name] for name in LABEL_NAMES if row.get(name) is not None), None)
        if label is None:
            raise DataError(f"{where} has no label")
        split = row.get("split")
        if split is not None and not isinstance(split, str):
            raise DataError(f"{where} has the split {printable(repr(split))}, which is not a text")
        several = isinstance(label, list)
        values = tuple(_json_value(each, where) for each in (label if several else [label]))
        yield Row(table.parent / path, values, split or None, where, several)


def _json_value(value: object, where: str) -> str:
    if isinstance(value, str):
        return value
    if isinstance(value, int | float) and not isinstance(value, bool):
        return repr(value)  # 3 is a class label, 3.0 a quantity
    raise DataError(f"{where} has the label {printable(repr(value))}. Use a text or a number.")
