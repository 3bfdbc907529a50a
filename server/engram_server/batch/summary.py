"""Counts over all rows of a batch run, also over parts that an earlier run wrote."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from engram_server.batch.rows import TaskColumns
from engram_server.parts.columns import Row

ERRORS_KEPT = 10


@dataclass(slots=True)
class TaskSummary:
    classes: Counter[str] = field(default_factory=Counter)
    checked: int = 0  # by the out-of-distribution detector
    out_of_distribution: int = 0


class Summary:
    def __init__(self, tasks: Sequence[TaskColumns]) -> None:
        self.images = 0
        self.errors = 0
        self.first_errors: list[tuple[str, str]] = []  # path and reason
        self.tasks = {task.reference: TaskSummary() for task in tasks}
        self._names = {task.reference: [column.name for column in task.columns] for task in tasks}

    @property
    def columns(self) -> list[str]:
        """The columns that `add` reads."""
        read = ("_label", "_labels", "_in_distribution")
        named = (name for names in self._names.values() for name in names)
        return ["path", "error", *(name for name in named if name.endswith(read))]

    def add(self, rows: Iterable[Row]) -> None:
        for row in rows:
            self.images += 1
            if (error := row.get("error")) is not None:
                self.errors += 1
                if len(self.first_errors) < ERRORS_KEPT:
                    self.first_errors.append((row["path"], error))
            for reference, task in self.tasks.items():
                _count(task, reference, row)

    def as_json(self) -> dict[str, object]:
        return {
            "images": self.images,
            "errors": self.errors,
            "first_errors": [{"path": path, "error": error} for path, error in self.first_errors],
            "tasks": {
                reference: {
                    "classes": dict(task.classes.most_common()),
                    "in_distribution_checked": task.checked,
                    "out_of_distribution": task.out_of_distribution,
                }
                for reference, task in self.tasks.items()
            },
        }


def _count(task: TaskSummary, reference: str, row: Row) -> None:
    if (label := row.get(f"{reference}_label")) is not None:
        task.classes[label] += 1
    task.classes.update(row.get(f"{reference}_labels") or ())
    near = row.get(f"{reference}_in_distribution")
    if near is not None:
        task.checked += 1
        task.out_of_distribution += not near
