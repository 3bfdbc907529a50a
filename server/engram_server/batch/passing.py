"""One batch of pixels to answers, on one device."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch

from engram_server.engine.types import EngineConfig, Floats, Pixels, ServedTask, TaskAnswer
from engram_server.engine.worker import NOT_FINITE, in_one_copy
from engram_server.errors import BatchFailed
from engram_server.model.backbone import Backbone
from engram_server.model.masked_pass import TaskLogits, masked_pass
from engram_server.model.tasks import StackCache


class DevicePass:
    """Runs tasks on one device. Not thread-safe."""

    def __init__(self, backbone: Backbone, config: EngineConfig, *, features: bool) -> None:
        self._backbone = replace(backbone, compiled=config.compiled)
        self._features = features
        self._stacks = StackCache()

    def __call__(
        self, tasks: Sequence[ServedTask], images: Sequence[Pixels]
    ) -> list[list[TaskAnswer]]:
        """Return the answers of all tasks, in their order, for each image."""
        device = self._backbone.device
        by_task = {task.on[device]: task for task in tasks}  # two references may be one task
        pixels = torch.from_numpy(np.stack(images)).to(device)
        requested = [list(by_task)] * len(images)
        try:
            with torch.inference_mode():
                result = masked_pass(self._backbone, pixels, None, requested, self._stacks)
        except torch.OutOfMemoryError as error:
            raise BatchFailed(
                f"{device} ran out of memory with a batch of {len(images)} images. Set "
                f"ENGRAM_BUDGET_ROWS to a smaller number and run the same command again."
            ) from error
        found = {each.task: self._answers(by_task[each.task], each) for each in result.logits}
        columns = [
            [replace(answer, served=task) for answer in found[task.on[device]]] for task in tasks
        ]
        return [list(row) for row in zip(*columns, strict=True)]

    def _answers(self, task: ServedTask, result: TaskLogits) -> list[TaskAnswer]:
        """The answers of one task for all images, which are in order."""
        features = [result.features] if self._features else []
        logits, *rest = in_one_copy([result.values, *features])
        of_images: list[Floats | None] = list(rest[0]) if rest else [None] * len(logits)
        scores: list[float | None] = [None] * len(logits)
        if result.ood_scores is not None:
            scores = list(result.ood_scores.tolist())
        return [
            TaskAnswer(task, row, feature, None, score, _problem(row))
            for row, feature, score in zip(logits, of_images, scores, strict=True)
        ]


def _problem(logits: Floats) -> str | None:
    return None if np.isfinite(logits).all() else NOT_FINITE
