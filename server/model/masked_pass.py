"""The masked pass: every task asked of every image, in one run through the backbone.

Rows of all tokens, `[base rows of all cold images | task rows of all (image, task) pairs]`, are one
matrix through LayerNorm, QKV, projection and MLP. Only attention tells them apart: base rows attend
to the base rows of their image and to nothing else, so they run the plain fused kernel; a task row
attends to the base rows of its image, to itself and its ancestors, and to own and inherited memory.
No mask over the whole sequence is ever built.

Shapes: B images, S base rows of an image, R task rows, D width, H heads of width d, L layers,
T tasks of the stack, M memory tokens, A lineage (a task and its ancestors).
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

from server.model.attention import TaskAttention, class_weights, over_patches
from server.model.backbone import ACTIVATIONS, Backbone, Layer
from server.model.context import ContextBatch
from server.model.linear import linear
from server.model.rows import Grouping, RowPlan
from server.model.tasks import StackCache, Task, TaskStack


@dataclass(frozen=True, slots=True)
class TaskLogits:
    """One task's answers in a pass: row i of `values` is about image `images[i]`."""

    task: Task
    images: list[int]
    values: Tensor  # (n, K) float32
    features: Tensor  # (n, D) float32: what the head read


@dataclass(frozen=True, slots=True)
class PassResult:
    logits: list[TaskLogits]
    contexts: ContextBatch | None  # of the cold images, if asked for
    attention: Sequence[TaskAttention] = ()  # of the pairs to be explained


def masked_pass(
    backbone: Backbone,
    pixels: Tensor | None,
    warm: ContextBatch | None,
    wanted: Sequence[Sequence[Task]],
    stacks: StackCache,
    *,
    keep_contexts: bool = False,
    compiled: bool = False,
    explain: Sequence[Sequence[Task]] | None = None,
) -> PassResult:
    """Answers `wanted[i]`, the distinct tasks asked of image i: cold images first, then warm ones.

    `pixels` are the normalised cold images (B, 3, H, W). Gradients flow to tasks that require them,
    never to the backbone. `compiled` runs the MLPs, most of the work, through torch.compile.
    `explain[i]`, some of `wanted[i]`, also tell where in image i they looked.
    """
    cold = 0 if pixels is None else len(pixels)
    stack = stacks.stack_of(task for tasks in wanted for task in tasks)
    training = stack is not None and stack.requires_grad and torch.is_grad_enabled()
    if pixels is not None and training:
        # The base rows need no gradient: run them apart, and the task rows on their context.
        with torch.no_grad():
            alone = masked_pass(backbone, pixels, None, [[]] * cold, stacks, keep_contexts=True)
        contexts = alone.contexts
        joined = contexts if warm is None or contexts is None else contexts.join(warm)
        result = masked_pass(backbone, None, joined, wanted, stacks, explain=explain)
        return replace(result, contexts=contexts if keep_contexts else None)

    task_rows = None
    if stack is not None:
        plan = RowPlan.of(stack, wanted, cold, backbone.device, backbone.dtype)
        task_rows = _TaskRows(backbone, stack, plan, warm, explain is not None)
    reading = keep_contexts or any(task.token is None for tasks in wanted[:cold] for task in tasks)
    base = pixels if pixels is not None and (reading or task_rows is not None) else None
    layers = _Layers(backbone, task_rows, keep_contexts, reading, compiled)
    final_base, final_tasks = layers.run(base)

    readouts = []
    if base is not None and reading:
        readouts.append(_readout(backbone, final_base.view(cold, -1, backbone.width)))
    elif cold:
        # Nobody reads the cold images' own rows; the place keeps image numbers right.
        readouts.append(final_base.new_zeros(cold, len(backbone.readout) * backbone.width).float())
    contexts = None
    if keep_contexts and base is not None:
        contexts = ContextBatch(tuple(layers.states), readouts[0], layers.class_queries)
    if warm is not None:
        readouts.append(warm.readout)
    logits = _read_heads(wanted, torch.cat(readouts) if readouts else None)
    if task_rows is not None:
        logits += _task_heads(backbone, task_rows, final_tasks, wanted)
    attention = [] if explain is None else _explained(backbone, layers, task_rows, warm, explain)
    return PassResult(logits, contexts, attention)


class _Layers:
    """The layers of one pass over its rows."""

    def __init__(
        self,
        backbone: Backbone,
        task_rows: "_TaskRows | None",
        keep_contexts: bool,
        reading: bool,
        compiled: bool,
    ) -> None:
        self._backbone = backbone
        self._geometry = backbone.geometry
        self._task_rows = task_rows
        self._keep_contexts = keep_contexts
        self._finished_rows = backbone.readout_rows if reading else 0
        self._feed_forward = _compiled_feed_forward() if compiled else _feed_forward
        self.states: list[Tensor] = []  # per layer (2, B, H, S, d), if contexts are kept
        # Of the last layer, for explaining tasks that read the backbone's own class token.
        self.class_queries: Tensor | None = None  # (B, H, d), where that token is finished
        self.last_keys: Tensor | None = None  # (B, H, S, d)

    def run(self, pixels: Tensor | None) -> tuple[Tensor, Tensor]:
        """Final rows: base rows (B · finished, D) and task rows (R, D)."""
        images = 0 if pixels is None else len(pixels)
        parts = [] if pixels is None else [self._backbone.embed_images(pixels).flatten(0, 1)]
        if self._task_rows is not None:
            parts.append(self._task_rows.first())
        if not parts:
            nothing = self._backbone.final_norm_weight.new_empty(0, self._geometry.width)
            return nothing, nothing
        rows = _joined(parts)
        last = self._geometry.layers - 1
        for index, block in enumerate(self._backbone.blocks):
            # Of the last layer only class tokens are read: other base rows give keys and values.
            finished = self._finished_rows if index == last else self._geometry.tokens
            rows = self._layer(index, block, rows, images, finished)
        split = images * self._finished_rows
        return rows[:split], rows[split:]

    def _layer(self, index: int, block: Layer, rows: Tensor, images: int, finished: int) -> Tensor:
        geometry = self._geometry
        normed = F.layer_norm(
            rows, (geometry.width,), block.norm1_weight, block.norm1_bias, geometry.epsilon
        )
        queries, keys, values = self._states(block, normed, images, finished)  # (rows, H, d) each
        split, kept = images * geometry.tokens, images * finished
        by_image = (images, geometry.tokens, *keys.shape[1:])
        base_keys = keys[:split].view(by_image).transpose(1, 2)  # (B, H, S, d)
        base_values = values[:split].view(by_image).transpose(1, 2)
        if self._keep_contexts and images:
            self.states.append(torch.stack([base_keys, base_values]))

        attended = []
        if kept:
            base_queries = queries[:kept].view(images, finished, *queries.shape[1:])
            if index == geometry.layers - 1:
                self.class_queries, self.last_keys = base_queries[:, 0], base_keys
            base = F.scaled_dot_product_attention(
                base_queries.transpose(1, 2), base_keys, base_values
            )
            attended.append(base.transpose(1, 2).reshape(kept, -1))
        if self._task_rows is not None:
            own = queries[kept:], keys[split:], values[split:]
            attended.append(self._task_rows.attend(index, *own, base_keys, base_values))
        if not attended:
            return rows[:0]
        rows = _drop_unfinished(rows, images, geometry.tokens, finished)
        rows = rows + linear(_joined(attended), block.out_weight, block.out_bias)
        return self._feed_forward(
            rows,
            block.norm2_weight,
            block.norm2_bias,
            block.up_weight,
            block.up_bias,
            block.down_weight,
            block.down_bias,
            geometry.activation,
            geometry.epsilon,
        )

    def _states(
        self, block: Layer, normed: Tensor, images: int, finished: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Keys and values of all rows, queries of those that go on, (rows, H, d) each."""
        heads, width = self._geometry.heads, self._geometry.head_width
        if not images or finished == self._geometry.tokens:
            states = linear(normed, block.qkv_weight, block.qkv_bias)
            queries, keys, values = states.view(len(normed), 3, heads, width).unbind(1)
            return queries, keys, values
        inner = heads * width
        states = linear(normed, block.qkv_weight[inner:], block.qkv_bias[inner:])
        keys, values = states.view(len(normed), 2, heads, width).unbind(1)
        going_on = _drop_unfinished(normed, images, self._geometry.tokens, finished)
        queries = linear(going_on, block.qkv_weight[:inner], block.qkv_bias[:inner])
        return queries.view(len(going_on), heads, width), keys, values


class _TaskRows:
    """The rows of (image, task) pairs, and what each of them attends to."""

    def __init__(
        self,
        backbone: Backbone,
        stack: TaskStack,
        plan: RowPlan,
        warm: ContextBatch | None,
        explain: bool,
    ) -> None:
        self.stack = stack
        self.plan = plan
        self._warm = warm
        self._scale = backbone.geometry.head_width**-0.5
        self._explained_layer = backbone.layers - 1 if explain else None
        self.weights: Tensor | None = None  # (R, H, S) on the images' rows, in that layer
        self._memory_bias: Tensor | None = None
        if stack.memory_bias is not None:
            self._memory_bias = stack.memory_bias.index_select(0, plan.task_of_row)  # (R, 1, M)

    def first(self) -> Tensor:
        """The rows that enter the first layer, (R, D)."""
        return self.stack.tokens.index_select(0, self.plan.task_of_row)

    def pick(self, rows: Tensor, wanted: Mapping[Task, list[int]]) -> Iterator[Tensor]:
        """Of `rows` (R, …) those of each task and its images, in turn."""
        pairs = zip(self.plan.images.tolist(), self.plan.tasks.tolist(), strict=True)
        row_of = {pair: row for row, pair in enumerate(pairs)}
        for task, images in wanted.items():
            place = self.stack.place(task)
            own = [row_of[image, place] for image in images]
            yield rows[torch.tensor(own, device=rows.device)]

    def attend(
        self,
        index: int,
        queries: Tensor,
        keys: Tensor,
        values: Tensor,
        base_keys: Tensor,
        base_values: Tensor,
    ) -> Tensor:
        """What the rows take from layer `index`, (R, I); their own states are (R, H, d) each."""
        plan, stack = self.plan, self.stack
        queries = queries * self._scale
        own_keys, own_values = keys[:, None], values[:, None]  # (R, A, H, d)
        if plan.lineage is not None:
            own_keys, own_values = keys[plan.lineage], values[plan.lineage]
        images = self._image_groups(index, base_keys, base_values)

        scores = [_joined([_scores(queries[rows], group, k) for rows, group, k, _ in images])]
        own = (queries[:, None] * own_keys).sum(dim=-1).transpose(1, 2)  # (R, H, A)
        scores.append(own if plan.lineage_bias is None else own + plan.lineage_bias)
        if stack.memory_keys is not None:
            memory = _scores(queries, plan.by_task, stack.memory_keys[index])
            scores.append(memory if self._memory_bias is None else memory + self._memory_bias)

        # One softmax over everything a row may see; in float32 whatever the precision of the rows.
        weights = torch.softmax(torch.cat(scores, dim=-1), dim=-1, dtype=torch.float32)
        sizes = [part.shape[-1] for part in scores]
        parts = torch.split_with_sizes(weights.to(queries.dtype), sizes, dim=-1)
        if index == self._explained_layer:
            self.weights = weights[..., : sizes[0]]

        taken = _joined([_weighted(parts[0][rows], group, v) for rows, group, _, v in images])
        taken = taken + (parts[1].transpose(1, 2)[..., None] * own_values).sum(dim=1)
        if stack.memory_values is not None:
            taken = taken + _weighted(parts[2], plan.by_task, stack.memory_values[index])
        return taken.flatten(1)

    def _image_groups(
        self, index: int, base_keys: Tensor, base_values: Tensor
    ) -> list[tuple[slice, Grouping, Tensor, Tensor]]:
        """Rows of cold images with the keys and values just made, of warm ones with theirs."""
        plan = self.plan
        groups = []
        if plan.cold_rows:
            groups.append((slice(0, plan.cold_rows), plan.cold, base_keys, base_values))
        if self._warm is not None and plan.cold_rows < len(plan.images):
            keys, values = self._warm.states[index]
            groups.append((slice(plan.cold_rows, len(plan.images)), plan.warm, keys, values))
        return groups


def _scores(queries: Tensor, group: Grouping, keys: Tensor) -> Tensor:
    """(R, H, d) rows in groups against each group's keys (groups, H, S, d): (R, H, S)."""
    padded = group.pad(queries).transpose(1, 2)  # (groups, H, width, d)
    return group.unpad((padded @ keys.transpose(2, 3)).transpose(1, 2))


def _weighted(weights: Tensor, group: Grouping, values: Tensor) -> Tensor:
    """(R, H, S) weights in groups over each group's values (groups, H, S, d): (R, H, d)."""
    padded = group.pad(weights).transpose(1, 2)  # (groups, H, width, S)
    return group.unpad((padded @ values).transpose(1, 2))


def _joined(parts: list[Tensor]) -> Tensor:
    """Concatenated, without a copy where there is nothing to concatenate."""
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _feed_forward(
    rows: Tensor,
    norm_weight: Tensor,
    norm_bias: Tensor,
    up_weight: Tensor,
    up_bias: Tensor,
    down_weight: Tensor,
    down_bias: Tensor,
    activation: str,
    epsilon: float,
) -> Tensor:
    """The second half of a block. Plain tensors, so that one compilation serves all layers."""
    normed = F.layer_norm(rows, rows.shape[-1:], norm_weight, norm_bias, epsilon)
    hidden = ACTIVATIONS[activation](linear(normed, up_weight, up_bias))
    return rows + linear(hidden, down_weight, down_bias)


@cache
def _compiled_feed_forward() -> Callable[..., Tensor]:
    return torch.compile(_feed_forward, dynamic=True)


def _drop_unfinished(rows: Tensor, images: int, tokens: int, finished: int) -> Tensor:
    """Keeps the first `finished` base rows of every image, and all task rows."""
    if not images or finished == tokens:
        return rows
    base, tasks = rows[: images * tokens], rows[images * tokens :]
    kept = base.view(images, tokens, -1)[:, :finished].flatten(0, 1)
    return torch.cat([kept, tasks])


def _readout(backbone: Backbone, rows: Tensor) -> Tensor:
    """Finished base rows (B, n, D) to what `base` and head-only tasks read, (B, parts · D)."""
    normed = backbone.final_norm(rows).float()
    read = {"class": lambda: normed[:, 0], "distillation": lambda: normed[:, 1]}
    read["patches"] = lambda: normed[:, backbone.geometry.prefix_tokens :].mean(dim=1)
    return torch.cat([read[part]() for part in backbone.readout], dim=1)


def _read_heads(wanted: Sequence[Sequence[Task]], readouts: Tensor | None) -> list[TaskLogits]:
    """Tasks without a row: their heads read the images' readouts."""
    images_of = _images_of(wanted, with_rows=False)
    results = []
    for task, images in images_of.items():
        assert readouts is not None
        # `base` reads all parts; a head-only task reads the class token, which comes first.
        rows = readouts[images, : task.head_weight.shape[1]]
        values = F.linear(rows, task.head_weight, task.head_bias)
        results.append(TaskLogits(task, images, values, rows))
    return results


def _task_heads(
    backbone: Backbone,
    task_rows: _TaskRows,
    final: Tensor,
    wanted: Sequence[Sequence[Task]],
) -> list[TaskLogits]:
    """Each task's head on its rows; ancestors that nobody asked for have rows but no answer."""
    final = backbone.final_norm(final).float()
    images_of = _images_of(wanted, with_rows=True)
    results = []
    for (task, images), own in zip(
        images_of.items(), task_rows.pick(final, images_of), strict=True
    ):
        values = F.linear(own, task.head_weight, task.head_bias)
        results.append(TaskLogits(task, images, values, own))
    return results


def _explained(
    backbone: Backbone,
    layers: _Layers,
    task_rows: _TaskRows | None,
    warm: ContextBatch | None,
    explain: Sequence[Sequence[Task]],
) -> list[TaskAttention]:
    """Where tasks looked: by their own rows, or by the class token of the backbone they read."""
    geometry = backbone.geometry
    results = []
    images_of = _images_of(explain, with_rows=True)
    if task_rows is not None and task_rows.weights is not None:
        rows = task_rows.pick(task_rows.weights, images_of)
        for (task, images), own in zip(images_of.items(), rows, strict=True):
            results.append(TaskAttention(task, images, over_patches(own, geometry)))
    images_of = _images_of(explain, with_rows=False)
    if images_of:
        places = {
            image: place for place, image in enumerate(sorted(set().union(*images_of.values())))
        }
        weights = _class_weights(layers, warm, list(places), len(explain))
        grids = over_patches(weights, geometry)
        for task, images in images_of.items():
            own = grids[[places[image] for image in images]]
            results.append(TaskAttention(task, images, own))
    return results


def _class_weights(
    layers: _Layers, warm: ContextBatch | None, images: list[int], count: int
) -> Tensor:
    """What the backbone's class token gave the base rows of some of `count` images, (n, H, S)."""
    cold = count - (0 if warm is None else len(warm))
    of_cold = [image for image in images if image < cold]
    of_warm = [image - cold for image in images if image >= cold]
    parts = []
    if of_cold:
        assert layers.class_queries is not None, "a pass finishes the class tokens that are read"
        assert layers.last_keys is not None
        parts.append(class_weights(layers.class_queries[of_cold], layers.last_keys[of_cold]))
    if of_warm:
        assert warm is not None
        assert warm.class_query is not None, "these contexts were made without the class query"
        parts.append(class_weights(warm.class_query[of_warm], warm.states[-1][0, of_warm]))
    return _joined(parts)


def _images_of(wanted: Sequence[Sequence[Task]], *, with_rows: bool) -> dict[Task, list[int]]:
    """Who asks for each task, of those with a row of their own or of those without."""
    images_of: dict[Task, list[int]] = {}
    for image, tasks in enumerate(wanted):
        for task in tasks:
            if (task.token is not None) == with_rows:
                images_of.setdefault(task, []).append(image)
    return images_of
