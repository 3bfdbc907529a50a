"""The task rows of a pass: one per (image, task) pair, and the index tensors that find their keys.

Computed with NumPy on the host, then copied to the device. Rows are in image order. Attention
groups them by image (keys of the image) and by task (keys of the memory); LoRA groups them by task.
A `Grouping` moves rows into such a padded layout and back.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from engram_server.model.tasks import Task, TaskStack

Indices = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Grouping:
    """Rows (R, …) as padded groups of equal width; the indices are None if no row has to move."""

    groups: int
    width: int
    source: Tensor | None  # (groups · width,): the row at each position; padding repeats row 0
    positions: Tensor | None  # (R,): the position of each row

    @classmethod
    def of(cls, group_of_row: Indices, groups: int, device: torch.device) -> "Grouping":
        counts = np.bincount(group_of_row, minlength=groups)
        width = int(counts.max(initial=0))
        order = np.argsort(group_of_row, kind="stable")
        starts = np.cumsum(counts) - counts
        within = np.empty_like(group_of_row)
        within[order] = np.arange(len(group_of_row)) - starts[group_of_row[order]]
        positions = group_of_row * width + within
        if np.array_equal(positions, np.arange(groups * width)):
            return cls(groups, width, None, None)
        source = np.zeros(groups * width, dtype=np.int64)
        source[positions] = np.arange(len(positions))
        return cls(groups, width, _to_device(source, device), _to_device(positions, device))

    def pad(self, rows: Tensor) -> Tensor:
        """Move (R, …) to (groups, width, …)."""
        if self.source is not None:
            rows = rows.index_select(0, self.source)
        return rows.reshape(self.groups, self.width, *rows.shape[1:])

    def unpad(self, padded: Tensor) -> Tensor:
        """Move (groups, width, …) to (R, …)."""
        rows = padded.reshape(self.groups * self.width, *padded.shape[2:])
        return rows if self.positions is None else rows.index_select(0, self.positions)


@dataclass(frozen=True, slots=True)
class LoraRows:
    rows: Tensor | None  # (n,) numbers of these task rows; None: all
    by_lora: Grouping

    @classmethod
    def of(cls, lora_of_row: Indices, loras: int, device: torch.device) -> "LoraRows":
        """`lora_of_row` is the index into the batched LoRA, or -1 for a row without."""
        (rows,) = np.nonzero(lora_of_row >= 0)
        by_lora = Grouping.of(lora_of_row[rows], loras, device)
        everywhere = len(rows) == len(lora_of_row)
        return cls(None if everywhere else _to_device(rows, device), by_lora)

    def pad(self, task_rows: Tensor) -> Tensor:
        """Move (R, …) to (T, width, …)."""
        rows = task_rows if self.rows is None else task_rows.index_select(0, self.rows)
        return self.by_lora.pad(rows)

    def add(self, padded: Tensor, task_rows: Tensor) -> None:
        """Add (T, width, …) to the task rows, in place."""
        change = self.by_lora.unpad(padded)
        if self.rows is None:
            task_rows.add_(change)
        else:
            task_rows.index_add_(0, self.rows, change)


@dataclass(frozen=True, slots=True)
class RowPlan:
    """The task rows of one pass: those of cold images first, then those of warm ones."""

    row_of: Indices  # (images, T) on the host: the row of each pair, or -1
    task_of_row: Tensor  # (R,) position in the stack
    cold: Grouping  # the first `cold_rows` rows by cold image
    warm: Grouping  # the others by warm image
    cold_rows: int
    starts: Tensor  # (images + 1,): the first row of each image, and the row after the last
    by_task: Grouping
    lineage: Tensor | None  # (R, A) rows of self and ancestors; None if no task has ancestors
    lineage_bias: Tensor | None  # (R, 1, A): -inf where a row has fewer ancestors
    lora_rows: LoraRows | None  # None if no task has LoRA

    @classmethod
    def of(
        cls,
        stack: TaskStack,
        requested: Sequence[Sequence[Task]],
        cold: int,
        device: torch.device,
        dtype: torch.dtype,
    ) -> "RowPlan":
        """Plan rows for `requested[i]`, the tasks of image i; the first `cold` images are cold."""
        present = _with_ancestors(stack, requested)
        images, tasks = np.nonzero(present)
        row_of = np.full(present.shape, -1, dtype=np.int64)
        row_of[images, tasks] = np.arange(len(images))
        starts = np.searchsorted(images, np.arange(len(requested) + 1))
        cold_rows = int(starts[cold])
        lineage, bias = _lineage_rows(stack, row_of, images, tasks)
        lora_rows = None
        if stack.loras is not None:
            lora_of_row = stack.loras.index_of_task[tasks]
            lora_rows = LoraRows.of(lora_of_row, len(stack.loras), device)
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
            lora_rows=lora_rows,
        )

    def rows_of(self, position: int, images: Sequence[int]) -> Tensor:
        """Return the row numbers, for some images, of the task at a position in the stack."""
        return _to_device(self.row_of[images, position], self.task_of_row.device)


def _with_ancestors(stack: TaskStack, requested: Sequence[Sequence[Task]]) -> npt.NDArray[np.bool_]:
    """Return which pairs have a row, (images, T); ancestors have one wherever a child has one."""
    present = np.zeros((len(requested), len(stack)), dtype=bool)
    for row, tasks in zip(present, requested, strict=True):
        row[[stack.position(task) for task in tasks if task.token is not None]] = True
    if stack.lineage.shape[1] == 1:
        return present
    attends = np.zeros((len(stack), len(stack)), dtype=bool)
    for task, line in enumerate(stack.lineage):
        attends[task, line[line >= 0]] = True
    return present @ attends


def _lineage_rows(
    stack: TaskStack, row_of: Indices, images: Indices, tasks: Indices
) -> tuple[Indices | None, npt.NDArray[np.float32] | None]:
    if stack.lineage.shape[1] == 1:
        return None, None
    members = stack.lineage[tasks]  # (R, A)
    absent = members < 0
    # Padding points to the row itself, never to a row of another image: a bias of -inf would not
    # keep a NaN or an infinity of that image out.
    itself = np.arange(len(tasks))[:, None]
    rows = np.where(absent, itself, row_of[images[:, None], members])
    bias = np.where(absent, -np.inf, 0.0).astype(np.float32)[:, None, :]
    return rows, bias


def _to_device(array: npt.NDArray[np.generic], device: torch.device) -> Tensor:
    tensor = torch.from_numpy(np.ascontiguousarray(array))  # Triton kernels need it contiguous
    return tensor if device.type == "cpu" else tensor.pin_memory().to(device, non_blocking=True)
