"""One batch of images to answers, on one device."""

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch

from engram_server.batch.images import Inputs
from engram_server.engine.types import EngineConfig, Floats, ServedTask, TaskAnswer
from engram_server.engine.worker import NOT_FINITE, in_one_copy
from engram_server.errors import BatchFailed
from engram_server.model.backbone import Backbone
from engram_server.model.context import ContextBatch
from engram_server.model.masked_pass import PassResult, TaskLogits, masked_pass
from engram_server.model.tasks import StackCache, Task, readout_task
from engram_server.parts.keeping import KeptTensors, kept_tensors
from engram_server.parts.kept import Level


class PassAnswers(NamedTuple):
    answers: list[list[TaskAnswer]]  # of all tasks, in their order, for each image
    kept: KeptTensors | None


class DevicePass:
    """Runs tasks on one device. Not thread-safe."""

    def __init__(
        self, backbone: Backbone, config: EngineConfig, *, features: bool, keep: Level | None
    ) -> None:
        self._backbone = replace(backbone, compiled=config.compiled)
        self._features = features
        self._keep = keep
        self._reader = None if keep is None else _reader(backbone, keep)
        self._stacks = StackCache()

    def __call__(self, tasks: Sequence[ServedTask], inputs: Inputs) -> PassAnswers:
        """Answer all tasks for pixels, or for what was kept of images."""
        device = self._backbone.device
        by_task = {task.on[device]: task for task in tasks}  # two references may be one task
        result = self._run([*by_task, *([] if self._reader is None else [self._reader])], inputs)
        found = {
            each.task: self._answers(by_task[each.task], each)
            for each in result.logits
            if each.task in by_task
        }
        columns = [
            [replace(answer, served=task) for answer in found[task.on[device]]] for task in tasks
        ]
        answers = [list(row) for row in zip(*columns, strict=True)] or [
            [] for _ in range(len(inputs))
        ]
        return PassAnswers(answers, self._kept(result))

    def _run(self, requested: list[Task], inputs: Inputs) -> PassResult:
        device, pixels, warm = self._backbone.device, None, None
        if isinstance(inputs, ContextBatch):
            states = tuple(layer.to(device) for layer in inputs.states)
            warm = ContextBatch(states, inputs.readout.to(device))
        else:
            pixels = torch.from_numpy(np.stack(inputs)).to(device)
        try:
            with torch.inference_mode():
                return masked_pass(
                    self._backbone,
                    pixels,
                    warm,
                    [requested] * len(inputs),
                    self._stacks,
                    keep_contexts=self._keep == "contexts",
                )
        except torch.OutOfMemoryError as error:
            raise BatchFailed(
                f"{device} ran out of memory with a batch of {len(inputs)} images. Set "
                f"ENGRAM_BUDGET_ROWS to a smaller number and run the same command again."
            ) from error

    def _kept(self, result: PassResult) -> KeptTensors | None:
        if self._reader is None or result.readout is None:
            return None
        states = () if result.contexts is None else result.contexts.states
        width = self._reader.head_weight.shape[1]
        return kept_tensors(ContextBatch(states, result.readout.values[:, :width]))

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


def _reader(backbone: Backbone, level: Level) -> Task:
    """Return a task whose features are all that is kept of the final rows and the layers."""
    if level != "embeddings":
        return readout_task(backbone)
    width = len(backbone.readout) * backbone.width
    return Task(torch.zeros(1, width, device=backbone.device), None)


def _problem(logits: Floats) -> str | None:
    return None if np.isfinite(logits).all() else NOT_FINITE
