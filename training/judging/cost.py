"""What a task costs, counted as the paper's Table 5 does."""

from dataclasses import dataclass

from server.model import Backbone, TaskWeights


@dataclass(frozen=True, slots=True)
class Cost:
    """Of one task on one backbone. A multiplication with its addition is two FLOPs."""

    parameters: int
    backbone_flops: int  # of an image, whatever the tasks
    task_flops: int  # added by this task

    @property
    def share(self) -> float:
        """Of the backbone's own pass, what the task adds."""
        return self.task_flops / self.backbone_flops


def cost_of(backbone: Backbone, weights: TaskWeights) -> Cost:
    """Parameters are D·L·m + D + D·K, as Table 5 counts, without the K biases; and an adapter's."""
    layers, width = backbone.layers, backbone.width
    outputs = weights.head_weight.shape[0]
    memory = 0 if weights.memory is None else weights.memory.shape[1]
    has_row = weights.class_token is not None
    adapter = sum(a.numel() + b.numel() for a, b in weights.adapter.values())
    parameters = layers * width * memory + width * has_row + width * outputs + adapter
    tokens = backbone.geometry.tokens
    embedding = 2 * backbone.geometry.patches * backbone.embedding.patch_weight.numel()
    trunk = embedding + layers * tokens * _row_flops(backbone, tokens)
    row = layers * _row_flops(backbone, tokens + 1 + memory) if has_row else 0
    # Each value of an adapter is multiplied once with the task's only row.
    return Cost(parameters, trunk, row + 2 * adapter + 2 * width * outputs)


def _row_flops(backbone: Backbone, keys: int) -> int:
    """One row through one layer, attending to so many keys."""
    block = backbone.blocks[0]
    matrices = (block.qkv_weight, block.out_weight, block.up_weight, block.down_weight)
    products = sum(matrix.shape.numel() for matrix in matrices)
    return 2 * products + 4 * keys * backbone.geometry.attention_width
