"""Columns of rows, with those that every image has."""

from dataclasses import dataclass
from typing import Any, Literal

Kind = Literal["text", "integer", "number", "flag", "texts", "numbers", "halves"]
Row = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Column:
    name: str
    kind: Kind
    size: int | None = None  # of each list, if it is fixed


IMAGE_COLUMNS = (
    Column("path", "text"),
    Column("digest", "text"),
    Column("size_bytes", "integer"),
    Column("width", "integer"),
    Column("height", "integer"),
    Column("error", "text"),
)
