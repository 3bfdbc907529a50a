"""Scores that are as sure as they are right: one temperature, folded into the head."""

from dataclasses import replace

import numpy as np
from torch import Tensor

from server.model import TaskWeights, closed_form
from training.data.dataset import Problem


def fit_temperature(logits: Tensor, targets: Tensor, problem: Problem) -> float:
    """What to divide logits by, from images that the head was not trained on.

    Of several labels each is an answer of its own, of two classes: it is there or not.
    """
    values = logits.double().numpy()
    if problem == "single_label":
        return closed_form.fit_temperature(values, targets.numpy())
    flat = values.reshape(-1)
    there = targets.numpy().reshape(-1).astype(np.int64)
    return closed_form.fit_temperature(np.stack([np.zeros_like(flat), flat], axis=1), there)


def tempered(weights: TaskWeights, temperature: float) -> TaskWeights:
    """The head with its logits divided; it stays an ordinary head."""
    bias = weights.head_bias
    return replace(
        weights,
        head_weight=weights.head_weight / temperature,
        head_bias=None if bias is None else bias / temperature,
    )
