"""What a user does without us, tuned as well as ours: heads on features that are already there."""

from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from engram_training.fitting.loop import epoch_order
from engram_training.fitting.variants import CLIP_NORM, rate_factor
from torch import Tensor, nn

Head = Callable[[Tensor], Tensor]
STRENGTHS = (1e-3, 1e-2, 1e-1, 1.0, 10.0, 100.0, 1000.0)
SHRINKAGES = (0.003, 0.01, 0.03, 0.1, 0.3, 0.6)
QUERIES, HEADS = 8, 4


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


def discriminant(features: Tensor, targets: Tensor, classes: int) -> Iterator[tuple[str, Head]]:
    """Linear discriminant analysis, the spread within classes drawn towards a sphere."""
    rows = features.double()
    means = torch.stack([rows[targets == label].mean(dim=0) for label in range(classes)])
    apart = rows - means[targets]
    spread = apart.T @ apart / len(rows)
    ball = torch.eye(len(spread), dtype=spread.dtype) * spread.trace() / len(spread)
    for shrinkage in SHRINKAGES:
        weight = torch.linalg.solve((1 - shrinkage) * spread + shrinkage * ball, means.T).T
        bias = -0.5 * (weight * means).sum(dim=1)
        yield f"shrinkage {shrinkage:g}", _linear(weight.float(), bias.float())


class AttentiveProbe(nn.Module):
    """Some learned queries attend to all final tokens of an image; a head reads their outputs."""

    def __init__(self, width: int, classes: int, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.norm = nn.LayerNorm(width)
        self.queries = nn.Parameter(0.02 * torch.randn(QUERIES, width))
        self.attention = nn.MultiheadAttention(width, HEADS, batch_first=True)
        self.head = nn.Linear(QUERIES * width, classes)

    def forward(self, tokens: Tensor) -> Tensor:
        rows = self.norm(tokens.float())
        queries = self.queries.expand(len(rows), -1, -1)
        outputs, _ = self.attention(queries, rows, rows, need_weights=False)
        logits: Tensor = self.head(outputs.flatten(1))
        return logits

    def learn(
        self, tokens: Tensor, targets: Tensor, rate: float, epochs: int, batch: int, seed: int
    ) -> None:
        optimiser = torch.optim.AdamW(self.parameters(), lr=rate, weight_decay=0.01)
        per_epoch = -(-len(tokens) // batch)
        for step in range(epochs * per_epoch):
            epoch, position = divmod(step, per_epoch)
            order = epoch_order(seed, epoch, len(tokens))
            places = order[position * batch : (position + 1) * batch]
            optimiser.zero_grad()
            torch.autograd.backward(F.cross_entropy(self(tokens[places]), targets[places]))
            nn.utils.clip_grad_norm_(self.parameters(), CLIP_NORM)
            optimiser.param_groups[0]["lr"] = rate * rate_factor(step, epochs * per_epoch)
            optimiser.step()

    @torch.no_grad()
    def answer(self, tokens: Tensor) -> Tensor:
        return torch.cat([self(part) for part in torch.split(tokens, 256)])
