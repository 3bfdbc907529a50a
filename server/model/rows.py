"""Which rows a pass has: every requested (image, task) pair, and where each finds its keys.

Pure bookkeeping on the host, from numpy to a few index tensors on the device. Rows are in image
order. Attention takes them grouped, by image for the keys of the image and by task for the keys of
the memory, and so do adapters, by task; a `Grouping` says how rows move into such a padded layout
and back.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from server.model.tasks import Task, TaskStack

Indices = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Grouping:
    """Rows (R, …) as `groups` of equal width, padded; None where rows already lie that way."""

    groups: int
    width: int
    source: Tensor | None  # (groups · width,): the row at each place; holes repeat row 0, dropped
    places: Tensor | None  # (R,): the place of each row

    @classmethod
    def of(cls, group_of_row: Indices, groups: int, device: torch.device) -> "Grouping":
        counts = np.bincount(group_of_row, minlength=groups)
        width = int(counts.max(initial=0))
        order = np.argsort(group_of_row, kind="stable")
        starts = np.cumsum(counts) - counts
        position = np.empty_like(group_of_row)
        position[order] = np.arange(len(group_of_row)) - starts[group_of_row[order]]
        places = group_of_row * width + position
        if np.array_equal(places, np.arange(groups * width)):
            return cls(groups, width, None, None)
        source = np.zeros(groups * width, dtype=np.int64)
        source[places] = np.arange(len(places))
        return cls(groups, width, _to_device(source, device), _to_device(places, device))

    def pad(self, rows: Tensor) -> Tensor:
        """(R, …) to (groups, width, …)."""
        if self.source is not None:
            rows = rows.index_select(0, self.source)
        return rows.reshape(self.groups, self.width, *rows.shape[1:])

    def unpad(self, padded: Tensor) -> Tensor:
        """(groups, width, …) to (R, …)."""
        rows = padded.reshape(self.groups * self.width, *padded.shape[2:])
        return rows if self.places is None else rows.index_select(0, self.places)


@dataclass(frozen=True, slots=True)
class AdaptedRows:
    """The task rows that an adapter changes, by adapter."""

    rows: Tensor | None  # (n,) which of the task rows; None: all
    by_adapter: Grouping

    @classmethod
    def of(cls, adapter_of_row: Indices, adapters: int, device: torch.device) -> "AdaptedRows":
        """`adapter_of_row` is -1 where a row has none."""
        (rows,) = np.nonzero(adapter_of_row >= 0)
        by_adapter = Grouping.of(adapter_of_row[rows], adapters, device)
        everywhere = len(rows) == len(adapter_of_row)
        return cls(None if everywhere else _to_device(rows, device), by_adapter)

    def pad(self, task_rows: Tensor) -> Tensor:
        """(R, …) to (adapters, width, …)."""
        rows = task_rows if self.rows is None else task_rows.index_select(0, self.rows)
        return self.by_adapter.pad(rows)

    def add(self, padded: Tensor, task_rows: Tensor) -> None:
        """Adds (adapters, width, …) to the rows it stands for, in place."""
        change = self.by_adapter.unpad(padded)
        if self.rows is None:
            task_rows.add_(change)
        else:
            task_rows.index_add_(0, self.rows, change)


@dataclass(frozen=True, slots=True)
class RowPlan:
    """The task rows of one pass: those of cold images first, then those of warm ones."""

    row_of: Indices  # (images, T) on the host: the row of an image and a place in the stack, or -1
    task_of_row: Tensor  # (R,) place in the stack
    cold: Grouping  # the first `cold_rows` rows by cold image
    warm: Grouping  # the others by warm image
    cold_rows: int
    starts: Tensor  # (images + 1,): the first row of each image, and the row after the last
    by_task: Grouping
    lineage: Tensor | None  # (R, A) rows of self and ancestors; None where no task has any
    lineage_bias: Tensor | None  # (R, 1, A): -inf where a row has fewer ancestors
    adapted: AdaptedRows | None  # None where no task has an adapter

    @classmethod
    def of(
        cls,
        stack: TaskStack,
        requested: Sequence[Sequence[Task]],
        cold: int,
        device: torch.device,
        dtype: torch.dtype,
    ) -> "RowPlan":
        """`requested[i]` are the tasks of image i; the first `cold` images are cold."""
        present = _with_ancestors(stack, requested)
        images, tasks = np.nonzero(present)
        row_of = np.full(present.shape, -1, dtype=np.int64)
        row_of[images, tasks] = np.arange(len(images))
        starts = np.searchsorted(images, np.arange(len(requested) + 1))
        cold_rows = int(starts[cold])
        lineage, bias = _lineage_rows(stack, row_of, images, tasks)
        adapted = None
        if stack.adapters is not None:
            adapter_of_row = stack.adapters.place_of_task[tasks]
            adapted = AdaptedRows.of(adapter_of_row, len(stack.adapters), device)
        return cls(
            row_of=row_of,
            task_of_row=_to_device(tasks, device),
            cold=Grouping.of(images[:cold_rows], cold, device),
            warm=Grouping.of(images[cold_rows:] - cold, len(requested) - cold, device),
            cold_rows=cold_rows,
            starts=_to_device(starts, device),
            by_task=Grouping.of(tasks, len(stack), device),
            lineage=None if lineage is None else _to_device(lineage, device),
            lineage_bias=None if bias is None else _to_device(bias, device).to(dtype),
            adapted=adapted,
        )

    def rows_of(self, place: int, images: Sequence[int]) -> Tensor:
        """The rows, for some images, of the task at a place in the stack."""
        return _to_device(self.row_of[images, place], self.task_of_row.device)


def _with_ancestors(stack: TaskStack, requested: Sequence[Sequence[Task]]) -> npt.NDArray[np.bool_]:
    """(images, T): who has a row where. A child's ancestors have one wherever the child has."""
    asked = np.zeros((len(requested), len(stack)), dtype=bool)
    for row, tasks in zip(asked, requested, strict=True):
        row[[stack.place(task) for task in tasks if task.token is not None]] = True
    if stack.lineage.shape[1] == 1:
        return asked
    attends = np.zeros((len(stack), len(stack)), dtype=bool)
    for task, line in enumerate(stack.lineage):
        attends[task, line[line >= 0]] = True
    return asked @ attends


def _lineage_rows(
    stack: TaskStack, row_of: Indices, images: Indices, tasks: Indices
) -> tuple[Indices | None, npt.NDArray[np.float32] | None]:
    if stack.lineage.shape[1] == 1:
        return None, None
    members = stack.lineage[tasks]  # (R, A)
    absent = members < 0
    # A row stands in for the ancestors it lacks. No other image's may: -inf and 0 keep its numbers
    # out, unless they are NaN or infinite.
    itself = np.arange(len(tasks))[:, None]
    rows = np.where(absent, itself, row_of[images[:, None], members])
    bias = np.where(absent, -np.inf, 0.0).astype(np.float32)[:, None, :]
    return rows, bias


def _to_device(array: npt.NDArray[np.generic], device: torch.device) -> Tensor:
    tensor = torch.from_numpy(np.ascontiguousarray(array))  # kernels read it number by number
    return tensor if device.type == "cpu" else tensor.pin_memory().to(device, non_blocking=True)
