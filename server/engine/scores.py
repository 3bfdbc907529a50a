"""Logits into what people read: scores by the kind of problem, and the best labels."""

from dataclasses import dataclass

import numpy as np

from server.engine.types import Floats, TaskAnswer


@dataclass(frozen=True, slots=True)
class Prediction:
    label: str
    index: int
    score: float


def scores(answer: TaskAnswer) -> Floats:
    """Probabilities for labels (softmax, or one sigmoid each); other outputs are as they are."""
    logits = answer.logits
    if answer.served.problem == "single_label":
        shifted = np.exp(logits - logits.max())
        distribution: Floats = shifted / shifted.sum()
        return distribution
    if answer.served.problem == "multi_label":
        # Written with tanh so that large logits overflow nothing.
        halves: Floats = np.tanh(0.5 * logits)
        return 0.5 * (1.0 + halves)
    return logits


def label_of(answer: TaskAnswer, index: int) -> str:
    labels = answer.served.labels
    return labels[index] if index < len(labels) else str(index)


def best(answer: TaskAnswer, top_k: int, threshold: float | None = None) -> list[Prediction]:
    """The `top_k` highest scores, best first; with a threshold, of those only the ones above it."""
    values = scores(answer)
    count = min(top_k, len(values))
    if count < len(values):
        order = np.argpartition(-values, count - 1)[:count]
    else:
        order = np.arange(len(values))
    # Ties go to the lower index, so that equal answers read equally.
    order = order[np.lexsort((order, -values[order]))]
    return [
        Prediction(label_of(answer, int(index)), int(index), float(values[index]))
        for index in order
        if threshold is None or values[index] >= threshold
    ]
