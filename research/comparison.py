"""The paper's two other regimes, to compare with: they give results, never bundles.

*Full attention*: memory joins the keys and values of every token, so patches attend to it too.
*Full fine-tuning*: every number of the backbone is learned, and a head.

Both change what the backbone makes of an image. So neither can share its pass with another task,
and gradients go through the whole sequence, where the servable regimes need those of one row.
The recipe and initialisation are those of `engram_training.fitting.variants`, for one label.
"""

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from engram_server.model import Backbone, TaskWeights
from engram_server.model.backbone import ACTIVATIONS, Embedding, Layer, named_tensors
from engram_server.model.kernels.linear import plain
from engram_server.model.tasks import Task, prepare
from engram_training.data.images import ImageSet
from engram_training.data.workspace import OnProgress
from engram_training.fitting.loop import epoch_order
from engram_training.fitting.variants import (
    CLIP_NORM,
    DECAY,
    MOMENTUM,
    Optimiser,
    Variant,
    Variants,
    rate_factor,
)
from engram_training.judging.metrics import Cost, cost_of
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Recipe:
    """How to train one candidate; `seed` is of the order of the images."""

    epochs: int
    batch: int
    rate: float
    seed: int
    optimiser: Optimiser = "SGD"


@dataclass(frozen=True, slots=True)
class Candidate:
    """A model of its own, and which of its numbers are learned."""

    backbone: Backbone
    weights: TaskWeights
    learned: list[Tensor]

    def logits(self, pixels: Tensor) -> Tensor:
        """What it answers to uint8 images (B, H, W, 3): (B, K)."""
        backbone = self.backbone
        view = backbone.preprocessing.normalise(pixels.to(backbone.device), backbone.dtype)
        task = prepare(backbone, self.weights)
        read = final_rows(backbone, view, task)[:, 0].float()
        return F.linear(read, task.head_weight, task.head_bias)


def full_attention(backbone: Backbone, outputs: int, memory: int, seed: int) -> Candidate:
    """Memory for all tokens, class token and head, starting where the masked variant starts."""
    start = Variants(backbone, [Variant("memory", memory, 1.0, seed)], outputs).weights(0)
    learned = [
        tensor.requires_grad_()
        for tensor in (start.head_weight, start.head_bias, start.class_token, start.memory)
        if tensor is not None
    ]
    return Candidate(backbone, start, learned)


def full_fine_tuning(backbone: Backbone, outputs: int) -> Candidate:
    """A copy of the whole backbone and a head; `backbone` itself does not change."""
    start = Variants(backbone, [Variant("head", 0, 1.0, 0)], outputs).weights(0)
    assert start.head_bias is not None
    own, learned = _copied(backbone)
    head = [start.head_weight.requires_grad_(), start.head_bias.requires_grad_()]
    return Candidate(own, start, learned + head)


def final_rows(
    backbone: Backbone, view: Tensor, task: Task, states_of: list[Tensor] | None = None
) -> Tensor:
    """All rows (B, S, D) of normalised images after the final norm, with nothing masked.

    The task's class token takes the place of the backbone's, and every row sees its memory. A task
    with neither leaves the backbone's own pass. Keys and values of each layer, (2, B, H, S, d), are
    added to `states_of`.
    """
    geometry, count = backbone.geometry, len(view)
    rows = backbone.embed_images(view)
    if task.token is not None:
        rows = torch.cat([task.token.expand(count, 1, -1), rows[:, 1:]], dim=1)
    for index, block in enumerate(backbone.blocks):
        normed = F.layer_norm(
            rows, (geometry.width,), block.norm1_weight, block.norm1_bias, geometry.epsilon
        )
        states = F.linear(normed, plain(block.qkv_weight), block.qkv_bias)
        states = states.view(count, geometry.tokens, 3, geometry.heads, geometry.head_width)
        queries, keys, values = states.permute(2, 0, 3, 1, 4)  # (B, H, S, d) each
        if states_of is not None:
            states_of.append(torch.stack([keys, values]))
        if task.memory_keys is not None and task.memory_values is not None:
            keys = torch.cat([keys, task.memory_keys[index].expand(count, -1, -1, -1)], dim=2)
            values = torch.cat([values, task.memory_values[index].expand(count, -1, -1, -1)], dim=2)
        attended = F.scaled_dot_product_attention(queries, keys, values)
        attended = attended.transpose(1, 2).flatten(2)
        rows = rows + F.linear(attended, plain(block.out_weight), block.out_bias)
        normed = F.layer_norm(
            rows, (geometry.width,), block.norm2_weight, block.norm2_bias, geometry.epsilon
        )
        hidden = F.linear(normed, plain(block.up_weight), block.up_bias)
        hidden = ACTIVATIONS[geometry.activation](hidden)
        rows = rows + F.linear(hidden, plain(block.down_weight), block.down_bias)
    return backbone.final_norm(rows)


def train(
    candidate: Candidate,
    images: ImageSet,
    targets: Tensor,
    recipe: Recipe,
    on_progress: OnProgress | None = None,
) -> list[float]:
    """Learns from the views that the server takes, in the loop's order; the loss of every step.

    Where a gradient is not finite, training ends and the candidate stays as it was.
    """
    per_epoch = -(-len(images) // recipe.batch)
    steps = recipe.epochs * per_epoch
    optimiser: torch.optim.Optimizer
    if recipe.optimiser == "SGD":
        optimiser = torch.optim.SGD(candidate.learned, lr=recipe.rate, momentum=MOMENTUM)
    else:
        optimiser = torch.optim.AdamW(candidate.learned, lr=recipe.rate, weight_decay=DECAY)
    losses: list[float] = []
    for step in range(steps):
        epoch, position = divmod(step, per_epoch)
        start = position * recipe.batch
        places = epoch_order(recipe.seed, epoch, len(images))[start : start + recipe.batch]
        labels = targets[places].to(candidate.backbone.device)
        loss = F.cross_entropy(candidate.logits(images.batch(places)), labels)
        optimiser.zero_grad()
        torch.autograd.backward(loss)
        norm = torch.nn.utils.clip_grad_norm_(candidate.learned, CLIP_NORM)
        if not torch.isfinite(norm):
            break
        optimiser.param_groups[0]["lr"] = recipe.rate * rate_factor(step, steps)
        optimiser.step()
        losses.append(float(loss.detach()))
        if on_progress is not None:
            on_progress(step + 1, steps)
    return losses


def predict(candidate: Candidate, images: ImageSet, batch: int) -> Tensor:
    """Logits (n, K) of a set of images."""
    with torch.no_grad():
        parts = [
            candidate.logits(images.batch(range(start, min(start + batch, len(images))))).cpu()
            for start in range(0, len(images), batch)
        ]
    return torch.cat(parts)


def cost_of_candidate(candidate: Candidate) -> Cost:
    """Count as `engram_training.judging.metrics` does; it adds a whole pass."""
    backbone, weights = candidate.backbone, candidate.weights
    shared = cost_of(backbone, weights)
    memory = 0 if weights.memory is None else weights.memory.shape[1]
    geometry = backbone.geometry
    # Every row of every layer attends to the memory's keys and values too.
    attention = 4 * memory * geometry.attention_width * geometry.tokens * geometry.layers
    own_pass = shared.backbone_flops + attention + 2 * weights.head_weight.numel()
    biases = 0 if weights.head_bias is None else weights.head_bias.numel()
    parameters = sum(tensor.numel() for tensor in candidate.learned) - biases
    return Cost(parameters, shared.backbone_flops, own_pass)


def _copied(backbone: Backbone) -> tuple[Backbone, list[Tensor]]:
    """The same backbone in tensors of its own that can be learned, and those."""
    learned: list[Tensor] = []

    def copy(tensor: Tensor) -> Tensor:
        learned.append(tensor.detach().clone().requires_grad_())
        return learned[-1]

    def changes(part: Embedding | Layer) -> dict[str, Tensor]:
        return {name: copy(tensor) for name, tensor in named_tensors(part)}

    assert backbone.final_norm_weight is not None
    assert backbone.final_norm_bias is not None
    own = replace(
        backbone,
        embedding=replace(backbone.embedding, **changes(backbone.embedding)),
        blocks=tuple(replace(block, **changes(block)) for block in backbone.blocks),
        final_norm_weight=copy(backbone.final_norm_weight),
        final_norm_bias=copy(backbone.final_norm_bias),
    )
    return own, learned
