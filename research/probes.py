"""Logistic regression on the features of an embedding API, which the study compares with."""

from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

Head = Callable[[Tensor], Tensor]
STRENGTHS = (1e-3, 1e-2, 1e-1, 1.0, 10.0, 100.0, 1000.0)


def logistic_regression(
    features: Tensor, targets: Tensor, classes: int
) -> Iterator[tuple[str, Head]]:
    """On standardised features, for every strength of the penalty."""
    mean, spread = features.mean(dim=0), features.std(dim=0).clamp(min=1e-6)
    rows = (features - mean) / spread
    for strength in STRENGTHS:
        weight, bias = _fit_logistic(rows, targets, classes, strength)
        yield f"penalty {strength:g}", _linear(weight, bias, mean, spread)


def _fit_logistic(
    rows: Tensor, targets: Tensor, classes: int, strength: float
) -> tuple[Tensor, Tensor]:
    weight = torch.zeros(classes, rows.shape[1], requires_grad=True)
    bias = torch.zeros(classes, requires_grad=True)
    optimiser = torch.optim.LBFGS([weight, bias], max_iter=200, line_search_fn="strong_wolfe")

    def closure() -> float:
        optimiser.zero_grad()
        penalty = 0.5 * strength * weight.square().sum() / len(rows)
        value = F.cross_entropy(F.linear(rows, weight, bias), targets) + penalty
        torch.autograd.backward(value)
        return float(value.detach())

    optimiser.step(closure)  # type: ignore[no-untyped-call]  # torch has no types here
    return weight.detach(), bias.detach()


def _linear(
    weight: Tensor, bias: Tensor, mean: Tensor | float = 0.0, spread: Tensor | float = 1.0
) -> Head:
    return lambda new: F.linear((new - mean) / spread, weight, bias)
