"""Rows of the output: one per image, with columns for each task.

| task type | columns |
|---|---|
| single label | `TASK_label`, `TASK_score` |
| multi label | `TASK_labels`, `TASK_scores`: those of at least the threshold, best first |
| regression | `TASK_value`; `TASK_values` if the task has several outputs |
| embedding | `TASK_embedding` |
| every type | `TASK_in_distribution`: null if the task has no detector |

`--output logits` adds `TASK_logits`. `--output embedding` adds the input of the head as
`TASK_embedding`; an embedding task then has that instead of its output, as in /predict.
"""

from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
from torch import Tensor

from engram_server.batch.decoding import DecodedImage
from engram_server.engine.types import Floats, ServedTask, TaskAnswer, top_predictions
from engram_server.parts.columns import IMAGE_COLUMNS, Column, Kind, Row

Output = Literal["scores", "logits", "embedding"]

THRESHOLD = 0.5  # of multi-label tasks, as the default of /predict


class TaskColumns:
    """The columns of one task."""

    def __init__(self, reference: str, task: ServedTask, output: Output, threshold: float) -> None:
        self.reference = reference
        self.task = task
        self._output = output
        self._threshold = threshold
        self.columns = [
            Column(f"{reference}_{suffix}", kind, size)
            for suffix, kind, size in (
                *self._answer_columns(),
                ("in_distribution", "flag", None),
                *self._output_columns(),
            )
        ]

    def _answer_columns(self) -> list[tuple[str, Kind, int | None]]:
        outputs = len(self._head)
        match self.task.task_type:
            case "single_label":
                return [("label", "text", None), ("score", "number", None)]
            case "multi_label":
                return [("labels", "texts", None), ("scores", "numbers", None)]
            case "regression" if outputs == 1:
                return [("value", "number", None)]
            case "regression":
                return [("values", "numbers", None)]
            case _:
                return [] if self._output == "embedding" else [("embedding", "halves", outputs)]

    def _output_columns(self) -> list[tuple[str, Kind, int | None]]:
        outputs, width = self._head.shape
        if self._output == "logits":
            return [("logits", "halves", outputs)]
        return [("embedding", "halves", width)] if self._output == "embedding" else []

    @property
    def _head(self) -> Tensor:
        return next(iter(self.task.on.values())).head_weight

    def cells(self, answer: TaskAnswer) -> Row:
        """Return the values of the columns for an answer without an error."""
        values = [*self._answer_cells(answer), answer.in_distribution]
        if self._output == "logits":
            values.append(_half(answer.logits))
        elif self._output == "embedding":
            assert answer.features is not None, "the pass returns them"
            values.append(_half(answer.features))
        return {each.name: value for each, value in zip(self.columns, values, strict=True)}

    def _answer_cells(self, answer: TaskAnswer) -> list[Any]:
        match self.task.task_type:
            case "single_label":
                label, _, score = top_predictions([answer], 1)[0][0]
                return [label, score]
            case "multi_label":
                (found,) = top_predictions([answer], len(answer.logits), self._threshold)
                return [[label for label, _, _ in found], [score for _, _, score in found]]
            case "regression":
                values = answer.logits.tolist()
                return values if len(values) == 1 else [values]
            case _:
                return [] if self._output == "embedding" else [_half(answer.logits)]


def _half(values: Floats) -> npt.NDArray[np.float16]:
    """Convert to float16; larger values become its largest, not infinity."""
    largest = np.finfo(np.float16).max
    return values.clip(-largest, largest).astype(np.float16)


def all_columns(tasks: Sequence[TaskColumns]) -> list[Column]:
    return [*IMAGE_COLUMNS, *(column for task in tasks for column in task.columns)]


def make_row(
    image: DecodedImage, tasks: Sequence[TaskColumns], answers: Sequence[TaskAnswer] | None
) -> Row:
    """Return the row of an image; `answers` are None if it could not be decoded.

    A task whose answer is not finite has no values, and the error names it.
    """
    # A file name may have bytes that are not UTF-8.
    path = image.path.encode("utf-8", "replace").decode()
    row: Row = {
        "path": path,
        "digest": image.digest,
        "size_bytes": image.size_bytes,
        "width": image.width,
        "height": image.height,
        "error": image.error,
    }
    problems = []
    for task, answer in zip(tasks, answers or (), strict=answers is not None):
        if answer.error is None:
            row |= task.cells(answer)
        else:
            problems.append(f"{task.reference}: {answer.error}")
    if problems:
        row["error"] = "; ".join(problems)
    return row
