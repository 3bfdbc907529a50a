"""From what a request wants to tasks, and from the engine's answers to output tensors."""

from collections import Counter
from collections.abc import Sequence

import numpy as np

from server.api.errors import InvalidRequest
from server.api.v2.schemas import InferRequest, OutputParameters
from server.api.v2.tensors import OutputTensor
from server.engine.scores import best, scores
from server.engine.types import PredictAnswer, TaskAnswer

SCORES = "scores"


def check_outputs(asked: InferRequest, ref: str | None) -> list[str] | None:
    """The task references to ask, None for every ready task; InvalidRequest for a wrong output.

    `ref` is the task that is asked as a model, None where the outputs are the tasks.
    """
    outputs = asked.outputs or []
    names = [each.name for each in outputs]
    for name, times in Counter(names).most_common(1):
        if times > 1:
            raise InvalidRequest(f"Output '{name}' is requested more than once.")
    for each in outputs:
        if each.parameters.shared_memory_region is not None:
            raise InvalidRequest(
                f"Output '{each.name}' is wanted in shared memory, which is not written here."
            )
        if ref is not None and each.name != SCORES:
            raise InvalidRequest(
                f"Model '{ref}' has no output '{each.name}': its only one is '{SCORES}'."
            )
    if ref is not None:
        return [ref]
    return names or None


def write_outputs(
    asked: InferRequest, answer: PredictAnswer, ref: str | None
) -> list[OutputTensor]:
    """The outputs, in the order asked for."""
    wanted = {each.name: each.parameters for each in asked.outputs or []}
    unsaid = OutputParameters()
    by_default = asked.parameters.binary_data_output
    found: list[OutputTensor] = []
    for task in answer.images[0].tasks:
        name = task if ref is None else SCORES
        how = wanted.get(name, unsaid)
        binary = by_default if how.binary_data is None else how.binary_data
        answers = [image.tasks[task] for image in answer.images]
        found.append(_tensor(name, answers, binary=binary, classes=how.classification))
    return found


def check_finite(answer: PredictAnswer) -> None:
    """InvalidRequest if the pixel values were too large to compute with."""
    for number, image in enumerate(answer.images):
        for ref, task in image.tasks.items():
            if not np.isfinite(task.logits).all():
                raise InvalidRequest(
                    f"The pixel values of image {number} are too large for the backbone: task "
                    f"'{ref}' has no finite answer. They must be normalised."
                )


def _tensor(
    name: str, answers: Sequence[TaskAnswer], *, binary: bool, classes: int
) -> OutputTensor:
    served = answers[0].served
    parameters = {} if served.version is None else {"version": str(served.version)}
    if classes == 0:
        values = np.stack([scores(each) for each in answers])
        return OutputTensor(name, values, binary, parameters)
    if served.problem not in ("single_label", "multi_label"):
        raise InvalidRequest(
            f"Output '{name}' is of a {served.problem} task, which has no labels to classify by: "
            f"leave 'classification' out."
        )
    texts = [
        [f"{each.score:.7g}:{each.index}:{each.label}" for each in best(answer, classes)]
        for answer in answers
    ]
    return OutputTensor(name, texts, binary, parameters)
